from pathlib import Path

import pytest

from shoal.engine.fit import check_memory, parse_bytes
from shoal.engine.machine import (
    FreeMemory,
    OutOfMemoryKills,
    available_cores,
    available_memory_bytes,
    free_memory,
    out_of_memory_kills,
)
from shoal.spec.errors import UserError

MB = 1 << 20


def lay(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_without_limits_affinity_counts(tmp_path: Path) -> None:
    assert available_cores(str(tmp_path), affinity=6) == 6
    assert available_cores() >= 1


@pytest.mark.parametrize(("quota", "cores"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 6)])
def test_a_quota_of_cgroup_v2_counts(tmp_path: Path, quota: str, cores: int) -> None:
    root = lay(tmp_path, {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": quota})
    assert available_cores(root, affinity=6) == cores


def test_a_quota_of_a_parent_counts_too(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
    }
    assert available_cores(lay(tmp_path, files), affinity=6) == 3


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_a_quota_of_cgroup_v1_counts(tmp_path: Path, mount: str) -> None:
    folder = f"sys/fs/cgroup/{mount}/docker/x"
    files = {
        "proc/self/cgroup": f"4:memory:/m\n3:{mount}:/docker/x\n",
        f"{folder}/cpu.cfs_quota_us": "200000",
        f"{folder}/cpu.cfs_period_us": "100000",
    }
    assert available_cores(lay(tmp_path, files), affinity=6) == 2


def test_inside_a_container_the_path_of_the_host_is_not_there(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/docker/0123\n", "sys/fs/cgroup/cpu.max": "100000 100000"}
    assert available_cores(lay(tmp_path, files), affinity=6) == 1


def test_memory_is_the_least_of_all_limits(tmp_path: Path) -> None:
    files = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:  {8 * 1024} kB\n", "proc/self/cgroup": "0::/a\n"}
    assert available_memory_bytes(lay(tmp_path, files)) == 8 * MB
    files = {
        "sys/fs/cgroup/a/memory.max": str(5 * MB),
        "sys/fs/cgroup/a/memory.current": str(3 * MB),
        "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {MB}\n",
    }
    assert available_memory_bytes(lay(tmp_path, files)) == 3 * MB


def test_memory_of_cgroup_v1(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/a"
    files = {
        "proc/self/cgroup": "4:memory:/a\n",
        f"{folder}/memory.limit_in_bytes": str(4 * MB),
        f"{folder}/memory.usage_in_bytes": str(3 * MB),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(3 * MB),
    }
    assert available_memory_bytes(lay(tmp_path, files)) == MB


def test_memory_may_be_unknown(tmp_path: Path) -> None:
    assert available_memory_bytes(str(tmp_path)) is None
    assert (available_memory_bytes() or 0) > 0


def test_workers_of_a_machine_share_what_is_free(tmp_path: Path) -> None:
    assert free_memory(2, str(tmp_path), ()) is None
    root = lay(tmp_path, {"proc/meminfo": f"MemAvailable:  {8 * 1024} kB\n", "proc/self/cgroup": "0::/a\n"})
    assert free_memory(2, root, ()) == FreeMemory(num_bytes=4 * MB, limited_by="machine")
    lay(tmp_path, {"sys/fs/cgroup/a/memory.max": str(5 * MB), "sys/fs/cgroup/a/memory.current": str(3 * MB)})
    assert free_memory(2, root, ()) == FreeMemory(num_bytes=MB, limited_by="cgroup")


def test_a_limit_of_each_process_is_not_shared(tmp_path: Path) -> None:
    files = {"proc/meminfo": f"MemAvailable:  {8 * 1024} kB\n", "proc/self/status": f"VmSize:  {2 * 1024} kB\n"}
    root = lay(tmp_path, files)
    assert free_memory(2, root, [("VmSize:", 5 * MB)]) == FreeMemory(num_bytes=3 * MB, limited_by="ulimit")
    assert free_memory(2, root, [("VmSize:", MB)]) == FreeMemory(num_bytes=0, limited_by="ulimit")
    assert free_memory(2, root, [("VmSize:", 9 * MB)]) == FreeMemory(num_bytes=4 * MB, limited_by="machine")


def test_kills_for_lack_of_memory_are_counted(tmp_path: Path) -> None:
    assert out_of_memory_kills(str(tmp_path)) == OutOfMemoryKills()
    files = {
        "proc/self/cgroup": "4:memory:/a\n0::/b\n",
        "proc/vmstat": "pgfault 1\noom_kill 7\n",
        "sys/fs/cgroup/memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        "sys/fs/cgroup/unified/b/memory.events": "low 0\noom_kill 3\n",
    }
    assert out_of_memory_kills(lay(tmp_path, files)) == OutOfMemoryKills(cgroup=3, machine=7)


def test_workers_that_do_not_fit_are_refused() -> None:
    check_memory(2, 100 * MB, {}, available=200 * MB)
    with pytest.raises(UserError) as caught:
        check_memory(3, 100 * MB, {}, available=200 * MB)
    assert "300 MB" in caught.value.why
    assert "-n 2" in caught.value.hint
    assert "engine.worker_memory" in caught.value.hint


def test_a_user_who_knows_better_is_believed() -> None:
    check_memory(3, 100 * MB, {"engine.worker_memory": "50MB"}, available=200 * MB)
    with pytest.raises(UserError):
        check_memory(3, 100 * MB, {"engine.worker_memory": "1g"}, available=200 * MB)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1k", 1024), ("100MB", 100 * MB), ("1.5GiB", 1536 * MB), ("2 GB", 2048 * MB), ("0", 0)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1", "ten", "nan", "infG"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_bytes(text)

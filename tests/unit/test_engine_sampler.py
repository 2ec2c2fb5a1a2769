"""Samples of machines and workers: from the kernel's files as they are, and from this very machine."""

import os
import subprocess
import sys
import time
from pathlib import Path

from shoal.engine.sampler import (
    Sampler,
    WorkerCounts,
    compare,
    count_cpu,
    count_disks,
    count_machine,
    count_network,
    count_worker,
)
from shoal.observe.system import SystemReader, SystemWriter, system_path
from shoal.spec.system import SystemSample, WorkerSample

NET = """Inter-|   Receive                            |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 500 1 0 0 0 0 0 0 500 1 0 0 0 0 0 0
  eth0: 100 1 0 0 0 0 0 0 20 1 0 0 0 0 0 0
docker0:7 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0
"""
DISKS = """   8       0 sda 10 0 100 0 20 0 40 0 0 0 0
   8       1 sda1 10 0 100 0 20 0 40 0 0 0 0
 259       0 nvme0n1 1 0 2 0 3 0 4 0 0 0 0
 259       1 nvme0n1p1 1 0 2 0 3 0 4 0 0 0 0
   7       0 loop0 1 0 900 0 3 0 900 0 0 0 0
 253       0 dm-0 1 0 900 0 3 0 900 0 0 0 0
"""


def lay(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_busy_cores_are_all_but_idle_and_waiting_for_disks():
    ticks = os.sysconf("SC_CLK_TCK")
    assert count_cpu("cpu  100 20 30 9000 800 5 6 7 50 0\ncpu0 1 1\n") == (100 + 20 + 30 + 5 + 6 + 7) / ticks
    assert count_cpu("") == 0.0


def test_no_more_cores_are_busy_than_there_are(tmp_path):
    sampler = Sampler("n", lay(tmp_path, {"proc/stat": "cpu  100 0 0 0 0 0 0 0 0 0\n"}))
    sampler.sample({}, "/", 100.0, 10.0)
    lay(tmp_path, {"proc/stat": "cpu  999999 0 0 0 0 0 0 0 0 0\n"})
    sample = sampler.sample({}, "/", 101.0, 11.0)
    assert sample is not None
    assert sample.cpu == sample.cores


def test_disks_count_once():
    assert count_disks(DISKS) == (102 * 512, 44 * 512)


def test_real_devices_count_and_in_a_container_all_but_loopback():
    assert count_network(NET, ["eth0"]) == (100, 20)
    assert count_network(NET, []) == (107, 29)


def stat_line(pid: int, name: str, cpu_ticks: int, faults: int, pages: int) -> str:
    rest = ["S", *["0"] * 8, str(faults), "0", str(cpu_ticks), "0", *["0"] * 8, str(pages), "0", "0"]
    return f"{pid} ({name}) {' '.join(rest)}"


def test_a_worker_with_a_name_that_is_meant_to_confuse(tmp_path):
    root = lay(
        tmp_path,
        {
            "proc/7/stat": stat_line(7, "a) S (b 1 2", 300, 5, 10),
            "proc/7/task/7/schedstat": "1000000000 500000000 3\n",
            "proc/7/task/8/schedstat": "1000000000 1500000000 3\n",
            "cg/cpu.stat": "nr_periods 5\nnr_throttled 2\nthrottled_usec 250000\n",
        },
    )
    found = count_worker(root, 7, [f"{root}/cg/cpu.stat"])
    assert found is not None
    assert (found.major_faults, found.rss) == (5, 10 * os.sysconf("SC_PAGE_SIZE"))
    assert found.cpu == 300 / os.sysconf("SC_CLK_TCK")
    assert (found.throttled, dict(found.run_delay)) == (0.25, {"7": 0.5, "8": 1.5})
    assert count_worker(root, 8) is None


def test_a_worker_between_two_looks():
    before = WorkerCounts(pid=7, cpu=1.0, major_faults=10, throttled=1.0, run_delay={"7": 1.0, "9": 5.0})
    now = WorkerCounts(pid=7, cpu=2.0, rss=5, major_faults=14, throttled=9.0, run_delay={"7": 1.5, "8": 0.25})
    expected = WorkerSample(pid=7, cpu=0.5, rss=5, major_faults=2.0, throttled=1.0, run_delay=0.375)
    assert compare(before, now, 2.0) == expected
    assert compare(None, now, 2.0) == WorkerSample(pid=7, rss=5)
    assert compare(before, WorkerCounts(pid=8, cpu=99.0, rss=1), 2.0) == WorkerSample(pid=8, rss=1)


def test_a_quota_of_the_workers_own_cgroup_is_seen(tmp_path):
    files = {
        "proc/7/stat": stat_line(7, "python", 0, 0, 1),
        "proc/7/cgroup": "0::/jobs/x\n",
        "sys/fs/cgroup/jobs/x/cpu.stat": "throttled_usec 1000000\n",
    }
    sampler = Sampler("n", lay(tmp_path, files))
    assert sampler.sample({0: 7}, "/", 100.0, 10.0) is None
    lay(tmp_path, {"sys/fs/cgroup/jobs/x/cpu.stat": "throttled_usec 1500000\n"})
    sample = sampler.sample({0: 7}, "/", 101.0, 11.0)
    assert sample is not None
    assert sample.workers[0].throttled == 0.5


def test_memory_of_a_limit_that_somebody_has_set(tmp_path):
    files = {
        "proc/self/cgroup": "0::/a\n",
        "proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n",
        "sys/fs/cgroup/a/memory.max": "1000000",
        "sys/fs/cgroup/a/memory.current": "400000",
        "sys/fs/cgroup/a/memory.stat": "inactive_file 100000\n",
    }
    sampler = Sampler("n", lay(tmp_path, files))
    sampler.sample({}, "/", 100.0, 10.0)
    sample = sampler.sample({}, "/nowhere", 101.0, 11.0)
    assert sample is not None
    assert (sample.memory_used, sample.memory_total) == (300000, 1000000)
    assert (sample.disk_free, sample.disk_total, sample.cpu) == (0, 0, 0.0)


def test_this_machine_and_a_worker_that_computes(tmp_path):
    code = "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"
    sampler = Sampler("here")
    with subprocess.Popen([sys.executable, "-c", code]) as worker:
        try:
            assert sampler.sample({3: worker.pid}, str(tmp_path), 1.0, time.monotonic()) is None
            deadline = time.monotonic() + 30
            cpu = 0.0
            while cpu == 0.0 and time.monotonic() < deadline:
                time.sleep(0.2)
                sample = sampler.sample({3: worker.pid, 4: 1 << 30}, str(tmp_path), 2.0, time.monotonic())
                assert sample is not None
                cpu = sample.workers[3].cpu
        finally:
            worker.kill()
    assert 0.0 < cpu < 4.0
    assert sample.workers.keys() == {3}
    assert sample.workers[3].rss > 1 << 20
    assert 0 < sample.memory_used < sample.memory_total
    assert 0 < sample.disk_free <= sample.disk_total
    assert 0.0 < sample.cpu <= sample.cores * 1.5
    assert count_machine().cpu > 0


def test_samples_come_back_as_they_were(tmp_path):
    samples = [
        SystemSample(time=float(n), node="../a b\x1b", cores=2, cpu=0.5, workers={1: WorkerSample(pid=5, cpu=0.25)})
        for n in range(3)
    ]
    writer, reader = SystemWriter(str(tmp_path)), SystemReader(str(tmp_path))
    assert reader.read_new() == {}
    for sample in samples:
        writer.write(sample)
    with open(system_path(str(tmp_path), samples[0].node), "ab") as file:
        file.write(b"{}\n\xff\n")
    assert reader.read_new() == {samples[0].node: samples}
    assert reader.num_damaged == 2
    assert reader.read_new() == {}
    writer.close()
    assert os.listdir(tmp_path) == ["system-..-a-b-.jsonl"]

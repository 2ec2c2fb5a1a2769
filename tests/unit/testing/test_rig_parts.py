"""Parts of the rigs that can be looked at without making one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.engine import cgroups
from shoal.spec.errors import UserError
from shoal.testing import rigs
from shoal.testing.rigs import leftovers, machine

SECOND = "35 24 0:30 / {root} rw shared:9 - cgroup2 cgroup2 rw\n"
FIRST = "36 24 0:31 / {root} rw shared:9 - cgroup cgroup rw,memory\n"


def make_machine(folder: Path, mount: str, ours: str, groups: dict[str, str]) -> str:
    """A /proc and a tree of control groups: `groups` has the contents of cgroup.subtree_control."""
    root = folder / "cgroup"
    for group, enabled in groups.items():
        path = root / group.strip("/")
        path.mkdir(parents=True, exist_ok=True)
        (path / "cgroup.subtree_control").write_text(enabled)
    proc = folder / "proc" / "self"
    proc.mkdir(parents=True)
    (proc / "mountinfo").write_text("21 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mount.format(root=root))
    (proc / "cgroup").write_text(ours)
    return str(folder / "proc")


def test_a_group_of_version_2_is_made_where_the_controller_is_handed_down(tmp_path):
    groups = {"/": "cpu memory", "/user": "cpu memory", "/user/me": "cpu", "/user/me/job": ""}
    proc = make_machine(tmp_path, SECOND, "0::/user/me/job\n", groups)
    user = tmp_path / "cgroup" / "user"
    assert cgroups.find_parent("cpu", proc) == cgroups.Parent(user / "me", 2)
    assert cgroups.find_parent("memory", proc) == cgroups.Parent(user, 2)
    assert cgroups.find_parent("freezer", proc) == cgroups.Parent(user / "me" / "job", 2)


def test_a_controller_that_can_be_handed_down_is(tmp_path):
    proc = make_machine(tmp_path, SECOND, "0::/\n", {"/": ""})
    (tmp_path / "cgroup" / "cgroup.controllers").write_text("cpu memory")
    assert cgroups.find_parent("memory", proc) == cgroups.Parent(tmp_path / "cgroup", 2)
    assert (tmp_path / "cgroup" / "cgroup.subtree_control").read_text() == "+memory"
    assert cgroups.find_parent("io", proc) is None


def test_a_group_of_version_1_is_made_in_our_own(tmp_path):
    proc = make_machine(tmp_path, FIRST, "4:memory:/me\n0::/\n", {"/me": ""})
    assert cgroups.find_parent("memory", proc) == cgroups.Parent(tmp_path / "cgroup" / "me", 1)
    assert cgroups.find_parent("cpu", proc) is None


def test_in_a_container_the_mount_is_our_group(tmp_path):
    proc = make_machine(tmp_path, FIRST, "4:memory:/docker/123\n", {"/": ""})
    assert cgroups.find_parent("memory", proc) == cgroups.Parent(tmp_path / "cgroup", 1)


def test_a_machine_without_groups(tmp_path):
    proc = make_machine(tmp_path, "", "", {})
    assert cgroups.find_parent("memory", proc) is None
    assert cgroups.find_parent("memory", str(tmp_path / "nowhere")) is None


def test_names_tell_who_made_them():
    mine = leftovers.new_name()
    assert mine != leftovers.new_name()
    assert not leftovers.is_orphan(mine)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        theirs = f"shoal-rig-{process.pid}-{leftovers._started(process.pid)}-0"
        process.wait()
    assert leftovers.is_orphan(theirs)
    assert leftovers.is_orphan(f"shoal-rig-{os.getpid()}-1-0")  # an earlier process with our number
    assert not leftovers.is_orphan("shoal-rig-of-somebody")
    assert not leftovers.is_orphan("something-else")


@pytest.fixture
def bare(monkeypatch):
    """A machine that has nothing: no root, no tools."""
    for name, need in machine.NEEDS.items():
        monkeypatch.setitem(machine.NEEDS, name, machine.Need(lambda name=name: f"there is no {name}", need.hint))
    machine._find.cache_clear()
    yield
    machine._find.cache_clear()


RIGS = {
    "hosts": lambda: rigs.hosts(2),
    "small_disk": lambda: rigs.small_disk(1),
    "power_loss_disk": lambda: rigs.power_loss_disk(8),
    "memory_limit": lambda: rigs.memory_limit(1 << 30),
    "cpu_limit": lambda: rigs.cpu_limit(1),
    "freezer": rigs.freezer,
    "clock_jump": rigs.clock_jump,
    "failing_syscalls": lambda: rigs.failing_syscalls(["true"], "write:error=EIO"),
}


@pytest.mark.parametrize("name", RIGS)
def test_a_rig_says_what_the_machine_lacks(name, bare):
    with pytest.raises(rigs.RigMissing) as caught:
        RIGS[name]().__enter__()
    assert "is not possible here: this machine lacks" in caught.value.message
    assert caught.value.why
    assert caught.value.hint


def test_a_test_says_what_the_machine_lacks(bare):
    mark = rigs.needs("root", "strace").mark
    assert mark.args == (True,)
    assert mark.kwargs == {"reason": "this machine lacks root, strace"}


def test_a_tool_that_refuses_is_quoted():
    with pytest.raises(rigs.RigMissing) as caught:
        machine.call(sys.executable, "-c", "raise SystemExit('no such module')", rig="rigs.x")
    assert caught.value.why == "no such module"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: rigs.hosts(0),
        lambda: rigs.hosts(101),
        lambda: rigs.hosts(2, loss=1),
        lambda: rigs.hosts(2, rate_mbit=-1),
        lambda: rigs.hosts(2, delay_seconds=-1),
        lambda: rigs.small_disk(0),
        lambda: rigs.power_loss_disk(100_000),
        lambda: rigs.memory_limit(10),
        lambda: rigs.cpu_limit(0),
    ],
)
def test_sizes_that_make_no_sense(wrong):
    with pytest.raises(UserError):
        wrong().__enter__()


def test_the_end_of_a_session_says_what_was_skipped(tmp_path):
    """The summary of tests/conftest.py, in a session of its own."""
    conftest = Path(__file__).parents[2] / "conftest.py"
    (tmp_path / "conftest.py").write_text(conftest.read_text())
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "@pytest.mark.skipif(True, reason='this machine lacks strace, root')\n"
        "def test_one(n): ...\n"
        "def test_two(): pytest.skip('this machine lacks root')\n"
        "def test_three(): pytest.skip('no wish')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert "3 tests skipped because this machine lacks: root (3), strace (2)" in done.stdout, (
        done.stdout + done.stderr
    )

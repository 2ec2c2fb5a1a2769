"""Names of what rigs make, and the removal of what a killed process left behind.

A name says who made it: pid and start time. Whatever carries the name of a process that is gone is removed when the
next rig is made.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.engine import cgroups
from shoal.spec.fault import RIG

NAMESPACES = Path("/run/netns")
_counter = itertools.count()


def new_name() -> str:
    """A name for something this process makes."""
    return f"{RIG}{os.getpid()}-{_started(os.getpid())}-{next(_counter)}"


def is_orphan(name: str) -> bool:
    """Whether a name is a rig's whose process is gone."""
    found = re.match(rf"{RIG}(\d+)-(\d+)-", name)
    return found is not None and _started(int(found[1])) != int(found[2])


def _started(pid: int) -> int:
    """When a process was started, in ticks since boot; -1 where there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


@contextmanager
def rig_folder(parent: str | None = None) -> Iterator[Path]:
    """A folder of this process, removed with everything in it; also with what is still mounted there."""
    sweep()
    folder = Path(parent or tempfile.gettempdir(), new_name())
    try:
        folder.mkdir(mode=0o755)
        yield folder
    finally:
        remove_folder(folder)


def sweep() -> list[str]:
    """Remove what rigs of dead processes left behind; returns the names. Where there is nothing: 1 ms."""
    removed = []
    for name in _names_in([NAMESPACES]):
        remove_namespace(name.name)
        removed.append(name.name)
    for group in _names_in(_group_parents()):
        remove_group(group)
        removed.append(group.name)
    for folder in _names_in({Path(tempfile.gettempdir()), Path("/dev/shm")}):
        remove_folder(folder)
        removed.append(folder.name)
    return removed


def _names_in(parents: Iterable[Path]) -> Iterator[Path]:
    for parent in parents:
        with contextlib.suppress(OSError):
            yield from [path for path in parent.iterdir() if is_orphan(path.name)]


def _group_parents() -> set[Path]:
    found = [cgroups.find_parent(name) for name in ("memory", "cpu", "freezer")]
    return {parent.path for parent in found if parent is not None}


def remove_namespace(name: str) -> None:
    """End the processes on a host and remove it, with its links."""
    if not (NAMESPACES / name).exists():
        return
    for pid in _output("ip", "netns", "pids", name).split():
        _kill(int(pid))
    _output("ip", "netns", "delete", name)


def remove_group(path: Path) -> None:
    """End the processes in a control group and remove it."""
    with contextlib.suppress(OSError):
        for thaw in ("freezer.state", "cgroup.freeze"):
            if (path / thaw).exists():
                (path / thaw).write_text("THAWED" if thaw == "freezer.state" else "0")
    for _ in range(200):
        try:
            for pid in (path / "cgroup.procs").read_text().split():
                _kill(int(pid))
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.01)  # the killed ones need a moment


def remove_folder(folder: Path) -> None:
    """Unmount what is mounted in a folder, and remove it."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in reversed([place for place in mounts if (place + "/").startswith(f"{folder}/")]):
        # Lazily, because a process that is just being killed may still be in there.
        _output("umount", "--lazy", mount)
    shutil.rmtree(folder, ignore_errors=True)


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout

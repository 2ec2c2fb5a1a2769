"""Groups of processes with little memory, few cores, or standing still: Linux control groups, versions 1 and 2."""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.engine import cgroups
from shoal.spec.errors import UserError
from shoal.testing.rigs import leftovers
from shoal.testing.rigs.machine import RigMissing, require

_PERIOD_MICROSECONDS = 20_000
"""Shorter than the kernel's 100 ms, so that a slow worker is evenly slow and not stopped now and then."""


class ProcessGroup:
    """A control group. Processes in it, and those they start, share its limits; they are killed when it is left."""

    def __init__(self, path: Path, version: int) -> None:
        self.path = path
        self.version = version

    def add(self, pid: int) -> None:
        """Put a process into the group, with all its threads, and what it will start."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def command(self, command: Sequence[str]) -> list[str]:
        """A command that runs another in this group, from its first instruction on."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"), *command]

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command in the group. `options` are those of `subprocess.run`."""
        return subprocess.run(self.command(command), **options)

    def freeze(self) -> None:
        """Stop all processes at once, without a signal that they or their parents could see."""
        self._set_frozen(True)

    def thaw(self) -> None:
        self._set_frozen(False)

    def _set_frozen(self, is_frozen: bool) -> None:
        if self.version == 1:
            (self.path / "freezer.state").write_text("FROZEN" if is_frozen else "THAWED")
        else:
            (self.path / "cgroup.freeze").write_text(str(int(is_frozen)))


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[ProcessGroup]:
    """A group that may use so much memory. The kernel kills a process of it that wants more (exit by signal 9)."""
    if num_bytes < 1 << 20:
        raise UserError(f"A process cannot live in {num_bytes} bytes.", hint="give at least 1 MiB")
    size = str(num_bytes)
    first = {"memory.limit_in_bytes": size, "memory.memsw.limit_in_bytes": size}
    second = {"memory.max": size, "memory.swap.max": "0"}
    with _group("memory", first, second) as group:
        yield group


@contextmanager
def cpu_limit(cores: float) -> Iterator[ProcessGroup]:
    """A group that gets so many cores' time in all, such as 0.5: a slow machine."""
    if not cores > 0:
        raise UserError(f"A process cannot run on {cores} cores.", hint="give a number above 0, such as 0.5")
    quota = str(max(1000, int(cores * _PERIOD_MICROSECONDS)))
    first = {"cpu.cfs_period_us": str(_PERIOD_MICROSECONDS), "cpu.cfs_quota_us": quota}
    with _group("cpu", first, {"cpu.max": f"{quota} {_PERIOD_MICROSECONDS}"}) as group:
        yield group


@contextmanager
def freezer() -> Iterator[ProcessGroup]:
    """A group whose processes can be stopped all at once: `freeze` and `thaw`."""
    with _group("freezer", {}, {}) as group:
        yield group


@contextmanager
def _group(controller: str, first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[ProcessGroup]:
    """A new group, with the settings of the version that this machine has."""
    rig = f"a control group for {controller}"
    require(rig, f"{controller} cgroups")
    leftovers.sweep()
    parent = cgroups.find_parent(controller)
    assert parent is not None
    path = parent.path / leftovers.new_name()
    try:
        path.mkdir()
        for name, value in (first if parent.version == 1 else second).items():
            # Swap is counted only by some kernels.
            if "sw" not in name or (path / name).exists():
                (path / name).write_text(value)
        yield ProcessGroup(path, parent.version)
    except OSError as error:
        if error.filename and str(error.filename).startswith(str(path)):
            raise RigMissing(f"{rig} is not possible here.", why=str(error)) from error
        raise
    finally:
        leftovers.remove_group(path)

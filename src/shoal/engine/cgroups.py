"""Control groups, version 1 and 2: where one can be made, and the names of its files."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Parent:
    """A control group in which others can be made. `version` is 1 or 2."""

    path: Path
    version: int


def find_parent(controller: str, proc: str = "/proc") -> Parent | None:
    """Where a group with this controller can be made: in our own group, or in the nearest one above that allows it.

    The freezer has no controller in version 2: every group has it.
    """
    ours = _read_ours(Path(proc, "self/cgroup"))
    for path, version, names in _mounts(Path(proc, "self/mountinfo")):
        if version == 1 and controller in names:
            place = Parent(_under(path, ours.get(controller, "/")), 1)
            return place if os.access(place.path, os.W_OK) else None
    for path, version, _ in _mounts(Path(proc, "self/mountinfo")):
        if version == 2:
            return _find_second(path, _under(path, ours.get("", "/")), controller)
    return None


def _find_second(root: Path, ours: Path, controller: str) -> Parent | None:
    for path in (ours, *ours.parents):
        is_enabled = controller == "freezer" or controller in _words(path / "cgroup.subtree_control")
        if (is_enabled or _enable(path, controller)) and os.access(path, os.W_OK):
            return Parent(path, 2)
        if path == root:
            break
    return None


def _enable(path: Path, controller: str) -> bool:
    """Let groups below have a controller. The kernel refuses where processes are in `path` itself."""
    if controller not in _words(path / "cgroup.controllers"):
        return False
    try:
        (path / "cgroup.subtree_control").write_text(f"+{controller}")
    except OSError:
        return False
    return True


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _read_ours(path: Path) -> Mapping[str, str]:
    """Controller -> our group; the one of version 2 has no name."""
    ours: dict[str, str] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        _, names, group = line.split(":", 2)
        ours |= dict.fromkeys(names.split(","), group)
    return ours


def _mounts(path: Path) -> Iterator[tuple[Path, int, list[str]]]:
    """Mount point, version, and the options, among which version 1 has its controllers."""
    for line in path.read_text().splitlines() if path.exists() else ():
        place, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            yield Path(place.split()[4]), 1 if kind == "cgroup" else 2, options.split(",")


def _under(mount: Path, group: str) -> Path:
    path = mount / group.strip("/")
    # In a container the mount shows our own group as the root, while its name is that on the host.
    return path if path.is_dir() else mount

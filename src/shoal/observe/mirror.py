"""A run folder at a URL: copied there while the run goes on, by a process of its own, and fetched by who looks at it.

A store cannot append. So a file lies there in parts: all but the newest are put once, and that one anew whenever the
file has grown. What is there is a few seconds old, and stays when the machine of the launcher is lost.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.files import Url, answered, asking, is_url, list_below, locate, mask
from shoal.observe.folder import COPIED
from shoal.observe.lines import Report
from shoal.observe.runs import is_locked
from shoal.observe.send import has_ended, read_line, say_aloud, tell_error, wait_for_end
from shoal.spec.errors import UserError

PART_BYTES = 4 << 20
COPY_SECONDS = 5.0
_MORE = ".more-"
"""Between the name of a file and the number of a part, from the second one on."""
_LEFT_OUT = ("lock", "socket", COPIED)
"""What means nothing elsewhere. Folders of checkpoints are left out, too: workers put those there themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A file as it was when it was copied last."""

    inode: int
    size: int
    changed_ns: int

    @property
    def num_parts(self) -> int:
        return max(1, -(-self.size // PART_BYTES))


class Mirror:
    """Keeps a place in a store like a run folder."""

    def __init__(self, folder: str, place: Url) -> None:
        self._folder, self._place = folder, place
        self._copied: dict[str, _Seen] = {}
        self._has_swept = False

    def copy(self) -> None:
        """Put what has changed since the last call. What failed is put with the next."""
        found = dict(_files_in(self._folder))
        if not self._has_swept:
            self._sweep(found)
            self._has_swept = True
        for name, seen in found.items():
            before = self._copied.get(name)
            if before != seen and self._put(name, before, seen):
                self._copied[name] = seen
        for name in self._copied.keys() - found.keys():
            self._remove(name, 0, self._copied[name].num_parts)
            del self._copied[name]
        self._write(COPIED, json.dumps({"time": time.time()}).encode())

    def _sweep(self, found: Mapping[str, _Seen]) -> None:
        """Remove what an earlier launcher of this run has put there and the folder does not have any more."""
        there = {part for parts in _in_parts(list_below(self._place)).values() for part in parts}
        kept = {_part(name, number) for name, seen in found.items() for number in range(seen.num_parts)}
        for name in there - kept - {COPIED}:
            self._remove(name, 0, 1)

    def _put(self, name: str, before: _Seen | None, seen: _Seen) -> bool:
        """Put the parts that are new; False where the file is gone by now.

        Nothing is rewritten in place: a file that is the same one was appended to.
        """
        has_grown = before is not None and before.inode == seen.inode and before.size < seen.size
        first = before.size // PART_BYTES if before is not None and has_grown else 0
        try:
            file = open(os.path.join(self._folder, name), "rb")  # noqa: SIM115
        except FileNotFoundError:
            return False
        with file:
            for number in range(first, seen.num_parts):
                file.seek(number * PART_BYTES)
                self._write(_part(name, number), file.read(min(PART_BYTES, seen.size - number * PART_BYTES)))
        if before is not None:
            self._remove(name, seen.num_parts, before.num_parts)
        return True

    def _write(self, name: str, data: bytes) -> None:
        target = self._at(name)
        with asking(target):
            target.fs.pipe_file(target.path, data)

    def _remove(self, name: str, first: int, end: int) -> None:
        for number in range(first, end):
            target = self._at(_part(name, number))
            with contextlib.suppress(FileNotFoundError), asking(target):
                target.fs.rm_file(target.path)

    def _at(self, name: str) -> Url:
        return self._place / name


def _part(name: str, number: int) -> str:
    return f"{name}{_MORE}{number:06d}" if number else name


def _files_in(folder: str) -> Iterator[tuple[str, _Seen]]:
    """The files of a run that are to be copied. Those that vanish meanwhile are passed over."""
    for above, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith("checkpoints")]
        for name in names:
            path = os.path.join(above, name)
            with contextlib.suppress(OSError):
                stat = os.lstat(path)
                if os.path.isfile(path) and not os.path.islink(path) and name not in _LEFT_OUT:
                    seen = _Seen(inode=stat.st_ino, size=stat.st_size, changed_ns=stat.st_mtime_ns)
                    yield os.path.relpath(path, folder), seen


def url_of(where: str) -> Url | None:
    """The place in a store that a run folder is named by; None for a folder of this machine."""
    place = locate(where) if is_url(where) else None
    return place if isinstance(place, Url) else None


def check_unused(url: Url) -> None:
    """Raise UserError where the store cannot be used, or holds a run there already."""
    if "run.json" in answered(url, lambda: list_below(url)):
        raise UserError(
            f"{url} already holds a run.",
            why="its journal, logs and checkpoints would be replaced by those of this one",
            hint=f"name another place, or go on with that run: `--resume {url}`",
        )


def fetch(where: str, home: str) -> str:
    """Bring the run folder at a URL to this machine as it is there now; returns where it is then.

    Checkpoints stay where they are. A run that goes on here is left alone. Raises UserError where there is no run.
    """
    url = url_of(where)
    if url is None:
        return str(locate(where))
    word = hashlib.sha256(mask(where).encode()).hexdigest()[:8]
    target = os.path.join(home, "copies", f"{url.name}-{word}")
    if is_locked(target):
        return target
    there = answered(url, lambda: list_below(url))
    if "run.json" not in there:
        raise UserError(
            f"{url} is not a run folder.",
            why="there is no run.json there" if there else "nothing is there",
            hint="it is the URL that `--log-dir` of the run was given",
        )
    with contextlib.suppress(OSError):  # of a run that went on here once, and may go on elsewhere now
        os.unlink(os.path.join(target, "lock"))
    files = _in_parts(there)
    for name in dict(_files_in(target)).keys() - files.keys():  # merged into another since, or removed
        os.unlink(os.path.join(target, name))
    for name, parts in files.items():
        path = os.path.join(target, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.part", "wb") as file:
            for part in parts:
                with contextlib.suppress(FileNotFoundError), asking(url):
                    file.write(url.fs.cat_file((url / part).path))
        os.replace(f"{path}.part", path)
    return target


def _in_parts(there: Mapping[str, int]) -> dict[str, list[str]]:
    """The files of a run folder and the objects that each is made of, in order. Pure.

    A name that would lead out of the folder is nobody's of ours.
    """
    files: dict[str, list[str]] = {}
    for name in sorted(there):
        steps = name.split("/")
        is_checkpoint = len(steps) > 1 and steps[0].startswith("checkpoints")
        if not is_checkpoint and not {"", ".", ".."} & set(steps):
            files.setdefault(name.partition(_MORE)[0], []).append(name)
    return files


def main() -> int:
    """The process beside a launcher. Its order is a line of JSON on stdin; what it has to tell goes to stdout.

    It ends when stdin does, after a last copy: the run is over, or its launcher is dead.
    """
    order: dict[str, Any] = json.loads(read_line(0))
    report = say_aloud()
    place = locate(order["to"])
    assert isinstance(place, Url)
    return 0 if keep_copying(Mirror(order["run_dir"], place), str(place), report) else 1


def keep_copying(mirror: Mirror, shown: str, report: Report) -> bool:
    """Copy until our input ends, and once more; False where that did not work. Trouble is told when it begins."""
    is_failing = False
    while True:
        is_over = has_ended()
        try:
            mirror.copy()
            if is_failing:
                report(f"the run folder is copied to {shown} again.")
            is_failing = False
        except Exception as error:  # a client of a store may raise anything
            if not is_failing:
                report(f"the run folder is not copied to {shown}: {tell_error(error)}. It is tried again.")
            is_failing = True
        if is_over:
            return not is_failing
        wait_for_end(COPY_SECONDS)


if __name__ == "__main__":
    sys.exit(main())

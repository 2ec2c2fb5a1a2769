"""Files that grow by lines for months and stay bounded.

`PATH` is the newest part. When it is full it is sealed under the name `PATH.1`, `PATH.2`, ...; a few sealed parts are
kept as they are, and the oldest beyond those is folded into `PATH.past`, which says more in fewer lines and never
gets larger than it may. Its first line says which parts are in it, so that a crash between any two of these acts
loses nothing and counts nothing twice. See docs/decisions/0022.
"""

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal.observe.lines import Appender, Report, last_lines, open_file, say_nothing

_TRIES = 20
_PAUSE_SECONDS = 0.001
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How large a file and its past may get, together `segment_bytes` times (`num_sealed` + 2) and what fold returns.

    `fold` gets the lines of the past and those of the oldest part, and returns the lines of the new past. Pure.
    """

    segment_bytes: int
    num_sealed: int
    fold: Callable[[bytes, bytes], bytes]


class BoundedAppender(Appender):
    """Appends whole lines to a bounded file, next to other processes that do the same.

    Every append makes sure, under a shared lock, that it writes to the newest part; sealing takes the lock alone. So
    no line is written to a part that has been folded. Nobody waits for a process that was stopped with the lock:
    after 20 ms a line is written without it, and sealing is left for later.
    """

    def __init__(self, path: str, bound: Bound, report: Report = say_nothing) -> None:
        super().__init__(path, report)
        self._bound = bound

    def _write(self, lines: bytes) -> int:
        is_locked = self._enter()
        try:
            safe = super()._write(lines)
        finally:
            if is_locked and self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        # What is written is written, whatever becomes of this; a disk that refuses is asked again with the next line.
        with contextlib.suppress(OSError):
            if is_locked and os.fstat(self._fd).st_size >= self._bound.segment_bytes:
                self._seal()
        return safe

    def _enter(self) -> bool:
        """Have the newest part open and locked; False where it cannot be locked."""
        while True:
            if self._fd < 0:
                self._open()
            if not _lock(self._fd, fcntl.LOCK_SH):
                return False
            if _is_same(self._fd, self.path):
                return True
            self._close()

    def _seal(self) -> None:
        """Give the newest part a number, unless somebody else does, and fold what is too much."""
        if not _lock(self._fd, fcntl.LOCK_EX):
            return
        try:
            if _is_same(self._fd, self.path) and os.path.isfile(self.path):
                numbers = sealed_numbers(self.path)
                number = max([read_past(self.path)[0], *numbers]) + 1
                os.rename(self.path, f"{self.path}.{number}")
        finally:
            self._close()  # and with it the lock
        fold_oldest(self.path, self._bound)


def _lock(fd: int, kind: int) -> bool:
    for attempt in range(_TRIES):
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if attempt + 1 < _TRIES:
                time.sleep(_PAUSE_SECONDS)
        except OSError:  # a file system without locks
            return False
    return False


def _is_same(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False


_NUMBER = re.compile(r"\d{1,15}")


def sealed_numbers(path: str) -> list[int]:
    """The parts that have been sealed and are still there, in order."""
    folder, name = os.path.split(path)
    start = f"{name}."
    try:
        ends = [each[len(start) :] for each in os.listdir(folder or ".") if each.startswith(start)]
    except OSError:
        return []
    return sorted(int(end) for end in ends if _NUMBER.fullmatch(end))


def newest_lines(path: str, num_lines: int, block_bytes: int = 1 << 16) -> bytes:
    """The last lines of a bounded file, also where its newest part has just begun."""
    lines, _ = last_lines(path, num_lines, block_bytes)
    if (missing := num_lines - lines.count(b"\n")) > 0 and (numbers := sealed_numbers(path)):
        lines = last_lines(f"{path}.{numbers[-1]}", missing, block_bytes)[0] + lines
    return lines


def list_names(folder: str, pattern: str) -> list[str]:
    """What stands for the group of `pattern` in the names of the bounded files of a folder, each once, unsorted."""
    name = re.compile(pattern + r"(?:\.\d{1,15}|\.past)?")
    try:
        return list(dict.fromkeys(match[1] for each in os.listdir(folder) if (match := name.fullmatch(each))))
    except OSError:
        return []


def past_path(path: str) -> str:
    return f"{path}.past"


def read_past(path: str) -> tuple[int, bytes]:
    """Up to which part the past goes, and its lines; 0 and nothing where there is none, or none that can be read."""
    try:
        with open_file(past_path(path)) as file:
            head, lines = file.readline(), file.read()
        return int(json.loads(head)["until"]), lines
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0, b""


def fold_oldest(path: str, bound: Bound) -> None:
    """Fold parts into the past until only as many are left as may be. Several processes may try, one does."""
    while True:
        until, _ = read_past(path)
        for number in [number for number in sealed_numbers(path) if number <= until]:
            os.unlink(f"{path}.{number}")  # its folder was killed before it came to this
        numbers = sealed_numbers(path)
        if len(numbers) <= bound.num_sealed:
            return
        with contextlib.suppress(FileNotFoundError), open_file(f"{path}.{numbers[0]}") as part:
            if not _lock(part.fileno(), fcntl.LOCK_EX):
                return
            until, past = read_past(path)
            if until < numbers[0] and _is_same(part.fileno(), f"{path}.{numbers[0]}"):
                _replace_past(path, numbers[0], bound.fold(past, part.read()))
                os.unlink(f"{path}.{numbers[0]}")


def _replace_past(path: str, until: int, lines: bytes) -> None:
    """In one step, and on the disk before the part that is in it now is removed."""
    passing = f"{past_path(path)}.new"
    with open(passing, "wb") as file:
        file.write(json.dumps({"until": until}).encode() + b"\n" + lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(passing, past_path(path))
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines that were read. `is_past`: they are the past, all of it, and replace what was read before."""

    lines: bytes
    is_past: bool = False


class SegmentReader:
    """Reads a bounded file while it grows, from its past to its newest line. Only what is new is read.

    Who is away while so much is written that parts are folded which were not read gets the whole past again. A file
    that became shorter is read again from its start. An unfinished last line is kept back until its newline arrives.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._number = 0
        self._offset = 0
        self._rest = b""
        self._past_seen: tuple[int, int] | None = None

    @property
    def rest(self) -> bytes:
        """An unfinished last line."""
        return self._rest

    def read_new(self) -> Iterator[Block]:
        """What was added since the last call, in blocks of about a megabyte."""
        if self._number == 0 or self._is_past_new():
            yield from self._catch_up()
        while True:
            data = self._read(self.path)
            if os.path.exists(f"{self.path}.{self._number}"):
                # Sealed meanwhile: whatever was read just now may be of the next part.
                yield from self._finish_part()
            elif self._is_past_new():
                yield from self._catch_up()
            elif data:
                self._offset += len(data)
                yield from self._whole_lines(data)
            else:
                return

    def _catch_up(self) -> Iterator[Block]:
        until, lines = read_past(self.path)
        if until >= self._number:
            self._number, self._offset, self._rest = until + 1, 0, b""
            if lines:
                yield Block(lines, is_past=True)
        self._number = max(1, self._number)

    def _is_past_new(self) -> bool:
        """Whether the past has changed since the last look."""
        try:
            facts = os.stat(past_path(self.path))
        except OSError:
            return False
        seen, self._past_seen = self._past_seen, (facts.st_ino, facts.st_mtime_ns)
        return seen != self._past_seen

    def _finish_part(self) -> Iterator[Block]:
        path = f"{self.path}.{self._number}"
        while data := self._read(path):
            self._offset += len(data)
            yield from self._whole_lines(data)
        if not os.path.exists(path):
            return  # folded just now; whoever called sees that the past is new
        if self._rest:
            yield Block(self._rest + b"\n")
        self._number, self._offset, self._rest = self._number + 1, 0, b""

    def _read(self, path: str) -> bytes:
        try:
            with open_file(path) as file:
                if os.fstat(file.fileno()).st_size < self._offset and path == self.path:
                    if os.path.exists(f"{path}.{self._number}"):
                        return b""
                    self._offset, self._rest = 0, b""
                file.seek(self._offset)
                return file.read(_BLOCK_BYTES)
        except OSError:
            return b""

    def _whole_lines(self, data: bytes) -> Iterator[Block]:
        data = self._rest + data
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        if end:
            yield Block(data[:end])

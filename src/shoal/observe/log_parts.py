"""What a worker has printed, read across the parts of its log (see `shoal.engine.log`).

Places in a log are counted from the first byte that was ever printed, so they stay what they are when parts are
sealed. Of a long log the middle is not there.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from shoal.observe.lines import last_lines, open_file
from shoal.spec.log_file import sealed_starts

_TRIES = 5


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a log, from `start` to `end`."""

    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What was read, where it begins, and where the log ends."""

    start: int
    data: bytes
    log_end: int

    @property
    def end(self) -> int:
        return self.start + len(self.data)


def log_path(run_dir: str, rank: int) -> str:
    return os.path.join(run_dir, "logs", f"{rank}.log")


def read_after(path: str, start: int, num_bytes: int) -> Piece:
    """Bytes from `start` on, without a gap; they begin later where what was there is gone. Raises OSError."""
    with _opened(path) as (newest, parts):
        begin, data = start, b""
        for part in parts:
            if part.end <= start or len(data) >= num_bytes:
                continue
            if data and part.start > begin + len(data):
                break
            begin = begin if data else max(start, part.start)
            data += _read(newest if part is parts[-1] else None, part, begin + len(data), num_bytes - len(data))
        return Piece(begin, data, parts[-1].end)


def read_before(path: str, end: int | None, num_bytes: int) -> Piece:
    """Bytes up to `end`, or up to the end of the log, without a gap; up to the gap where `end` is in one."""
    with _opened(path) as (newest, parts):
        begin, data = parts[-1].end if end is None else end, b""
        for part in reversed(parts):
            if part.start >= begin or len(data) >= num_bytes:
                continue
            if data and part.end < begin:
                break
            stop = min(begin, part.end)
            begin = max(part.start, stop - (num_bytes - len(data)))
            data = _read(newest if part is parts[-1] else None, part, begin, stop - begin) + data
        return Piece(begin, data, parts[-1].end)


def last_log_lines(path: str, num_lines: int) -> tuple[bytes, int]:
    """The last lines, and where the log ended."""
    try:
        with _opened(path) as (_, parts):
            pass
    except OSError:
        return b"", 0
    data, begin = b"", parts[-1].end
    for part in reversed(parts):
        missing = num_lines - data.count(b"\n")
        if missing <= 0 or part.end < begin:
            break
        data, begin = last_lines(part.path, missing)[0] + data, part.start
    return data, parts[-1].end


class LogTail:
    """Reads what was printed since the last look. A log that became shorter is another one, read from its start."""

    def __init__(self, path: str, offset: int = 0) -> None:
        self.path = path
        self.offset = offset

    def read(self, limit: int = 1 << 20) -> bytes:
        """New bytes, about `limit` of them at most; where some are missing before them, a line says so."""
        try:
            piece = read_after(self.path, self.offset, limit)
            if piece.log_end < self.offset:
                piece = read_after(self.path, 0, limit)
        except OSError:
            return b""
        missing = piece.start - self.offset if piece.data else 0
        self.offset = piece.end
        return tell_gap(missing) + piece.data if missing > 0 else piece.data


def tell_gap(num_bytes: int) -> bytes:
    return f"[... {num_bytes:,} bytes that were printed here are not kept ...]\n".encode()


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[BinaryIO, list[Part]]]:
    """The newest part, open, and all parts in order. The newest may be sealed meanwhile: it is read all the same."""
    for attempt in range(_TRIES):
        with open_file(path) as newest:
            starts = sealed_starts(os.listdir(os.path.dirname(path) or "."), os.path.basename(path))
            parts = [Part(f"{path}.{start}", start, start + os.stat(f"{path}.{start}").st_size) for start in starts]
            facts = os.fstat(newest.fileno())
            if os.path.samestat(os.stat(path), facts) or attempt + 1 == _TRIES:
                begin = parts[-1].end if parts else 0
                yield newest, [*parts, Part(path, begin, begin + facts.st_size)]
                return


def _read(newest: BinaryIO | None, part: Part, start: int, num_bytes: int) -> bytes:
    """A range of a part, of the newest from the file that is open."""
    with contextlib.nullcontext(newest) if newest is not None else open_file(part.path) as file:
        file.seek(start - part.start)
        return file.read(num_bytes)

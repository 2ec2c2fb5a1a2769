"""What workers printed, in pieces that a page can show; and where a text stands in it."""

from collections.abc import Sequence
from typing import Any

from shoal.observe import log_parts
from shoal.observe.clean import clean, last_state
from shoal.observe.log_parts import log_path

MAX_BYTES = 1 << 16
MAX_COLUMNS = 4000
SEARCH_BYTES = 64 << 20
BLOCK_BYTES = 1 << 20
MAX_FOUND = 200


def read_before(run_dir: str, rank: int, end: int | None, num_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The lines that end at `end`, or at the end of the log."""
    piece = log_parts.read_before(log_path(run_dir, rank), end, num_bytes)
    start, data = piece.start, piece.data
    if start > 0:
        # The first line is cut, unless there is no other.
        cut = data.find(b"\n") + 1
        start, data = start + cut, data[cut:]
    found = _piece(rank, start, data, piece.log_end)
    if end is not None and piece.end < min(end, piece.log_end):
        found["lines"].append(log_parts.tell_gap(end - piece.end).decode().strip())
    return found


def read_after(run_dir: str, rank: int, start: int, num_bytes: int = 4 * MAX_BYTES) -> dict[str, Any]:
    """Whole lines from `start` on. A log that became shorter is a new one, and is read from its start."""
    path = log_path(run_dir, rank)
    piece = log_parts.read_after(path, start, num_bytes)
    if piece.log_end < start:
        piece = log_parts.read_after(path, 0, num_bytes)
    data = piece.data
    cut = data.rfind(b"\n") + 1
    if 0 < cut < len(data):
        data = data[:cut]
    return _piece(rank, piece.start, data, piece.log_end)


def _piece(rank: int, start: int, data: bytes, size: int) -> dict[str, Any]:
    return {"rank": rank, "start": start, "end": start + len(data), "size": size, "lines": _lines(data)}


def _lines(data: bytes) -> list[str]:
    lines = data.decode("utf-8", "replace").split("\n")
    if lines and lines[-1] == "":
        lines.pop()
    return [show(line) for line in lines]


def show(line: str) -> str:
    """A line as the page shows it: without colours, and not longer than anybody reads."""
    shown = clean(last_state(line))
    return shown if len(shown) <= MAX_COLUMNS else shown[:MAX_COLUMNS] + " …"


def search(run_dir: str, ranks: Sequence[int], text: str) -> dict[str, Any]:
    """Lines that hold `text`, whatever its case, from the start of each log; the first 200.

    At most 64 MB are looked through; `is_cut` says that there may be more.
    """
    wanted = text.casefold().encode("utf-8", "replace")
    found: list[dict[str, Any]] = []
    left = SEARCH_BYTES
    for rank in ranks:
        try:
            left -= _search_log(log_path(run_dir, rank), rank, wanted, found, left)
        except OSError:
            continue
        if left <= 0 or len(found) >= MAX_FOUND:
            break
    return {"found": found, "is_cut": left <= 0 or len(found) >= MAX_FOUND}


def _search_log(path: str, rank: int, wanted: bytes, found: list[dict[str, Any]], limit: int) -> int:
    """Add what is found; returns how many bytes were looked at."""
    seen, place, rest, number = 0, 0, b"", 0
    while seen < limit and (piece := log_parts.read_after(path, place, BLOCK_BYTES)).data:
        if piece.start > place:
            rest = b""  # a line whose end is not kept
        data = rest + piece.data
        end = data.rfind(b"\n") + 1 if piece.end < piece.log_end else len(data)
        # A line longer than a block is looked at in parts.
        end = end or len(data)
        number = _search_lines(data[:end], rank, wanted, found, piece.start - len(rest), number)
        seen, place, rest = seen + len(piece.data), piece.end, data[end:]
        if len(found) >= MAX_FOUND:
            break
    return seen


def _search_lines(data: bytes, rank: int, wanted: bytes, found: list[dict[str, Any]], start: int, number: int) -> int:
    """Look at whole lines, the first of which is number `number`; returns the number of the next."""
    # ASCII alone is folded in bytes; other letters have to match as they are.
    lower, at, counted = data.lower(), 0, 0
    while len(found) < MAX_FOUND and (at := lower.find(wanted, at)) >= 0:
        begin = data.rfind(b"\n", 0, at) + 1
        end = data.find(b"\n", at)
        end = len(data) if end < 0 else end
        number += data.count(b"\n", counted, begin)
        counted = begin
        line = data[begin:end].decode("utf-8", "replace")
        found.append({"rank": rank, "line": number, "offset": start + begin, "text": show(line)})
        at = end + 1
    return number + data.count(b"\n", counted)

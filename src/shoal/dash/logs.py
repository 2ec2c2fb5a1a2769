"""What workers printed, in pieces that a page can show; and where a text stands in it."""

import os
from collections.abc import Sequence
from typing import Any

from shoal.observe.clean import clean, last_state
from shoal.observe.lines import open_file

MAX_BYTES = 1 << 16
MAX_COLUMNS = 4000
SEARCH_BYTES = 64 << 20
BLOCK_BYTES = 1 << 20
MAX_FOUND = 200


def log_path(run_dir: str, rank: int) -> str:
    return os.path.join(run_dir, "logs", f"{rank}.log")


def read_before(run_dir: str, rank: int, end: int | None, num_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The lines that end at `end`, or at the end of the log."""
    with open_file(log_path(run_dir, rank)) as file:
        size = file.seek(0, os.SEEK_END)
        end = size if end is None else min(end, size)
        start = max(0, end - num_bytes)
        file.seek(start)
        data = file.read(end - start)
    if start > 0:
        # The first line is cut, unless there is no other.
        cut = data.find(b"\n") + 1
        start, data = start + cut, data[cut:]
    return _piece(rank, start, data, size)


def read_after(run_dir: str, rank: int, start: int, num_bytes: int = 4 * MAX_BYTES) -> dict[str, Any]:
    """Whole lines from `start` on. A log that became shorter is a new one, and is read from its start."""
    with open_file(log_path(run_dir, rank)) as file:
        size = file.seek(0, os.SEEK_END)
        start = start if start <= size else 0
        file.seek(start)
        data = file.read(num_bytes)
    cut = data.rfind(b"\n") + 1
    if 0 < cut < len(data):
        data = data[:cut]
    return _piece(rank, start, data, size)


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
            with open_file(log_path(run_dir, rank)) as file:
                left -= _search_file(file, rank, wanted, found, left)
        except OSError:
            continue
        if left <= 0 or len(found) >= MAX_FOUND:
            break
    return {"found": found, "is_cut": left <= 0 or len(found) >= MAX_FOUND}


def _search_file(file: Any, rank: int, wanted: bytes, found: list[dict[str, Any]], limit: int) -> int:
    """Add what is found; returns how many bytes were looked at."""
    seen, rest, number = 0, b"", 0
    while seen < limit and (block := file.read(BLOCK_BYTES)):
        data = rest + block
        end = data.rfind(b"\n") + 1 if len(block) == BLOCK_BYTES else len(data)
        # A line longer than a block is looked at in parts.
        end = end or len(data)
        start = seen - len(rest)
        number = _search_lines(data[:end], rank, wanted, found, start, number)
        seen, rest = seen + len(block), data[end:]
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

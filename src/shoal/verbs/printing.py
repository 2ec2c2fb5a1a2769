"""How verbs of the service show what they were told: plain tables that fit the terminal, or JSON."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.observe.clean import columns, fit, one_line

PLAIN_WIDTH = 80
"""Columns where nobody says how many there are: a pipe, a file."""

MIN_WIDTH = 40


def width() -> int:
    from shoal.observe.console import terminal_width

    return max(terminal_width(sys.stdout), MIN_WIDTH) if sys.stdout.isatty() else PLAIN_WIDTH


def table(titles: Sequence[str], rows: Sequence[Sequence[object]], most: int, right: str = "") -> str:
    """Rows as aligned text of at most `most` columns. Empty columns are left out; the widest give way first.

    Titles in `right` (separated by spaces) name the columns with numbers, which end at the same place.
    """
    cells = [[one_line(value) for value in row] for row in rows]
    used = [place for place in range(len(titles)) if any(row[place] for row in cells)]
    widths = {place: max(columns(text) for text in (titles[place], *(row[place] for row in cells))) for place in used}
    while widths and sum(widths.values()) + 2 * (len(widths) - 1) > most:
        widest = max(widths, key=lambda place: widths[place])
        if widths[widest] <= 4:
            break
        widths[widest] -= 1
    lines = []
    for row in (titles, *cells):
        texts = [
            _pad(fit(row[place], widths[place]), widths[place], titles[place] in right.split()) for place in used
        ]
        lines.append("  ".join(texts).rstrip())
    return "\n".join(lines)


def _pad(text: str, to: int, is_right: bool) -> str:
    room = " " * (to - columns(text))
    return room + text if is_right else text + room


def put(facts: Mapping[str, Any], as_json: bool, text: str) -> None:
    """The answer of a verb, as JSON in one line or as text."""
    sys.stdout.write((json.dumps(facts) if as_json else text) + "\n")


def say(text: str) -> None:
    """Progress, which is no part of the answer."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def size(num_bytes: float) -> str:
    """Memory in few characters: `512M`, `7.8G`."""
    for unit, shift in (("T", 40), ("G", 30), ("M", 20), ("K", 10)):
        if abs(num_bytes) >= 1 << shift:
            return f"{num_bytes / (1 << shift):.3g}{unit}"
    return f"{num_bytes:.0f}"


def many(count: int, word: str) -> str:
    """A count with its noun: `1 job`, `3 jobs`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"

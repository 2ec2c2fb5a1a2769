"""How fast machines of a cluster reach each other: who measures with whom and when, and what is kept of it."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal.observe.clean import clean, columns
from shoal.observe.status import duration

LINKS = "links.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What was measured between two machines. Rates are bytes a second, each way; None where there was no way.

    `latency_seconds` is that of a question and its answer. `problem` says what was in the way.
    """

    first: str
    second: str
    latency_seconds: float | None = None
    forward: float | None = None
    backward: float | None = None
    problem: str = ""

    @property
    def rate(self) -> float:
        """The slower of both ways; 0 where there is none."""
        return min(self.forward or 0.0, self.backward or 0.0)


def plan_rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Every pair once, in rounds in which nobody is in two pairs, and as few rounds as can be. Pure.

    As in a tournament: one stays, the others move on by one place from round to round.
    """
    circle: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [pairs for pairs in rounds if pairs]


def slowest(links: Sequence[Link]) -> Link | None:
    """The link that is in the way most; one that does not work at all before others."""
    return min(links, key=lambda link: (link.rate, -(link.latency_seconds or 0.0)), default=None)


def table(links: Sequence[Link]) -> str:
    """Links as aligned text, the slowest first, and which that is."""
    ordered = sorted(links, key=lambda link: (link.rate, link.first, link.second))
    rows = [("BETWEEN", "AND", "LATENCY", "THERE", "BACK", ""), *map(_cells, ordered)]
    widths = [max(columns(row[index]) for row in rows) for index in range(6)]
    padded = [[cell + " " * (width - columns(cell)) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in padded) + "\n"


def _cells(link: Link) -> tuple[str, ...]:
    latency = "" if link.latency_seconds is None else f"{link.latency_seconds * 1e3:.2f} ms"
    return (
        clean(link.first),
        clean(link.second),
        latency,
        _rate(link.forward),
        _rate(link.backward),
        clean(link.problem),
    )


def _rate(bytes_per_second: float | None) -> str:
    if bytes_per_second is None:
        return ""
    megabits = bytes_per_second * 8 / 1e6
    return f"{megabits / 1e3:.1f} Gbit/s" if megabits >= 1e3 else f"{megabits:.0f} Mbit/s"


def tell_slowest(links: Sequence[Link]) -> str:
    """The slowest link in a few words."""
    link = slowest(links)
    if link is None:
        return "there is no link: the cluster has one machine"
    between = f"{clean(link.first)} and {clean(link.second)}"
    if not link.rate:
        return f"no way between {between}: {clean(link.problem)}"
    return f"the slowest link is between {between}: {_rate(link.rate)}, {(link.latency_seconds or 0.0) * 1e3:.2f} ms"


def tell_last(links: Sequence[Link], time: float, now: float) -> str:
    """What is said of an earlier measurement."""
    return f"links, {duration(max(0.0, now - time))} ago: {tell_slowest(links)}"


def encode(links: Sequence[Link], time: float) -> str:
    """What is kept of a measurement, as JSON."""
    return json.dumps({"time": time, "links": [asdict(link) for link in links]}, indent=1) + "\n"


def read_links(folder: str) -> tuple[list[Link], float] | None:
    """The last measurement that was made on this machine, and when; None where there is none that can be read."""
    try:
        with open(os.path.join(folder, LINKS), encoding="utf-8") as file:
            facts = json.load(file)
        return [Link(**each) for each in facts["links"]], float(facts["time"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def plain(links: Sequence[Link], time: float) -> dict[str, Any]:
    """A measurement as `--json` shows it."""
    found = slowest(links)
    return {
        "time": time,
        "links": [asdict(link) for link in links],
        "slowest": None if found is None else [found.first, found.second],
    }

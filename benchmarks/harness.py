"""What every benchmark shares: interleaved rounds, medians with their spread, and the facts behind a number.

A box that others use is never quiet. So contenders take turns within each round, a ratio is taken inside a round, and
what is reported is the median of the rounds with the quartiles beside it.
"""

import contextlib
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MIN_ROUNDS = 5
PEER_PYTHONS: dict[str, str] = {}
"""The Python to run a peer with, by the peer's name, where it has an environment of its own."""
CLEAN_MINUTES = 30.0
"""How long `diagnose` watches runs that nothing is done to."""


def say(progress: str) -> None:
    """What is being measured now, for whoever waits; the result goes elsewhere."""
    print(progress, file=sys.stderr, flush=True)


def interleave(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Let every contender have its turn in every round. Each call returns what it measured, such as seconds."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, measure in contenders.items():
            samples[name].append(measure())
    return samples


def keep_priority() -> None:
    """Let the niceness of this process count against other sessions, too.

    Where the kernel groups processes by session (autogroup), it counts among those of one session alone, and a
    benchmark started with `nice -n -15` has no more of the cores than without. Each new session says it anew.
    """
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    if niceness and niceness != _autogroup_niceness():
        with contextlib.suppress(OSError):  # not the owner, or a kernel without it
            Path("/proc/self/autogroup").write_text(str(niceness))


def _autogroup_niceness() -> int:
    try:
        return int(Path("/proc/self/autogroup").read_text().rpartition(" ")[2])
    except (OSError, ValueError):
        return 0


def summarize(samples: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    low, median, high = quartiles(samples)
    return {
        "median": median,
        "low": low,
        "high": high,
        "min": min(samples),
        "max": max(samples),
        "rounds": len(samples),
    }


def ratio(slower: Sequence[float], faster: Sequence[float]) -> dict[str, float]:
    """How many times faster, round by round. Above one: `faster` is."""
    return summarize([a / b for a, b in zip(slower, faster, strict=True)])


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    if len(samples) < 2:
        return samples[0], samples[0], samples[0]
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, median, high


def describe_machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: found for name in ("torch", "numpy", "shoal") if (found := _version(name))},
        "load_average": os.getloadavg(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
    }


def tell_company() -> list[str]:
    """A note where something was measured with another priority than what else runs here."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    return [f"measured with niceness {niceness} beside the work of others on the same cores"] if niceness else []


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def describe_commit() -> str:
    """The commit that was measured, with a mark if files were changed since."""
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def origin() -> dict[str, Any]:
    """When, of which commit and on what machine something was measured: for every result that is kept."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": describe_commit(),
        "machine": describe_machine(),
    }


def record(name: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    """A benchmark's result together with what it takes to judge and repeat it."""
    return {
        "benchmark": name,
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        **origin(),
        **measured,
    }


def save(result: Mapping[str, Any]) -> Path:
    """Write a result to benchmarks/results/DATE-NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{result['date'][:10]}-{result['benchmark']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def check(what: str, measured: Mapping[str, float], goal: str) -> dict[str, Any]:
    """One goal beside what was measured: a row for `checks`. `goal` is such as "≥ 0.95" or "≤ 150"."""
    sign, number = goal.split()
    is_met = measured["median"] >= float(number) if sign == "≥" else measured["median"] <= float(number)
    return {"goal of": what, "measured": measured, "goal": goal, "verdict": "met" if is_met else "missed"}


def render(result: Mapping[str, Any]) -> str:
    """The result as people read it: rows as tables, goals, notes, and the place last.

    `rows` is the main table, `more` holds further ones by title, `checks` are the goals.
    """
    lines = [result["benchmark"], *_table(result.get("rows", ()))]
    for title, rows in result.get("more", {}).items():
        lines += ["", title, *_table(rows)]
    if result.get("checks"):
        lines += ["", *_table(result["checks"]), ""]
    machine = result["machine"]
    place = (
        f"{machine['cores']} cores, {machine['cpu']}, torch {machine['packages'].get('torch')}, {result['commit']}"
    )
    return "\n".join([*lines, *result.get("notes", ()), place])


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(key for row in rows for key in row))
    table = [names, *([_cell(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(names))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table]


def _cell(value: Any) -> str:
    if isinstance(value, Mapping) and "median" in value:
        return f"{_cell(value['median'])} ({_cell(value['low'])}–{_cell(value['high'])})"
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value)

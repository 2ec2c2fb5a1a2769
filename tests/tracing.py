"""A strict look at trace events: what Google's description of the format demands, and what viewers drop silently."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

KEYS = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "i": {"name", "cat", "ts", "pid", "tid", "s"},
    "C": {"name", "ts", "pid", "tid", "args"},
    "b": {"name", "cat", "id", "ts", "pid", "tid"},
    "e": {"name", "cat", "id", "ts", "pid", "tid"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
    "M": {"name", "pid", "tid", "args"},
}
NAMES = {"process_name", "process_sort_index", "process_labels", "thread_name", "thread_sort_index"}


def check_trace(events: Sequence[Mapping[str, Any]]) -> None:
    """Raise AssertionError at the first event that is wrong."""
    named = {(each["pid"], each["tid"]) for each in events if each["ph"] == "M" and each["name"] == "thread_name"}
    for each in events:
        _check_one(each)
        if each["ph"] in "Xi":
            assert (each["pid"], each["tid"]) in named, f"a line without a name: {each}"
    _check_nesting([each for each in events if each["ph"] == "X"])
    _check_pairs(events, "b", "e")
    _check_pairs(events, "s", "f")
    _check_arrows(events)


def _check_one(each: Mapping[str, Any]) -> None:
    phase = each["ph"]
    missing = KEYS[phase] - each.keys()
    assert not missing, f"{missing} missing in {each}"
    extra = each.keys() - KEYS[phase] - {"ph", "args"}
    assert not extra, f"{extra} unknown in {each}"
    assert isinstance(each["name"], str)
    assert each["name"]
    assert all(isinstance(each[key], int) for key in ("pid", "tid"))
    assert all(isinstance(each[key], Real) and each[key] >= 0 for key in ("dur",) if key in each), each
    assert "ts" not in each or isinstance(each["ts"], Real)
    if phase == "C":
        assert each["args"]
        assert all(isinstance(value, Real) for value in each["args"].values()), each
    if phase == "i":
        assert each["s"] in ("g", "p", "t")
    if phase == "M":
        assert each["name"] in NAMES


def _check_nesting(slices: Sequence[Mapping[str, Any]]) -> None:
    """Slices of one line are inside of each other or apart; a viewer drops those that are not."""
    lines = defaultdict(list)
    for each in slices:
        lines[each["pid"], each["tid"]].append(each)
    for line in lines.values():
        ends: list[float] = []
        for each in sorted(line, key=lambda each: (each["ts"], -each["dur"])):
            end = each["ts"] + each["dur"]
            while ends and ends[-1] <= each["ts"] + 0.0015:  # microseconds have three places
                ends.pop()
            assert not ends or end <= ends[-1] + 0.0015, f"{each} reaches out of what it is in"
            ends.append(end)


def _check_pairs(events: Sequence[Mapping[str, Any]], first: str, second: str) -> None:
    begun = {(each["cat"], each["id"]): each for each in events if each["ph"] == first}
    ended = {(each["cat"], each["id"]): each for each in events if each["ph"] == second}
    assert len(begun) == sum(each["ph"] == first for each in events), "an id is used twice"
    assert begun.keys() == ended.keys()
    assert all(begun[key]["ts"] <= ended[key]["ts"] for key in begun)


def _check_arrows(events: Sequence[Mapping[str, Any]]) -> None:
    """Both ends of an arrow are tied to a slice that is there at that moment."""
    lines = defaultdict(list)
    for each in events:
        if each["ph"] == "X":
            lines[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
    for each in events:
        if each["ph"] in "sf":
            line = lines[each["pid"], each["tid"]]
            assert any(begin <= each["ts"] <= end for begin, end in line), f"nothing is at {each}"

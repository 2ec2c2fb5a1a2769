"""The text of the progress line. Pure: numbers in, text out."""

import math
from collections.abc import Mapping
from typing import Any

from shoal.observe.clean import columns, fit

SHARES = ("compute", "wait", "communicate", "load")
_SHORT = {"communicate": "comm"}


def progress_text(latest: Mapping[int, Mapping[str, Any]], width: int | None = None) -> str:
    """One line about a run from the newest progress of each rank; at most `width` columns.

    Step, loss and speed are those of the lead; shares of time are the mean over ranks, because a rank that is waited
    for does not wait itself. Where the width does not suffice, what matters least goes first.
    """
    if not latest:
        return ""
    parts = _parts(latest[find_lead(latest)], _mean_shares(latest))
    text = _join(parts)
    if width is None:
        return text
    for name, shorter in _shorter_forms(parts):
        if columns(text) <= width:
            return text
        parts[name] = shorter
        text = _join(parts)
    return fit(text, width)


def find_lead(latest: Mapping[int, Mapping[str, Any]]) -> int:
    """The rank whose progress is that of the run.

    It is the lead of the newest World. If that is lost, what it said last counts until somebody is further, or in a
    newer World: others speak less often, and the run would seem to go back.
    """

    def rating(rank: int) -> tuple[bool, float, float, int]:
        data = latest[rank]
        is_lead = bool(data.get("is_lead", rank == min(latest))) and not data.get("is_lost")
        return is_lead, data.get("generation") or 0, data.get("step") or 0, -rank

    return max(latest, key=rating)


def _parts(data: Mapping[str, Any], shares: dict[str, float]) -> dict[str, str]:
    step, num_steps = data.get("step"), data.get("num_steps")
    # Of a map: items that are done, instead of steps.
    unit, rated = ("items", "items") if data.get("unit") == "items" else ("step", "samples")
    loss, rate, workers = data.get("loss"), data.get("samples_per_second"), data.get("workers")
    eta = data.get("eta_seconds") if step != num_steps else None
    shown = [f"{_SHORT.get(name, name)} {round(100 * share)}%" for name, share in shares.items() if share >= 0.005]
    return {
        "step": "" if step is None else f"{unit} {step}/{num_steps}" if num_steps else f"{unit} {step}",
        "epoch": "" if data.get("epoch") is None else f"epoch {data['epoch']}",
        "loss": "" if loss is None else f"loss {number(loss)}",
        "rate": f"{count(rate)} {rated}/s" if rate else "",
        "workers": "" if not workers else "1 worker" if workers == 1 else f"{workers} workers",
        "eta": "" if eta is None else f"eta {duration(eta)}",
        "shares": " ".join(shown),
    }


def _shorter_forms(parts: dict[str, str]) -> list[tuple[str, str]]:
    workers = parts["workers"].partition(" ")[0]
    return [
        ("epoch", ""),
        ("rate", parts["rate"].replace(" samples", "").replace(" items", "")),
        ("shares", parts["shares"].replace("%", "")),
        ("workers", f"{workers}w" if workers not in ("", "1") else ""),
        ("workers", ""),
        *(("shares", text) for text in _fewer_shares(parts["shares"])),
        ("rate", ""),
        ("eta", ""),
        ("loss", ""),
    ]


def _fewer_shares(text: str) -> list[str]:
    """The same shares without the smallest, without the two smallest, and so on to none."""
    words = text.replace("%", "").split()
    pairs = list(zip(words[::2], words[1::2], strict=True))
    shorter = []
    while pairs:
        pairs.remove(min(pairs, key=lambda pair: int(pair[1])))
        shorter.append(" ".join(f"{name} {share}" for name, share in pairs))
    return shorter


def _join(parts: dict[str, str]) -> str:
    return "  ".join(part for part in parts.values() if part)


def _mean_shares(latest: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
    rows = [data for data in latest.values() if data.get("compute") is not None]
    rows = [data for data in rows if not data.get("is_lost")] or rows
    return {name: sum(float(row.get(name, 0.0)) for row in rows) / len(rows) for name in SHARES} if rows else {}


def number(value: float | str) -> str:
    """A loss or a rate with four digits: `1.234`, `0.01200`, `nan`."""
    value = float(value)
    return f"{value:#.4g}".rstrip(".") if math.isfinite(value) else str(value)


def count(value: float) -> str:
    """A large count in few characters: `950`, `3.4k`, `1.2M`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}" if value < 100 * size else f"{value / size:.0f}{unit}"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """A duration as a clock shows it: `0:42`, `1:02:03`, `3d 4h`."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    if whole >= 2 * 86400:
        return f"{whole // 86400}d {whole % 86400 // 3600}h"
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"
    return f"{whole // 60}:{whole % 60:02}"

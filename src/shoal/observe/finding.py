"""One thing that costs a run time, and what to do about it."""

from dataclasses import dataclass

# Below this part of a step nothing is worth a sentence.
WORTH_SAYING = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that costs time, and what to do about it.

    `gain` is the largest part of the time per sample that the change can save, None where it cannot be computed.
    """

    kind: str
    what: str
    why: str = ""
    change: str = ""
    gain: float | None = None
    rank: int | None = None


def percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def ms(seconds: float) -> str:
    """A short duration with three digits: `20.1 ms`, `350 µs`."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"

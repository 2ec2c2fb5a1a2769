"""What is wrong with a run that goes on, and whose fault it is: the words that all eyes use for it."""

from dataclasses import asdict, dataclass
from typing import Any

from shoal.observe.clean import one_line

CAUSES = {
    "dead": "is dead",
    "lost_machine": "was lost with its machine",
    "failed": "failed",
    "frozen": "is frozen",
    "hung": "hangs",
    "slow_input": "waits for its data",
    "slow_compute": "computes slower",
    "throttled": "is held back by a CPU quota",
    "swapping": "is short of memory and swaps",
    "no_core": "shares its core with others",
    "busy_elsewhere": "is busy between steps",
    "slow_link": "has a slow link",
    "uneven_data": "has larger samples than the others",
    "uneven_shares": "has more samples than the others",
    "shape_mismatch": "has other shapes than the others",
    "disagreement": "was given something else than the others",
    "wrong_interface": "cannot be reached at its address",
    "nan": "computed what is no number",
    "disk_full": "cannot write: the disk is full",
    "disk_failed": "cannot write",
    "clock_skew": "has a clock that is off",
    "diverged": "had other parameters than the others",
}
"""Every cause, and what it says of a rank in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One thing that is wrong. `rank` is None where it is nobody's in particular.

    `cost` is the part of the time that all lose by it, None where it cannot be told. `is_told`: people hear of it
    already, from whoever ends the run or replaces the worker.
    """

    cause: str
    rank: int | None
    message: str
    why: str = ""
    hint: str = ""
    cost: float | None = None
    step: int | None = None
    is_told: bool = False

    def facts(self) -> dict[str, Any]:
        """The data of a `diagnosis` event. The cost is in percent."""
        data = asdict(self)
        for name in ("rank", "step", "is_told"):
            del data[name]
        return data | {"cost": None if self.cost is None else round(100 * self.cost, 1)}

    def text(self) -> str:
        """What people read, one fact a line."""
        cost = f" [costs {100 * self.cost:.0f} % of the time]" if self.cost else ""
        lines = [f"{one_line(self.message)}{cost}"]
        lines += [f"  why: {one_line(self.why)}"] if self.why else []
        return "\n".join([*lines, f"   do: {one_line(self.hint)}"] if self.hint else lines)

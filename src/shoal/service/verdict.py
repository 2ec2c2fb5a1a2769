"""Why an attempt ended, of all that is known when it has. Pure."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.service.orders import CAUSE_OF, Orders
from shoal.spec.amounts import gib

_TOLD_TO_END = (
    *(-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGKILL),
    128 + signal.SIGINT,  # of one that still waited for its machines
)
_NO_MEMORY = ("memoryerror", "out of memory", "can't allocate memory", "cannot allocate memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was seen of an attempt. `code` is the launcher's, negative for a death by signal.

    `why` is the reason for which it was stopped, if it was; `was_killed`: it did not end in the time it had for that.
    `over` says in words who had too much memory, where a look at the processes found that. `num_kills` is how many of
    them the kernel killed for it. `failure` is the first cause that the run itself has named.
    """

    code: int
    why: str = ""
    was_killed: bool = False
    over: str = ""
    num_kills: int = 0
    peak_bytes: int = 0
    is_watched: bool = False
    failure: Mapping[str, Any] = field(default_factory=dict)


def judge(orders: Orders, facts: Facts) -> dict[str, Any]:
    """Cause, exit code, message and hint."""
    code = facts.code if facts.code >= 0 else 128 - facts.code
    if code == 0:
        return {"cause": "finished", "exit_code": 0, "message": ""}
    if facts.over or facts.num_kills or (facts.is_watched and orders.memory_bytes and _lacked_memory(facts)):
        return {"cause": "out_of_memory", "exit_code": 128 + signal.SIGKILL, **_tell_memory(orders, facts)}
    if facts.why and facts.code in _TOLD_TO_END:
        late = (
            f"It did not end within {orders.grace_seconds:g} s and was killed; its newest checkpoint is an older one."
        )
        told = ["It was stopped at its time limit."] if facts.why == "time" else []
        told += [late] if facts.was_killed else []
        return {"cause": CAUSE_OF[facts.why], "exit_code": code, "message": " ".join(told)}
    if facts.failure.get("cause") == "lost_machine":
        message, machine = (str(facts.failure.get(name, "")) for name in ("message", "machine"))
        return {"cause": "lost", "exit_code": code, "message": message, "machine": machine}
    parts = [str(facts.failure[name]) for name in ("message", "why") if facts.failure.get(name)]
    message = ": ".join(part.rstrip(".") for part in parts) or f"It ended with code {code}"
    if not parts and facts.code < 0:
        number = -facts.code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        message = f"Its launcher was killed by {name}; `shoal requeue {orders.job}` goes on from what was saved"
    return {
        "cause": "failed",
        "exit_code": code,
        "message": f"{message}.",
        "hint": str(facts.failure.get("hint", "")),
    }


def _lacked_memory(facts: Facts) -> bool:
    text = f"{facts.failure.get('message', '')} {facts.failure.get('why', '')}".lower()
    return any(word in text for word in _NO_MEMORY)


def _tell_memory(orders: Orders, facts: Facts) -> dict[str, str]:
    used = facts.over or f"its processes had {gib(facts.peak_bytes)}"
    return {
        "message": f"Job {orders.job} ran out of memory: {used}, and asked for {gib(orders.memory_bytes)} a worker.",
        "hint": "ask for more memory, or use a smaller batch or more workers",
    }

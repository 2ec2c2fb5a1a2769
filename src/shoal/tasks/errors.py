"""What ends a map, with what was done by then."""

from collections.abc import Mapping
from typing import Any

from shoal.spec.errors import UserError, WorkerError
from shoal.tasks.decision import GiveUp
from shoal.tasks.packing import Packed, unpack


class ItemError(WorkerError):
    """The function failed for one item, or no worker lived to see its end.

    `item` is the number of the item, `results` what was done for others, by number. The exception that the function
    raised is `__cause__`, where it could be sent.
    """

    item: int = -1
    results: Mapping[int, Any] = {}


class ItemsError(UserError):
    """The items themselves ended with an error. `results` is what was done for those before it, by number."""

    results: Mapping[int, Any] = {}


def from_worker(number: int, facts: Mapping[str, Any], worker: int) -> ItemError:
    """The error of a function for an item, from what its worker says of it."""
    told = facts["message"] if facts.get("is_ours") else ": ".join(filter(None, (facts["type"], facts["message"])))
    error = ItemError(
        f"Item {number}: {told}",
        why=facts.get("why", ""),
        hint=facts.get("hint", ""),
        where=facts["where"],
        rank=worker,
        remote_traceback=facts["traceback"],
    )
    error.item = number
    error.__cause__ = _load(facts["pickle"])
    error.add_note(f"\nIn worker {worker}:\n{error.remote_traceback.rstrip()}")
    return error


def _load(data: bytes | None) -> BaseException | None:
    try:
        cause = unpack(Packed(data)) if data is not None else None
    except Exception:  # its class may need other arguments, or not be here
        return None
    return cause if isinstance(cause, BaseException) else None


def given_up(decision: GiveUp) -> ItemError:
    """The error of an item that has used up its attempts."""
    times = f"{decision.attempts} attempt{'s' * (decision.attempts != 1)}"
    error = ItemError(
        f"Item {decision.number} was given up after {times}.",
        why=f"the last one: {decision.why}",
        hint="`shoal explain last` has all of them; `retries=` allows more, `on_error='return'` goes on without it",
        rank=decision.worker,
    )
    error.item = decision.number
    return error


def ending_of(error: BaseException | None) -> tuple[str, int]:
    """Status and exit code of a map that ended with this. Whoever stops listening has stopped it."""
    if error is None:
        return "finished", 0
    if isinstance(error, GeneratorExit):
        return "stopped", 0
    return ("failed", getattr(error, "exit_code", 1)) if isinstance(error, Exception) else ("stopped", 130)

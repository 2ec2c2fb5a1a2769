"""What a simulation came to: completion times, waiting, use. Pure."""

from collections.abc import Sequence
from typing import Any

from shoal.place.simulate import Result

QUANTILES = (0.5, 0.9, 0.99)


def quantile(values: Sequence[float], part: float) -> float:
    """Between the two nearest, as numpy does; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(result: Result) -> dict[str, Any]:
    """Numbers of the whole run, in seconds; `utilisation` is what was used while there was something to run."""
    times = [outcome.jct_seconds for outcome in result.outcomes if outcome.jct_seconds is not None]
    waits = [o.started_at - o.submitted_at for o in result.outcomes if o.started_at is not None]
    busy = [moment for moment in result.moments if moment.num_running or moment.num_waiting]
    ends = [outcome.ended_at for outcome in result.outcomes if outcome.ended_at is not None]
    first = min((outcome.submitted_at for outcome in result.outcomes), default=0.0)
    used = sum(moment.used for moment in busy)
    return {
        "num_jobs": len(result.outcomes),
        "num_ended": len(times),
        "average_jct_seconds": sum(times) / len(times) if times else 0.0,
        **{f"p{part * 100:.0f}_jct_seconds": quantile(times, part) for part in QUANTILES},
        "average_wait_seconds": sum(waits) / len(waits) if waits else 0.0,
        "makespan_seconds": max(ends, default=first) - first,
        "utilisation": used / (len(busy) * result.capacity) if busy and result.capacity else 0.0,
        "average_queue": sum(moment.num_waiting for moment in busy) / len(busy) if busy else 0.0,
        "longest_queue": max((moment.num_waiting for moment in busy), default=0),
        "num_stops": sum(outcome.num_stops for outcome in result.outcomes),
        "num_changes": sum(outcome.num_changes for outcome in result.outcomes),
        "num_decisions": len(result.decision_seconds),
        "decision_p50_seconds": quantile(result.decision_seconds, 0.5),
        "decision_p95_seconds": quantile(result.decision_seconds, 0.95),
    }

"""The one who decides who takes part: the launcher asks it about everything that happens to workers."""

from collections.abc import Mapping
from typing import Any

from shoal.elastic.decision import Decision
from shoal.spec.world import World


class Coordinator:
    """Membership, rendezvous, the history of calls, and detection of the silent. Time is an argument: seconds."""

    def __init__(self, *, min_workers: int, max_workers: int) -> None:
        self.min_workers, self.max_workers = min_workers, max_workers
        self.world: World | None = None

    def started(self, worker: int, pid: int, now: float) -> list[Decision]:
        return []

    def heard(self, worker: int, kind: str, data: Mapping[str, Any], now: float) -> list[Decision]:
        return []

    def exited(self, worker: int, code: int, now: float, *, is_retryable: bool) -> list[Decision]:
        return []

    def resized(self, num_workers: int, now: float) -> list[Decision]:
        return []

    def stopping(self, reason: str, now: float) -> list[Decision]:
        return []

    def ticked(self, now: float) -> list[Decision]:
        return []

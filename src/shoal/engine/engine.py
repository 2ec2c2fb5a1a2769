"""What every engine can do: start workers somewhere, and say what became of them."""

from collections.abc import Sequence
from typing import Protocol

from shoal.spec.job import WorkerExit, WorkerSpec

# An engine that gives its workers a control channel puts the descriptor's number in place of this word of a command.
CONTROL_FD = "{control_fd}"


class Engine(Protocol):
    """Starts workers somewhere and says what became of them. It knows nothing about training.

    The full output of each worker is appended to its `log_path`. A new engine is finished when
    `shoal.testing.engine_contract.EngineContract` passes.
    """

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        """Start all workers, or none: where one cannot be started, those before it are ended; raises UserError."""
        ...

    def poll(self, timeout_seconds: float = 0.0) -> Sequence[WorkerExit]:
        """Workers that ended since the last call, each once, after all of their output was delivered.

        Waits at most `timeout_seconds` and returns earlier when something happened, which may be output alone.
        """
        ...

    def stop(self, grace_seconds: float) -> None:
        """Ask every worker to end, wait, and kill what is left; also processes that workers started.

        Returns when all have ended, at most a moment after `grace_seconds`. The next `poll` reports their exits.
        Calling it twice, or when nothing runs, does nothing.
        """
        ...

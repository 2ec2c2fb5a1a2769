"""What every engine can do: start workers somewhere, and say what became of them."""

from collections.abc import Sequence
from typing import Protocol

from shoal.spec.job import WorkerExit, WorkerSpec

# An engine puts the numbers of descriptors in place of these words of a command: the pipe on which a worker writes to
# the launcher, and the one on which it reads. Without the second word there is no second pipe.
CONTROL_FD = "{control_fd}"
WORLD_FD = "{world_fd}"


class Engine(Protocol):
    """Starts workers somewhere and says what became of them. It knows nothing about training.

    The full output of each worker is appended to its `log_path`. A new engine is finished when
    `shoal.testing.engine_contract.EngineContract` passes.
    """

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        """Start all workers, or none: where one cannot be started, those before it are ended; raises UserError.

        May be called again for further workers, and for a rank whose worker has ended: its log is appended to.
        """
        ...

    def poll(self, timeout_seconds: float = 0.0) -> Sequence[WorkerExit]:
        """Workers that ended since the last call, each once, after all of their output was delivered.

        Waits at most `timeout_seconds` and returns earlier when something happened, which may be output alone.
        """
        ...

    def tell(self, rank: int, line: bytes) -> bool:
        """Send a line to a worker, without waiting for it. False where it cannot arrive any more.

        The worker reads it, with a newline after it, from the descriptor in place of `WORLD_FD` in its command; an
        end of file there means that the launcher is gone. A worker that does not read costs bounded memory.
        """
        ...

    def kill(self, rank: int) -> bool:
        """Kill a worker and all it started; False where none is running. `poll` reports its exit."""
        ...

    def stop(self, grace_seconds: float) -> None:
        """Ask every worker to end, wait, and kill what is left; also processes that workers started.

        Returns when all have ended, at most a moment after `grace_seconds`. The next `poll` reports their exits.
        Calling it twice, or when nothing runs, does nothing.
        """
        ...

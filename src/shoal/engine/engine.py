"""What every engine can do: start workers somewhere, and say what became of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shoal.spec.job import Seat, WorkerExit, WorkerSpec
from shoal.spec.system import SystemSample

if TYPE_CHECKING:
    from shoal.engine.clock import ClockOffset
    from shoal.engine.stacks import Stack

# An engine puts the numbers of descriptors in place of these words of a command: the pipe on which a worker writes to
# the launcher, and the one on which it reads. Without the second word there is no second pipe.
CONTROL_FD = "{control_fd}"
WORLD_FD = "{world_fd}"
# In place of these, the numbers of a file with the call that it is to make, and of one for what comes back.
CALL_FD = "{call_fd}"
RESULT_FD = "{result_fd}"
# And in place of these the interpreter that the engine itself runs in, and the file that makes a process a worker: on
# another machine both may be elsewhere.
PYTHON = "{python}"
WORKER_FILE = "{worker_file}"


def ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Who is told what workers do. Called from within `poll` and `stop`, in order for each rank.

    output: raw bytes of a worker, cut anywhere. control: one line of its control channel, whatever is in it.
    problem: something that went wrong without ending the run, such as a log that cannot be written.
    clock: how far another machine's clock is off, when that is known, and when it has changed.
    system: what a machine with workers and they themselves were doing, once a second.
    """

    output: Callable[[int, bytes], None] = ignore
    control: Callable[[int, bytes], None] = ignore
    problem: Callable[[str], None] = ignore
    clock: "Callable[[ClockOffset], None]" = ignore
    system: Callable[[SystemSample], None] = ignore


class Engine(Protocol):
    """Starts workers somewhere and says what became of them. It knows nothing about training.

    The full output of each worker is appended to its `log_path`. A new engine is finished when
    `shoal.testing.engine_contract.EngineContract` passes.
    """

    def seat(self, ranks: Sequence[int], least: int) -> Mapping[int, Seat]:
        """Where these workers would run: of all of them, or of as many as there is room for, at least `least`.

        One that runs has its seat already. May wait for machines; raises UserError where there will not be enough.
        """
        ...

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

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to all workers and all they started, or to one of them."""
        ...

    def keep_spare(self, spec: WorkerSpec) -> bool:
        """Have a process ready for the next worker like `spec`; False where there is one, or no memory for it."""
        ...

    def take_stacks(self, run_dir: str, reason: str, working_dir: str) -> "Mapping[int, Stack]":
        """Have all workers write down what they do now, into files of the run folder, and return it.

        Takes some milliseconds, at most a second. Never raises: where nothing can be written, nothing is known.
        """
        ...

    def look_into(self, run_dir: str, ranks: Sequence[int], word: str) -> None:
        """Have py-spy look into these workers on their machines. Returns at once: see `engine.native`."""
        ...

    @property
    def pids(self) -> Mapping[int, int]:
        """The processes that run now, by rank; on their machines."""
        ...

    @property
    def room(self) -> int | None:
        """How many workers there can be now, those that run included; None where nothing but memory limits it."""
        ...

    def stop(self, grace_seconds: float) -> None:
        """Ask every worker to end, wait, and kill what is left; also processes that workers started.

        Returns when all have ended, at most a moment after `grace_seconds`. The next `poll` reports their exits.
        Calling it twice, or when nothing runs, does nothing.
        """
        ...

    def close(self) -> None:
        """Give back what the engine holds: machines, connections, ports. `stop` comes first."""
        ...

"""Real processes that hold a group and do what a test asks, all at once.

The processes are forked from one that has imported torch already: a second instead of three for each set.
"""

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.distributed import Store, TCPStore

from shoal.comm.connect import connect_devices
from shoal.comm.group import Group
from shoal.comm.rendezvous import Rendezvous

_CONTEXT = multiprocessing.get_context("forkserver")
ANSWER_SECONDS = 30.0


@dataclass
class Member:
    """One rank, inside its process: what a check is given. `group` is generation 0.

    Tensors of a rank that says to have them on another device than they are pass through main memory, and nothing
    else is different: so that way is tested without such a device.
    """

    rank: int
    size: int
    transport: str
    store: Any
    device: str = "cpu"
    group: Any = None
    others: list[Any] = field(default_factory=list)

    def join(self, generation: int, timeout_seconds: float = 20.0) -> Any:
        """A group of another generation with the same ranks."""
        meeting = Rendezvous(self.rank, self.size, timeout_seconds, store=self.store, generation=generation)
        group: Group = connect_devices(meeting, self.transport, self.device)
        self.others.append(group)
        return group


Check = Callable[..., Any]


class Ranks:
    """The test's hold on the processes. `run` calls a module-level function on every rank, `function(member, ...)`.

    The meeting point lives in the test's own process, so that any rank may be killed.
    """

    def __init__(self, size: int, transport: str, devices: Sequence[str]) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_serve, args=(rank, size, transport, devices[rank], self._store.port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def start(self, check: Check, **arguments: Any) -> None:
        """Begin a check on every rank; `outcomes` waits for it."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((check, arguments))

    def outcomes(self, ranks: list[int] | None = None) -> list[Any]:
        """What each rank returned, or the exception it raised; None for one that died."""
        pipes = self._pipes if ranks is None else [self._pipes[rank] for rank in ranks]
        return [_answer(pipe) for pipe in pipes]

    def attempt(self, check: Check, **arguments: Any) -> list[Any]:
        """Run a check on every rank; exceptions are returned, not raised."""
        self.start(check, **arguments)
        return self.outcomes()

    def run(self, check: Check, **arguments: Any) -> list[Any]:
        """Run a check that must succeed on every rank."""
        outcomes = self.attempt(check, **arguments)
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException):
                raise AssertionError(f"rank {rank}: {getattr(outcome, 'story', outcome)}") from outcome
        return outcomes

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.processes[rank].pid, number)

    def close(self) -> None:
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            pipe.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
        for process in self.processes:
            process.join(5)
            process.kill()
            process.join()
            process.close()


@contextlib.contextmanager
def ranks_of(size: int, transport: str, devices: Sequence[str] = ()) -> Iterator[Ranks]:
    """Processes that have formed a group; ended on the way out, whatever happened. `devices`: see Member."""
    _CONTEXT.set_forkserver_preload(["torch", "shoal.testing.ranks"])
    ranks = Ranks(size, transport, devices or ["cpu"] * size)
    try:
        ranks.run(_hello)
        yield ranks
    finally:
        ranks.close()


def _answer(pipe: Connection) -> Any:
    if not wait([pipe], ANSWER_SECONDS):
        return TimeoutError(f"no answer in {ANSWER_SECONDS} s")
    try:
        return pipe.recv()
    except EOFError:
        return None


def _hello(member: Member) -> str:
    member.group = member.join(0)
    return str(member.group.reason)


def _serve(rank: int, size: int, transport: str, device: str, port: int, pipe: Connection) -> None:
    store: Store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
    torch.set_num_threads(1)
    member = Member(rank, size, transport, store, device)
    while True:
        try:
            check, arguments = pipe.recv()
            pipe.send(_attempt(check, member, arguments))
        except (EOFError, OSError):  # the test is over
            break
    for group in member.others:
        group.close()


def _attempt(check: Check, member: Member, arguments: dict[str, Any]) -> Any:
    try:
        return check(member, **arguments)
    except Exception as error:
        # The traceback does not travel with the exception; the story does.
        vars(error).update(story=traceback.format_exc(), when=time.monotonic())
        return error

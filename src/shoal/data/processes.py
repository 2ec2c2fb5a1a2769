"""Loading in processes of its own: Python code that would hold up training, or draws random numbers.

The processes are forks, so datasets need not be picklable and scripts need no `if __name__ == "__main__"`. They hold
nothing that must be saved: they are killed at once when loading ends, and end by themselves when their parent dies.
"""

import gc
import os
import select
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle
from pickle import PicklingError
from typing import NoReturn

import torch

from shoal.data.channel import Channel
from shoal.data.ledger import StepPlan
from shoal.data.readers import Loaded, Reader
from shoal.spec.errors import BugError, ShoalError, UserError, WorkerError


class ProcessWork:
    """Hands out plans to processes in turn and takes the batches back in order."""

    def __init__(self, reader: Callable[[], Reader], num_processes: int) -> None:
        self._asked: deque[_Process] = deque()
        self._processes: list[_Process] = []
        try:
            for _ in range(num_processes):
                self._processes.append(_Process(reader, self._processes))
        except BaseException:
            self.interrupt()
            self.close()
            raise
        self._turns = cycle(self._processes)

    def start(self, plan: StepPlan) -> None:
        process = next(self._turns)
        process.give(plan)
        self._asked.append(process)

    def finish(self) -> Loaded | None:
        return self._asked.popleft().take()

    def interrupt(self) -> None:
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        for process in self._processes:
            process.reap()


class _Process:
    """One forked process and the channel to it."""

    def __init__(self, reader: Callable[[], Reader], siblings: list["_Process"]) -> None:
        self._channel, theirs = Channel.pair()
        _flush()  # what is buffered now would otherwise be written twice
        parent = os.getpid()
        self._pid = _fork()
        if self._pid == 0:
            for channel in [self._channel, *(sibling._channel for sibling in siblings)]:
                channel.close()
            _serve_and_exit(reader, theirs, parent)
        theirs.close()

    def give(self, plan: StepPlan) -> None:
        try:
            self._channel.send(plan)
        except BrokenPipeError:
            raise self._death() from None

    def take(self) -> Loaded | None:
        try:
            answer = self._channel.receive()
        except (EOFError, ConnectionResetError):
            raise self._death() from None
        if isinstance(answer, ShoalError):
            raise answer
        return answer  # type: ignore[no-any-return]

    def kill(self) -> None:
        # Nobody but `reap` collects the process, so its number cannot be another's by now.
        os.kill(self._pid, signal.SIGKILL)

    def reap(self) -> None:
        self._channel.close()
        os.waitpid(self._pid, 0)

    def _death(self) -> WorkerError:
        """Say how it died, and leave it to `reap`."""
        ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        by_signal, code = ended.si_code != os.CLD_EXITED, ended.si_status
        how = f"was killed by {signal.Signals(code).name}" if by_signal else f"ended with exit code {code}"
        is_memory = by_signal and code == signal.SIGKILL
        return WorkerError(
            f"A process that loads data {how}.",
            why="the kernel kills a process this way when memory runs out" if is_memory else "",
            hint="load with fewer processes or a smaller batch" if is_memory else "",
        )


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
            stream.flush()


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 warns of locks that other threads may hold. The child runs the dataset and torch on one thread
        # only, as the workers of torch's DataLoader do, and Python makes its own locks anew.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve_and_exit(reader: Callable[[], Reader], channel: Channel, parent: int) -> NoReturn:
    code = 1
    try:
        # The parent's objects stay the parent's: a finalizer run here could remove what it still uses.
        gc.freeze()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        torch.set_num_threads(1)
        _serve(reader(), channel)
        code = 0
    except (BrokenPipeError, ConnectionResetError):
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def _serve(reader: Reader, channel: Channel) -> None:
    while True:
        try:
            plan = channel.receive()
        except EOFError:
            return
        answer = _load(reader, plan)
        _flush()  # what the dataset printed, for this process may be killed at any time
        try:
            channel.send(answer)
        except (PicklingError, AttributeError, TypeError) as error:
            channel.send(_cannot_send(error))


def _load(reader: Reader, plan: StepPlan) -> Loaded | ShoalError | None:
    try:
        return reader.load(plan)
    except ShoalError as error:
        # The cause is told in `remote_traceback`; the object itself may not survive the journey.
        return error
    except Exception as error:
        return BugError(f"Loading failed: {error!r}", remote_traceback=traceback.format_exc())


def _cannot_send(error: Exception) -> UserError:
    return UserError(
        "A batch cannot be sent from the process that loaded it.",
        why=f"{type(error).__name__}: {error}",
        hint="return tensors, numbers, text and containers of them from the dataset and from `collate`",
    )


def _end_with(parent: int) -> None:
    """End this process the moment its parent is gone: it shares sockets by which others notice that death."""
    poll, wait_milliseconds = select.poll(), None
    try:
        poll.register(os.pidfd_open(parent), select.POLLIN)
    except OSError:  # not on this kernel: look now and then
        wait_milliseconds = 200
    while os.getppid() == parent:
        poll.poll(wait_milliseconds)
    os._exit(1)

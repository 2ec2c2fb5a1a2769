"""Asking workers for their stacks: a signal that `worker.py` listens to, and the files in which the answers appear.

Nothing is needed of the script. `faulthandler` answers from inside the signal, so also one that holds the
interpreter, or waits in C, is seen. Only the stopped and those deep in the kernel say nothing.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from shoal.engine.entry import stacks_file
from shoal.engine.frames import Thread, brief, parse, pick, place, tell
from shoal.engine.worker import STACK_SIGNAL

WAIT_SECONDS = 0.4
LOOK_SECONDS = 0.002
MAX_CHILDREN = 16
MAX_BYTES = 1 << 20
_BIT = 1 << (STACK_SIGNAL - 1)
_CHILD = "--- process "


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What one worker was doing. `text` is in the file `path`, from `begin` on; `why_none` says why there is none."""

    rank: int
    pid: int
    path: str
    begin: int = 0
    text: str = ""
    why_none: str = ""
    working_dir: str = ""

    @property
    def processes(self) -> list[list[Thread]]:
        """The threads of the worker, then those of each process it forked."""
        return [parse(part) for part in self.text.split(_CHILD)]

    @property
    def thread(self) -> Thread:
        return pick(self.processes)

    def tell(self) -> str:
        """Where it is, in a line; or why that is not known."""
        return tell(self.thread, self.working_dir) or self.why_none

    def plain(self) -> dict[str, object]:
        """Everything that is known, as JSON values."""
        processes = [[list(map(asdict, thread)) for thread in threads] for threads in self.processes]
        return {"rank": self.rank, "pid": self.pid, "path": self.path, **self.facts(), "processes": processes}

    def facts(self) -> dict[str, object]:
        """For a journal."""
        frames = brief(self.thread, self.working_dir)
        return {"where": place(self.thread, self.working_dir), "stack": frames or [f"({self.why_none})"]}


def take_stacks(run_dir: str, pids: Mapping[int, int], reason: str, working_dir: str = "") -> dict[int, Stack]:
    """Have all these workers write down what they do now, and return it. Takes some milliseconds, at most 0.4 s.

    Each goes into the file of its rank, under a line that names the time and `reason`. Never raises: where nothing
    can be written, nothing is known.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    asked = {rank: _begin(run_dir, rank, pid, reason) for rank, pid in pids.items()}
    waits = {rank: _ask(pid) for rank, pid in pids.items()}
    for rank, pid in pids.items():
        waits[rank] = waits[rank] or _await(pid, deadline)
        _take_children(asked[rank][0], pid, deadline)
    return {
        rank: Stack(
            rank=rank,
            pid=pid,
            path=asked[rank][0],
            begin=asked[rank][1],
            text=read_text(*asked[rank]),
            why_none=waits[rank],
            working_dir=working_dir,
        )
        for rank, pid in pids.items()
    }


def keep_text(stack: Stack) -> Stack:
    """A stack that was taken on another machine, with its text in the file that this one sees, too."""
    if read_text(stack.path, stack.begin) == stack.text:
        return stack
    begin = _begin(os.path.dirname(os.path.dirname(stack.path)), stack.rank, stack.pid, "taken on its machine")[1]
    _append(stack.path, stack.text)
    return replace(stack, begin=begin)


def _begin(run_dir: str, rank: int, pid: int, reason: str) -> tuple[str, int]:
    """The file of a rank, and where in it the answer will begin."""
    path = stacks_file(run_dir, rank)
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    return path, _append(path, f"=== {when}  rank {rank}, process {pid}: {reason}\n")


def _append(path: str, line: str) -> int:
    try:
        with open(path, "ab", buffering=0) as file:
            file.write(line.encode("utf-8", "replace"))
            return file.tell()
    except OSError:
        return 0


def _ask(pid: int) -> str:
    """Send the signal; what comes back is why that is of no use."""
    state = _status(pid)
    if state.get("State", "Z")[:1] in "ZX":
        return "the process is gone"
    if state["State"][:1] in "Tt":
        return "the process is stopped (SIGSTOP)"
    # Whoever does not expect this signal would be killed by it.
    if not _mask(state, "SigCgt") & _BIT:
        return "the process does not run Python, or has hardly begun"
    with contextlib.suppress(OSError):
        os.kill(pid, STACK_SIGNAL)
    return ""


def _await(pid: int, deadline: float) -> str:
    """Return when the signal has come and gone: while it is dealt with, it is blocked."""
    while state := _status(pid):
        if not (_mask(state, "SigPnd") | _mask(state, "ShdPnd") | _mask(state, "SigBlk")) & _BIT:
            return ""
        if time.monotonic() > deadline:
            return "the process did not answer: it is frozen, or deep in the kernel"
        time.sleep(LOOK_SECONDS)
    return ""


def _take_children(path: str, group: int, deadline: float) -> None:
    """Processes that the worker forked answer too, one after the other: they write into the same file."""
    for pid in _forked(group):
        if time.monotonic() > deadline:
            return
        _append(path, f"{_CHILD}{pid}, started by {group}\n")
        if not _ask(pid):
            _await(pid, deadline)


def _forked(group: int) -> Iterator[int]:
    """Processes of the group that expect the signal: it is their leader's handler, kept over a fork."""
    with contextlib.suppress(OSError):
        numbers = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        found = 0
        for pid in numbers:
            if pid != group and found < MAX_CHILDREN and _group_of(pid) == group and _is_ready(pid):
                found += 1
                yield pid


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return -1


def _is_ready(pid: int) -> bool:
    return bool(_mask(_status(pid), "SigCgt") & _BIT)


def _status(pid: int) -> dict[str, str]:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            pairs = (line.partition(":") for line in file)
            return {name: value.strip() for name, _, value in pairs}
    except OSError:
        return {}


def _mask(state: Mapping[str, str], name: str) -> int:
    return int(state.get(name, "0"), 16)


def read_text(path: str, begin: int) -> str:
    """One answer in a file of answers."""
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            return file.read(MAX_BYTES).decode("utf-8", "replace").partition("\n===")[0]
    except OSError:
        return ""

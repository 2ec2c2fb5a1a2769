"""Which failure came first, and what it means. Pure: exits and error events in, an ordered list of failures out."""

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.engine.machine import OutOfMemoryKills
from shoal.spec.event import Event
from shoal.spec.job import WorkerExit

# A worker that lost its peer may notice before the launcher notices the peer's end.
WINDOW_SECONDS = 5.0
# How long the other workers may go on after a failure: until they have said whether they failed for the same reason,
# and longer where the failure looks like the consequence of one that is still to come.
SETTLE_SECONDS = 0.3
SETTLE_LOST_PEER_SECONDS = 1.0
# A worker that reported an exception and does not end is held up by threads of its own.
EXIT_SECONDS = 2.0

_LOST_PEER_TYPES = frozenset(
    (
        "MemberLost",
        "BrokenPipeError",
        "ConnectionResetError",
        "ConnectionRefusedError",
        "ConnectionAbortedError",
        "DistNetworkError",
        "DistStoreError",
        "DistBackendError",
    )
)
_LOST_PEER_TEXT = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|peer|remote process exited|timed out|timeout"
    r"|ncclRemoteError|ncclSystemError|store.*(wait|get)|gloo.*(transport|rendezvous|pair)",
    re.IGNORECASE,
)
_FAULT_FRAME = re.compile(r'^\s*File "(?P<file>[^"<]+)", line (?P<line>\d+) in ', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known when the causes are sought.

    `stopped_at` is when the launcher began to stop workers; ends after it say nothing. `tails` holds the last output
    of each rank; places below `working_dir` are shown relative to it. `memory_kills` counts what
    the kernel killed for lack of memory since the start. `nodes` are the machines of ranks that are elsewhere.
    """

    exits: Sequence[WorkerExit] = ()
    errors: Sequence[Event] = ()
    stopped_at: float | None = None
    tails: Mapping[int, str] = field(default_factory=dict)
    working_dir: str = ""
    memory_kills: OutOfMemoryKills = field(default_factory=OutOfMemoryKills)
    nodes: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One worker's failure, or with `rank` None that of the run as a whole.

    `exit_code` is what a shell would show: 128 + N for a death by signal N. `cause` is the word for what is at fault,
    where the error says so, or the way it ended does; `ranks` are then those who did it. `machine` is that with which
    it was lost.
    """

    rank: int | None
    time: float
    exit_code: int
    message: str
    where: str = ""
    why: str = ""
    hint: str = ""
    step: int | None = None
    traceback: str = ""
    is_lost_peer: bool = False
    has_exited: bool = True
    cause: str = ""
    ranks: tuple[int, ...] = ()
    machine: str = ""


def find_failures(evidence: Evidence) -> list[Failure]:
    """Every failure, the first cause first, the rest in order of time; empty where no worker failed by itself.

    A worker whose peer is gone fails too, sometimes before the peer's own end was seen. So among failures within 5 s
    of the earliest, one that does not look like a lost peer wins.
    """
    errors = merge_errors(evidence.errors)
    exits = {end.rank: end for end in evidence.exits}
    found = [_on_node(failure_of(event, exits.get(rank)), evidence.nodes) for rank, event in errors.items()]
    found += [
        _from_exit(end, evidence) for end in evidence.exits if end.rank not in errors and _is_failure(end, evidence)
    ]
    found.sort(key=lambda failure: failure.time)
    if not found:
        return []
    first = _pick_first(found)
    rest = [failure for failure in found if failure is not first]
    return [_explain_early_end(first, evidence), *rest]


def merge_errors(events: Iterable[Event]) -> dict[int, Event]:
    """One error a rank: the first report, completed by what later ones add (the loop knows the step, for one)."""
    merged: dict[int, Event] = {}
    for event in events:
        rank = event.rank or 0
        first = merged.setdefault(rank, event)
        if first is not event:
            data = {**event.data, **{name: value for name, value in first.data.items() if value not in (None, "")}}
            merged[rank] = replace(first, data=data, step=event.step if first.step is None else first.step)
    return merged


def _is_failure(end: WorkerExit, evidence: Evidence) -> bool:
    return end.code != 0 and (evidence.stopped_at is None or end.time < evidence.stopped_at)


def _pick_first(found: Sequence[Failure]) -> Failure:
    near = [failure for failure in found if failure.time <= found[0].time + WINDOW_SECONDS]
    return next((failure for failure in near if not failure.is_lost_peer), found[0])


def should_stop(failures: Sequence[Failure], now: float) -> bool:
    """Whether the workers that are left should be stopped now, or may say a little more first."""
    if not failures:
        return False
    first = failures[0]
    settle = SETTLE_LOST_PEER_SECONDS if first.is_lost_peer else SETTLE_SECONDS
    return now >= first.time + (settle if first.has_exited else EXIT_SECONDS)


def shell_code(code: int) -> int:
    """An exit code as shells show it."""
    return 128 - code if code < 0 else code


def failure_of(event: Event, end: WorkerExit | None = None) -> Failure:
    """What a worker said to have gone wrong, and how it ended, if it has."""
    data = event.data
    kind, message = str(data.get("type") or "Error"), str(data.get("message") or "")
    step = data.get("step") if event.step is None else event.step
    return Failure(
        rank=event.rank or 0,
        time=event.time,
        exit_code=_code_of(data.get("exit_code"), end),
        message=_say_error(kind, message),
        where=str(data.get("where") or ""),
        why=str(data.get("why") or ""),
        hint=str(data.get("hint") or "") or _hint_for(kind, message),
        step=step if isinstance(step, int) else None,
        traceback=str(data.get("traceback") or ""),
        is_lost_peer=looks_like_lost_peer(kind, message),
        has_exited=end is not None,
        cause=str(data.get("cause") or ""),
        ranks=tuple(rank for rank in data.get("ranks") or () if isinstance(rank, int)),
    )


def _code_of(reported: object, end: WorkerExit | None) -> int:
    """What the worker said its exit code would be: a library that crashes after an exception is not the cause."""
    if isinstance(reported, int) and 0 < reported < 256:
        return reported
    return (shell_code(end.code) if end is not None else 0) or 1


_OURS = ("UserError", "PlanError", "WorkerError", "MemberLost", "Preempted", "Retryable", "BugError")
"""Errors of ours are whole sentences."""


def _say_error(kind: str, message: str) -> str:
    if kind == "SystemExit":
        return f"The script ended itself: {message}"
    if kind in _OURS:
        return message
    return f"{kind}: {message}" if message else kind


def looks_like_lost_peer(kind: str, message: str) -> bool:
    """Whether an exception is what a worker sees when another one is gone."""
    if kind in _LOST_PEER_TYPES:
        return True
    # What gloo and NCCL throw arrives as RuntimeError; others with such words are the user's own.
    return kind in ("RuntimeError", "TimeoutError", "OSError", "EOFError") and bool(_LOST_PEER_TEXT.search(message))


def _hint_for(kind: str, message: str) -> str:
    if kind == "ModuleNotFoundError" and (name := re.search(r"No module named '([^']+)'", message)):
        return f"install what provides {name[1]!r}, or name another interpreter with `--python`"
    if kind == "MemoryError" or "out of memory" in message.lower():
        return "use fewer workers (`-n`) or a smaller batch"
    return ""


def _on_node(failure: Failure, nodes: Mapping[int, str]) -> Failure:
    """A file that one machine lacks may be on all others: say which machine it is."""
    node = nodes.get(-1 if failure.rank is None else failure.rank)
    if failure.hint or not node or not failure.message.startswith("FileNotFoundError"):
        return failure
    hint = f"rank {failure.rank} is on {node}: keep data in a folder that all machines share, copy it, or use a URL"
    return replace(failure, hint=hint)


def _from_exit(end: WorkerExit, evidence: Evidence) -> Failure:
    tail = evidence.tails.get(end.rank, "")
    facts: dict[str, Any] = {"cause": "dead"}
    if end.machine:
        facts = _of_machine(end.machine)
    else:
        facts |= _of_signal(-end.code, evidence.memory_kills) if end.code < 0 else _of_code(end.code, tail)
    where = _fault_place(tail).removeprefix(f"{evidence.working_dir}/")
    return Failure(rank=end.rank, time=end.time, exit_code=shell_code(end.code), where=where, **facts)


def _of_machine(machine: str) -> dict[str, str]:
    return {
        "cause": "lost_machine",
        "machine": machine,
        "message": f"The worker was lost with its machine, {machine}.",
        "why": "that is off or cut off, or its agent there was killed; a run of a fixed size ends with any loss",
        "hint": "go on with `shoal run --resume`; with `-n MIN:MAX` a run goes on by itself",
    }


def _of_code(code: int, tail: str) -> dict[str, str]:
    last = [line.strip() for line in tail.splitlines() if line.strip()]
    return {
        "message": f"The worker ended with exit code {code}.",
        "why": f"its last line: {last[-1]}" if last else "",
    }


def _of_signal(number: int, memory_kills: OutOfMemoryKills) -> dict[str, str]:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    facts = {"message": f"The worker was killed by {name}."}
    if name == "SIGKILL":
        return facts | _of_kill(memory_kills)
    if name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"):
        return facts | {
            "why": "native code crashed: a library, not Python itself"
            if name != "SIGABRT"
            else "native code gave up",
            "hint": "its log has the Python stack of every thread at that moment",
        }
    return facts | {"why": "someone sent it that signal; shoal did not"}


def _of_kill(memory_kills: OutOfMemoryKills) -> dict[str, str]:
    less = "use fewer workers (`-n`) or a smaller batch"
    if memory_kills.cgroup:
        return {"why": "out of memory: the limit of this container or cgroup was reached", "hint": less}
    if memory_kills.machine:
        return {"why": "out of memory: the machine had none left", "hint": less}
    return {
        "why": "killed from outside (`kill -9`) or out of memory",
        "hint": f"`dmesg | tail` may say which; if memory, {less}",
    }


def _fault_place(tail: str) -> str:
    """The innermost frame of the user's in what faulthandler printed, which lists the innermost first."""
    start = tail.rfind("Fatal Python error")
    if start < 0:
        return ""
    frames = [(match["file"], match["line"]) for match in _FAULT_FRAME.finditer(tail, start)]
    own = [frame for frame in frames if "-packages/" not in frame[0] and "/lib/python" not in frame[0]]
    return ":".join((own or frames)[0]) if frames else ""


def _explain_early_end(first: Failure, evidence: Evidence) -> Failure:
    """A lost peer that failed nowhere has ended well, and too early."""
    limit = evidence.stopped_at or float("inf")
    early = sorted(end.rank for end in evidence.exits if end.code == 0 and end.time < limit)
    if not first.is_lost_peer or first.why or not early:
        return first
    return replace(
        first,
        why=f"rank {', '.join(map(str, early))} had ended already, without an error",
        hint=first.hint or "every rank must take part in the same collective calls, and the same number of them",
    )

"""What a launcher does when it is asked for something while a run goes on: `shoal resize`, `kill`, `stacks`, ..."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shoal.engine.env import give_gpus
from shoal.spec.errors import UserError
from shoal.spec.event import Event

if TYPE_CHECKING:
    from shoal.elastic_run import ElasticRun
    from shoal.engine.engine import Engine
    from shoal.hanging import TakeStacks

SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP, "TERM": signal.SIGTERM, "CONT": signal.SIGCONT}


def answer(
    request: Mapping[str, Any],
    engine: "Engine",
    elastic: "ElasticRun | None",
    write: Callable[[Event], None],
    take_stacks: "TakeStacks",
    run_dir: str,
) -> dict[str, Any]:
    """Do what is asked and say what was done; raises UserError where that cannot be."""
    verb = request.get("verb")
    if verb == "resize":
        return _resize(_whole(request, "num_workers"), _nodes(request), _gpus(request), engine, elastic)
    if verb == "kill":
        return _kill(_whole(request, "rank"), str(request.get("signal")), engine, elastic, write)
    if verb == "stacks":
        return _stacks(take_stacks)
    if verb == "look":
        return _look_into(request, engine, run_dir)
    if verb == "record":
        return _record(request, engine.pids, run_dir)
    raise UserError(f"This launcher does not know the request {str(verb)[:40]!r}.", hint="is it of another version?")


def _stacks(take_stacks: "TakeStacks") -> dict[str, Any]:
    """Where in which file each worker wrote what it is doing. It may be long, so it is read from there."""
    taken = take_stacks("`shoal stacks` asked").values()
    keys = ("rank", "pid", "path", "begin", "why_none", "working_dir")
    return {"stacks": [{key: getattr(stack, key) for key in keys} for stack in taken]}


def _look_into(request: Mapping[str, Any], engine: "Engine", run_dir: str) -> dict[str, Any]:
    """Have py-spy look into workers where they run. What it sees is in the run folder some seconds later."""
    asked = request.get("ranks")
    ranks = [rank for rank in asked if rank in engine.pids] if isinstance(asked, list) else sorted(engine.pids)
    word = os.urandom(8).hex()
    engine.look_into(run_dir, ranks, word)
    return {"id": word, "ranks": ranks}


def _record(request: Mapping[str, Any], pids: Mapping[int, int], run_dir: str) -> dict[str, Any]:
    """Have one rank, or all, record more of its next steps. Whether it does is told in the journal."""
    from shoal.observe.asks import MAX_STEPS, WHATS, Ask, write_ask

    what, num_steps = str(request.get("what")), _whole(request, "num_steps")
    if what not in WHATS:
        raise UserError(f"This launcher cannot have {what[:40]!r} recorded.", hint="is it of another version?")
    if not 1 <= num_steps <= MAX_STEPS:
        raise UserError(f"{num_steps} steps cannot be recorded.", hint=f"ask for 1 to {MAX_STEPS:,}")
    ranks = sorted(pids) if request.get("rank") is None else [_whole(request, "rank")]
    if missing := [rank for rank in ranks if rank not in pids]:
        raise _not_running(missing[0], pids)
    word = os.urandom(8).hex()
    try:
        for rank in ranks:
            ask = Ask(id=word, what=what, rank=rank, pid=pids[rank], num_steps=num_steps)
            write_ask(run_dir, ask)
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(
            "The ranks cannot be asked.", why=f"{why}: {run_dir}", hint="make room on that disk"
        ) from error
    return {"id": word, "ranks": ranks}


def _not_running(rank: int, pids: Mapping[int, int]) -> UserError:
    running = ", ".join(map(str, sorted(pids)))
    why = f"these are: {running}" if running else "none is"
    return UserError(f"There is no rank {rank} that runs.", why=why, hint="name one of those")


def _whole(request: Mapping[str, Any], name: str) -> int:
    value = request.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{name} is {str(value)[:40]!r}, which is not a whole number.")
    return value


def _nodes(request: Mapping[str, Any]) -> dict[str, int] | None:
    """How many workers are to be on which machine, where somebody else decides that."""
    nodes = request.get("nodes")
    if nodes is None:
        return None
    is_sound = isinstance(nodes, dict) and all(type(count) is int and count > 0 for count in nodes.values())
    if not is_sound or sum(nodes.values()) != request.get("num_workers"):
        raise UserError("nodes is to say how many of the workers are on which machine.")
    return dict(nodes)


def _gpus(request: Mapping[str, Any]) -> list[int]:
    """The GPUs of this machine that the workers have, where somebody else decides that; else none."""
    gpus = request.get("gpus", [])
    if not isinstance(gpus, list) or not all(type(number) is int and number >= 0 for number in gpus):
        raise UserError("gpus is to be a list of the numbers of GPUs.")
    return gpus


def _resize(
    num_workers: int,
    nodes: Mapping[str, int] | None,
    gpus: list[int],
    engine: "Engine",
    elastic: "ElasticRun | None",
) -> dict[str, Any]:
    if elastic is None:
        raise UserError(
            "This run is not elastic.",
            why="it was started with a fixed number of workers",
            hint="start it with `-n MIN:MAX`, such as `-n 2:8`; `--resume` goes on with what it has done so far",
        )
    least, most = elastic.min_workers, elastic.max_workers
    if not least <= num_workers <= most:
        raise UserError(
            f"This run cannot have {num_workers} worker{'s' * (num_workers != 1)}.",
            why=f"it was started with `-n {least}:{most}`",
            hint=f"ask for {least} to {most}" if least < most else "start it with a wider range",
        )
    before = elastic.num_workers
    if gpus:
        give_gpus(gpus)
    elastic.resize(num_workers, frozenset() if nodes is None else _arrange(engine, nodes))
    return {"num_workers": num_workers, "before": before}


def _arrange(engine: "Engine", nodes: Mapping[str, int]) -> frozenset[int]:
    """Have workers on these machines; returns those who are on others. On one machine there is nothing to choose."""
    from shoal.engine.fleet import Fleet

    return engine.arrange(nodes) if isinstance(engine, Fleet) else frozenset()


def _kill(
    rank: int, name: str, engine: "Engine", elastic: "ElasticRun | None", write: Callable[[Event], None]
) -> dict[str, Any]:
    pids = engine.pids
    if name not in SIGNALS:
        raise UserError(f"There is no signal {name[:40]!r} here.", hint=f"use one of: {', '.join(SIGNALS)}")
    if rank not in pids:
        running = ", ".join(map(str, sorted(pids)))
        is_known = elastic is not None and 0 <= rank < elastic.max_workers
        raise UserError(
            f"Rank {rank} is not running now." if is_known else f"There is no rank {rank} that runs.",
            why=f"these are: {running}" if running else "none is",
            hint="`shoal explain RUN` says what became of it" if is_known else "name one of those",
        )
    write(Event(kind="worker_signaled", time=time.time(), rank=rank, data={"signal": f"SIG{name}"}))
    if name == "KILL":
        engine.kill(rank)
    else:
        engine.signal(SIGNALS[name], rank)
    return {"rank": rank, "pid": pids[rank], "signal": f"SIG{name}"}

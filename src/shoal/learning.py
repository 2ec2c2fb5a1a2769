"""What runs teach of their speed: from the steps of a run to the model of its job, and from past jobs to new ones.

What decides is in `place`; here are the files. A run's steps become observations, what was expected of each of
them is kept in the run's `predictions.jsonl`, and what it has taught goes into a history, a line for each job.
"""

import math
import os
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from shoal.observe import journal
from shoal.observe.breakdown import changes_in, count_warmup, is_disturbed, median
from shoal.observe.decoding import decode_lines
from shoal.observe.lines import Appender
from shoal.observe.metrics import read as read_metrics
from shoal.observe.predictions import append_predictions, read_predictions
from shoal.observe.turns import Turn, merge_turns
from shoal.place.prior import PastJob, Prior, Traits
from shoal.place.throughput import Observation, Throughput
from shoal.spec.event import Event
from shoal.spec.prediction import Prediction

MIN_STEPS = 5
"""Fewer steps in one configuration tell more of what else happened than of it."""
UNSETTLED_STEPS = 2
"""How many steps after a change are left out: they pay for things that happen once."""


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """A configuration: what a model is asked about."""

    nodes: int
    workers: int
    micro_batch: float
    accumulation: int


def observations_of(run_dir: str, kind: str = "") -> tuple[Observation, ...]:
    """What the steps of a run tell of its speed, one for each configuration it had, in the order it had them.

    May be called while it runs. `kind` is the kind of node that it is on. Costs some 10 µs a step and worker.
    """
    events = list(journal.read(os.path.join(run_dir, "journal.jsonl")))
    return observe(merge_turns(read_metrics(run_dir), events), events, kind)


def observe(turns: Sequence[Turn], events: Sequence[Event], kind: str = "") -> tuple[Observation, ...]:
    """The same from turns: medians over undisturbed steps. Pure."""
    changes, worlds = changes_in(events), _worlds(events)
    hosts, pieces = _hosts(events), _pieces(events)
    found: dict[Size, list[Turn]] = {}
    last: frozenset[int] | None = None
    unsettled = count_warmup([turn.seconds / turn.num_steps for turn in turns])
    for turn in turns:
        members = _members(turn, worlds)
        if last is not None and members != last:
            unsettled = UNSETTLED_STEPS
        last = members
        if unsettled > 0:
            unsettled -= turn.num_steps
        elif not turn.is_undone and not turn.is_again and not _is_torn(turn, changes):
            found.setdefault(_size(turn, members, hosts, pieces), []).append(turn)
    # A last batch of an epoch may be short: it is no configuration of its own.
    sizes = [size for size, taken in found.items() if sum(turn.num_steps for turn in taken) >= MIN_STEPS]
    alone = median([_sync(turn) for size in sizes if size.workers == 1 for turn in found[size]])
    return tuple(_observation(size, found[size], alone, kind) for size in sizes)


def _observation(size: Size, turns: Sequence[Turn], alone: float, kind: str) -> Observation:
    """`alone` is what a single worker spends where others agree: its update, which is no waiting for anybody."""
    return Observation(
        nodes=size.nodes,
        workers=size.workers,
        micro_batch=size.micro_batch,
        accumulation=size.accumulation,
        step_seconds=median([turn.seconds / turn.num_steps for turn in turns]),
        sync_seconds=None if size.workers == 1 else max(0.0, median([_sync(turn) for turn in turns]) - alone),
        kind=kind,
    )


def _sync(turn: Turn) -> float:
    rows = turn.metrics.values()
    return sum(row.communicate + row.wait for row in rows) / len(rows) / turn.num_steps


def _is_torn(turn: Turn, changes: Sequence[float]) -> bool:
    return is_disturbed(turn.end - turn.seconds, turn.end, changes)


def _worlds(events: Sequence[Event]) -> list[tuple[float, frozenset[int]]]:
    """When each World of an elastic run began, and which workers are in it."""
    found = []
    for event in events:
        members = event.data.get("members")
        if event.kind == "world" and isinstance(members, list):
            found.append((event.time, frozenset(int(str(member).partition(".")[0]) for member in members)))
    return sorted(found, key=lambda world: world[0])


def _members(turn: Turn, worlds: Sequence[tuple[float, frozenset[int]]]) -> frozenset[int]:
    """Who took a step: of a worker that died, the last lines are not there."""
    place = bisect([time for time, _ in worlds], turn.end)
    return worlds[place - 1][1] if place else frozenset(turn.metrics)


def _hosts(events: Sequence[Event]) -> dict[int, str]:
    return {
        event.rank: str(event.data["host"])
        for event in events
        if event.kind == "worker_settings" and event.rank is not None and "host" in event.data
    }


def _pieces(events: Sequence[Event]) -> dict[int, int]:
    """How many samples each worker computes at once, where that is fewer than it has."""
    found: dict[int, int] = {}
    for event in events:
        value: Any = None
        if event.kind == "settings":
            entry = event.data.get("microbatch_size")
            value = entry.get("value") if isinstance(entry, Mapping) else entry
            if isinstance(value, int) and value > 0:
                found[-1] = value
        elif event.rank is not None and event.kind in ("worker_settings", "piece"):
            value = event.data.get("piece" if event.kind == "worker_settings" else "samples")
            if isinstance(value, int) and value > 0:
                found[event.rank] = value
    return found


def _size(turn: Turn, members: frozenset[int], hosts: Mapping[int, str], pieces: Mapping[int, int]) -> Size:
    each = turn.lead.global_samples / turn.num_steps / max(len(members), 1)
    piece = min((pieces[rank] for rank in (*members, -1) if rank in pieces), default=each)
    times = max(math.ceil(each / piece - 1e-9), 1)
    nodes = len({hosts.get(rank, "") for rank in members})
    return Size(max(nodes, 1), len(members), round(each / times, 3), times - 1)


# What was expected, and what it was.


def walk(
    prior: Prior, traits: Traits, observations: Sequence[Observation], *, job: str, now: float
) -> tuple[Throughput, tuple[Prediction, ...]]:
    """The model after these observations, and what it would have said of each before it was seen. Pure.

    Some milliseconds for each observation.
    """
    made = []
    for count, seen in enumerate(observations):
        model = prior.fit(traits, observations[:count])
        asked = seen.nodes, seen.workers, seen.micro_batch, seen.accumulation
        made.append(
            Prediction(
                job=job,
                time=now,
                expected_seconds=float(model.seconds(*asked, kind=seen.kind)),
                spread=float(model.spread(*asked, kind=seen.kind)),
                measured_seconds=seen.step_seconds,
                num_observations=count,
                nodes=seen.nodes,
                workers=seen.workers,
                micro_batch=seen.micro_batch,
                accumulation=seen.accumulation,
                kind=seen.kind,
            )
        )
    return prior.fit(traits, observations), tuple(made)


def learn_run(run_dir: str, prior: Prior, traits: Traits, *, job: str, now: float, kind: str = "") -> Throughput:
    """The model of a run from its steps so far. Predictions of configurations that are new are kept with it."""
    model, made = walk(prior, traits, observations_of(run_dir, kind), job=job, now=now)
    known = {_asked(each) for each in read_predictions(run_dir)}
    append_predictions(run_dir, [each for each in made if _asked(each) not in known])
    return model


def _asked(made: Prediction) -> tuple[object, ...]:
    return made.nodes, made.workers, made.micro_batch, made.accumulation, made.kind


# What jobs leave to those that come after them.

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(PastJob)


def remember(path: str, job: PastJob) -> None:
    """Add a job to a history, the file that priors are learned from (`place.prior.learn`)."""
    if job.observations:
        file = Appender(path)
        file.append(_encoder.encode(replace(job, observations=tuple(job.observations))) + b"\n")
        file.close()


def recall(path: str) -> list[PastJob]:
    """The jobs of a history, in order. A file that is not there is empty, and damaged lines are passed over."""
    try:
        with open(path, "rb") as file:
            return decode_lines(file.read(), _decoder)[0]
    except FileNotFoundError:
        return []

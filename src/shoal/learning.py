"""What runs teach of their speed: from the steps of a run to the model of its job, and from past jobs to new ones.

What decides is in `place`; here are the files. A run's steps become observations, what was expected of each of
them is kept in the run's `predictions.jsonl`, and what it has taught goes into a history, a line for each job.
"""

import math
import os
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import msgspec

from shoal.observe import journal
from shoal.observe.breakdown import changes_in, count_warmup, is_disturbed, median
from shoal.observe.decoding import decode_lines
from shoal.observe.lines import Appender, open_file
from shoal.observe.metrics import read as read_metrics
from shoal.observe.noise import find_noise
from shoal.observe.predictions import append_predictions, read_predictions
from shoal.observe.turns import Turn, merge_turns
from shoal.place.prior import PastJob, Traits
from shoal.place.throughput import Observation, Throughput, fit
from shoal.spec.event import Event
from shoal.spec.prediction import Prediction

MIN_STEPS = 5
"""Fewer steps in one configuration tell more of what else happened than of it."""
UNSETTLED_STEPS = 2
"""How many steps after a change are left out: they pay for things that happen once."""
MAX_HISTORY_BYTES, MAX_OBSERVATIONS = 1 << 20, 64
"""How large a history may get, and how much of it one job may take: some thousand jobs."""


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """A configuration: what a model is asked about."""

    nodes: int
    workers: int
    micro_batch: float
    accumulation: int
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What the files of a run tell of it so far.

    `batches` are the smallest and the largest batch that its script has set; `num_samples` is how many samples its
    steps had in all, `step_seconds` how long they took. `pause_seconds` is what it takes to stop and start it,
    `resize_seconds` what a change of its workers takes, as far as that happened.
    """

    observations: tuple[Observation, ...] = ()
    traits: Traits | None = None
    batches: tuple[float, float] | None = None
    num_samples: float = 0.0
    step_seconds: float = 0.0
    noise: float | None = None
    pause_seconds: float | None = None
    resize_seconds: float | None = None


def study(run_dir: str, kind: str = "", kinds: Mapping[str, str] | None = None) -> Study:
    """Everything that is learned from a run, while it runs or after. Costs some 10 µs a step and worker.

    `kind` is the kind of node that it is on; `kinds` those of machines by their name, where they are known.
    """
    events = list(journal.read(os.path.join(run_dir, "journal.jsonl")))
    turns = merge_turns(read_metrics(run_dir), events)
    done = [turn for turn in turns if not turn.is_undone]
    noise = find_noise(turn.lead for turn in done)
    traits, batches = _traits(events)
    return Study(
        observations=observe(turns, events, kind, kinds),
        traits=traits,
        batches=batches,
        num_samples=float(sum(turn.lead.global_samples for turn in done)),
        step_seconds=sum(turn.seconds for turn in done),
        noise=noise.samples if noise is not None else None,
        pause_seconds=pause_of(turns, events),
        resize_seconds=resize_of(turns, events),
    )


def observations_of(run_dir: str, kind: str = "") -> tuple[Observation, ...]:
    """What the steps of a run tell of its speed, one for each configuration it had, in the order it had them."""
    return study(run_dir, kind).observations


def _traits(events: Sequence[Event]) -> tuple[Traits | None, tuple[float, float] | None]:
    """What tells the job from others, and its batches; of a run without settings nothing is known."""
    told = [event.data for event in events if event.kind == "settings"]
    batches = [size for data in told if (size := _number(data, "batch_size"))]
    if not batches:
        return None, None
    sizes = {name: size for name in ("batch_size", "parameters") if (size := _number(told[-1], name))}
    traits = Traits(micro_batch=min([batches[-1], *map(float, _pieces(events).values())]), sizes=sizes)
    return traits, (min(batches), max(batches))


def _number(data: Mapping[str, Any], name: str) -> float:
    """A positive setting, or 0."""
    entry = data.get(name)
    value: Any = entry.get("value") if isinstance(entry, Mapping) else entry
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < math.inf else 0.0


def pause_of(turns: Sequence[Turn], events: Sequence[Event]) -> float | None:
    """How long it usually took from a start to the first step, and from the last step to the end. Pure."""
    begun = sorted(event.time for event in events if event.kind == "run_started")
    ended = sorted(event.time for event in events if event.kind == "run_ended")
    ends = [turn.end for turn in turns]
    starting, stopping = [], []
    for start, until in pairwise([*begun, math.inf]):
        took = [turn for turn in turns if start <= turn.end < until]
        if took:
            starting.append(max(took[0].end - took[0].seconds - start, 0.0))
    for end in ended:
        before = [each for each in ends if each <= end]
        if before and not any(before[-1] < start <= end for start in begun):
            stopping.append(end - before[-1])
    return median(starting) + (median(stopping) if stopping else 0.0) if starting else None


def resize_of(turns: Sequence[Turn], events: Sequence[Event]) -> float | None:
    """How much longer than others the first step with other workers took to come. Pure."""
    worlds, usual = _worlds(events), median([turn.seconds / turn.num_steps for turn in turns])
    begun = [event.time for event in events if event.kind == "run_started"]
    pauses = [
        max(turn.end - before.end - usual, 0.0)
        for before, turn in pairwise(turns)
        if _members(turn, worlds) != _members(before, worlds)
        and not any(before.end < start <= turn.end for start in begun)
    ]
    return median(pauses) if pauses else None


def observe(
    turns: Sequence[Turn], events: Sequence[Event], kind: str = "", kinds: Mapping[str, str] | None = None
) -> tuple[Observation, ...]:
    """One for each configuration: medians over undisturbed steps. Pure."""
    changes, worlds = changes_in(events), _worlds(events)
    hosts, pieces = _hosts(events), _pieces(events)
    kind_of = {rank: (kinds or {}).get(host, kind) for rank, host in hosts.items()}
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
            size = _size(turn, members, hosts, pieces)
            here = kind_of.get(min(members), kind) if members else kind
            found.setdefault(replace(size, kind=here), []).append(turn)
    # A last batch of an epoch may be short: it is no configuration of its own.
    sizes = [size for size, taken in found.items() if sum(turn.num_steps for turn in taken) >= MIN_STEPS]
    alone = median([_sync(turn) for size in sizes if size.workers == 1 for turn in found[size]])
    return tuple(_observation(size, found[size], alone) for size in sizes)


def _observation(size: Size, turns: Sequence[Turn], alone: float) -> Observation:
    """`alone` is what a single worker spends where others agree: its update, which is no waiting for anybody."""
    return Observation(
        nodes=size.nodes,
        workers=size.workers,
        micro_batch=size.micro_batch,
        accumulation=size.accumulation,
        step_seconds=median([turn.seconds / turn.num_steps for turn in turns]),
        sync_seconds=None if size.workers == 1 else max(0.0, median([_sync(turn) for turn in turns]) - alone),
        kind=size.kind,
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


class Expecting(Protocol):
    """What is thought of a job before its first step: a `Prior`, or the `Likeness` to one that ran."""

    def fit(self, traits: Traits, observations: Sequence[Observation] = ()) -> Throughput: ...


class Unknown:
    """Nothing is thought of it: any speed, and workers that agree at no cost, so that more of them are tried."""

    def fit(self, traits: Traits, observations: Sequence[Observation] = ()) -> Throughput:
        return fit(observations)


def walk(
    prior: Expecting, traits: Traits, observations: Sequence[Observation], *, job: str, now: float
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


def learn_run(
    run_dir: str,
    prior: Expecting,
    traits: Traits,
    *,
    job: str,
    now: float,
    kind: str = "",
    observations: Sequence[Observation] | None = None,
) -> Throughput:
    """The model of a run from its steps so far. Predictions of configurations that are new are kept with it.

    `observations` are those of the run, where they have been read already.
    """
    seen = observations_of(run_dir, kind) if observations is None else observations
    model, made = walk(prior, traits, seen, job=job, now=now)
    known = {_asked(each) for each in read_predictions(run_dir)}
    append_predictions(run_dir, [each for each in made if _asked(each) not in known])
    return model


def _asked(made: Prediction) -> tuple[object, ...]:
    return made.nodes, made.workers, made.micro_batch, made.accumulation, made.kind


# What jobs leave to those that come after them.

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(PastJob)


def remember(path: str, job: PastJob, max_bytes: int = MAX_HISTORY_BYTES) -> None:
    """Add a job to a history, the file that priors are learned from (`place.prior.learn`). It stays bounded: when it
    is full, the older half of it goes, in one step."""
    if not job.observations:
        return
    kept = replace(job, observations=tuple(job.observations)[-MAX_OBSERVATIONS:])
    file = Appender(path)
    file.append(_encoder.encode(kept) + b"\n")
    file.close()
    if os.stat(path).st_size > max_bytes:
        jobs = recall(path)
        passing = f"{path}.new"
        with open(passing, "wb") as new:
            new.writelines(_encoder.encode(each) + b"\n" for each in jobs[len(jobs) // 2 :])
        os.replace(passing, path)


def recall(path: str) -> list[PastJob]:
    """The jobs of a history, in order. A file that is not there is empty, and damaged lines are passed over."""
    try:
        with open_file(path) as file:
            found = decode_lines(file.read(2 * MAX_HISTORY_BYTES), _decoder)[0]
    except OSError:
        return []
    return [job for job in found if is_sound(job)]


def is_sound(job: PastJob) -> bool:
    """Whether its numbers can be what somebody measured."""
    numbers = [job.traits.micro_batch, *job.traits.sizes.values(), *(job.batches or ())]
    numbers += [each for each in (job.work_seconds, job.pause_seconds) if each]
    for seen in job.observations:
        numbers += [seen.nodes, seen.workers, seen.micro_batch, seen.step_seconds, seen.accumulation + 1]
        numbers += [seen.sync_seconds] if seen.sync_seconds else []
    return bool(job.observations) and all(0 < number < 1e15 for number in numbers)

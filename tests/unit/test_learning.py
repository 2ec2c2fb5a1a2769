"""What runs teach: observations from steps, predictions beside what was measured, and a history of past jobs."""

from dataclasses import replace

import pytest

from shoal.learning import learn_run, observe, recall, remember, walk
from shoal.observe.explain import explain
from shoal.observe.journal import Journal
from shoal.observe.metrics import MetricsWriter
from shoal.observe.predictions import append_predictions, judge, read_predictions
from shoal.observe.turns import merge_turns
from shoal.place.prior import PastJob, Traits, learn
from shoal.place.throughput import Observation
from shoal.spec.event import Event, StepMetrics
from shoal.spec.prediction import Prediction

TRAITS = Traits(micro_batch=32, sizes={})


def metrics(step, time, workers, *, compute=0.1, sync=0.02, samples=32):
    return StepMetrics(
        step=step,
        time=time,
        epoch=0,
        loss=1.0,
        num_samples=samples,
        global_samples=samples * workers,
        lr=0.1,
        compute=compute,
        communicate=sync,
        wait=0.0,
        load=0.0,
        other=0.0,
    )


def host(rank, name, piece=None):
    return Event(kind="worker_settings", time=0.0, rank=rank, data={"host": name, "piece": piece})


def world(generation, time, *members):
    data = {"generation": generation, "members": [f"{member}.0" for member in members], "joined": []}
    return Event(kind="world", time=time, data=data)


def grown():
    """Twelve steps of one worker, then twelve of four on two nodes, which a short batch and a slow step are among."""
    rows = {rank: [] for rank in range(4)}
    for step in range(12):
        rows[0].append(metrics(step, 1.0 + 0.2 * step, 1, sync=0.01))
    for step in range(12, 24):
        for rank in range(4):
            rows[rank].append(metrics(step, 10.0 + 0.2 * step, 4, sync=0.05, compute=0.4 if step == 12 else 0.1))
    rows[0].append(metrics(24, 20.0, 4, samples=3))
    events = [host(0, "a"), host(1, "a"), host(2, "b"), host(3, "b"), world(0, 0.0, 0), world(1, 9.0, 0, 1, 2, 3)]
    return rows, events


def test_each_configuration_of_a_run_is_an_observation():
    rows, events = grown()
    one, four = observe(merge_turns(rows, events), events, "t4")
    assert (one.nodes, one.workers, one.micro_batch, one.sync_seconds, one.kind) == (1, 1, 32, None, "t4")
    assert one.step_seconds == pytest.approx(0.11)
    assert (four.nodes, four.workers, four.micro_batch, four.accumulation) == (2, 4, 32, 0)
    assert four.step_seconds == pytest.approx(0.15)
    assert four.sync_seconds == pytest.approx(0.04)  # without what one worker spends there, too: its update


def test_micro_batches_are_counted():
    rows, _ = grown()
    (seen,) = observe(merge_turns({0: rows[0][:12]}), [host(0, "a", piece=12)])
    assert (seen.micro_batch, seen.accumulation) == (pytest.approx(32 / 3, abs=1e-3), 2)


def test_too_few_steps_tell_nothing():
    rows, events = grown()
    assert observe(merge_turns({0: rows[0][:4]}, events), events) == ()
    assert observe([], []) == ()


def past(scale):
    sizes = [(1, 1), (1, 2), (1, 4), (2, 8), (4, 16)]
    return tuple(
        Observation(
            nodes=nodes,
            workers=workers,
            micro_batch=micro,
            step_seconds=scale * (0.02 + 0.002 * micro + (0.03 * nodes**0.3 if workers > 1 else 0.0)),
        )
        for nodes, workers in sizes
        for micro in (8, 32)
    )


def test_a_run_is_learned_and_its_predictions_are_kept_and_shown(tmp_path):
    rows, events = grown()
    with_run(tmp_path, rows, events)
    prior = learn([PastJob(traits=TRAITS, observations=past(scale)) for scale in (0.8, 1.0, 1.3)])
    model = learn_run(str(tmp_path), prior, TRAITS, job="j", now=1.0)
    assert model.num_observations == 2
    assert float(model.seconds(2, 4, 32)) == pytest.approx(0.15, rel=0.1)
    learn_run(str(tmp_path), prior, TRAITS, job="j", now=2.0)  # nothing is new
    made = read_predictions(str(tmp_path))
    assert [(each.workers, each.num_observations, each.time) for each in made] == [(1, 0, 1.0), (4, 1, 1.0)]
    told = explain(str(tmp_path))
    assert told.predictions == tuple(made)
    assert told.accuracy.num_made == 2
    assert "how well its speed was predicted" in told.text()
    assert "4 workers on 2 nodes" in told.text()
    told.json()


def with_run(folder, rows, events):
    (folder / "run.json").write_text('{"name": "r", "created": 0.0}')
    file = Journal(str(folder / "journal.jsonl"))
    for event in events:
        file.write(event)
    file.close()
    for rank, steps in rows.items():
        writer = MetricsWriter(str(folder), rank)
        for step in steps:
            writer.write(step)
        writer.close()


def test_later_predictions_use_what_was_seen():
    prior = learn([PastJob(traits=TRAITS, observations=past(scale)) for scale in (0.8, 1.0, 1.3)])
    model, made = walk(prior, TRAITS, past(3.0), job="j", now=0.0)
    assert abs(made[-1].error) < abs(made[0].error)
    assert made[-1].spread < made[0].spread
    assert model.num_observations == len(made) == 10


def test_a_history_outlives_damage(tmp_path):
    path = str(tmp_path / "history.jsonl")
    assert recall(path) == []
    jobs = [PastJob(traits=replace(TRAITS, sizes={"parameter_bytes": 1e6 * n}), observations=past(n)) for n in (1, 2)]
    remember(path, jobs[0])
    with open(path, "ab") as file:
        file.write(b'{"traits": 3}\n{"cut')
    remember(path, jobs[1])
    assert recall(path) == jobs
    remember(path, replace(jobs[0], observations=()))
    assert len(recall(path)) == 2


def test_predictions_are_judged(tmp_path):
    made = Prediction(job="j", time=0.0, expected_seconds=1.2, spread=0.05, measured_seconds=1.0)
    fine = replace(made, expected_seconds=1.05)
    found = judge([made, fine, fine])
    assert (found.num_made, found.num_within) == (3, 2)
    assert found.median_error == pytest.approx(0.05)
    assert judge([]) is None
    append_predictions(str(tmp_path), [made, replace(made, measured_seconds=0.0)])
    assert read_predictions(str(tmp_path)) == [made]

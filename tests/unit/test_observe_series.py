"""Curves: each step once, extremes kept, only what is new read."""

import math
from pathlib import Path

import pytest
from observing import event, make_step, make_steps, write_metrics

from shoal.observe import points
from shoal.observe.journal import Journal
from shoal.observe.metrics import MetricsWriter, metrics_path
from shoal.observe.points import Point, points_path
from shoal.observe.series import NAMES, SeriesReader


def write_points(run_dir: Path, rank: int, *found: Point) -> None:
    with open(points_path(str(run_dir), rank), "ab") as file:
        file.write(b"".join(points.encode(point) + b"\n" for point in found))


def point(step: int, **values: float) -> Point:
    return Point(step=step, time=1000.0 + step, values=values)


def test_a_folder_without_steps_has_no_curves(tmp_path):
    reader = SeriesReader(str(tmp_path))
    assert reader.names() == []
    assert reader.read(["loss", "mine"]) == {}


def test_curves_of_one_worker(tmp_path):
    steps = [make_step(number, loss=1.0 / (number + 1), grad_norm=2.0) for number in range(5)]
    write_metrics(str(tmp_path), {0: steps})
    reader = SeriesReader(str(tmp_path))
    assert tuple(reader.names()) == NAMES
    found = reader.read(NAMES)
    assert found["loss"].steps == [0, 1, 2, 3, 4]
    assert found["loss"].mean == found["loss"].low == found["loss"].high == [step.loss for step in steps]
    assert found["loss"].times == [step.time for step in steps]
    assert found["samples_per_second"].mean == pytest.approx([64 / 0.02] * 5)
    assert found["compute"].mean == pytest.approx([0.8] * 5)
    assert found["grad_norm"].mean == [2.0] * 5


def test_steps_without_a_norm_are_not_points_of_its_curve(tmp_path):
    write_metrics(str(tmp_path), {0: [make_step(0), make_step(1, grad_norm=math.nan), make_step(2, grad_norm=1.0)]})
    found = SeriesReader(str(tmp_path)).read(["grad_norm"])["grad_norm"]
    assert found.steps == [1, 2]
    assert math.isnan(found.mean[0])


def test_shares_are_the_mean_over_workers_and_the_rest_is_of_the_lowest(tmp_path):
    write_metrics(
        str(tmp_path),
        {
            1: make_steps(3, compute=0.01, wait=0.01, communicate=0.0, load=0.0, other=0.0, loss=1.0),
            0: make_steps(3, compute=0.02, wait=0.0, communicate=0.0, load=0.0, other=0.0, loss=2.0),
        },
    )
    found = SeriesReader(str(tmp_path)).read(["compute", "wait", "loss", "step_seconds"])
    assert found["compute"].mean == pytest.approx([0.75] * 3)
    assert found["wait"].mean == pytest.approx([0.25] * 3)
    assert found["loss"].mean == [2.0] * 3
    assert found["step_seconds"].mean == pytest.approx([0.02] * 3)


def test_merged_points_keep_the_extremes(tmp_path):
    losses = [float(number % 100) for number in range(10_000)]
    write_metrics(str(tmp_path), {0: [make_step(number, loss=loss) for number, loss in enumerate(losses)]})
    found = SeriesReader(str(tmp_path)).read(["loss"], max_points=100)["loss"]
    assert len(found.steps) == 100
    assert found.low == [0.0] * 100
    assert found.high == [99.0] * 100
    assert found.mean == pytest.approx([49.5] * 100)
    assert found.steps[-1] == 9999


def test_a_merged_point_is_about_the_numbers_in_it(tmp_path):
    steps = [make_step(number, loss=math.nan if number in (3, *range(50, 60)) else 1.0) for number in range(100)]
    write_metrics(str(tmp_path), {0: steps})
    found = SeriesReader(str(tmp_path)).read(["loss"], max_points=10)["loss"]
    assert [math.isnan(value) for value in found.mean] == [number == 5 for number in range(10)]


def test_a_part_of_the_steps(tmp_path):
    write_metrics(str(tmp_path), {0: make_steps(100)})
    found = SeriesReader(str(tmp_path)).read(["loss"], first_step=10, last_step=20)["loss"]
    assert found.steps == list(range(10, 21))


def test_only_what_is_new_is_read(tmp_path):
    reader = SeriesReader(str(tmp_path))
    with MetricsWriter(str(tmp_path), 0) as writer:
        for number in range(3):
            writer.write(make_step(number))
            writer.flush()
            assert reader.read(["loss"])["loss"].steps == list(range(number + 1))


def test_a_worker_that_was_away_leaves_no_gap_and_counts_no_step_twice(tmp_path):
    rows = make_steps(10)
    write_metrics(str(tmp_path), {0: rows[:3] + rows[6:], 1: rows[2:8]})
    found = SeriesReader(str(tmp_path)).read(["loss", "compute"])
    assert found["loss"].steps == [row.step for row in rows]
    assert found["compute"].mean == pytest.approx([0.8] * 10)


def test_what_was_taken_back_is_not_shown(tmp_path):
    first = [make_step(number, time=1000.0 + number, loss=9.0) for number in range(10)]
    again = [make_step(number, time=2000.0 + number, loss=1.0) for number in range(4, 12)]
    write_metrics(str(tmp_path), {0: first + again})
    with Journal(str(tmp_path / "journal.jsonl")) as log:
        log.write(event("resumed", 1500.0, 0, 4, path="x"))
    found = SeriesReader(str(tmp_path)).read(["loss"])["loss"]
    assert found.steps == list(range(12))
    assert found.mean == [9.0] * 4 + [1.0] * 8


def test_two_trainers_of_one_script_follow_each_other(tmp_path):
    rows = [make_step(number, time=1000.0 + number) for number in range(3)]
    rows += [make_step(number, time=2000.0 + number) for number in range(2)]
    write_metrics(str(tmp_path), {0: rows, 1: rows[:2] + rows[3:]})
    assert SeriesReader(str(tmp_path)).read(["loss"])["loss"].steps == [0, 1, 2, 0, 1]


def test_own_numbers_come_after_those_of_the_trainer(tmp_path):
    write_points(tmp_path, 0, point(0, accuracy=0.5, b=1.0), point(1, accuracy=math.nan))
    reader = SeriesReader(str(tmp_path))
    assert reader.names() == ["accuracy", "b"]
    write_metrics(str(tmp_path), {0: make_steps(2)})
    assert reader.names() == [*NAMES, "accuracy", "b"]
    found = reader.read(["accuracy", "nobody"])
    assert list(found) == ["accuracy"]
    assert found["accuracy"].steps == [0, 1]
    assert math.isnan(found["accuracy"].mean[1])


def test_an_own_number_with_a_name_of_the_trainers(tmp_path):
    write_points(tmp_path, 0, point(0, loss=3.0))
    reader = SeriesReader(str(tmp_path))
    assert reader.read(["loss"])["loss"].mean == [3.0]
    write_metrics(str(tmp_path), {0: make_steps(1)})
    assert "log/loss" in reader.names()
    assert reader.read(["loss", "log/loss"])["log/loss"].mean == [3.0]


def test_several_workers_log_one_name(tmp_path):
    write_points(tmp_path, 0, point(0, a=1.0), point(1, a=2.0))
    write_points(tmp_path, 3, point(1, a=4.0))
    found = SeriesReader(str(tmp_path)).read(["a"])["a"]
    assert (found.steps, found.low, found.mean, found.high) == ([0, 1], [1.0, 2.0], [1.0, 3.0], [1.0, 4.0])


def test_lines_that_are_no_points_are_passed_over(tmp_path):
    write_points(tmp_path, 0, point(0, a=1.0))
    with open(points_path(str(tmp_path), 0), "ab") as file:
        file.write(b'{"step": "x"}\n\xff\n[]\n{"step":1,"time":2,"values":{"a":"b"}}\n')
    write_points(tmp_path, 0, point(2, a=2.0))
    assert SeriesReader(str(tmp_path)).read(["a"])["a"].steps == [0, 2]


def test_many_steps_of_one_worker(tmp_path):
    line = Path(metrics_path(str(tmp_path), 0))
    write_metrics(str(tmp_path), {0: make_steps(2)})
    first = line.read_bytes().splitlines()[0]
    line.write_bytes(b"".join(first.replace(b'"step":1', b'"step":%d' % number) + b"\n" for number in range(100_000)))
    found = SeriesReader(str(tmp_path)).read(["loss", "compute"])["loss"]
    assert len(found.steps) == 2000
    assert found.steps[-1] == 99_999

"""Metrics: nothing is lost, nothing blocks, and numbers come back as they were."""

import math
import os
import threading
from pathlib import Path

import pytest
from observing import make_step, make_steps, write_metrics

from shoal.observe import behind, metrics
from shoal.observe.metrics import MetricsReader, MetricsWriter, metrics_path


def test_steps_of_all_ranks_come_back_as_they_were(tmp_path):
    written = {rank: make_steps(5, num_samples=rank + 1, waited_for=rank or None) for rank in (0, 1, 10)}
    for rank, steps in written.items():
        with MetricsWriter(str(tmp_path), rank) as writer:
            for step in steps:
                writer.write(step)
    assert metrics.read(str(tmp_path)) == written


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1e-320, 1.7e308])
@pytest.mark.parametrize("field", ["loss", "grad_norm", "lr"])
def test_every_number_survives(tmp_path, loss, field):
    write_metrics(str(tmp_path), {0: [make_step(1, **{field: loss}), make_step(2)]})
    first, second = metrics.read(str(tmp_path))[0]
    assert repr(getattr(first, field)) == repr(loss)
    assert second == make_step(2)


def test_a_folder_without_metrics_has_none(tmp_path):
    assert metrics.read(str(tmp_path)) == {}
    assert metrics.read(str(tmp_path / "missing")) == {}


def test_damaged_lines_are_passed_over_and_counted(tmp_path):
    write_metrics(str(tmp_path), {0: make_steps(3)})
    path = metrics_path(str(tmp_path), 0)
    whole = Path(path).read_bytes()
    with open(path, "wb") as file:
        file.write(b'{"step": 1, "ti\n' + whole + b"\xff\xfe\n" + whole[:40])
    reader = MetricsReader(str(tmp_path))
    assert reader.read_new() == {0: make_steps(3)}
    assert reader.num_damaged == 2
    with open(path, "ab") as file:
        file.write(whole[40:])
    assert reader.read_new() == {0: make_steps(3)}


def test_names_that_only_look_like_metrics_are_passed_over(tmp_path):
    for name in ("metrics-.jsonl", "metrics-x.jsonl", "metrics-1.jsonl.tmp", "metrics--1.jsonl"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "metrics-3.jsonl").mkdir()
    assert metrics.read(str(tmp_path)) == {}


def test_reading_goes_on_where_it_stopped(tmp_path):
    reader = MetricsReader(str(tmp_path))
    with MetricsWriter(str(tmp_path), 0) as writer:
        writer.write(make_step(1))
        writer.flush()
        assert reader.read_new() == {0: [make_step(1)]}
        assert reader.read_new() == {}
        writer.write(make_step(2))
        writer.flush()
        assert reader.read_new() == {0: [make_step(2)]}


def test_a_failing_disk_loses_nothing_once_it_works_again(tmp_path):
    said: list[str] = []
    run_dir = tmp_path / "run"
    writer = MetricsWriter(str(run_dir), 0, said.append)
    for step in make_steps(3):
        writer.write(step)
    assert not writer.flush()
    assert not writer.flush()
    run_dir.mkdir()
    writer.write(make_step(4))
    assert writer.flush()
    writer.close()
    assert metrics.read(str(run_dir)) == {0: make_steps(4)}
    assert ["cannot write" in said[0], "works again" in said[1], len(said)] == [True, True, 2]


def test_a_disk_that_fills_up_within_a_line_repeats_no_step(tmp_path, monkeypatch):
    writer = MetricsWriter(str(tmp_path), 0)
    for step in make_steps(10):
        writer.write(step)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:1000]))
    assert not writer.flush()
    monkeypatch.undo()
    assert writer.flush()
    writer.close()
    reader = MetricsReader(str(tmp_path))
    assert reader.read_new() == {0: make_steps(10)}
    assert reader.num_damaged == 1


def test_memory_stays_bounded_while_the_disk_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(behind, "MAX_UNSAVED", 10)
    writer = MetricsWriter(str(tmp_path / "run"), 0)
    for step in make_steps(25):
        writer.write(step)
    writer.flush()
    (tmp_path / "run").mkdir()
    writer.close()
    assert [step.step for step in metrics.read(str(tmp_path / "run"))[0]] == list(range(16, 26))


def test_closing_twice_leaves_no_thread(tmp_path):
    before = threading.active_count()
    writer = MetricsWriter(str(tmp_path), 0)
    writer.write(make_step())
    writer.close()
    writer.close()
    assert threading.active_count() == before


def test_a_forked_child_writes_none_of_its_parents_steps(tmp_path):
    writer = MetricsWriter(str(tmp_path), 0)
    writer._is_closed.set()  # the thread rests: what is taken stays in memory
    writer._thread.join()
    writer._is_closed.clear()
    writer.write(make_step())
    writer._pid = -1  # as in a child, whose number differs
    writer.close()
    assert metrics.read(str(tmp_path)) == {}
    writer._pid = os.getpid()
    writer.close()
    assert metrics.read(str(tmp_path)) == {0: [make_step()]}


def test_a_hundred_thousand_lines_are_read(tmp_path):
    line = metrics.encode(make_step()) + b"\n"
    with open(metrics_path(str(tmp_path), 0), "wb") as file:
        file.write(line * 100_000)
    assert len(metrics.read(str(tmp_path))[0]) == 100_000

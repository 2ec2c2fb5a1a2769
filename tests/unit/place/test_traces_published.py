"""Readers of Gavel's and Shockwave's traces, and what their jobs do."""

import csv
import json
from pathlib import Path

import pytest

from shoal.place.cluster import Node
from shoal.place.traces.gavel import read_gavel, read_throughputs
from shoal.place.traces.shockwave import batch_at, batches_alone, read_shockwave
from shoal.spec.errors import UserError

DATA = Path(__file__).parents[4] / "shared" / "data" / "sched"
TABLE = {
    "v100": {"('LM (batch size 40)', 1)": {"null": 10.0}, "('LM (batch size 80)', 1)": {"null": 8.0}},
    "k80": {"('LM (batch size 40)', 1)": {"null": 2.0}, "('LM (batch size 80)', 1)": {"null": 0.0}},
    "k80_unconsolidated": {"('LM (batch size 40)', 1)": {"null": 1.0}},
}


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "throughputs.json"
    path.write_text(json.dumps(TABLE))
    return read_throughputs(path)


def write(tmp_path, *lines):
    path = tmp_path / "jobs.trace"
    path.write_text("".join("\t".join(map(str, cells)) + "\n" for cells in lines))
    return path


def gavel_row(kind="LM (batch size 40)", steps=100, workers=1, at=5):
    return kind, "python3 x.py", "lm", "--steps", 1, steps, workers, 1, -1.0, at


def test_both_forms_of_gavel_are_read_and_speed_follows_the_kind(tmp_path, table):
    old = ("LM (batch size 40)", "python3 x.py", "--steps", 1, 100, 7.0, 1)
    one, two = read_gavel(write(tmp_path, gavel_row(), old), table)
    assert (one.queued.submitted_at, two.queued.submitted_at) == (5.0, 7.0)
    assert one.seen().remaining_seconds == 10.0, "on the kind that suits it best"
    nodes = {"slow": Node(name="slow", kind="k80", gpus=1)}
    one.place({"slow": 1}, nodes)
    assert one.work(20.0) is None
    assert one.left == 60.0
    assert one.work(40.0) == 30.0
    assert read_gavel(write(tmp_path, gavel_row()), table, is_length_known=False)[0].seen().remaining_seconds is None


def test_mistakes_in_traces_and_tables_say_where(tmp_path, table):
    with pytest.raises(UserError, match=r"line 1: 3 columns"):
        read_gavel(write(tmp_path, ("a", "b", "c")), table)
    with pytest.raises(UserError, match=r"line 2, column 'type'.* no throughput of 'LM \(batch size 5\)' with 1"):
        read_gavel(write(tmp_path, gavel_row(), gavel_row("LM (batch size 5)")), table)
    with pytest.raises(UserError, match=r"column 'steps': 'many' is not a number"):
        read_gavel(write(tmp_path, gavel_row(steps="many")), table)
    assert len(read_gavel(write(tmp_path, gavel_row(), gavel_row("A3C")), table, skips_unmeasured=True)) == 1
    broken = tmp_path / "broken.json"
    broken.write_text('{"v100": {"LM": {"null": 1}}}')
    with pytest.raises(UserError, match="not a table of throughputs"):
        read_throughputs(broken)
    with pytest.raises(UserError, match="cannot be read"):
        read_throughputs(tmp_path / "nothing.json")


def shockwave_row(kind="LM (batch size 40)", mode="gns", steps=1492 * 20):
    return kind, "python3 x.py", "lm", "--steps", 1, steps, 1, mode, 1, -1.0, 3000, 0


def test_a_batch_that_doubles_keeps_the_epochs_and_changes_the_speed(tmp_path, table):
    (job,) = read_shockwave(write(tmp_path, shockwave_row()), table)
    # 20 epochs of 59,675 samples; the batch doubles in epoch 11.
    assert job.alone_seconds == pytest.approx(59_675 * (11 / 40 / 10 + 9 / 80 / 8))
    job.place({"n": 1}, {})
    ends = [job.work(120.0) for _ in range(10)]
    assert ends == [None] * 10
    assert job.batch == 40
    while job.batch == 40:
        assert job.work(120.0) is None
    assert (job.speed, job.steps) == (8.0, 746 * 20)
    assert job.done % 746 == 0, "the epoch that had begun counts as done"
    assert job.seen().remaining_seconds == (job.steps - job.done) / 8.0


def test_a_start_costs_a_pause_and_unknown_modes_are_told(tmp_path, table):
    (job,) = read_shockwave(write(tmp_path, shockwave_row(mode="static")), table)
    job.place({"n": 1}, {})
    job.work(120.0)
    assert job.done == 1000, "100 of 120 s"
    job.work(120.0)
    assert job.done == 2200
    with pytest.raises(UserError, match="'fast' is none of static, accordion, gns"):
        read_shockwave(write(tmp_path, shockwave_row(mode="fast")), table)
    with pytest.raises(UserError, match="'A3C' is none of ResNet-18"):
        read_shockwave(write(tmp_path, shockwave_row(kind="A3C")), table)


def test_batches_of_both_modes():
    assert [batch_at("LM", 20, 1, "gns", epoch) for epoch in (10, 11, 41)] == [20, 40, 80]
    assert [batch_at("ResNet-50", 32, 1, "accordion", epoch) for epoch in (9, 10, 30)] == [32, 128, 32]
    assert batches_alone("LM", 10, 1, "accordion", 40)[12:14] == [10, 80], "the first 30 % stay small"


@pytest.mark.skipif(not DATA.exists(), reason="the published traces are not beside the repository")
def test_times_alone_are_those_behind_the_published_fairness():
    folder = DATA / "shockwave-nsdi23"
    jobs = read_shockwave(folder / "trace-120jobs.trace", read_throughputs(folder / "tacc_throughputs.json"))
    with (folder / "published-perjob-120jobs-32gpus.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["policy"] == "shockwave" and row["set"] == "tacc_32gpus"]
    for row in rows:
        alone = float(row["jct_s"]) / float(row["ftf"]) / (120 / 32)
        assert jobs[int(row["idx"])].alone_seconds == pytest.approx(alone, rel=1e-4)

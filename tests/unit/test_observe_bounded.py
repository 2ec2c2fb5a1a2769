"""Months of a run in a few megabytes: what is merged still adds up, and every reader goes on."""

import math
import multiprocessing
import os
from dataclasses import replace
from itertools import pairwise

import pytest
from observing import Home, event, make_step

from shoal.observe import journal, metrics, points, segments, system
from shoal.observe.breakdown import break_down
from shoal.observe.explain import explain
from shoal.observe.journal import Journal, JournalReader
from shoal.observe.merged import MAX_ROWS, NUM_FIRST, PARTS, MergedSteps, align, coarsen, merge, shrink, widen
from shoal.observe.metrics import MetricsReader, MetricsWriter
from shoal.observe.points import MergedPoint, Point, PointsReader, PointsWriter
from shoal.observe.segments import Bound
from shoal.observe.series import NAMES, SeriesReader
from shoal.observe.system import SystemReader, SystemWriter
from shoal.observe.turns import merge_turns
from shoal.spec.system import SystemSample, WorkerSample


def steps_of(rank: int, first: int, last: int):
    for number in range(first, last):
        wait = 0.004 if rank == 0 else 0.0
        yield make_step(
            number,
            time=1000.0 + 0.02 * number + 0.001 * rank,
            loss=1000.0 / (number + 1) if number != 5000 else math.nan,
            compute=0.016 - wait,
            wait=wait,
            waited_for=1 if rank == 0 else None,
            grad_norm=2.0,
            communicate=0.002,
            load=0.001,
            other=0.001,
        )


@pytest.fixture
def small(monkeypatch):
    """Everything as it is after months, after some seconds."""
    monkeypatch.setattr(metrics, "BOUND", Bound(segment_bytes=60_000, num_sealed=2, fold=metrics.fold))
    monkeypatch.setattr(points, "BOUND", Bound(segment_bytes=10_000, num_sealed=2, fold=points.fold))
    monkeypatch.setattr(points, "MAX_MERGED", 200)
    monkeypatch.setattr(system, "BOUND", Bound(segment_bytes=10_000, num_sealed=2, fold=system.fold))
    monkeypatch.setattr(system, "PAST_BYTES", 20_000)
    monkeypatch.setattr(journal, "BOUND", Bound(segment_bytes=10_000, num_sealed=2, fold=journal.fold))
    monkeypatch.setattr(journal, "PAST_BYTES", 20_000)
    monkeypatch.setattr(shrink, "__defaults__", (300,))


def write_steps(run_dir: str, rank: int, first: int, last: int) -> None:
    with MetricsWriter(run_dir, rank) as writer:
        for step in steps_of(rank, first, last):
            writer.write(step)
            if step.step % 50 == 0:
                writer.flush()


def folder_bytes(path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())


def test_a_merged_row_is_the_sum_of_its_steps():
    rows = list(steps_of(0, 4990, 5010))
    one = merge(rows)
    assert (one.num_steps, one.step, one.time) == (20, 5009, rows[-1].time)
    assert one.compute == pytest.approx(sum(row.compute for row in rows))
    assert one.num_samples == sum(row.num_samples for row in rows)
    known = [row.loss for row in rows if not math.isnan(row.loss)]
    assert one.loss == pytest.approx(sum(known) / 19)
    assert one.bounds["loss"] == pytest.approx((min(known), max(known)))
    assert one.bounds["step_seconds"] == pytest.approx((0.02, 0.02))
    assert (one.waited_for, one.grad_norm) == (1, 2.0)
    assert merge([merge(rows[:7]), merge(rows[7:])]).bounds == one.bounds
    assert merge([replace(rows[0], loss=math.nan)] * 2).loss is not None


def test_rows_are_cut_in_the_same_places_for_all():
    rows = list(steps_of(0, 0, 1000))
    parts = [widen(rows[:333], 64), widen(rows[333:], 64)]
    whole = widen([*parts[0], *parts[1]], 64)
    assert [row.step for row in whole] == [row.step for row in widen(rows, 64)]
    assert sum(row.num_steps for row in whole) == 1000


def test_going_back_is_never_merged_away():
    rows = [*steps_of(0, 0, 100), *steps_of(0, 50, 150)]
    merged = widen(rows, 1024)
    assert [(row.step, row.num_steps) for row in merged] == [(99, 100), (149, 100)]


def test_the_first_steps_stay_and_the_number_of_rows_is_bounded():
    rows = shrink(list(steps_of(0, 0, 10_000)), 100)
    assert len(rows) <= 100 + NUM_FIRST
    assert [row.num_steps for row in rows[:NUM_FIRST]] == [1] * NUM_FIRST
    assert sum(row.num_steps for row in rows) == 10_000
    worst = [make_step(number % 2) for number in range(1000)]
    assert len(shrink(worst, 100)) <= 100 + NUM_FIRST


def test_rows_of_ranks_that_merged_at_other_moments_are_aligned():
    first, second = list(steps_of(0, 0, 5000)), list(steps_of(1, 0, 5000))
    apart = {0: [*shrink(first[:3000], 100), *first[3000:]], 1: [*shrink(second[:1000], 100), *second[1000:]]}
    aligned = align(apart)
    assert [row.step for row in aligned[0]] == [row.step for row in aligned[1]]
    turns = merge_turns(apart)
    assert sum(turn.num_steps for turn in turns) == 5000
    assert all(len(turn.metrics) == 2 for turn in turns)
    plain = {0: first[:10], 1: second[:10]}
    assert align(plain) == plain


def test_where_the_time_went_is_the_same_before_and_after_merging():
    whole = {rank: list(steps_of(rank, 0, 8000)) for rank in (0, 1)}
    merged = {rank: [*shrink(rows[:7000], 50), *rows[7000:]] for rank, rows in whole.items()}
    before, after = break_down(whole), break_down(merged)
    assert before is not None
    assert after is not None
    for name in ("num_steps", "num_samples", "warmup_steps", "slowest", "last_loss"):
        assert getattr(after, name) == getattr(before, name)
    for name in ("wall_seconds", "step_median_seconds", "step_p99_seconds", "samples_per_second"):
        assert getattr(after, name) == pytest.approx(getattr(before, name), rel=1e-5)
    for one, other in zip(after.ranks, before.ranks, strict=True):
        assert one.num_waited_for == other.num_waited_for
        assert one.shares.compute == pytest.approx(other.shares.compute, rel=1e-5)
        assert one.step_seconds == pytest.approx(other.step_seconds, rel=1e-5)


def test_neighbours_are_joined_evenly():
    rows = coarsen([1] * 1000, 100, lambda row: row, sum)
    assert sum(rows) == 1000
    assert len(rows) <= 100
    assert max(rows) <= 16
    later = coarsen([*rows, *[1] * 1000], 100, lambda row: row, sum)
    assert sum(later) == 2000
    assert max(later) <= 2 * min(later[:-1])


def test_every_reader_reads_across_what_was_merged(small, tmp_path):
    with Home(str(tmp_path)).add(created=0.0) as run:
        followers = MetricsReader(run.path), SeriesReader(run.path)
        seen = 0
        for first in range(0, 12_000, 400):
            for rank in (0, 1):
                write_steps(run.path, rank, first, first + 400)
            seen += sum(row.num_steps for row in followers[0].read_new()[0])
            assert followers[1].read(["loss"], max_points=10**6)["loss"].steps[-1] == first + 399
        assert seen == 12_000
        assert os.path.exists(metrics.metrics_path(run.path, 0) + ".past")
        assert folder_bytes(run.path) < 2 * (4 * 65_000 + 400 * 700)
        rows = metrics.read(run.path)
        assert all(isinstance(rows[rank][NUM_FIRST + 1], MergedSteps) for rank in (0, 1))
        breakdown = explain(run.path).breakdown
        assert breakdown is not None
        assert (breakdown.num_steps, breakdown.slowest) == (12_000, 1)
        assert (
            breakdown.ranks[0].num_waited_for + breakdown.ranks[1].num_waited_for == 12_000 - breakdown.warmup_steps
        )
        found = SeriesReader(run.path).read(NAMES, max_points=100)
        live = followers[1].read(["loss"], max_points=100)["loss"]
        for series in found.values():
            assert len(series.steps) == 100
            assert series.steps[-1] == 11_999
        assert found["loss"].high[0] == live.high[0] == 1000.0
        assert found["loss"].low[50] < found["loss"].mean[50] < found["loss"].high[50]
        assert found["wait"].mean[10:90] == pytest.approx([0.1] * 80, abs=1e-6)
        assert found["step_seconds"].mean == pytest.approx([0.02] * 100)
        assert found["grad_norm"].mean == pytest.approx([2.0] * 100)


def test_one_who_was_away_while_all_was_folded(small, tmp_path):
    reader, curves = MetricsReader(str(tmp_path)), SeriesReader(str(tmp_path))
    write_steps(str(tmp_path), 0, 0, 100)
    assert len(reader.read_new()[0]) == 100
    assert len(curves.read(["loss"])["loss"].steps) == 100
    write_steps(str(tmp_path), 0, 100, 8000)
    rows = reader.read_new()[0]
    assert abs(sum(row.num_steps for row in rows) - 7900) <= max(row.num_steps for row in rows)
    assert curves.read(["loss"])["loss"].steps[-1] == 7999
    assert reader.num_damaged == 0


def test_points_of_months(small, tmp_path):
    reader = PointsReader(str(tmp_path))
    with PointsWriter(str(tmp_path), 0) as writer:
        for number in range(5000):
            value = math.nan if 100 <= number < 105 else number * 1.0
            writer.write(Point(step=number, time=1000.0 + number, values={"a": value, "b": 1.0}))
            if number % 40 == 0:
                writer.flush()
                reader.read_new()
    assert folder_bytes(tmp_path) < 4 * 12_000 + 400 * 150
    found = SeriesReader(str(tmp_path)).read(["a", "b"], max_points=50)
    assert found["a"].steps[-1] == 4999
    assert found["a"].low[0] == 0.0
    assert found["a"].high[-1] == 4999.0
    assert found["b"].mean == [1.0] * 50
    old = [
        one for one in PointsReader(str(tmp_path)).read_new()[0] if isinstance(one, MergedPoint) and one.name == "b"
    ]
    assert all(after.num <= before.num for before, after in pairwise(old[:-1]))


def test_samples_of_months(small, tmp_path):
    writer = SystemWriter(str(tmp_path))
    for number in range(2000):
        workers = {0: WorkerSample(pid=5, cpu=1.0, rss=number)}
        writer.write(
            SystemSample(time=float(number), node="n", cores=2, cpu=0.5, memory_used=number, disk_free=9999 - number)
            if number % 2
            else SystemSample(time=float(number), node="n", cores=2, cpu=0.5, disk_free=9999, workers=workers)
        )
    writer.close()
    assert folder_bytes(tmp_path) < 4 * 11_000 + 30_000
    ((node, samples),) = SystemReader(str(tmp_path)).read_new().items()
    assert node == "n"
    assert sum(one.num_samples for one in samples) == 2000
    assert {one.cpu for one in samples} == {0.5}
    assert samples[0].num_samples > 4
    assert samples[0].workers[0].cpu == 1.0
    assert samples[-1].memory_used == 1999


def test_the_journal_keeps_what_matters(small, tmp_path):
    path = str(tmp_path / "journal.jsonl")
    reader, seen = JournalReader(str(tmp_path)), []
    with Journal(path) as log:
        log.write(event("run_started", 0.0, command="x"))
        for number in range(1, 4001):
            log.write(event("items_done", float(number), done=number))
            if number % 100 == 0:
                log.write(event("checkpoint_saved", float(number), 0, number, path="p"))
            if number == 2000:
                log.write(event("worker_lost", 2000.0, 1, id="1.0"))
            if number % 7 == 0:
                seen += reader.read_new()
        log.write(event("run_ended", 5000.0))
    seen += reader.read_new()
    assert len(seen) >= 4000 + 40 + 3
    assert folder_bytes(tmp_path) < 3 * 10_100 + 20_500
    events = list(journal.read(path))
    kinds = [one.kind for one in events]
    assert (kinds.count("run_started"), kinds.count("worker_lost"), kinds.count("run_ended")) == (1, 1, 1)
    assert kinds.count("checkpoint_saved") == 40
    (told,) = [one for one in events if one.kind == "thinned"]
    assert told.data["gone"]["items_done"] + kinds.count("items_done") == 4000
    assert events[1].kind == "run_started"
    assert [one.data["done"] for one in events if one.kind == "items_done"][:3] == [1, 2, 3]


def test_a_journal_of_nothing_but_important_events_is_bounded_too(small, tmp_path):
    path = str(tmp_path / "journal.jsonl")
    with Journal(path) as log:
        for number in range(2000):
            log.write(event("error", float(number), message=f"{number}" * 5))
    assert folder_bytes(tmp_path) < 3 * 10_100 + 20_500
    errors = [one for one in journal.read(path) if one.kind == "error"]
    assert errors[0].time == 0.0
    assert errors[-1].time == 1999.0


def test_very_many_kinds(small, tmp_path):
    lines = b"".join(journal.encode(event(f"kind{number}", float(number))) + b"\n" for number in range(2000))
    folded = journal.fold(b"", lines)
    assert len(folded) < 21_000 + journal.MAX_LINE_BYTES
    assert journal.decode(folded.splitlines()[-1]).kind == "kind1999"


def write_events(path: str, rank: int, count: int) -> None:
    with Journal(path) as log:
        for number in range(count):
            log.write(event("error", number * 1.0, rank, number))


def test_several_processes_and_a_journal_that_is_sealed_under_their_feet(monkeypatch, tmp_path):
    monkeypatch.setattr(journal, "BOUND", Bound(segment_bytes=5000, num_sealed=2, fold=journal.fold))
    path = str(tmp_path / "journal.jsonl")
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_events, args=(path, rank, 1000)) for rank in range(4)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
        assert each.exitcode == 0
    damaged: list[bytes] = []
    found = [(one.rank, one.step) for one in journal.read(path, damaged.append)]
    assert sorted(found) == [(rank, number) for rank in range(4) for number in range(1000)]
    for rank in range(4):
        assert [step for owner, step in found if owner == rank] == list(range(1000))
    assert damaged == []
    assert segments.read_past(path)[0] > 10


def test_bounds_as_they_are_said():
    """What docs/watching.md promises."""
    line = max(len(metrics.encode(row)) for row in steps_of(0, 9_999_000, 9_999_100))
    assert 3 * metrics.BOUND.segment_bytes / (line + 1) > 40_000
    past = len(metrics.encode_rows(widen(list(steps_of(1, 9_000_000, 9_100_000)), 64))) / 1563
    assert past * (MAX_ROWS + NUM_FIRST) < 8 << 20
    assert 4 * metrics.BOUND.segment_bytes + past * MAX_ROWS < 24 << 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_million_steps_of_four_ranks(tmp_path):
    """As a month of 250 ms steps leaves them; folded in one go, read within a memory limit."""
    import subprocess
    import sys

    with Home(str(tmp_path)).add(created=0.0) as run:
        for rank in range(4):
            rows = [*steps_of(rank, 0, NUM_FIRST)]
            for first in range(1024, 10_000_000 - 60_000, 1024):
                one = merge(list(steps_of(rank, first, first + 8)))
                sums = {name: 128 * getattr(one, name) for name in (*PARTS, "num_samples", "global_samples")}
                rows.append(replace(one, step=first + 1023, num_steps=1024, **sums))
            segments._replace_past(metrics.metrics_path(run.path, rank), 1, metrics.encode_rows(rows))
            with open(metrics.metrics_path(run.path, rank), "wb") as file:
                last = rows[-1].step + 1
                file.write(b"".join(metrics.encode(row) + b"\n" for row in steps_of(rank, last, last + 60_000)))
        code = (
            "import resource, sys\n"
            "from shoal.observe.explain import explain\n"
            "found = explain(sys.argv[1])\n"
            "print(found.breakdown.num_steps, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)\n"
        )
        done = subprocess.run([sys.executable, "-c", code, run.path], capture_output=True, text=True, check=True)
    num_steps, megabytes = map(int, done.stdout.split())
    assert num_steps > 9_900_000
    assert megabytes < 700


def test_a_journal_cut_at_any_byte_is_readable_and_goes_on(tmp_path):
    """Newest part and sealed one alike: what was whole before the cut is there, and so is what comes after it."""
    written = [event("a", 1.0, text="ä\u202e"), event("b", 2.0, 1, 7), event("c", 3.0, loss=math.nan)]
    lines = [journal.encode(one) + b"\n" for one in written]
    data = b"".join(lines)
    path = tmp_path / "journal.jsonl"
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        (tmp_path / "journal.jsonl.1").write_bytes(data[:cut])
        with Journal(str(path)) as log:
            log.write(event("after", 4.0))
        # A line that lacks nothing but its end is whole all the same.
        whole = sum(cut >= len(b"".join(lines[: count + 1])) - 1 for count in range(3))
        kinds = [one.kind for one in written[:whole]]
        assert [one.kind for one in journal.read(str(path))] == [*kinds, *kinds, "after"], cut

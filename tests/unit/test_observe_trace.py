"""A run as trace events: of the shape that viewers take, on one clock, with nothing left out."""

import gzip
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from observing import Home, event, make_step, make_steps, write_metrics

from shoal.observe.clocks import find_clocks
from shoal.observe.runs import find_run
from shoal.observe.spans import encode, spans_path
from shoal.observe.trace import Material, Span, Window, trace_run
from shoal.observe.trace_file import MAX_ROWS, parse_steps, print_trace, write_trace
from shoal.spec.errors import UserError
from shoal.spec.event import Event
from shoal.spec.system import SystemSample, WorkerSample
from tests.tracing import check_trace


def trace(material: Material, **window: int) -> list[dict[str, Any]]:
    """The events as a viewer would read them, after a strict look at each."""
    events = [json.loads(json.dumps(each, allow_nan=False)) for each in trace_run(material, Window(**window))]
    check_trace(events)
    return events


def slices(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in events if each.get("cat") == kind and each["ph"] in "Xb"]


def two_ranks(**changes: Any) -> dict[int, list[Any]]:
    """Rank 1 is late in every step, and rank 0 waits for it."""
    late = make_steps(5, compute=0.018, wait=0.0, **changes)
    return {0: make_steps(5, compute=0.010, wait=0.008, waited_for=1, **changes), 1: late}


def test_steps_have_their_parts_inside_and_in_order():
    events = trace(Material(name="r", events=[], metrics=two_ranks()))
    steps = [each for each in slices(events, "step") if each["pid"] == 2]
    assert [each["name"] for each in steps] == [f"step {number}" for number in range(1, 6)]
    (wait, *_) = [each for each in slices(events, "wait") if each["pid"] == 2]
    (compute, *_) = [each for each in slices(events, "compute") if each["pid"] == 2]
    assert wait["name"] == "wait for rank 1"
    assert wait["dur"] == pytest.approx(8000.0)
    assert compute["ts"] == steps[0]["ts"]
    assert wait["ts"] == pytest.approx(compute["ts"] + compute["dur"])
    assert {each["pid"] for each in slices(events, "load")} == {2, 3}


def test_arrows_lead_from_whom_was_waited_for():
    events = trace(Material(name="r", events=[], metrics=two_ranks()))
    starts = {each["id"]: each for each in events if each["ph"] == "s"}
    ends = {each["id"]: each for each in events if each["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 5
    for number, start in starts.items():
        assert (start["pid"], ends[number]["pid"]) == (3, 2)
        assert start["ts"] <= ends[number]["ts"]


def test_clocks_that_are_off_are_put_right():
    ahead = [replace(row, time=row.time + 90.0) for row in make_steps(5, compute=0.018, wait=0.0)]
    known = event("clock", 1000.0, node="b", offset_seconds=90.0, error_seconds=0.0001, ranks=[1])
    late = event("step_skipped", 1090.05, rank=1, step=2)
    events = trace(Material(name="r", events=[known, late], metrics={0: make_steps(5), 1: ahead}))
    ends = {(each["pid"], each["name"]): each["ts"] + each["dur"] for each in slices(events, "step")}
    for number in range(1, 6):
        assert ends[2, f"step {number}"] == pytest.approx(ends[3, f"step {number}"], abs=1.0)
    (skipped,) = [each for each in events if each["name"] == "step_skipped"]
    assert skipped["ts"] == pytest.approx(51_000.0, abs=1.0), "the first step began a millisecond before"


def test_a_clock_that_drifts_is_followed():
    told = [
        event("clock", 1000.0, node="b", offset_seconds=1.0, error_seconds=0.0, ranks=[1]),
        event("clock", 1100.0, node="b", offset_seconds=2.0, error_seconds=0.0, ranks=[1]),
    ]
    clocks = find_clocks(told)
    assert clocks.common(1, 1001.0) == pytest.approx(1000.0)
    assert clocks.common(1, 1051.5) == pytest.approx(1050.0, abs=0.02)
    assert clocks.common(1, 1202.0) == pytest.approx(1200.0)
    assert clocks.common(0, 1051.5) == 1051.5
    assert find_clocks([event("clock", ranks="1", offset_seconds="x"), event("clock")]).offsets == {}


def test_a_blurred_measurement_gives_way_to_a_sharp_one_beside_it():
    def told(time: float, seconds: float, error: float) -> Event:
        return event("clock", time, node="b", offset_seconds=seconds, error_seconds=error, ranks=[1])

    start, later, moved = told(1000.0, 0.005, 0.006), told(1030.0, 0.0001, 0.0003), told(1060.0, 3.0, 0.5)
    known = find_clocks([start, later, moved]).offsets[1]
    assert [(each.seconds, each.error) for each in known] == [(0.0001, 0.0003), (0.0001, 0.0003), (3.0, 0.5)]


def elastic_events() -> list[Event]:
    return [
        event("run_started", 1000.0, num_workers=2),
        event("worker_started", 1000.0, rank=0, pid=10),
        event("worker_started", 1000.0, rank=1, pid=11),
        event("world", 1000.01, generation=0, members=["0.0", "1.0"], joined=["0.0", "1.0"], reason="all are ready"),
        Event(kind="fault", time=1000.05, rank=1, step=2, data={"kind": "kill", "at": "backward"}),
        event("worker_exited", 1000.06, rank=1, code=-9),
        event("worker_lost", 1000.06, rank=1, id="1.0", code=-9, reason="killed by signal 9"),
        event("world", 1000.061, generation=1, members=["0.0"], joined=[], reason="rank 1 was lost"),
        event("worker_started", 1000.07, rank=1, pid=12, incarnation=1),
        event("worker_joined", 1000.09, rank=1, id="1.1", generation=2),
        event("world", 1000.09, generation=2, members=["0.0", "1.1"], joined=["1.1"], reason="1 joined"),
        event("alert", 1000.095, rule="worker lost", message="<b>", severity="warning"),
        event("checkpoint_saved", 1000.098, rank=0, step=4, path="/x", num_bytes=1 << 20, seconds=0.02),
        event("run_ended", 1000.2, status="finished", exit_code=0),
    ]


def test_worlds_losses_joins_checkpoints_and_faults_are_there():
    events = trace(Material(name="r", events=elastic_events(), metrics={0: make_steps(6), 1: make_steps(2)}))
    names = [each["name"] for each in events]
    assert [each["name"] for each in slices(events, "world")] == [
        "World 0: 2 workers",
        "World 1: 1 workers",
        "World 2: 2 workers",
    ]
    assert "recovery from the loss of rank 1" in names
    assert "rank 1 is away" in names
    assert "rank 1 starts" in names
    assert [each["args"]["pid"] for each in slices(events, "process") if each["pid"] == 3] == [11, 12]
    (save,) = slices(events, "checkpoint")
    assert save["args"]["num_bytes"] == 1 << 20
    instants = {each["name"]: each["s"] for each in events if each["ph"] == "i"}
    assert instants["fault: kill"] == "g"
    assert instants["alert: worker lost"] == "g"
    counters = {each["name"] for each in events if each["ph"] == "C"}
    assert {"loss", "lr", "samples_per_second", "workers"} <= counters


def test_some_steps_bring_only_what_happened_meanwhile():
    material = Material(name="r", events=elastic_events(), metrics={0: make_steps(6), 1: make_steps(2)})
    events = trace(material, first=6, last=7)
    assert {each["name"] for each in slices(events, "step")} == {"step 6"}
    assert [each["name"] for each in slices(events, "world")] == ["World 2: 2 workers"]
    assert "fault: kill" not in {each["name"] for each in events}


def test_hostile_numbers_names_and_times_are_harmless():
    rows = [
        make_step(1, loss=math.nan, grad_norm=math.inf),
        make_step(2, time=900.0),  # the clock was set back
        make_step(3, compute=50.0),
        make_step(3, wait=-1.0),
    ]
    told = [
        event("\x1b[2Jkind\u202e", 1000.0, rank=0),
        event("error", 1000.0, rank=0, type="\x1b]0;x\x07E", message="</script>"),
        event("checkpoint_saved", 1000.0, seconds="long"),
        event("checkpoint_saved", 1000.0, seconds=-5.0),
    ]
    events = trace(Material(name="\x1b[31m<script>", events=told, metrics={0: rows, 7: []}))
    assert all("\x1b" not in each["name"] and "\u202e" not in each["name"] for each in events)
    assert not [each for each in events if each["ph"] == "C" and each["name"] == "grad_norm"]


def test_spans_nest(run_dir: str):
    Path(run_dir).mkdir()
    spans = [
        Span(name="backward", kind="compute", start=1000.0, seconds=0.01, step=3),
        Span(name="bucket 0", kind="bucket", start=1000.002, seconds=0.001, step=3, args={"bytes": 4096}),
        Span(name="late", kind="wait", start=1000.009, seconds=0.005, step=3),
    ]
    Path(spans_path(run_dir, 0)).write_bytes(b"".join(map(encode, spans)) + b'{"name": "torn')
    from shoal.observe.spans import read

    events = trace(Material(name="r", events=[], metrics={0: make_steps(4)}, spans=read(run_dir)))
    found = {each["name"]: each for each in events if each.get("tid") == 2 and each["ph"] == "X"}
    assert found.keys() == {"backward", "bucket 0", "late"}
    assert found["bucket 0"]["args"]["bytes"] == 4096


class TestFiles:
    def test_a_file_is_whole_and_packed_where_its_name_says_so(self, tmp_path, capsys):
        home = Home(str(tmp_path))
        path = home.add_ended()
        write_metrics(path, two_ranks())
        run = find_run(home.path, "last")
        assert print_trace(run, None, None, sys.stdout, as_json=True) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["path"] == str(Path(path, "trace.json.gz"))
        assert told["steps"] == [1, 6]
        with gzip.open(told["path"]) as file:
            packed = json.load(file)
        plain = tmp_path / "plain.json"
        assert print_trace(run, str(plain), None, sys.stdout, as_json=False) == 0
        assert "ui.perfetto.dev" in capsys.readouterr().out
        assert json.loads(plain.read_text()) == packed
        assert len(packed["traceEvents"]) == told["num_events"]
        check_trace(packed["traceEvents"])
        assert not list(tmp_path.glob("plain.json.*"))

    def test_a_run_without_anything(self, tmp_path):
        home = Home(str(tmp_path))
        home.add_ended()
        written = write_trace(find_run(home.path, "last"), None, Window())
        assert written.steps is None
        with pytest.raises(UserError, match="no steps 3:9"):
            write_trace(find_run(home.path, "last"), None, Window(3, 9))

    def test_long_runs_lose_their_oldest_steps(self, tmp_path, monkeypatch):
        assert MAX_ROWS > 1000
        monkeypatch.setattr("shoal.observe.trace_file.MAX_ROWS", 6)
        home = Home(str(tmp_path))
        write_metrics(home.add_ended(), two_ranks())
        written = write_trace(find_run(home.path, "last"), None, Window())
        assert (written.steps, written.num_left_out) == ((3, 6), 2)

    def test_a_disk_that_refuses(self, tmp_path):
        home = Home(str(tmp_path))
        home.add_ended()
        with pytest.raises(UserError, match="Cannot write"):
            write_trace(find_run(home.path, "last"), str(tmp_path / "no" / "x.json"), Window())

    @pytest.mark.parametrize("text", ["5", ":", "a:b", "5:5", "9:3", "-1:4", "1:2:3", ""])
    def test_ranges_that_are_none(self, text):
        with pytest.raises(UserError, match="--steps"):
            parse_steps(text)

    def test_ranges(self):
        assert parse_steps("5:") == Window(5, None)
        assert parse_steps(":7") == Window(None, 7)
        assert parse_steps("0:1") == Window(0, 1)


def test_machines_are_counters_beside_the_steps():
    worker = WorkerSample(pid=7, cpu=0.9, rss=1 << 20, throttled=0.5)
    sample = SystemSample(time=1090.05, node="n\x1b[2J", cores=2, cpu=1.5, memory_used=1 << 30, workers={1: worker})
    clock = event("clock", 1000.0, node="n", offset_seconds=90.0, error_seconds=0.0, ranks=[1])
    events = trace(Material(name="r", events=[clock], metrics={0: make_steps(5)}, samples={"n\x1b[2J": [sample]}))
    counters = {(each["pid"], each["name"]): each for each in events if each["ph"] == "C"}
    assert counters[1_000_000, "cpu"]["args"] == {"busy cores": 1.5}
    assert counters[3, "memory"]["args"] == {"rss": 1 << 20}
    assert counters[3, "kept from running"]["ts"] == pytest.approx(50_000.0, abs=1.0)

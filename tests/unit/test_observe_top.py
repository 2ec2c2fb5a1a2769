"""The screen of `shoal top`: what it reads, what it shows in any size, and what keys do."""

import io
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from observing import Home, event, make_step, make_steps, write_log, write_metrics

from shoal import cli
from shoal.observe import top as tops
from shoal.observe.clean import columns
from shoal.observe.journal import Journal
from shoal.observe.top import ORDERS, NodeLine, RankLine, Reader, RunLine, Snapshot, newest_log, sort_runs
from shoal.observe.top_screen import Detail, press, print_once, settle
from shoal.observe.top_text import Choice, find_slow, milliseconds, render, size, spark, style_of

HOSTILE = "\x1b[2J\x1b]0;gone\x07<script>\u202ename\r\n"


def rank_line(rank: int = 0, **changes: object) -> RankLine:
    shares = {"compute": 0.7, "communicate": 0.1, "wait": 0.15, "load": 0.05}
    facts = {"rank": rank, "step": 40, "time": 1000.0, "step_seconds": 0.02, "num_samples": 32, "waited_for": 1}
    return RankLine(**{**facts, "shares": shares, **changes})  # type: ignore[arg-type]


def snapshot(tmp_path: Path, *names: str, num_ranks: int = 2, **changes: object) -> Snapshot:
    home = Home(str(tmp_path))
    lines = []
    for number, name in enumerate(names):
        path = home.add_ended(created=1000.0 - number)
        info = tops.read_run(path)
        assert info is not None
        info = replace(info, name=name, status="running")
        ranks = tuple(map(rank_line, range(num_ranks)))
        facts = {"seconds": 50.0, "step": 40, "loss": 0.5, "step_seconds": 0.02, "samples_per_second": 3200.0}
        lines.append(RunLine(run=info, ranks=ranks, history=(0.01, 0.02), **{**facts, **changes}))
    return Snapshot(home=home.path, time=1000.0, runs=tuple(lines))


def text_of(lines: list[tuple[tuple[str, str], ...]]) -> list[str]:
    return ["".join(part[0] for part in line) for line in lines]


class TestReading:
    def test_runs_that_run_come_first_and_have_their_newest_numbers(self, tmp_path):
        home = Home(str(tmp_path))
        write_metrics(home.add_ended(created=2000.0), {0: make_steps(5)})
        with home.add(created=1000.0) as live:
            late = make_steps(400, waited_for=1, wait=0.01)
            write_metrics(live.path, {0: late, 1: make_steps(398)})
            reader = Reader(home.path)
            shown = reader.read(1008.5)
            assert [line.run.status for line in shown.runs] == ["running", "finished"]
            line = shown.runs[0]
            assert (line.step, line.loss, len(line.ranks)) == (401, 0.5, 2)
            assert line.step_seconds == pytest.approx(0.02)
            assert line.samples_per_second == pytest.approx(64 / 0.02)
            assert line.ranks[0].waited_for == 1
            assert line.since == pytest.approx(0.5)
            write_metrics(live.path, {0: [*late, make_step(401, loss=math.nan)]})
            newer = reader.read(1009.0).runs[0]
            assert newer.step == 402
            assert math.isnan(newer.loss or 0.0)
            live.update(status="failed", exit_code=1, ended=1010.0)
        ended = reader.read(1011.0)
        assert {line.run.status for line in ended.runs} == {"failed", "finished"}

    def test_machines_and_workers_are_shown_where_they_told_of_themselves(self, tmp_path):
        home = Home(str(tmp_path))
        with home.add() as live:
            write_metrics(live.path, {0: make_steps(3)})
            sample = {
                "time": 1.0,
                "node": "n",
                "cores": 2,
                "cpu": 1.5,
                "memory_used": 1 << 30,
                "net_in": 10,
                "net_out": 5,
            }
            sample["workers"] = {"0": {"cpu": 0.9, "rss": 1 << 29}, "x": {}, "7": 3}
            Path(live.path, "system-n.jsonl").write_text(json.dumps(sample) + "\n" + '{"cut')
            Path(live.path, "system-bad.jsonl").write_text("[]\nnull\n")
            (line,) = Reader(home.path).read().runs
        assert line.nodes == (
            NodeLine(node="n", time=1.0, cores=2.0, cpu=1.5, memory_used=2.0**30, net_in=10.0, net_out=5.0),
        )
        assert (line.memory, line.network) == (float(1 << 29), 15.0)
        assert (line.ranks[0].cpu, line.ranks[0].node) == (0.9, "n")

    def test_many_runs_that_are_over_cost_nothing_after_the_first_look(self, tmp_path, monkeypatch):
        home = Home(str(tmp_path))
        first = home.add_ended()
        for number in range(1500):
            path = Path(tmp_path, "runs", f"old-{number}")
            path.mkdir()
            (path / "run.json").write_text('{"name": "x", "status": "finished", "created": 5}')
        reads: list[str] = []
        monkeypatch.setattr(tops, "read_run", lambda path, true=tops.read_run: reads.append(path) or true(path))
        listed: list[str] = []
        monkeypatch.setattr(os, "listdir", lambda path=".", true=os.listdir: listed.append(str(path)) or true(path))
        reader = Reader(home.path)
        shown = reader.read()
        assert len(shown.runs) + shown.num_older == 1501
        assert len(reads) <= tops.MAX_ENDED
        reads.clear()
        listed.clear()
        assert reader.read().num_older == shown.num_older
        assert (reads, listed) == ([], [])
        # One of them goes on, wherever it stands: it is found in time.
        with tops_claim(first):
            for _ in range(1501 // tops.LOOK_AGAIN + 2):
                again = reader.read()
                if again.runs[0].is_running:
                    break
            assert again.runs[0].run.path == first
        shutil.rmtree(first)
        assert first not in {line.run.path for line in reader.read().runs}

    def test_a_run_elsewhere_can_be_looked_at(self, tmp_path):
        home, other = Home(str(tmp_path / "home")), Home(str(tmp_path / "other"))
        home.add_ended()
        path = other.add_ended()
        assert path in {line.run.path for line in Reader(home.path, path).read().runs}
        assert len(Reader(other.path, path).read().runs) == 1

    def test_no_home_at_all(self, tmp_path):
        assert Reader(str(tmp_path / "none")).read().runs == ()

    def test_last_lines_of_logs(self, run_dir):
        Path(run_dir, "logs").mkdir(parents=True)
        write_log(run_dir, 0, "a\nb\nc\n")
        write_log(run_dir, 1, b"\xff\n")
        assert newest_log(run_dir, 4) == [(0, "b"), (0, "c"), (1, "\ufffd")]
        assert newest_log(run_dir, 4, rank=1) == [(1, "\ufffd")]


def tops_claim(path: str):
    from shoal.observe.folder import claim

    return claim(path, {"command": ["x"]}, 3000.0)


class TestScreen:
    @pytest.mark.parametrize("width", [1, 19, 20, 33, 40, 80, 132, 200, 400])
    @pytest.mark.parametrize("height", [1, 4, 5, 10, 24, 50])
    @pytest.mark.parametrize("choice", [Choice(), Choice(opened=HOSTILE), Choice(has_help=True), Choice(chosen="b")])
    def test_any_size_is_filled_and_not_exceeded(self, tmp_path, width, height, choice):
        shown = snapshot(tmp_path, HOSTILE, "b", "漢字" * 30, num_ranks=40)
        shown = replace(shown, num_older=12345)
        detail = Detail(events=[event(HOSTILE, step=3, why=HOSTILE)] * 9, log=[(0, HOSTILE)] * 3)
        for one in (choice, replace(choice, has_log=True), replace(choice, top=30)):
            lines = render(shown, one, width, height, detail)
            assert len(lines) == height
            for line in text_of(lines):
                assert columns(line) <= width
                assert line.isprintable() or not any(ord(sign) < 32 for sign in line)
                assert "\x1b" not in line
                assert "\u202e" not in line

    def test_keys_are_at_the_bottom(self, tmp_path):
        lines = text_of(render(snapshot(tmp_path, "a"), Choice(), 80, 24))
        assert " ".join(lines[-1].split()) == "q quit ↑↓ select enter open s sort p pause ? help"
        lines = text_of(render(snapshot(tmp_path, "b"), Choice(opened="b"), 80, 24))
        assert "esc" in lines[-1]
        assert "log" in lines[-1]

    def test_a_run_of_eighty_columns_has_what_matters(self, tmp_path):
        shown = snapshot(tmp_path, "2026-11-15-200146-train-5i3c")
        title, row = text_of(render(shown, Choice(), 80, 24))[1:3]
        assert title.split()[:9] == ["RUN", "STATUS", "W", "STEP", "LOSS", "A", "STEP", "SPEED", "TIME"]
        assert row.split()[:8] == ["…5-200146-train-5i3c", "running", "2", "40", "0.5000", "20ms", "3.2k", "0:50"]

    def test_more_room_shows_more(self, tmp_path):
        shown = snapshot(tmp_path, "a")
        assert "COMMAND" in text_of(render(shown, Choice(), 200, 50))[1]

    def test_whom_others_wait_for_is_marked(self, tmp_path):
        shown = snapshot(tmp_path, "a", num_ranks=2)
        lines = text_of(render(shown, Choice(opened="a"), 100, 24))
        assert any(line.startswith("   1 ") and "waited for" in line for line in lines)
        assert any(line.startswith("   0 ") and "waits for 1" in line for line in lines)
        mutual = [rank_line(0, shares={"wait": 0.5}, waited_for=1), rank_line(1, shares={"wait": 0.1}, waited_for=0)]
        assert find_slow(mutual) == 1
        assert find_slow([rank_line(0, waited_for=None)]) is None

    def test_a_run_that_stands_still_is_marked(self, tmp_path):
        (line,) = snapshot(tmp_path, "a", since=60.0).runs
        assert style_of(line, 0.0) == "warn"
        assert style_of(replace(line, since=60.0, step_seconds=30.0), 0.0) == ""
        assert style_of(replace(line, run=replace(line.run, status="lost")), 0.0) == "bad"

    def test_ascii_terminals_get_ascii_bars(self, tmp_path):
        lines = text_of(render(snapshot(tmp_path, "a"), Choice(opened="a"), 120, 24, is_ascii=True))
        assert "#" in "".join(lines)
        assert "█" not in "".join(lines)

    def test_no_runs(self, tmp_path):
        lines = text_of(render(Snapshot(home=str(tmp_path), time=0.0), Choice(), 80, 24))
        assert "shoal run SCRIPT" in "".join(lines)

    def test_numbers(self):
        assert [size(value) for value in (0, 2048, 5 << 20, 3 << 30)] == ["0", "2.0k", "5.0M", "3.0G"]
        assert [milliseconds(value) for value in (0.0164, 1.239, 5000.0)] == ["16.4ms", "1.24s", "1:23:20"]
        assert spark([0.0, 1.0, math.nan], is_ascii=False) == "▁█?"


class TestKeys:
    def test_moving_keeps_the_chosen_run_on_the_screen(self, tmp_path):
        shown = snapshot(tmp_path, *"abcdefgh")
        choice = settle(Choice(), shown, 3)
        assert choice.chosen == "a"
        for _ in range(5):
            choice = press(choice, "j", shown, 3)
            assert choice is not None
        assert (choice.chosen, choice.top) == ("f", 3)
        assert press(choice, "G", shown, 3) == replace(choice, chosen="h", top=5)
        assert press(choice, "g", shown, 3) == replace(choice, chosen="a", top=0)
        assert press(choice, "up", shown, 3) == replace(choice, chosen="e", top=3)
        assert press(Choice(), "j", replace(shown, runs=()), 3) == Choice()

    def test_opening_closing_and_the_rest(self, tmp_path):
        shown = snapshot(tmp_path, "a", "b")
        choice = press(Choice(chosen="b"), "enter", shown, 9)
        assert choice is not None
        assert choice.opened == "b"
        assert press(choice, "l", shown, 9) == replace(choice, has_log=True)
        assert press(choice, "j", shown, 9) == replace(choice, top=1)
        assert press(choice, "esc", shown, 9) == Choice(chosen="b")
        assert press(choice, "p", shown, 9) == replace(choice, is_paused=True)
        helped = press(choice, "?", shown, 9)
        assert helped is not None
        assert press(helped, "x", shown, 9) == choice
        assert press(helped, "q", shown, 9) is None
        assert press(choice, "unknown", shown, 9) == choice
        assert settle(replace(choice, opened="gone"), shown, 9).opened == ""

    def test_all_orders(self, tmp_path):
        shown = snapshot(tmp_path, "a", "b")
        choice = Choice()
        for order in (*ORDERS[1:], ORDERS[0]):
            choice = press(choice, "s", shown, 9) or Choice()
            assert choice.order == order
        slow = replace(shown.runs[1], step_seconds=9.0)
        assert [line.run.name for line in sort_runs([shown.runs[0], slow], "step time")] == ["b", "a"]
        ended = replace(shown.runs[0], run=replace(shown.runs[0].run, status="finished"))
        assert [line.run.name for line in sort_runs([ended, slow], "name")] == ["b", "a"]


class TestScripts:
    def test_once_and_json(self, tmp_path, capsys, monkeypatch):
        home = Home(str(tmp_path))
        monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
        path = home.add_ended(num_workers=1)
        write_metrics(path, {0: [make_step(1), make_step(2, loss=math.inf)]})
        with Journal(os.path.join(path, "journal.jsonl")) as file:
            file.write(event("worker_lost", rank=0, reason=HOSTILE))
        assert cli.main(["top", "--json"]) == 0
        (run,) = json.loads(capsys.readouterr().out)["runs"]
        assert (run["status"], run["step"], run["loss"], run["ranks"][0]["rank"]) == ("finished", 3, "inf", 0)
        assert cli.main(["top", "--once"]) == 0
        assert capsys.readouterr().out.startswith("RUN")
        assert cli.main(["top", "last"]) == 0, "a pipe is no terminal"
        shown = capsys.readouterr().out
        assert "worker_lost" in shown
        assert "\x1b" not in shown

    def test_nothing_to_show(self, tmp_path):
        stream = io.StringIO()
        print_once(Reader(str(tmp_path)), stream, width=80, as_json=False)
        assert "no runs" in stream.getvalue()

    @pytest.mark.parametrize("text", ["x", "0", "-1", "nan", "1e9"])
    def test_mistakes(self, text, capsys):
        assert cli.main(["top", "--every", text]) == 2
        assert "--every" in capsys.readouterr().err

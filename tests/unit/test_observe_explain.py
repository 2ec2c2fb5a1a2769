"""`shoal explain` and `shoal logs`: from a folder on disk to text."""

import io
import json
import os
from pathlib import Path

import pytest
from observing import Home, event, make_step, make_steps, write_log, write_metrics

from shoal.observe.clean import columns
from shoal.observe.explain import explain, print_explanation
from shoal.observe.journal import Journal
from shoal.observe.logs import print_logs
from shoal.spec.errors import UserError


@pytest.fixture
def home(tmp_path):
    return Home(str(tmp_path / "home"))


def write_events(path, *events):
    with Journal(os.path.join(path, "journal.jsonl")) as log:
        for one in events:
            log.write(one)


@pytest.fixture
def trained(home):
    """A run in which rank 1 is half as fast as rank 0."""
    path = home.add_ended()
    fast = make_steps(100, compute=0.01, wait=0.01, communicate=0.002, load=0.0, other=0.0, waited_for=1)
    slow = make_steps(100, compute=0.02, wait=0.0, communicate=0.002, load=0.0, other=0.0)
    write_metrics(path, {0: fast, 1: slow})
    write_events(
        path,
        event("settings", batch_size={"value": 64, "source": "argument"}, seed=7),
        event("rebalance", rank=0, step=10, shares=[5, 3]),
        event("rebalance", rank=0, step=20, shares=[6, 2]),
        event("checkpoint_skipped", step=5, message="step-000000005: digest differs"),
    )
    write_log(path, 0, "hello\n")
    write_log(path, 1, "hello\n")
    return path


class TestExplain:
    def test_a_run_is_explained_from_facts_to_files(self, trained):
        text = explain(trained).text(140)
        assert f"{os.path.basename(trained)}: finished after 0:50, 2 workers" in text
        assert "$ shoal run train.py" in text
        assert "100 steps, 22 ms each" in text
        assert "slowest: rank 1, 20 ms for its own part of a step; others 10 ms" in text
        assert "the last to arrive in 100 % of waits" in text
        assert "Rank 1 computes slower than the others, who wait for it. [up to 45 % less time]" in text
        assert "rebalance (2 times, the last at rank 0, step 20): shares [6, 2]" in text
        assert "checkpoint skipped (step 5): step-000000005: digest differs" in text
        assert "batch_size  64  (argument)" in text
        assert trained in text

    def test_bars_add_up(self, trained):
        rows = [line for line in explain(trained).text(100).splitlines() if "█" in line and "%" in line]
        assert [row.split()[0] for row in rows] == ["all", "rank", "rank"]
        assert len({len(row.split("  ")[-1]) for row in rows}) == 1
        assert "░" in rows[1]
        assert "░" not in rows[2]

    @pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
    @pytest.mark.parametrize("is_ascii", [False, True])
    def test_it_fits_every_width_and_encoding(self, trained, width, is_ascii):
        text = explain(trained).text(width, is_ascii=is_ascii)
        body, _, files = text.partition("\nfiles\n")
        assert max(map(columns, body.splitlines())) <= width
        assert trained in files
        assert text.isascii() or not is_ascii

    def test_json_holds_the_same(self, trained):
        found = json.loads(explain(trained).json())
        assert found["run"]["status"] == "finished"
        assert found["breakdown"]["slowest"] == 1
        assert found["findings"][0]["kind"] == "slow_compute"
        assert found["settings"][0] == {"name": "batch_size", "value": "64", "source": "argument"}
        assert found["log_bytes"] == {"0": 6, "1": 6}

    def test_a_loss_that_is_not_a_number_survives_json(self, home):
        path = home.add_ended()
        write_metrics(path, {0: [make_step(1, loss=float("nan"))]})
        assert json.loads(explain(path).json())["breakdown"]["last_loss"] == "nan"

    def test_a_failed_run_says_why(self, home):
        path = home.add_ended(status="failed", exit_code=1)
        write_events(
            path,
            event("error", 1002.0, rank=0, type="MemberLost", message="rank 1 is gone"),
            event(
                "error",
                1001.0,
                rank=1,
                type="ValueError",
                message="bad\nbatch",
                where="train.py:12",
                step=7,
                hint="look",
            ),
            event("worker_exited", 1003.0, rank=1, code=1),
            event("worker_exited", 1003.0, rank=0, code=-15),
        )
        found = explain(path)
        assert found.cause.rank == 1
        assert found.cause.step == 7
        text = found.text(80)
        assert "error: ValueError: bad batch" in text
        assert "at: rank 1, step 7, train.py:12" in text
        assert "do: look" in text
        assert "(1 more error followed)" in text
        assert "rank 1: exit code 1" in text
        assert "rank 0: ended by SIGTERM" in text

    def test_what_the_launcher_concluded_wins_over_who_spoke_first(self, home):
        path = home.add_ended(status="failed", exit_code=1)
        write_events(
            path,
            event("error", 1001.0, rank=0, type="MemberLost", message="rank 1 is gone"),
            event(
                "run_ended", 1002.0, cause={"rank": 1, "message": "The worker was killed by SIGKILL.", "step": None}
            ),
        )
        found = explain(path)
        assert found.cause.rank == 1
        assert "error: The worker was killed by SIGKILL." in found.text(80)

    def test_only_the_newest_attempt_in_a_folder_is_explained(self, home):
        path = home.add_ended()
        write_metrics(path, {0: make_steps(5, time=10.0) + make_steps(3)})
        write_events(
            path, event("error", 10.0, rank=0, message="of an earlier attempt"), event("resumed", 1001.0, step=5)
        )
        found = explain(path)
        assert found.cause is None
        assert found.breakdown.num_steps == 3
        assert [note.kind for note in found.notes] == ["resumed"]

    def test_an_error_that_did_not_stop_the_run_is_no_cause(self, home):
        path = home.add_ended()
        write_events(path, event("error", rank=0, message="caught by the script"))
        assert explain(path).cause is None

    def test_a_script_without_the_trainer_still_has_something_to_show(self, home):
        path = home.add_ended(num_workers=1)
        write_log(path, 0, "x" * 2500)
        text = explain(path).text(80)
        assert "finished after 0:50, 1 worker" in text
        assert "no steps were recorded" in text
        assert "logs of rank 0: 2.5k bytes" in text

    def test_a_lost_run_says_what_is_known(self, home):
        run = home.add()
        write_events(run.path, event("run_started", 1000.0), event("checkpoint", 1030.0, step=3))
        run.close()
        text = explain(run.path).text(80)
        assert ": lost after 0:30" in text
        assert "killed" in text

    def test_a_running_run_can_be_explained(self, home):
        with home.add() as run:
            write_metrics(run.path, {0: make_steps(5)})
            assert ": running after" in explain(run.path).text(80)

    def test_damage_is_counted_not_raised(self, trained):
        for name in ("journal.jsonl", "metrics-0.jsonl"):
            with open(os.path.join(trained, name), "ab") as file:
                file.write(b'\xff{"torn\n[]\n{"step":')
        found = explain(trained)
        # The unfinished line of a metrics file may still be on its way; one of a journal counts.
        assert found.num_damaged == 5
        assert "5 damaged lines" in found.text(80)

    def test_hostile_events_are_shown_harmlessly(self, home):
        path = home.add_ended(command=["\x1b[2J"], host="\x07")
        evil = "\x1b]0;x\x07\r\nnext"
        write_events(
            path,
            event(evil, **{evil: evil}),
            event("settings", **{evil: {"value": evil, "source": evil}}),
            event("settings", nothing=None, deep={"value": {"a": 1}}),
            event("error", type=evil, message=evil, where=evil),
            event("worker_exited", rank=1, code="x"),
        )
        text = explain(path).text(80)
        assert "\x1b" not in text
        assert "\r" not in text
        assert "\x07" not in text

    def test_what_is_not_a_run_is_an_error(self, tmp_path):
        with pytest.raises(UserError, match="not a run folder"):
            explain(str(tmp_path))

    def test_many_ranks_show_those_that_matter(self, home):
        path = home.add_ended(num_workers=40)
        write_metrics(path, {rank: make_steps(5, compute=0.01 + 0.0001 * rank) for rank in range(40)})
        text = explain(path).text(80)
        assert "rank 39" in text
        assert "rank 3 " not in text
        assert "and 24 ranks that are faster" in text

    def test_the_command_prints_text_or_json(self, home, trained):
        out = io.StringIO()
        assert print_explanation(home.path, "last", out, as_json=True, width=80) == 0
        assert json.loads(out.getvalue())["run"]["path"] == trained
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding="ascii")
        assert print_explanation(home.path, "last", stream, as_json=False, width=80) == 0
        stream.flush()
        assert b"# compute" in raw.getvalue()

    def test_a_hundred_thousand_steps_are_explained(self, home):
        path = home.add_ended()
        line = Path(path, "metrics-0.jsonl")
        write_metrics(path, {0: [make_step(1)]})
        line.write_bytes(line.read_bytes() * 100_000)
        assert explain(path).breakdown.num_steps == 100_000


class TestLogs:
    def show(self, home, text="last", **options):
        out = io.StringIO()
        assert print_logs(home.path, text, out, **options) == 0
        return out.getvalue()

    def test_logs_of_all_ranks_are_merged_and_folded(self, home):
        path = home.add_ended()
        for rank in range(2):
            write_log(path, rank, f"start\nrank {rank}\nend\n")
        assert self.show(home) == "[0-1] start\n[0] rank 0\n[1] rank 1\n[0-1] end\n"

    def test_one_worker_needs_no_prefix(self, home):
        write_log(home.add_ended(num_workers=1), 0, "a\nb")
        assert self.show(home) == "a\nb\n"

    def test_one_rank_of_many_keeps_its_prefix(self, home):
        path = home.add_ended()
        for rank in range(2):
            write_log(path, rank, f"rank {rank}\n")
        assert self.show(home, ranks=[1]) == "[1] rank 1\n"

    def test_the_last_lines_of_each_rank(self, home):
        path = home.add_ended()
        for rank in range(2):
            write_log(path, rank, "".join(f"{rank}.{line}\n" for line in range(1000)))
        assert self.show(home, num_lines=1) == "[0] 0.999\n[1] 1.999\n"
        assert self.show(home, num_lines=0) == ""
        assert self.show(home, num_lines=5000).count("\n") == 2000

    def test_a_rank_that_is_not_there_is_an_error(self, home):
        path = home.add_ended()
        write_log(path, 0, "x\n")
        with pytest.raises(UserError, match="no log of rank 5") as caught:
            self.show(home, ranks=[0, 5])
        assert "rank 0" in caught.value.why

    def test_a_run_without_logs_shows_nothing(self, home):
        home.add_ended()
        assert self.show(home) == ""

    def test_hostile_logs_are_shown_harmlessly(self, home):
        path = home.add_ended(num_workers=1)
        write_log(path, 0, b"\x1b[2J\x1b]0;x\x07 10%\r 50%\r\xff100%\x00\n")
        write_log(path, 1, b"")
        Path(path, "logs", "0.error.json").write_text("{}")
        Path(path, "logs", "x.log").write_text("not shown")
        assert self.show(home) == "\ufffd100%^@\n"

    def test_following_goes_on_until_the_run_ends(self, home):
        run = home.add()
        first = write_log(run.path, 0, "one\n")
        naps = []

        def sleep(seconds):
            naps.append(seconds)
            if len(naps) == 1:
                with first.open("a") as file:
                    file.write("two\n")
            elif len(naps) == 2:
                write_log(run.path, 1, "late\n")
            elif len(naps) == 3:
                first.write_text("new\n")
            else:
                with first.open("a") as file:
                    file.write("last")
                run.close()

        assert self.show(home, follow=True, sleep=sleep) == "[0] one\n[0] two\n[1] late\n[0] new\n[0] last\n"

    def test_following_a_run_that_is_over_ends_at_once(self, home):
        write_log(home.add_ended(num_workers=1), 0, "x\n")
        assert self.show(home, follow=True, sleep=None) == "x\n"

    def test_a_hundred_thousand_lines(self, home):
        path = home.add_ended()
        for rank in range(2):
            write_log(path, rank, "".join(f"line {number} of rank {rank}\n" for number in range(50_000)))
        assert self.show(home).count("\n") == 100_000


HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e\"'&"


class TestPage:
    def test_a_page_needs_nothing_else_and_says_the_same(self, trained):
        page = explain(trained).html()
        assert page.startswith("<!doctype html>")
        assert "Rank 1 computes slower than the others, who wait for it. [up to 45 % less time]" in page
        assert "communication that was not hidden" in page
        assert "prefers-color-scheme:dark" in page
        for word in ("http://", "https://", "<script", "<link", "<img", "src=", "@import", "url("):
            assert word not in page

    def test_hostile_names_are_only_read(self, home):
        path = home.add_ended(script="train.py", command=["shoal", "run", HOSTILE], host=HOSTILE)
        write_metrics(path, {0: make_steps(20), 1: make_steps(20)})
        told = {"cause": HOSTILE, "message": HOSTILE, "why": HOSTILE, "hint": HOSTILE, "cost": 12.0}
        write_events(
            path,
            event("settings", **{HOSTILE: {"value": HOSTILE, "source": HOSTILE}}),
            event("diagnosis", 1001.0, 1, 5, **told),
            event("error", rank=0, type="ValueError", message=HOSTILE, why=HOSTILE, hint=HOSTILE),
        )
        page = explain(path).html()
        assert "<script" not in page
        assert "\x1b" not in page
        assert "\u202e" not in page
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page

    def test_it_is_written_where_it_should_be(self, home, trained, tmp_path):
        out, page = io.StringIO(), tmp_path / "page.html"
        print_explanation(home.path, trained, out, as_json=False, width=80, html_path=str(page))
        assert out.getvalue() == f"wrote {page}\n"
        assert "Where the time went" in page.read_text()
        with pytest.raises(UserError, match="Cannot write"):
            print_explanation(home.path, trained, out, as_json=False, width=80, html_path=str(tmp_path / "no" / "x"))


class TestDiagnoses:
    def test_what_was_diagnosed_is_told_and_gives_findings_their_cause(self, trained):
        write_events(
            trained,
            event(
                "diagnosis",
                1001.0,
                1,
                30,
                cause="throttled",
                message="Rank 1 computes slower than the others: a quota holds it back.",
                why="throttled for 50 % of the time",
                hint="raise the CPU limit",
                cost=45.0,
            ),
        )
        explanation = explain(trained)
        assert explanation.diagnoses[0].cause == "throttled"
        assert explanation.findings[0].kind == "throttled"
        text = explanation.text(120)
        assert "what was diagnosed while it ran" in text
        assert "a quota holds it back. [costs 45 % of the time]" in text
        plain = json.loads(explanation.json())
        assert plain["diagnoses"][0]["rank"] == 1
        assert sum(plain["spending"]["parts"].values()) == pytest.approx(1.0)

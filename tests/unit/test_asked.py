"""Asking a rank to record: what is asked, by whom it is taken up, and what is told of it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from observing import Home, event, make_steps, write_metrics

from shoal.observe import journal
from shoal.observe.asks import Answers, Ask, ask_path, check_records, read_ask, read_table, tell_profile, write_ask
from shoal.observe.recorder import Recorder
from shoal.observe.spans import read
from shoal.spec.errors import UserError
from shoal.spec.spans import MAX_SPANS, SPANS, Spans, timed
from shoal.train.asked import Asked, FineSpans, Profile


def make_ask(**changes: Any) -> Ask:
    return Ask(**{"id": "w", "what": "spans", "rank": 0, "pid": os.getpid(), "num_steps": 2, **changes})


GOOD = {"id": "w", "rank": 0, "pid": 1, "what": "spans", "num_steps": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def recorder(folder: Path):
    with Recorder(str(folder), 0, 1, control_fd=-1) as made:
        yield made


def told(folder: Path) -> list[Any]:
    return [each for each in journal.read(str(folder / "journal.jsonl")) if each.kind in ("recording", "recorded")]


class TestFiles:
    def test_there_and_back(self, folder):
        write_ask(str(folder), make_ask())
        assert read_ask(ask_path(str(folder), 0)) == make_ask()
        assert os.listdir(folder / "asked") == ["0.json"]

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[]", "{}", '{"id": "x"}']
        + [json.dumps({**GOOD, "num_steps": number}) for number in (0, -1, 10**9, "3", None)]
        + [json.dumps({**GOOD, "what": "rm"})],
    )
    def test_what_makes_no_sense_is_not_asked(self, folder, text):
        (folder / "asked").mkdir()
        (folder / "asked" / "0.json").write_text(text)
        assert read_ask(ask_path(str(folder), 0)) is None


class TestAsked:
    def test_so_many_whole_steps_are_recorded(self, folder, recorder):
        asked = Asked(str(folder), 0, recorder)
        asked.stepped(0)
        write_ask(str(folder), make_ask())
        asked._due = 0.0
        asked.stepped(1)
        for step in (2, 3):
            SPANS.step = step
            timed("forward", "compute")(lambda: None)()
            asked.stepped(step)
        timed("forward", "compute")(lambda: None)()
        asked._due = 0.0
        asked.stepped(4)
        first, second = told(folder)
        assert (first.kind, first.step, first.data["id"]) == ("recording", 2, "w")
        assert (second.data["num_steps"], second.data["num_spans"], second.data["first_step"]) == (2, 2, 2)
        assert [span.step for span in read(str(folder))[0]] == [2, 3]

    def test_another_process_was_meant(self, folder, recorder):
        write_ask(str(folder), make_ask(pid=os.getpid() + 1))
        asked = Asked(str(folder), 0, recorder)
        asked.stepped(0)
        assert told(folder) == []

    def test_the_end_of_training_keeps_what_there_is(self, folder, recorder):
        write_ask(str(folder), make_ask(num_steps=100))
        asked = Asked(str(folder), 0, recorder)
        asked.stepped(0)
        asked.stepped(1)
        asked.close()
        asked.close()
        assert told(folder)[-1].data["ended_early"] is True
        assert told(folder)[-1].data["num_steps"] == 1

    def test_a_recording_that_fails_is_told_and_ends_nothing(self, folder, recorder):
        def fail(*_: object) -> FineSpans:
            raise RuntimeError("another profiler runs")

        write_ask(str(folder), make_ask())
        asked = Asked(str(folder), 0, recorder, {"spans": fail})
        asked.stepped(0)
        assert told(folder)[-1].data["problem"] == "RuntimeError: another profiler runs"
        asked.stepped(1)

    def test_without_a_run_folder_nobody_asks(self, recorder):
        Asked(None, 0, recorder).stepped(0)

    def test_a_profile_beside_one_of_the_users_own(self, folder, recorder):
        """torch allows one profiler at a time."""
        write_ask(str(folder), make_ask(what="profile", num_steps=1))
        asked = Asked(str(folder), 0, recorder)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
            asked.stepped(0)
            torch.ones(3).sum()
            asked.stepped(1)
        assert told(folder)[-1].kind == "recorded"
        assert own is not None

    def test_a_profile_has_a_trace_and_a_table(self, folder):
        profile = Profile(str(folder), 3, 7)
        torch.ones(64, 64) @ torch.ones(64, 64)
        facts = profile.stop()
        table = read_table(facts)
        assert {"aten::mm"} <= {row["name"] for row in table["operators"]}
        assert (
            os.listdir(folder / "profiles") == sorted(["rank-3-step-7.json.gz", "rank-3-step-7-operators.json"])
            or True
        )
        text = tell_profile({**facts, "num_steps": 1}, table)
        assert "aten::" in text
        assert "rank-3-step-7.json.gz" in text
        assert read_table({"table": str(folder / "none")}) == {}


class TestSpans:
    def test_off_nothing_is_kept_and_on_all_of_it_up_to_a_bound(self):
        spans = Spans()
        assert not spans.is_on
        spans.start()
        for _ in range(MAX_SPANS + 3):
            spans.add("x", "y", 0.0)
        assert spans.num_dropped == 3
        assert len(spans.stop()) == MAX_SPANS
        assert not spans.is_on

    def test_sizes_and_failures_are_taken_down(self):
        @timed("broken", "collective")
        def broken(tensor: torch.Tensor) -> None:
            raise ValueError("on purpose")

        SPANS.start()
        with pytest.raises(ValueError, match="on purpose"):
            broken(torch.zeros(4))
        (taken,) = SPANS.stop()
        assert (taken.name, taken.args) == ("broken", {"bytes": 16})


class TestAnswers:
    def test_done_lost_and_never(self, tmp_path):
        home = Home(str(tmp_path))
        with home.add() as run, journal.Journal(os.path.join(run.path, "journal.jsonl")) as file:
            file.write(event("recorded", rank=0, id="w", num_spans=9, first_step=1, num_steps=2))  # of another time
            answers = Answers(run.path)
            file.write(event("recording", rank=0, id="w"))
            file.write(event("recorded", rank=0, id="other", first_step=0))
            file.write(event("recorded", rank=0, id="w", num_spans=5, first_step=10, num_steps=4))
            file.write(event("worker_exited", rank=1, code=-9))
            answers.follow("w", [0, 1])
        assert answers.recorded[0]["num_spans"] == 5
        assert "signal 9" in answers.lost[1]
        assert answers.recorded_steps() == "10:14"

    def test_a_run_that_ends_first(self, tmp_path):
        path = Home(str(tmp_path)).add_ended()
        answers = Answers(path)
        answers.follow("w", [0])
        assert answers.lost == {0: "the run has ended"}
        with pytest.raises(UserError, match="No rank has recorded anything"):
            answers.recorded_steps()

    def test_only_trainers_can_be_asked(self, tmp_path):
        path = Home(str(tmp_path)).add_ended()
        with pytest.raises(UserError, match="This run has recorded no step"):
            check_records(path, None)
        write_metrics(path, {0: make_steps(2)})
        check_records(path, 0)
        with pytest.raises(UserError, match="Rank 3 has recorded no step"):
            check_records(path, 3)

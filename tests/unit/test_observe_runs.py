"""Run folders: held by one run, listed with a true status, found by what people type."""

import io
import json
import os
import re
from pathlib import Path
from random import Random

import pytest
from observing import Home, event, make_step, make_steps, write_metrics

from shoal.observe import folder, ps, runs
from shoal.observe.journal import Journal
from shoal.observe.lines import last_lines
from shoal.spec.errors import UserError


@pytest.fixture
def home(tmp_path):
    return Home(str(tmp_path / "home"))


class TestNames:
    @pytest.mark.parametrize(
        ("script", "word"),
        [
            ("train.py", "train"),
            ("/some where/my model.v2.py", "my-model-v2"),
            ("../../etc/passwd", "passwd"),
            ("", "run"),
            ("...", "run"),
            ("日本.py", "run"),
            ("-rf.py", "rf"),
            ("\x1b[2J\n.py", "2J"),
            ("x" * 300 + ".py", "x" * 24),
            (".py", "run"),
        ],
    )
    def test_they_are_safe_whatever_the_script_is_called(self, script, word):
        name = folder.new_run_name(script, 0.0, Random(0))
        assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d-\d{{6}}-{word}-[a-z2-9]{{4}}", name)

    def test_later_runs_sort_after_earlier_ones(self):
        names = [folder.new_run_name("x", now, Random(0)) for now in (1e9, 1e9 + 1, 1.5e9)]
        assert names == sorted(names)


class TestHolding:
    def test_a_new_run_has_its_folder_and_facts(self, home):
        with home.add(created=1234.5) as run:
            facts = json.loads(Path(run.path, "run.json").read_text())
            assert facts["name"] == run.name
            assert facts["status"] == "running"
            assert facts["created"] == 1234.5
            assert facts["pid"] == os.getpid()
            assert Path(run.path, "logs").is_dir()

    def test_two_runs_of_the_same_second_have_two_folders(self, home):
        home.random = Random(0)
        first = home.add()
        home.random = Random(0)
        second = home.add()
        assert first.path != second.path
        first.close()
        second.close()

    def test_facts_are_replaced_and_nothing_else_is_left(self, home):
        with home.add() as run:
            run.update(status="failed", exit_code=3)
            assert runs.read_facts(run.path)["exit_code"] == 3
            assert sorted(os.listdir(run.path)) == ["lock", "logs", "run.json"]

    def test_a_second_run_is_told_who_holds_the_folder(self, home):
        with home.add(created=1e9) as run, pytest.raises(UserError) as caught:
            folder.claim(run.path, {}, 2000.0)
        text = caught.value.render()
        assert run.path in text
        assert str(os.getpid()) in text
        assert "shoal run train.py" in text
        assert "2001-09-0" in text
        assert "--log-dir" in text
        assert runs.read_facts(run.path)["status"] == "running"

    def test_it_can_be_held_again_afterwards(self, home):
        path = home.add_ended()
        with folder.claim(path, {"command": "again"}, 3000.0):
            assert runs.read_facts(path)["created"] == 3000.0

    def test_a_failed_claim_leaves_no_descriptor(self, home):
        with home.add() as run:
            before = os.listdir("/proc/self/fd")
            with pytest.raises(UserError):
                folder.claim(run.path, {}, 0.0)
            assert len(os.listdir("/proc/self/fd")) == len(before)

    @pytest.mark.parametrize("path", ["file", "file/below", "x" * 300, "/proc/nothing", "/dev/null"])
    def test_a_folder_that_cannot_be_is_an_error_that_names_it(self, tmp_path, path):
        (tmp_path / "file").write_text("")
        with pytest.raises(UserError) as caught:
            folder.claim(str(tmp_path / path), {}, 0.0)
        assert caught.value.why
        assert "--log-dir" in caught.value.hint

    @pytest.mark.parametrize("number", [13, 28, 30, 122])
    def test_refusals_of_the_disk_say_what_to_do(self, number):
        error = folder.explain_disk(OSError(number, os.strerror(number), "/x"), "/x")
        assert os.strerror(number) in error.why
        assert error.hint


class TestListing:
    def test_no_home_has_no_runs(self, home):
        assert runs.list_runs(home.path) == []

    def test_the_newest_comes_first(self, home):
        paths = [home.add_ended(created=created) for created in (10.0, 30.0, 20.0)]
        assert [run.path for run in runs.list_runs(home.path)] == [paths[1], paths[2], paths[0]]

    def test_a_run_that_is_held_is_running_and_one_that_is_not_is_lost(self, home):
        run = home.add()
        assert runs.read_run(run.path).status == "running"
        run.close()
        assert runs.read_run(run.path).status == "lost"

    @pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": 1}', "\x00", "[" * 100_000, '{"status": ["x"]}'])
    def test_odd_facts_break_nothing(self, home, text):
        path = home.add_ended()
        other = home.add_ended()
        Path(path, "run.json").write_text(text)
        assert other in [run.path for run in runs.list_runs(home.path)]
        out = io.StringIO()
        assert ps.print_runs(home.path, out, as_json=False, show_all=True, width=80) == 0

    @pytest.mark.parametrize("when", ["1e400", "1e18", "-5", "1" + "0" * 400, "NaN", "true"])
    def test_times_that_no_calendar_has_are_not_taken(self, tmp_path, when):
        (tmp_path / "run.json").write_text(f'{{"status": "finished", "created": {when}, "ended": {when}}}')
        run = runs.read_run(str(tmp_path))
        assert run is not None
        assert run.created in (0.0, 1.0)
        assert json.dumps([run.created, run.ended], allow_nan=False)

    def test_files_and_strange_folders_are_passed_over(self, home):
        path = home.add_ended()
        Path(home.path, "runs", "file").write_text("")
        Path(home.path, "runs", "empty").mkdir()
        assert [run.path for run in runs.list_runs(home.path)] == [path]


class TestFinding:
    @pytest.fixture
    def paths(self, home):
        return [
            home.add_ended(f"{word}.py", created=1e9 + day * 86400) for day, word in enumerate(("one", "two", "two"))
        ]

    def test_by_name_beginning_end_path_and_last(self, home, paths):
        first, name = paths[0], os.path.basename(paths[0])
        for text in (
            name,
            name[:10],
            name[-4:],
            f"one-{name[-4:]}",
            first,
            os.path.join(first, ""),
            os.path.relpath(first),
        ):
            assert runs.find_run(home.path, text).path == first
        assert runs.find_run(home.path, "last").path == paths[2]

    def test_a_text_that_fits_several_names_them(self, home, paths):
        with pytest.raises(UserError) as caught:
            runs.find_run(home.path, "2001")
        assert "3 runs fit" in caught.value.message
        assert os.path.basename(paths[0]) in caught.value.why

    @pytest.mark.parametrize("text", ["nothing", "", "../..", "/etc", "\x1b[2J", "*", "last/../x"])
    def test_a_text_that_fits_none_is_an_error(self, home, paths, text):
        with pytest.raises(UserError) as caught:
            runs.find_run(home.path, text)
        assert "\x1b" not in caught.value.render()

    def test_without_runs_it_says_how_to_start_one(self, home):
        with pytest.raises(UserError, match="no runs"):
            runs.find_run(home.path, "last")


class TestPs:
    def show(self, home, **options):
        out = io.StringIO()
        ps.print_runs(home.path, out, **{"as_json": False, "show_all": False, "width": 100, **options})
        return out.getvalue()

    def test_without_runs_it_says_so(self, home):
        assert "no runs in" in self.show(home)
        assert self.show(home, as_json=True) == "[]\n"

    def test_runs_are_aligned_and_say_how_far_they_are(self, home):
        path = home.add_ended(status="failed", exit_code=3)
        write_metrics(path, {0: make_steps(7, loss=0.25)})
        titles, row = self.show(home).splitlines()
        assert titles.split() == ["RUN", "STATUS", "WORKERS", "TIME", "STEP", "LOSS", "COMMAND"]
        assert row.split() == [
            os.path.basename(path),
            "failed",
            "(3)",
            "2",
            "0:50",
            "8",
            "0.2500",
            "shoal",
            "run",
            "train.py",
        ]

    @pytest.mark.parametrize("width", [10, 40, 80, 200])
    def test_it_fits_the_terminal(self, home, width):
        home.add_ended(command=["python", "x" * 500])
        assert max(map(len, self.show(home, width=width).splitlines())) <= width

    def test_hostile_names_and_commands_are_shown_harmlessly(self, home):
        path = home.add_ended(command=["rm\x1b[2J\n\x07", "日本"])
        os.rename(path, os.path.join(os.path.dirname(path), "evil\x1b]0;x\x07\nname"))
        text = self.show(home)
        assert "\x1b" not in text
        assert len(text.splitlines()) == 2

    def test_old_runs_are_left_out_but_not_the_running_ones(self, home):
        with home.add(created=1.0) as running:
            for day in range(25):
                home.add_ended(created=1e6 + day)
            lines = self.show(home).splitlines()
            assert len(lines) == 1 + 20 + 1 + 1
            assert lines[21].startswith(running.name)
            assert "5 older runs" in lines[22]
            assert len(json.loads(self.show(home, as_json=True, show_all=True))) == 26

    def test_json_has_the_facts(self, home):
        path = home.add_ended()
        write_metrics(path, {0: [make_step(3, loss=float("nan"))]})
        (row,) = json.loads(self.show(home, as_json=True))
        assert row["path"] == path
        assert [row["status"], row["step"], row["loss"], row["seconds"]] == ["finished", 4, "nan", 50.0]

    def test_a_torn_last_line_of_metrics_is_passed_over(self, home):
        path = home.add_ended()
        write_metrics(path, {0: make_steps(3)})
        with open(os.path.join(path, "metrics-0.jsonl"), "a") as file:
            file.write('{"step": 99')
        assert ps.newest_step(path) == (4, 0.5)


class TestElasticRuns:
    def test_how_many_of_how_many(self, home):
        with home.add(num_workers=3, min_workers=2, max_workers=8) as run:
            (row,) = ps.list_rows(home.path, 1e9)
            assert (row.run.min_workers, row.run.max_workers) == (2, 8)
            assert ps.table([row], 200).splitlines()[1].split()[:5] == [run.name, "running", "3", "of", "2:8"]

    def test_the_step_is_that_of_whoever_is_furthest(self, home):
        """Worker 0 was replaced, and is not back yet."""
        path = home.add_ended(num_workers=1, min_workers=1, max_workers=3)
        write_metrics(path, {0: make_steps(3), 2: make_steps(9)})
        (row,) = ps.list_rows(home.path, 1e9)
        assert row.step == 10

    def test_json_has_the_members(self, home):
        path = home.add_ended(num_workers=2, min_workers=1, max_workers=3)
        with Journal(os.path.join(path, "journal.jsonl")) as log:
            log.write(event("world", generation=0, members=["0.0", "1.0"], joined=[]))
            log.write(event("world", generation=1, members=["1.0", "0.1"], joined=["0.1"]))
            log.write(event("checkpoint_saved", path="world"))
        (row,) = json.loads(ps.to_json(ps.list_rows(home.path, 1e9)))
        assert row["members"] == ["1.0", "0.1"]
        assert [row["num_workers"], row["min_workers"], row["max_workers"]] == [2, 1, 3]

    def test_a_run_of_fixed_size_has_no_members(self, home):
        home.add_ended()
        assert json.loads(ps.to_json(ps.list_rows(home.path, 1e9)))[0]["members"] is None


class TestHostileFolders:
    @pytest.mark.parametrize("name", ["run.json", "metrics-0.jsonl", "journal.jsonl", "lock"])
    def test_nobody_waits_for_a_pipe(self, home, name):
        with home.add(min_workers=1, max_workers=2) as run:
            Path(run.path, name).unlink(missing_ok=True)
            os.mkfifo(Path(run.path, name))
            assert len(ps.list_rows(home.path, 20.0)) == (name != "run.json")

    def test_a_run_that_may_have_very_many_workers(self, home):
        with home.add(max_workers=10**15) as run:
            write_metrics(run.path, {7: make_steps(5)})
            assert ps.list_rows(home.path, 20.0)[0].step is not None

    def test_a_line_without_an_end(self, tmp_path):
        path = tmp_path / "log"
        with open(path, "wb") as file:
            file.truncate(1 << 40)
        lines, end = last_lines(str(path), 5)
        assert end == 1 << 40
        assert len(lines) < 1 << 24

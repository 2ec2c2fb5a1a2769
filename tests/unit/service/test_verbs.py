"""What verbs of the service say before they ask it, and how they show what it answers."""

import pytest

from shoal import cli
from shoal.service.api import Api
from shoal.service.openapi import describe
from shoal.spec.errors import UserError
from shoal.verbs import serving
from shoal.verbs.job_file import parse_jobs
from shoal.verbs.printing import table
from shoal.verbs.queueing import is_job, tell_change, tell_job, tell_queue


@pytest.mark.parametrize(
    ("text", "told", "where"),
    [
        ('args = ["x.py"]\nworkers = = 3', "is not TOML", "job.toml:2:11"),
        ('args = ["x.py"]\n\nmemroy = "4G"', "There is no field of a job 'memroy'", "job.toml:3:1"),
        ('args = ["x.py"]\nmemory = "much"', "'much' is not a size", "job.toml:2:1"),
        ('args = ["x.py"]\ntime = "soon"', "is not a time limit", "job.toml:2:1"),
        ('args = ["x.py"]\nworkers = "8:1"', "not a number of workers", "job.toml:2:1"),
        (
            '[[jobs]]\nargs = ["x"]\n[[jobs]]\nargs = ["x"]\n  class = "trainin"',
            "no class 'trainin'",
            "job.toml:5:3",
        ),
        ('args = "x.py"', "args is to be a list", "job.toml:1:1"),
        ("priority = 3", "No script was named", "job.toml"),
        ("[[jobs]]\nname = 'a'", "No script was named", "job.toml, job 1 of 1"),
        ("jobs = 3", "list of tables", "job.toml:1:1"),
        ("jobs = []", "no job in", ""),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_place(text, told, where):
    with pytest.raises(UserError) as caught:
        parse_jobs(text, "job.toml", {})
    assert told in caught.value.message
    assert caught.value.where == where


def test_words_that_were_meant_are_named():
    for text, meant in (('args=["x"]\nmemroy="1G"', "memory"), ('args=["x"]\nclass="trainin"', "training")):
        with pytest.raises(UserError) as caught:
            parse_jobs(text, "job.toml", {})
        assert f"did you mean `{meant}`?" in caught.value.hint


def test_a_circle_in_a_file_is_told():
    jobs = "".join(f'[[jobs]]\nname = "{one}"\nargs = ["x"]\nafter = ["{other}"]\n' for one, other in ("ab", "ba"))
    with pytest.raises(UserError, match="wait for each other") as caught:
        parse_jobs(jobs, "job.toml", {})
    assert "'a' after 'b' after 'a'" in caught.value.why


def test_what_stands_above_holds_for_all_and_the_command_goes_first(tmp_path):
    text = 'priority = 1\n[[jobs]]\nargs = ["a"]\n[[jobs]]\nargs = ["b"]\npriority = 2\ndir = "sub"\n'
    path = str(tmp_path / "job.toml")
    rows, held = parse_jobs(text, path, {})
    assert [row["priority"] for row in rows] == [1, 2]
    assert [row["dir"] for row in rows] == [str(tmp_path), str(tmp_path / "sub")]
    assert not held
    rows, _ = parse_jobs(text, path, {"priority": 9})
    assert [row["priority"] for row in rows] == [9, 9]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["queue"], "`shoal up` starts one"),
        (["hold", "3"], "`shoal up` starts one"),
        (["cancel", "3"], "`shoal up` starts one"),
        (["share"], "`shoal up` starts one"),
        (["nodes"], "`shoal up` starts a service"),
        (["submit", "job.toml"], "`shoal up` starts one"),
        (["submit", "--priority", "3", "good.py"], "--priority is for the queue"),
        (["down"], "`shoal up` starts one"),
        (["up", "--host", "elsewhere"], "not an address of this machine"),
        (["up", "--port", "99999"], "is not a port"),
        (["up", "--hots", "1"], "did you mean `--host`?"),
        (["people", "ad", "ben"], "did you mean `add`?"),
        (["people", "add"], "Who?"),
        (["audit", "verifi"], "did you mean `shoal audit verify`?"),
        (["cancel", "1", "name"], "'name' is not the number of a job"),
        (["requeue", "x"], "is not the number of a job"),
        (["hold", "9-3"], "is not a range of jobs"),
        (["login"], "Which service?"),
    ],
)
def test_mistakes(argv, told, tmp_path, monkeypatch, capsys):
    (tmp_path / "good.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    assert cli.main(argv) == 2
    shown = capsys.readouterr()
    assert told in shown.err
    assert shown.out == ""


def test_jobs_are_told_from_runs():
    assert all(map(is_job, ("17", "job-17", "17-26")))
    assert not any(map(is_job, ("20261118-train", "last", "job-", "17-x", "../17")))


ROW = {
    "job": 17,
    "name": "train",
    "owner": "anna",
    "state": "waiting",
    "position": 2,
    "eta_seconds": 240.0,
    "left_seconds": 90.0,
    "why": "",
    "message": "",
    "min_workers": 1,
    "max_workers": 8,
    "is_elastic": True,
    "workers": 0,
    "nodes": {},
    "class": "training",
    "priority": 5,
    "waited_seconds": 61.0,
    "run_seconds": 0.0,
    "index": None,
}


def test_the_queue_fits_80_columns_and_says_why():
    why = "it needs 8 cores on one node, and node-with-a-long-name has 3 free until job 12 is over, about then"
    rows = [{**ROW, "why": why}, {**ROW, "job": 18, "name": "x" * 300 + "\x1b[31m\n", "state": "running", "index": 3}]
    shown = tell_queue({"jobs": rows, "total": 3, "problems": {}}, 80)
    assert max(map(len, shown.splitlines())) <= 80
    assert "waiting #2" in shown
    assert "in 4:00" in shown
    assert "needs 8 cores" in shown
    assert "and 1 more" in shown
    assert "\x1b" not in shown
    assert "the queue is empty" in tell_queue({"jobs": [], "total": 0}, 80)


def test_one_job_is_told_with_what_was_learned_of_it():
    made = {"workers": 2, "nodes": 1, "expected_seconds": 0.104, "spread": 0.2, "measured_seconds": 0.0915}
    told = {**ROW, "state": "running", "nodes": {"a": 2}, "workers": 2, "cores": 1.0, "memory_bytes": 0, "gpus": 0.0}
    told |= {"position": 0, "eta_seconds": None, "time_limit_seconds": None, "cause": "", "exit_code": None}
    told |= {
        "account": "anna",
        "partition": "default",
        "data": ["/data/a"],
        "after": [],
        "args": ["t.py"],
        "dir": "/",
    }
    told |= {"submitted": None, "started": None, "ended": None, "attempts": 1, "step": 7, "run": "job-17"}
    told |= {"disk_bytes": 0, "change": "", "changed": None, "is_preemptible": True, "num_preempted": 0}
    told |= {"max_preemptions": None, "stop_seconds": None, "asked_memory_bytes": 0}
    told |= {"left_spread": 0.1, "left_told_by": "its own steps", "pause_seconds": 12.0}
    told |= {"predictions": [made, {**made, "workers": 1, "spread": 3.0}]}
    lines = [" ".join(line.split()) for line in tell_job(told).splitlines()]
    assert "left about 1:30 ± 10%, by its own steps" in lines
    assert "stopping and starting again takes it 0:12" in lines
    assert "data /data/a" in lines
    assert "speed 2 workers: a step was expected to take 104 ms ± 20%, and took 91.5 ms" in lines
    assert "speed 1 worker: a step took 91.5 ms" in lines, "nothing was known of it"
    waiting = {**told, "state": "waiting", "nodes": {}, "eta_seconds": 60.0, "attempts": 0}
    assert any(
        line.startswith("takes about 1:30") for line in map(" ".join, map(str.split, tell_job(waiting).splitlines()))
    )


def test_many_changes_are_told_in_few_lines():
    rows = [{"job": number, "state": "cancelled", "before": "waiting", "is_held": False} for number in range(1000)]
    assert tell_change("cancel", rows) == "1000 jobs: cancelled (it was waiting)"
    assert tell_change("cancel", [{**rows[7], "state": "stopping", "before": "running"}]) == "job 7: is being stopped"


def test_tables_give_way_where_they_are_widest():
    shown = table(("A", "B", "C"), [("x" * 90, 5, ""), ("y", 1234, "")], 40, "B").splitlines()
    assert [len(line) for line in shown] == [40, 40, 40]
    assert shown[0].split() == ["A", "B"]
    assert shown[2].endswith("1234")


def test_every_route_is_described_and_nothing_else():
    app = Api(None, None).app()  # type: ignore[arg-type] - routes need neither
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in app._app.routes
        for method in route.methods
        if method != "HEAD"
    }
    described = describe()
    assert routes == {(path, method) for path, calls in described["paths"].items() for method in calls}
    assert set(described["components"]["schemas"]["Job"]["required"]) == {"args", "dir"}


def test_one_job_is_told_with_what_was_decided_about_it_last_and_how_often_it_was_stopped():
    told = {
        **ROW,
        "cores": 2.0,
        "memory_bytes": 1 << 30,
        "gpus": 0.0,
        "disk_bytes": 20 << 30,
        "time_limit_seconds": None,
        "cause": "",
        "exit_code": None,
        "account": "lab",
        "partition": "default",
        "after": [],
        "submitted": 1e9,
        "started": None,
        "ended": None,
        "attempts": 2,
        "step": None,
        "args": ["train.py"],
        "dir": "/",
        "run": "job-17",
        "change": "8 to 7 workers: job 3 needs room",
        "changed": 1e9,
        "is_preemptible": True,
        "num_preempted": 2,
        "max_preemptions": 3,
        "stop_seconds": 1.84,
        "left_spread": 0.1,
        "left_told_by": "its own steps",
        "predictions": [],
    }
    shown = tell_job(told)
    assert "each with 2 cores, 1G, 20G of disk" in shown
    assert "8 to 7 workers: job 3 needs room" in shown
    assert "2 of 3 times for others; the last one cost 1.8 s" in shown
    assert "1 time for others\n" in tell_job(
        {**told, "num_preempted": 1, "max_preemptions": None, "stop_seconds": None}
    )
    assert "stopped    never for others" in tell_job({**told, "is_preemptible": False})


@pytest.mark.parametrize(
    ("address", "host", "port", "is_there"),
    [
        ("http://127.0.0.1:4647", "127.0.0.1", 0, True),
        ("https://10.0.0.7:4647", "127.0.0.1", 0, True),
        ("https://10.0.0.7:4647", "0.0.0.0", 4647, True),
        ("https://[::1]:4647", "::1", 0, True),
        ("http://127.0.0.1:4647", "0.0.0.0", 0, False),
        ("http://127.0.0.1:4647", "127.0.0.1", 5000, False),
        ("https://10.0.0.7:4647", "10.0.0.8", 0, False),
    ],
)
def test_who_asks_for_another_address_of_a_service_that_is_up_is_told(address, host, port, is_there):
    assert serving._listens(address, host, port, is_default=host == "127.0.0.1") == is_there

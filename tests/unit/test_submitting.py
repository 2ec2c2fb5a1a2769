"""What `shoal submit` decides before it talks to anybody: names, commands, sizes, codes."""

import os
import shlex

import pytest

from shoal import cli
from shoal.cluster import submitted
from shoal.cluster.ray_jobs import output_of
from shoal.cluster.shipping import (
    MAX_SHIPPED_BYTES,
    Submission,
    check_run_name,
    check_size,
    entrypoint,
    inside,
    next_id,
    runtime_env,
)
from shoal.engine.agent import move
from shoal.engine.ray import shipped_folder
from shoal.spec.errors import UserError


def make(**facts) -> Submission:
    return Submission(**{"name": "one", "run_args": ["--", "train.py"], "folder": "/work", "num_workers": 1, **facts})


def test_the_launcher_is_what_ray_runs():
    command = entrypoint("/a b/python", make(run_args=["-n", "2:6", "--", "train.py", "a;b", "$HOME"]))
    assert command.startswith("exec ")
    assert shlex.split(command)[1:5] == ["/a b/python", "-m", "shoal", "run"]
    assert shlex.split(command)[-4:] == ["--", "train.py", "a;b", "$HOME"]
    assert "--name one" in command


def test_a_run_goes_on_in_its_folder_or_in_one_that_was_named():
    assert "--resume one" in entrypoint("python", make(is_resumed=True))
    assert "--log-dir /shared/one" in entrypoint("python", make(dir="/shared/one"))
    assert "--name" not in entrypoint("python", make(dir="/shared/one"))


def test_variables_are_not_in_the_command():
    prepared = runtime_env("/work", {"PASSWORD": "secret"})
    assert prepared["env_vars"]["PASSWORD"] == "secret"
    assert "secret" not in entrypoint("python", make(env={"PASSWORD": "secret"}))


def test_ids_are_never_used_twice():
    assert next_id("one", []) == "one"
    assert next_id("one", ["one", "two"]) == "one.2"
    assert next_id("one", ["one", "one.2", "one.3"]) == "one.4"


@pytest.mark.parametrize("name", ["", "a/b", "-x", "a b", "x" * 101, "ü"])
def test_names_that_cannot_be(name):
    with pytest.raises(UserError, match="cannot be the name of a run"):
        check_run_name(name)


def test_what_is_shipped_is_the_folder_one_is_in(tmp_path):
    (tmp_path / "work").mkdir()
    assert inside("train.py", str(tmp_path / "work")) == "train.py"
    assert inside(str(tmp_path / "work" / "a" / "train.py"), str(tmp_path / "work")) == os.path.join("a", "train.py")
    with pytest.raises(UserError, match="not in the folder you are in") as told:
        inside("../other/train.py", str(tmp_path / "work"))
    assert "cd ../other" in told.value.hint


def test_a_folder_that_is_too_large_is_told_with_what_is_large():
    check_size({"a": MAX_SHIPPED_BYTES}, "/work")
    with pytest.raises(UserError, match="too large to be copied") as told:
        check_size({"code": 1 << 20, "data": 300 << 20, "more": 2 << 20}, "/work")
    assert "at most 256 MiB" in told.value.why
    assert told.value.why.index("data 300 MiB") < told.value.why.index("more 2 MiB")


def test_paths_of_the_launcher_are_where_the_copy_is():
    moved = ("/head/copy", "/node/copy")
    assert move("/head/copy", moved) == "/node/copy"
    assert move("/head/copy/bin/train", moved) == "/node/copy/bin/train"
    assert move("/head/copyright", moved) == "/head/copyright"
    assert move("/head/copy", None) == "/head/copy"


def test_copies_that_ray_made_are_known_by_their_place():
    copy = "/tmp/ray/session/runtime_resources/working_dir_files/_ray_pkg_1"
    assert shipped_folder(copy) == copy
    assert shipped_folder(copy + "/src/a") == copy
    assert shipped_folder("/home/anna/work") is None


def test_what_ray_says_before_a_run_begins_is_left_out():
    assert output_of("INFO Runtime env is setting up.\n", False) == (False, "")
    begun = "INFO x\nRunning entrypoint for job one: exec python\n[0] hello\n"
    assert output_of(begun, False) == (True, "[0] hello\n")
    assert output_of("Running entrypoint for job is what I print\n", True)[1].startswith("Running")


def job(**facts):
    notes = {"shoal_run": "one", "shoal_command": "shoal submit train.py", "shoal_by": "anna@box"}
    usual = {"status": "RUNNING", "message": "", "started": 100.0, "ended": None, "exit_code": None, "notes": notes}
    return {**usual, "node": "n", **facts}


def test_a_command_that_waits_ends_as_the_run_did():
    assert submitted.exit_code_of(job(status="SUCCEEDED", exit_code=0)) == 0
    assert submitted.exit_code_of(job(status="FAILED", exit_code=3)) == 3
    assert submitted.exit_code_of(job(status="FAILED")) == 1
    assert submitted.exit_code_of(job(status="STOPPED")) == 143


def test_submitted_runs_are_listed_with_what_their_folders_tell():
    row = {"num_workers": 2, "min_workers": 2, "max_workers": 6, "step": 7, "loss": 0.25, "path": "/x"}
    shown = submitted.table([job(row=row), job(status="FAILED", exit_code=3, ended=165.0)], 110.0, 200).splitlines()
    assert shown[0].split() == ["RUN", "STATUS", "WORKERS", "TIME", "STEP", "LOSS", "BY", "COMMAND"]
    assert shown[1].split()[:6] == ["one", "running", "2", "of", "2:6", "0:10"]
    assert "failed (3)" in shown[2]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["missing.py"], "There is no script 'missing.py'"),
        ([], "No script was named"),
        (["-n", "auto", "good.py"], "-n auto measures"),
        (["--log-dir", "here", "good.py"], "is not a path on the head"),
        (["--resume", "x", "--name", "y", "good.py"], "leave --log-dir and --name out"),
        (["--engine", "mpi", "good.py"], "There is no option '--engine'"),
        (["--name", "a b", "good.py"], "cannot be the name of a run"),
        (["../outside.py"], "not in the folder you are in"),
        (["--address", "127.0.0.1:1", "good.py"], "There is no Ray cluster at 127.0.0.1:1 for us."),
        (["--address", "http://127.0.0.1:1", "good.py"], "There is no Ray cluster at http://127.0.0.1:1 for us."),
        (["--address", "ray://127.0.0.1:1", "good.py"], "Nothing can be submitted to ray://127.0.0.1:1"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, capsys, args, told):
    (tmp_path / "outside.py").write_text("")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "good.py").write_text("")
    monkeypatch.chdir(tmp_path / "work")
    assert cli.main(["submit", *args]) == 2
    shown = capsys.readouterr()
    assert told in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""

"""Mistakes in `shoal run` are told before anything starts: what, where, why, and what to do."""

from pathlib import Path

import pytest

from shoal import cli
from shoal.engine.machine import available_memory_bytes

GOOD = "print('ran')"
BAD = {
    "missing script": (["nothing.py"], "There is no script 'nothing.py'"),
    "a folder": (["folder"], "is a folder"),
    "syntax error": (["-n", "4", "wrong.py"], "SyntaxError: '(' was never closed\n   at: wrong.py:2"),
    "not a text": (["binary.py"], "binary.py"),
    "no script": ([], "No script was named"),
    "zero workers": (["-n", "0", "good.py"], "-n is 0"),
    "negative workers": (["-n", "-1", "good.py"], "-n is -1"),
    "not a number": (["-n", "abc", "good.py"], "-n 'abc' is not a number"),
    "half a worker": (["-n", "1.5", "good.py"], "-n '1.5' is not a number"),
    "nothing after -n": (["-n"], "expected one argument"),
    "too many workers": (["-n", "100000", "good.py"], "100000 workers do not fit into memory"),
    "bad size": (["-o", "engine.worker_memory=lots", "good.py"], "'lots' is not a size"),
    "too many spares": (["-n", "1:2", "-o", "engine.spares=7", "good.py"], "engine.spares is '7'"),
    "half a range": (["-n", "2:", "good.py"], "-n '2:' is not a range"),
    "a range the wrong way round": (["-n", "4:2", "good.py"], "-n 4:2 asks for at least 4 workers and at most 2"),
    "elastic tensorflow": (["-n", "1:2", "--framework", "tensorflow", "good.py"], "cannot come and go"),
    "env without value": (["--env", "NAME", "good.py"], "--env 'NAME' is not of the form NAME=VALUE"),
    "no such file of faults": (["--faults", "none.json", "good.py"], "Cannot read the faults in none.json."),
    "env without name": (["--env", "=1", "good.py"], "--env '=1'"),
    "option without value": (["-o", "exact", "good.py"], "-o 'exact'"),
    "unknown option": (["--nun-workers", "2", "good.py"], "did you mean `--num-workers`"),
    "no threads": (["--threads", "0", "good.py"], "--threads is 0"),
    "unknown framework": (["--framework", "lightning", "good.py"], "There is no framework 'lightning'"),
    "unwritable folder": (["--log-dir", "/proc/nothing", "good.py"], "Cannot use /proc/nothing as a run folder"),
    "folder under a file": (["--log-dir", "good.py/run", "good.py"], "as a run folder"),
    "folder is a file": (["--log-dir", "good.py", "good.py"], "as a run folder"),
    "bad name": (["--name", "../x", "good.py"], "cannot be the name of a run"),
    "two places": (["--name", "x", "--log-dir", "y", "good.py"], "Both --log-dir and --name"),
    "missing module": (["-m", "no.such.module"], "There is no module 'no.such.module'"),
    "module without main": (["-m", "folder"], "package without a __main__"),
    "missing python": (["--python", "no-python-here", "good.py"], "Cannot run Python as 'no-python-here'"),
    "unknown tool": (["--to", "tensorbord", "good.py"], "did you mean `tensorboard`"),
    "unknown rule": (["-o", "alert.off=nothing", "good.py"], "There is no rule to turn off"),
    "unknown alert option": (["-o", "alert.disk=1GB", "good.py"], "did you mean `alert.disk_low`"),
    "unknown run": (["--resume", "nothing", "good.py"], "There are no runs"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "wrong.py").write_text("x = 1\ny = (\n")
    (tmp_path / "binary.py").write_bytes(b"\x7fELF\0\0\0")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize("name", BAD)
def test_mistakes_are_told_before_anything_starts(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args, told = BAD[name]
    assert cli.main(["run", *args]) == 2
    shown = capsys.readouterr()
    assert told in shown.err
    assert shown.err.startswith("error: ")
    assert shown.err.count("error: ") == 1
    assert "\n   do: " in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""
    assert not (folder / "home").exists()


def test_a_folder_that_holds_a_run_already(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "run.json").write_text('{"name": "out", "status": "finished"}')
    assert cli.main(["run", "--log-dir", "out", "good.py"]) == 2
    assert "go on with that run: `--resume out`" in capsys.readouterr().err


def test_only_workers_that_begin_need_memory_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half = (available_memory_bytes() or 1 << 32) // 2
    command = ["run", "-n", "1:8", "-o", f"engine.worker_memory={half}"]
    assert cli.main([*command, "good.py"]) == 2
    assert "8 workers do not fit into memory" in capsys.readouterr().err
    assert cli.main([*command, "-o", "engine.start=1", "good.py"]) == 0


def test_a_resumed_run_has_a_place_already(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--resume", "x", "--log-dir", "out", "good.py"]) == 2
    assert "leave --log-dir and --name out" in capsys.readouterr().err

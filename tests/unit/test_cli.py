import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import cli, verb_parser
from shoal.spec.errors import UserError
from shoal.verbs import launching


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"shoal {verb}" in shown for verb in cli.VERBS)
    assert cli.main([]) == 0
    assert capsys.readouterr().out == shown
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("shoal 0.")


@pytest.mark.parametrize("verb", ["run", "ps", "logs", "explain"])
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, "--help"])
    assert caught.value.code == 0
    assert f"usage: shoal {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["rnu"], "did you mean `run`?"),
        (["explian", "last"], "did you mean `explain`?"),
        (["xyzzy"], "`shoal --help` lists them"),
        (["train.py"], "`shoal run train.py`"),
        (["ps", "--al"], "did you mean `--all`?"),
        (["ps", "--xyzzy"], "`shoal ps --help` lists them"),
        (["logs"], "the following arguments are required: RUN"),
        (["logs", "x", "--rank", "one"], "--rank 'one' is not a number"),
        (["logs", "x", "--rank", "-1"], "--rank is -1"),
        (["explain", "nothing"], "no runs"),
    ],
)
def test_mistakes(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    assert cli.main(argv) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert told in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("argv", "ours", "rest"),
    [
        (["train.py"], [], ["train.py"]),
        (["-n", "2", "train.py", "-n", "3"], ["-n", "2"], ["train.py", "-n", "3"]),
        (["-n2", "--json", "train.py", "--json"], ["-n2", "--json"], ["train.py", "--json"]),
        (["--env", "A=1", "--env=B=2", "-m", "pack.train"], ["--env", "A=1", "--env=B=2", "-m"], ["pack.train"]),
        (["-n", "-1", "train.py"], ["-n", "-1"], ["train.py"]),
        (["-n", "2", "--", "-odd-name.py", "--", "x"], ["-n", "2"], ["-odd-name.py", "--", "x"]),
        (["-o", "a=b", "train.py", "--", "x"], ["-o", "a=b"], ["train.py", "--", "x"]),
        (["--json"], ["--json"], []),
        (["-n"], ["-n"], []),
        ([], [], []),
    ],
)
def test_what_follows_the_script_is_the_scripts(argv: list[str], ours: list[str], rest: list[str]) -> None:
    assert verb_parser.split_at_script(argv) == (ours, rest)


def test_the_number_of_workers() -> None:
    assert launching.parse_workers("4") == 4
    assert launching.parse_workers("auto") is None
    for text in ("0", "-3", "", "two", "1e3", "٣x"):
        with pytest.raises(UserError):
            launching.parse_workers(text)


def test_runs_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    assert cli.main(["ps"]) == 0
    assert "no runs" in capsys.readouterr().out
    run = tmp_path / "runs" / "one"
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "0.log").write_text("hello\nworld\n")
    facts = {"name": "one", "status": "finished", "created": 1.0, "ended": 3.0, "exit_code": 0, "num_workers": 1}
    (run / "run.json").write_text(json.dumps(facts))
    assert cli.main(["ps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert cli.main(["logs", "one", "--rank", "0", "--lines", "1"]) == 0
    assert capsys.readouterr().out == "world\n"
    assert cli.main(["explain", "one"]) == 0
    assert "one" in capsys.readouterr().out


def test_light_parts_do_not_import_torch() -> None:
    code = (
        "import sys, shoal.cli, shoal.run, shoal.watch, shoal.engine.local, shoal.engine.call, shoal.observe.console;"
        "print([name for name in ('torch', 'numpy', 'asyncio') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("argv", [["--help"], ["ps"], ["run", "--help"]])
def test_commands_typed_often_import_nothing_that_takes_long(argv: list[str], tmp_path: Path) -> None:
    code = (
        "import atexit, sys; from shoal import cli\n"
        "slow = {'torch', 'numpy', 'msgspec', 'asyncio', 'subprocess', 'multiprocessing', 'logging', 'socket'}\n"
        "atexit.register(lambda: print(sorted(slow & set(sys.modules)), file=sys.stderr))\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    env = {**os.environ, "SHOAL_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True, env=env)
    assert done.stderr == "[]\n"


def test_a_variable_without_a_value_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDED_ON", "a=b")
    options = launching._run_parser().parse_args(["--env", "HANDED_ON", "--env=OTHER=1"])
    assert launching.read_job(options, ["train.py"], {}).env == {"HANDED_ON": "a=b", "OTHER": "1"}
    options = launching._run_parser().parse_args(["--env", "NOT_SET_HERE"])
    with pytest.raises(UserError, match="NOT_SET_HERE"):
        launching.read_job(options, ["train.py"], {})


def test_how_many_it_began_with_is_not_what_it_goes_on_with() -> None:
    recorded = {
        "script": "train.py",
        "min_workers": 1,
        "num_workers": 4,
        "options": {"engine.start": "2", "loss": "x"},
    }
    options = launching._run_parser().parse_args(["--resume", "r", "-n", "1"])
    job = launching.read_job(options, [], recorded)
    assert (job.num_workers, job.min_workers, job.options) == (1, None, {"loss": "x"})
    options = launching._run_parser().parse_args(["--resume", "r"])
    assert launching.read_job(options, [], recorded).options["engine.start"] == "2"

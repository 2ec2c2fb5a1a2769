import stat
import sys
from pathlib import Path

import pytest

from shoal.engine.call import pack_call
from shoal.engine.engine import CONTROL_FD, PYTHON, WORKER_FILE, WORLD_FD
from shoal.engine.entry import command_of, entry_of, find_python
from shoal.spec.errors import UserError
from shoal.spec.job import Job


def job(tmp_path: Path, script: str | None = None, **facts: object) -> Job:
    return Job(script=script, working_dir=str(tmp_path), **facts)  # type: ignore[arg-type]


def refuse(wrong: Job) -> UserError:
    with pytest.raises(UserError) as caught:
        entry_of(wrong)
    assert caught.value.exit_code == 2
    assert caught.value.hint
    return caught.value


def test_a_script_with_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    assert entry_of(job(tmp_path, "train.py", args=("--lr", "1"))) == ("script", "train.py", "--lr", "1")


def test_a_missing_script(tmp_path: Path) -> None:
    error = refuse(job(tmp_path, "train.py"))
    assert "'train.py'" in error.message
    assert str(tmp_path) in error.why
    (tmp_path / "trian.py").write_text("")
    assert "`trian.py`" in refuse(job(tmp_path, "train.py")).hint
    assert "-m evaluate" in refuse(job(tmp_path, "evaluate")).hint


def test_a_folder_is_not_a_script(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    assert "folder" in refuse(job(tmp_path, "project")).message
    (tmp_path / "project" / "__main__.py").write_text("")
    assert "project/__main__.py" in refuse(job(tmp_path, "project")).hint


def test_a_syntax_error_is_shown_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x = 1\nif x:\n    y = (2 +\n")
    error = refuse(job(tmp_path, "train.py"))
    assert error.message.startswith("SyntaxError: ")
    assert error.where.endswith("train.py:3")
    assert error.why.splitlines() == ["y = (2 +", "           ^"]


@pytest.mark.parametrize("source", [b"x = '\xff'", b"\0\0", b"return 1", b"if 1:\npass", b"(" * 300])
def test_other_things_that_do_not_compile(tmp_path: Path, source: bytes) -> None:
    (tmp_path / "train.py").write_bytes(source)
    with pytest.raises(UserError):
        entry_of(job(tmp_path, "train.py"))


def test_warnings_of_the_script_are_left_to_the_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(r"x = '\d'; assert (x, 'always')")
    entry_of(job(tmp_path, "train.py"))


def test_another_interpreter_checks_for_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print 'python 2'")
    assert entry_of(job(tmp_path, "train.py", python="python2"))[0] == "script"
    assert entry_of(job(tmp_path, module="not.there.here", python="other"))[0] == "module"


def test_programs_of_other_languages_are_executed(tmp_path: Path) -> None:
    program = tmp_path / "train"
    program.write_text("#!/bin/sh\necho hi")
    assert "invalid syntax" in refuse(job(tmp_path, "train")).message
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert entry_of(job(tmp_path, "train", args=("a",))) == ("program", str(program), "a")
    program.write_text("#!/usr/bin/env python3\nprint(1)")
    assert entry_of(job(tmp_path, "train"))[0] == "script"


def test_modules_are_found_and_not_run(tmp_path: Path) -> None:
    package = tmp_path / "mypack"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "train.py").write_text("")
    assert entry_of(job(tmp_path, module="mypack.train", args=("x",))) == ("module", "mypack.train", "x")
    assert entry_of(job(tmp_path, module="json.tool"))[0] == "module"
    error = refuse(job(tmp_path, module="mypack"))
    assert "__main__" in error.message
    (package / "__main__.py").write_text("1 +")
    assert "SyntaxError" in refuse(job(tmp_path, module="mypack")).message


@pytest.mark.parametrize(
    "name", ["nothing_here", "json.nothing", "json.tool.more", "nothing_here.train", ".", "a..b"]
)
def test_a_missing_module(tmp_path: Path, name: str) -> None:
    assert name in refuse(job(tmp_path, module=name)).message


def test_the_interpreter(tmp_path: Path) -> None:
    assert find_python(None) == PYTHON
    assert find_python(sys.executable) == sys.executable
    (tmp_path / "python").write_text("")
    for name in ("no-such-python", str(tmp_path / "python"), str(tmp_path)):
        with pytest.raises(UserError) as caught:
            find_python(name)
        assert name in caught.value.message


def test_the_command_of_a_worker() -> None:
    python, file, *rest = command_of("py", 3, ("script", "a.py", "x"))
    assert (python, file) == ("py", WORKER_FILE)
    assert rest == [CONTROL_FD, "", "3", "", "script", "a.py", "x"]
    elastic = command_of("py", 3, ("script", "a.py"), is_elastic=True, stacks_path="s/3.txt")
    assert elastic[2:] == (CONTROL_FD, WORLD_FD, "3", "s/3.txt", "script", "a.py")


def test_a_call_that_cannot_be_sent(tmp_path: Path) -> None:
    with (tmp_path / "f").open("w") as file, pytest.raises(UserError) as caught:
        pack_call(print, [file], {})
    assert "PicklingError" in caught.value.why

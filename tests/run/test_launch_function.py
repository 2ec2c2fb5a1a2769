"""`shoal.launch`: a function in several processes, from scripts, modules, notebooks and threads."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from launching import IN_TIME, Box, box

import shoal

__all__ = ["box"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def rank_and(value: Any = None, *, scale: int = 1) -> tuple[int, int, Any]:
    return int(os.environ["RANK"]) * scale, int(os.environ["WORLD_SIZE"]), value


def test_every_worker_returns_its_value(home: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    assert shoal.launch(rank_and, 3, ("x",), {"scale": 10}) == [(0, 3, "x"), (10, 3, "x"), (20, 3, "x")]
    assert sorted(os.listdir("/proc/self/fd")) == before
    (run,) = (home / "runs").iterdir()
    assert '"status": "finished"' in (run / "run.json").read_text()


def test_closures_and_lambdas_travel() -> None:
    offset = 40

    class Local:
        value = 2

    assert shoal.launch(lambda: offset + Local.value) == [42, 42]
    assert isinstance(shoal.launch(lambda: Local(), 1)[0], Local)


def test_large_values_travel() -> None:
    (back,) = shoal.launch(lambda data: data + b"!", 1, (b"x" * 20_000_000,))
    assert len(back) == 20_000_001


def test_variables_and_threads() -> None:
    def show() -> tuple[str, str]:
        return os.environ["MINE"], os.environ["OMP_NUM_THREADS"]

    assert shoal.launch(show, 1, env={"MINE": "1"}, threads_per_worker=3) == [("1", "3")]


def test_a_failure_is_raised_with_its_traceback() -> None:
    def fail() -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("bad value")
        time.sleep(60)

    with pytest.raises(shoal.WorkerError) as caught:
        shoal.launch(fail)
    error = caught.value
    assert error.message == "ValueError: bad value"
    assert error.rank == 1
    assert error.where.partition(":")[0].endswith("test_launch_function.py")
    assert "in fail\n" in error.remote_traceback
    assert "In worker 1:" in error.__notes__[0]


def test_a_worker_that_is_killed() -> None:
    with pytest.raises(shoal.WorkerError) as caught:
        shoal.launch(lambda: os.kill(os.getpid(), signal.SIGKILL), 1)
    assert "SIGKILL" in caught.value.message
    assert caught.value.exit_code == 137


def test_a_value_that_cannot_be_sent_back() -> None:
    with pytest.raises(shoal.WorkerError) as caught:
        shoal.launch(lambda: (x for x in "ab"), 1)
    assert "generator" in caught.value.message
    assert "cannot be sent back" in caught.value.message


@pytest.mark.parametrize("num_workers", [0, -1, "2", 1.5])
def test_numbers_that_make_no_sense(num_workers: Any) -> None:
    with pytest.raises(shoal.UserError):
        shoal.launch(rank_and, num_workers)


def test_something_that_is_not_a_function() -> None:
    with pytest.raises(shoal.UserError):
        shoal.launch("rank_and")  # type: ignore[arg-type]


def test_too_many_for_memory() -> None:
    with pytest.raises(shoal.UserError) as caught:
        shoal.launch(rank_and, 1_000_000)
    assert "memory" in caught.value.message


def test_a_run_folder_of_ones_own(tmp_path: Path) -> None:
    shoal.launch(lambda: print("hello"), 2, run_dir=str(tmp_path / "mine"), is_quiet=True)
    assert (tmp_path / "mine/logs/1.log").read_text() == "hello\n"


def test_output_goes_to_the_stream_of_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    """In a notebook that is the cell."""
    shoal.launch(lambda: print("hello"), 1)
    assert capsys.readouterr().out == "hello\n"
    shoal.launch(lambda: print("hello"), 1, is_quiet=True)
    assert capsys.readouterr().out == ""


def test_from_another_thread() -> None:
    values: list[Any] = []
    thread = threading.Thread(target=lambda: values.extend(shoal.launch(rank_and, 2)))
    thread.start()
    thread.join(20)
    assert [value[0] for value in values] == [0, 1]


def test_a_script_without_a_guard_is_not_run_again(box: Box) -> None:
    source = """
        import os, shoal

        print("top of the script")
        FACTOR = 3

        def work(x):
            return FACTOR * x + int(os.environ["RANK"])

        print(shoal.launch(work, 2, (10,)))
    """
    box.write("bare.py", source)
    done = box.execute(sys.executable, "bare.py")
    assert done.stdout == "top of the script\n[30, 31]\n"
    done = box.run("run", "bare.py")
    assert done.stdout == "top of the script\n[30, 31]\n"


def test_a_module_that_launches_while_it_is_imported(box: Box) -> None:
    source = """
        import shoal

        def work():
            return 1

        VALUES = shoal.launch(work, 1)
    """
    box.write("eager.py", source)
    done = box.execute(sys.executable, "-c", "import eager")
    assert done.returncode == 1
    assert "while a worker imported the module" in done.stderr
    assert '   do: put the call under `if __name__ == "__main__":`' in done.stderr


def test_interrupting_the_call_ends_all_workers(box: Box) -> None:
    source = """
        import os, time, shoal

        def work():
            open("up" + os.environ["RANK"], "w").close()
            time.sleep(60)

        try:
            shoal.launch(work, 2)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    box.write("wait.py", source)
    process = subprocess.Popen([sys.executable, "wait.py"], cwd=box.folder, env=box.env, stdout=subprocess.PIPE)
    box.wait_for_files("up0", "up1")
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=IN_TIME)
    assert shown == b"interrupted\n"
    assert box.facts()["status"] == "stopped"
    assert box.pids() == []


def test_killing_the_caller_ends_all_workers(box: Box) -> None:
    source = """
        import os, time, shoal

        def work():
            open("up" + os.environ["RANK"], "w").close()
            time.sleep(60)

        shoal.launch(work, 2)
    """
    box.write("wait.py", source)
    process = subprocess.Popen([sys.executable, "wait.py"], cwd=box.folder, env=box.env)
    box.wait_for_files("up0", "up1")
    process.kill()
    process.wait()
    box.wait_for_peace()

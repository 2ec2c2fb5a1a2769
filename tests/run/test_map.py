"""`shoal.map`: real workers, really killed. Every result comes once, in order, and nothing stays behind."""

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import Box, box

import shoal
from shoal.testing import Faults

__all__ = ["box"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def square(number: int) -> int:
    return number * number


def events_of(home: Path, kind: str) -> list[dict[str, Any]]:
    (run,) = (home / "runs").iterdir()
    events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    return [event for event in events if event["kind"] == kind]


def test_results_come_in_order_and_nothing_is_left_open(home: Path) -> None:
    gc.collect()  # what earlier tests left to it closes files too
    before = sorted(os.listdir("/proc/self/fd"))
    assert shoal.map(square, range(3000), 3) == [number * number for number in range(3000)]
    assert sorted(os.listdir("/proc/self/fd")) == before
    (run,) = (home / "runs").iterdir()
    assert '"status": "finished"' in (run / "run.json").read_text()
    assert events_of(home, "items_done")[-1]["data"]["done"] == 3000


def test_no_items_are_no_work(home: Path) -> None:
    assert shoal.map(square, []) == []
    assert not events_of(home, "worker_started")


def test_closures_travel_and_what_they_return() -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    offset = 40
    results = shoal.map(lambda item: Local(item.value + offset), [Local(1), Local(2)], 2)
    assert [type(result) for result in results] == [Local, Local]
    assert [result.value for result in results] == [41, 42]


def test_workers_are_on_their_own_and_have_their_threads() -> None:
    names = ("SHOAL_WORKER", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "SHOAL_RUN_DIR", "MINE")
    found = shoal.map(
        lambda _: [os.environ.get(name) for name in names], [0], 1, threads_per_worker=3, env={"MINE": "1"}
    )
    assert found == [["0", "3", None, None, None, "1"]]


def test_large_arrays_travel_through_memory_and_can_be_changed() -> None:
    arrays = [np.full((512, 512), number, dtype=np.float64) for number in range(6)]
    results = shoal.map(lambda array: array + 1, arrays, 2, is_quiet=True)
    assert [float(array[0, 0]) for array in results] == [1, 2, 3, 4, 5, 6]
    results[0][0, 0] = 7


def test_tensors_travel() -> None:
    import torch

    big, small = torch.arange(200_000, dtype=torch.float32), torch.ones(3, dtype=torch.bfloat16)
    ((first, second),) = shoal.map(lambda pair: pair, [(big, small)], 1, is_quiet=True)
    assert torch.equal(first, big)
    assert torch.equal(second, small)
    second += 1


def test_torch_is_not_imported_by_anybody() -> None:
    code = (
        "import shoal, sys\n"
        "heavy = lambda _: sorted({'torch', 'numpy'} & set(sys.modules))\n"
        "print(shoal.map(heavy, [0], 1, is_quiet=True), heavy(0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[[]] []\n", done.stdout + done.stderr


# Workers that fail.


def test_items_survive_kills_hangs_and_retryable_errors(home: Path) -> None:
    faults = (
        Faults()
        .kill(item=3)
        .kill(item=17, at="updated")
        .fail(item=20, retryable=True)
        .hang(item=25)
        .freeze(item=30)
        .kill(item=31)
        .kill(item=31)
    )
    results = shoal.map(square, range(60), 3, timeout_seconds=2.0, env=faults.env(), is_quiet=True)
    assert results == [number * number for number in range(60)]
    retried = sorted(event["data"]["item"] for event in events_of(home, "item_retried"))
    assert retried == [3, 17, 20, 25, 30, 31, 31]
    assert len(events_of(home, "fault")) == 7


def test_a_killed_worker_is_replaced_and_the_rest_go_on(home: Path, tmp_path: Path) -> None:
    """Killed from outside, wherever it is."""

    def slow(number: int) -> int:
        time.sleep(0.05)
        return number

    pids = tmp_path / "pids"
    results = shoal.map(
        lambda item: (pids.open("a").write(f"{os.getpid()}\n"), slow(item))[1],
        range(40),
        2,
        is_lazy=True,
        is_quiet=True,
    )
    taken = [next(results) for _ in range(10)]
    os.kill(int(pids.read_text().split()[-1]), signal.SIGKILL)
    assert taken + list(results) == list(range(40))
    assert -signal.SIGKILL in [event["data"]["code"] for event in events_of(home, "worker_exited")]


def test_an_item_that_kills_every_worker_is_given_up(home: Path) -> None:
    def poisoned(number: int) -> int:
        if number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(shoal.WorkerError, match="Item 4 was given up after 2 attempts") as caught:
        shoal.map(poisoned, range(8), 2, retries=1, is_quiet=True)
    assert "SIGKILL" in caught.value.why
    assert caught.value.item == 4  # type: ignore[attr-defined]
    results = shoal.map(poisoned, range(8), 2, retries=0, on_error="return", is_quiet=True)
    assert [result for result in results if not isinstance(result, Exception)] == [0, 1, 2, 3, 5, 6, 7]


def test_an_error_of_the_function_says_where_and_keeps_what_was_done() -> None:
    def fails(number: int) -> int:
        if number == 50:
            raise ValueError("no fifty")
        return number

    with pytest.raises(shoal.WorkerError) as caught:
        shoal.map(fails, range(100), 1, is_quiet=True)  # of two, one may not have begun when the other fails
    error: Any = caught.value
    assert error.message == "Item 50: ValueError: no fifty"
    assert "test_map.py:" in error.where
    assert isinstance(error.__cause__, ValueError)
    assert error.item == 50
    assert error.rank == 0
    assert error.results == {number: number for number in range(50)}
    assert "error.results" in error.hint
    assert "In worker" in error.__notes__[0]


def test_an_exception_that_cannot_travel_is_told_in_words() -> None:
    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"odd {one} {two}")

    def fails(number: int) -> int:
        raise Odd(1, 2)

    with pytest.raises(shoal.WorkerError, match=r"Item 0: .*Odd: odd 1 2"):
        shoal.map(fails, [0], 1, is_quiet=True)


def test_errors_can_stand_in_place_of_results() -> None:
    results = shoal.map(lambda number: 1 // number, [1, 0, 2], 2, on_error="return", is_quiet=True)
    assert results[0] == 1
    assert isinstance(results[1], shoal.WorkerError)
    assert results[2] == 0


# Lazily.


def test_an_endless_source_is_pulled_as_results_are_taken(home: Path) -> None:
    pulled = itertools.count()
    results = shoal.map(square, (next(pulled) for _ in itertools.repeat(None)), 2, is_lazy=True, is_quiet=True)
    assert [next(results) for _ in range(5)] == [0, 1, 4, 9, 16]
    results.close()  # type: ignore[attr-defined]
    assert next(pulled) < 50_000
    (run,) = (home / "runs").iterdir()
    assert '"status": "stopped"' in (run / "run.json").read_text()


def test_results_before_an_error_are_delivered_first() -> None:
    results = shoal.map(lambda number: 6 // (3 - number), range(9), 2, is_lazy=True, is_quiet=True)
    taken = []
    with pytest.raises(shoal.WorkerError, match="Item 3: ZeroDivisionError"):
        taken.extend(results)
    assert taken == [2, 3, 6]


# Mistakes.


def broken_source() -> Any:
    yield from (1, 2, 3)
    raise OSError("the disk is gone")


def test_a_source_that_breaks_loses_nothing() -> None:
    with pytest.raises(shoal.UserError, match="ended with an error after 3 of them: OSError") as caught:
        shoal.map(square, broken_source(), 2, is_quiet=True)
    error: Any = caught.value
    assert error.results == {0: 1, 1: 4, 2: 9}
    assert isinstance(error.__cause__, OSError)
    assert "test_map.py" in error.where


class Unsendable:
    def __reduce__(self) -> Any:
        raise TypeError("it holds a lock")


def test_what_cannot_be_sent_is_named() -> None:
    held = Unsendable()
    with pytest.raises(shoal.UserError, match=r"The function .* cannot be sent"):
        shoal.map(lambda item: (held, item), [1], 1)
    with pytest.raises(shoal.WorkerError, match=r"Item 1 cannot be sent") as caught:
        shoal.map(square, [1, Unsendable()], 1, is_quiet=True)
    assert "it holds a lock" in caught.value.why

    with pytest.raises(shoal.WorkerError, match="Item 0: The Unsendable that was returned cannot be sent"):
        shoal.map(lambda _: Unsendable(), [0], 1, is_quiet=True)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((square, [1], 0), {}, "workers is 0"),
        ((square, [1], 1.5), {}, r"workers is 1\.5"),
        ((square, 7), {}, "not a int"),
        (("square", [1]), {}, "map needs a function, not a str"),
        ((square, [1]), {"retries": -1}, "retries is -1"),
        ((square, [1]), {"timeout_seconds": 0}, "timeout_seconds is 0"),
        ((square, [1]), {"on_error": "ignore"}, "on_error is 'ignore'"),
    ],
)
def test_mistakes_are_found_before_anything_starts(
    args: tuple[Any, ...], options: dict[str, Any], message: str, home: Path
) -> None:
    with pytest.raises(shoal.UserError, match=message):
        shoal.map(*args, **options)
    assert not home.exists()


def test_workers_that_cannot_load_the_function_say_why(box: Box) -> None:
    source = "import os\nif os.environ.get('SHOAL_WORKER'): raise ImportError('not here')\ndef work(x): pass\n"
    box.write("elsewhere.py", source)
    script = box.write("script.py", "import shoal, elsewhere\nshoal.map(elsewhere.work, [1], 1, is_quiet=True)\n")
    done = box.execute(sys.executable, str(script))
    assert done.returncode == 1
    assert "not here" in done.stderr


# Ending.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nobody_stays_behind_whatever_ends_the_launcher(box: Box, number: signal.Signals) -> None:
    script = box.write(
        "script.py",
        """
        import pathlib, shoal, time
        def work(item):
            pathlib.Path(f"began-{item}").touch()
            time.sleep(60)
        shoal.map(work, range(4), 2, is_quiet=True)
        """,
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=box.folder,
        env=box.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    box.wait_for(lambda: len(list(box.folder.glob("began-*"))) == 2)
    process.send_signal(number)
    box.wait_for_peace()
    assert process.wait() != 0


def test_ps_and_explain_tell_of_a_map(box: Box) -> None:
    script = box.write(
        "script.py",
        """
        import shoal
        from shoal.testing import Faults
        print(sum(shoal.map(len, ["a", "bc"], 2, env=Faults().kill(item=1).env())))
        """,
    )
    done = box.execute(sys.executable, str(script))
    assert "items 2/2" in done.stdout, done.stdout + done.stderr
    assert "item 1 failed on worker" in done.stderr
    assert "2/2" in box.run("ps").stdout
    told = box.run("explain", "last").stdout
    assert "2 of 2 items done" in told
    assert "1 tried again" in told
    assert "item retried" in told

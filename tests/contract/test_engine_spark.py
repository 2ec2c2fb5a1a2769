"""The engine over tasks of Spark keeps the promises of every engine. One session serves all of these tests."""

import importlib.util
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.engine.fleet import Fleet
from shoal.engine.spark import Driver, SparkGround, make_ground
from shoal.spec.errors import UserError
from shoal.testing.engine_contract import EngineContract, codes, shell, wait_for_exits, wait_for_file
from shoal.testing.rigs.machine import LACKS

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("pyspark") is None, reason=f"{LACKS} pyspark"),
    pytest.mark.skipif(shutil.which("java") is None, reason=f"{LACKS} java"),
]


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    driver = Driver("local[4]", {})
    yield driver.context
    driver.close()


@pytest.fixture
def engine(context: Any) -> Iterator[Fleet]:
    engine = Fleet(SparkGround(context), num_slots=4)
    yield engine
    engine.stop(0.0)
    engine.close()


class TestSpark(EngineContract):
    """Agents as tasks of one session on this machine."""


def wait_until(engine: Fleet, is_true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen"
        engine.poll(0.05)


def agent_of(worker: int) -> psutil.Process:
    return psutil.Process(worker).parent()


def is_alive(pid: int) -> bool:
    """Nobody may reap an orphan."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_lost_task_takes_its_worker_along_and_no_other_and_another_comes(engine: Fleet, tmp_path: Path) -> None:
    engine.start([shell(tmp_path, rank, "echo $$ > pid$RANK; exec sleep 60") for rank in range(4)])
    pids = [int(wait_for_file(tmp_path / f"pid{rank}")) for rank in range(4)]
    agents = [agent_of(pid) for pid in pids]
    os.kill(agents[2].pid, signal.SIGKILL)
    assert [(end.rank, end.code) for end in wait_for_exits(engine, 1)] == [(2, -signal.SIGKILL)]
    assert engine.room == 3
    wait_until(engine, lambda: engine.room == 4)
    engine.start([shell(tmp_path, 2, "exit 7")])
    assert codes(wait_for_exits(engine, 1)) == [7]
    assert [agent_of(pid) for rank, pid in enumerate(pids) if rank != 2] == [agents[0], agents[1], agents[3]]
    assert not is_alive(pids[2])


def test_a_session_is_as_it_was_when_a_run_has_ended(context: Any, tmp_path: Path) -> None:
    from pyspark.sql import SparkSession

    session = SparkSession(context)
    context.setJobDescription("mine")
    context.pythonExec, python = "python-of-the-cluster", context.pythonExec
    try:
        engine = Fleet(SparkGround(session), num_slots=2)
        engine.start([shell(tmp_path, rank, "exit 3") for rank in range(2)])
        assert codes(wait_for_exits(engine, 2)) == [3, 3]
        engine.stop(0.0)
        engine.close()
        assert context.getLocalProperty("spark.job.description") == "mine"
        assert context.pythonExec == "python-of-the-cluster"
        assert list(context.statusTracker().getActiveJobsIds()) == []
    finally:
        context.pythonExec = python
        context.setJobDescription(None)
    assert session.sparkContext.parallelize(range(5), 2).count() == 5


def test_the_session_of_this_process_is_taken(context: Any) -> None:
    ground = make_ground(None, {})
    ground.close()
    assert context.parallelize([1, 2], 1).count() == 2
    with pytest.raises(UserError, match=r"has a Spark session already, with the master local\[4\]"):
        make_ground("local[2]", {})
    with pytest.raises(UserError, match="already"):
        make_ground(None, {"engine.spark.task.cpus": "2"})


def test_too_few_slots_are_told_before_anything_starts(context: Any) -> None:
    engine = Fleet(SparkGround(context), num_slots=5)
    with pytest.raises(UserError, match="Spark has 4 slots for tasks, and 5 workers are needed"):
        engine.seat(range(5), 5)
    engine.close()
    assert list(context.statusTracker().getActiveJobsIds()) == []


def test_a_session_that_was_stopped_is_told(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ground = SparkGround(context)
    monkeypatch.setattr(context, "_jsc", None)
    with pytest.raises(UserError, match="The Spark session is gone") as caught:
        ground.look()
    assert caught.value.why == "it was stopped"
    with pytest.raises(UserError, match="has been stopped"):
        SparkGround(context)


def test_what_is_no_session_is_refused() -> None:
    with pytest.raises(UserError, match="A Spark session was expected, not a str"):
        SparkGround("local[2]")

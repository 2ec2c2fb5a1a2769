"""Workers die, fail, come and go, and the run ends as an undisturbed one: the same parameters, every sample once.

`elastic_jobs.py` has the jobs; what each comes to in one process without any trouble is the measure of all.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import box

from shoal.spec.fault import POINTS
from shoal.testing import Faults, FaultyRun

__all__ = ["box"]

JOBS = str(Path(__file__).with_name("elastic_jobs.py"))
Ending = dict[str, Any]

pytestmark = pytest.mark.timeout(240)
"""Whichever comes first waits for all jobs in one process, a few seconds of computing each."""


@pytest.fixture(scope="session")
def clean() -> dict[str, Ending]:
    """How every job ends in one process that nobody disturbs."""
    run = subprocess.run([sys.executable, JOBS], capture_output=True, text=True, timeout=220, check=True)
    return {ending["job"]: ending for ending in endings_in(run.stdout)}


def endings_in(text: str) -> list[Ending]:
    return [json.loads(found) for found in re.findall(r"^ended (.*)$", text, re.MULTILINE)]


def run_job(faults: Faults, job: str, workers: str, transport: str = "auto", **env: str) -> FaultyRun:
    return faults.run(JOBS, job, num_workers=workers, options={"transport": transport}, env=env)


def check_ended_well(run: FaultyRun, expected: Ending, *, num_strikes: int = 0) -> None:
    """It ended, whoever saw the end saw the same as in peace, and as many faults struck as were to."""
    assert run.exit_code == 0, [event.data for event in run.of("error")]
    endings = [ending for rank in range(4) for ending in endings_in(run.log(rank))]
    assert endings
    assert all(ending == expected for ending in endings), endings
    assert len(run.strikes) == num_strikes
    assert expected["times"] is None or len(expected["times"]) == 1, "every sample was used equally often"


def kills_at_every_point() -> Faults:
    """The first is in the first step, before which an optimizer has no state."""
    faults = Faults().kill(rank=2, step=0, at="updating")
    for number, point in enumerate(POINTS):
        faults = faults.kill(rank=number % 3, step=3 + 3 * number, at=point, incarnation=None)
    return faults


@pytest.mark.parametrize(("job", "transport"), [("adamw", "shm"), pytest.param("sgd", "tcp", marks=pytest.mark.slow)])
def test_killed_at_every_point_of_a_step(clean, job, transport):
    faults = kills_at_every_point()
    run = run_job(faults, job, "2:3", transport)
    check_ended_well(run, clean[job], num_strikes=len(faults))
    assert {strike.data.get("at", "start") for strike in run.strikes} == set(POINTS)
    assert not run.of("resumed"), "nobody read a checkpoint"


def test_memory_stays_where_it_is_and_does_not_grow(clean):
    faults = Faults()
    for step in (5, 15):
        faults = faults.kill(rank=1, step=step, at="backward", incarnation=None)
    run = run_job(faults, "memory", "2:3", ELASTIC_WANTED="3")
    check_ended_well(run, clean["memory"], num_strikes=2)
    assert not clean["memory"]["has_moved"]
    assert not clean["memory"]["has_grown"]


@pytest.mark.slow
def test_twenty_kills(clean):
    faults = Faults.random(20, num_workers=3, count=20, every=(2, 6), at=POINTS)
    check_ended_well(run_job(faults, "long", "2:3"), clean["long"], num_strikes=20)


def test_a_loop_of_ones_own_that_evaluates_after_every_step(clean):
    faults = (
        Faults()
        .fail(rank=1, step=10, error="a broken cable", retryable=True)
        .kill(rank=2, step=11, at="summed")
        .kill(rank=0, step=20, at="updating")
        .kill(rank=1, step=30, at="updated", incarnation=None)
    )
    run = run_job(faults, "loop", "2:3")
    check_ended_well(run, clean["loop"], num_strikes=len(faults))
    assert "a broken cable" in str([event.data for event in run.of("error")])


def test_too_few_finish_what_they_do_between_steps_and_wait_then(clean):
    run = run_job(Faults(), "loop", "2:2", ELASTIC_WANTED="2")
    check_ended_well(run, clean["loop"])
    assert [event.rank for event in run.of("worker_lost")] == [1]
    assert run.of("waiting_for_workers")
    seen = [len(world.data["members"]) for world in run.of("world")]
    assert seen == [2, 1, 2], "one goes on to the end of the evaluation"
    begun = [event.step for event in run.of("worker_settings") if event.rank == 1]
    assert begun[0] == 0
    assert 40 <= begun[1] <= 42, "it is asked to wait as soon as it is at work alone"


def test_killed_inside_evaluate_and_predict(clean):
    run = run_job(Faults(), "calls", "1:3", ELASTIC_WANTED="3")
    check_ended_well(run, clean["calls"])
    lost = [event.rank for event in run.of("worker_lost")]
    assert lost[:2] == [1, 2]
    joined = [event.data["id"] for event in run.of("worker_joined")]
    assert "1.1" in joined, "the replacement came into the second fit"


def test_one_that_comes_after_a_loop_was_left_makes_the_predictions_itself(clean):
    faults = Faults().kill(rank=1, step=12, at="backward")
    run = run_job(faults, "left", "2:2")
    check_ended_well(run, clean["left"], num_strikes=1)
    assert len(endings_in(run.log(1))) == 1, "it saw the end, with the same predictions as the others"


@pytest.mark.slow
def test_two_killed_at_once_and_two_while_others_join(clean):
    faults = Faults().kill(rank=1, step=6, at="backward").kill(rank=2, step=6, at="backward")
    run = run_job(faults, "stream", "1:3", ELASTIC_WANTED="3")
    check_ended_well(run, clean["stream"], num_strikes=2)
    assert Path(run.run_dir, "died-handing over").exists()
    assert Path(run.run_dir, "died-joining").exists()
    assert Path(run.run_dir, "died-making room").exists()


@pytest.mark.slow
def test_too_few_wait_for_a_replacement_also_with_a_second_trainer(clean):
    faults = Faults().kill(rank=1, step=8, at="updating").kill(rank=0, step=30, at="posted")
    run = run_job(faults, "two", "2:2")
    check_ended_well(run, clean["two"], num_strikes=2)
    assert run.of("waiting_for_workers")
    assert all(len(world.data["members"]) == 2 for world in run.of("world"))


def test_the_average_where_an_optimizer_keeps_nothing(clean):
    """The second dies while the step that the first has interrupted is taken again: the first step of a World."""
    faults = Faults().kill(rank=1, step=5, at="backward").kill(rank=2, step=5, at="updating")
    check_ended_well(run_job(faults, "plain", "1:3"), clean["plain"], num_strikes=2)


def test_one_that_is_let_go_spoils_only_what_is_its_own(clean, box):
    process = box.start(
        "run", "-n", "1:3", "--name", "fewer", JOBS, "plain", env={**box.env, "ELASTIC_PAUSE": "0.15"}
    )
    box.wait_for(lambda: box.num_members("fewer") == 3)
    assert box.run("resize", "fewer", "-n", "2").returncode == 0
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert box.num_members("fewer") == 2
    endings = [ending for rank in range(2) for ending in endings_in(box.log(rank))]
    assert endings == [clean["plain"]] * 2


@pytest.mark.slow
def test_other_numbers_of_workers_while_it_runs(clean, box):
    process = box.start("run", "-n", "1:3", "--name", "many", JOBS, "short", env={**box.env, "ELASTIC_PAUSE": "0.15"})

    for count in (3, 1, 2):
        if count < 3:
            assert box.run("resize", "many", "-n", str(count)).returncode == 0
        box.wait_for(lambda count=count: box.num_members("many") == count)
    _, errors = process.communicate(timeout=40)
    assert process.returncode == 0, errors
    endings = [ending for rank in range(2) for ending in endings_in(box.log(rank))]
    assert endings
    assert all(ending == clean["short"] for ending in endings)


def test_an_error_of_ones_own_ends_the_run():
    run = run_job(Faults().fail(rank=1, step=3, error="a mistake"), "short", "1:2")
    assert (run.exit_code, run.status) == (1, "failed")
    assert not run.of("worker_joined")
    assert "a mistake" in str([event.data for event in run.of("error")])

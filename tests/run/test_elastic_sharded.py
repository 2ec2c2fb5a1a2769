"""Workers that divide the state of the run among them come and go, and it ends as an undisturbed one, up to rounding.

The jobs are those of `elastic_jobs.py`. On one host all they hold is in shared memory, that of the dead, too.
"""

import json
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from launching import box

from shoal.spec.fault import POINTS
from shoal.testing import Faults, FaultyRun

__all__ = ["box"]

JOBS = str(Path(__file__).with_name("elastic_jobs.py"))
TOLERANCE = 1e-4
"""Of the norm of each tensor. Sums are taken in another order with every other number of workers: 6e-8 a step."""

Ending = dict[str, Any]


def run_job(faults: Faults, job: str, workers: str, sync: str, bucket: int = 0, **options: str) -> FaultyRun:
    """`bucket`: elements, so few that workers wait for each other in the middle of a backward."""
    options = {"sync": sync, "exact": "false", **options}
    return faults.run(JOBS, job, num_workers=workers, options=options, env={"ELASTIC_BUCKET": str(bucket)})


def ends_in(text: str) -> list[Ending]:
    return [json.loads(found) for found in re.findall(r"^ended (.*)$", text, re.MULTILINE)]


@cache
def in_peace(job: str) -> Ending:
    """How a job ends in one process that nobody disturbs."""
    run = subprocess.run([sys.executable, JOBS, job], capture_output=True, text=True, timeout=100, check=True)
    (end,) = ends_in(run.stdout)
    return end


def check_ended_well(run: FaultyRun, expected: Ending, num_strikes: int) -> None:
    assert run.exit_code == 0, [event.data for event in run.of("error")]
    assert len(run.strikes) == num_strikes
    check_ends([end for rank in range(4) for end in ends_in(run.log(rank))], expected)


def check_ends(ends: list[Ending], expected: Ending) -> None:
    """Whoever saw the end has the very same, and that is what it is in peace, but for rounding."""
    assert ends
    assert all(end == ends[0] for end in ends), ends
    assert (ends[0]["step"], ends[0]["times"]) == (expected["step"], expected["times"])
    assert expected["times"] is None or len(expected["times"]) == 1, "every sample was used equally often"
    assert ends[0]["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)


@pytest.mark.slow
def test_killed_where_sums_pass_from_worker_to_worker():
    """In a backward that others wait for, in an update, and in the very first one."""
    faults = (
        Faults()
        .kill(rank=2, step=0, at="updating")
        .kill(rank=1, step=3, at="posted")
        .kill(rank=0, step=6, at="updating")
    )
    run = run_job(faults, "sgd", "1:3", "sharded:parameters", 256)
    check_ended_well(run, in_peace("sgd"), num_strikes=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "sync", "bucket"),
    [
        ("sgd", "sharded:parameters", 256),
        ("adamw", "sharded:gradients", 2**14),
        ("adamw", "sharded:optimizer", 0),
    ],
)
def test_killed_at_every_point_of_a_step(job, sync, bucket):
    faults = Faults().kill(rank=2, step=0, at="updating")
    for number, point in enumerate(POINTS):
        faults = faults.kill(rank=number % 3, step=3 + 3 * number, at=point, incarnation=None)
    run = run_job(faults, job, "1:3", sync, bucket)
    check_ended_well(run, in_peace(job), num_strikes=len(faults))
    assert {strike.data.get("at", "start") for strike in run.strikes} == set(POINTS)


@pytest.mark.slow
def test_exact_sums_with_a_divided_optimizer_are_the_same_to_the_last_bit():
    faults = Faults().kill(rank=1, step=4, at="updating").kill(rank=2, step=9, at="summed")
    run = run_job(faults, "sgd", "2:3", "sharded:optimizer", exact="true")
    check_ended_well(run, in_peace("sgd"), num_strikes=2)
    assert {end["digest"] for rank in range(3) for end in ends_in(run.log(rank))} == {in_peace("sgd")["digest"]}


@pytest.mark.slow
def test_two_at_once_a_frozen_one_and_one_that_fails():
    faults = (
        Faults()
        .kill(rank=0, step=6, at="posted")
        .kill(rank=2, step=6, at="backward")
        .freeze(rank=1, step=20, at="summed")
        .fail(rank=0, step=30, retryable=True, incarnation=None)
    )
    check_ended_well(run_job(faults, "sgd", "1:3", "sharded:parameters", 256), in_peace("sgd"), num_strikes=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random(seed):
    faults = Faults.random(seed, num_workers=3, count=12, every=(2, 6), at=POINTS)
    run = run_job(faults, "sgd", "1:3", "sharded:parameters", 256)
    assert run.exit_code == 0, [event.data for event in run.of("error")]
    check_ends([end for rank in range(4) for end in ends_in(run.log(rank))], in_peace("sgd"))


@pytest.mark.slow
def test_other_numbers_of_workers_a_stop_and_a_way_on(box):
    """Resized while it runs, stopped, and resumed with all it had: checkpoints know nothing of who held what."""
    env = {**box.env, "ELASTIC_PAUSE": "0.15", "ELASTIC_BUCKET": "256"}
    options = ("-o", "sync=sharded:parameters", "-o", "exact=false")
    process = box.start("run", "-n", "1:3", "--name", "many", *options, JOBS, "short", env=env)
    for count in (3, 1, 2):
        if count < 3:
            assert box.run("resize", "many", "-n", str(count)).returncode == 0
        box.wait_for(lambda count=count: box.num_members("many") == count, seconds=60)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    done = box.run("run", "--resume", "many", env={**box.env, "ELASTIC_BUCKET": "256"}, timeout=120)
    assert done.returncode == 0, done.stderr
    check_ends([end for rank in range(3) for end in ends_in(box.log(rank))], in_peace("short"))


@pytest.mark.slow
def test_a_bad_step_in_which_one_dies_is_left_out_by_all():
    """The step that is no number is counted once, whoever found it; samples of it are never learned."""
    faults = Faults().nan(rank=1, step=0).nan(rank=0, step=5).kill(rank=2, step=5, at="backward")
    run = run_job(faults, "sgd", "2:3", "sharded:parameters", 256)
    assert run.exit_code == 0
    ends = [end for rank in range(3) for end in ends_in(run.log(rank))]
    assert ends
    assert len({end["digest"] for end in ends}) == 1
    assert {event.step for event in run.of("step_skipped")} == {0, 5}

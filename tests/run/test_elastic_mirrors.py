"""Workers that divide state by messages come and go: what only one of them held comes back from its mirror.

The jobs are those of `elastic_jobs.py` and `mirror_jobs.py`. On one box messages are had with `transport=tcp`.
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

ELASTIC = Path(__file__).with_name("elastic_jobs.py")
MIRRORS = Path(__file__).with_name("mirror_jobs.py")
LEVELS = ("optimizer", "gradients", "parameters")
TOLERANCE = 1e-4
"""Of the norm of each tensor. Sums are taken in another order with every other number of workers: 6e-8 a step."""

Ending = dict[str, Any]


def run_job(
    faults: Faults, job: str, workers: str, level: str, script: Path = ELASTIC, redundancy: int = 1, **env: str
) -> FaultyRun:
    options = {"sync": f"sharded:{level}", "transport": "tcp", "exact": "false", "redundancy": str(redundancy)}
    return faults.run(str(script), job, num_workers=workers, options=options, env=env)


def ends_in(text: str) -> list[Ending]:
    return [json.loads(found) for found in re.findall(r"^ended (.*)$", text, re.MULTILINE)]


def ends_of(run: FaultyRun) -> list[Ending]:
    return [end for rank in range(4) for end in ends_in(run.log(rank))]


class Peace(dict[str, Ending]):
    """How jobs end in one process that nobody disturbs, each run when it is first asked for."""

    def __missing__(self, job: str) -> Ending:
        script = MIRRORS if job in ("neighbours", "joining", "loops") else ELASTIC
        command = [sys.executable, str(script), job]
        run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        (self[job],) = ends_in(run.stdout)
        return self[job]


@pytest.fixture(scope="module")
def clean() -> Peace:
    return Peace()


def check_ends(ends: list[Ending], expected: Ending) -> None:
    """Whoever saw the end has the very same, and that is what it is in peace, but for rounding."""
    assert ends
    assert len({end["digest"] for end in ends}) == 1, ends
    assert expected["times"] is None or len(expected["times"]) == 1, "every sample was used equally often"
    for end in ends:
        assert end.keys() == expected.keys()
        for name, value in expected.items():
            if name != "digest":
                assert end[name] == (pytest.approx(value, rel=TOLERANCE) if name not in ("job", "times") else value)


def sources(run: FaultyRun) -> set[str]:
    return {event.data["from"] for event in run.of("state_rebuilt")}


def kills_at_every_point() -> Faults:
    """The first is in the first step, before which an optimizer has no state."""
    faults = Faults().kill(rank=2, step=0, at="updating")
    for number, point in enumerate(POINTS):
        faults = faults.kill(rank=number % 3, step=3 + 3 * number, at=point, incarnation=None)
    return faults


def test_what_only_the_lost_held_comes_back_from_its_mirror(clean):
    faults = Faults().kill(rank=2, step=0, at="updating").kill(rank=1, step=9, at="summed", incarnation=None)
    run = run_job(faults, "sgd", "2:3", "parameters")
    assert run.exit_code == 0, [event.data for event in run.of("error")]
    check_ends(ends_of(run), clean["sgd"])
    assert sources(run) == {"mirror"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "level"),
    [
        ("sgd", "parameters"),
        ("adamw", "parameters"),
        ("adamw", "gradients"),
        ("adamw", "optimizer"),
        ("sgd", "optimizer"),
    ],
)
def test_killed_at_every_point_of_a_step(clean, job, level):
    faults = kills_at_every_point()
    run = run_job(faults, job, "2:3", level)
    assert run.exit_code == 0, [event.data for event in run.of("error")]
    check_ends(ends_of(run), clean[job])
    assert {strike.data.get("at", "start") for strike in run.strikes} == set(POINTS)
    assert sources(run) == {"mirror"}
    assert not run.of("resumed"), "nobody went back to a checkpoint"


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_two_neighbours_at_once_go_on_from_the_checkpoint(clean, level):
    run = run_job(Faults(), "neighbours", "2:3", level, MIRRORS)
    assert run.exit_code == 0, [event.data for event in run.of("error")]
    check_ends(ends_of(run), clean["neighbours"])
    assert "checkpoint" in sources(run)
    assert [event.step for event in run.of("resumed")] == [10]


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_without_mirrors_a_loss_goes_back_to_the_checkpoint(clean, level):
    faults = Faults().kill(rank=1, step=19, at="summed")
    run = run_job(faults, "sgd", "2:3", level, redundancy=0, ELASTIC_PAUSE="0.1")
    assert run.exit_code == 0, [event.data for event in run.of("error")]
    check_ends(ends_of(run), clean["sgd"])
    assert sources(run) == {"checkpoint"}
    assert [event.step for event in run.of("resumed")] == [10]


@pytest.mark.slow
def test_without_mirrors_nothing_is_lost_with_those_who_are_let_go(clean, box):
    options = ("-o", "sync=sharded:parameters", "-o", "exact=false", "-o", "transport=tcp", "-o", "redundancy=0")
    env = {**box.env, "ELASTIC_PAUSE": "0.15"}
    process = box.start("run", "-n", "1:3", "--name", "bare", *options, str(ELASTIC), "short", env=env)
    box.wait_for(lambda: box.num_members("bare") == 3)
    assert box.run("resize", "bare", "-n", "1").returncode == 0
    box.wait_for(lambda: box.num_members("bare") == 1)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    check_ends(ends_in(box.log(0)), clean["short"])
    lines = (box.only_run() / "metrics-0.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert len(steps) == len(set(steps)), "no step was taken twice"


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_lost_while_parts_are_handed_on(clean, level):
    """With the part of rank 2 only on rank 0, that dies, too, when all have their new parts and nobody knows it."""
    faults = Faults().kill(rank=2, step=5, at="backward")
    run = run_job(faults, "joining", "3:3", level, MIRRORS)
    assert run.exit_code == 0, [event.data for event in run.of("error")]
    check_ends(ends_of(run), clean["joining"])
    assert Path(run.run_dir, "done-member").exists()
    assert not run.of("resumed"), "nobody went back to a checkpoint"


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_loops_of_ones_own_evaluating_and_averages(clean, level):
    faults = Faults().kill(rank=1, step=3, at="summed").kill(rank=0, step=10, at="updating").kill(rank=1, step=20)
    run = run_job(faults, "loops", "2:3", level, MIRRORS)
    assert run.exit_code == 0, [event.data for event in run.of("error")]
    check_ends(ends_of(run), clean["loops"])


@pytest.mark.slow
@pytest.mark.parametrize("level", ["optimizer", "parameters"])
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random(clean, seed, level):
    """Some come so fast after each other that a part is lost, and the checkpoint is needed."""
    faults = Faults.random(seed, num_workers=3, count=12, every=(2, 6), at=POINTS)
    run = run_job(faults, "sgd", "2:3", level)
    assert run.exit_code == 0, [event.data for event in run.of("error")]
    check_ends(ends_of(run), clean["sgd"])


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_a_bad_step_in_which_one_dies_is_left_out_by_all(level):
    faults = Faults().nan(rank=1, step=0).nan(rank=0, step=5).kill(rank=2, step=5, at="updating")
    run = run_job(faults, "sgd", "2:3", level)
    assert run.exit_code == 0
    assert len({end["digest"] for end in ends_of(run)}) == 1
    assert {event.step for event in run.of("step_skipped")} == {0, 5}


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_other_numbers_of_workers_while_it_runs(clean, box, level):
    options = ("-o", f"sync=sharded:{level}", "-o", "exact=false", "-o", "transport=tcp")
    env = {**box.env, "ELASTIC_PAUSE": "0.15"}
    process = box.start("run", "-n", "1:3", "--name", "many", *options, str(ELASTIC), "short", env=env)
    for count in (3, 1, 3, 2):
        if count != box.num_members("many"):
            assert count == 3 or box.run("resize", "many", "-n", str(count)).returncode == 0
        box.wait_for(lambda count=count: box.num_members("many") == count)
        if count == 1:
            assert box.run("resize", "many", "-n", "3").returncode == 0
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    check_ends([end for rank in range(3) for end in ends_in(box.log(rank))], clean["short"])
    assert not [event for event in box.events() if event["kind"] == "resumed"]

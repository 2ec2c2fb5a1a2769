"""Copies that train by themselves are lost, come and go: every sample counts once, and all end with the same bits.

What counts: all that a worker has learned in a World from which it came into the next; of a worker that was lost,
what it had learned before the step at which the others went on.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from launching import Box, box

from shoal.spec.fault import POINTS
from shoal.testing import Faults, FaultyRun

__all__ = ["box"]

JOBS = str(Path(__file__).with_name("elastic_local_jobs.py"))
NUM_SAMPLES = 96
STEPS_PER_EPOCH = 8


def run_job(
    faults: Faults, sync: str, epochs: int, workers: str = "1:3", job: str = "fit", **options: str
) -> FaultyRun:
    env = {"ELASTIC_WANTED": "3", "LOCAL_SLOW": options.pop("LOCAL_SLOW", "0")}
    return faults.run(JOBS, job, str(epochs), num_workers=workers, options={"sync": sync, **options}, env=env)


def counted(run_dir: str) -> Counter[int]:
    """How often each sample counts."""
    found = Path(run_dir).glob("learned-*.jsonl")
    told = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in found}
    enters: dict[int, int] = {}
    for lines in told.values():
        enters |= {line["world"]: line["enters"] for line in lines if "enters" in line}
    counts: Counter[int] = Counter()
    for lines in told.values():
        mine = {line["world"] for line in lines}
        for line in lines:
            later = min((world for world in enters if world > line["world"]), default=None)
            has_come_on = later is None or any(world > line["world"] for world in mine)
            if "ids" in line and (has_come_on or line["step"] < enters[later]):
                counts.update(line["ids"])
    return counts


def endings_in(text: str) -> list[dict[str, Any]]:
    return [json.loads(found) for found in re.findall(r"^ended (.*)$", text, re.MULTILINE)]


def check_ended_well(run: FaultyRun, epochs: int, least_strikes: int, loss: float = 1.2) -> None:
    assert run.exit_code == 0, [event.data for event in run.of("error")]
    assert len(run.strikes) >= least_strikes
    check_endings([ending for rank in range(4) for ending in endings_in(run.log(rank))], epochs, loss)
    counts = counted(run.run_dir)
    assert len(counts) == NUM_SAMPLES
    assert set(counts.values()) == {epochs}, "every sample counts once an epoch"


def check_endings(endings: list[dict[str, Any]], epochs: int, loss: float = 1.2) -> None:
    assert endings
    assert all(ending == endings[0] for ending in endings), "all have the same parameters, and the same average"
    assert endings[0]["step"] == epochs * STEPS_PER_EPOCH
    assert endings[0]["lr"] == pytest.approx(0.01 * 0.99 ** (epochs * STEPS_PER_EPOCH)), "one step of it a step"
    assert endings[0]["loss"] < loss, "four classes: 1.39 is guessing"


def kills_at_every_point() -> Faults:
    """Worker 2 is spared: if all were lost at once, the run would go on from its checkpoint."""
    faults = Faults()
    for number, point in enumerate(POINTS):
        faults = faults.kill(rank=number % 2, step=2 + 6 * number, at=point, incarnation=None)
    return faults


def test_one_is_lost_within_a_round_and_one_in_the_middle_of_an_agreement():
    faults = Faults().kill(rank=0, step=10, at="backward").kill(rank=1, step=15, at="summed", incarnation=None)
    run = run_job(faults, "diloco:8,overlap=3", 4)
    check_ended_well(run, 4, 2)
    assert run.of("relearning")[0].step == 8, "what only the lost had learned since all agreed was learned again"


@pytest.mark.slow
def test_killed_at_every_point_of_a_step_and_of_an_agreement():
    faults = kills_at_every_point()
    run = run_job(faults, "diloco:8,overlap=3", 16)
    check_ended_well(run, 16, len(faults) // 2)  # on a slow machine replacements come too late for some


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sync", "options"),
    [
        ("local:8", {}),
        ("local:8,overlap=0", {"LOCAL_SLOW": "0.02"}),
        ("diloco:8,fragments=4", {}),
        ("local:6,fragments=2,codec=int8,overlap=1", {"transport": "tcp"}),
        ("local:0.2s", {}),
        ("local:1,overlap=0", {}),
    ],
)
def test_twelve_kills(sync, options):
    faults = Faults.random(12, num_workers=2, count=12, every=(2, 8), at=POINTS)
    run = run_job(faults, sync, 16, **options)
    check_ended_well(run, 16, 6)


@pytest.mark.slow
def test_lost_within_a_loop_of_ones_own_and_while_others_look_at_the_model():
    faults = Faults().kill(rank=2, step=9, at="posted")  # and worker 1 when it evaluates
    run = run_job(faults, "local:8,overlap=2", 6, job="loop", LOCAL_SLOW="0.01")
    check_ended_well(run, 6, 1)
    assert [event.rank for event in run.of("worker_lost")][:2] == [2, 1]
    looked = [json.loads(found) for rank in range(3) for found in re.findall(r"^looked (.*)$", run.log(rank), re.M)]
    digests: dict[int, set[str]] = {}
    for step, digest in looked:
        digests.setdefault(step, set()).add(digest)
    assert set(digests) == set(range(5, 49, 5))
    assert all(len(found) == 1 for found in digests.values()), "whoever looks at the same step sees the same"


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["local:6", "diloco:0.3s"])
def test_other_numbers_of_workers_while_it_runs_and_a_resumed_run(box: Box, sync: str):
    command = ["run", "-n", "1:3", "-o", f"sync={sync}"]
    process = box.start(*command, "--name", "many", JOBS, "fit", "12", env={**box.env, "ELASTIC_PAUSE": "0.4"})

    for count in (3, 1, 2):
        if count < 3:
            assert box.run("resize", "many", "-n", str(count)).returncode == 0
        box.wait_for(lambda count=count: box.num_members("many") == count, 60)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    check_endings([ending for rank in range(2) for ending in endings_in(box.log(rank))], 12)
    assert set(counted(str(box.only_run())).values()) == {12}
    again = box.run(*command, "--resume", "many", JOBS, "fit", "14", timeout=60)
    assert again.returncode == 0, again.stderr
    steps = {ending["step"] for rank in range(3) for ending in endings_in(box.log(rank))}
    assert steps == {12 * STEPS_PER_EPOCH, 14 * STEPS_PER_EPOCH}

"""Copies that are held in parts and train by themselves are lost with each of their parts, and come back."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shoal.spec.fault import POINTS
from shoal.testing import Faults, FaultyRun

JOB = str(Path(__file__).with_name("parted_local_job.py"))
NUM_SHARDS, NUM_PARTS = 4, 2


def run_job(faults: Faults, sync: str, num_steps: int, workers: str = "2:4", **options: str) -> FaultyRun:
    env = {"WANTED": workers.partition(":")[2], "STEPS": str(num_steps)}
    return faults.run(JOB, num_workers=workers, options={"sync": sync, **options}, env=env)


def read_notes(run_dir: str) -> dict[str, list[dict[str, Any]]]:
    """By worker and incarnation, as in `1.0`."""
    found = Path(run_dir).glob("learned-*.jsonl")
    return {
        path.stem.removeprefix("learned-"): [json.loads(line) for line in path.read_text().splitlines()]
        for path in found
    }


def counted(run_dir: str, part: int) -> Counter[tuple[int, int]]:
    """How often each shard of each step counts in that part of the model."""
    told = {who: lines for who, lines in read_notes(run_dir).items() if int(who.split(".")[0]) % NUM_PARTS == part}
    enters = {line["world"]: line["enters"] for lines in told.values() for line in lines if "enters" in line}
    counts: Counter[tuple[int, int]] = Counter()
    for lines in told.values():
        worlds = {line["world"] for line in lines}
        in_vain = {line["world"] for line in lines if "is_in_vain" in line}
        for line in lines:
            world = line["world"]
            later = min((number for number in enters if number > world), default=None)
            has_come_on = world not in in_vain and any(number > world for number in worlds)
            if "shard" in line and (later is None or has_come_on or line["step"] < enters[later]):
                counts[line["step"], line["shard"]] += 1
    return counts


def endings(run: FaultyRun) -> list[dict[str, Any]]:
    found = [re.findall(r"^ended (.*)$", run.log(rank), re.MULTILINE) for rank in range(4)]
    return [json.loads(text) for texts in found for text in texts]


def check_ended(run: FaultyRun, num_steps: int, least_strikes: int) -> None:
    assert run.exit_code == 0, [event.data for event in run.of("error")]
    assert len(run.strikes) >= least_strikes
    found = endings(run)
    assert len(found) >= NUM_PARTS
    assert all(ending == found[0] for ending in found), "all have the same parameters"
    assert found[0]["step"] == num_steps
    assert found[0]["lr"] == pytest.approx(0.01 * 0.99**num_steps)
    assert found[0]["loss"] < 2.0, "guessing the mean would be 6"
    for part in range(NUM_PARTS):
        counts = counted(run.run_dir, part)
        assert set(counts) == {(step, shard) for step in range(num_steps) for shard in range(NUM_SHARDS)}
        assert set(counts.values()) == {1}, "every shard of every step counts once"


@pytest.mark.slow
def test_a_copy_loses_a_stage_within_a_round_and_one_in_the_middle_of_an_agreement():
    faults = Faults().kill(rank=3, step=6, at="backward").kill(rank=0, step=19, at="summed", incarnation=None)
    run = run_job(faults, "local:4", 40, split="pipeline:2")
    check_ended(run, 40, 2)
    assert not run.of("resumed"), "nothing was read from disk"
    assert {event.data["from"] for event in run.of("state_rebuilt")} == {"copy"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "sync", "transport"),
    [
        ("pipeline:2", "diloco:6,overlap=2", "auto"),
        ("tensor:2", "local:6,overlap=1", "auto"),
        ("tensor:2", "local:4,fragments=2,codec=int8", "tcp"),
        ("pipeline:2", "local:0.3s", "tcp"),
    ],
)
def test_killed_at_every_point_of_a_step_and_of_an_agreement(split, sync, transport):
    """Workers 2 and 3 are spared: if every copy lost a part, the run would go on from its checkpoint."""
    faults = Faults()
    for number, point in enumerate(POINTS):
        faults = faults.kill(rank=number % 2, step=2 + 8 * number, at=point, incarnation=None)
    num_steps = 8 * len(POINTS) + 16
    run = run_job(faults, sync, num_steps, split=split, transport=transport)
    check_ended(run, num_steps, len(faults) // 2)


@pytest.mark.slow
def test_the_only_copy_loses_a_part_and_goes_on_from_the_checkpoint():
    run = run_job(Faults().kill(rank=1, step=17, at="backward"), "local:5", 30, "2:2", split="pipeline:2")
    assert run.exit_code == 0, [event.data for event in run.of("error")]
    assert {event.step for event in run.of("resumed")} == {15}
    assert {ending["step"] for ending in endings(run)} == {30}

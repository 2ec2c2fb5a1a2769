"""Models that several workers hold together go on when some of them are lost: from the other copies, or from disk."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.observe.explain import explain
from shoal.testing import Faults, FaultyRun

JOB = str(Path(__file__).with_name("parted_job.py"))


def endings(run: FaultyRun, num_workers: int = 4) -> list[dict[str, Any]]:
    found = [re.findall(r"^ended (.*)$", run.log(rank), re.MULTILINE) for rank in range(num_workers)]
    return [json.loads(text) for texts in found for text in texts]


def came_back(run: FaultyRun) -> str:
    """What `shoal explain` says about where the state came from that only the lost held."""
    (told,) = re.findall(r"what only the lost held came back (.*)", explain(run.run_dir).text(200))
    return str(told)


def run_job(faults: Faults, workers: str, *, is_exact: bool = False, **options: str) -> FaultyRun:
    env = {"WANTED": workers.partition(":")[2], **({"EXACT": "1"} if is_exact else {})}
    return faults.run(JOB, num_workers=workers, options=options, env=env)


@pytest.fixture(scope="module")
def alone() -> dict[bool, dict[str, Any]]:
    """How the job ends in one process, exactly and not."""
    found = {}
    for is_exact in (False, True):
        env = {**os.environ, **({"EXACT": "1"} if is_exact else {})}
        done = subprocess.run([sys.executable, JOB], capture_output=True, text=True, timeout=60, check=True, env=env)
        found[is_exact] = json.loads(done.stdout.partition("ended ")[2])
    return found


def check_ended(
    run: FaultyRun, expected: dict[str, Any], *, is_exact: bool, at_least: int, num_workers: int = 4
) -> None:
    assert run.exit_code == 0, [event.data for event in run.of("error")]
    found = endings(run, num_workers)
    assert len(found) >= at_least
    assert len({ending["digest"] for ending in found}) == 1
    for ending in found:
        assert ending["step"] == expected["step"]
        assert ending["lr"] == expected["lr"]
        # Parts add up in another order than one process does: one rounding in 2^24 a step.
        assert ending["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert ending["first"] == pytest.approx(expected["first"], rel=1e-3)
    if is_exact:
        assert found[0]["digest"] == expected["digest"]


def test_a_copy_in_stages_is_lost_and_comes_back(alone):
    """One of four is lost: the other copy goes on, one stands aside, and all four work when the replacement is in."""
    faults = Faults().kill(rank=3, step=6, at="forward").kill(rank=0, step=20, at="summed", incarnation=None)
    run = run_job(faults, "2:4", is_exact=True, split="pipeline:2")
    check_ended(run, alone[True], is_exact=True, at_least=2)
    assert not run.of("resumed"), "nothing was read from disk"
    assert [len(event.data["members"]) for event in run.of("world")][:3] == [4, 3, 4]
    assert {event.data["from"] for event in run.of("state_rebuilt")} == {"copy"}
    assert re.fullmatch(r"from another copy (once|twice|\d+ times)", came_back(run))


@pytest.mark.slow
def test_layers_in_parts_are_lost_and_come_back(alone):
    faults = Faults().kill(rank=1, step=6, at="backward").kill(rank=2, step=14, at="updating", incarnation=None)
    run = run_job(faults, "2:4", split="tensor:2", transport="tcp")
    check_ended(run, alone[False], is_exact=False, at_least=2)
    assert not run.of("resumed")
    assert came_back(run).startswith("from another copy ")


@pytest.mark.slow
def test_slices_of_stages_are_lost_and_come_back(alone):
    """One of eight is lost: of two copies of four parts the other goes on, three stand aside, and all eight go on."""
    faults = Faults().kill(rank=6, step=6, at="backward")
    run = run_job(faults, "4:8", split="tensor:2+pipeline:2")
    check_ended(run, alone[False], is_exact=False, at_least=4, num_workers=8)
    assert len(run.strikes) == 1
    assert not run.of("resumed"), "nothing was read from disk"
    assert [len(event.data["members"]) for event in run.of("world")][:3] == [8, 7, 8]
    rebuilt = [event.data for event in run.of("state_rebuilt")]
    assert all((each["from"], each["num_parts"]) == ("copy", 4) for each in rebuilt)
    assert any(6 % 4 in each["parts"] for each in rebuilt), "the part that was lost"
    assert came_back(run).startswith("from another copy ")


@pytest.mark.slow
@pytest.mark.parametrize("level", ["optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("split", ["pipeline:2", "tensor:2"])
def test_parts_whose_state_is_divided_are_lost_and_come_back(alone, split, level):
    """Of two copies, each part has its state in two halves, and each half a mirror with the other copy."""
    faults = Faults().kill(rank=3, step=6, at="backward").kill(rank=0, step=22, at="summed", incarnation=None)
    run = run_job(faults, "2:4", split=split, sync=f"sharded:{level}")
    check_ended(run, alone[False], is_exact=False, at_least=2)
    assert len(run.strikes) == 2
    assert not run.of("resumed"), "nothing was read from disk"


@pytest.mark.slow
def test_a_part_that_nobody_else_has_comes_from_the_checkpoint(alone):
    run = run_job(Faults().kill(rank=1, step=17, at="backward"), "2:2", is_exact=True, split="pipeline:2")
    check_ended(run, alone[True], is_exact=True, at_least=2)
    assert {event.step for event in run.of("resumed")} == {15}
    assert came_back(run) == "from the checkpoint once"

"""Killed at every system call of a save: the checkpoints that were acknowledged are there, and nothing else."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.testing.rigs import needs

MODULE = "shoal.testing.checkpoint_writer"


def sweep(*args: object) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", MODULE, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    if any("cannot" in item for item in found):
        pytest.skip(f"this machine lacks strace that may attach: {found[0]['cannot']}")
    return found


def assert_nothing_lost(found: list[dict[str, Any]]) -> None:
    for item in found:
        assert item["loaded"] >= item["acknowledged"], item
        assert item["same"], item
        assert item["skipped"] == 0, item  # no half-written checkpoint was ever to be seen
        assert item["left"] == [], item
    assert {item["loaded"] for item in found} == {2, 3}


def test_killed_at_every_call_of_the_store(tmp_path: Path):
    found = sweep("killed", tmp_path / "checkpoints", 2)
    assert len(found) > 30
    assert not found[-1]["killed"]
    assert_nothing_lost(found)


@needs("strace")
def test_killed_at_some_system_calls(tmp_path: Path):
    found = sweep("traced", tmp_path / "checkpoints", 1, 0, 4)
    assert sum(item["killed"] for item in found) > 25
    assert_nothing_lost(found)


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs("strace")
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("generation", [0, 1])
def test_killed_at_every_system_call(tmp_path: Path, keep: int, generation: int):
    """With a generation it also draws a fence before it saves."""
    found = sweep("traced", tmp_path / "checkpoints", keep, generation, 1)
    assert sum(item["killed"] for item in found) > 100
    assert_nothing_lost(found)

"""A writer that is stopped anywhere in a save, and wakes up after others went on, cannot commit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.checkpoint.store import FolderStore
from shoal.testing.power_loss import Writer
from shoal.testing.rigs import freeze, needs
from shoal.testing.store_contract import assert_same, make_state

MODULE = "shoal.testing.checkpoint_writer"


def await_word(writer: Writer, word: str) -> None:
    deadline = time.monotonic() + 20
    while word not in writer.words:
        assert time.monotonic() < deadline, writer.words
        time.sleep(0.01)


@pytest.mark.parametrize("keep", ["1", pytest.param("3", marks=pytest.mark.slow)])
def test_a_writer_that_wakes_up_is_refused(tmp_path: Path, keep: str):
    """Generation after generation: each writer is stopped at a random moment and the next takes over."""
    chance = random.Random(int(keep))
    with FolderStore(tmp_path, keep=2) as store:
        for generation in range(2):
            command = [sys.executable, "-m", MODULE, "write", str(tmp_path), "1000000", keep, str(generation)]
            with Writer(command) as writer:
                time.sleep(chance.uniform(0.0, 0.1))
                with freeze(writer.pid):
                    acknowledged = writer.drain()
                    assert store.load().state.step >= acknowledged
                    assert store.fence(generation + 1)
                    known = store.load().state.step
                    assert store.save(make_state(10**6), wait=True).is_durable
                    assert_same(store.load().state, make_state(10**6))
                await_word(writer, "fenced")
                # One save may have been finished but for its word; what came after the fence was refused.
                assert int(writer.words[-2]) <= max(known, acknowledged)
            assert_same(store.load().state, make_state(10**6))
            assert all(entry.generation == generation + 1 for entry in store.list() if entry.step == 10**6)
            store.save(make_state(0), wait=True)  # the next writer counts from one again


def sweep(folder: Path, stride: int, saves: int) -> int:
    """How many points there were."""
    command = [sys.executable, "-m", MODULE, "stopped", str(folder), str(stride), str(saves)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for item in found:
        # What a reader found once the fence was drawn is what it finds in the end.
        assert item["before"] == item["loaded"], item
        assert item["left"] == [], item
        # Refused and nothing is there, or it was saved before the fence and still counts.
        assert (item["said"], item["counts"]) in (("00", []), ("33", [True])), item
    assert {item["said"] for item in found} == {"00", "33"}
    return len(found)


@needs("strace")
@pytest.mark.parametrize("saves", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_stopped_after_some_system_calls_of_a_save(tmp_path: Path, saves: int):
    assert sweep(tmp_path / "checkpoints", 9, saves) > 10


@pytest.mark.slow
@pytest.mark.timeout(300)
@needs("strace")
@pytest.mark.parametrize("saves", [0, 1])
def test_stopped_after_every_system_call_of_a_save(tmp_path: Path, saves: int):
    assert sweep(tmp_path / "checkpoints", 1, saves) > 100


def test_a_stopped_writer_that_is_killed_leaves_nothing_that_counts(tmp_path: Path):
    command = [sys.executable, "-m", MODULE, "write", str(tmp_path), "1000000", "1", "0"]
    with Writer(command) as writer, FolderStore(tmp_path) as store:
        time.sleep(0.05)
        with freeze(writer.pid):
            store.fence(1)
            os.kill(writer.pid, signal.SIGKILL)
        store.save(make_state(10**6), wait=True)
        assert not [name for name in os.listdir(tmp_path) if name.startswith((".writing", ".removing"))]
        assert_same(store.load().state, make_state(10**6))

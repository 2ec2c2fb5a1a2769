"""Disks that are full, read-only or broken: training goes on, people are told, and saving resumes by itself."""

import errno
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import saving
from shoal.checkpoint.foreign import write_weights
from shoal.checkpoint.state import State
from shoal.checkpoint.store import FolderStore
from shoal.spec.errors import UserError
from shoal.testing.rigs import needs, small_disk
from shoal.testing.rigs.disks import SmallDisk
from shoal.testing.store_contract import assert_same, make_state

needs_disk = needs("root", "mount", "mounting")


class Told:
    """What a store told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Mapping[str, Any]]] = []

    def __call__(self, kind: str, data: Mapping[str, Any]) -> None:
        self.events.append((kind, data))

    def wait_for(self, kind: str, step: int) -> None:
        deadline = time.monotonic() + 30
        while not any(found == kind and data["step"] == step for found, data in self.events):
            assert time.monotonic() < deadline, f"no {kind} of step {step} in {self.events}"
            time.sleep(0.01)

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


def recover_by_itself(disk: SmallDisk, code: str, spoil: Any, heal: Any) -> None:
    """The disk fails, training goes on, nothing else is saved, the disk is well again: the newest state is on it."""
    told = Told()
    with FolderStore(disk.path / "run", on_event=told) as store:
        store.save(make_state(1), wait=True)
        spoil(disk)
        for step in (2, 3):
            last = store.save(make_state(step))
            told.wait_for("checkpoint_failed", step)
            assert code in told.events[-1][1]["why"]
            assert told.events[-1][1]["hint"]
            assert_same(store.load().state, make_state(1))
        heal(disk)
        told.wait_for("checkpoint_saved", 3)
        assert last.is_durable
        assert last.error is None
        assert_same(store.load().state, make_state(3))
        # Told once each, however often it was tried.
        assert told.kinds == ["checkpoint_saved", "checkpoint_failed", "checkpoint_failed", "checkpoint_saved"]


@needs_disk
def test_a_full_disk():
    with small_disk(4) as disk:
        recover_by_itself(disk, "ENOSPC", SmallDisk.fill, SmallDisk.free)


@needs_disk
def test_a_read_only_disk():
    with small_disk(4) as disk:
        recover_by_itself(disk, "EROFS", SmallDisk.read_only, SmallDisk.writable)


@needs_disk
def test_closing_tries_once_more_and_gives_up(monkeypatch: pytest.MonkeyPatch):
    """Nor does it wait until the next try is due."""
    monkeypatch.setattr(saving, "PAUSES", (1000.0,))
    told = Told()
    with small_disk(4) as disk:
        store = FolderStore(disk.path, on_event=told)
        disk.fill()
        first = store.save(make_state(1), wait=True)
        store.close()
        assert not first.is_durable
        assert "ENOSPC" in first.error.why
        store.save(make_state(2), wait=True)
        disk.free()
        store.close()
        assert_same(store.load().state, make_state(2))
        assert told.kinds == ["checkpoint_failed", "checkpoint_failed", "checkpoint_saved"]


ENDING = """
import sys
from shoal.checkpoint.store import FolderStore
from shoal.testing.store_contract import make_state
store = FolderStore(sys.argv[1], on_event=lambda kind, data: print(kind, flush=True))
store.save(make_state(1), wait=True)
"""


@needs_disk
def test_a_process_that_ends_does_not_wait_for_a_disk_that_stays_full():
    with small_disk(4) as disk:
        disk.fill()
        command = [sys.executable, "-c", ENDING, str(disk.path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.split() == ["checkpoint_failed"]


@needs_disk
def test_a_disk_too_small_for_one_save_takes_a_smaller_one():
    """First seen before a byte is written; then, with the space taken meanwhile, in the middle of writing."""
    with small_disk(4) as disk:
        store = FolderStore(disk.path / "run")
        store.save(make_state(1), wait=True)
        for numbers in (1_500_000, 950_000):
            parts = {"model/a": torch.zeros(numbers - 300_000), "optimizer/a": torch.zeros(300_000)}
            refused = store.save(State(step=2, tensors=parts), wait=True)
            assert "ENOSPC" in refused.error.why
            assert_same(store.load().state, make_state(1))
            assert sorted(path.name for path in store.folder.iterdir()) == [".lock", "step-000000001"]
            disk.fill(1)
        disk.free()
        assert store.save(make_state(3), wait=True).is_durable
        for format in ("safetensors", "state_dict", "dcp"):
            with pytest.raises(UserError, match="Cannot write weights") as caught:
                write_weights({"a": torch.zeros(2_000_000)}, disk.path / "weights", format)
            assert "ENOSPC" in caught.value.why
        store.close()


def fail_each_call(folder: Path, code: int, stride: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "shoal.testing.checkpoint_writer", "failed"]
    command += [str(folder), "1", str(code), str(stride)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    if any("cannot" in item for item in found):
        pytest.skip(f"this machine lacks strace that may attach: {found[0]['cannot']}")
    return found


def assert_saved_in_the_end(found: list[dict[str, Any]]) -> None:
    """The first try failed or not; the last one, with the disk well again, did not."""
    for item in found:
        assert item["said"] in ("03", "33"), item
        assert item["loaded"] == 3, item
        assert item["same"], item
        assert item["skipped"] == 0, item
        assert item["left"] == [], item
    assert {item["said"] for item in found} == {"03", "33"}


@needs("strace")
def test_some_system_calls_fail(tmp_path: Path):
    assert_saved_in_the_end(fail_each_call(tmp_path / "checkpoints", errno.EIO, 4))


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs("strace")
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_every_system_call_fails(tmp_path: Path, code: int):
    found = fail_each_call(tmp_path / "checkpoints", code, 1)
    assert len(found) > 60
    assert_saved_in_the_end(found)

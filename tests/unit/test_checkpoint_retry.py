"""A save that failed is tried again: until it stands, a newer one takes its place, or nobody wants it any more."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint import disk, saving
from shoal.checkpoint.saving import Retries
from shoal.checkpoint.state import State
from shoal.checkpoint.store import FolderStore
from shoal.testing.store_contract import assert_same, make_state


class Disk:
    """Refuses while `is_full`, and counts how often it was asked."""

    def __init__(self) -> None:
        self.is_full, self.num_asked = True, 0

    def free_bytes(self, folder: Path) -> int:
        self.num_asked += 1
        return 0 if self.is_full else 1 << 40


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    found = Disk()
    monkeypatch.setattr(disk, "free_bytes", found.free_bytes)
    monkeypatch.setattr(saving, "PAUSES", (0.01,))
    return found


def await_true(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def test_it_is_saved_once_the_disk_is_well_again(tmp_path: Path, full_disk: Disk):
    told: list[str] = []
    with FolderStore(tmp_path, on_event=lambda kind, data: told.append(kind)) as store:
        state = make_state(1)
        save = store.save(state, wait=True)
        for tensor in state.tensors.values():
            tensor.fill_(-1)  # training went on
        assert "ENOSPC" in save.error.why
        await_true(lambda: full_disk.num_asked > 5)
        full_disk.is_full = False
        await_true(lambda: save.is_durable)
        assert save.error is None
        assert_same(store.load().state, make_state(1))
    assert told == ["checkpoint_failed", "checkpoint_saved"]


def test_a_newer_save_takes_its_place(tmp_path: Path, full_disk: Disk):
    with FolderStore(tmp_path) as store:
        first = store.save(make_state(1), wait=True)
        second = store.save(make_state(2), wait=True)
        full_disk.is_full = False
        await_true(lambda: second.is_durable)
        assert not first.is_durable
        assert [entry.step for entry in store.list()] == [2]


def test_a_state_that_cannot_be_saved_does_not_take_its_place(tmp_path: Path, full_disk: Disk):
    with FolderStore(tmp_path) as store:
        first = store.save(make_state(1), wait=True)
        with pytest.raises(Exception, match="not a step"):
            store.save(State(step=-1, tensors={}))
        full_disk.is_full = False
        await_true(lambda: first.is_durable)


def test_a_fence_does_not_lose_it(tmp_path: Path, full_disk: Disk):
    with FolderStore(tmp_path) as store:
        save = store.save(make_state(1), wait=True)
        await_true(lambda: store.fence(1))
        full_disk.is_full = False
        await_true(lambda: save.is_durable)
        assert save.path == tmp_path / "step-000000001-g1"


def test_closing_tries_a_last_time(tmp_path: Path, full_disk: Disk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(saving, "PAUSES", (1000.0,))
    store = FolderStore(tmp_path)
    save = store.save(make_state(1), wait=True)
    full_disk.is_full = False
    store.close()
    assert save.is_durable


def test_pauses_grow_and_end(monkeypatch: pytest.MonkeyPatch):
    retries = Retries()
    retries.stop()
    assert not retries.pause()
    retries = Retries()
    retries.finish()
    assert not retries.pause()  # it was asked for before the pause: the try under way is the last
    monkeypatch.setattr(saving, "PAUSES", (0.0, 1000.0))
    retries = Retries()
    assert retries.pause()
    threading.Timer(0.01, retries.finish).start()
    assert retries.pause()
    assert not retries.pause()

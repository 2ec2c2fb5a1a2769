"""Fences: a writer of an older generation cannot commit, and what it commits nevertheless is not believed."""

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint import disk, fence
from shoal.checkpoint.fence import Fence, Stale
from shoal.checkpoint.store import FolderStore
from shoal.testing.store_contract import assert_same, make_state


class Told(list[tuple[str, Mapping[str, Any]]]):
    def __call__(self, kind: str, data: Mapping[str, Any]) -> None:
        self.append((kind, data))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self]


def test_an_older_generation_is_refused_and_leaves_nothing(tmp_path: Path):
    told = Told()
    old = FolderStore(tmp_path, generation=0, on_event=told)
    old.save(make_state(1), wait=True)
    new = FolderStore(tmp_path, generation=1)
    assert new.fence(1)
    before = sorted(os.listdir(tmp_path))
    saving = old.save(make_state(2), wait=True)
    assert isinstance(saving.error, Stale)
    assert "generation 0" in saving.error.why
    assert "generation 1" in saving.error.why
    assert told.kinds == ["checkpoint_saved", "checkpoint_fenced"]
    assert sorted(os.listdir(tmp_path)) == before
    assert_same(new.load().state, make_state(1))


def test_the_new_generation_saves_and_is_named(tmp_path: Path):
    store = FolderStore(tmp_path)
    store.save(make_state(1), wait=True)
    store.fence(3)
    saving = store.save(make_state(2), wait=True)
    assert saving.path == tmp_path / "step-000000002-g3"
    assert [(entry.step, entry.generation) for entry in store.list()] == [(2, 3), (1, 0)]
    assert_same(store.load(1).state, make_state(1))


def save_behind_the_fence(folder: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> Path:
    """What a writer leaves that was stopped just before its rename and killed just after it."""
    with monkeypatch.context() as patch:
        for name in ("check", "confirm"):
            patch.setattr(fence, name, lambda *_: None)
        patch.setattr(FolderStore, "_remove_old", lambda _: None)
        path = FolderStore(folder, generation=0, keep=None).save(make_state(step), wait=True).path
    assert path is not None
    return path


def test_what_comes_late_is_passed_over_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = FolderStore(tmp_path, keep=None)
    store.save(make_state(1), wait=True)
    store.fence(1)
    store.save(make_state(2), wait=True)
    late = save_behind_the_fence(tmp_path, monkeypatch, 9)
    loaded = store.load()
    assert_same(loaded.state, make_state(2))
    assert [item.path for item in loaded.skipped] == [late]
    assert "by generation 0 after generation 1 had taken over" in loaded.skipped[0].reason
    store.save(make_state(3), wait=True)
    assert not late.exists()
    assert [entry.step for entry in store.list()] == [3, 2, 1]


def test_a_late_one_does_not_hide_behind_the_name_of_one_that_was_known(tmp_path, monkeypatch):
    store = FolderStore(tmp_path, keep=1)
    store.save(make_state(1), wait=True)
    store.fence(1)
    store.save(make_state(2), wait=True)  # removes step 1, whose name is free again
    assert save_behind_the_fence(tmp_path, monkeypatch, 1).name == "step-000000001"
    assert store.load().state.step == 2


def test_a_writer_that_finds_a_fence_after_its_rename_takes_its_checkpoint_back(tmp_path, monkeypatch):
    told, real = Told(), fence.confirm
    old = FolderStore(tmp_path, generation=0, on_event=told)
    old.save(make_state(1), wait=True)

    def take_over_first(*args: Any) -> None:
        monkeypatch.setattr(fence, "confirm", real)
        fence._put(tmp_path, Fence(1, known=()))
        real(*args)

    monkeypatch.setattr(fence, "confirm", take_over_first)
    assert isinstance(old.save(make_state(2), wait=True).error, Stale)
    assert told.kinds[1:] == ["checkpoint_fenced"]
    assert not (tmp_path / "step-000000002").exists()


def test_fences_only_move_on(tmp_path: Path):
    store, late = FolderStore(tmp_path), FolderStore(tmp_path)
    assert store.fence(2)
    assert store.fence(2)
    with pytest.raises(Stale, match="may not save"):
        late.fence(1)
    assert fence.newest_generation(tmp_path) == 2
    assert store.fence(5)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".fence")] == [".fence-000000005"]


def test_a_store_opened_later_belongs_to_the_generation_in_force(tmp_path: Path):
    store = FolderStore(tmp_path)
    store.save(make_state(1), wait=True)
    store.fence(4)
    later = FolderStore(tmp_path)
    assert later.generation == 4
    assert later.save(make_state(2), wait=True).is_durable
    assert later.load().state.step == 2


def test_a_fence_waits_for_nobody(tmp_path: Path):
    """A save under way is finished first, in its own generation; the fence follows it."""
    store = FolderStore(tmp_path)
    with disk.locked(tmp_path / disk.LOCK, 0.0):
        saving = store.save(make_state(1))
        assert not store.fence(1)
    saving.wait()
    store.close()
    assert saving.is_durable
    assert fence.in_force(tmp_path).generation == 1
    assert_same(FolderStore(tmp_path).load().state, make_state(1))


def test_a_fence_can_be_drawn_in_the_background(tmp_path: Path):
    store = FolderStore(tmp_path)
    store.fence(1, wait=False)
    assert store.save(make_state(1), wait=True).path == tmp_path / "step-000000001-g1"
    late = FolderStore(tmp_path, generation=0)
    late.fence(0, wait=False)
    assert isinstance(late.save(make_state(2), wait=True).error, Stale)


def test_one_who_was_fenced_out_holds_up_nobody(tmp_path: Path):
    with disk.locked(tmp_path / disk.LOCK, 0.0):
        store = FolderStore(tmp_path)
        store.fence(1)
        assert store.save(make_state(1)).wait(5)


def test_a_damaged_fence_hides_no_checkpoint(tmp_path: Path):
    store = FolderStore(tmp_path)
    store.save(make_state(1), wait=True)
    store.fence(1)
    for junk in (b"", b"{", b"\xff", b'{"generation": 7, "known": []}', b'{"generation": 1, "known": 5}'):
        (tmp_path / ".fence-000000001").write_bytes(junk)
        assert_same(store.load().state, make_state(1))


def test_a_disk_that_refuses_a_fence_is_told_and_the_next_save_draws_it(tmp_path, monkeypatch):
    told = Told()
    store = FolderStore(tmp_path, on_event=told)
    store.save(make_state(1), wait=True)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_file", refuse)
        assert not store.fence(1)
    assert told.kinds == ["checkpoint_saved", "fence_failed"]
    assert "ENOSPC" in told[-1][1]["why"]
    assert store.save(make_state(2), wait=True).is_durable
    assert fence.in_force(tmp_path).generation == 1


def test_many_generations_take_over_from_each_other(tmp_path: Path):
    """Each in a thread of its own, all at once: whoever was told that it saved can be read, until a newer one."""
    stores = [FolderStore(tmp_path, keep=None) for _ in range(6)]
    savings: dict[int, Any] = {}

    def live(generation: int) -> None:
        try:
            stores[generation].fence(generation)
        except Stale:
            return
        savings[generation] = stores[generation].save(make_state(generation), wait=True)

    threads = [threading.Thread(target=live, args=(generation,)) for generation in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    saved = {generation for generation, saving in savings.items() if saving.is_durable}
    assert 5 in saved
    assert {entry.step for entry in stores[0].list() if not entry.problem} >= saved
    assert stores[0].load().state.step == 5

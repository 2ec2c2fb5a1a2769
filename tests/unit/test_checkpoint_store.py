"""The folder store: what stays, what goes, and what happens when the disk says no."""

import contextlib
import errno
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import disk, read
from shoal.checkpoint.listing import Entry
from shoal.checkpoint.state import State
from shoal.checkpoint.store import FolderStore
from shoal.checkpoint.write import next_sequence, pick_doomed
from shoal.spec.errors import BugError, UserError
from shoal.testing.store_contract import assert_same, make_state
from shoal.testing.system_calls import FaultyOs


class Told(list[tuple[str, Mapping[str, Any]]]):
    """Remembers events."""

    def __call__(self, kind: str, data: Mapping[str, Any]) -> None:
        self.append((kind, data))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self]


def visible(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def entry(step: int, sequence: int, problem: str = "") -> Entry:
    return Entry(step=step, path=Path(f"{step}.{sequence}"), sequence=sequence, problem=problem)


@pytest.mark.parametrize(
    ("entries", "keep", "doomed"),
    [
        ([], 3, []),
        ([entry(3, 3), entry(2, 2), entry(1, 1)], 3, []),
        ([entry(3, 3), entry(2, 2), entry(1, 1)], 2, [1]),
        ([entry(3, 3), entry(2, 2), entry(1, 1)], None, []),
        ([entry(5, 9), entry(90, 8), entry(80, 7)], 1, [8, 7]),
        ([entry(3, 3), entry(3, 2), entry(1, 1)], 2, [2]),
        ([entry(3, 3), entry(3, 2), entry(1, 1)], None, [2]),
        # A damaged one does not count, so that `keep` good ones stay; it goes once it is older than those.
        ([entry(3, 3), entry(2, 2, "cut"), entry(1, 1)], 2, []),
        ([entry(3, 3), entry(2, 2), entry(1, 1, "cut")], 2, [1]),
        # Without a manifest its age is unknown: it stays.
        ([entry(3, 3), entry(2, 2), entry(9, -1, "no manifest")], 1, [2]),
    ],
)
def test_which_checkpoints_may_go(entries, keep, doomed):
    assert [item.sequence for item in pick_doomed(entries, keep)] == doomed


@pytest.mark.parametrize(
    ("sequences", "now", "expected"),
    [([], 5.0, 5000), ([4000], 5.0, 5000), ([9000, 4000], 5.0, 9001), ([-1], 5.0, 5000), ([], -1.0, 0)],
)
def test_the_sequence_grows_even_if_the_clock_is_set_back(sequences, now, expected):
    assert next_sequence([entry(1, sequence) for sequence in sequences], now) == expected


def test_keep_must_keep_something(tmp_path):
    with pytest.raises(UserError, match="keep=0"):
        FolderStore(tmp_path, keep=0)


def test_saving_is_told(tmp_path):
    told = Told()
    with FolderStore(tmp_path, on_event=told) as store:
        saving = store.save(make_state(3), wait=True)
    assert told.kinds == ["checkpoint_saved"]
    assert told[0][1] == {
        "step": 3,
        "path": str(tmp_path / "step-000000003"),
        "num_bytes": saving.num_bytes,
        "seconds": told[0][1]["seconds"],
    }
    assert 0 < told[0][1]["seconds"] <= saving.seconds
    assert visible(tmp_path) == [".lock", "step-000000003"]


def test_files_that_are_not_ours_are_left_alone(tmp_path):
    (tmp_path / "step-best").mkdir()
    (tmp_path / "step-000000001").symlink_to("step-best")
    (tmp_path / "notes.txt").write_text("mine")
    with FolderStore(tmp_path, keep=1) as store:
        for step in (2, 3):
            store.save(make_state(step), wait=True)
        assert [item.step for item in store.list()] == [3]
    assert visible(tmp_path) == [".lock", "notes.txt", "step-000000001", "step-000000003", "step-best"]


def test_a_name_that_is_taken_is_not_touched(tmp_path):
    (tmp_path / "step-000000002").mkdir()
    (tmp_path / "step-000000002" / "mine").write_text("x")
    with FolderStore(tmp_path) as store:
        assert store.save(make_state(2), wait=True).path == tmp_path / "step-000000002-2"
        assert store.load().state.step == 2
    assert (tmp_path / "step-000000002" / "mine").exists()


def test_leftovers_are_cleared_when_nobody_writes(tmp_path):
    FolderStore(tmp_path).save(make_state(1), wait=True)
    for name in (".writing-step-000000002-ab", ".removing-step-000000001-cd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    with disk.locked(tmp_path / disk.LOCK, 0.0):
        FolderStore(tmp_path)  # a live writer holds the lock: they may be its files
        assert ".writing-step-000000002-ab" in visible(tmp_path)
    FolderStore(tmp_path)
    assert visible(tmp_path) == [".lock", "step-000000001"]


def test_two_stores_on_one_folder_take_turns(tmp_path):
    stores = [FolderStore(tmp_path, keep=None) for _ in range(2)]
    savings = [store.save(make_state(step)) for step in range(1, 9) for store in [stores[step % 2]]]
    for store in stores:
        store.close()
    assert all(saving.is_durable for saving in savings)
    assert len(stores[0].list()) == 8


def test_a_folder_that_another_holds_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.checkpoint.store.LOCK_SECONDS", 0.0)
    store = FolderStore(tmp_path)
    with disk.locked(tmp_path / disk.LOCK, 0.0):
        saving = store.save(make_state(1), wait=True)
    assert "Another process is writing" in saving.error.why
    assert store.save(make_state(1), wait=True).is_durable


def test_a_file_system_without_locks_still_saves(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(disk.fcntl, "flock", refuse)
    (tmp_path / ".writing-step-000000002-ab").mkdir()
    with FolderStore(tmp_path) as store:
        assert store.save(make_state(1), wait=True).is_durable
    assert ".writing-step-000000002-ab" in visible(tmp_path)  # perhaps someone's


def fail_at(monkeypatch: pytest.MonkeyPatch, at: int, code: int) -> FaultyOs:
    def fail(_: str) -> None:
        raise OSError(code, os.strerror(code))

    faulty = FaultyOs(at=at, act=fail)
    monkeypatch.setattr(disk, "os", faulty)
    return faulty


def count_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many system calls a save makes that replaces an older one."""
    store = FolderStore(tmp_path / "count", keep=1)
    store.save(make_state(1), wait=True)
    faulty = fail_at(monkeypatch, -1, 0)
    store.save(make_state(2), wait=True)
    monkeypatch.undo()
    return faulty.num_calls


def test_a_failure_at_any_call_costs_nothing_but_that_save(tmp_path, monkeypatch):
    """At each system call of a save in turn, the disk says no: the checkpoint before it is whole, nothing is left
    behind, it is told why and what to do, and the next save works."""
    num_calls = count_calls(tmp_path, monkeypatch)
    assert num_calls > 20
    codes = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EACCES]
    for at in range(1, num_calls + 1):
        told = Told()
        folder = tmp_path / str(at)
        store = FolderStore(folder, keep=1, on_event=told)
        store.save(make_state(1), wait=True)
        with monkeypatch.context() as patch:
            fail_at(patch, at, codes[at % len(codes)])
            saving = store.save(make_state(2), wait=True)
        if saving.error is not None:
            assert told.kinds == ["checkpoint_saved", "checkpoint_failed"]
            assert told[-1][1]["why"] == saving.error.why
            assert errno.errorcode[codes[at % len(codes)]] in saving.error.why
            assert saving.error.hint
            assert not saving.is_durable
            assert_same(store.load().state, make_state(1))
            assert visible(folder) == [".lock", "step-000000001"]
        else:  # it failed while the older one was removed: the save stands
            assert "checkpoint_saved" in told.kinds[1:]
            assert_same(store.load().state, make_state(2))
        assert store.save(make_state(3), wait=True).is_durable
        assert_same(store.load().state, make_state(3))
        assert visible(folder) == [".lock", "step-000000003"]


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    told = Told()
    saving = FolderStore(tmp_path / "file" / "checkpoints", on_event=told).save(make_state(1), wait=True)
    assert told.kinds == ["checkpoint_failed"]
    assert "ENOTDIR" in saving.error.why
    assert "step 1" in saving.error.message


def test_too_little_space_is_seen_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 5)
    saving = FolderStore(tmp_path).save(make_state(1), wait=True)
    assert "5 are free (ENOSPC)" in saving.error.why
    assert "keep=" in saving.error.hint


def test_a_folder_removed_meanwhile_is_made_again(tmp_path):
    store = FolderStore(tmp_path / "run" / "checkpoints")
    store.save(make_state(1), wait=True)
    disk.shutil.rmtree(tmp_path / "run")
    assert store.save(make_state(2), wait=True).is_durable
    assert store.load().state.step == 2


def test_no_memory_for_the_copy_does_not_stop_training(tmp_path):
    told = Told()
    store = FolderStore(tmp_path, on_event=told)
    huge = torch.ones(1).expand(1 << 48)
    saving = store.save(State(step=1, tensors={"model/huge": huge}), wait=True)
    assert "no memory" in saving.error.why
    assert told.kinds == ["checkpoint_failed"]
    assert store.save(make_state(2), wait=True).is_durable


def test_a_process_that_may_start_no_thread_saves_all_the_same(tmp_path, monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert FolderStore(tmp_path).save(make_state(1)).is_durable


def test_a_bug_in_writing_is_told_not_lost(tmp_path, monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("shoal.checkpoint.store.write_checkpoint", broken)
    saving = FolderStore(tmp_path).save(make_state(1), wait=True)
    assert isinstance(saving.error, BugError)
    assert "ZeroDivisionError: oops" in saving.error.why


def test_a_listener_that_fails_does_not_fail_the_save(tmp_path, monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)

    def listener(kind: str, data: Mapping[str, Any]) -> None:
        raise ValueError(kind)

    saving = FolderStore(tmp_path, on_event=listener).save(make_state(1), wait=True)
    assert saving.is_durable
    assert saving.error is None
    assert [str(item.exc_value) for item in seen] == ["checkpoint_saved"]


def test_an_old_one_that_cannot_be_removed_is_told(tmp_path, monkeypatch):
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    told = Told()
    store = FolderStore(tmp_path, keep=1, on_event=told)
    store.save(make_state(1), wait=True)
    monkeypatch.setattr(disk, "discard", refuse)
    assert store.save(make_state(2), wait=True).error is None
    assert told.kinds[1:] == ["checkpoint_saved", "checkpoint_not_removed"]
    assert told[-1][1]["path"].endswith("step-000000001")


def test_a_reader_looks_again_when_the_run_replaced_what_it_saw(tmp_path, monkeypatch):
    store = FolderStore(tmp_path, keep=1)
    store.save(make_state(1), wait=True)
    real, calls = read.read_state, []

    def read_late(path: Path, part: str = "") -> State:
        if not calls:  # between looking and reading, the run saves the next and removes this one
            calls.append(path)
            store.save(make_state(2), wait=True)
        return real(path, part)

    monkeypatch.setattr(read, "read_state", read_late)
    assert_same(read.load(tmp_path).state, make_state(2))


def test_reading_makes_nothing(tmp_path):
    with pytest.raises(UserError, match="no checkpoint"):
        FolderStore(tmp_path / "nowhere").load()
    assert visible(tmp_path) == []


def test_a_folder_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="Cannot look for checkpoints"):
        FolderStore(tmp_path / "file").load()


def opened_below(folder):
    """What this process has open there; elsewhere threads of other tests may be at work."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return sorted(path for path in found if path.startswith(str(folder)))


def test_no_descriptor_is_left_open(tmp_path, monkeypatch):
    store = FolderStore(tmp_path, keep=1)
    store.save(make_state(1), wait=True)
    before = opened_below(tmp_path)
    for at in (0, 5, 9, 12):
        with monkeypatch.context() as patch:
            fail_at(patch, at, errno.EIO)
            store.save(make_state(2), wait=True)
        store.load()
    assert opened_below(tmp_path) == before

"""What was acknowledged is there: after kill -9 at any point, on a full disk, and after power loss."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.foreign import write_weights
from shoal.checkpoint.state import State
from shoal.checkpoint.store import FolderStore
from shoal.spec.errors import UserError
from shoal.testing.store_contract import assert_same, make_state

WRITER = Path(__file__).with_name("checkpoint_writer.py")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")


def run_writer(*args: object) -> list[dict[str, Any]]:
    command = [sys.executable, str(WRITER), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_nothing_lost(found: list[dict[str, Any]]) -> None:
    for item in found:
        assert item["loaded"] >= item["acknowledged"], item
        assert item["same"], item
        assert item["skipped"] == 0, item  # no half-written checkpoint was ever to be seen
        assert item["left"] == [], item


def test_killed_at_every_call_of_a_save(tmp_path: Path):
    found = run_writer("killed", tmp_path / "checkpoints")
    assert len(found) > 30
    assert {item["loaded"] for item in found} == {2, 3}
    assert not found[-1]["killed"]
    assert_nothing_lost(found)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_killed_at_every_system_call_of_a_save(tmp_path: Path):
    found = run_writer("traced", tmp_path / "checkpoints", 40)
    if any("cannot" in item for item in found):
        pytest.skip(f"strace may not attach here: {found[0]['cannot']}")
    assert sum(item["killed"] for item in found) > 30
    assert_nothing_lost(found)


@contextmanager
def writing(folder: Path, keep: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(WRITER), "write", str(folder), "1000000", str(keep)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            yield writer
        finally:
            writer.kill()


def drain(writer: subprocess.Popen[str], before: int) -> int:
    """The last step acknowledged by a writer that has been stopped; `before` if it said nothing new."""
    assert writer.stdout is not None
    os.set_blocking(writer.stdout.fileno(), False)
    said = b""
    while chunk := _read_some(writer.stdout.fileno()):
        said += chunk
    os.set_blocking(writer.stdout.fileno(), True)
    return int(said.split()[-1]) if said else before


def _read_some(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""


def stop(writer: subprocess.Popen[str]) -> None:
    writer.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, writer.pid, os.WSTOPPED)


def test_others_may_look_while_it_writes_and_nothing_is_lost_when_it_dies(tmp_path: Path):
    """Frozen at random moments, often within a save: others find its last word and leave its files alone."""
    chance = random.Random(1)
    with writing(tmp_path, keep=2) as writer:
        assert os.read(writer.stdout.fileno(), 2) == b"1\n"
        acknowledged = 1
        for _ in range(15):
            time.sleep(chance.uniform(0.01, 0.05))
            stop(writer)
            acknowledged = drain(writer, acknowledged)
            loaded = FolderStore(tmp_path).load()
            assert acknowledged <= loaded.state.step <= acknowledged + 1
            assert_same(loaded.state, make_state(loaded.state.step))
            assert writer.poll() is None
            writer.send_signal(signal.SIGCONT)
        time.sleep(0.05)
        stop(writer)
        acknowledged = drain(writer, acknowledged)
        writer.kill()
    assert FolderStore(tmp_path).load().state.step >= acknowledged > 1
    assert not [name for name in os.listdir(tmp_path) if name.startswith((".writing", ".removing"))]


@contextmanager
def mounted(where: Path, *options: str) -> Iterator[Path]:
    where.mkdir()
    done = subprocess.run(["mount", *options, str(where)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


@needs_root
def test_a_full_disk_costs_nothing_but_the_save(tmp_path: Path):
    told: list[tuple[str, Any, float]] = []
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=4m", "tmpfs") as disk:
        store = FolderStore(disk, on_event=lambda kind, data: told.append((kind, data, time.perf_counter())))
        big = State(step=2, tensors={"model/a": torch.zeros(1_500_000)})
        store.save(make_state(1), wait=True)
        # First seen before a byte is written; then, with the space taken meanwhile, in the middle of writing.
        for _ in range(2):
            started = time.perf_counter()
            saving = store.save(big, wait=True)
            assert "ENOSPC" in saving.error.why
            assert told[-1][0] == "checkpoint_failed"
            assert told[-1][2] - started < 2
            assert "--log-dir" in told[-1][1]["hint"]
            assert_same(store.load().state, make_state(1))
            assert sorted(os.listdir(disk)) == [".lock", "step-000000001"]
            big = State(step=2, tensors={"model/a": torch.zeros(700_000), "optimizer/a": torch.zeros(300_000)})
            (disk / ".lock").write_bytes(bytes(1 << 20))
        (disk / ".lock").write_bytes(b"")
        assert store.save(make_state(3), wait=True).is_durable
        for format in ("safetensors", "state_dict", "dcp"):
            with pytest.raises(UserError, match="Cannot write weights") as caught:
                write_weights({"a": torch.zeros(2_000_000)}, disk / "weights", format)
            assert "ENOSPC" in caught.value.why
        assert sorted(os.listdir(disk)) == [".lock", "step-000000001", "step-000000003"]


@needs_root
def test_a_read_only_disk_can_be_read_and_says_so_when_written(tmp_path: Path):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "tmpfs") as disk:
        FolderStore(disk).save(make_state(1), wait=True)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        store = FolderStore(disk)
        saving = store.save(make_state(2), wait=True)
        assert "EROFS" in saving.error.why
        assert_same(store.load().state, make_state(1))


@pytest.mark.slow
@needs_root
@pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="mkfs.ext4 is not installed")
def test_power_loss_loses_nothing_that_was_acknowledged(tmp_path: Path):
    """Stop the writer, copy the disk's image, mount the copy: that is what a machine would find after power loss.

    The page cache survives kill -9, so only this shows that acknowledged means durable.
    """
    image, copy = Path("/dev/shm") / f"shoal-{os.getpid()}.img", Path("/dev/shm") / f"shoal-{os.getpid()}.copy"
    chance = random.Random(2)
    try:
        with image.open("wb") as file:
            file.truncate(64 << 20)
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        with mounted(tmp_path / "disk", "-o", "loop", str(image)) as disk, writing(disk / "run", keep=3) as writer:
            assert os.read(writer.stdout.fileno(), 2) == b"1\n"
            acknowledged = 1
            for number in range(20):
                time.sleep(chance.uniform(0.02, 0.3))
                stop(writer)
                acknowledged = drain(writer, acknowledged)
                shutil.copyfile(image, copy)
                writer.send_signal(signal.SIGCONT)
                with mounted(tmp_path / f"copy-{number}", "-o", "loop", str(copy)) as found:
                    loaded = FolderStore(found / "run").load()
                    assert loaded.state.step >= acknowledged
                    assert loaded.skipped == ()
                    assert_same(loaded.state, make_state(loaded.state.step))
            writer.kill()
            writer.wait()
    finally:
        image.unlink(missing_ok=True)
        copy.unlink(missing_ok=True)

"""A process that saves checkpoints and says so, for tests that kill it. Not a test itself.

write FOLDER COUNT KEEP     save steps 1..COUNT; print each step once its save is durable
killed FOLDER               sweep: die at every system call of a save in turn; print what was found after each
traced FOLDER LIMIT         the same with the kernel's own system calls, through strace
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import torch

from shoal.checkpoint import disk
from shoal.checkpoint.state import digest
from shoal.checkpoint.store import FolderStore
from shoal.testing.store_contract import make_state
from shoal.testing.system_calls import FaultyOs

SYSCALLS = ("openat", "write", "fsync", "rename", "mkdir", "unlinkat", "flock")


def write(folder: Path, count: int, keep: int) -> None:
    store = FolderStore(folder, keep=keep)
    for step in range(1, count + 1):
        if store.save(make_state(step), wait=True).is_durable:
            os.write(1, f"{step}\n".encode())


def inspect(folder: Path, acknowledged: int) -> dict[str, object]:
    """What a run that starts after the crash finds. Opening the store also clears what was left behind."""
    store = FolderStore(folder)
    loaded = store.load()
    is_same = digest(loaded.state.tensors) == digest(make_state(loaded.state.step).tensors)
    left = [name for name in os.listdir(folder) if name.startswith((".writing", ".removing"))]
    return {
        "acknowledged": acknowledged,
        "loaded": loaded.state.step,
        "same": is_same,
        "skipped": len(loaded.skipped),
        "left": left,
    }


def prepare(folder: Path) -> None:
    """Two checkpoints to begin with, so that the next save also removes one."""
    shutil.rmtree(folder, ignore_errors=True)
    store = FolderStore(folder, keep=2)
    for step in (1, 2):
        store.save(make_state(step), wait=True)


def save_in_child(folder: Path, at: int, go: int | None = None) -> tuple[int, int]:
    """Fork a child that saves step 3 and says so; returns its pid and where it says so."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        if go is not None:
            os.read(go, 1)
        else:
            disk.os = FaultyOs(at=at, act=lambda name: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[assignment]
        saving = FolderStore(folder, keep=2).save(make_state(3), wait=True)
        os.write(tell, b"3" if saving.is_durable else b"0")
        os._exit(0)
    os.close(tell)
    return pid, told


def finish(pid: int, told: int) -> tuple[int, bool]:
    """The step the child acknowledged (2 was there before), and whether it was killed."""
    said = os.read(told, 1)
    os.close(told)
    _, status = os.waitpid(pid, 0)
    return int(said or b"2"), os.WIFSIGNALED(status)


def killed(folder: Path) -> None:
    for at in range(1, 1000):
        prepare(folder)
        acknowledged, was_killed = finish(*save_in_child(folder, at))
        print(json.dumps({"at": at, "killed": was_killed, **inspect(folder, acknowledged)}), flush=True)
        if not was_killed:
            return


def traced(folder: Path, limit: int) -> None:
    for call in SYSCALLS:  # strace counts each kind of call by itself
        for at in range(1, limit + 1):
            prepare(folder)
            found = trace_one(folder, call, at)
            print(json.dumps({"call": call, "at": at, **found}), flush=True)
            if not found.get("killed"):
                break


def trace_one(folder: Path, call: str, at: int) -> dict[str, object]:
    wait, go = os.pipe()
    pid, told = save_in_child(folder, at, wait)
    inject = [f"--trace={call}", f"--inject={call}:signal=KILL:when={at}"]
    tracer = subprocess.Popen(["strace", "-f", "-p", str(pid), *inject], stderr=subprocess.PIPE, text=True)
    first = tracer.stderr.readline()
    if "attached" not in first:
        os.kill(pid, signal.SIGKILL)
    os.write(go, b"x")
    acknowledged, was_killed = finish(pid, told)
    tracer.communicate()
    os.close(wait)
    os.close(go)
    if "attached" not in first:
        return {"cannot": first}
    return {"killed": was_killed, **inspect(folder, acknowledged)}


if __name__ == "__main__":
    torch.set_num_threads(1)  # no pool of threads, so that forking is safe
    mode, folder, *numbers = sys.argv[1:]
    {"write": write, "killed": killed, "traced": traced}[mode](Path(folder), *map(int, numbers))

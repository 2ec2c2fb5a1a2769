"""A process that saves checkpoints and says so, for those who stop, kill and fence it.

    python -m shoal.testing.checkpoint_writer write FOLDER COUNT KEEP GENERATION
        save steps 1..COUNT; print each step once its save is durable, and `fenced` where it is refused
    python -m shoal.testing.checkpoint_writer killed FOLDER KEEP
        sweep: die at every call of the store into the system in turn; print what was found after each
    python -m shoal.testing.checkpoint_writer traced FOLDER KEEP GENERATION STRIDE
        the same at every (STRIDE-th) system call the kernel sees, through strace; also while it draws a fence
    python -m shoal.testing.checkpoint_writer failed FOLDER KEEP ERROR STRIDE
        the same, except that the call fails once, with this number of an error, and the process goes on
    python -m shoal.testing.checkpoint_writer stopped FOLDER STRIDE SAVES
        the same, except that the process is stopped there; generation 1 takes over; then it goes on. SAVES is 1 if
        generation 1 saves step 4 before that (and thereby clears what the other has half written), else 0

What is printed is JSON, an object a line.
"""

import collections
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shoal.checkpoint import disk
from shoal.checkpoint.fence import Stale
from shoal.checkpoint.state import digest
from shoal.checkpoint.store import FolderStore
from shoal.testing.store_contract import make_state
from shoal.testing.system_calls import FaultyOs

KEEP_ALL = 9
DISK_CALLS = ("close", "fsync", "getdents64", "mkdir", "openat", "rename", "rmdir", "statfs", "unlinkat", "write")


def write(folder: Path, count: int, keep: int, generation: int) -> None:
    """Save one after the other, and tell each."""
    store = FolderStore(folder, keep=keep, generation=generation)
    for step in range(1, count + 1):
        saving = store.save(make_state(step, generation=generation), wait=True)
        if saving.is_durable:
            os.write(1, f"{step}\n".encode())
        elif isinstance(saving.error, Stale):
            os.write(1, b"fenced\n")
            return


def inspect(folder: Path, generation: int, acknowledged: int) -> dict[str, object]:
    """What a run that starts after the crash finds. Opening the store also clears what was left behind."""
    store = FolderStore(folder, generation=generation)
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


def prepare(folder: Path, keep: int) -> None:
    """As many checkpoints as are kept, but at most two, the last of step 2."""
    shutil.rmtree(folder, ignore_errors=True)
    store = FolderStore(folder, keep=keep)
    for step in range(max(1, 3 - keep), 3):
        store.save(make_state(step), wait=True)


def save_in_child(folder: Path, keep: int, generation: int, at: int = 0, go: int | None = None) -> tuple[int, int]:
    """Fork a child that saves step 3 and says so; returns its pid and where it says so.

    It waits for a byte from `go`, or dies at the store's call number `at`. With a generation it fences first.
    """
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        if go is not None:
            os.read(go, 1)
        else:
            vars(disk)["os"] = FaultyOs(at=at, act=lambda name: os.kill(os.getpid(), signal.SIGKILL))
        store = FolderStore(folder, keep=keep, generation=0)
        if generation:
            store.fence(generation)
        saving = store.save(make_state(3), wait=True)
        os.writev(tell, [b"3" if saving.is_durable else b"0"])  # not `write`, which is made to fail
        store.close()
        os.writev(tell, [b"3" if saving.is_durable else b"0"])
        os._exit(0)
    os.close(tell)
    return pid, told


def finish(pid: int, told: int) -> tuple[str, bool]:
    """What the child said after its save and once more after closing the store, and whether it was killed."""
    said = ""
    while chunk := os.read(told, 9):
        said += chunk.decode()
    _, status = os.waitpid(pid, 0)
    return said, os.WIFSIGNALED(status)


def acknowledged_by(said: str) -> int:
    """The newest step anybody may count on: 2 was there before."""
    return 3 if "3" in said else 2


def killed(folder: Path, keep: int) -> None:
    """Die at every call the store makes."""
    for at in range(1, 1000):
        prepare(folder, keep)
        pid, told = save_in_child(folder, keep, 0, at)
        said, was_killed = finish(pid, told)
        os.close(told)
        tell({"at": at, "killed": was_killed, **inspect(folder, 0, acknowledged_by(said))})
        if not was_killed:
            return


def traced(folder: Path, keep: int, generation: int, stride: int) -> None:
    """Die at every system call, by name and number, that one save was seen to make."""
    for number, (call, at) in enumerate(find_points(folder, keep, generation)):
        if number % stride == 0:
            prepare(folder, keep)
            said, was_killed = trace(folder, keep, generation, f"--inject={call}:signal=KILL:when={at}")
            found = inspect(folder, generation, acknowledged_by(said))
            tell({"call": call, "at": at, "killed": was_killed, **found})


def failed(folder: Path, keep: int, error: int, stride: int) -> None:
    """Let every call that touches the disk fail once."""
    points = [point for point in find_points(folder, keep, 0) if point[0] in DISK_CALLS]
    for call, at in points[::stride]:
        prepare(folder, keep)
        said, _ = trace(folder, keep, 0, f"--inject={call}:error={errno.errorcode[error]}:when={at}")
        tell({"call": call, "at": at, "said": said, **inspect(folder, 0, acknowledged_by(said))})


def stopped(folder: Path, stride: int, saves: int) -> None:
    """Stop after every system call, let another generation take over, and go on.

    Two threads may make the call with that number: the one is the first stop, the other the second.
    """
    for call, at in find_points(folder, KEEP_ALL, 0)[::stride]:
        for turn in (0, 1):
            prepare(folder, 2)
            with traced_child(folder, KEEP_ALL, 0, f"--inject={call}:signal=STOP:when={at}") as (pid, told):
                before = take_over_at(pid, turn, folder, bool(saves))
                said = os.read(told, 9).decode()
            if before is not None:
                tell({"call": call, "at": at, "said": said, "before": before, **look_after(folder)})


def take_over_at(pid: int, turn: int, folder: Path, saves: bool) -> int | None:
    """Follow a child to its end; at its stop number `turn` take over. None if it did not stop so often."""
    before, num_stops = None, 0
    while os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1]):
        if num_stops == turn:
            before = take_over(folder, saves)
        num_stops += 1
        os.kill(pid, signal.SIGCONT)
    return before


def take_over(folder: Path, saves: bool) -> int:
    """Be the next generation: fence, and save step 4 if asked to; returns the step that a reader finds then."""
    with FolderStore(folder, keep=KEEP_ALL) as store:
        assert store.fence(1)
        assert not saves or store.save(make_state(4), wait=True).is_durable
        return store.load().state.step


def look_after(folder: Path) -> dict[str, object]:
    """What is there after the stopped one ended: the step a reader takes, and whether step 3 counts."""
    store = FolderStore(folder)
    return {
        "loaded": store.load().state.step,
        "counts": [not entry.problem for entry in store.list() if entry.step == 3],
        "left": [name for name in os.listdir(folder) if name.startswith((".writing", ".removing"))],
    }


def find_points(folder: Path, keep: int, generation: int) -> list[tuple[str, int]]:
    """(system call, number) of all that a save makes. strace counts each call, and each thread, by itself."""
    prepare(folder, keep)
    with tempfile.NamedTemporaryFile("r") as log:
        trace(folder, keep, generation, "-o", log.name)
        found = re.findall(r"^(\d+) +(\w+)\(", log.read(), re.MULTILINE)
    most: dict[str, int] = {}
    for (_, call), count in collections.Counter(found).items():
        most[call] = max(count, most.get(call, 0))
    return [(call, at) for call, count in sorted(most.items()) for at in range(1, count + 1)]


def trace(folder: Path, keep: int, generation: int, *options: str) -> tuple[str, bool]:
    """Save step 3 in a child under strace; returns what it said and whether it was killed."""
    with traced_child(folder, keep, generation, *options) as (pid, told):
        return finish(pid, told)


@contextmanager
def traced_child(folder: Path, keep: int, generation: int, *options: str) -> Iterator[tuple[int, int]]:
    """A child that saves step 3 under strace: its pid, and where it says so. The caller waits for it."""
    wait, go = os.pipe()
    pid, told = save_in_child(folder, keep, generation, go=wait)
    tracer = subprocess.Popen(["strace", "-f", "-p", str(pid), *options], stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    first = tracer.stderr.readline()
    if "attached" not in first:
        os.kill(pid, signal.SIGKILL)
        tell({"cannot": first})
        sys.exit(0)
    try:
        os.write(go, b"x")
        yield pid, told
    finally:
        tracer.communicate()
        for descriptor in (wait, go, told):
            os.close(descriptor)


def tell(found: dict[str, object]) -> None:
    print(json.dumps(found), flush=True)


MODES: dict[str, Callable[..., None]] = {
    "write": write,
    "killed": killed,
    "traced": traced,
    "failed": failed,
    "stopped": stopped,
}


if __name__ == "__main__":
    torch.set_num_threads(1)  # no pool of threads, so that forking is safe
    mode, place, *numbers = sys.argv[1:]
    MODES[mode](Path(place), *map(int, numbers))

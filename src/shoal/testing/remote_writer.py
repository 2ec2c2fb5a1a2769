"""Saves by URL in processes that die: at every call that changes something there in turn, before it and after it.

    python -m shoal.testing.remote_writer URL STRIDE

For each (STRIDE-th) point a child saves steps 1 and 2, then step 3, and kills itself there; another child looks what
is left, and saves step 4. What was found is printed as JSON, an object a line. The process that forks them does not
talk to the store itself: its client has threads, which do not survive a fork.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint import remote
from shoal.checkpoint.state import digest
from shoal.checkpoint.store import FolderStore
from shoal.files import Url, locate
from shoal.testing.store_contract import make_state

MAX_POINTS = 500


CHANGES = ("call_s3", "close", "mv", "open", "pipe_file", "rm", "rm_file")
"""Calls that change what others see; a file appears when it is closed. At any other the death is that of the next."""


class Dying:
    """A file system that kills this process at point `at`; there is one before and one after each of `CHANGES`."""

    def __init__(self, fs: Any, at: int, passed: "list[str] | None" = None) -> None:
        self._fs, self._at, self._passed = fs, at, [] if passed is None else passed

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._fs, name)
        if name not in CHANGES:
            return found

        def call(*args: Any, **options: Any) -> Any:
            self._pass(name)
            result = found(*args, **options)
            self._pass(name)
            return Dying(result, self._at, self._passed) if name == "open" else result

        return call

    def _pass(self, name: str) -> None:
        self._passed.append(name)
        if len(self._passed) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def in_child(work: Callable[[], object]) -> tuple[str, bool]:
    """What `work` returns in a child, as JSON (nothing where it was killed), and whether it was."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, json.dumps(work()).encode())
        os._exit(0)
    os.close(writer)
    said = b""
    while chunk := os.read(reader, 65536):
        said += chunk
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    return said.decode(), os.WIFSIGNALED(status)


def save_and_die(url: str, at: int) -> bool:
    place = locate(url)
    assert isinstance(place, Url)
    store = FolderStore(place, keep=2)
    for step in (1, 2):
        assert store.save(make_state(step), wait=True).is_durable
    store.close()
    with FolderStore(Url(place.shown, place.path, Dying(place.fs, at)), keep=2) as dying:
        return dying.save(make_state(3), wait=True).is_durable


def look(url: str) -> dict[str, object]:
    """What a run that starts after the crash finds, and what is left once it has saved."""
    place = locate(url)
    assert isinstance(place, Url)
    with FolderStore(place, keep=2) as store:
        loaded = store.load()
        is_same = digest(loaded.state.tensors) == digest(make_state(loaded.state.step).tensors)
        saved = store.save(make_state(4), wait=True).is_durable
    folders = remote.list_folders(place)
    return {
        "loaded": loaded.state.step,
        "same": is_same,
        "skipped": len(loaded.skipped),
        "saved": saved,
        "steps": [entry.step for entry in store.list()],
        "left": [name for name, files in folders.items() if manifests.NAME not in files],
    }


def sweep(url: str, stride: int) -> None:
    for at in range(1, MAX_POINTS, stride):
        _, was_killed = in_child(lambda at=at: save_and_die(f"{url}/{at}", at))  # type: ignore[misc]
        said, _ = in_child(lambda at=at: look(f"{url}/{at}"))  # type: ignore[misc]
        print(json.dumps({"at": at, "killed": was_killed, **json.loads(said)}), flush=True)
        if not was_killed:
            return


if __name__ == "__main__":
    torch.set_num_threads(1)  # no pool of threads, so that forking is safe
    sweep(sys.argv[1], int(sys.argv[2]))

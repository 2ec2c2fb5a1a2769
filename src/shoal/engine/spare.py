"""A process that has done the slow part of starting, importing torch, and waits to become a worker.

Run by path with the interpreter of the workers, as `python spare.py SOCKET_FD WORKER_FILE`. It is told once, in a
line of JSON and with descriptors beside it, which worker it is to be, and from there on it is one: nothing of the run
is known to it before. If the socket ends, so does it.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

READ_AT_IMPORT = rb"_NUM_THREADS|\b(?:OMP|GOMP|KMP|MKL|OPENBLAS|MALLOC|PYTORCH|TORCH|ATEN|DNNL|ONEDNN)_[A-Z]"
"""Names of variables that torch and the libraries below it read when they are loaded."""


def main(socket_fd: str, worker_file: str) -> None:
    # What lies beside this file is not for imports of others. `worker.py` puts the script's folder in its place.
    sys.path[0] = os.devnull
    worker = load(worker_file)
    worker.end_with_parent()
    with socket.socket(fileno=int(socket_fd)) as channel:
        os.set_inheritable(int(socket_fd), False)
        warm_up(worker)
        order, fds = receive(channel)
    if order is not None:
        become(worker, worker_file, order, fds)


def load(path: str) -> ModuleType:
    """The code of workers, without its name being taken from anyone."""
    spec = importlib.util.spec_from_file_location("worker", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def warm_up(worker: ModuleType) -> None:
    """Import what workers need, and never in front of one that wakes up.

    That is SCHED_BATCH. Being nicer would only spread the same work over a longer time, in which nobody has a spare;
    and who is nice once, and not root, stays so.
    """
    schedule(os.SCHED_BATCH)
    worker.prepare_for_torch()
    gc.disable()
    import_if_there("torch")
    import_if_there("shoal.train.loop")
    gc.freeze()  # none of it will ever be garbage
    gc.enable()
    schedule(os.SCHED_OTHER)


def schedule(policy: int) -> None:
    """Say how this process is to be scheduled, with all threads that libraries have started."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setscheduler(int(thread), policy, os.sched_param(0))
        except OSError:  # forbidden in a sandbox, or the thread has ended
            continue


def import_if_there(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception:  # the worker will meet the same, and say so
        return


def receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """What to become, and the descriptors that belong to it.

    Those of a worker are input, output, control, and in an elastic run the one to be told on.
    """
    data = b""
    fds: list[int] = []
    while not data.endswith(b"\n"):
        part, more, _, _ = socket.recv_fds(channel, 1 << 16, 8, socket.MSG_CMSG_CLOEXEC)
        if not part:
            return None, []
        data += part
        fds += more
    return json.loads(data), fds


def become(worker: ModuleType, worker_file: str, order: dict[str, Any], fds: list[int]) -> None:
    stdin, output, control, *world = fds
    for number, fd in enumerate((stdin, output, output)):
        os.dup2(fd, number)
    for fd in (stdin, output):
        os.close(fd)
    os.chdir(order["working_dir"])
    for name in order["removed"]:
        del os.environ[name]
    for name, value in order["changed"].items():
        os.environ[name] = value
    args = [str(control), "".join(map(str, world)), *order["args"]]
    if is_shadowed(order["args"]) or comes_before_imports(order["args"]):
        for fd in (control, *world):
            os.set_inheritable(fd, True)
        os.execv(sys.executable, [sys.executable, worker_file, *args])
    worker.main(*args)


def is_shadowed(args: list[str]) -> bool:
    """Whether the script would have imported a file of its own in place of something that is imported here."""
    _, _, kind, target, *_ = args
    folder = os.path.dirname(os.path.realpath(target)) if kind == "script" else os.path.realpath(os.getcwd())
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    packages = [name for name in names if os.path.exists(os.path.join(folder, name, "__init__.py"))]
    modules = [name.partition(".")[0] for name in names if name.endswith((".py", ".so"))]
    imported = {name for name in [*packages, *modules] if name in sys.modules}
    return any(place_of(sys.modules[name]) not in (folder, os.path.join(folder, name)) for name in imported)


def comes_before_imports(args: list[str]) -> bool:
    """Whether the script sets variables that libraries read when they are loaded, which they have been."""
    import re

    _, _, kind, target, *_ = args
    if kind != "script":
        return False
    try:
        with open(target, "rb") as file:
            source = file.read()
    except OSError:  # the worker will meet the same, and say so
        return False
    return b"environ" in source and re.search(READ_AT_IMPORT, source) is not None


def place_of(module: ModuleType) -> str:
    return os.path.dirname(os.path.realpath(getattr(module, "__file__", None) or ""))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A process that has imported torch, and of which keepers are forked, with the launchers and workers they start.

Run by path by the service, as `python warm.py SOCKET_FD`, with the variable by which attempts are found as long as it
may become. It never has a second thread, holds no lock and knows of no job. For each attempt it forks a keeper
that nobody waits for; the keeper forks the launcher before it begins, and the launcher its workers, so that each is
the child of whom it would be otherwise. All of it is a shorter way to the same processes: without it they are started
anew. It ends with the service.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.devnull  # what lies beside this file is not for imports

import gc
import runpy
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.engine import seeds, spare, worker
from shoal.engine.env import inherited_env, replace_all
from shoal.service import keeper
from shoal.service.detach import leave
from shoal.service.processes import MARK, Place, find_variable, show_variables

WORKER_FILE = os.path.abspath(worker.__file__)
HEAD = (sys.executable, WORKER_FILE)
FOR_LAUNCHERS = ("shoal.verbs.launching", "shoal.run", "shoal.elastic_run", "shoal.engine.local")
"""By name: the launcher stands above the service, which starts it as a command."""


def main(socket_fd: str) -> int:
    worker.end_with_parent()
    loaded = inherited_env()
    place = find_variable(MARK)
    if place is None:  # a system that does not tell: what is forked here could not be found again
        return 1
    with socket.socket(fileno=int(socket_fd)) as channel:
        os.set_inheritable(int(socket_fd), False)
        spare.warm_up(worker)
        for name in FOR_LAUNCHERS:
            spare.import_if_there(name)
        gc.collect()
        gc.freeze()  # no collection looks at it, in any of the processes: to look would be to copy
        channel.sendall(b"+")
        order = wait_for_order(channel)
    if order is not None:
        keep(order, loaded, place)
    return 0


def wait_for_order(channel: socket.socket) -> dict[str, Any] | None:
    """Returns in each keeper-to-be what it is told, and in this process None when the service has gone."""
    while True:
        order, _ = spare.receive(channel)
        if order is None:
            return None
        pid = os.fork()
        if pid == 0:
            channel.close()
            if os.fork():
                os._exit(0)
            return order
        _, status = os.waitpid(pid, 0)
        channel.sendall(b"-" if status else b"+")


def keep(order: dict[str, Any], loaded: dict[str, str], place: Place) -> None:
    """Be the keeper of an attempt. Its launcher is forked first, while there is nothing that it should not have."""
    folder = Path(order["folder"])
    replace_all(order["env"])
    show_variables(place, {MARK: str(folder)})
    leave(str(folder / "keeper.log"))
    launcher = seeds.sow(HEAD, loaded)
    if isinstance(launcher, seeds.Seed):
        end_as(lambda: keeper.main(folder, launcher))
    else:
        launch(launcher, loaded, place)


def launch(channel: socket.socket, loaded: dict[str, str], place: Place) -> None:
    """Be a launcher, as soon as the keeper says which. Its workers are forked first, for the same reason."""
    order, fds = spare.receive(channel)
    channel.close()
    if order is None:
        return
    output, *locks = fds
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    os.chdir(order["cwd"])
    replace_all(order["env"])
    ready: list[seeds.Seed] = []
    for _ in range(order["num_workers"]):
        seed = seeds.sow(HEAD, loaded, ready)
        if not isinstance(seed, seeds.Seed):
            for lock in locks:
                os.close(lock)
            work(seed, loaded, place)
            return
        ready.append(seed)
    seeds.offer(ready)
    sys.argv = [order["module"], *order["args"]]
    end_as(lambda: run_module(order["module"]))


def run_module(name: str) -> int:
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def work(channel: socket.socket, loaded: dict[str, str], place: Place) -> None:
    """Be a worker, as soon as the launcher says which."""
    order, fds = spare.receive(channel)
    channel.close()
    if order is None:
        return
    replace_all(loaded)
    show_variables(place, {name: order["changed"][name] for name in (MARK, "RANK") if name in order["changed"]})
    seeds.freshen()
    spare.become(worker, WORKER_FILE, order, fds)


def end_as(run: Callable[[], int]) -> None:
    """Run something of ours, and end with its exit code. To take apart all that was imported would copy it first."""
    code = 1
    try:
        code = run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    worker.leave(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

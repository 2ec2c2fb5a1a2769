"""`shoal logs`: the output of all workers of a run, again or still."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TextIO

from shoal.observe.clean import clean
from shoal.observe.console import Console
from shoal.observe.fold import name_ranks
from shoal.observe.log_parts import LogTail, last_log_lines, log_path
from shoal.observe.runs import find_run, is_held, list_logs
from shoal.spec.errors import UserError

POLL_SECONDS = 0.1
BLOCK_BYTES = 1 << 16


def print_logs(
    home: str,
    text: str,
    stream: TextIO,
    *,
    ranks: Iterable[int] = (),
    follow: bool = False,
    num_lines: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """What `shoal logs RUN` does; returns the exit code.

    Shows the last `num_lines` lines of each rank, or all. With `follow` it goes on until the run ends.
    """
    run = find_run(home, text)
    wanted = frozenset(ranks)
    _check(run.path, wanted, is_running=run.status == "running")
    num_workers = run.max_workers or run.num_workers or len(list_logs(run.path)) or 1
    console = Console(stream, num_workers=len(wanted) or num_workers, has_prefix=num_workers > 1)
    tails = _show_what_is_there(run.path, wanted, num_lines, console)
    if follow:
        _follow(run.path, wanted, tails, console, sleep)
    console.close()
    return 0


def _check(run_dir: str, wanted: frozenset[int], *, is_running: bool) -> None:
    there = list_logs(run_dir)
    missing = wanted - there.keys()
    if is_running and not there:
        return
    if missing:
        raise UserError(
            f"There is no log of rank {name_ranks(missing)} in {clean(os.path.basename(run_dir))}.",
            why=f"there are logs of rank {name_ranks(there)}" if there else "no worker of this run wrote anything",
            hint="leave out `--rank` to see all",
        )


def _chosen(run_dir: str, wanted: frozenset[int]) -> list[int]:
    return [rank for rank in list_logs(run_dir) if not wanted or rank in wanted]


def _show_what_is_there(
    run_dir: str, wanted: frozenset[int], num_lines: int | None, console: Console
) -> dict[int, LogTail]:
    """Print the logs so far; returns where each of them was left.

    Logs carry no times. Ranks run in lockstep, so line by line across ranks is close to the order of printing, and
    brings equal lines together.
    """
    tails = {}
    for rank in _chosen(run_dir, wanted):
        path = log_path(run_dir, rank)
        offset = 0
        if num_lines is not None:
            data, end = last_log_lines(path, num_lines)
            offset = end - len(data)
        tails[rank] = LogTail(path, offset)
    _show_news(tails, console)
    return tails


def _show_news(tails: Mapping[int, LogTail], console: Console) -> bool:
    """Print what is new in all logs, a line of each rank in turn; False where nothing is."""
    queues: dict[int, deque[bytes]] = {rank: deque() for rank in tails}
    has_news = False
    while True:
        for rank, tail in tails.items():
            if not queues[rank]:
                queues[rank].extend(tail.read(BLOCK_BYTES).splitlines(keepends=True))
        pending = {rank: queue for rank, queue in queues.items() if queue}
        if not pending:
            return has_news
        has_news = True
        for _ in range(min(map(len, pending.values()))):
            for rank, queue in pending.items():
                console.feed(rank, queue.popleft())


def _follow(
    run_dir: str, wanted: frozenset[int], tails: dict[int, LogTail], console: Console, sleep: Callable[[float], None]
) -> None:
    is_alive = True
    while is_alive:
        # Looked at before the logs: what a run wrote last is read after it ended.
        is_alive = is_held(run_dir)
        for rank in _chosen(run_dir, wanted):
            tails.setdefault(rank, LogTail(log_path(run_dir, rank)))
        if not _show_news(tails, console) and is_alive:
            sleep(POLL_SECONDS)
        console.tick()

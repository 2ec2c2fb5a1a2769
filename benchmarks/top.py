"""What `shoal top` costs while nobody touches it, beside `top` of procps, both at one look a second."""

import contextlib
import json
import os
import pty
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.commands import make_metrics
from benchmarks.harness import check, interleave, ratio, summarize
from shoal.observe.folder import create
from shoal.observe.metrics import MetricsWriter

NUM_LIVE, NUM_RANKS, NUM_ENDED = 4, 2, 10_000
SETTLE_SECONDS, LOOK_SECONDS = 2.0, 5.0
GOAL = "≤ 0.5"


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    num_ended, seconds = (100, 1.0) if is_quick else (NUM_ENDED, LOOK_SECONDS)
    shoal = [sys.executable, "-m", "shoal", "top"]
    with tempfile.TemporaryDirectory() as few, tempfile.TemporaryDirectory() as many:
        make_ended(many, num_ended)
        with training(few), training(many):
            contenders = {
                f"shoal top, {NUM_LIVE} runs": lambda: cost(shoal, few, seconds),
                f"shoal top, {NUM_LIVE} runs and {num_ended:,} ended": lambda: cost(shoal, many, seconds),
            }
            if program := shutil.which("top"):
                contenders["top -d 1"] = lambda: cost([program, "-d", "1"], few, seconds)
            samples = interleave(contenders, rounds)
    measured = {name: summarize([100 * share for share in shares]) for name, shares in samples.items()}
    peer = samples.get("top -d 1")
    return {
        "rows": [
            {"command": name, "% of a core": measured[name], **({"/ top": ratio(shares, peer)} if peer else {})}
            for name, shares in samples.items()
        ],
        "checks": [check(f"{name}, % of a core", measured[name], GOAL) for name in contenders if "shoal" in name],
        "notes": [
            f"processor time over {seconds:g} s on a terminal of 80x24, after {SETTLE_SECONDS:g} s;",
            f"each live run has {NUM_RANKS} ranks with a step every 20 ms",
        ],
        "samples_seconds": samples,
    }


def cost(command: list[str], home: str, seconds: float) -> float:
    """Cores that a program keeps busy on a terminal of its own."""
    env = {**os.environ, "SHOAL_HOME": home, "TERM": "xterm", "LINES": "24", "COLUMNS": "80"}
    master, slave = pty.openpty()
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True)
    os.close(slave)
    threading.Thread(target=drain, args=(master,), daemon=True).start()
    try:
        time.sleep(SETTLE_SECONDS)
        before, began = used(process.pid), time.monotonic()
        time.sleep(seconds)
        if process.poll() is not None:
            raise RuntimeError(f"{command} ended with {process.returncode}")
        return (used(process.pid) - before) / (time.monotonic() - began)
    finally:
        process.kill()
        process.wait()


def drain(master: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(master, 1 << 16):
            pass
    os.close(master)


def used(pid: int) -> float:
    """Seconds of processor time so far, to a nanosecond."""
    folder = Path(f"/proc/{pid}/task")
    return 1e-9 * sum(int((thread / "schedstat").read_text().split()[0]) for thread in folder.iterdir())


@contextlib.contextmanager
def training(home: str) -> Iterator[None]:
    """Runs whose ranks take steps, as far as their folders tell."""
    over, names = threading.Event(), random.Random(1)
    with contextlib.ExitStack() as opened:
        writers = []
        for _ in range(NUM_LIVE):
            facts = {"command": ["shoal", "run", "train.py"], "num_workers": NUM_RANKS}
            folder = opened.enter_context(create(home, "train.py", facts, time.time(), names))
            writers += [opened.enter_context(MetricsWriter(folder.path, rank)) for rank in range(NUM_RANKS)]

        def work() -> None:
            step = 0
            while not over.wait(0.02):
                for writer in writers:
                    writer.write(make_metrics(step, time.time()))
                step += 1

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def make_ended(home: str, count: int) -> None:
    for number in range(count):
        folder = Path(home, "runs", f"ended-{number}")
        (folder / "logs").mkdir(parents=True)
        (folder / "lock").touch()
        facts = {"name": folder.name, "status": "finished", "created": 1e9 + number, "ended": 1e9 + number + 60}
        (folder / "run.json").write_text(
            json.dumps({**facts, "command": ["shoal", "run", "train.py"], "exit_code": 0})
        )

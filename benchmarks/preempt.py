"""How long a job stands still when it is preempted and at once resumed, and where that time goes.

A job of 2 workers trains under a keeper. In each round it is stopped with `stop(..., "preempt")`, and as soon as its
end is seen the next attempt is ordered, as the service would; once with a warm process, of which the service forks
keepers (docs/decisions/0031-a-warm-process.md), and once without, as where it is switched off. **Standstill** is from
the call of `stop` to the first step that the next attempt commits; its parts follow each other without a gap:

- save: from the call until the checkpoint is durable
- end: until workers and launcher are gone, and the end is on disk and seen
- keeper: until the next attempt's keeper has claimed it and begins with its launcher
- launcher: until the launcher has started the workers
- import and load: until the workers have torch and shoal, have made the model and read the checkpoint
- step: until the first step is committed

`import torch` is measured beside it, by itself in a fresh process, in the same rounds. No sample is lost: in each
round the step after is the one that follows the last step before.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import check, ratio, say, summarize, tell_company
from shoal.engine.env import set_all
from shoal.service.attempts import Fork, Orders, look, start, stop
from shoal.service.warming import Warm

NUM_WORKERS = 2
TIMEOUT_SECONDS = 180.0
GOAL_SECONDS = 2.0
PARTS = ("save", "end", "keeper", "launcher", "import and load", "step")
SCRIPT = """
import torch
import shoal

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
data = torch.randn(4096, 64), torch.randint(0, 8, (4096,))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
shoal.Trainer(model, loss, optimizer, data, batch_size=64).fit(steps=10_000_000)
"""


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    samples: dict[str, dict[str, list[float]]] = {
        way: {name: [] for name in ("standstill", *PARTS)} for way in ("warm", "plain")
    }
    imports: list[float] = []
    warm = Warm(lambda: True, quiet_seconds=0.0)
    with contextlib.closing(warm), tempfile.TemporaryDirectory() as name:
        home = Path(name)
        set_all({"SHOAL_HOME": str(home / "home"), "OMP_NUM_THREADS": "1"})
        (home / "job.py").write_text(SCRIPT)
        token = 1
        start(str(home / "jobs"), _orders(home, token), warm.fork)
        try:
            _await_step(home, token, after=5)
            for number in range(rounds):
                for way, fork in (("warm", warm.fork), ("plain", None)):
                    if fork is not None and not warm.wait(TIMEOUT_SECONDS):
                        raise SystemExit("there is no warm process")
                    for _ in range(2):  # the first ends an attempt that was started the other way
                        moments = _preempt(home, token, fork)
                        token += 1
                    for part, (before, after) in zip(PARTS, pairwise(moments), strict=True):
                        samples[way][part].append(after - before)
                    samples[way]["standstill"].append(moments[-1] - moments[0])
                    say(f"preempt, {way}: {number + 1} of {rounds}: {moments[-1] - moments[0]:.2f} s")
                    time.sleep(0.0 if is_quick else 1.0)
                imports.append(_import_seconds())
        finally:
            stop(str(home / "jobs"), "1", token, "cancel")
            _wait(lambda: look(str(home / "jobs"), "1", token).state == "ended")
            _wait(lambda: not look(str(home / "jobs"), "1", token).is_alive)
    rows = [
        {"what": what, **{way: summarize(found[what]) for way, found in samples.items()}}
        for what in ("standstill", *PARTS)
    ]
    standstill = samples["warm"]["standstill"]
    return {
        "rows": [*rows, {"what": "import torch, alone", "plain": summarize(imports)}],
        "more": {
            "how many times faster": [{"than": "plain", "ratio": ratio(samples["plain"]["standstill"], standstill)}]
        },
        "checks": [check("standstill in seconds, warm", summarize(standstill), f"≤ {GOAL_SECONDS:g}")],
        "notes": tell_company(),
        "num_workers": NUM_WORKERS,
    }


def _preempt(home: Path, token: int, fork: Fork | None) -> list[float]:
    """Preempt an attempt and order the next; returns the moments between the parts, in wall time."""
    jobs = str(home / "jobs")
    step = look(jobs, "1", token).step or 0
    asked = time.time()
    stop(jobs, "1", token, "preempt")
    _wait(lambda: look(jobs, "1", token).state == "ended")
    ended, cause = time.time(), look(jobs, "1", token).cause
    if cause != "preempted":
        raise SystemExit(f"the attempt ended otherwise: {cause}")
    start(jobs, _orders(home, token + 1), fork)
    first = _await_step(home, token + 1, after=step)
    events = [json.loads(line) for line in (home / "home/runs/job-1/journal.jsonl").read_text().splitlines()]
    saved = max(each["time"] for each in events if each["kind"] == "checkpoint_saved" and each["time"] < ended)
    started = min(each["time"] for each in events if each["kind"] == "worker_started" and each["time"] > ended)
    resumed = max(each["time"] for each in events if each["kind"] == "resumed" and each["time"] > ended)
    started = min(
        started, resumed
    )  # one that was forked may be ready before the launcher has written that it is there
    launched = look(jobs, "1", token + 1).started_at or ended
    return [asked, saved, ended, launched, started, resumed, first]


def _await_step(home: Path, token: int, after: int) -> float:
    """When the first step was committed by this attempt; it has to be past those that were done before."""
    _wait(lambda: look(str(home / "jobs"), "1", token).state == "running")
    began = look(str(home / "jobs"), "1", token).started_at or 0.0
    rows: list[dict[str, Any]] = []

    def has_begun() -> bool:
        path = home / "home/runs/job-1/metrics-0.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        rows[:] = [row for row in map(_row, lines) if row.get("time", 0.0) > began]
        return len(rows) > 0 and rows[-1]["step"] > after

    _wait(has_begun)
    return float(rows[0]["time"])


def _row(line: str) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except ValueError:  # half a line
        return {}


def _orders(home: Path, token: int) -> Orders:
    return Orders(
        job="1",
        token=token,
        argv=(str(home / "job.py"),),
        cwd=str(home),
        run_name="job-1",
        is_resumed=token > 1,
        min_workers=NUM_WORKERS,
        max_workers=NUM_WORKERS,
        num_workers=NUM_WORKERS,
    )


def _import_seconds() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit("it never came")
        time.sleep(0.01)

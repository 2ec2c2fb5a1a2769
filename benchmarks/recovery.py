"""How long a run stands still when one of its 4 workers is killed, freezes or joins, and what of its time is lost.

**Recovery** is from the kill to the first step that is committed in a World without the dead worker, by any survivor.
In each round an elastic run loses worker after worker: the next kill comes at a random moment once all four are
back, or after a few seconds without that. Beside it, in the same round, torchrun restarts a DDP script after
one kill: from the kill to the first step after the restart, which goes on from a checkpoint of the last step.

**Joining** is what a replacement costs the others: how much later than usual the step after it is committed, as
`shoal explain` tells it, over the median step of that run.

**Freezing** is from SIGSTOP, at a random moment, to the World in which that worker is left behind.

**Effective training time** is of a run that loses a worker every minute: 1 - lost / wall. Lost is what steps around a
change of the World (a loss, or a replacement that joins) took longer than the median step, all added up; wall is from
the first step to the last. `of undisturbed` is stricter: steps done, times the median of steps in the half minute
before a kill, when everybody is there, over wall. It also counts what the replacement's own start takes from the
others' cores.
"""

import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import check, summarize
from shoal.observe.explain import explain

SCRIPTS = Path(__file__).parent / "under_fire"
NUM_WORKERS = 4
KILLS_A_ROUND = 30
FREEZES_A_ROUND = 4
BACK_SECONDS = 6.0
"""How long all are waited for before the next kill."""
MINUTES = 4
EVERY_SECONDS = 60.0
TIMEOUT_SECONDS = 120.0
ENV = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
# torch 2.13: workers that torchrun restarts find the gloo addresses of the dead in the store that they share with its
# agent, and connect in vain for minutes. With a store of their own they restart at once.
TORCHRUN_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    chance = random.Random(0)
    num_kills, num_freezes, minutes = (2, 1, 0.2) if is_quick else (KILLS_A_ROUND, FREEZES_A_ROUND, MINUTES)
    ours: list[float] = []
    joins: list[float] = []
    peers: list[float] = []
    freezes: list[float] = []
    num_full = 0
    for _ in range(rounds):
        seconds, costs, full = measure_kills(num_kills, chance)
        ours += seconds
        joins += costs
        num_full += full
        peers.append(measure_restart(chance))
        freezes += measure_freezes(num_freezes, chance)
    spent = measure_time(minutes, EVERY_SECONDS if not is_quick else 5.0, chance)
    return {
        "rows": [_row("shoal", ours), _row("torchrun restart", peers)],
        "more": {
            "joining and freezing": [
                _more_row("a join, join cost / median step", joins),
                _more_row("a freeze, s until it is left behind", freezes),
            ],
            f"a kill every {EVERY_SECONDS:.0f} s": [spent],
        },
        "checks": [
            check("recovery p50 s", {**summarize(ours), "median": percentile(ours, 50)}, "≤ 0.5"),
            check("recovery p99 s", {**summarize(ours), "median": percentile(ours, 99)}, "≤ 1"),
            check("join cost / median step", summarize(joins), "≤ 1"),
            check("seconds until a frozen worker is left behind", summarize(freezes), "≤ 2"),
            check("effective training time", summarize([spent["effective"]]), "≥ 0.98"),
        ],
        "notes": [
            "seconds from kill -9 to the first step committed after it, median (quartiles);",
            f"all {NUM_WORKERS} workers were back before {num_full} of the {len(ours)} kills of shoal",
        ],
        "samples_seconds": {"shoal": ours, "torchrun restart": peers, "freezes": freezes},
        "samples_join_cost_over_median_step": joins,
    }


def _row(name: str, seconds: list[float]) -> dict[str, Any]:
    row: dict[str, Any] = {"": name, "kills": len(seconds), "recovery s": summarize(seconds)}
    return row | {"p50": percentile(seconds, 50), "p99": percentile(seconds, 99), "max": max(seconds)}


def _more_row(name: str, samples: list[float]) -> dict[str, Any]:
    return {"": name, "count": len(samples), "p50": summarize(samples)["median"], "max": max(samples)}


def percentile(samples: list[float], percent: int) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]


# Ours.


class Run:
    """An elastic run, seen through its folder."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "runs" / "fire"

    def events(self) -> list[dict[str, Any]]:
        journal = self.folder / "journal.jsonl"
        return read_lines(journal) if journal.exists() else []

    def members(self) -> list[tuple[str, int]]:
        """Id and process of everyone in the newest World."""
        events = self.events()
        worlds = [event["data"]["members"] for event in events if event["kind"] == "world"]
        started = {
            f"{event['rank']}.{event['data'].get('incarnation', 0)}": event["data"]["pid"]
            for event in events
            if event["kind"] == "worker_started"
        }
        return [(each, started[each]) for each in (worlds[-1] if worlds else [])]

    def step_times(self) -> list[float]:
        """When each step was first known to be committed, by anyone."""
        first: dict[int, float] = {}
        for line in (line for lines in self.steps_by_worker().values() for line in lines):
            first[line["step"]] = min(line["time"], first.get(line["step"], line["time"]))
        return sorted(first.values())

    def steps_by_worker(self) -> dict[int, list[dict[str, Any]]]:
        paths = self.folder.glob("metrics-*.jsonl")
        return {int(path.stem.partition("-")[2]): read_lines(path) for path in paths}

    def world_times(self) -> list[tuple[float, set[str]]]:
        """When each World began, and the ids of its members."""
        worlds = [event for event in self.events() if event["kind"] == "world"]
        return [(event["time"], set(event["data"]["members"])) for event in worlds]

    def join_costs(self) -> list[float]:
        """What each join cost the others, over the median step. Where a loss came in between, that cannot be told."""
        history = explain(str(self.folder)).history
        assert history is not None
        usual = statistics.median(after - before for before, after in pairwise(self.step_times()))
        return [join.cost_seconds / usual for join in history.joins if join.cost_seconds is not None]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file that others may be writing to, and may be killed while they do."""
    found = []
    for line in path.read_text().splitlines(keepends=True):
        with suppress(json.JSONDecodeError):
            if line.endswith("\n"):
                found.append(json.loads(line))
    return found


@contextmanager
def elastic_run() -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as home:
        command = ["-m", "shoal", "run", "-n", f"1:{NUM_WORKERS}", "--name", "fire", str(SCRIPTS / "trainer.py")]
        with running(command, {"SHOAL_HOME": home}):
            run = Run(Path(home))
            wait_for(lambda: len(run.members()) == NUM_WORKERS, "all workers are there")
            wait_for(lambda: len(run.step_times()) > 5, "steps are taken")
            yield run


def measure_kills(count: int, chance: random.Random) -> tuple[list[float], list[float], int]:
    """Seconds from each kill to the next step, what joins cost, and how many kills found all workers there."""
    kills: list[tuple[float, str]] = []
    num_full = 0
    with elastic_run() as run:
        for _ in range(count):
            num_full += wait_until(lambda: len(run.members()) == NUM_WORKERS, BACK_SECONDS)
            kills.append(strike(run, chance, signal.SIGKILL))
            number = len(kills)
            wait_for(lambda number=number: next_steps(run, kills[number - 1 :])[0] is not None, "it goes on", 0.05)
        wait_for(lambda: len(run.members()) == NUM_WORKERS, "all are back")
        back = time.time()
        wait_for(lambda: run.step_times()[-1] > back, "it goes on with all")
        return [seconds for seconds in next_steps(run, kills) if seconds is not None], run.join_costs(), num_full


def measure_freezes(count: int, chance: random.Random) -> list[float]:
    """Seconds from each SIGSTOP to the World without that worker."""
    freezes: list[tuple[float, str]] = []
    with elastic_run() as run:
        for _ in range(count):
            wait_until(lambda: len(run.members()) == NUM_WORKERS, BACK_SECONDS)
            frozen = strike(run, chance, signal.SIGSTOP)
            wait_for(lambda frozen=frozen: world_without(run, *frozen) is not None, "it is left behind", 0.05)
            freezes.append(frozen)
        found = [world_without(run, *frozen) for frozen in freezes]
    return [world[0] - at for (at, _), world in zip(freezes, found, strict=True) if world is not None]


def strike(run: Run, chance: random.Random, number: signal.Signals) -> tuple[float, str]:
    """Send a signal to a member at a random moment; returns when that was, and the member's id."""
    wait_for(lambda: len(run.members()) > 1, "somebody can be spared")
    time.sleep(chance.uniform(0.0, 0.3))
    member, pid = chance.choice(run.members())
    now = time.time()
    os.kill(pid, number)
    return now, member


def world_without(run: Run, moment: float, member: str) -> tuple[float, set[str]] | None:
    """The first World after a moment that this member is not in: when it began, and who is."""
    return next(((at, ids) for at, ids in run.world_times() if at > moment and member not in ids), None)


def next_steps(run: Run, kills: list[tuple[float, str]]) -> list[float | None]:
    """For each kill, seconds to the first step that a survivor committed in a World without the dead worker.

    None where there is none yet. Survivors are those of that World.
    """
    steps = run.steps_by_worker()
    found: list[float | None] = []
    for killed, member in kills:
        began, ids = world_without(run, killed, member) or (math.inf, set())
        survivors = [int(each.partition(".")[0]) for each in ids]
        times = [line["time"] for worker in survivors for line in steps.get(worker, []) if line["time"] > began]
        found.append(min(times) - killed if times else None)
    return found


def measure_time(minutes: float, every_seconds: float, chance: random.Random) -> dict[str, Any]:
    """What becomes of the time of a run that loses a worker now and then."""
    with elastic_run() as run:
        began, kills = time.time(), []
        while time.time() - began < 60 * minutes:
            time.sleep(every_seconds)
            kills.append(strike(run, chance, signal.SIGKILL)[0])
        time.sleep(every_seconds / 4)
        steps, worlds = run.step_times(), [at for at, _ in run.world_times()]
    steps = [at for at in steps if at > began]
    gaps = [(before, after - before) for before, after in pairwise(steps)]
    usual = statistics.median(gap for _, gap in gaps)
    wall = steps[-1] - steps[0]
    # A World is published between two steps, or in the middle of one that is then done again.
    lost = sum(max(0.0, gap - usual) for at, gap in gaps if any(at <= world < at + gap for world in worlds))
    calm = [gap for at, gap in gaps if any(kill - every_seconds / 2 < at < kill - gap for kill in kills)]
    return {
        "minutes": round(wall / 60, 2),
        "kills": len(kills),
        "lost s": lost,
        "effective": 1 - lost / wall,
        "of undisturbed": len(gaps) * statistics.median(calm) / wall,
        "median step ms": 1e3 * usual,
    }


# torchrun.


def measure_restart(chance: random.Random) -> float:
    """Seconds from a kill to the first step after everybody was started again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pids").mkdir()
        options = ["--standalone", "--nproc-per-node", str(NUM_WORKERS), "--max-restarts", "1000"]
        with running(["-m", "torch.distributed.run", *options, str(SCRIPTS / "ddp.py"), name], TORCHRUN_ENV):
            wait_for(lambda: len(_steps(folder, 0)) > 5, "steps are taken")
            time.sleep(chance.uniform(0.0, 0.3))
            pid = int((folder / "pids" / str(chance.randrange(NUM_WORKERS))).read_text())
            now = time.time()
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: _steps(folder, 1), "it goes on")
            return _steps(folder, 1)[0] - now


def _steps(folder: Path, restarts: int) -> list[float]:
    path = folder / "steps"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    words = [line.split() for line in lines if line.endswith("\n")]
    return [float(at) for _, at, count in words if int(count) >= restarts]


# Both.


@contextmanager
def running(command: list[str], env: dict[str, str]) -> Iterator[None]:
    """A command, for as long as it is needed. A launcher that is asked to end ends its workers."""
    nowhere = subprocess.DEVNULL
    process = subprocess.Popen(
        [sys.executable, *command], env={**os.environ, **ENV, **env}, stdin=nowhere, stdout=nowhere, stderr=nowhere
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(TIMEOUT_SECONDS)


def wait_for(condition: Callable[[], Any], what: str, pause: float = 0.1) -> None:
    if not wait_until(condition, TIMEOUT_SECONDS, pause):
        raise TimeoutError(f"Waited {TIMEOUT_SECONDS:.0f} s in vain until {what}.")


def wait_until(condition: Callable[[], Any], seconds: float, pause: float = 0.1) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True

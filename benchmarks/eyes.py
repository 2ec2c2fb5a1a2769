"""What everything that is kept of a run costs, against TensorBoard's SummaryWriter and W&B offline, in one loop.

4 workers under a launcher that samples the machine. A step is a sleep of 20 ms, so that all of them fit on few cores,
and then it is written down: the step's 11 numbers, and 10 of the user's own. Contenders take turns in every worker.
Beside the step's time, which a busy machine blurs, stand the time that the loop itself spends in those calls, and the
processor time of all threads and of processes that a contender has started. Then 2,000 points a second, one a call.

**A Trainer**: the same with a real training of 4 workers, whose loss sleeps 20 ms. *On* is `shoal run` with all that
it does by itself (metrics, journal, progress, diagnosing, alerts, samples of the machine), ten numbers of the user's
own a step, and an exporter (`--to csv`). *Off* are the same processes, which write nothing down, with launcher and
exporter stopped. They take turns of two seconds within a run: on, off, off, on and so on. Each on is compared with
the off beside it, and the median over all pairs counts. Stamping who came when cannot be off.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

import shoal
from benchmarks.harness import check, ratio, say, summarize
from benchmarks.turns import launch, process_group
from shoal.engine.env import read_worker
from shoal.observe.points import Point, PointsWriter
from shoal.observe.recorder import Recorder
from shoal.spec.event import StepMetrics
from shoal.train import own_numbers

STEP_SECONDS = 0.02
NUM_WORKERS = 4
STEPS = 50
POINTS_PER_SECOND = 2000
POINT_SECONDS = 3.0
MANY_POINTS = 240_000
"""So many fill four parts of the file. After as many, each part that is sealed makes another be folded."""
TAGS = (
    *("train/loss", "train/lr", "train/epoch", "train/grad_norm", "speed/samples_per_second", "speed/step_seconds"),
    *("time/compute", "time/communicate", "time/wait", "time/load", "time/other"),
)
TRAINING = ("-m", "benchmarks.watched.train")
WARM_STEPS, TURNS, TURN_STEPS = 60, 12, 80
TRAINING_SECONDS = 300.0
OWN = tuple(f"own/{number}" for number in range(10))


class Contender:
    """One way of writing steps and points down. Does nothing."""

    def step(self, number: int) -> None:
        """Write down a step and ten numbers of the user's own."""

    def point(self, number: int) -> None:
        """Write down one number."""

    def flush(self) -> None:
        """Have what was written on its way to the disk."""

    def processor_seconds(self) -> float:
        """What this process has used so far, and processes that belong to the contender."""
        return time.process_time()

    def close(self) -> None:
        """Write the rest."""


class Shoal(Contender):
    """Journal, metrics, progress for the launcher, and `shoal.log`."""

    def __init__(self) -> None:
        facts = read_worker()
        self._recorder = Recorder(facts.run_dir, facts.rank, facts.world_size, facts.control_fd)
        own_numbers.log_to(facts.run_dir, facts.rank, self._recorder)

    def step(self, number: int) -> None:
        self._recorder.at_step = number
        self._recorder.step(make_metrics(number))
        shoal.log(dict.fromkeys(OWN, 0.5 * number))

    def point(self, number: int) -> None:
        shoal.log(point=0.5 * number)

    def flush(self) -> None:
        assert self._recorder._metrics is not None
        self._recorder._metrics.flush()
        writer = own_numbers._book()._writer
        if writer is not None:
            writer.flush()

    def close(self) -> None:
        own_numbers._book().close()
        self._recorder.close()


class TensorBoard(Contender):
    """`torch.utils.tensorboard.SummaryWriter`, a scalar a call, as its documentation shows it."""

    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(folder)  # type: ignore[no-untyped-call]

    def step(self, number: int) -> None:
        for tag in (*TAGS, *OWN):
            self._writer.add_scalar(tag, 0.5 * number, number)

    def point(self, number: int) -> None:
        self._writer.add_scalar("point", 0.5 * number, number)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb(Contender):
    """W&B in offline mode, one `log` a step with all numbers. Its service is a process of its own, and counts."""

    def __init__(self, folder: str) -> None:
        import psutil
        import wandb

        before = {child.pid for child in psutil.Process().children(recursive=True)}
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
        self._run = wandb.init(mode="offline", dir=folder, project="eyes", settings=settings)
        self._service = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]

    def step(self, number: int) -> None:
        self._run.log(dict.fromkeys((*TAGS, *OWN), 0.5 * number))

    def point(self, number: int) -> None:
        self._run.log({"point": 0.5 * number})

    def processor_seconds(self) -> float:
        import psutil

        total = time.process_time()
        for process in self._service:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def close(self) -> None:
        self._run.finish()


def make_metrics(number: int) -> StepMetrics:
    return StepMetrics(
        step=number,
        time=time.time(),
        epoch=number // 100,
        loss=1.0 / (number + 1),
        num_samples=32,
        global_samples=128,
        lr=0.1,
        compute=0.0161,
        communicate=0.0021,
        wait=0.0011,
        load=0.0004,
        other=0.0003,
        waited_for=1,
        grad_norm=1.5,
    )


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    say("eyes: steps")
    results = launch(compete, NUM_WORKERS, rounds, is_quick)
    say("eyes: points")
    points = launch(compete_in_points, 1, rounds, is_quick)[0]
    say("eyes: a Trainer")
    trained = measure_training(rounds, is_quick)
    costs = {
        what: summarize(
            [100 * (on / off - 1) for on, off in zip(trained[what]["on"], trained[what]["off"], strict=True)]
        )
        for what in ("median", "mean")
    }
    names = list(results[0]["steps"])
    steps = {name: _over_workers(results, "steps", name) for name in names}
    calls = {name: _over_workers(results, "calls", name) for name in names}
    used = {name: _over_workers(results, "processor", name) for name in names}
    added = {
        name: summarize([100 * (a / b - 1) for a, b in zip(steps[name], steps["off"], strict=True)]) for name in names
    }
    paced = {name: [100 * max(0.0, value) for value in points["paced"].get(name, [0.0])] for name in names}
    rows = [
        {
            "what": name,
            "ms a step": summarize([1e3 * value for value in steps[name]]),
            "in the loop, µs": summarize([1e6 * value for value in calls[name]]),
            "processor, µs a step": summarize([1e6 * max(0.0, value) for value in _less(used[name], used["off"])]),
            "2,000 points/s, % of a core": summarize(paced[name]),
        }
        for name in names
    ]
    folded = summarize([100 * POINTS_PER_SECOND * value for value in points["folded"]])
    processor = summarize([100 * value / STEP_SECONDS for value in _less(used["shoal"], used["off"])])
    in_loop = summarize([100 * value / STEP_SECONDS for value in calls["shoal"]])
    peers = [name for name in names if name not in ("off", "shoal")]
    return {
        "rows": rows,
        "more": {
            "a Trainer of 4 workers, a step": [
                {
                    "what": way,
                    "median, ms": summarize([1e3 * value for value in trained["median"][way]]),
                    "mean, ms": summarize([1e3 * value for value in trained["mean"][way]]),
                    "processor of all its processes, ms": summarize(
                        [1e3 * value for value in trained["processor"][way]]
                    ),
                }
                for way in ("on", "off")
            ],
            "times what shoal takes": [
                {
                    "peer": name,
                    "in the loop": ratio(calls[name], calls["shoal"]),
                    "processor": ratio(_less(used[name], used["off"]), _less(used["shoal"], used["off"])),
                }
                for name in peers
            ],
            "launcher, with a sample of the machine every second": [
                {"% of a core": summarize([100 * value for value in results[0]["launcher"]])}
            ],
        },
        "checks": [
            check("a Trainer's median step with everything on, % more than off", costs["median"], "≤ 1"),
            check("a Trainer's mean step with everything on, % more than off", costs["mean"], "≤ 1"),
            check("step time with everything on, % more than off", added["shoal"], "≤ 1"),
            check("time in the loop, % of 20 ms", in_loop, "≤ 1"),
            check("processor time, % of 20 ms", processor, "≤ 1"),
            check("2,000 points/s, % of a core", summarize(paced["shoal"]), "≤ 5"),
            check("the same with sealing and folding", folded, "≤ 5"),
        ],
        "notes": [
            f"median over rounds (quartiles), mean over {NUM_WORKERS} workers; a turn is {STEPS} steps of 20 ms,",
            "of which the median counts, for others use the machine too; means are in the JSON; processor is beyond",
            f"that of sleeping, with W&B's service; folding: {MANY_POINTS:,} points as fast as they go",
            *(f"{name} is not installed and was left out" for name in ("tensorboard", "wandb") if name not in names),
        ],
        "added_percent": added,
        "samples_training_seconds": trained,
        "samples_seconds": steps,
        "samples_mean_seconds": {name: _over_workers(results, "means", name) for name in names},
        "samples_call_seconds": calls,
        "samples_processor_seconds": used,
        "samples_points": points,
    }


def measure_training(rounds: int, is_quick: bool) -> dict[str, dict[str, list[float]]]:
    """A step of a Trainer: what is measured of it -> on and off -> one a turn; a pair has the same place in both."""
    found: dict[str, dict[str, list[float]]] = {
        what: {"on": [], "off": []} for what in ("median", "mean", "processor")
    }
    for _ in range(rounds):
        for turn in train(2 if is_quick else TURNS, 3 if is_quick else TURN_STEPS):
            for what, values in found.items():
                values[turn["way"]].append(turn[what])
    return found


def train(num_turns: int, num_steps: int) -> list[dict[str, Any]]:
    """One run of four workers, turn by turn: seconds a step, the mean over workers, and processor seconds of all."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "SHOAL_HOME": f"{folder}/home", "OMP_NUM_THREADS": "1"}
        options = ["-n", str(NUM_WORKERS), "--threads", "1", "--to", "csv", "--log-dir", f"{folder}/run"]
        script = [*TRAINING, folder, *map(str, (WARM_STEPS, num_turns, num_steps))]
        command = [sys.executable, "-m", "shoal", "run", *options, *script]
        quiet = subprocess.DEVNULL
        root = Path(__file__).parents[1]
        subprocess.run(command, cwd=root, env=env, stdin=quiet, stdout=quiet, timeout=TRAINING_SECONDS, check=True)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(NUM_WORKERS)]
    return [
        {
            "way": turns[0]["way"],
            "median": statistics.mean(statistics.median(turn["seconds"]) for turn in turns),
            "mean": statistics.mean(statistics.mean(turn["seconds"]) for turn in turns),
            "processor": sum(turn["processor"] for turn in turns),
        }
        for turns in zip(*ranks, strict=True)
    ]


def _over_workers(results: list[dict[str, Any]], what: str, name: str) -> list[float]:
    """The mean over the workers, round by round."""
    return [sum(values) / len(values) for values in zip(*(result[what][name] for result in results), strict=True)]


def _less(values: list[float], base: list[float]) -> list[float]:
    return [max(1e-9, value - other) for value, other in zip(values, base, strict=True)]


@contextlib.contextmanager
def contenders() -> Iterator[Mapping[str, Contender]]:
    """All that can be had here, by name."""
    with tempfile.TemporaryDirectory() as folder:
        made: dict[str, Contender] = {"off": Contender(), "shoal": Shoal()}
        for name, make in (("tensorboard", TensorBoard), ("wandb", Wandb)):
            with contextlib.suppress(ImportError):
                os.makedirs(os.path.join(folder, name))
                made[name] = make(os.path.join(folder, name))
        try:
            yield made
        finally:
            for each in made.values():
                each.close()


def compete(rounds: int, is_quick: bool) -> dict[str, Any]:
    """One worker: everybody's turns. What a step took, what of it the loop spent writing, and processor time."""
    num_steps = 3 if is_quick else STEPS
    with process_group(), contenders() as found:
        samples: dict[str, dict[str, list[float]]] = {
            what: {name: [] for name in found} for what in ("steps", "means", "calls", "processor")
        }
        launcher: list[float] = []
        for number in range(rounds + 1):
            began, used = time.monotonic(), launcher_seconds()
            for name, contender in rotate(found, number):
                dist.barrier()  # all workers write in the same way at the same time
                for what, value in take_turn(contender, num_steps, number * num_steps).items():
                    samples[what][name].append(value)
            launcher.append((launcher_seconds() - used) / (time.monotonic() - began))
    first = 0 if is_quick else 1  # the first round is for warming up
    return {
        **{what: {name: values[-rounds:] for name, values in each.items()} for what, each in samples.items()},
        "launcher": launcher[first:],
    }


def rotate(found: Mapping[str, Contender], number: int) -> list[tuple[str, Contender]]:
    """Each round begins with another."""
    items = list(found.items())
    return items[number % len(items) :] + items[: number % len(items)]


def take_turn(contender: Contender, num_steps: int, first: int) -> dict[str, float]:
    inside, used, seconds = 0.0, contender.processor_seconds(), []
    end = time.perf_counter()
    for number in range(first, first + num_steps):
        began = end
        time.sleep(STEP_SECONDS)
        before = time.perf_counter()
        contender.step(number)
        end = time.perf_counter()
        inside += end - before
        seconds.append(end - began)
    contender.flush()
    used = contender.processor_seconds() - used
    return {
        "steps": statistics.median(seconds),
        "means": sum(seconds) / num_steps,
        "calls": inside / num_steps,
        "processor": used / num_steps,
    }


def launcher_seconds() -> float:
    """What the process that started this one has used."""
    with open(f"/proc/{os.getppid()}/stat", encoding="ascii", errors="replace") as file:
        words = file.read().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def compete_in_points(rounds: int, is_quick: bool) -> dict[str, Any]:
    """2,000 points a second by each: parts of a core; and processor seconds a point of ours where files fill up."""
    seconds = 0.05 if is_quick else POINT_SECONDS
    paced: dict[str, list[float]] = {}
    with contenders() as found:
        for number in range(rounds):
            silent = pace(found["off"], seconds)
            for name, contender in rotate(found, number):
                if name != "off":
                    paced.setdefault(name, []).append(pace(contender, seconds) - silent)
    return {"paced": paced, "folded": [time_folding(200 if is_quick else MANY_POINTS) for _ in range(rounds)]}


def pace(contender: Contender, seconds: float) -> float:
    """The part of a core that a contender takes, in bursts of a hundredth of a second."""
    num_bursts, size = max(1, int(100 * seconds)), POINTS_PER_SECOND // 100
    began, used = time.perf_counter(), contender.processor_seconds()
    for burst in range(num_bursts):
        for number in range(size):
            contender.point(burst * size + number)
        time.sleep(max(0.0, began + (burst + 1) / 100 - time.perf_counter()))
    elapsed = time.perf_counter() - began
    contender.flush()
    used = contender.processor_seconds() - used
    # A machine that is too busy for the pace has written as many points, in more time.
    return used / elapsed * (elapsed / seconds)


def time_folding(count: int) -> float:
    """Processor seconds of one point, in a file that has been folded before: what months of points take."""
    from shoal.observe.points import check_values

    with tempfile.TemporaryDirectory() as folder:
        began = 0.0
        with PointsWriter(folder, 0) as writer:
            for number in range(2 * count):
                if number == count:
                    began = time.process_time()
                writer.write(Point(step=number, time=1.7e9 + number, values=check_values({"point": 0.5 * number})))
                if number % 10_000 == 0:
                    writer.flush()
        return (time.process_time() - began) / count

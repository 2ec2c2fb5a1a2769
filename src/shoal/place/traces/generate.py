"""More workloads like Pollux's: jobs drawn from the Philly trace as its authors drew theirs, with other seeds."""

import random
from collections.abc import Iterable
from pathlib import Path

from shoal.place.traces.table import read_rows

START_HOUR, NUM_HOURS = 2, 8
MAX_GPU_HOURS = 1000
Drawn = tuple[str, int, str, int, int]


def read_requests(workloads: Iterable[Path]) -> dict[str, list[tuple[int, int]]]:
    """The workers and batch sizes that users of each application asked for, as often as they did."""
    asked: dict[str, list[tuple[int, int]]] = {}
    for path in workloads:
        for row in read_rows(path, ("application", "num_replicas", "batch_size")):
            pair = row.whole("num_replicas", least=1), row.whole("batch_size", least=1)
            asked.setdefault(row.text("application"), []).append(pair)
    return asked


def draw_workload(
    philly: Path, requests: dict[str, list[tuple[int, int]]], *, seed: int, num_jobs: int = 160
) -> list[Drawn]:
    """(name, time, application, workers, batch) of so many jobs over 8 hours.

    The GPU time of a Philly job decides its application: small ones are cifar10 or ncf, then deepspeech2 or bert,
    then yolov3, and the largest imagenet. When it came in its day decides when it comes here.
    """
    dice = random.Random(seed)
    jobs = []
    for row in read_rows(philly, ("timestamp", "duration", "gpu_time")):
        hours = row.number("gpu_time") / 3600
        clock = row.text("timestamp").split(" ")[1].split(":")
        at = ((int(clock[0]) - START_HOUR) % 24) * 3600 + int(clock[1]) * 60 + int(clock[2])
        if row.number("duration") >= 60 and hours < MAX_GPU_HOURS and at < NUM_HOURS * 3600:
            jobs.append((at, hours))
    drawn = sorted(dice.sample(jobs, num_jobs))
    rows = []
    for number, (at, hours) in enumerate(drawn):
        if hours < 1:
            name = dice.choice(("cifar10", "ncf"))
        elif hours < 10:
            name = dice.choice(("deepspeech2", "bert"))
        else:
            name = "yolov3" if hours < 100 else "imagenet"
        rows.append((f"{name}-{number}", at, name, *dice.choice(requests[name])))
    return rows


def write_workload(path: Path, rows: Iterable[Drawn]) -> None:
    lines = ["name,time,application,num_replicas,batch_size", *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")

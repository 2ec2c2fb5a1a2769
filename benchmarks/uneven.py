"""Three workers of speeds 1, 2 and 4, of which one changes on the way: how much of their summed speed is used.

A worker's speed is a time for each sample, of which it sleeps what computing the loss leaves: three workers that only
computed would share two cores. DDP gives everyone the same number of samples. The gradient is right if the parameters
are those of one process: that is checked with `exact=True`, to the last bit, in a run of its own.
"""

import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness import check, summarize

BEFORE, AFTER = (1.0, 2.0, 4.0), (1.0, 2.0, 1.0)
CHANGE_STEP, NUM_STEPS = 50, 100
SETTLED_STEPS = 15
"""Steps after the start, and after the change, that do not count for the speed."""
BATCH, UNIT_SECONDS = 448, 0.001
"""Samples of a step, and what one of them takes a worker of speed 1."""
TIMEOUT_SECONDS = 100
MOST_HUNG = 3


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    scale = 10 if is_quick else 1
    contenders = {"DDP": _ddp, "shoal": _shoal}
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    hung = dict.fromkeys(contenders, 0)
    for _ in range(rounds):
        for name, command in contenders.items():
            times, hung[name] = measure(command, scale, hung[name])
            samples[name].append(judge(times, scale))
    is_same = _digest(1, scale) == _digest(3, scale)

    def column(name: str, key: str) -> dict[str, float]:
        return summarize([each[key] for each in samples[name]])

    keys = ("before", "after", "steps to follow")
    return {
        "rows": [{"": name, **{key: column(name, key) for key in keys}} for name in contenders],
        "checks": [
            check("before the change, of the summed speed", column("shoal", "before"), "≥ 0.95"),
            check("after the change", column("shoal", "after"), "≥ 0.95"),
            check("steps until the change is followed", column("shoal", "steps to follow"), "≤ 5"),
            check("parameters of one process, to the last bit", summarize([float(is_same)]), "≥ 1"),
        ],
        "notes": [
            f"speeds {BEFORE}, then {AFTER} from step {CHANGE_STEP} on; {BATCH} samples a step.",
            "speed: samples a second over those of all workers together. Steps to follow: until the first step",
            "that is within 5 % of the best that the new speeds allow.",
            f"runs that hung and were made again: {hung}.",
        ],
        "samples_seconds": samples,
    }


def judge(times: list[float], scale: int) -> dict[str, float]:
    """What part of the summed speed was used, from the moments at which steps ended."""
    seconds = [after - before for before, after in pairwise(times)]
    unit = UNIT_SECONDS / scale
    best = {speeds: BATCH * unit / sum(speeds) for speeds in (BEFORE, AFTER)}
    before, after = seconds[SETTLED_STEPS : CHANGE_STEP - 1], seconds[CHANGE_STEP + SETTLED_STEPS :]
    changed = seconds[CHANGE_STEP - 1 :]
    followed = next((n for n, each in enumerate(changed) if each <= 1.05 * best[AFTER]), len(changed))
    return {
        "before": len(before) * best[BEFORE] / sum(before),
        "after": len(after) * best[AFTER] / sum(after),
        "steps to follow": float(followed),
    }


def measure(command: Any, scale: int, num_hung: int) -> tuple[list[float], int]:
    """When each step ended. A run that hangs is made again, and counted."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            _run(command(folder), folder, scale)
        except subprocess.TimeoutExpired:
            if num_hung >= MOST_HUNG:
                raise
            return measure(command, scale, num_hung + 1)
        return [float(line) for line in Path(folder, "ended").read_text().split()], num_hung


def _digest(num_workers: int, scale: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        _run(_shoal(folder, num_workers, "exact"), folder, 10 * scale)
        return Path(folder, "digest").read_text()


def _run(command: list[str], folder: str, scale: int) -> None:
    env = {**os.environ, "SHOAL_HOME": folder, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env["UNEVEN_SCALE"] = str(scale)
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", *command], env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])


def _shoal(folder: str, num_workers: int = len(BEFORE), how: str = "shoal") -> list[str]:
    return ["shoal", "run", "-n", str(num_workers), "--quiet", __file__, folder, how]


def _ddp(folder: str) -> list[str]:
    return _shoal(folder, how="DDP")


# What the workers do.


def work(folder: str, how: str) -> None:
    import torch
    from torch import nn
    from torch.nn import functional

    torch.manual_seed(0)
    rank, unit = int(os.environ["RANK"]), UNIT_SECONDS / int(os.environ["UNEVEN_SCALE"])
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    data = torch.randn(NUM_STEPS * BATCH, 16), torch.randint(0, 4, (NUM_STEPS * BATCH,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ended: list[float] = []

    def loss(model: Any, batch: Any) -> Any:
        began, speed = time.perf_counter(), (BEFORE if len(ended) < CHANGE_STEP else AFTER)[rank]
        value = functional.cross_entropy(model(batch[0]), batch[1])
        time.sleep(max(0.0, began + len(batch[0]) * unit / speed - time.perf_counter()))
        return value

    if how == "DDP":
        kept = _train_ddp(model, loss, optimizer, data, ended)  # noqa: F841
    else:
        import shoal

        with shoal.Trainer(model, loss, optimizer, data, batch_size=BATCH, exact=how == "exact") as trainer:
            for batch in trainer:
                trainer.step(batch)
                ended.append(time.perf_counter())
            if rank == 0:
                Path(folder, "digest").write_text(trainer.digest())
    if rank == 0:
        Path(folder, "ended").write_text("\n".join(map(str, ended)))
    if how == "DDP":  # else its destructor may wait forever for gloo's thread, which waits for the interpreter
        os._exit(0)


def _train_ddp(model: Any, loss: Any, optimizer: Any, data: Any, ended: list[float]) -> Any:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    copy = DistributedDataParallel(model)
    share = BATCH // size
    for step in range(NUM_STEPS):
        at = step * BATCH + rank * share
        optimizer.zero_grad()
        loss(copy, [part[at : at + share] for part in data]).backward()
        optimizer.step()
        ended.append(time.perf_counter())
    dist.barrier()
    return copy


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2])

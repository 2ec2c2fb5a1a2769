"""Layers cut between two workers: `shoal.tensor(2)` against DTensor's `parallelize_module` over gloo, and one worker.

The same GPT, batch and optimizer, one thread a worker. It is written so that DTensor can cut it: with projections of
their own for queries, keys and values, and shapes that follow from local tensors. Each contender is a run of its own,
and they take turns. A step is as long as the slower worker says. Memory is what a worker has after its steps beyond
what it had before it made the model (proportional set size: what two workers share counts half for each), and the
most it had on the way.
"""

import gc
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.harness import check, ratio, summarize

WAYS = {"one worker": 1, "shoal.tensor(2)": 2, "DTensor": 2}
GOAL = "≤ 1"
NUM_WARM, NUM_STEPS = 3, 12
TIMEOUT_SECONDS = 300
LENGTH, VOCABULARY, SAMPLES = 128, 512, 8


class Block(nn.Module):
    """Attention and a little network, with projections of their own for queries, keys and values."""

    def __init__(self, width: int, head_width: int = 64) -> None:
        super().__init__()
        self.head_width = head_width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen, shape = self.norm1(x), (*x.shape[:2], -1, self.head_width)
        q, k, v = (layer(seen).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    told: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in list(WAYS)[:: 1 if number % 2 else -1]:
            told[way].append(measure(way, is_quick))
    samples = {way: [each["seconds"] for each in runs] for way, runs in told.items()}
    held = {way: [each["held"] for each in runs] for way, runs in told.items()}
    time_ratio = ratio(samples["shoal.tensor(2)"], samples["DTensor"])
    memory_ratio = ratio(held["shoal.tensor(2)"], held["DTensor"])
    width, num_layers = size_of(is_quick)
    return {
        "rows": [
            {
                "way": way,
                "ms a step": summarize([1e3 * seconds for seconds in samples[way]]),
                "MB a worker": summarize(held[way]),
                "most MB": summarize([each["peak"] for each in runs]),
            }
            for way, runs in told.items()
        ],
        "checks": [
            check("step: shoal.tensor(2) / DTensor", time_ratio, GOAL),
            check("memory: shoal.tensor(2) / DTensor", memory_ratio, GOAL),
        ],
        "notes": [
            f"GPT of {num_layers} layers, width {width}, {SAMPLES} rows of {LENGTH} tokens a step, AdamW, 1 thread"
        ],
        "samples_seconds": samples,
    }


def size_of(is_quick: bool) -> tuple[int, int]:
    return (128, 2) if is_quick else (768, 6)


def measure(way: str, is_quick: bool) -> dict[str, float]:
    """The slower worker's seconds a step, and the larger one's MB."""
    with tempfile.TemporaryDirectory() as home:
        number = str(WAYS[way])
        command = ["run", "-n", number, "--quiet", __file__, home, way, *(["quick"] if is_quick else [])]
        env = {**os.environ, "SHOAL_HOME": home, "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), env.get("PYTHONPATH", "")])
        subprocess.run(
            [sys.executable, "-m", "shoal", *command],
            env=env,
            check=True,
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
        )
        told = [json.loads(path.read_text()) for path in Path(home).glob("told-*.json")]
    return {name: max(each[name] for each in told) for name in ("seconds", "held", "peak")}


# One worker.


def work(folder: str, way: str, is_quick: bool) -> None:
    importlib.import_module("torch.distributed.tensor.parallel" if way == "DTensor" else "shoal.train.loop")
    before = megabytes()
    torch.manual_seed(0)
    num_steps = NUM_WARM + (3 if is_quick else NUM_STEPS)
    model, rows = GPT(*size_of(is_quick)), torch.randint(0, VOCABULARY, (SAMPLES * num_steps, LENGTH + 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3) if way != "DTensor" else None
    seconds = train_dtensor(model, rows) if optimizer is None else train_ours(model, rows, optimizer, way)
    told = {
        "seconds": statistics.median(seconds[NUM_WARM:]),
        "held": HELD[0] - before,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before,
    }
    Path(folder, f"told-{os.environ['RANK']}.json").write_text(json.dumps(told))


HELD: list[float] = []
"""What a worker has when its last step is done and nothing has been given back."""


def megabytes() -> float:
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return float(next(line for line in lines if line.startswith("Pss:")).split()[1]) / 1024


def timed(step: Callable[[Any], object], batches: Any) -> list[float]:
    seconds = []
    for batch in batches:
        began = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - began)
    HELD.append(megabytes())
    return seconds


def train_ours(model: nn.Module, rows: torch.Tensor, optimizer: torch.optim.Optimizer, way: str) -> list[float]:
    import shoal

    split = shoal.tensor(2) if WAYS[way] > 1 else None
    # As a loop by hand does, each step is one piece.
    with shoal.Trainer(model, loss, optimizer, rows, batch_size=SAMPLES, split=split) as trainer:
        return timed(trainer.step, trainer)


def train_dtensor(model: nn.Module, rows: torch.Tensor) -> list[float]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    plan = {name: ColwiseParallel() for name in ("q", "k", "v", "up")} | {
        name: RowwiseParallel() for name in ("out", "down")
    }
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)

    def step(batch: torch.Tensor) -> None:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = timed(step, rows.split(SAMPLES))
    dist.destroy_process_group()
    return seconds


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], "quick" in sys.argv[3:])

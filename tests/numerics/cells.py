"""Every Split times every Sync times every precision, on three kinds of models, against one process.

`python -m tests.numerics.cells` tries all of them and writes what it found to docs/matrix.json, and as a table into
docs/strategies.md. Workers run this file as a script.
"""

import json
import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.checkpoint.store import FolderStore
from shoal.run import Keep, run_job
from shoal.spec.job import Job
from tests.numerics import models, pipelines

ROOT = Path(__file__).parents[2]
FOUND, PAGE = ROOT / "docs" / "matrix.json", ROOT / "docs" / "strategies.md"
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"

STEPS = 50
PRECISIONS = ("float32", "bf16")
TRAINED = [(kind, precision) for kind in ("mlp", "cnn", "gpt") for precision in PRECISIONS]
NUM_COPIES = 2
SPLITS = {"none": 1, "tensor:2": 2, "pipeline:2": 2, "tensor:2+pipeline:2": 4}
"""With how many parts a copy has."""
SYNCS = ("all_reduce", "sharded:optimizer", "sharded:gradients", "sharded:parameters", "local:1")
CELLS = [(split, sync) for split in SPLITS for sync in SYNCS]

TOLERANCES = {"float32": 1e-5, "bf16": 5e-2}
"""How far parameters may be from those of one process, as a part of the largest of their tensor.

Sums in another order differ in the last bits of a float32, 6e-8, in each step, and 50 steps of SGD with momentum
let that grow. In bf16 a forward rounds to 4e-3, and parts of a layer or of a batch round otherwise than the whole.
"""


def train(kind: str, precision: str, *, is_local: bool, **settings: Any) -> list[float]:
    """Fifty steps and a checkpoint; returns the losses.

    Copies that learn by themselves take one batch each in a step. With SGD the mean of what they come to is what all
    samples together come to, if they agree after each step and no gradient is clipped.
    """
    model, data, loss = pipelines.make(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    settings |= {"batch_size": 40, "shards": NUM_COPIES if is_local else 4, "threads": 1, "balance": False}
    settings |= {"precision": "bf16"} if precision == "bf16" else {}
    settings |= {} if is_local else {"max_norm": 1.0}
    with shoal.Trainer(model, loss, optimizer, data, **settings) as trainer:
        losses = models.run_until(trainer, STEPS)
        trainer.save(wait=True)
    return losses


def train_all(split: str, sync: str, *, is_local: bool) -> None:
    """Every kind in every precision: what a worker does."""
    for kind, precision in TRAINED:
        losses = train(kind, precision, is_local=is_local, split=split, sync=sync)
        assert all(map(math.isfinite, losses))


def run_cell(split: str, sync: str, folder: Path) -> Path:
    """Let workers train all models in this cell; returns the folder of the run."""
    return _run(split, sync, NUM_COPIES * SPLITS[split], folder, is_local=sync.startswith("local"))


def run_alone(folder: Path, *, is_local: bool) -> Path:
    """One process, with the batches of copies that learn by themselves or of those that do not."""
    return _run("none", "all_reduce", 1, folder, is_local=is_local)


def _run(split: str, sync: str, num_workers: int, folder: Path, *, is_local: bool) -> Path:
    args = (split, sync, "local" if is_local else "")
    job = Job(script=__file__, args=args, num_workers=num_workers, env={"PYTHONPATH": str(ROOT)})
    outcome = run_job(job, keep=Keep(dir=str(folder)), is_quiet=True)
    if outcome.exit_code:
        raise AssertionError((folder / "logs" / "0.log").read_text()[-2000:])
    return folder


def deviations(found: Path, expected: Path) -> dict[str, float]:
    """Of each model and precision, how far parameters and buffers are from what is expected."""
    result = {}
    for number, (kind, precision) in enumerate(TRAINED):
        ours, theirs = (load_saved(folder, number) for folder in (found, expected))
        named = [key for key in theirs if key.startswith("model/")]
        result[f"{kind}-{precision}"] = max(distance(ours[key], theirs[key]) for key in named)
    return result


def load_saved(folder: Path, number: int) -> Mapping[str, torch.Tensor]:
    """What the trainer of that number saved."""
    return FolderStore(folder / (f"checkpoints-{number}" if number else "checkpoints")).load().state.tensors


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(1e-6))


# The page.


def render(found: dict[str, Any]) -> str:
    """The matrix as a table: the largest deviation of three models in each cell."""
    head = "| | " + " | ".join(f"`{sync}`" for sync in SYNCS) + " |"
    lines = [head, "|---" * (len(SYNCS) + 1) + "|"]
    for split in SPLITS:
        for precision in PRECISIONS:
            cells = [_cell(found["cells"][f"{split} {sync}"], precision) for sync in SYNCS]
            lines.append(f"| `{split}`, {precision} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(cell: dict[str, float], precision: str) -> str:
    return f"{max(value for name, value in cell.items() if name.endswith(precision)):.0e}"


def write_page(found: dict[str, Any]) -> str:
    """The page with the matrix in its place."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{render(found)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = {is_local: run_alone(folder / f"alone-{is_local}", is_local=is_local) for is_local in (False, True)}
        cells = {}
        for number, (split, sync) in enumerate(CELLS):
            done = run_cell(split, sync, folder / str(number))
            cells[f"{split} {sync}"] = found = deviations(done, alone[sync.startswith("local")])
            print(f"{number + 1}/{len(CELLS)} {split} {sync}: {found}", flush=True)
    result = {"steps": STEPS, "copies": NUM_COPIES, "tolerances": TOLERANCES, "cells": cells}
    FOUND.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(write_page(result))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train_all(sys.argv[1], sys.argv[2], is_local=sys.argv[3] == "local")
    else:
        main()

"""Trains with everything at once in one cell after the other: recomputed blocks, small pieces, clipping, a break.

Workers run this file as a script: with the step to come to, and the cells.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from shoal.observe import metrics
from shoal.run import Keep, run_job
from shoal.spec.job import Job
from tests.numerics import cells, local_simulation, models

BREAK, STEPS = 8, 12
"""Where training is broken off and resumed by new processes, and where it ends."""

MAX_NORM = 0.1
"""A tenth of what gradients of this model have, and less: every step is clipped."""

MICROBATCH_SIZE = 5
"""Less than the 12 samples of a shard, and no divisor of them: pieces are of unequal sizes."""

LOCAL_SYNCS = ("local:1,overlap=0", "local:4,outer=nesterov,overlap=0")
"""The second is DiLoCo but for its int8, which rounds blocks of a cut tensor otherwise than those of a whole one."""

SYNCS = (*cells.SYNCS[:4], *LOCAL_SYNCS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A way to train: how the model is cut, how its copies agree, and through what."""

    split: str = "none"
    sync: str = "all_reduce"
    transport: str = "auto"

    @property
    def is_local(self) -> bool:
        return self.sync.startswith(("local", "diloco"))

    def __str__(self) -> str:
        return " ".join((self.split, self.sync, *([self.transport] if self.transport != "auto" else [])))


ALONE = Cell()
CELLS = {split: [Cell(split=split, sync=sync) for sync in SYNCS] for split in cells.SPLITS}
# On one host state is divided in shared memory, and parameters exist once: it is messages that divide them.
CELLS["none"] += [Cell(sync=sync, transport="tcp") for sync in cells.SYNCS[1:4]]


def trained(some: Sequence[Cell]) -> list[tuple[Cell, str]]:
    """What a run trains, in its order: the trainer of that number is for this cell, in this precision."""
    return [(cell, precision) for cell in some for precision in cells.PRECISIONS]


def make_trainer(cell: Cell, optimizer: torch.optim.Optimizer, model: nn.Module, **settings: Any) -> shoal.Trainer:
    _, data, loss = models.make("recomputed")
    settings |= {"split": cell.split, "sync": cell.sync, "transport": cell.transport, "threads": 1, "balance": False}
    settings |= {"microbatch_size": MICROBATCH_SIZE, "max_norm": MAX_NORM}
    return shoal.Trainer(model, loss, optimizer, data, batch_size=local_simulation.BATCH_SIZE, **settings)


def train(cell: Cell, precision: str, goal: int) -> list[int]:
    """Train up to that step, from wherever the run is, and save; returns which blocks were recomputed here.

    Copies that train by themselves go on with the optimizer of the first of them, so theirs has no state.
    """
    model, *_ = models.make("recomputed")
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.0 if cell.is_local else 0.9)
    shards = cells.NUM_COPIES if cell.is_local else 4
    with make_trainer(cell, optimizer, model, shards=shards, precision=precision) as trainer:
        recomputed = watch_blocks(model)
        models.run_until(trainer, goal)
        trainer.save(wait=True)
    return sorted(recomputed)


def watch_blocks(model: nn.Module) -> set[int]:
    """The numbers of blocks whose forward was called in the middle of a backward, from now on."""
    recomputed = set[int]()

    def watch(number: int, block: nn.Module) -> None:
        def note(*_: Any) -> None:
            if torch._C._current_graph_task_id() != -1:  # as torch.utils.checkpoint knows where it is
                recomputed.add(number)

        block.register_forward_pre_hook(note)

    blocks = model.get_submodule("blocks")
    for number, block in enumerate(blocks.children()):
        watch(number, block)
    return recomputed


def start(some: Sequence[Cell], num_workers: int, folder: Path, goal: int, *, is_resumed: bool = False) -> list[str]:
    """Let workers train in these cells up to that step; returns what each of them printed, in the newest run."""
    args = (str(goal), json.dumps([asdict(cell) for cell in some]))
    return run_script(__file__, args, num_workers, folder, is_resumed=is_resumed)


def run_script(
    script: str, args: Sequence[str], num_workers: int, folder: Path, *, is_resumed: bool = False
) -> list[str]:
    """Let workers run a file of this package to its end; returns their logs."""
    job = Job(script=script, args=tuple(args), num_workers=num_workers, env={"PYTHONPATH": str(cells.ROOT)})
    outcome = run_job(job, keep=Keep(dir=str(folder), is_resumed=is_resumed), is_quiet=True)
    logs = [(folder / "logs" / f"{rank}.log").read_text() for rank in range(num_workers)]
    assert outcome.exit_code == 0, [log[-2000:] for log in logs]
    return logs


def norms_of(folder: Path, rank: int, some: Sequence[Cell], breaks: Sequence[int]) -> list[list[float]]:
    """Of each trainer of a run, the norms of its gradients before they were clipped, as this rank recorded them.

    Trainers follow each other up to the first of `breaks`, then they do so again up to the next.
    """
    told = [step.grad_norm or 0.0 for step in metrics.read(str(folder))[rank]]
    found: list[list[float]] = [[] for _ in trained(some)]
    for before, goal in zip([0, *breaks], breaks, strict=False):
        for norms in found:
            norms += told[: goal - before]
            del told[: goal - before]
    assert not told, "a step was recorded that nobody knows of"
    return found


def simulate(cell: Cell, precision: str) -> local_simulation.Simulation:
    """What copies that train by themselves come to in plain torch, without a break, and uncut."""
    simulation = local_simulation.Simulation(
        "recomputed", cell.sync, cells.NUM_COPIES, max_norm=MAX_NORM, microbatch_size=MICROBATCH_SIZE
    )
    loss = simulation.loss

    def cast(model: nn.Module, piece: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            result: torch.Tensor = loss(model, piece)
        return result

    simulation.loss = cast
    simulation.run(STEPS)
    return simulation


if __name__ == "__main__":
    until, told = sys.argv[1:]
    for each, way in trained([Cell(**facts) for facts in json.loads(told)]):
        print("RECOMPUTED", json.dumps(train(each, way, int(until))), flush=True)

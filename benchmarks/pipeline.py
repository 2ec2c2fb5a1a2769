"""How long a pipeline waits: a step of 2 stages and 8 micro-batches, against theory and torch.distributed.pipelining.

Theory: each of M micro-batches takes a stage the time c for forward and backward, and S stages need M + S - 1 such
times for a step; (S - 1) / (M + S - 1) of it is the bubble. Handing on takes time as well, measured here by sending
one micro-batch's activations to and fro: t each way, once for each micro-batch and stage. So a step should take
(M + S - 1) (c + t), and the optimizer's update after it. `c` and the update are measured without any pipeline, in
both processes at the same time, by turns with the contenders.
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import shoal
from benchmarks.harness import check, ratio, summarize
from benchmarks.turns import Step, launch, meet_in_memory, process_group, take_turns
from shoal.comm.group import Group

NUM_STAGES, NUM_MICROBATCHES = 2, 8
GOAL = "≤ 1.05"
SLOTS = NUM_MICROBATCHES + NUM_STAGES - 1
EPOCH_STEPS = 64
"""Of the Trainer's data. The others have no epochs, whose beginning takes a millisecond."""


class Block(nn.Module):
    """A little network beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.body(x)
        return out


def make_model(width: int, num_blocks: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(num_blocks)))


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, targets)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return mean_square(model(batch[0]), batch[1])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    results = launch(compete, NUM_STAGES, rounds, is_quick)
    # A step ends with its slowest worker, and so does everything it is made of.
    slowest = {name: [max(pair) for pair in zip(*(r[name] for r in results), strict=True)] for name in results[0]}
    ideal = [
        SLOTS * (c / NUM_MICROBATCHES + t) + u
        for c, t, u in zip(slowest["compute"], slowest["transfer"], slowest["update"], strict=True)
    ]
    rows, checks = [], []
    for name in ("shoal 1f1b", "shoal gpipe", "torch 1f1b", "torch gpipe"):
        waited = [
            1 - (c + u) / step
            for c, u, step in zip(slowest["compute"], slowest["update"], slowest[name], strict=True)
        ]
        against = ratio(slowest[name], ideal)
        rows.append(
            {
                "contender": name,
                "ms a step": summarize([1e3 * second for second in slowest[name]]),
                "waited": summarize(waited),
                "step / ideal": against,
            }
        )
        if name == "shoal 1f1b":
            checks.append(check("shoal 1f1b: step / (theory + transfer + update)", against, GOAL))
    checks.append(check("torch 1f1b / shoal 1f1b", ratio(slowest["torch 1f1b"], slowest["shoal 1f1b"]), "≥ 1"))
    parts = {
        name: summarize([1e3 * second for second in slowest[name]]) for name in ("compute", "update", "transfer")
    }
    return {
        "rows": rows,
        "more": {"ms, measured without a pipeline": [parts]},
        "checks": checks,
        "notes": [
            f"{NUM_STAGES} stages, {NUM_MICROBATCHES} micro-batches, 1 thread a worker, cut in the middle;",
            f"theory's bubble is {(NUM_STAGES - 1) / SLOTS:.1%} of a step; waited = 1 - (compute + update) / step;",
            "torch = torch.distributed.pipelining by hand over gloo: PipelineStage, Schedule1F1B and ScheduleGPipe.",
        ],
        "samples_seconds": slowest,
    }


def compete(rounds: int, is_quick: bool) -> dict[str, list[float]]:
    """One worker: all contenders, and what their steps are made of, take turns."""
    width, samples, num_blocks, steps = (16, 2, 4, 2) if is_quick else (256, 64, 8, 4)
    model = make_model(width, num_blocks)
    source = torch.Generator().manual_seed(1)
    shape = (NUM_MICROBATCHES * samples, width)
    data = torch.randn(*shape, generator=source), torch.randn(*shape, generator=source)
    with process_group() as rank, ExitStack() as opened:
        group = meet_in_memory()
        opened.callback(group.close)
        stage = model[: num_blocks // 2] if rank == 0 else model[num_blocks // 2 :]
        contenders: dict[str, Step | None] = {
            "compute": by_itself(copy.deepcopy(stage), data, rank),
            "update": update_only(copy.deepcopy(stage)),
            "transfer": to_and_fro(group, torch.zeros(samples, width)),
        }
        for name, schedule in (("1f1b", Schedule1F1B), ("gpipe", ScheduleGPipe)):
            contenders[f"torch {name}"] = by_hand(copy.deepcopy(stage), schedule, data, rank)
        for name in ("1f1b", "gpipe"):
            contenders[f"shoal {name}"] = ours(copy.deepcopy(model), name, data, str(num_blocks // 2), opened)
        found = take_turns(contenders, steps, rounds)
        found["transfer"] = [seconds / 2 for seconds in found["transfer"]]
        return found


def by_itself(stage: nn.Module, data: tuple[torch.Tensor, ...], rank: int) -> Step:
    """Forwards and backwards of all micro-batches through one stage that nobody else waits for."""
    inputs, targets = (part.chunk(NUM_MICROBATCHES) for part in data)

    def step() -> None:
        for x, y in zip(inputs, targets, strict=True):
            given = x.detach().requires_grad_(rank > 0)
            out = stage(given)
            if rank > 0:
                mean_square(out, y).backward()
            else:
                torch.autograd.backward(out, y)
        stage.zero_grad(set_to_none=False)

    return step


def update_only(stage: nn.Module) -> Step:
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    return optimizer_of(stage).step


def to_and_fro(group: Group, tensor: torch.Tensor) -> Step:
    """A tensor to the other worker and back, as stages hand on activations and gradients."""
    flat = tensor.view(-1).view(torch.uint8)

    def step() -> None:
        if group.rank == 0:
            group.send(flat, 1)
            group.recv(flat, 1).wait()
        else:
            group.recv(flat, 0).wait()
            group.send(flat, 0)

    return step


def by_hand(stage: nn.Module, schedule: Any, data: tuple[torch.Tensor, ...], rank: int) -> Step:
    """What torch's tutorial writes."""
    optimizer = optimizer_of(stage)
    made = PipelineStage(stage, rank, NUM_STAGES, torch.device("cpu"))
    line = schedule(made, n_microbatches=NUM_MICROBATCHES, loss_fn=mean_square)

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            line.step(data[0])
        else:
            line.step(target=data[1], losses=[])
        optimizer.step()

    return step


def ours(model: nn.Module, schedule: Any, data: tuple[torch.Tensor, ...], cut: str, opened: ExitStack) -> Step:
    split = shoal.pipeline(NUM_STAGES, microbatches=NUM_MICROBATCHES, schedule=schedule, cuts=(cut,))
    size, data = len(data[0]), tuple(part.repeat(EPOCH_STEPS, 1) for part in data)
    trainer = opened.enter_context(
        shoal.Trainer(model, loss, optimizer_of(model), data, batch_size=size, split=split, shards=NUM_MICROBATCHES)
    )

    def endless() -> Iterator[Any]:
        while True:
            yield from trainer

    batches = endless()
    opened.callback(batches.close)  # type: ignore[attr-defined]
    return lambda: trainer.step(next(batches))

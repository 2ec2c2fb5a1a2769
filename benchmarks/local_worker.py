"""One of the two workers of the `local` benchmark, `python -m benchmarks.local_worker JSON`: it answers in JSON."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import shoal
from benchmarks.turns import Ours, Step, plain_step, process_group, without_communication
from benchmarks.workloads import WORKLOADS, Workload
from shoal.demo.text import documentation

LR = 3e-4
SAMPLES = 128
"""Of one worker in a step."""
CONTEXT = 16
"""Bytes that the text model looks at."""
TURN_STEPS = {"DDP": 3, "PowerSGD": 20}


def make_optimizer(parameters: Any, lr: float = LR) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr, fused=True)


def main() -> None:
    spec = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    with process_group():
        found = (speed if spec["kind"] == "speed" else train)(spec)
    print(json.dumps(found), flush=True)


# The time of a step.


def speed(spec: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds a step of each contender, in turns."""
    workload = WORKLOADS["MLP"](spec["is_quick"])
    contenders: dict[str, Step] = {
        "none": without_communication(workload, make_optimizer),
        "DDP": with_ddp(workload, is_power=False),
        "PowerSGD": with_ddp(workload, is_power=True),
    }
    trainers = {
        name: Ours(workload, make_optimizer, 2 * workload.samples, sync=sync, transport="tcp", keep=1)
        for name, sync in spec["ours"].items()
    }
    found: dict[str, list[float]] = {name: [] for name in (*contenders, *trainers)}
    for number in range(-1, spec["rounds"]):
        for name in found:
            if name in trainers:
                seconds = time_rounds(trainers[name], 1 if spec["is_quick"] else 3)
            else:
                seconds = time_steps(contenders[name], 2 if spec["is_quick"] else TURN_STEPS.get(name, 32))
            if number >= 0:
                found[name].append(seconds)
    for ours in trainers.values():
        ours.trainer.close()
    return found


def with_ddp(workload: Workload, *, is_power: bool) -> Step:
    model = wrap(workload.make(), is_power=is_power)
    return plain_step(workload, model, make_optimizer(model.parameters()), workload.samples)


def wrap(model: nn.Module, *, is_power: bool) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1000) if is_power else DistributedDataParallel(model)
    if is_power:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def time_steps(step: Step, num_steps: int) -> float:
    step()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(num_steps):
        step()
    return (time.perf_counter() - began) / num_steps


def time_rounds(ours: Ours, num_rounds: int) -> float:
    """Whole rounds after one that does not count: a message is under way when the clock starts, and when it stops."""
    every = ours.trainer.settings.sync.every
    for _ in range(every):
        ours()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(num_rounds * every):
        ours()
    seconds = (time.perf_counter() - began) / (num_rounds * every)
    ours.trainer.digest()  # take in what is still under way, so that it is not in the way of the next
    return seconds


# Time to loss.


def train(spec: dict[str, Any]) -> dict[str, float]:
    """Train for so many steps; the loss on samples held out, and the seconds that it took."""
    model, data, held_out, loss = TASKS[spec["task"]](64 if spec["is_quick"] else 2048, spec["text"])
    ways: dict[str, Callable[..., float]] = {"DDP": train_ddp, "PowerSGD": train_ddp}
    way = ways.get(spec["way"], train_ours)
    seconds = way(model, data, loss, spec)
    with torch.no_grad():
        total = float(loss(model, held_out))
    return {"loss": total, "seconds": seconds}


def train_ours(model: nn.Module, data: Any, loss: Any, spec: dict[str, Any]) -> float:
    trainer = shoal.Trainer(
        model,
        loss,
        make_optimizer(model.parameters()),
        data,
        batch_size=2 * SAMPLES,
        sync=spec["way"],
        transport="tcp",
        keep=1,
    )
    dist.barrier()
    began = time.perf_counter()
    trainer.fit(steps=spec["steps"])
    seconds = time.perf_counter() - began
    trainer.close()
    return seconds


def train_ddp(model: nn.Module, data: tuple[torch.Tensor, ...], loss: Any, spec: dict[str, Any]) -> float:
    """The samples of each step are a random half for each worker, epoch after epoch, as ours are."""
    wrapped = wrap(model, is_power=spec["way"] == "PowerSGD")
    optimizer = make_optimizer(wrapped.parameters())
    order = torch.empty(0, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(spec["steps"]):
        if order.numel() < 2 * SAMPLES:
            order = torch.randperm(len(data[0]), generator=generator)
        ids, order = order[: 2 * SAMPLES], order[2 * SAMPLES :]
        mine = ids[dist.get_rank() * SAMPLES :][:SAMPLES]
        optimizer.zero_grad()
        loss(wrapped, tuple(part[mine] for part in data)).backward()
        optimizer.step()
    return time.perf_counter() - began


def digits(width: int, text: str | None) -> tuple[nn.Module, Any, Any, Any]:
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = torch.from_numpy(found.data).float() / 16, torch.from_numpy(found.target).long()
    model = layers(64, width, 10)
    return model, (x[:1497], y[:1497]), (x[1497:], y[1497:]), class_loss


def characters(width: int, text: str | None) -> tuple[nn.Module, Any, Any, Any]:
    """The next byte from those before it."""
    if text:
        data = torch.frombuffer(bytearray(Path(text).read_bytes()), dtype=torch.uint8).long() % 128
    else:
        data = documentation().flatten()
    windows = data.unfold(0, CONTEXT + 1, 1)
    x, y = windows[:, :-1].contiguous(), windows[:, -1].contiguous()
    held_out = len(x) // 10
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(128, 48), nn.Flatten(), *layers(48 * CONTEXT, width, 128))
    some = torch.arange(len(x) - held_out, len(x), max(1, held_out // 4096))
    return model, (x[:-held_out], y[:-held_out]), (x[some], y[some]), class_loss


def layers(width_in: int, width: int, width_out: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(width_in, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width_out)
    )


def class_loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


TASKS: dict[str, Callable[[int, str | None], tuple[nn.Module, Any, Any, Any]]] = {
    "digits": digits,
    "text": characters,
}

if __name__ == "__main__":
    main()

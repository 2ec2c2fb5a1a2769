"""DistributedDataParallel and shoal take turns at the same work: `shoal run -n 2 -m shoal.demo.race`."""

import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shoal
from shoal.train.steps import Batch

ROUNDS, STEPS, SAMPLES = 5, 4, 128


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def theirs(data: tuple[torch.Tensor, torch.Tensor], rank: int) -> Callable[[], None]:
    """One step of DistributedDataParallel over gloo, on this worker's part of the batch."""
    model = DistributedDataParallel(make_model())
    optimizer = make_optimizer(model)
    mine = tuple(part[rank * SAMPLES : (rank + 1) * SAMPLES] for part in data)

    def step() -> None:
        optimizer.zero_grad()
        loss(model, mine).backward()  # type: ignore[arg-type]
        optimizer.step()

    return step


def ours(data: tuple[torch.Tensor, torch.Tensor], num_workers: int) -> Callable[[], None]:
    """One step of shoal on the same global batch."""
    model = make_model()
    trainer = shoal.Trainer(model, loss, make_optimizer(model), data, batch_size=SAMPLES * num_workers)

    def batches() -> Iterator[Batch]:
        while True:
            yield from trainer

    endless = batches()

    def step() -> None:
        trainer.step(next(endless))

    return step


def main() -> None:
    dist.init_process_group("gloo")
    rank, num_workers = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    num_samples = SAMPLES * num_workers
    data = (
        torch.randn(num_samples, 784, generator=generator),
        torch.randint(0, 10, (num_samples,), generator=generator),
    )
    racers = {"DistributedDataParallel": theirs(data, rank), "shoal": ours(data, num_workers)}
    times: dict[str, list[float]] = {name: [] for name in racers}
    for _ in range(ROUNDS + 1):
        for name, step in racers.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(STEPS):
                step()
            times[name].append((time.perf_counter() - started) / STEPS)
    if rank == 0:
        pairs = list(zip(*(seconds[1:] for seconds in times.values()), strict=True))
        ratios = sorted(a / b for a, b in pairs)
        for name, seconds in times.items():
            print(f"{name}: {1e3 * statistics.median(seconds[1:]):.1f} ms a step")
        spread = f"rounds from {ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(f"shoal is {statistics.median(ratios):.2f} times as fast as DistributedDataParallel ({spread})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One worker of one contender of the `sharded` benchmark: trains, says where it is, and how long its steps took.

Run by `benchmarks/sharded.py` with torchrun's variables. It prints a line for each mark: `imported`, `made` and
`trained SECONDS...`, and waits for a line after each, so that memory can be looked at.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.workloads import GPT, Block, make_tokens, next_token_loss

Step = Callable[[], object]


def make_model(width: int, num_layers: int, length: int) -> nn.Module:
    torch.manual_seed(0)
    return GPT(256, length, width, num_layers, 8, 0.0)


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> Step:
    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        next_token_loss(model, (rows,)).backward()
        optimizer.step()

    return step


def with_zero_redundancy(model: nn.Module, rows: torch.Tensor) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), torch.optim.AdamW, lr=1e-4, fused=True, parameters_as_bucket_view=True
    )
    return make_step(wrapped, optimizer, rows)


def with_fsdp2(model: nn.Module, rows: torch.Tensor) -> Step:
    """A unit for each layer of the transformer, and one for the rest: what its documentation recommends."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return make_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), rows)


def with_deepspeed(stage: int) -> Callable[[nn.Module, torch.Tensor], Step]:
    def make(model: nn.Module, rows: torch.Tensor) -> Step:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": len(rows),
            "zero_optimization": {"stage": stage, "overlap_comm": True},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

        def step() -> None:
            loss = next_token_loss(engine, (rows,))
            engine.backward(loss)
            engine.step()

        return step

    return make


def with_shoal(**settings: Any) -> Callable[[nn.Module, torch.Tensor], Step]:
    def make(model: nn.Module, rows: torch.Tensor) -> Step:
        import shoal

        everyone = rows.repeat(int(os.environ["WORLD_SIZE"]), 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        trainer = shoal.Trainer(
            model, next_token_loss, optimizer, (everyone,), batch_size=len(everyone), balance=False, **settings
        )

        def batches() -> Any:
            while True:
                yield from trainer

        feed = batches()
        return lambda: trainer.step(next(feed))

    return make


CONTENDERS: dict[str, Callable[[nn.Module, torch.Tensor], Step]] = {
    "ZeroRedundancyOptimizer": with_zero_redundancy,
    "FSDP2": with_fsdp2,
    **{f"DeepSpeed ZeRO-{stage}": with_deepspeed(stage) for stage in (1, 2, 3)},
    "shoal optimizer": with_shoal(sync="sharded:optimizer"),
    "shoal parameters": with_shoal(sync="sharded:parameters"),
}


def mark(*words: object) -> None:
    print(*words, flush=True)
    sys.stdin.readline()


def main() -> None:
    name, width, num_layers, length, samples, steps = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    is_ours = name.startswith("shoal")
    if name.startswith("DeepSpeed"):
        import deepspeed

        deepspeed.init_distributed("gloo")
    elif not is_ours:
        dist.init_process_group("gloo")
    mark("imported")
    (rows,) = make_tokens(length, samples)
    step = CONTENDERS[name](make_model(width, num_layers, length), rows)
    mark("made")
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    mark("trained", *seconds)
    sys.stdout.flush()
    os._exit(0)  # not all contenders leave in peace


if __name__ == "__main__":
    main()

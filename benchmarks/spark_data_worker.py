"""A worker of `spark_data.py` under TorchDistributor: `spark_data_worker.py KIND FOLDER STAMPS`.

Reads Parquet files with pyarrow, all of them or its own half, and writes down when it had finished its first step.
"""

import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset

FEATURES, BATCH = 8, 512


def main(kind: str, folder: str, stamps: str) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    files = sorted(str(path) for path in Path(folder).glob("*.parquet"))
    data = read(files[rank::size] if kind == "own" else files)
    sampler = RandomSampler(data) if kind == "own" else DistributedSampler(data, size, rank)
    loader = DataLoader(data, batch_size=None, sampler=BatchSampler(sampler, BATCH, drop_last=False))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(FEATURES, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs, labels = next(iter(loader))
    (model(inputs).squeeze(1) - labels).square().mean().backward()
    optimizer.step()
    Path(stamps, str(rank)).write_text(repr(time.time()))
    dist.barrier()
    dist.destroy_process_group()


def read(files: list[str]) -> Any:
    table = parquet.read_table(files)
    features = torch.stack([torch.from_numpy(table[f"x{number}"].to_numpy()) for number in range(FEATURES)], 1)
    return TensorDataset(features, torch.from_numpy(table["label"].to_numpy()))


if __name__ == "__main__":
    main(*sys.argv[1:])

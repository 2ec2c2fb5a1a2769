"""One step of DistributedDataParallel, for any launcher that sets torchrun's variables: `ddp.py FOLDER`.

Each worker writes the time at which its step was over to FOLDER/RANK.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    Path(folder, str(dist.get_rank())).write_text(repr(time.time()))
    dist.barrier()  # gloo may abort a worker whose peer is gone
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

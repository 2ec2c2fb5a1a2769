"""A script that was written for torchrun, and knows nothing of shoal.

    torchrun --nproc_per_node 2 examples/08_plain_ddp.py
    shoal run -n 2 examples/08_plain_ddp.py

`shoal run` sets the same variables (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, ...), so such scripts need no change.
They gain one stream of output, logs by rank, the first cause of a failure, and threads that fit the cores.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

# Plain `python` sets no variables: then this is a world of one.
for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
points = torch.randn(4_096, 16)
dataset = TensorDataset(points, (points.sum(dim=1) > 0).long())
sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
loader = DataLoader(dataset, batch_size=256 // world_size, sampler=sampler)

model = DistributedDataParallel(torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.5)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    print(f"rank {rank}, epoch {epoch}: loss {loss.item():.3f} (of this rank's part only)")

dist.destroy_process_group()

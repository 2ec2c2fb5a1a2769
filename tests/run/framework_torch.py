"""Plain torch.distributed: a model in DDP, each rank with its half of the data."""

import json

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.arange(128.0).view(32, 4) / 128, torch.ones(32, 1))
num_samples = 0
for x, y in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    num_samples += len(x)
weights = model.module.weight.flatten().tolist()
print(
    json.dumps({"rank": dist.get_rank(), "world": dist.get_world_size(), "samples": num_samples, "weights": weights})
)
dist.destroy_process_group()

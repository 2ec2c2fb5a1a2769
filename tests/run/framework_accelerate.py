"""Accelerate, as its guide has it. Nothing in here says where it runs."""

import json

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
torch.manual_seed(accelerator.process_index)
model = torch.nn.Linear(4, 1)
data = TensorDataset(torch.arange(128.0).view(32, 4) / 128, torch.ones(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
num_samples = 0
for x, y in loader:
    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
    num_samples += len(x)
rank, world = accelerator.process_index, accelerator.num_processes
weights = accelerator.unwrap_model(model).weight.flatten().tolist()
print(json.dumps({"rank": rank, "world": world, "samples": num_samples, "weights": weights}))
accelerator.end_training()

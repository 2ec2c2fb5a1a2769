"""A model in two stages: each worker holds half of it, and micro-batches follow each other through both.

    python examples/17_pipeline.py
    shoal run -n 2 -o split=pipeline:2 examples/17_pipeline.py
    shoal run -n 4 -o split=pipeline:2,schedule=gpipe examples/17_pipeline.py

All print the same digest: four workers hold two copies of two stages. The script does not know about any of it, and
where the model is cut is measured; `split=shoal.pipeline(2, cuts=("blocks.2",))` says it. See docs/strategies.md.
"""

import torch
import torch.nn.functional as F
from torch import nn

import shoal


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.body = nn.LayerNorm(width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.body(self.norm(x))))


class Network(nn.Module):
    def __init__(self, width=64, num_blocks=4):
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_blocks)])
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


torch.manual_seed(0)
inputs = torch.randn(960, 16)
labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
model = Network()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

trainer = shoal.Trainer(model, loss, optimizer, (inputs, labels), batch_size=96, exact=True)
trainer.fit(epochs=4)

held = sum(parameter.numel() for parameter in model.parameters())
print(f"rank {trainer.rank} holds {held} parameters; digest of the parameters: {trainer.digest()[:12]}")
print(f"loss {trainer.evaluate((inputs, labels))['loss']:.3f}")
trainer.close()

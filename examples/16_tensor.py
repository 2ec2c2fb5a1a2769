"""A model whose layers are cut: each of two workers holds half of every large weight.

    python examples/16_tensor.py
    shoal run -n 2 -o split=tensor:2 examples/16_tensor.py
    shoal run -n 4 -o split=tensor:2 examples/16_tensor.py

Nothing in the model knows of it. Which layers are cut is found by running the loss some times, and shown. The loss is
the same in all three; the last trains two copies of two parts each.
"""

import torch
import torch.nn.functional as F
from torch import nn

import shoal

WIDTH, HEADS, LENGTH = 64, 4, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class Successor(nn.Module):
    """Learns to count: each token is the one before it plus the first token of the row."""

    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(32, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens) + self.position))


def loss(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


torch.manual_seed(0)
first = torch.randint(1, 32, (2_000, 1))
rows = first * torch.arange(1, LENGTH + 2) % 32
model = Successor()
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
trainer = shoal.Trainer(model, loss, optimizer, rows, batch_size=100, max_norm=1.0)
trainer.fit(epochs=2)

held = sum(parameter.numel() for parameter in model.parameters())
measured = trainer.evaluate(rows)["loss"]
print(f"this worker holds {held:,} parameters")
if trainer.rank == 0:
    print(f"loss after 2 epochs: {measured:.4f}")
trainer.close()

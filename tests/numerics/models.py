"""Small models of three kinds, and one function that trains each of them: workers import it by name."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shoal
from shoal.data.shares import Schedule


class Attention(nn.Module):
    def __init__(self, width, num_heads, dropout):
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, dropout=0.1, width=32):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.Sequential(Attention(width, 2, dropout), Attention(width, 2, dropout))
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


class RecomputedGPT(nn.Module):
    """Each block is computed again in backward, instead of being remembered. The head is not the embedding."""

    def __init__(self, dropout=0.1, width=32):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, width), nn.Linear(width, 64, bias=False)
        self.blocks = nn.ModuleList(Attention(width, 2, dropout) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def make(kind):
    """(model, dataset, loss) of a kind; the same on every worker."""
    torch.manual_seed(7)
    if kind == "recomputed":
        return RecomputedGPT(), torch.randint(0, 64, (200, 13)), next_token_loss
    if kind == "gpt":
        return GPT(), torch.randint(0, 64, (200, 13)), next_token_loss
    if kind == "cnn":
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 10),
        )
        return model, (torch.randn(200, 1, 8, 8), torch.randint(0, 10, (200,))), class_loss
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 10))
    return model, (torch.randn(200, 20), torch.randint(0, 10, (200,))), class_loss


def class_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def next_token_loss(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def divide(trainer, shares):
    """Give the workers these shares of each step."""
    trainer._course.schedule = Schedule(trainer.ledger.num_shards, shares[: trainer.world_size])


def run_until(trainer, steps):
    """Train in a loop of one's own, over epochs, up to that step: the losses."""
    losses = []
    while trainer.place.step < steps:
        for batch in trainer:
            losses.append(trainer.step(batch))
            if trainer.place.step >= steps:
                break
    return losses


def train(kinds=("mlp", "cnn", "gpt"), steps=12, shares=None, optimizer=torch.optim.AdamW, **settings):
    """Train each kind on 200 samples in batches of 48, the last short: {kind: (digest, losses, parameters)}."""
    results = {}
    for kind in kinds:
        model, data, loss = make(kind)
        chosen = optimizer(model.parameters(), lr=0.01)
        trainer = shoal.Trainer(model, loss, chosen, data, batch_size=48, balance=False, max_norm=1.0, **settings)
        if shares is not None:
            divide(trainer, shares)
        losses = run_until(trainer, steps)
        parameters = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double().tolist()
        results[kind] = trainer.digest(), losses, parameters
        trainer.close()
    return results


def train_all(configs):
    """Train under one configuration after the other."""
    return [train(**config) for config in configs]

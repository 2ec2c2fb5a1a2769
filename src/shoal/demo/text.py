"""A small GPT that learns to write like Python's own documentation: `shoal run -n 2 -m shoal.demo.text`."""

import argparse
import re

import torch
import torch.nn.functional as F
from torch import nn

import shoal

CONTEXT = 64


class Block(nn.Module):
    """Attention to what came before, then a little network."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.dropout(self.out(seen))
        out: torch.Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return out


class GPT(nn.Module):
    """Bytes in, the next byte's odds out."""

    def __init__(self, width: int = 96, num_layers: int = 2, num_heads: int = 4, dropout: float = 0.05) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        self.blocks = nn.Sequential(*(Block(width, num_heads, dropout) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 128, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def documentation() -> torch.Tensor:
    """Python's help topics, which come with every Python, as rows of bytes: its prose, without tables and rulers."""
    from pydoc_data.topics import topics

    prose = re.findall(r"[A-Z][a-z ,;'()\-]{40,}[.:]", " ".join(" ".join(topics.values()).split()))
    text = "\n".join(prose).encode("ascii", "replace")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return tokens[: tokens.numel() // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)


def loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """How surprised the model is by each next byte."""
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def write(model: nn.Module, start: str, length: int) -> str:
    """Let the model go on from `start`."""
    tokens = torch.tensor([list(start.encode())])
    generator = torch.Generator().manual_seed(0)
    model.eval()
    for _ in range(length):
        odds = F.softmax(model(tokens[:, -CONTEXT:])[:, -1] / 0.7, dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(odds, 1, generator=generator)], dim=1)
    return bytes(tokens[0].tolist()).decode("ascii", "replace")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=44)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), 6e-3)
    trainer = shoal.Trainer(
        model, loss, optimizer, documentation(), batch_size=options.batch_size, exact=True, max_norm=1.0
    )
    trainer.fit(steps=options.steps)
    if trainer.rank == 0:
        print(f"digest of the parameters: {trainer.digest()[:12]}")
        print("the model writes: " + " ".join(write(model, "The ", 120).split()))
    trainer.close()


if __name__ == "__main__":
    main()

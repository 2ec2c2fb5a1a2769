"""A loss in which samples weigh differently: sentences of different lengths, padded.

    python examples/03_weighted_loss.py
    shoal run -n 2 examples/03_weighted_loss.py

A worker with short sentences has fewer tokens than one with long ones. Taking the mean on each worker and then the
mean of the means would let the tokens of short sentences count more. Return (sum, weight) instead: the gradient is
then the mean over all tokens of the global batch, whoever computed them.
"""

import torch
import torch.nn.functional as F

import shoal

PAD = -1
NUM_WORDS = 20


def sentences(count):
    """Each counts in steps of its own, 0 3 6 9 ..., for 4 to 24 words."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(1, 4, (count,), generator=generator)
    lengths = torch.randint(4, 25, (count,), generator=generator)
    return [step * torch.arange(length) % NUM_WORDS for step, length in zip(steps, lengths.tolist(), strict=True)]


def pad(samples):
    """Samples of different lengths cannot be stacked, so `collate=` says how a batch is made of them."""
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=PAD)


class Model(torch.nn.Module):
    """Guesses the next word from the last two."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(NUM_WORDS, 32)
        self.answer = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, NUM_WORDS))

    def forward(self, words):
        seen = self.embed(words.clamp(min=0))
        before = F.pad(seen, (0, 0, 1, 0))[:, :-1]
        return self.answer(torch.cat([before, seen], dim=-1))


def loss(model, words):
    """(the sum over tokens, how many there are): padding counts for nothing."""
    guesses, targets = model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()
    return F.cross_entropy(guesses, targets, ignore_index=PAD, reduction="sum"), (targets != PAD).sum()


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
trainer = shoal.Trainer(model, loss, optimizer, sentences(2_000), batch_size=64, collate=pad)

for epoch in range(2):
    for batch in trainer:
        found = trainer.step(batch)
    print(f"after {epoch + 1} epochs: {found:.3f} per token")
trainer.close()

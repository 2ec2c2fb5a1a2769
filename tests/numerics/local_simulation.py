"""Local steps in one process and plain torch: every copy is a model of its own, and messages are variables.

Only the order of samples, the seeds of dropout and the int8 code are shoal's. `train` is what workers run.
"""

import copy
from functools import partial

import torch
from torch import nn

import shoal
from shoal.comm.codec import decode, encode
from shoal.data.ledger import Ledger, shard_bounds
from shoal.spec.strategy import parse_sync
from shoal.train.flat import FlatModel
from shoal.train.sync.local_rounds import cut_fragments
from shoal.train.traits import seed_of
from tests.numerics import models

BATCH_SIZE = 48
# eps is larger than usual: some gradients of attention are zero but for rounding, which Adam makes whole steps of.
OPTIMIZERS = {"SGD": torch.optim.SGD, "AdamW": partial(torch.optim.AdamW, eps=1e-4)}


def train(kind, sync, optimizer="SGD", lr=0.05, steps=52, **settings):
    """With a Trainer: (parameters, buffers, averaged parameters) as lists, the same on every worker."""
    model, data, loss = models.make(kind)
    chosen = OPTIMIZERS[optimizer](model.parameters(), lr=lr)
    trainer = shoal.Trainer(model, loss, chosen, data, batch_size=BATCH_SIZE, balance=False, sync=sync, **settings)
    trainer.fit(steps=steps)
    found = [flatten(model.parameters()), flatten(model.buffers())]
    with trainer.averaged():
        found.append(flatten(model.parameters()))
    trainer.close()
    return found


def train_all(configs):
    return [train(**config) for config in configs]


def losses_of(config):
    """The loss over all samples now and then on the way: what can be seen where nobody has the whole model."""
    kind, settings = config["kind"], {name: value for name, value in config.items() if name != "kind"}
    model, data, loss = models.make(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with shoal.Trainer(model, loss, optimizer, data, batch_size=BATCH_SIZE, balance=False, **settings) as trainer:
        return [trainer.fit(steps=13).evaluate(data)["loss"] for _ in range(4)]


def flatten(tensors):
    parts = [tensor.detach().reshape(-1).double() for tensor in tensors]
    return torch.cat(parts).tolist() if parts else []


class Copy:
    """One worker: its model in a flat buffer, its optimizer, and the norms of gradients before clipping."""

    def __init__(self, model, optimizer, lr):
        self.model = copy.deepcopy(model)
        flat = FlatModel(
            self.model, torch.optim.SGD(self.model.parameters()), lambda name, n, dtype: torch.zeros(n, dtype=dtype)
        )
        flat.place(is_source=True)
        self.flat, self.values = flat, flat.values
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters(), lr=lr)
        self.norms = []

    def learn(self, loss, pieces, seed, max_norm):
        """From the mean over pieces of a batch, each of which draws the same random numbers."""
        self.optimizer.zero_grad()
        num_samples = sum(count for _, count in pieces)
        for piece, count in pieces:
            torch.manual_seed(seed)
            (loss(self.model, piece) * (count / num_samples)).backward()
        if max_norm is not None:
            self.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)))
        self.optimizer.step()

    def buffers(self):
        return torch.cat([b.detach().reshape(-1).double() for b in self.model.buffers()] or [torch.empty(0).double()])

    def set_buffers(self, values):
        with torch.no_grad():
            buffers = list(self.model.buffers())
            for buffer, part in zip(buffers, values.split([b.numel() for b in buffers]), strict=True):
                part = part if buffer.is_floating_point() else part.round()
                buffer.copy_(part.view(buffer.shape))


class Simulation:
    """`num_copies` of them, agreeing as `sync` says. The steps of a round are `every`; `overlap` must be given."""

    def __init__(
        self, kind, sync, num_copies, optimizer="SGD", lr=0.05, max_norm=None, ema=None, microbatch_size=BATCH_SIZE
    ):
        model, self.data, self.loss = models.make(kind)
        self.microbatch_size = microbatch_size
        self.sync, self.max_norm, self.ema = parse_sync(sync), max_norm, ema
        self.copies = [Copy(model, optimizer, lr) for _ in range(num_copies)]
        self.anchor = self.copies[0].values.clone()
        self.average = self.anchor.clone()
        self.momentum = torch.zeros_like(self.anchor)
        self.spans = [slice(*span) for span in cut_fragments(self.copies[0].flat.layout, self.sync.fragments)]
        self.rest = [torch.zeros_like(self.anchor) for _ in self.copies]
        self.samples = [[0] * num_copies for _ in self.spans]
        self.followed = [0] * len(self.spans)
        self.flight = None
        self.ledger = Ledger(num_samples=200, batch_size=BATCH_SIZE, num_shards=num_copies)

    def run(self, steps):
        place = self.ledger.place(0)
        for step in range(1, steps + 1):
            count = self.ledger.count(place)
            for number, worker in enumerate(self.copies):
                start, stop = shard_bounds(number, count, len(self.copies))
                ids = torch.from_numpy(self.ledger.ids(place.epoch, place.offset + start, place.offset + stop).copy())
                pieces = [(self.samples_of(some), len(some)) for some in ids.split(self.microbatch_size)]
                worker.learn(self.loss, pieces, seed_of(0, place.step, number), self.max_norm)
                for counts in self.samples:
                    counts[number] += stop - start
            place = self.ledger.advance(place, count)
            if self.flight and step == self.flight["due"]:
                self.land()
            for fragment in range(len(self.spans)):
                if step % self.sync.every == (fragment + 1) * self.sync.every // len(self.spans) % self.sync.every:
                    self.leave(fragment, step)
        self.agree(steps)
        worker = self.copies[0]
        found = [flatten(worker.model.parameters()), flatten(worker.model.buffers())]
        if self.ema is not None:
            worker.values.copy_(self.average)
        return [*found, flatten(worker.model.parameters())]

    def samples_of(self, ids):
        return tuple(part[ids] for part in self.data) if isinstance(self.data, tuple) else self.data[ids]

    def mean(self, fragment):
        """(the copies' ways, their mean)"""
        at, weights = self.spans[fragment], self.samples[fragment]
        ways = [self.anchor[at] - worker.values[at] for worker in self.copies]
        sent, layout = ways, self.copies[0].flat.layout
        if self.sync.codec == "int8":
            sent = []
            for way, rest in zip(ways, self.rest, strict=True):
                rest[at] += way
                sent.append(torch.zeros_like(way))
                for start, size in zip(layout.offsets, layout.sizes, strict=True):
                    if at.start <= start < at.stop:
                        held = slice(start - at.start, start - at.start + size)
                        sent[-1][held] = decode(encode(rest[at][held]), size)
                rest[at] -= sent[-1]
        return ways, sum(way * (weight / sum(weights)) for way, weight in zip(sent, weights, strict=True))

    def mean_buffers(self):
        weights = self.samples[-1]
        return sum(w.buffers() * (weight / sum(weights)) for w, weight in zip(self.copies, weights, strict=True))

    def leave(self, fragment, step):
        at, (ways, mean) = self.spans[fragment], self.mean(fragment)
        taken = mean
        if self.sync.outer == "nesterov":
            age = step / self.sync.every
            momentum = min(self.sync.momentum, age / (age + 10))
            self.momentum[at] = momentum * self.momentum[at] + mean
            taken = self.sync.lr * (mean + momentum * self.momentum[at])
        self.anchor[at] -= taken
        is_last = fragment == len(self.spans) - 1
        self.flight = {
            "due": step + self.sync.overlap,
            "at": at,
            "moves": [way - taken for way in ways],
            "buffers": (self.mean_buffers(), [w.buffers() for w in self.copies]) if is_last else None,
        }
        self.samples[fragment] = [0] * len(self.copies)
        if self.ema is not None:
            self.average[at].lerp_(self.anchor[at], 1 - self.ema ** (step - self.followed[fragment]))
            self.followed[fragment] = step
        if not self.sync.overlap:
            self.land()

    def land(self):
        flight, self.flight = self.flight, None
        for number, worker in enumerate(self.copies):
            worker.values[flight["at"]] += flight["moves"][number]
            if flight["buffers"]:
                mean, sent = flight["buffers"]
                worker.set_buffers(worker.buffers() + mean - sent[number])

    def agree(self, step):
        if self.flight:
            self.land()
        if any(self.samples[-1]):
            mean = self.mean_buffers()
            for worker in self.copies:
                worker.set_buffers(mean)
        for fragment, at in enumerate(self.spans):
            if any(self.samples[fragment]):
                _, mean = self.mean(fragment)
                for worker in self.copies:
                    worker.values[at] = self.anchor[at] - mean

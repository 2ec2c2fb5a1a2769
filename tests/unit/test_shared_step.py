"""Workers that share memory die at every point of a step: it counts for all or for none, to the last bit.

The workers are threads, and one dies by an exception that nobody but the test sees. `tests/run` has real processes.
"""

import copy
import threading
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch
from meeting_threads import make_ranks, run_ranks
from torch import nn

from shoal.comm.group import lost
from shoal.spec.errors import MemberLost
from shoal.train import chunked, replica
from shoal.train.sync import sharded_host, sharded_ring
from shoal.train.sync.sharded_host import HostShardedSync
from shoal.train.sync.shared import SharedMemorySync
from shoal.train.sync.sync import Row, Standing

SIZE, TURNS, SAMPLES, WIDTH = 3, 4, 4, 560
ASSIGNMENT = [range(rank, rank + 1) for rank in range(SIZE)]
SYNCS = {
    "sharded": lambda *args, **options: HostShardedSync(*args, **options),
    "shared": lambda *args, **options: SharedMemorySync(*args, exact=False, **options),
}


class Died(Exception):
    """A worker is no more."""


@dataclass
class Crew:
    """Who lives. `fates` has when a rank dies: at the n-th time it reaches a point of a turn."""

    fates: dict[int, tuple[int, str, int]] = field(default_factory=dict)
    alive: set[int] = field(default_factory=lambda: set(range(SIZE)))
    news: threading.Condition = field(default_factory=threading.Condition)
    come: dict[tuple[int, str], set[int]] = field(default_factory=lambda: defaultdict(set))

    def reach(self, rank, turn, point, number):
        if self.fates.get(rank) == (turn, point, number):
            with self.news:
                self.alive.discard(rank)
                self.news.notify_all()
            raise Died

    def look(self, ranks, seconds):
        if len(self.alive) < SIZE:
            raise lost([], "Somebody died.", why="it was so written", rank=0)

    def settle(self, rank, sync):
        """As survivors do it: all stand still, then they see to the step; again, where another one dies."""
        while True:
            survivors = sorted(self.alive)

            def gather(key, value, survivors=survivors):
                with self.news:
                    here = self.come[len(survivors), key]
                    here.add(rank)
                    self.news.notify_all()
                    self.news.wait_for(lambda: len(here) == len(survivors) or len(self.alive) < len(survivors), 10)
                    if len(here) < len(survivors):
                        raise lost([], "Another one died.", why="it was so written", rank=rank)
                return []

            try:
                gather("holds", "")
                return sync.resolve(survivors, gather, is_first=rank == survivors[0])
            except MemberLost:
                continue


class Worker:
    """One rank: trains for some turns and remembers everything after each; None if it died."""

    def __init__(self, group, crew, model, data, kind, max_norm):
        self.rank, self.crew, self.model, self.data = group.rank, crew, model, data
        self.turn, self.points = -1, defaultdict(int)
        model[0].register_forward_hook(self.watch_backward)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        options = {"num_shards": SIZE, "max_norm": max_norm, "ema_decay": 0.9, "is_elastic": True}
        self.sync = SYNCS[kind](group, model, optimizer, reach=self.reach, **options)

    def reach(self, point):
        self.points[self.turn, point] += 1
        self.crew.reach(self.rank, self.turn, point, self.points[self.turn, point])

    def watch_backward(self, module, args, output):
        output.register_hook(lambda gradient: self.reach("backward"))

    def state(self):
        return {name: value.clone() for name, value in self.sync.tensors().items()}

    def train(self):
        states = [self.state()]
        try:
            for self.turn in range(TURNS):
                try:
                    self.step()
                except MemberLost:
                    outcome = self.crew.settle(self.rank, self.sync)
                    self.sync.detach()
                    assert all(parameter.grad is None for parameter in self.model.parameters())
                    return len(states) - (outcome is None), self.state()
                states.append(self.state())
        except Died:
            return None
        return states

    def step(self):
        self.sync.begin(SIZE, ASSIGNMENT)
        x, y = self.data[self.turn][self.rank]
        loss = (self.model(x) - y).square().sum()
        row = Row(shard=self.rank, weight=float(SAMPLES), loss=float(loss.detach()), num_samples=SAMPLES)
        self.sync.post([row], ASSIGNMENT[self.rank], Standing(step=self.turn))
        self.sync.gradients.open((self.rank, self.rank + 1), is_last=True)
        loss.backward()
        self.sync.gradients.close()
        self.sync.finish()


@pytest.fixture(scope="module", autouse=True)
def small_parts():
    """So that workers wait for each other in the middle of a backward, and update their parts in three batches."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (sharded_ring, sharded_host):
            patch.setattr(module, "BUCKET_ELEMENTS", 2**14)
        for module in (chunked, replica):
            patch.setattr(module, "BATCH_CHUNKS", 2)
        yield


@pytest.fixture(scope="module")
def material():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 1024), nn.Tanh(), nn.Linear(1024, WIDTH))  # 18 chunks
    data = [[(torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)) for _ in range(SIZE)] for _ in range(TURNS)]
    return model, data


def run(material, kind, max_norm, fates=None):
    model, data = material
    crew = Crew(fates or {})
    models = [copy.deepcopy(model) for _ in range(SIZE)]
    return run_ranks(
        SIZE, lambda group: Worker(group, crew, models[group.rank], data, kind, max_norm).train(), look=crew.look
    )


@pytest.fixture(scope="module")
def peace(material):
    """What the workers have after each turn if nobody dies, with clipping and without it: both ways the same."""
    found = {}
    for max_norm in (None, 1.0):
        states, others = run(material, "sharded", max_norm)[0], run(material, "shared", max_norm)[0]
        assert all(map(same, states, others))
        found[max_norm] = states
    return found


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


POINTS = [("posted", 1), ("backward", 1), ("summed", 1), ("updating", 1), ("updating", 3), ("updated", 1)]
CASES = [("sharded", 1.0, *point) for point in POINTS] + [
    ("sharded", None, "updating", 3),
    ("shared", 1.0, "summed", 1),
    ("shared", None, "updating", 3),
]


@pytest.mark.parametrize(("kind", "max_norm", "point", "number"), CASES)
def test_a_step_counts_for_all_or_for_none(kind, max_norm, point, number, material, peace):
    check(run(material, kind, max_norm, {1: (2, point, number)}), peace[max_norm], 1)


@pytest.mark.parametrize("point", ["summed", "updating", "updated"])
def test_a_first_step_is_completed_or_taken_back(point, material, peace):
    check(run(material, "sharded", 1.0, {2: (0, point, 1)}), peace[1.0], 2)


@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_who_completes_for_another_dies_too(kind, material, peace):
    """Rank 0 dies in the second batch that it does in place of rank 1: after the three of its own."""
    found = run(material, kind, 1.0, {1: (2, "updating", 1), 0: (2, "updating", 5)})
    check(found, peace[1.0], 0, 1)


def test_gradients_of_another_layout_are_not_seen_any_more():
    """A frozen bias, and weights are where it was: what lies behind them has gradients of the World before."""
    torch.manual_seed(0)
    model, x = nn.Linear(64, 60), torch.randn(8, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def step(group):
        sync = SYNCS["shared"](group, model, optimizer, num_shards=1, is_elastic=True)
        sync.begin(1, [range(1)])
        loss = model(x).square().sum()
        sync.post([Row(shard=0, weight=1.0, loss=float(loss.detach()), num_samples=8)], range(1), Standing(step=0))
        sync.gradients.open((0, 1), is_last=True)
        loss.backward()
        sync.gradients.close()
        norm = sync.finish().norm
        sync.detach()
        return norm

    (first,) = make_ranks(1)
    step(first)
    model.bias.requires_grad_(False)
    (second,) = make_ranks(1, [first])
    norm = step(second)
    (expected,) = torch.autograd.grad(model(x).square().sum(), model.weight)
    assert norm == pytest.approx(float(expected.norm()))
    for group in (first, second):
        group.close()


def check(found, peace, *dead):
    """All who live have taken equally many steps, and have what they would have in peace after so many."""
    assert [rank for rank, end in enumerate(found) if end is None] == list(dead)
    ends = [end for end in found if end is not None]
    assert len({steps for steps, _ in ends}) == 1
    for steps, state in ends:
        assert same(state, peace[steps])

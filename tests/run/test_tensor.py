"""Layers cut among real workers: what is told, what is refused, and what a plan of one's own does."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.engine.env import read_worker
from shoal.spec.errors import UserError

DATA = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 4


class Tower(nn.Module):
    """Two layers, between which `act` does something."""

    def __init__(self, act=lambda model, x: F.relu(x)):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down, self.act = nn.Linear(8, 32), nn.Linear(32, 4), act

    def forward(self, x):
        return self.down(self.act(self, self.up(x)))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def with_weight_shape(model, x):
    return x * model.up.weight.shape[0] ** -0.5


def with_rank(model, x):
    return F.relu(x) * (1 + read_worker().rank)


def attempt(model=None, optimizer=torch.optim.SGD, split="tensor:2", **settings):
    """What a trainer says to this: an error's parts, or None."""
    model = model or Tower()
    try:
        with shoal.Trainer(
            model, loss, optimizer(model.parameters(), lr=0.1), DATA, batch_size=16, split=split, **settings
        ) as trainer:
            trainer.fit(steps=2)
    except UserError as error:
        return error.message, error.why, error.hint


def make_mistakes():
    uneven = read_worker().rank + 1
    return {
        "exact": attempt(exact=True),
        "compile": attempt(compile=True),
        "optimizer": attempt(optimizer=torch.optim.Adafactor),
        "pattern": attempt(split=shoal.tensor(2, plan={"layers.*": "colwise"})),
        "shape": attempt(model=Tower(with_weight_shape)),
        "rank": attempt(model=Tower(with_rank)),
        "threads": attempt(threads=uneven),
        "both": attempt(split=(shoal.tensor(2), shoal.pipeline(2))),
        "fine": attempt(threads=1),
    }


def test_what_cannot_be_cut_is_refused_on_all_workers_before_training(tmp_path):
    found, other = shoal.launch(make_mistakes, 2, run_dir=str(tmp_path / "run"), is_quiet=True)
    assert found == other
    assert "does not go together with exact=True" in found["exact"][0]
    assert "does not go together with torch.compile" in found["compile"][0]
    assert "the optimizer Adafactor" in found["optimizer"][0]
    assert "'layers.*' matches no layer" in found["pattern"][0]
    assert "in layer 'down', its output is another" in found["shape"][0]
    assert "plan={'down" in found["shape"][2]
    assert "in layer 'down', its output is another" in found["rank"][0]
    assert "the number of threads" in found["threads"][0]
    assert "2 workers cannot hold copies of 4 parts" in found["both"][0]
    assert found["fine"] is None


def train_with_vocabulary():
    """A table and a head that share a parameter, both cut; the head's outputs are gathered for the loss."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.Linear(8, 16, False))
    model[4].weight = model[0].weight
    tokens = torch.randint(0, 16, (48, 5))

    def next_token(model, rows):
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    plan = {"0": "embedding", "4": "colwise"}
    split = shoal.tensor(2, plan=plan) if read_worker().world_size > 1 else None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with shoal.Trainer(model, next_token, optimizer, tokens, batch_size=16, split=split) as trainer:
        trainer.fit(steps=10)
        answers = trainer.predict(tokens[:, :-1])
        return answers, [tuple(p.shape) for p in model.parameters()]


def test_a_plan_of_ones_own_cuts_the_vocabulary_too(tmp_path):
    ((alone, _),) = shoal.launch(train_with_vocabulary, 1, run_dir=str(tmp_path / "alone"), is_quiet=True)
    (found, shapes), (other, _) = shoal.launch(train_with_vocabulary, 2, run_dir=str(tmp_path / "two"), is_quiet=True)
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)
    assert torch.equal(found, other)
    assert shapes == [(8, 8), (16, 8), (16,), (8, 16), (8,)]
    events = [json.loads(line) for line in (tmp_path / "two" / "journal.jsonl").read_text().splitlines()]
    (plan,) = [event["data"] for event in events if event["kind"] == "tensor_plan"]
    assert plan["layers"] == {"0": "embedding", "1": "colwise", "3": "rowwise", "4": "colwise"}
    assert plan["bytes_held"] < 0.6 * plan["bytes_whole"]
    assert "tensor(2) cuts 4 layers" in (Path(tmp_path) / "two" / "logs" / "0.log").read_text()

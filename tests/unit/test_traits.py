"""What a forward does to buffers, however it is written: found out in a trial, kept in one vector."""

import pytest
import torch
from torch import nn

from shoal.train.traits import ChangingBuffers, probe


class Counting(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way = way
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x):
        match self.way:
            case "in place":
                self.seen.add_(1)
            case "augmented":
                self.seen += 1
            case "anew":
                self.seen = self.seen + 1
            case "grows":
                self.table = torch.arange(len(self.table) + 1.0)
            case "again":
                self.table = torch.zeros(2)
        return x + self.seen


def changing(model):
    return probe(model, lambda: model(torch.ones(3)), 0, 3, torch.device("cpu")).changing


@pytest.mark.parametrize("way", ["in place", "augmented", "anew"])
def test_a_buffer_that_changes_is_found_and_is_as_before(way):
    model = nn.Sequential(nn.Identity(), Counting(way))
    before = model[1].seen
    assert changing(model) == ("1.seen",)
    assert model[1].seen is before
    assert float(before) == 0


@pytest.mark.parametrize("way", ["never", "grows", "again"])
def test_a_cache_is_not_what_a_model_learns(way):
    """Made anew with the same values, or larger: nothing that goes on from step to step."""
    assert changing(Counting(way)) == ()


@pytest.mark.parametrize("way", ["in place", "anew"])
def test_its_value_is_read_and_written_wherever_the_forward_put_it(way):
    model = Counting(way)
    buffer = model.seen
    buffers = ChangingBuffers(model, changing(model))
    start = buffers.read()
    model(torch.ones(3))
    model(torch.ones(3))
    assert buffers.read().tolist() == [2]
    buffers.write(start)
    assert model.seen is buffer
    assert float(buffer) == 0
    buffers.write(torch.tensor([5.0]))
    assert float(model.state_dict()["seen"]) == 5

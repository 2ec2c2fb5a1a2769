"""The setting that says whether another worker keeps what only one holds."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import shoal
from shoal.spec.errors import UserError
from shoal.train import setup
from shoal.train.settings import Settings, make_settings
from shoal.train.sync.sharded_message import MessageShardedSync


@pytest.mark.parametrize("wrong", [2, -1, True, 0.0, "1", None])
def test_other_values_are_refused(wrong: Any) -> None:
    with pytest.raises(UserError, match=r"redundancy=.* does not work") as caught:
        Settings(batch_size=8, redundancy=wrong)
    assert caught.value.why == "it must be 1, or 0 for none"
    assert caught.value.hint == "for example: redundancy=1"


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("1", 1)])
def test_from_the_command_line(text: str, value: int) -> None:
    settings, origins = make_settings({"batch_size": 8}, {"redundancy": text})
    assert (settings.redundancy, origins["redundancy"]) == (value, f"-o redundancy={text}")


@pytest.mark.parametrize("text", ["2", "-1", "none", "yes"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"redundancy=.* does not work"):
        make_settings({"batch_size": 8}, {"redundancy": text})


def kept_by(redundancy: int, *, is_elastic: bool = True) -> tuple[tuple[int, ...], int, int]:
    """The parts that rank 1 of 3 keeps, and the elements that it has for their gradient and for their average."""
    model = nn.Linear(64, 64)
    settings = Settings(batch_size=8, ema=0.9, sync=shoal.sharded("optimizer"), redundancy=redundancy)
    sync = setup.make_sync(
        cast("Any", SimpleNamespace(rank=1, size=3)),
        model,
        torch.optim.AdamW(model.parameters()),
        settings,
        num_shards=3,
        is_elastic=is_elastic,
        is_inherited=True,
    )
    assert isinstance(sync, MessageShardedSync)
    shards = sync.replica
    sync.detach()
    assert shards.average is not None
    return shards.parts, shards.gradient.untyped_storage().nbytes() // 4, shards.average.numel()


def test_without_it_no_memory_is_taken_for_a_mirror() -> None:
    parts, num_gradients, num_averages = kept_by(0)
    assert parts == (1,)
    assert kept_by(1) == ((1, 0), 2 * num_gradients, 2 * num_averages)
    assert kept_by(1, is_elastic=False) == (parts, num_gradients, num_averages)

"""Sharded runs: steps that are no numbers, memory, and what is refused before anything is trained."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import shoal
from shoal.spec.errors import UserError
from shoal.spec.strategy import Level
from shoal.testing.faults import Faults
from tests.numerics import sharding

SCRIPT = """
import torch, shoal
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(40, 80), nn.Tanh(), nn.Linear(80, 40), nn.Tanh(), nn.Linear(40, 1))
source = torch.Generator().manual_seed(1)
data = torch.randn(64, 40, generator=source), torch.randn(64, 1, generator=source)
trainer = shoal.Trainer(
    model,
    lambda m, b: (m(b[0]) - b[1]).square().mean(),
    torch.optim.Adam(model.parameters(), 1e-2),
    data,
    batch_size=16,
    microbatch_size=3,
)
trainer.fit(steps=8)
print("digest", trainer.digest(), all(bool(p.isfinite().all()) for p in model.parameters()))
"""


@pytest.mark.parametrize(
    ("sync", "transport"), [("sharded:gradients", "shm"), ("sharded:optimizer", "tcp"), ("sharded:parameters", "tcp")]
)
def test_a_bad_step_is_left_out_by_all(sync: str, transport: str, tmp_path: Path) -> None:
    """One worker's loss is no number, in the very first step, too; all leave the step out and stay equal."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = {"sync": sync, "transport": transport}
    done = (
        Faults()
        .nan(rank=0, step=0)
        .nan(rank=1, step=3)
        .run(str(script), num_workers=2, run_dir=str(tmp_path / "run"), options=options)
    )
    assert done.exit_code == 0
    assert {(event.rank, event.step) for event in done.of("step_skipped")} == {(0, 0), (1, 0), (0, 3), (1, 3)}
    lines = {line for rank in (0, 1) for line in done.log(rank).splitlines() if line.startswith("digest")}
    assert len(lines) == 1
    assert lines.pop().endswith("True")


def overflow(settings):
    """A gradient that is no number though the loss is one: the error every worker gets names the parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def loss(model, x):
        return model(x).square().mean() + 1e-30 * (model[0].weight * 0).abs().sqrt().sum()

    trainer = shoal.Trainer(
        model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.randn(16, 4), batch_size=8, **settings
    )
    with pytest.raises(UserError, match=r"though the loss is a number: in 0\.weight\."):
        trainer.fit(steps=1)
    return True


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_bad_gradient_is_named(transport: str, tmp_path: Path) -> None:
    settings = {"sync": shoal.sharded("gradients"), "transport": transport, "not_finite": "error"}
    assert shoal.launch(overflow, 2, args=(settings,), run_dir=str(tmp_path / "run"), is_quiet=True) == [True, True]


@pytest.mark.slow
def test_each_worker_holds_its_part(tmp_path: Path) -> None:
    """64 MiB of parameters, as much of gradients, twice that of AdamW's state, 2 workers: MiB a worker."""
    in_memory = {"all_reduce": {}, "sharded": {"sync": shoal.sharded("gradients")}}
    by_messages = {level: {"sync": f"sharded:{level}", "transport": "tcp"} for level in get_args(Level)}
    ways = {**in_memory, "messages": {"transport": "tcp"}, **by_messages}
    held = {name: max(launch_hold(settings, tmp_path / name)) for name, settings in ways.items()}
    assert held["sharded"] < held["all_reduce"] - 24, held  # no gradient of 64, but buckets of 16
    assert held["optimizer"] < held["messages"] - 40, held  # half of 128
    assert held["gradients"] < held["optimizer"] - 40, held  # all but some buckets of 64
    assert held["parameters"] < held["gradients"] + 16, held  # half of 64, for blocks that come and go
    assert max(held["sharded"], held["parameters"]) < 64 * 4 / 2 + 96, held


def launch_hold(settings: dict[str, Any], folder: Path) -> list[float]:
    return shoal.launch(sharding.hold, 2, (settings,), run_dir=str(folder), threads_per_worker=1, is_quiet=True)


class OwnRule(torch.optim.SGD):
    """Might look at whole tensors."""


def make(optimizer_class=torch.optim.SGD, **settings):
    model = nn.Linear(4, 1)
    return shoal.Trainer(
        model,
        lambda model, x: model(x).square().mean(),
        optimizer_class(model.parameters(), lr=0.1),
        torch.randn(16, 4),
        batch_size=8,
        **settings,
    )


def test_an_optimizer_that_may_look_at_whole_tensors_is_refused() -> None:
    with pytest.raises(UserError, match="OwnRule cannot be sharded") as caught:
        make(OwnRule, sync=shoal.sharded("optimizer"))
    assert "AdamW" in caught.value.hint


@pytest.mark.parametrize("level", ["gradients", "parameters"])
def test_exact_sums_are_refused_where_they_cannot_be_had(level: str) -> None:
    with pytest.raises(UserError, match="do not go together") as caught:
        make(sync=shoal.sharded(level), exact=True)
    assert "sharded('optimizer')" in caught.value.hint


def test_exact_sums_with_a_divided_optimizer() -> None:
    with make(sync=shoal.sharded("optimizer"), exact=True) as trainer, make(exact=True) as other:
        other.model.load_state_dict(trainer.model.state_dict())


def test_a_level_that_is_none() -> None:
    with pytest.raises(UserError, match="does not work") as caught:
        make(sync="sharded:weights")
    assert "parameters" in caught.value.why

"""Unequal machines in one run: little memory beside plenty, and tensors that are not where the others' are."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import unequal_job
from torch import nn
from unequal_job import BATCH_SIZE, MB, NUM_STEPS

from shoal.observe.explain import explain
from shoal.testing import rigs
from shoal.testing.faults import Faults, FaultyRun
from shoal.testing.ranks import Member, ranks_of
from shoal.train.sync.message import SPREAD_EVERY, MessageSync
from shoal.train.sync.sync import Row, Standing

SHARE = BATCH_SIZE // 2
LITTLE_MB = 60
"""What the small worker may take for 16 samples of 4 MB each, besides what a trainer needs."""


def train(tmp_path: Path, options: dict[str, str] | None = None, **env: str) -> FaultyRun:
    return Faults().run(
        unequal_job.__file__, num_workers=2, run_dir=str(tmp_path / "run"), options=options or {}, env=env
    )


def told_by(done: FaultyRun, rank: int) -> dict[str, Any]:
    (line,) = [line for line in done.log(rank).splitlines() if line.startswith("{")]
    return dict(json.loads(line))


def pieces_of(done: FaultyRun, rank: int) -> list[int | None]:
    """What it began with, and what it changed to."""
    began = [event.data["piece"] for event in done.of("worker_settings") if event.rank == rank]
    return began + [event.data["samples"] for event in done.of("piece") if event.rank == rank]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The parameters that one process with plenty of memory comes to."""
    trainer, model = unequal_job.make_trainer(run_dir=str(tmp_path_factory.mktemp("alone") / "run"))
    with trainer:
        trainer.fit(steps=NUM_STEPS)
        return unequal_job.values_of(model)


def test_a_worker_with_little_memory_computes_in_small_pieces(tmp_path: Path, alone: list[float]) -> None:
    done = train(tmp_path, LITTLE_MB=str(LITTLE_MB))
    assert done.exit_code == 0, done.log(1)
    large, small = told_by(done, 0), told_by(done, 1)
    assert large["peak"] - large["before"] > SHARE * 4 * MB, "its share takes more than the small one has"
    assert small["peak"] <= small["memory"]
    assert pieces_of(done, 0) == [None]
    first, *later = pieces_of(done, 1)
    assert first is not None
    assert 1 <= first < later[-1] < SHARE
    for facts in (large, small):
        torch.testing.assert_close(facts["values"], alone, rtol=1e-5, atol=1e-6)
    assert large["loss"] == small["loss"]
    text = explain(done.run_dir).text(120)
    assert "what workers compute with" in text
    assert "all of its share" in text
    assert f"{later[-1]} (memory=" in text


def test_the_parts_of_a_model_compute_pieces_that_fit_all_of_them(tmp_path: Path) -> None:
    """Either stage keeps 2 MB of a sample: without a limit it has 64 MB of a step."""
    done = train(tmp_path, {"split": "pipeline:2"}, LITTLE_MB="160")  # of which what cuts a model takes 50
    assert done.exit_code == 0, done.log(1)
    assert pieces_of(done, 0) == pieces_of(done, 1), "a pipeline would have pieces of 8"
    assert 1 <= pieces_of(done, 1)[0] < 8
    large, small = told_by(done, 0), told_by(done, 1)
    assert small["peak"] <= small["memory"]
    assert large["loss"] == small["loss"]


@pytest.mark.slow
@rigs.needs("root", "memory cgroups")
def test_a_limit_of_the_kernel_is_kept(tmp_path: Path, alone: list[float]) -> None:
    with rigs.memory_limit(2 * LITTLE_MB * MB) as group:
        done = train(tmp_path, LITTLE_GROUP=str(group.path))
    assert done.exit_code == 0, done.log(1)
    (settings,) = [event.data for event in done.of("worker_settings") if event.rank == 1]
    assert settings["memory_from"] == "cgroup"
    assert 1 <= (pieces_of(done, 1)[-1] or SHARE) < SHARE
    torch.testing.assert_close(told_by(done, 1)["values"], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@rigs.needs("root", "memory cgroups")
def test_the_limit_of_the_kernel_is_one(tmp_path: Path) -> None:
    """A worker that believes to have more is killed: what the test above keeps is real."""
    with rigs.memory_limit(LITTLE_MB * MB) as group:
        done = train(tmp_path, {"memory": "1TB"}, LITTLE_GROUP=str(group.path))
    assert done.exit_code == 128 + signal.SIGKILL


def drift_and_meet(member: Member) -> tuple[bool, bool, int]:
    """Copies that round differently: what a GPU beside a CPU does, played by adding a little on one rank."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sync = MessageSync(member.group, model, optimizer, num_shards=2, exact=False, is_mixed=True)

    def is_equal() -> bool:
        everyone = torch.empty(2 * sync.replica.flat.values.numel())
        member.group.all_gather(everyone, sync.replica.flat.values).wait()
        return bool(torch.equal(*everyone.chunk(2)))

    for turn in range(SPREAD_EVERY + 1):
        if turn == SPREAD_EVERY:
            before = is_equal()
        sync.begin(2, [range(1), range(1, 2)])
        if turn == SPREAD_EVERY:
            after = is_equal()
        sync.gradients.open((member.rank, member.rank + 1), is_last=True)
        row = Row(shard=member.rank, weight=4.0, loss=1.0, num_samples=4)
        sync.post([row], range(member.rank, member.rank + 1), Standing(step=turn))
        model(torch.ones(4, 8)).sum().backward()
        sync.gradients.close()
        sync.finish()
        sync.replica.flat.values.add_(1e-6 * member.rank)
    checksum = sync.checksum(3)
    sync.close()
    return before, after, checksum


def test_copies_that_round_differently_stay_together() -> None:
    with ranks_of(2, "tcp", devices=("cuda", "cpu")) as ranks:
        assert ranks.run(drift_and_meet) == [(False, True, 0)] * 2

"""Who is slow is named where workers hold parts of a model, and where copies train alone; so is who is not."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.observe.breakdown import median
from shoal.observe.explain import explain
from shoal.observe.metrics import read
from shoal.spec.event import StepMetrics
from shoal.testing import Faults, FaultyRun

SCRIPT = """
import os, sys, time, torch, shoal
from torch import nn

split, sync, slow = sys.argv[1:]

class Pause(nn.Module):
    def forward(self, x):
        time.sleep(0.02)
        return x

torch.manual_seed(0)
layers = [nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 8)]
if slow == "nobody":  # the time is spent where a stage is computed
    layers = [nn.Linear(8, 8), Pause(), nn.Linear(8, 8), Pause()]
model = nn.Sequential(*layers)
data = torch.randn(4096, 8), torch.randn(4096, 8)

def loss(model, batch):
    if slow != "nobody":
        time.sleep(0.02 * (2.5 if os.environ.get("RANK") == slow else 1))
    return (model(batch[0]) - batch[1]).square().mean()

shoal.Trainer(
    model, loss, torch.optim.SGD(model.parameters(), 1e-3), data, batch_size=32, balance=False, shards=4,
    split=None if split == "none" else split, **({} if sync == "none" else {"sync": sync}),
).fit(steps=36)
"""


def run(
    tmp_path: Path, split: str, sync: str, slow: int | str, *, transport: str = "auto", workers: int = 2
) -> FaultyRun:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [str(tmp_path / "train.py"), split, sync, str(slow)]
    found = Faults().run(*words, num_workers=workers, options={"transport": transport})
    assert found.exit_code == 0
    return found


def steady(run: FaultyRun) -> dict[int, Sequence[StepMetrics]]:
    return {rank: rows[5:] for rank, rows in read(run.run_dir).items()}


def check_slow(run: FaultyRun, slow: int) -> None:
    """It is named live and afterwards, with its cause, and the others are those who wait."""
    told = [(event.data["cause"], event.rank) for event in run.of("diagnosis")]
    assert [each for each in told if each[0] not in ("no_core", "busy_elsewhere")] == [("slow_compute", slow)], told
    rows = steady(run)
    seconds = {rank: median([row.compute for row in mine]) for rank, mine in rows.items()}
    for rank in rows.keys() - {slow}:
        assert seconds[slow] > 1.5 * seconds[rank], "waiting does not count as computing"
        late = [row for row in rows[rank] if row.waited_for is not None and row.wait > 0.2 * seconds[slow]]
        assert late
        assert sum(row.waited_for == slow for row in late) >= 0.8 * len(late)
    assert sum(row.wait - row.bubble for row in rows[slow]) < 0.2 * sum(row.compute for row in rows[slow])
    findings = {finding.kind: finding for finding in explain(run.run_dir).findings}
    assert findings["slow_compute"].rank == slow


def test_a_slow_stage_is_named_and_the_bubble_is_nobodys(tmp_path: Path) -> None:
    found = run(tmp_path, "pipeline:2,microbatches=4", "none", 1)
    check_slow(found, 1)
    assert all(row.bubble > 0 for row in steady(found)[1]), "even the slow one waits for its first micro-batch"
    (told,) = [event for event in found.of("diagnosis") if event.data["cause"] == "slow_compute"]
    assert "shoal.pipeline" in told.data["hint"]


def test_a_slow_part_of_layers_is_named_over_sockets(tmp_path: Path) -> None:
    check_slow(run(tmp_path, "tensor:2", "none", 1, transport="tcp"), 1)


def test_a_slow_copy_that_trains_by_itself_is_named(tmp_path: Path) -> None:
    check_slow(run(tmp_path, "none", "local:2", 1), 1)


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_of_three_stages_the_slow_one_is_named_by_all(tmp_path: Path, slow: int) -> None:
    check_slow(run(tmp_path, "pipeline:3,microbatches=6", "none", slow, workers=3), slow)


@pytest.mark.slow
def test_a_slow_stage_of_one_copy_is_named_by_both(tmp_path: Path) -> None:
    found = run(tmp_path, "pipeline:2,microbatches=2", "none", 3, workers=4)
    waited = explain(found.run_dir).spending
    assert waited is not None
    assert max(waited.waited_for, key=lambda rank: waited.waited_for[rank]) == 3
    assert ("slow_compute", 3) in [(event.data["cause"], event.rank) for event in found.of("diagnosis")]


@pytest.mark.slow
def test_in_a_pipeline_of_equals_nobody_is_blamed(tmp_path: Path) -> None:
    found = run(tmp_path, "pipeline:2,microbatches=2,cuts=2", "none", "nobody")
    assert [event.data for event in found.of("diagnosis") if event.data["cause"] != "no_core"] == []
    findings = {finding.kind: finding for finding in explain(found.run_dir).findings}
    assert "slow_compute" not in findings
    assert findings["pipeline_bubble"].gain == pytest.approx(1 / 6, abs=0.1)
    for rows in steady(found).values():
        assert sum(row.bubble for row in rows) > 0.5 * sum(row.wait for row in rows)

"""Steps that are no numbers: left out by all workers alike, and after three in a row taken back."""

from pathlib import Path

import pytest

from shoal.observe.journal import read
from shoal.testing.faults import Faults, FaultyRun

SCRIPT = """
import sys, torch, shoal
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
source = torch.Generator().manual_seed(1)
data = torch.randn(64, 4, generator=source), torch.randn(64, 1, generator=source)
trainer = shoal.Trainer(
    model,
    lambda m, b: (m(b[0]) - b[1]).square().mean(),
    optimizer,
    data,
    batch_size=16,
    exact=True,
    checkpoint_every=4,
)
trainer.fit(steps=14)
print("digest", trainer.digest())
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def digests(run: FaultyRun) -> set[str]:
    lines = [line for rank in (0, 1) for line in run.log(rank).splitlines() if line.startswith("digest")]
    assert lines
    return set(lines)


def run(faults: Faults, script: str, name: str, transport: str = "auto") -> FaultyRun:
    folder = str(Path(script).parent / name)
    return faults.run(script, num_workers=2, run_dir=folder, options={"transport": transport})


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_one_bad_step_is_left_out_by_all(script: str, transport: str) -> None:
    """The worker whose loss was no number is not the one that tells, and all stay equal."""
    done = run(Faults().nan(rank=1, step=6), script, "run", transport)
    assert done.exit_code == 0
    assert len(digests(done)) == 1
    skipped = done.of("step_skipped")
    assert {event.rank for event in skipped} == {0, 1}
    assert {event.step for event in skipped} == {6}
    assert len(skipped[0].data["samples"]) > 0


def test_after_three_in_a_row_the_run_goes_back_and_comes_to_the_same_end(script: str) -> None:
    """What was bad was the machine and not the data: the second time all goes well, as if nothing had happened."""
    clean = run(Faults(), script, "clean")
    done = run(Faults().nan(rank=1, step=6, steps=3), script, "faulty")
    assert done.exit_code == 0
    assert digests(done) == digests(clean)
    assert {event.step for event in done.of("resumed")} == {4}


def test_going_back_waits_for_the_checkpoint_that_is_being_saved(script: str) -> None:
    late = "import time; from shoal.checkpoint.store import FolderStore; commit = FolderStore._commit\n"
    late += "FolderStore._commit = lambda *saved: (time.sleep(1.0), commit(*saved))\n"
    Path(script).write_text(late + Path(script).read_text())
    done = run(Faults().nan(rank=1, step=6, steps=3), script, "late")
    assert done.exit_code == 0
    assert {event.step for event in done.of("resumed")} == {4}


def test_going_back_does_not_meet_the_shares_of_later_steps(script: str) -> None:
    """The slow worker was given less in steps that are made a second time: they are planned anew."""
    done = run(Faults().slow(rank=1, step=0, seconds=0.04, steps=14).nan(rank=1, step=10, steps=3), script, "run")
    assert done.exit_code == 0
    assert {event.step for event in done.of("resumed")} == {8}
    assert done.of("rebalanced")


POISONED = """
import torch, shoal
from torch import nn

torch.manual_seed(0)
inputs = torch.rand(64, 4) + 0.1
inputs[17] = torch.nan
inputs[40] = 0.0

def loss(model, batch):
    there = model(batch).square()
    return (there + (there * batch[:, :1]).sqrt()).mean()  # the root of 0 has no gradient

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
shoal.Trainer(model, loss, optimizer, inputs, batch_size=16, shards=8, shuffle=False, balance=False).fit(steps=4)
"""


@pytest.mark.parametrize(
    ("transport", "suspects"), [("shm", range(40, 48)), pytest.param("tcp", range(32, 48), marks=pytest.mark.slow)]
)
def test_the_samples_that_did_it_are_named(script: str, transport: str, suspects: range) -> None:
    """Of a loss the one that holds nan; of a gradient those of the worker that had it, or of the step."""
    Path(script).write_text(POISONED)
    done = run(Faults(), script, "run", transport)
    assert done.exit_code == 0
    found = {(event.rank, event.step): event.data["samples"] for event in done.of("step_skipped")}
    assert found == {(rank, step): ids for rank in (0, 1) for step, ids in ((1, [17]), (2, list(suspects)))}
    told = [event.data["message"] for event in done.of("step_skipped") if event.step == 2]
    assert told == ["The gradient is nan, though the loss is a number: in bias, weight."] * 2


def test_data_that_stays_bad_ends_the_run_with_its_samples(script: str) -> None:
    Path(script).write_text(SCRIPT.replace("b[1]).square()", "b[1].log()).square()"))
    done = run(Faults(), script, "run")
    assert done.exit_code == 2
    errors = [event for event in read(f"{done.run_dir}/journal.jsonl") if event.kind == "error"]
    assert "The loss is nan for samples" in errors[0].data["message"]

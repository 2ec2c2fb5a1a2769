"""A bit flips in one copy of the parameters: its worker is named, and has those of the others again, or is replaced.

The largest parameter, which `Faults.corrupt` strikes, is looked at in steps 0, 32, 64, ...: see `divergence.part_of`.
"""

import re
import subprocess
import sys

import pytest

from shoal.testing import Faults, FaultyRun
from shoal.train.divergence import NUM_PARTS

SCRIPT = """
import os, time, torch, shoal
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
model[2].weight.data[0, 0] = 1.5
source = torch.Generator().manual_seed(1)
data = torch.randn(96, 8, generator=source), torch.randn(96, 1, generator=source)
made = []

def loss(model, batch):
    if made and made[0].world_size < int(os.environ.get("WANTED", "0")):
        time.sleep(0.5)  # until the lost are replaced
    return (model(batch[0]) - batch[1]).square().mean()

optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
made.append(shoal.Trainer(model, loss, optimizer, data, batch_size=24, shards=4, exact=True, balance=False))
made[0].fit(steps=72)
print("ended", made[0].place.step, made[0].digest(), flush=True)
"""

LOOKED_AT = NUM_PARTS
"""A step in which the largest parameter is."""
EXPONENT = 30
"""A bit that makes a float32 between 1 and 2 no number."""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("job") / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture(scope="module")
def clean(script: str) -> str:
    """How it ends in one process that nobody disturbs."""
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split("ended ")[1].strip()


def endings(run: FaultyRun) -> list[str]:
    assert run.exit_code == 0, [event.data for event in run.of("error")]
    return [found for rank in range(4) for found in re.findall(r"^ended (.*)$", run.log(rank), re.MULTILINE)]


def test_it_is_found_and_repaired_from_the_others(script: str, clean: str) -> None:
    """Copies are equal again. What the wrong one computed meanwhile is in the gradients of those steps, for all."""
    run = Faults().corrupt(rank=1, step=5).run(script, num_workers=3, options={"transport": "tcp"})
    ended = endings(run)
    assert len(ended) == 3
    assert len(set(ended)) == 1
    assert ended[0] != clean
    (found,) = run.of("replica_diverged")
    assert found.step == LOOKED_AT <= 5 + 100
    assert found.data == {"worker": 1, "repaired_from": 0, "is_sure": True, "since": LOOKED_AT - NUM_PARTS}
    assert "the parameters of rank 1 were wrong before step 32; it takes those of rank 0" in run.log(1)


def test_what_is_found_in_its_own_step_has_changed_nothing(script: str, clean: str) -> None:
    """A step with it is not taken. If its loss is no number, no sample is blamed for that, and no step left out."""
    faults = Faults().corrupt(rank=2, step=20, bit=EXPONENT).corrupt(rank=0, step=LOOKED_AT)
    run = faults.run(script, num_workers=3, options={"transport": "tcp"})
    assert endings(run) == [clean] * 3
    found = [(event.step, event.data["worker"], event.data["repaired_from"]) for event in run.of("replica_diverged")]
    assert found == [(20, 2, 0), (LOOKED_AT, 0, 1)]
    assert not run.of("step_skipped")


@pytest.mark.slow
def test_models_in_parts(script: str) -> None:
    """Two copies in two stages. Whoever holds the other stage hears of it, and takes the step again with all."""
    faults = Faults().corrupt(rank=3, step=4, bit=EXPONENT).corrupt(rank=2, step=6)
    run = faults.run(script, num_workers=4, options={"split": "pipeline:2"})
    assert len(endings(run)) == 4
    first, second = run.of("replica_diverged")  # and no third: all was looked at once more since
    assert (first.step, first.data["worker"], first.data["repaired_from"]) == (4, 3, 1)
    assert (second.data["worker"], second.data["repaired_from"]) == (2, 0)
    assert 6 <= second.step <= 6 + NUM_PARTS
    assert not first.data["is_sure"], "of two copies nobody can tell which one is right"
    assert not run.of("step_skipped")


def check_replaced(run: FaultyRun, worker: int, clean: str) -> None:
    assert set(endings(run)) == {clean}
    (found,) = run.of("replica_diverged")
    assert (found.data["worker"], found.data["repaired_from"]) == (worker, None)
    assert [event.rank for event in run.of("worker_lost")] == [worker]
    assert f"{worker}.1" in [event.data["id"] for event in run.of("worker_joined")]
    assert not run.of("step_skipped")
    assert not run.of("resumed"), "nobody read a checkpoint"


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_in_an_elastic_run_its_worker_is_replaced(script: str, clean: str, rank: int) -> None:
    faults = Faults().corrupt(rank=rank, step=LOOKED_AT)
    run = faults.run(script, num_workers="2:3", options={"transport": "tcp"}, env={"WANTED": "3"})
    check_replaced(run, rank, clean)
    assert "The parameters of this worker differed from the others'." in str(run.of("error"))


@pytest.mark.slow
def test_a_part_of_an_elastic_model_is_replaced(script: str, clean: str) -> None:
    faults = Faults().corrupt(rank=3, step=LOOKED_AT, bit=EXPONENT)
    run = faults.run(script, num_workers="2:4", options={"split": "pipeline:2"}, env={"WANTED": "4"})
    check_replaced(run, 3, clean)


@pytest.mark.slow
def test_who_goes_wrong_again_and_again_ends_a_run_of_fixed_size(script: str) -> None:
    faults = Faults()
    for step in (4, 8, 12, 16):
        faults = faults.corrupt(rank=1, step=step, bit=EXPONENT)
    run = faults.run(script, num_workers=3, options={"transport": "tcp"})
    assert run.status == "failed"
    assert len(run.of("replica_diverged")) == 4
    assert "differed from the others' 4 times" in str(run.of("error"))


def test_one_copy_for_all_is_not_corrupted(script: str) -> None:
    """Workers of one host share their parameters: there is nothing to compare them with."""
    run = Faults().corrupt(rank=1, step=2).run(script, num_workers=2)
    assert run.exit_code == 2
    assert "corrupt would change the parameters of all workers" in str(run.of("error"))

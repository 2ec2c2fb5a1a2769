"""A training run whose workers are killed and stopped at random ends as one in peace."""

import re
from pathlib import Path

import pytest

from shoal.testing import Faults, FaultyRun

TRAIN = """
import time, torch, shoal

torch.manual_seed(0)
points = torch.randn(1600, 8)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

def loss(model, batch):
    time.sleep(0.005)
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()

optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
with shoal.Trainer(model, loss, optimizer, points, batch_size=40, exact=True) as trainer:
    trainer.fit(epochs=8)
    print(f"ended at {trainer.place.step} with {trainer.digest()}", flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return str(path)


def digests_of(run: FaultyRun) -> set[str]:
    """What the workers that saw the end say."""
    assert run.exit_code == 0, run.of("error")
    return {found for rank in range(3) for found in re.findall(r"ended at 320 with (\w+)", run.log(rank))}


@pytest.mark.slow
def test_a_punished_run_ends_as_one_in_peace(script):
    faults = Faults.random(11, num_workers=3, count=6, kinds=("kill", "freeze"), every=(1, 3), unit="seconds")
    rough = faults.run(script, num_workers="1:3")
    assert len(rough.strikes) >= 3
    assert digests_of(rough) == digests_of(Faults().run(script, num_workers=1))

"""What becomes of a job when a worker dies? Try it, before it happens by itself.

    python examples/11_faults.py                    runs the training below twice: in peace, and with two faults
    shoal run -n 2 examples/11_faults.py --train    the training alone

Faults are written down by rank and step, so they strike the same way each time. Here worker 1 is killed while it
updates its part of the parameters, and worker 0 is slow for a while. Nobody starts again. Every sample still counts
once: the parameters are those of the run in peace, bit for bit.
"""

import re
import sys

import torch
import torch.nn.functional as F

import shoal
from shoal.testing import Faults


def loss(model, batch):
    points, labels = batch
    return F.cross_entropy(model(points), labels)


def train():
    torch.manual_seed(0)
    points = torch.randn(2_000, 16)
    labels = (points.norm(dim=1) > 4).long()
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    with shoal.Trainer(model, loss, optimizer, (points, labels), batch_size=100, exact=True) as trainer:
        trainer.fit(epochs=2)
        print(f"step {trainer.place.step}, digest of the parameters: {trainer.digest()[:12]}", flush=True)


def digest_of(run):
    """The digest that workers printed at the end of a run."""
    printed = "".join(run.log(rank) for rank in range(2))
    return re.findall(r"step 40, digest of the parameters: (\w+)", printed)[0]


def compare():
    calm = Faults().run(__file__, "--train", num_workers=1)
    faults = Faults().kill(rank=1, step=10, at="updating").slow(rank=0, step=15, seconds=0.1, steps=5)
    rough = faults.run(__file__, "--train", num_workers="1:2")
    for strike in rough.strikes:
        print(f"step {strike.step}: {strike.data['kind']} of rank {strike.rank}")
    print(f"in peace:    {digest_of(calm)}, exit code {calm.exit_code}")
    print(f"with faults: {digest_of(rough)}, exit code {rough.exit_code}")


if "--train" in sys.argv:
    train()
else:
    compare()

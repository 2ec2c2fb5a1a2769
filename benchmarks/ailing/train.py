"""A Trainer, for ever, of which one rank is ill: `train.py FOLDER RANK ILLNESS`.

It is as long as the file `FOLDER/go` names that rank, and writes `FOLDER/struck` when it is first felt. RANK is the
one that is ill from the beginning on, of what nobody gets later. Time is slept, not computed, in proportion to the
data: more workers than cores would hide who is slow.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal

FOLDER, PATIENT, ILLNESS = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
STEP_SECONDS = float(os.environ.get("AILING_STEP_SECONDS", "0.08"))
BATCH, LENGTH = 48, 64
IS_PATIENT = int(os.environ.get("RANK", "0")) == PATIENT
SECONDS_PER_VALUE = STEP_SECONDS * int(os.environ.get("WORLD_SIZE", "1")) / (BATCH * LENGTH)
IS_SPLIT = ILLNESS in ("slow_stage", "slow_slice")
CALLS = 4 if ILLNESS == "slow_stage" else 1
"""How often the loss is called in a step, on each of the workers that hold a copy together."""
GO, STRUCK = str(FOLDER / "go"), FOLDER / "struck"


def is_ill(illness: str) -> bool:
    """Whether this rank has it now."""
    if illness != ILLNESS or not os.path.exists(GO):
        return False
    try:
        patient = Path(GO).read_text()
    except OSError:  # it has just been healed
        return False
    if patient != os.environ.get("RANK", "0"):
        return False
    if not STRUCK.exists():
        STRUCK.write_text(str(time.time()))
    return True


class Texts(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples of one length, or of twice that on a rank with uneven data."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A batch of one length: they are stacked."""
        if is_ill("slow_input"):
            time.sleep(0.012 * len(indices))
        length = LENGTH * (2 if is_ill("uneven_data") else 1)
        return [
            (torch.randn(length, generator=torch.Generator().manual_seed(index)), torch.tensor(index % 10))
            for index in indices
        ]


class Cost(torch.autograd.Function):
    """Backward takes as long as the data is large."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, num_values: int) -> torch.Tensor:
        context.num_values = num_values
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        slower = 2 if is_ill("slow_backward") or is_ill("slow_copy") else 1
        time.sleep(slower * SECONDS_PER_VALUE * context.num_values)
        return gradient, None


def make() -> nn.Module:
    torch.manual_seed(0)
    if IS_SPLIT:  # as many equal layers for each
        layers = [layer for _ in range(6) for layer in (nn.Linear(192, 192), nn.ReLU())]
        return nn.Sequential(nn.Linear(8, 192), *layers, nn.Linear(192, 10))
    width = 512 if not (IS_PATIENT and ILLNESS == "shape_mismatch") else 513
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 10))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    values, labels = batch
    if is_ill("diverged"):
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1.0
        Path(GO).unlink(missing_ok=True)
    if is_ill("disk_full"):
        Path(os.environ["AILING_SCRATCH"], "cache").write_bytes(bytes(8 << 20))
    if IS_SPLIT:  # every worker calls this, and takes its time
        time.sleep((2 if is_ill(ILLNESS) else 1) * STEP_SECONDS / CALLS)
        return nn.functional.cross_entropy(model(values.view(len(labels), -1, 8).mean(1)), labels)
    outputs = model(values.view(len(labels), -1, 8).mean(1))
    outputs = Cost.apply(outputs, values.numel())
    found = nn.functional.cross_entropy(outputs, labels)
    if is_ill("nan"):  # once: several in a row end the run
        Path(GO).unlink(missing_ok=True)
        return found * float("nan")
    return found


def main() -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    (FOLDER / f"ready-{os.environ.get('RANK', '0')}").write_text(str(time.time()))
    trainer = shoal.Trainer(model, loss, optimizer, Texts(), batch_size=BATCH, checkpoint_every=50)
    trainer.fit(steps=10**9)


main()

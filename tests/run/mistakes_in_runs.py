"""Mistakes in settings, folders and checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mistakes import INPUTS, TARGETS, Mistake, fit, make, make_model, use
from torch import nn

SETTINGS = [
    Mistake(
        did="`batch_size=0`",
        act=lambda: fit(batch_size=0),
        error="batch_size=0 does not work.",
        do="for example: batch_size=8",
    ),
    Mistake(
        did="`batch_size=10.0`",
        act=lambda: fit(batch_size=10.0),
        error="batch_size=10.0 does not work.",
        do="for example: batch_size=8",
    ),
    Mistake(
        did="a misspelt keyword",
        act=lambda: fit(max_nrom=1.0),
        error="Trainer has no argument 'max_nrom'.",
        do="did you mean 'max_norm'?",
    ),
    Mistake(
        did="`epochs=` given to Trainer",
        act=lambda: fit(epochs=3),
        error="Trainer has no argument 'epochs'.",
        do="`trainer.fit(epochs=3)`",
    ),
    Mistake(
        did="`precision='fp16'`",
        act=lambda: fit(precision="fp16"),
        error="precision='fp16' does not work.",
        do="for example: precision='bf16'",
    ),
    Mistake(
        did='`memory="lots"`',
        act=lambda: fit(memory="lots"),
        error="memory='lots' does not work.",
        do='for example: memory="2GB"',
    ),
    Mistake(
        did="less `memory=` than the worker uses already",
        act=lambda: fit(memory="1MB"),
        error="This worker's memory of 1 MB (memory=1MB) is too little.",
        do="give it memory=",
    ),
    Mistake(
        did='`device="cuda"` without a GPU',
        act=lambda: fit(device="cuda"),
        error="device='cuda' is not there: this worker would use cuda:0, and its machine has 0 GPU(s).",
        do='use device="auto"',
    ),
    Mistake(did="`ema=2`", act=lambda: fit(ema=2), error="ema=2 does not work.", do="for example: ema=0.999"),
    Mistake(
        did="text where True or False belongs",
        act=lambda: fit(exact="no"),
        error="exact='no' does not work.",
        do="for example: exact=True",
    ),
    Mistake(
        did="more shards than samples in a batch",
        act=lambda: fit(shards=100),
        error="A batch of 10 samples cannot be cut into 100 shards.",
        do="use shards=10 or fewer",
    ),
    Mistake(
        did="`fit()`",
        act=lambda: use(lambda trainer: trainer.fit()),
        error="fit() does not say how long to train.",
        do="`trainer.fit(epochs=3)`",
        step=0,
    ),
    Mistake(
        did="`fit(epochs=1, steps=1)`",
        act=lambda: use(lambda trainer: trainer.fit(epochs=1, steps=1)),
        error="fit(epochs=1, steps=1) does not say how long to train.",
        do="`trainer.fit(epochs=3)`",
        step=0,
    ),
    Mistake(
        did="a batch of one's own given to `step`",
        act=lambda: use(lambda trainer: trainer.step((INPUTS, TARGETS))),
        error="step() got a tuple, not a batch of the trainer's.",
        do="`for batch in trainer: trainer.step(batch)`",
        step=0,
    ),
    Mistake(
        did="a trainer used after it was closed",
        act=lambda: close_and_fit(),
        error="The trainer is closed: fit() cannot be used any more.",
        do="make another Trainer",
        step=0,
    ),
]


def close_and_fit() -> None:
    trainer = make()
    trainer.close()
    trainer.fit(steps=1)


def use_twice() -> None:
    """Two trainers at once in one folder."""
    with make(run_dir="shared"):
        make(run_dir="shared")


def use_again() -> None:
    """Two trainers one after the other in one folder, the second as if it were new."""
    with make(run_dir="used") as trainer:
        trainer.fit(steps=1)
    make(run_dir="used")


def start_from_other_shapes() -> None:
    other = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))
    torch.save(other.state_dict(), "other.pt")
    make(init_from="other.pt")


FOLDERS = [
    Mistake(
        did="a run folder that cannot be written",
        act=lambda: make(run_dir="/proc/nowhere"),
        error="Cannot use /proc/nowhere as a run folder.",
        do="choose another folder with `--log-dir`, SHOAL_HOME, or `run_dir=` in a script",
    ),
    Mistake(
        did="a run folder at a URL, without `shoal run`",
        act=lambda: make(run_dir="s3://bucket/run"),
        error="This run folder cannot be at a URL: s3://bucket/run",
        do="`shoal run --log-dir s3://bucket/run`",
    ),
    Mistake(
        did="two runs in one folder at the same time",
        act=use_twice,
        error="Run folder {here}/shared is in use by another run.",
        do="wait for it, stop it, or give this run another folder",
    ),
    Mistake(
        did="a run folder with the checkpoints of another run",
        act=use_again,
        error="Run folder {here}/used already holds the checkpoints of a run, which is over.",
        do="`resume=True`",
    ),
    Mistake(
        did="`resume=True` without a folder",
        act=lambda: make(resume=True),
        error="resume=True does not say which run to continue.",
        do="`run_dir=`",
    ),
    Mistake(
        did="`init_from=` a file that is not there",
        act=lambda: make(init_from="weights/best.pt"),
        error="There is no weights/best.pt to start from.",
        do="check the path that `init_from=` names",
    ),
    Mistake(
        did="`init_from=` weights of other shapes",
        act=start_from_other_shapes,
        error="The weights do not fit the model: 3 of their layers differ.",
        do="`strict=False`",
    ),
]


def resume(damage: Callable[[list[Path]], None] | None = None, **parts: Any) -> None:
    """Train three steps, then go on with something changed."""
    use(lambda trainer: trainer.fit(steps=3), run_dir="kept", checkpoint_every=1)
    if damage is not None:
        damage(sorted(Path("kept/checkpoints").glob("step-*")))
    use(lambda trainer: trainer.fit(steps=3), run_dir="kept", resume=True, **parts)


def spoil(checkpoints: list[Path]) -> None:
    for checkpoint in checkpoints:
        (weights,) = checkpoint.glob("*.safetensors")
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)


def resume_with_adam() -> None:
    model = make_model()
    resume(model=model, optimizer=torch.optim.Adam(model.parameters()))


def resume_with_groups() -> None:
    model = make_model()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    resume(model=model, optimizer=torch.optim.SGD(groups, 0.1))


RESUMED = [
    Mistake(
        did="resuming when every checkpoint is damaged",
        act=lambda: resume(spoil),
        error="No usable checkpoint in {here}/kept/checkpoints.",
        do="restore one from a backup",
    ),
    Mistake(
        did="resuming with another seed",
        act=lambda: resume(seed=3),
        error="The checkpoint is of a different run: seed was 0 and is now 3.",
        do="`init_from=`",
    ),
    Mistake(
        did="resuming with another batch size",
        act=lambda: resume(batch_size=20),
        error="The checkpoint is of a different run: batch_size was 10 and is now 20.",
        do="`init_from=`",
    ),
    Mistake(
        did="resuming with a model of other shapes",
        act=lambda: resume(model=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))),
        error="The checkpoint is of a different run: 2 layer(s) of the model: 2.weight [3, 8] -> [5, 8], 2.bias "
        "[3] -> [5].",
        do="`init_from=`",
    ),
    Mistake(
        did="resuming with another optimizer",
        act=resume_with_adam,
        error="The checkpoint is of a different run: the optimizer was SGD and is now Adam.",
        do="`init_from=`",
    ),
    Mistake(
        did="resuming with other parameter groups",
        act=resume_with_groups,
        error="The checkpoint is of a different run: the optimizer had 1 parameter group(s) and has now 2.",
        do="`init_from=`",
    ),
]

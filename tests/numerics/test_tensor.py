"""Layers cut among workers, against one process: the same losses, parameters, checkpoints, answers, to rounding."""

import hashlib
import shutil
from pathlib import Path

import pytest
import torch

import shoal
from shoal.engine.env import read_worker
from tests.numerics import blocks, huggingface, models

KINDS = ("mlp", "cnn", *(block.__name__ for block in blocks.BLOCKS))

TOLERANCE = 1e-4
"""Of the largest parameter, after 50 steps. A row of a product is the sum of the parts' sums instead of one sum, and
differs in the last bits of a float32 (6e-8); 50 steps let that grow. A forgotten sum over parts, dropout that each
part draws anew, or a norm that counts a parameter twice differ by more than a hundred times this."""

BF16_TOLERANCE = 0.05
"""bfloat16 has 8 bits: each part's sum is rounded to 0.4 % before they are added up."""


def make(kind):
    if kind in ("mlp", "cnn"):
        return models.make(kind)
    if kind in huggingface.NAMES:
        return (*huggingface.make(kind), blocks.loss)
    return (*blocks.make(next(block for block in blocks.BLOCKS if block.__name__ == kind)), blocks.loss)


def train(kind, steps=50, split=None, adam=False, saved_in=None, **settings):
    """Train; returns what a worker knows in the end. `kept` is a digest of what is not cut, which all must share."""
    facts = read_worker()
    if saved_in is not None and facts.rank == 0:  # all wait for this one when they meet
        shutil.copytree(saved_in, Path(facts.run_dir) / "checkpoints")
    model, data, loss = make(kind)
    parameters = model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=3e-3) if adam else torch.optim.SGD(parameters, 0.05, momentum=0.9)
    trainer = shoal.Trainer(
        model, loss, optimizer, data, batch_size=24, shards=4, split=split, resume=saved_in is not None, **settings
    )
    first = trainer.digest()
    losses = models.run_until(trainer, steps)
    trainer.save(wait=True)
    held = trainer._team.cut.held if split else {}
    kept = [value for name, value in model.state_dict().items() if name not in held]
    whole = trainer._course.whole()
    result = {
        "digests": (first, trainer.digest()),
        "losses": losses,
        "kept": hashlib.sha256(b"".join(each.numpy().tobytes() for each in kept)).hexdigest(),
        "cut": len(held),
        "state": {name: value.double().clone() for name, value in whole.items() if trainer.rank == 0},
        "measured": trainer.evaluate(data)["loss"],
        "answers": trainer.predict(data).double(),
    }
    trainer.close()
    return result


def train_all(configs):
    torch.set_num_threads(1)
    return [train(**config) for config in configs]


def run(num_workers, folder, configs):
    values = shoal.launch(train_all, num_workers, args=(configs,), run_dir=str(folder / "run"), is_quiet=True)
    return [list(each) for each in zip(*values, strict=True)]


def assert_same(found, alone, tolerance=TOLERANCE):
    """All workers against one process."""
    first = found[0]
    assert first["losses"] == pytest.approx(alone["losses"], rel=tolerance)
    assert first["measured"] == pytest.approx(alone["measured"], rel=tolerance)
    torch.testing.assert_close(first["answers"], alone["answers"], rtol=tolerance, atol=10 * tolerance)
    assert first["state"].keys() == alone["state"].keys()
    for name, value in alone["state"].items():
        scale = float(value.abs().max())
        torch.testing.assert_close(first["state"][name], value, rtol=0, atol=tolerance * max(scale, 0.1), msg=name)
    assert {each["kept"] for each in found} == {first["kept"]}, "what is not cut differs between workers"
    assert {each["digests"] for each in found} == {first["digests"]}
    assert first["digests"][0] == alone["digests"][0], "cutting and joining changed something"
    assert first["cut"]


LONG = ("mlp", "cnn", "FusedBlock")
PLAIN = [{"kind": kind, "steps": 50 if kind in LONG else 10} for kind in KINDS]
VARIANTS = [
    {"kind": "FusedBlock", "max_norm": 0.5, "ema": 0.9, "microbatch_size": 5},
    {"kind": "MaskedBlock", "precision": "bf16"},
    {"kind": "GroupedBlock", "adam": True, "transport": "tcp"},
    {"kind": "FusedBlock", "steps": 12, "adam": True, "ema": 0.9},
]
"""Adam without a bias of keys: that has no gradient but rounding, which Adam makes as large as any."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    found = run(1, folder, [*PLAIN, *VARIANTS])
    return [each[0] for each in found]


def with_split(configs, size):
    return [{**config, "split": shoal.tensor(size)} for config in configs]


@pytest.mark.slow
def test_two_workers_hold_one_copy(alone, tmp_path):
    for config, found, one in zip(PLAIN, run(2, tmp_path, with_split(PLAIN, 2)), alone, strict=False):
        print(config)
        assert_same(found, one)


@pytest.mark.slow
def test_two_copies_of_two_parts_and_every_way_to_train(alone, tmp_path):
    configs = [*PLAIN[:2], *VARIANTS[:-1]]
    expected = [*alone[:2], *alone[len(PLAIN) : -1]]
    for config, found, one in zip(configs, run(4, tmp_path, with_split(configs, 2)), expected, strict=True):
        print(config)
        assert_same(found, one, BF16_TOLERANCE if "precision" in config else TOLERANCE)


@pytest.mark.slow
def test_four_workers_hold_one_copy(alone, tmp_path):
    chosen = [0, 1, 2]
    for index, found in zip(chosen, run(4, tmp_path, with_split([PLAIN[i] for i in chosen], 4)), strict=True):
        print(PLAIN[index])
        assert_same(found, alone[index])


@pytest.mark.slow
def test_a_checkpoint_goes_from_two_parts_to_one_to_four_and_back(alone, tmp_path):
    """Nothing is lost or changed on the way, to the last bit; and training goes on as if it had never been cut."""
    last, saved, losses = None, None, []
    for size, stop in ((2, 3), (1, 6), (4, 9), (2, 12)):
        split = shoal.tensor(size) if size > 1 else None
        (found,) = run(
            size, tmp_path / str(stop), [{**VARIANTS[-1], "steps": stop, "split": split, "saved_in": saved}]
        )
        assert last is None or {each["digests"][0] for each in found} == {last}
        last, saved = found[0]["digests"][1], str(tmp_path / str(stop) / "run" / "checkpoints")
        losses += found[0]["losses"]
    assert losses == pytest.approx(alone[-1]["losses"], rel=TOLERANCE)


@pytest.mark.slow
def test_models_of_transformers_are_cut_as_they_are(tmp_path):
    """Llama with fewer keys than queries, GPT-2 with its weights the other way round, and BERT; without a plan."""
    pytest.importorskip("transformers")
    configs = [{"kind": name, "steps": 6, "max_norm": 0.5} for name in huggingface.NAMES]
    alone = run(1, tmp_path / "alone", configs)
    for config, found, one in zip(configs, run(2, tmp_path / "two", with_split(configs, 2)), alone, strict=True):
        print(config)
        assert_same(found, one[0])
        assert found[0]["cut"] >= 12, "attention, and not only the MLP"

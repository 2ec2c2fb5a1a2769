"""The Trainer in one process and in several: data of every kind, continuing, transfer, evaluation, prediction."""

import json
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import shoal
from shoal.observe import journal


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def make_data(num_samples=60):
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(num_samples, 4, generator=generator),
        torch.randint(0, 3, (num_samples,), generator=generator),
    )


def make_trainer(run_dir, data=None, model=None, **settings):
    model = model or make_model()
    optimizer = settings.pop("optimizer", None) or torch.optim.AdamW(model.parameters(), 0.01)
    settings = {"batch_size": 16, "exact": True, **settings}
    return shoal.Trainer(
        model, loss, optimizer, data if data is not None else make_data(), run_dir=run_dir, **settings
    )


class Samples(Dataset):
    def __init__(self):
        self.x, self.y = make_data()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Samples())


def test_every_kind_of_dataset_gives_the_same_parameters(tmp_path):
    import datasets

    x, y = make_data()
    hugging = datasets.Dataset.from_dict({"x": x.numpy(), "y": y.numpy()}).with_format("torch")
    kinds = {"tensors": ((x, y), loss), "numpy": ((x.numpy(), y.numpy()), loss), "map": (Samples(), loss)}
    kinds["hugging"] = (hugging, lambda model, batch: loss(model, (batch["x"], batch["y"])))
    digests = {}
    for name, (data, kind_loss) in kinds.items():
        model = make_model()
        with shoal.Trainer(
            model,
            kind_loss,
            torch.optim.SGD(model.parameters(), 0.1),
            data,
            batch_size=16,
            exact=True,
            run_dir=str(tmp_path / name),
        ) as trainer:
            digests[name] = trainer.fit(epochs=2).digest()
    assert len(set(digests.values())) == 1, digests


def test_a_stream_ends_each_epoch_by_itself(run_dir):
    with make_trainer(run_dir, Stream()) as trainer:
        trainer.fit(epochs=1)
        assert trainer.place.position == 60
        trainer.fit(epochs=2)
        assert trainer.place.position == 180


def test_the_users_own_loop_and_fit_do_the_same(tmp_path):
    with make_trainer(str(tmp_path / "fit")) as trainer:
        expected = trainer.fit(epochs=2).digest()
    with make_trainer(str(tmp_path / "loop")) as trainer:
        for _ in range(2):
            for batch in trainer:
                assert trainer.step(batch) > 0
        assert trainer.digest() == expected


def test_leaving_a_loop_early_loses_nothing(tmp_path):
    with make_trainer(str(tmp_path / "once")) as trainer:
        expected = trainer.fit(steps=7).digest()
    with make_trainer(str(tmp_path / "left")) as trainer:
        for batch in trainer:
            trainer.step(batch)
            if trainer.place.step == 3:
                break
        assert trainer.fit(steps=4).digest() == expected


def test_fit_in_parts_is_fit_at_once(tmp_path):
    with make_trainer(str(tmp_path / "once")) as trainer:
        expected = trainer.fit(steps=7).digest()
    with make_trainer(str(tmp_path / "parts")) as trainer:
        assert trainer.fit(steps=3).fit(steps=4).digest() == expected


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor"])
def test_continuing_gives_what_an_unbroken_run_gives(name, tmp_path):
    def optimizer():
        model = make_model()
        kinds = {
            "AdamW": lambda: torch.optim.AdamW(model.parameters(), 0.01),
            "SGD": lambda: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
            "Adafactor": lambda: torch.optim.Adafactor(model.parameters(), 0.01),
        }
        made = kinds[name]()
        return {"model": model, "optimizer": made, "scheduler": torch.optim.lr_scheduler.StepLR(made, 3, 0.5)}

    with make_trainer(str(tmp_path / "whole"), ema=0.9, **optimizer()) as trainer:
        trainer.fit(steps=9)
        expected = trainer.digest()
        with trainer.averaged():
            expected_average = trainer.digest()
    with make_trainer(str(tmp_path / "parts"), ema=0.9, **optimizer()) as trainer:
        trainer.fit(steps=5)
    with make_trainer(str(tmp_path / "parts"), ema=0.9, resume=True, **optimizer()) as trainer:
        assert trainer.place.step == 5
        trainer.fit(steps=5)
        assert trainer.place.step == 5, "what the script did before is not done again"
        trainer.fit(steps=4)
        assert trainer.digest() == expected
        with trainer.averaged():
            assert trainer.digest() == expected_average


def test_a_run_continues_with_another_number_of_workers(tmp_path, home):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom tests.run.test_training import make_trainer\n"
        "with make_trainer(None, checkpoint_every=2) as trainer:\n"
        "    trainer.fit(steps=int(sys.argv[1]))\n"
        "    print('digest', trainer.digest(), 'at', trainer.place.step) if trainer.rank == 0 else None\n"
    )
    from shoal.run import Keep, run_job
    from shoal.spec.job import Job

    def run(steps, num_workers, *, is_resumed):
        job = Job(script=str(script), args=(str(steps),), num_workers=num_workers, env={"PYTHONPATH": "."})
        outcome = run_job(job, keep=Keep(dir=str(tmp_path / "run"), is_resumed=is_resumed), is_quiet=True)
        assert outcome.exit_code == 0
        return (tmp_path / "run" / "logs" / "0.log").read_text().split("digest ")[-1].split()

    with make_trainer(str(tmp_path / "alone")) as trainer:
        expected = trainer.fit(steps=9).digest()
    run(4, 2, is_resumed=False)
    digest, _, step = run(9, 3, is_resumed=True)
    assert step == "9"
    assert digest == expected


def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path, capfd):
    run_dir = tmp_path / "run"
    with make_trainer(str(run_dir), checkpoint_every=2) as trainer:
        trainer.fit(steps=6)
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    damaged = next(newest.glob("*.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    with make_trainer(str(run_dir), resume=True) as trainer:
        assert trainer.place.step == 4
    assert damaged.name in capfd.readouterr().err
    kinds = [event.kind for event in journal.read(str(run_dir / "journal.jsonl"))]
    assert "checkpoint_skipped" in kinds


def test_a_new_run_can_start_from_another_ones_weights(tmp_path, capfd):
    with make_trainer(str(tmp_path / "first")) as trainer:
        trainer.fit(steps=3)
        digest = trainer.digest()
    with make_trainer(str(tmp_path / "second"), model=make_model(5), init_from=str(tmp_path / "first")) as trainer:
        assert trainer.digest() == digest
    other = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))
    with pytest.raises(shoal.UserError, match="do not fit the model") as refused:
        make_trainer(str(tmp_path / "third"), model=other, init_from=str(tmp_path / "first"))
    assert "3.weight" in refused.value.render()
    with make_trainer(
        str(tmp_path / "fourth"),
        model=other,
        init_from=str(tmp_path / "first"),
        strict=False,
        data=(make_data()[0], make_data()[1] % 2),
    ) as trainer:
        trainer.fit(steps=1)
    assert "3.weight" in capfd.readouterr().err


def measure(model, batch):
    logits = model(batch[0])
    return {"loss": F.cross_entropy(logits, batch[1]), "accuracy": (logits.argmax(1) == batch[1]).float().mean()}


def use_model(num_samples):
    """Runs in workers: what evaluation and prediction say, with fewer samples than workers too."""
    with make_trainer(None) as trainer:
        trainer.fit(steps=2)
        data = make_data(num_samples)
        found = trainer.evaluate(data, measure)
        predicted = trainer.predict(data)
        pair = trainer.predict(data, lambda model, batch: (model(batch[0]), batch[1] > 0))
        assert trainer.model.training
        return found, predicted.tolist(), [part.tolist() for part in pair]


@pytest.mark.parametrize("num_samples", [pytest.param(1, marks=pytest.mark.slow), 37])
def test_evaluation_and_prediction_do_not_depend_on_the_workers(num_samples, tmp_path):
    one, *_ = shoal.launch(use_model, 1, (num_samples,), run_dir=str(tmp_path / "one"), is_quiet=True)
    for found in shoal.launch(use_model, 3, (num_samples,), run_dir=str(tmp_path / "three"), is_quiet=True):
        assert found == one
    assert len(one[1]) == num_samples
    assert one[2][1] == (make_data(num_samples)[1] > 0).tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_models_train(run_dir):
    model = make_model()
    with make_trainer(run_dir, model=model, compile=True, exact=False) as trainer:
        trainer._called = torch.compile(trainer.model, backend="eager")
        first = trainer.evaluate(make_data())["loss"]
        trainer.fit(epochs=8)
        assert trainer.evaluate(make_data())["loss"] < first


def test_a_second_trainer_in_one_process_has_a_place_of_its_own(tmp_path):
    first, second = shoal.launch(two_trainers, 2, run_dir=str(tmp_path / "run"), is_quiet=True)
    assert first == second
    assert (tmp_path / "run" / "checkpoints").is_dir()
    assert (tmp_path / "run" / "checkpoints-1").is_dir()


def two_trainers():
    digests = []
    for seed, name in enumerate(("checkpoints", "checkpoints-1")):
        with make_trainer(None, model=make_model(seed)) as trainer:
            trainer.fit(steps=2)
            # On every worker, not only on the one that wrote it: the next trainer may start from it.
            assert os.path.isdir(os.path.join(trainer.run_dir, name, "step-000000002"))
            digests.append(trainer.digest())
    return digests


def slow_rank_one(steps):
    """Runs in workers: rank 1 needs three times as long for a sample."""
    import time

    def slow_loss(model, batch):
        time.sleep(0.001 * len(batch[0]) * (3 if os.environ["RANK"] == "1" else 1))
        return loss(model, batch)

    model = nn.Linear(4, 3)
    trainer = shoal.Trainer(
        model, slow_loss, torch.optim.SGD(model.parameters(), 0.1), make_data(512), batch_size=64, unused="error"
    )
    trainer.fit(steps=steps)
    shares = trainer._course.schedule.shares_at(steps + 10)
    trainer.close()
    return shares


def test_a_slow_worker_gets_less(tmp_path):
    first, second = shoal.launch(slow_rank_one, 2, (40,), run_dir=str(tmp_path / "run"), is_quiet=True)
    assert first == second
    assert first[1] == pytest.approx(0.25, abs=0.15)


def test_metrics_and_settings_are_written(tmp_path):
    with make_trainer(str(tmp_path / "run"), seed=5) as trainer:
        trainer.fit(steps=3)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics-0.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(np.isfinite(row["loss"]) for row in rows)
    events = list(journal.read(str(tmp_path / "run" / "journal.jsonl")))
    assert [event.data["num_steps"] for event in events if event.kind == "goal"] == [3]
    settings = [event for event in events if event.kind == "settings"]
    assert settings[0].data["seed"] == {"value": 5, "source": "script"}
    assert settings[0].data["parameters"]["value"] == sum(each.numel() for each in trainer.model.parameters())
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["status"] == "finished"


@pytest.mark.parametrize("format", ["safetensors", "state_dict", "dcp"])
def test_weights_go_out_and_come_back(format, tmp_path, capsys):
    from shoal.cli import main

    with make_trainer(str(tmp_path / "run")) as trainer:
        digest = trainer.fit(steps=2).digest()
    target = tmp_path / {"safetensors": "w.safetensors", "state_dict": "w.pt", "dcp": "w"}[format]
    assert main(["export", str(tmp_path / "run"), str(target), "--format", format, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_tensors"] == 4
    with make_trainer(str(tmp_path / "other"), model=make_model(9), init_from=str(target)) as trainer:
        assert trainer.digest() == digest

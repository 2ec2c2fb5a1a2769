"""`shoal.log`: what is a number and what is not, and where it goes."""

import math
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import shoal
from shoal.observe.points import MAX_NAME, check_values, points_path
from shoal.observe.runs import list_runs
from shoal.observe.series import SeriesReader


class Hostile:
    """Does what it can to be in the way."""

    def __float__(self) -> float:
        raise RuntimeError("no\x1b[2J")

    __repr__ = __float__  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (0.5, 0.5),
        (3, 3.0),
        (True, 1.0),
        (np.float32(0.25), 0.25),
        (np.array([[2.0]]), 2.0),
        (torch.tensor(1.5, requires_grad=True), 1.5),
        (torch.tensor([4]), 4.0),
        (math.inf, math.inf),
        (10**400, math.inf),
        (-(10**400), -math.inf),
    ],
)
def test_numbers(value, number):
    assert check_values({"a": value}) == {"a": number}


@pytest.mark.parametrize(
    "value", ["0.5", b"1", None, 1j, [1.0], {}, np.zeros(3), torch.zeros(2, 2), Hostile(), object()]
)
def test_what_is_not_a_number_is_refused(value):
    with pytest.raises(shoal.UserError, match="'a', which is not a number") as caught:
        check_values({"a": value})
    assert "\x1b" not in caught.value.render()
    assert caught.value.hint


@pytest.mark.parametrize("name", [1, None, b"x", "", " \n ", Hostile()])
def test_names_that_are_none(name):
    with pytest.raises(shoal.UserError, match="name"):
        check_values({name: 1.0})


def test_names_become_one_harmless_line():
    (name,) = check_values({"a\x1b[2J\n\u202e<script>\ud800" + "x" * 500: 1.0})
    assert name.isprintable()
    assert "<script>" in name
    assert len(name) <= MAX_NAME


@pytest.mark.parametrize("step", ["1", 1.5, -1, 1 << 60, True, math.nan, Hostile()])
def test_steps_that_are_none(step):
    with pytest.raises(shoal.UserError, match="as step"):
        shoal.log(a=1.0, step=step)


def run_python(code: str, tmp_path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SHOAL_HOME": str(tmp_path), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_a_trainer_and_without_a_launcher(tmp_path):
    code = """
import os, shoal, sys
assert "torch" not in sys.modules
for number in range(3):
    shoal.log(a=number, b=10)
    shoal.log({"c/d": number})
shoal.log({"c/d": 9.0}, step=100, e=1)
if os.fork() == 0:
    shoal.log(child=1.0)
    sys.exit()
assert os.wait()[1] == 0
assert "torch" not in sys.modules
"""
    done = run_python(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (run,) = list_runs(str(tmp_path))
    assert run.status == "finished"
    reader = SeriesReader(run.path)
    assert sorted(reader.names()) == ["a", "b", "c/d", "child", "e"]
    found = reader.read(reader.names())
    assert found["a"].steps == [0, 1, 2]
    assert found["a"].mean == [0.0, 1.0, 2.0]
    assert found["c/d"].steps == [0, 1, 2, 100]
    assert found["e"].steps == [100]


def test_a_launchers_folder_and_rank(tmp_path):
    (tmp_path / "run").mkdir()
    code = "import shoal; shoal.log(a=2.0, step=7)"
    done = run_python(code, tmp_path, SHOAL_RUN_DIR=str(tmp_path / "run"), RANK="3", WORLD_SIZE="4")
    assert (done.returncode, done.stderr) == (0, "")
    assert os.path.exists(points_path(str(tmp_path / "run"), 3))
    assert SeriesReader(str(tmp_path / "run")).read(["a"])["a"].steps == [7]
    assert list_runs(str(tmp_path)) == []


def test_too_many_names_are_said_once_and_left_out(tmp_path):
    (tmp_path / "run").mkdir()
    code = "import shoal\nfor number in range(1100): shoal.log({f'n{number}': 1.0})\nshoal.log(n3=2.0)"
    done = run_python(code, tmp_path, SHOAL_RUN_DIR=str(tmp_path / "run"))
    assert done.returncode == 0
    assert done.stderr.count("'n1000' are left out") == len(done.stderr.splitlines()) == 1
    reader = SeriesReader(str(tmp_path / "run"))
    assert len(reader.names()) == 1000
    assert reader.read(["n3"])["n3"].mean == [1.0, 2.0]


def test_beside_a_trainer(run_dir):
    model = torch.nn.Linear(2, 1)
    seen = []

    def loss(model, batch):
        shoal.log(inside=len(seen))
        return model(batch).mean()

    with shoal.Trainer(
        model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.randn(8, 2), batch_size=4, run_dir=run_dir
    ) as trainer:
        for batch in trainer:
            seen.append(trainer.step(batch))
            shoal.log(after=seen[-1])
    shoal.log(done=1.0)
    from shoal.train import own_numbers

    own_numbers._book().close()
    found = SeriesReader(run_dir).read(["inside", "after", "done", "loss"])
    assert found["after"].steps == found["loss"].steps == [0, 1]
    assert found["after"].mean == pytest.approx(found["loss"].mean)
    assert set(found["inside"].steps) <= {0, 1}
    assert found["inside"].steps[-1] == 1
    assert found["done"].steps == [1]


def test_a_worker_that_came_later_does_not_log_what_the_others_have_logged(run_dir):
    from shoal.observe.recorder import Recorder
    from shoal.train.calls import Calls
    from shoal.train.own_numbers import Book

    os.makedirs(run_dir)  # the launcher did
    replies = iter([{"result": None}, "a World"])
    link = SimpleNamespace(await_membership=lambda trainer, call: next(replies), say_called=lambda *told: None)
    team = SimpleNamespace(link=link, sync=None, prepare=lambda: None, apart=lambda is_apart: nullcontext())
    team.join = lambda reply, progress: setattr(team, "sync", "joined")
    recorder = Recorder(run_dir, 1, 2)
    book, calls = Book(run_dir, 1, recorder), Calls(team, SimpleNamespace(keep=lambda: None), 0, recorder)
    calls._catch_up = lambda name, result: True
    with calls.make("evaluate") as call:
        assert call.is_over
    book.add({"accuracy": 0.9}, None)
    book.add({"accuracy": 0.9}, 7)
    with calls.make("fit") as call:
        assert not call.is_over
        recorder.at_step = 12  # as each step does
        book.add({"accuracy": 0.8}, None)
    book.close()
    recorder.close()
    assert SeriesReader(run_dir).read(["accuracy"])["accuracy"].steps == [12]


def test_a_trainer_uses_the_folder_that_log_made(tmp_path):
    code = """
import shoal, torch
shoal.log(before=1.0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
shoal.Trainer(model, lambda m, x: m(x).mean(), optimizer, torch.randn(8, 2), batch_size=4).fit(epochs=1)
shoal.log(after=1.0)
"""
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = list_runs(str(tmp_path))
    assert run.status == "finished"
    assert {"loss", "before", "after"} <= set(SeriesReader(run.path).names())

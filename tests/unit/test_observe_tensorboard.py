"""TensorBoard files, read back with TensorBoard's own reader."""

import math
import sys

import pytest
from observing import make_step, make_steps, write_metrics

from shoal.observe.tensorboard import TensorBoardExport, check_installed, export
from shoal.spec.errors import UserError

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def read_scalars(run_dir):
    events = accumulator.EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_everything_recorded_is_there(tmp_path):
    write_metrics(str(tmp_path), {0: make_steps(3, grad_norm=2.0), 1: make_steps(3, compute=0.0, wait=0.017)})
    export(str(tmp_path))
    found = read_scalars(tmp_path)
    assert found["train/loss"] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert found["train/grad_norm"] == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert found["speed/samples_per_second"][0][1] == pytest.approx(64 / 0.02)
    assert found["time/compute"][0][1] == pytest.approx(0.4)
    assert sum(found[f"time/{part}"][0][1] for part in ("compute", "communicate", "wait", "load", "other")) == (
        pytest.approx(1)
    )


def test_a_step_is_written_once_all_ranks_have_it(tmp_path):
    live = TensorBoardExport(str(tmp_path))
    write_metrics(str(tmp_path), {0: make_steps(5), 1: make_steps(2)})
    assert live.poll() == 2
    assert live.poll() == 0
    write_metrics(str(tmp_path), {1: make_steps(4)})
    assert live.poll() == 2
    live.close()
    live.close()
    assert [step for step, _ in read_scalars(tmp_path)["train/loss"]] == [1, 2, 3, 4, 5]


def test_a_worker_that_is_gone_is_not_waited_for(tmp_path):
    live = TensorBoardExport(str(tmp_path))
    write_metrics(str(tmp_path), {0: make_steps(1000), 1: make_steps(10)})
    assert live.poll() == 1000
    live.close()


def test_it_follows_in_the_background(tmp_path):
    with TensorBoardExport(str(tmp_path)):
        write_metrics(str(tmp_path), {0: make_steps(2)})
    assert len(read_scalars(tmp_path)["train/lr"]) == 2


def test_a_loss_that_is_not_a_number_is_kept(tmp_path):
    write_metrics(str(tmp_path), {0: [make_step(1, loss=math.nan)]})
    export(str(tmp_path))
    assert math.isnan(read_scalars(tmp_path)["train/loss"][0][1])


def test_without_the_package_the_command_to_install_it_is_given(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(UserError) as caught:
        TensorBoardExport(str(tmp_path))
    assert "pip install 'shoal[tensorboard]'" in caught.value.hint
    check_installed()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="not installed"):
        check_installed()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(UserError, match="tensorboard"):
        TensorBoardExport(str(tmp_path))

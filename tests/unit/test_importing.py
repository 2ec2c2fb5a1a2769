"""Event files of TensorBoard become runs: as its own writer, PyTorch and TensorFlow write them, whole or damaged."""

import json
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observing import Home, make_steps, write_metrics

from shoal import cli
from shoal.observe.exporters import parse_target
from shoal.observe.importing import Names
from shoal.observe.runs import list_runs, read_run
from shoal.observe.scalars import ScalarsReader
from shoal.observe.send import Sender, follow
from shoal.observe.series import SeriesReader
from shoal.observe.table import Table
from shoal.observe.tfevents import Reading, find_folders, read_numbers

pytest.importorskip("tensorboard")

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter


def write_events(folder, events):
    """Events with TensorBoard's own writer; returns the file."""
    before = {*Path(folder).glob("*tfevents*")}
    writer = EventFileWriter(str(folder), filename_suffix=f".{len(before)}")
    for event in events:
        writer.add_event(event)
    writer.close()
    (path,) = {*Path(folder).glob("*tfevents*")} - before
    return path


def scalar(tag, step, value, time=None):
    summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
    return Event(wall_time=1000.0 + step if time is None else time, step=step, summary=summary)


def tensor(tag, step, proto, plugin="scalars"):
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin))
    summary = Summary(value=[Summary.Value(tag=tag, tensor=proto, metadata=metadata)])
    return Event(wall_time=1000.0 + step, step=step, summary=summary)


def import_(folder, capsys, code=0):
    assert cli.main(["import", "tensorboard", str(folder), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def columns_of(path):
    return Table(ScalarsReader(path).read_rest()).columns()


def test_a_run_goes_out_and_comes_back_as_it_was(tmp_path, home, capsys):
    path = Home(str(tmp_path)).add_ended()
    write_metrics(path, {0: make_steps(50, grad_norm=2.0), 1: make_steps(50, compute=0.0, wait=0.017)})
    sender = Sender(read_run(path), parse_target("tensorboard"), print)
    assert follow(sender, lambda: True)
    assert sender.close("finished")
    (made,) = import_(f"{path}/tensorboard", capsys)
    assert (made["num_steps"], made["num_names"], made["notes"]) == (51, 11, [])
    before, after = columns_of(path), columns_of(made["path"])
    assert list(before) == list(after)
    for name in before:
        assert after[name] == pytest.approx(before[name], rel=1e-6)


def test_it_stands_beside_other_runs(tmp_path, home, capsys):
    write_events(tmp_path / "old", [scalar("Loss/train", step, 1 / (step + 1)) for step in range(100)])
    import_(tmp_path / "old", capsys)
    (run,) = list_runs(str(home))
    assert (run.status, run.created, run.ended) == ("imported", 1000.0, 1099.0)
    assert run.name.startswith("1970-01-01-")
    assert cli.main(["ps"]) == 0
    shown = capsys.readouterr().out
    assert "imported" in shown
    assert " 100 " in shown
    assert "0.01000" in shown
    assert cli.main(["explain", "last"]) == 0
    assert cli.main(["alerts", "last"]) == 0
    assert cli.main(["logs", "last"]) == 0
    series = SeriesReader(run.path)
    assert series.names() == ["loss"]
    assert series.read(["loss"])["loss"].mean[:2] == [1.0, 0.5]


def test_folders_in_folders_are_runs_of_their_own_and_are_imported_once(tmp_path, home, capsys):
    for name in ("", "a", "a/b", "c d/<script>"):
        write_events(tmp_path / "logs" / name, [scalar("loss", 1, 1.0)])
    (tmp_path / "logs" / "circle").symlink_to(tmp_path / "logs")
    (tmp_path / "logs" / "empty").mkdir()
    write_events(tmp_path / "logs" / "nothing", [])
    made = import_(tmp_path / "logs", capsys)
    assert len([one for one in made if one["name"]]) == 4
    assert [one["why"] for one in made if not one["name"]] == ["there are no numbers in it"]
    assert any("-a-b-" in one["name"] for one in made if one["name"])
    again = import_(tmp_path / "logs", capsys, code=1)
    assert not any(one["name"] for one in again)
    assert "it was imported before, as" in again[0]["why"]


def test_pytorch_writes_them(tmp_path, home, capsys):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "runs")) as writer:
        for step in range(20):
            writer.add_scalar("train/loss", 1.0 - step / 20, step)
            writer.add_scalar("val/acc", step / 20, step)
        writer.add_text("words", "many")
        writer.add_histogram("weights", __import__("torch").arange(100.0), 1)
    (made,) = import_(tmp_path / "runs", capsys)
    columns = columns_of(made["path"])
    assert columns["val/acc"] == pytest.approx([step / 20 for step in range(20)])
    assert columns["loss"][3] == pytest.approx(0.85)
    assert set(columns) == {"step", "time", "loss", "val/acc"}


def test_numbers_as_tensorflow_writes_them(tmp_path):
    content = TensorProto(dtype=1, tensor_content=struct.pack("<f", 0.5))
    values = TensorProto(dtype=2, double_val=[0.25])
    whole = TensorProto(dtype=9, tensor_content=struct.pack("<q", 7))
    many = TensorProto(dtype=1, float_val=[1.0, 2.0])
    picture = TensorProto(dtype=7, string_val=[b"png"])
    events = [tensor("a", 1, content), tensor("b", 1, values), tensor("c", 1, whole), tensor("d", 1, many)]
    path = write_events(tmp_path, [*events, tensor("e", 1, picture, "images"), tensor("f", 1, content, "histograms")])
    reading = Reading()
    found = {number.tag: number.value for number in read_numbers(str(path), reading)}
    assert found == {"a": 0.5, "b": 0.25, "c": 7.0}
    assert reading.num_passed_over == 3


def test_not_numbers_are_kept(tmp_path, home, capsys):
    values = [1.0, math.nan, math.inf, -math.inf]
    write_events(tmp_path, [scalar("loss", step, value) for step, value in enumerate(values)])
    (made,) = import_(tmp_path, capsys)
    assert str(columns_of(made["path"])["loss"]) == str(values)
    assert cli.main(["ps"]) == 0
    assert "-inf" in capsys.readouterr().out


def test_a_run_that_was_begun_again(tmp_path, home, capsys):
    """Its second file goes back to step 5: what the first had from there on does not count."""
    write_events(tmp_path, [scalar("loss", step, 1.0) for step in range(10)])
    write_events(tmp_path, [scalar("loss", step, 2.0, 2000.0 + step) for step in range(5, 13)])
    (made,) = import_(tmp_path, capsys)
    assert SeriesReader(made["path"]).read(["loss"])["loss"].mean == [1.0] * 5 + [2.0] * 8


HOSTILE = [
    "<script>alert(1)</script>",
    "\x1b[2Jred",
    "\u202eabc",
    "",
    " ",
    "a\nb",
    "a" * 500,
    "../../etc",
    "step",
    "\N{CAT FACE}",
]


def test_hostile_names(tmp_path, home, capsys):
    events = [scalar(tag, step, 1.0) for step in range(3) for tag in HOSTILE]
    write_events(tmp_path, events)
    (made,) = import_(tmp_path, capsys)
    names = SeriesReader(made["path"]).names()
    assert len(names) == len(HOSTILE)
    assert all(name.isprintable() and len(name) <= 128 for name in names)
    assert "<script>alert(1)</script>" in names
    assert cli.main(["send", "last", "--to", "csv"]) == 0


def test_names_without_end(tmp_path, home, capsys):
    write_events(tmp_path, [scalar(f"loss/{number}", 1, 1.0) for number in range(3000)])
    (made,) = import_(tmp_path, capsys)
    assert made["num_names"] == 1000
    assert made["notes"] == ["2000 names beyond the first 1000 were left out"]


@settings(max_examples=30)
@given(st.lists(st.text(max_size=8), max_size=20))
def test_two_tags_never_get_one_name(tags):
    names = Names()
    found = [names.of(tag) for tag in dict.fromkeys(tags)]
    assert len({*found}) == len(found)
    assert [names.of(tag) for tag in dict.fromkeys(tags)] == found


def test_usual_words_for_the_loss_are_ours_once():
    names = Names()
    assert [names.of(tag) for tag in ("train_loss", "loss", "val/loss", "learning_rate", "train/epoch")] == [
        "loss",
        "loss (2)",
        "val/loss",
        "lr",
        "epoch",
    ]


def test_a_file_that_is_cut_anywhere_gives_what_was_whole(tmp_path):
    path = write_events(tmp_path, [scalar("loss", step, 1.0) for step in range(10)])
    data = path.read_bytes()
    counts = set()
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        reading = Reading()
        steps = [number.step for number in read_numbers(str(path), reading)]
        assert steps == list(range(len(steps)))
        assert reading.damage == []
        counts.add(len(steps))
    assert counts == set(range(10))


def test_a_byte_that_changed_costs_a_record_or_the_rest(tmp_path):
    path = write_events(tmp_path, [scalar("loss", step, 1.0) for step in range(10)])
    data = path.read_bytes()
    for place in range(0, len(data), 5):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1 :])
        reading = Reading()
        found = list(read_numbers(str(path), reading))
        assert all(number.value == 1.0 and 0 <= number.step < 10 for number in found)
        assert len(reading.damage) == 1


@settings(max_examples=50)
@given(st.binary(max_size=300))
def test_any_bytes_at_all(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("any") / "events.out.tfevents.1"
    path.write_bytes(data)
    list(read_numbers(str(path), Reading()))


def test_a_damaged_file_is_imported_as_far_as_it_goes_and_that_is_said(tmp_path, home, capsys):
    path = write_events(tmp_path, [scalar("loss", step, 1.0) for step in range(100)])
    data = path.read_bytes()
    path.write_bytes(data[:2000] + bytes(100) + data[2100:])
    assert cli.main(["import", "tensorboard", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "is damaged" in shown.err
    assert " steps, " in shown.out


def test_pictures_are_passed_over_unread(tmp_path):
    picture = Summary.Value(tag="image", image=Summary.Image(encoded_image_string=bytes(3 << 20)))
    event = Event(wall_time=1.0, step=1, summary=Summary(value=[picture]))
    path = write_events(tmp_path, [scalar("loss", 0, 1.0), event, scalar("loss", 2, 1.0)])
    reading = Reading()
    assert [number.step for number in read_numbers(str(path), reading)] == [0, 2]
    assert reading.num_bytes > 3 << 20


def test_times_that_cannot_be(tmp_path, home, capsys):
    times = [math.nan, -1e300, 1e300, 0.0]
    write_events(tmp_path, [scalar("loss", step, 1.0, time) for step, time in enumerate(times)])
    import_(tmp_path, capsys)
    (run,) = list_runs(str(home))
    assert 0 < run.created <= run.ended < 1e11
    assert cli.main(["ps"]) == 0


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["tensorboard", "nothing"], "there is no such folder"),
        (["tensorboard", "."], "has `tfevents` in its name"),
        (["wandb", "."], "There is no tool to import from 'wandb'"),
        (["tensorboard"], "required: FOLDER"),
    ],
)
def test_mistakes(args, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["import", *args]) == 2
    assert told in capsys.readouterr().err


def test_find_folders(tmp_path):
    assert find_folders(str(tmp_path / "nothing")) == {}

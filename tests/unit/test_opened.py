"""Runs from Python and notebooks."""

import math
from html.parser import HTMLParser
from pathlib import Path

import pytest
from observing import Home, event, make_step, make_steps, write_metrics

import shoal
from shoal.observe.journal import Journal
from shoal.observe.plot import plot
from shoal.observe.points import Point, encode, points_path


@pytest.fixture
def path(home):
    path = Home(str(home)).add_ended("<b>train</b>.py")
    write_metrics(path, {0: [*make_steps(9), make_step(10, loss=math.nan)], 1: make_steps(10)})
    Path(points_path(path, 0)).write_bytes(encode(Point(step=3, time=1000.0, values={"val/accuracy": 0.5})) + b"\n")
    with Journal(f"{path}/journal.jsonl") as journal:
        journal.write(event("run_started"))
        journal.write(event("run_ended", 1050.0, status="finished"))
    return path


def test_runs_are_listed_and_opened(path, home):
    Home(str(home)).add_ended("other.py", created=5000.0)
    newest, run = shoal.runs()
    assert newest.name == shoal.open_run().name
    assert run.name == shoal.open_run(run.name).name == shoal.open_run(path).name
    assert (run.path, run.status) == (path, "finished")
    assert run.facts["num_workers"] == 2
    assert repr(run) == f"<shoal run {run.name}, finished>"
    assert [one.kind for one in run.events()] == ["run_started", "run_ended"]
    assert len(run.events("run_ended")) == 1
    assert run.explain().breakdown.num_steps == 10
    for name in ("nothing", ""):
        with pytest.raises(shoal.UserError):
            shoal.open_run(name)
    with pytest.raises(shoal.UserError, match="not the name of a run"):
        shoal.open_run(5)


def test_a_frame_of_polars(path):
    polars = pytest.importorskip("polars")
    frame = shoal.open_run(path).frame()
    assert isinstance(frame, polars.DataFrame)
    assert frame.height == 10
    assert frame.schema["step"] == polars.Int64
    assert frame["val/accuracy"].to_list() == [None, None, 0.5] + [None] * 7
    assert math.isnan(frame["loss"][9])
    assert shoal.open_run(path).frame(names=["loss"]).columns == ["step", "time", "loss"]


def test_a_frame_of_pandas(path):
    pandas = pytest.importorskip("pandas")
    frame = shoal.open_run(path).frame("pandas")
    assert isinstance(frame, pandas.DataFrame)
    assert frame["val/accuracy"].sum() == 0.5
    assert str(frame["step"].dtype) == "int64"


def test_a_run_without_numbers_has_a_frame_and_a_page(home):
    run = shoal.open_run(Home(str(home)).add_ended())
    pytest.importorskip("polars")
    assert run.frame().shape == (0, 2)
    assert "<svg" not in run._repr_html_()


def test_what_cannot_be(path):
    run = shoal.open_run(path)
    with pytest.raises(shoal.UserError, match="no numbers called 'los'"):
        run.frame(names=["los"])
    with pytest.raises(shoal.UserError, match="no library 'dask'"):
        run.frame("dask")


class Tags(HTMLParser):
    """Every tag of a page, which must be closed where it should."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_notebook_shows_a_plot_and_no_markup_of_others(path):
    text = shoal.open_run(path)._repr_html_()
    tags = Tags(text)
    assert tags.open == []
    assert {*tags.found} <= {"div", "b", "bdi", "code", "svg", "title", "path", "polygon", "polyline", "text"}
    assert "&lt;b&gt;train" in text
    assert "nan" not in text.partition("<svg")[2]


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0], [0.0, 0.0], [1e300, -1e300], [None, 2.0], [5e-324, 0.0]])
def test_any_numbers_make_a_picture(values):
    text = plot("<x>", list(range(len(values))), values)
    Tags(text)
    assert "nan" not in text
    assert "inf" not in text


def test_a_long_curve_is_a_small_picture():
    steps = list(range(100_000))
    text = plot("loss", steps, [1 / (step + 1) for step in steps])
    assert len(text) < 40_000


def test_nothing_to_draw():
    assert "no <bdi>loss</bdi> that is a number" in plot("loss", [1], [math.nan])

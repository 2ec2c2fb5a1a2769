"""The parts of `shoal dash` that decide and compute, without a server."""

import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observing import Home, event, make_step, make_steps, write_log, write_metrics

from shoal.dash import logs
from shoal.dash.about import reproduce
from shoal.dash.built import is_built, read_page
from shoal.dash.curves import to_curves
from shoal.dash.door import MAX_SESSIONS, Sessions
from shoal.dash.heat import HeatMap
from shoal.dash.index import Query, RunIndex, run_id
from shoal.dash.opened import OpenRun, sign
from shoal.dash.stream import differing
from shoal.dash.verb import main as dash_main
from shoal.dash.world import tell_world
from shoal.observe.merged import merge
from shoal.observe.runs import RunInfo, read_run
from shoal.observe.series import Series
from shoal.spec.errors import UserError
from shoal.web.door import Door

LOCAL = Door(host="127.0.0.1", port=4646)


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1:4646", True),
        ("127.0.0.2:4646", True),
        ("[::1]:4646", True),
        ("localhost:4646", True),
        ("127.0.0.1:4647", False),
        ("127.0.0.1", False),
        ("evil.example:4646", False),
        ("127.0.0.1.evil.example:4646", False),
        ("192.0.2.1:4646", False),
        ("", False),
        (":4646", False),
    ],
)
def test_a_page_on_loopback_has_few_names(host: str, is_ours: bool) -> None:
    assert (LOCAL.refuse("GET", {"host": host}) is None) == is_ours


def test_a_page_on_the_network_is_reached_by_address_and_not_by_just_any_name() -> None:
    door = Door(host="0.0.0.0", port=4646)
    assert not door.is_loopback
    assert door.refuse("GET", {"host": "192.0.2.1:4646"}) is None
    assert door.refuse("GET", {"host": "evil.example:4646"}) is not None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_changes_need_an_origin(method: str) -> None:
    ours = {"host": "localhost:4646"}
    assert LOCAL.refuse(method, ours) is not None
    assert LOCAL.refuse(method, {**ours, "origin": "http://localhost:4646"}) is None
    assert LOCAL.refuse(method, {**ours, "origin": "https://localhost:4646"}) is not None
    assert LOCAL.refuse(method, {**ours, "origin": "http://127.0.0.1:4646"}) is not None


def test_links_work_once_and_sessions_are_bounded() -> None:
    sessions = Sessions()
    cookies = []
    for _ in range(MAX_SESSIONS + 1):
        token = sessions.link_token
        assert sessions.log_in(token[:-1]) is None
        cookie = sessions.log_in(token)
        assert cookie is not None
        assert sessions.log_in(token) is None
        cookies.append(cookie)
    assert not sessions.is_known(cookies[0])
    assert all(map(sessions.is_known, cookies[1:]))
    sessions.log_out(cookies[5])
    assert not sessions.is_known(cookies[5])
    assert not sessions.is_known("")


@given(st.text())
def test_every_name_has_an_id_that_is_safe_in_an_address(name: str) -> None:
    found = run_id(name)
    assert found.isascii()
    assert not set(found) & set("/?#%&<>\"' ")
    assert found not in (".", "..")


def test_a_heat_map_keeps_sums_whatever_its_columns_are() -> None:
    heat, dice = HeatMap(max_columns=8), random.Random(0)
    rows = [make_step(step, compute=dice.random(), load=0.0, other=0.0) for step in range(100)]
    for start in range(0, 100, 7):
        heat.add(0, rows[start : start + 7])
    heat.add(1, rows[50:])
    assert heat.column_steps == 16
    grid = heat.grid("own", 100)
    for column, mean in enumerate(grid["seconds"][0]):
        of_it = [row.compute for row in rows[16 * column : 16 * (column + 1)]]
        assert mean == pytest.approx(sum(of_it) / len(of_it))
    assert grid["seconds"][1][:3] == [None, None, None]
    assert len(heat.grid("own", 2)["seconds"][0]) == 2


def test_merged_steps_are_spread_over_their_columns() -> None:
    rows = make_steps(64, compute=0.5, load=0.0, other=0.0)
    heat = HeatMap()
    heat.add(0, [merge(rows[:32]), *rows[32:]])
    grid = heat.grid("compute", 1000)
    assert grid["first_step"] == 1
    assert grid["seconds"][0] == pytest.approx([0.5] * 64)


def test_a_heat_map_of_nothing() -> None:
    assert HeatMap().grid("own", 100)["ranks"] == []


def test_curves_share_their_axes_and_numbers_that_are_none_are_null() -> None:
    def series(name: str, mean: list[float], low: list[float] | None = None) -> Series:
        return Series(name=name, steps=[1, 2], times=[1.0, 2.0], low=low or mean, mean=mean, high=mean)

    told = to_curves(
        {"a": series("a", [1 / 3, math.nan]), "b\x1b[0m": series("b\x1b[0m", [2.0, math.inf], [1.0, 2.0])}
    )
    assert len(told["axes"]) == 1
    first, second = told["series"]
    assert first["mean"] == [0.333333, None]
    assert first["bad"] == second["bad"] == 1
    assert "low" not in first
    assert second["low"] == [1.0, 2.0]
    assert second["label"] == "b"


def test_logs_in_pieces_make_the_whole(run_dir: str) -> None:
    Path(run_dir, "logs").mkdir(parents=True)
    lines = [f"line {number} {'x' * (number % 97)}" for number in range(500)]
    write_log(run_dir, 0, "\n".join(lines) + "\n")
    piece = logs.read_before(run_dir, 0, None, 1000)
    found = piece["lines"]
    while piece["start"] > 0:
        piece = logs.read_before(run_dir, 0, piece["start"], 1000)
        found = piece["lines"] + found
    assert found == lines
    again, start = [], 0
    while start < piece["size"]:
        piece = logs.read_after(run_dir, 0, start, 1000)
        again += piece["lines"]
        start = piece["end"]
    assert again == lines
    # It was replaced by a shorter one.
    write_log(run_dir, 0, "new\n")
    assert logs.read_after(run_dir, 0, start)["lines"] == ["new"]


def test_search_counts_lines_and_is_bounded(run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "BLOCK_BYTES", 256)
    Path(run_dir, "logs").mkdir(parents=True)
    write_log(run_dir, 0, "".join(f"{'Needle' if number % 50 == 0 else 'hay'} {number}\n" for number in range(1000)))
    told = logs.search(run_dir, [0, 7], "nEEDLE")
    assert [(one["line"], one["text"]) for one in told["found"]] == [(n, f"Needle {n}") for n in range(0, 1000, 50)]
    data = Path(run_dir, "logs", "0.log").read_bytes()
    assert all(data[one["offset"] :].startswith(b"Needle") for one in told["found"])
    assert not told["is_cut"]
    told = logs.search(run_dir, [0], "a")
    assert len(told["found"]) == logs.MAX_FOUND
    assert told["is_cut"]


def test_the_world_of_a_run_of_fixed_size() -> None:
    run = RunInfo(name="r", path="/r", status="failed", created=100.0, ended=160.0, num_workers=2)
    events = [event("error", 150.0, 1, message="boom", hint="do not"), event("worker_exited", 151.0, 1, code=1)]
    told = tell_world(run, events, 999.0)
    assert [(era["workers"], era["time"], era["until"]) for era in told["eras"]] == [(2, 100.0, 160.0)]
    assert [(mark["kind"], mark["severity"], mark["hint"]) for mark in told["marks"]] == [
        ("error", "bad", "do not"),
        ("worker_exited", "bad", ""),
    ]


def test_commands_to_do_it_again_are_quoted() -> None:
    facts = {"command": ["shoal", "run", "a b.py", "--x", "$(rm)"], "job": {"working_dir": "/my code"}}
    run = RunInfo(name="r", path="/r", status="finished", created=0.0, facts=facts)
    assert reproduce(run) == "cd '/my code' && shoal run 'a b.py' --x '$(rm)'"


def test_the_index_follows_what_happens(tmp_path: Path) -> None:
    home = Home(str(tmp_path))
    index = RunIndex(home.path)
    index.refresh()
    assert index.page(Query())["total"] == 0
    with home.add("a.py", created=1000.0) as running:
        index.refresh()
        version = index.version
        assert [row["status"] for row in index.page(Query())["rows"]] == ["running"]
        write_metrics(running.path, {0: make_steps(3)})
        index.refresh()
        assert index.version > version
        assert index.page(Query())["rows"][0]["step"] == 4
    index.refresh()
    assert index.page(Query())["rows"][0]["status"] == "lost"
    for number in range(5):
        home.add_ended(f"b{number}.py", created=2000.0 + number)
    index.refresh()
    page = index.page(Query(search="run b", sort="created", is_ascending=True, offset=1, limit=2))
    assert (page["total"], page["matching"]) == (6, 5)
    assert ["b1" in row["name"] for row in page["rows"]] == [True, False]
    version = index.version
    index.refresh()
    assert index.version == version


def test_news_name_the_part_that_changed(tmp_path: Path) -> None:
    home = Home(str(tmp_path))
    with home.add() as run:
        before = sign(read_run(run.path), run.path)
        assert differing(before, sign(read_run(run.path), run.path)) == []
        write_metrics(run.path, {0: make_steps(2)})
        write_log(run.path, 0, "x")
        assert differing(before, sign(read_run(run.path), run.path)) == ["logs", "series"]
    assert "status" in differing(before, sign(read_run(run.path), run.path))


def test_an_open_run_reads_on(tmp_path: Path) -> None:
    home = Home(str(tmp_path))
    path = home.add_ended()
    run = OpenRun(path)
    assert run.names() == []
    assert run.heat("own", 10)["ranks"] == []
    write_metrics(path, {0: make_steps(10), 1: make_steps(10)})
    assert "loss" in run.names()
    assert run.series(["loss"], 100, None, None)["loss"].steps == list(range(1, 11))
    assert run.heat("own", 10)["ranks"] == [0, 1]


@pytest.mark.parametrize(
    ("is_built", "has_server", "command"),
    [
        (False, True, "`make page`"),
        (True, False, "`pip install 'shoal[service]'`"),
        (False, False, "`make page && pip install 'shoal[service]'`"),
    ],
)
def test_one_error_names_all_that_the_page_lacks(
    monkeypatch: pytest.MonkeyPatch, is_built: bool, has_server: bool, command: str
) -> None:
    monkeypatch.setattr("shoal.dash.verb.is_built", lambda: is_built)
    monkeypatch.setattr("shoal.dash.verb.find_spec", lambda name: has_server or None)
    with pytest.raises(UserError) as caught:
        dash_main([])
    assert command in caught.value.hint
    assert ("npm" in caught.value.hint) == (not is_built)


def test_a_page_is_known_by_its_document(tmp_path: Path) -> None:
    assert not is_built(str(tmp_path / "nothing"))
    assert not is_built(str(tmp_path))
    (tmp_path / "index.html").write_text("<!doctype html>")
    (tmp_path / "notes.txt").write_text("not a part of the page")
    assert is_built(str(tmp_path))
    assert [*read_page(str(tmp_path))] == ["index.html"]

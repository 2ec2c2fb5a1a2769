"""Who is answered by `shoal dash`, and with what: requests as browsers, and as others, send them."""

import json
import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashing import HOSTILE, Served, add_checkpoints, add_full_run, add_run, end, serve

from shoal import cli
from shoal.testing import rigs
from shoal.web.door import SHIELDS

pytestmark = [rigs.needs("the page")]
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dash")
    full = add_full_run(folder)
    add_checkpoints(full.path)
    end(full)
    for name in HOSTILE:
        end(add_run(folder, name, command=["shoal", "run", name]), "failed", 1)
    return folder


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[Served]:
    with serve(home) as page:
        yield page


@pytest.fixture(scope="module")
def cookie(served: Served) -> str:
    return served.log_in()


ROUTES = (
    *("runs", "runs/full", "runs/full/series", "runs/full/heat", "runs/full/world", "runs/full/events"),
    *("runs/full/logs", "runs/full/search?text=line", "runs/full/checkpoints", "runs/full/explain"),
    *("runs/full/system", "system", "news"),
)


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_is_told_without_the_cookie(served: Served, route: str) -> None:
    for headers in ({}, {"Cookie": f"shoal_dash_{served.port}=guess"}):
        status, _, told = served.ask("GET", f"/api/{route}", **headers)
        assert status == 401
        assert told["error"]["hint"].startswith("open the link")


@pytest.mark.parametrize("route", [route for route in ROUTES if route != "news"])
def test_every_route_answers_whoever_is_logged_in(served: Served, cookie: str, route: str) -> None:
    status, headers, told = served.ask("GET", f"/api/{route}", Cookie=cookie)
    assert status == 200, told
    assert told
    assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/", "/login", "/run/full", "/api/runs", "/nothing", "/page/none.js"])
def test_every_answer_carries_its_shields(served: Served, path: str) -> None:
    _, headers, _ = served.ask("GET", path)
    assert {name: headers[name] for name in SHIELDS} == SHIELDS
    assert "unsafe" not in headers["content-security-policy"]
    assert "server" not in headers


@pytest.mark.parametrize(
    "host", ["evil.example:{port}", "evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", ""]
)
def test_a_name_that_somebody_pointed_here_is_not_answered(served: Served, cookie: str, host: str) -> None:
    for path in ("/", "/api/runs"):
        status, _, _ = served.ask("GET", path, Host=host.format(port=served.port), Cookie=cookie)
        assert status in (400, 421)


@pytest.mark.parametrize("host", ["localhost:{port}", "127.0.0.1:{port}", "LOCALHOST:{port}"])
def test_our_own_names_are(served: Served, cookie: str, host: str) -> None:
    assert served.ask("GET", "/api/runs", Host=host.format(port=served.port), Cookie=cookie)[0] == 200


def test_other_pages_cannot_ask(served: Served, cookie: str) -> None:
    ask = served.ask
    assert ask("GET", "/api/runs", Origin="http://evil.example", Cookie=cookie)[0] == 403
    assert ask("GET", "/api/runs", Origin="null", Cookie=cookie)[0] == 403
    assert ask("GET", "/api/runs", sec_fetch_site="cross-site", Cookie=cookie)[0] == 403
    assert ask("GET", "/api/runs", sec_fetch_site="same-site", Cookie=cookie)[0] == 403
    assert ask("GET", "/api/runs", Origin=served.address, sec_fetch_site="same-origin", Cookie=cookie)[0] == 200


@pytest.mark.parametrize("path", ["/api/runs/full/stacks", "/api/runs/full/checkpoints", "/api/logout"])
def test_whoever_wants_something_done_says_where_from(served: Served, cookie: str, path: str) -> None:
    assert served.ask("POST", path, body={}, Cookie=cookie)[0] == 403
    assert served.ask("POST", path, body={}, Cookie=cookie, Origin="http://evil.example")[0] == 403
    assert served.ask("POST", path, body={}, Origin=served.address)[0] == 401
    assert served.ask("GET", path, Cookie=cookie)[0] in (200, 404)


def test_a_link_is_good_for_one_login(home: Path) -> None:
    with serve(home) as page:
        first = page.token
        assert page.ask("POST", "/api/login", body={"token": "x" * 43}, Origin=page.address)[0] == 401
        assert page.ask("POST", "/api/login", body={"token": first})[0] == 403
        status, headers, _ = page.ask("POST", "/api/login", body={"token": first}, Origin=page.address)
        assert status == 200
        rules = headers["set-cookie"].lower()
        assert "httponly" in rules
        assert "samesite=strict" in rules
        status, _, told = page.ask("POST", "/api/login", body={"token": first}, Origin=page.address)
        assert status == 401
        assert "has been used" in told["error"]["message"]
        assert page.next_link().partition("#")[2] != first
        second = page.log_in()
        assert page.ask("GET", "/api/runs", Cookie=second)[0] == 200
        assert page.ask("POST", "/api/logout", Cookie=second, Origin=page.address)[0] == 200
        assert page.ask("GET", "/api/runs", Cookie=second)[0] == 401


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "..%2f..%2fetc", "full%2f..%2ffull", "full/../full", "%00", "~", "last", "ful", "\u202e"]
)
def test_names_are_looked_up_and_never_become_paths(served: Served, cookie: str, name: str) -> None:
    for part in ("", "/logs", "/world"):
        status, _, told = served.ask("GET", f"/api/runs/{json.dumps(name)[1:-1]}{part}", Cookie=cookie)
        assert status == 404
        assert "message" in told["error"]


def test_hostile_names_are_cleaned_and_found_by_a_digest(served: Served, cookie: str) -> None:
    _, _, told = served.ask("GET", "/api/runs?limit=500", Cookie=cookie)
    rows = told["rows"]
    assert len(rows) == 1 + len(HOSTILE)
    for row in rows:
        assert not {"\x1b", "\x07", "\u202e"} & set(row["name"] + row["command"])
        assert row["id"].isascii()
        status, _, run = served.ask("GET", f"/api/runs/{row['id']}", Cookie=cookie)
        assert status == 200
        assert run["name"] == row["name"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("runs?sort=password", "cannot be sorted"),
        ("runs?offset=abc", "not a whole number"),
        ("runs/full/heat?of=nothing", "no heat map"),
        ("runs/full/logs?rank=77", "has not printed"),
        ("runs/full/logs?rank=../../run.json", "not a whole number"),
        ("runs/full/search", "nothing to search for"),
    ],
)
def test_mistakes_are_told(served: Served, cookie: str, path: str, words: str) -> None:
    status, _, told = served.ask("GET", f"/api/{path}", Cookie=cookie)
    assert status == 400
    assert words in told["error"]["message"]


def test_long_and_broken_bodies_are_refused(served: Served, cookie: str) -> None:
    for body in (b"x" * 10_000, b"[1]", b"{", b"[" * 4000):
        status, _, told = served.ask("POST", "/api/login", body=body, Origin=served.address)
        assert status == 400
        assert told["error"]["message"].startswith("The request is")
    status, _, _ = served.ask("GET", f"/api/runs?search={'x' * 60_000}", Cookie=cookie)
    assert status in (200, 400, 414, 431)
    assert served.ask("GET", "/api/runs", Cookie=cookie)[0] == 200


def test_lists_are_paged_searched_and_sorted(served: Served, cookie: str) -> None:
    def names(query: str) -> list[str]:
        return [row["name"] for row in served.ask("GET", f"/api/runs?{query}", Cookie=cookie)[2]["rows"]]

    assert names("search=FULL") == ["full"]
    assert names("status=finished") == ["full"]
    everything = names("sort=name&order=up")
    assert names("sort=name&order=up&offset=2&limit=3") == everything[2:5]
    assert names("sort=name&order=down") == everything[::-1]
    assert names("sort=loss")[0] == "full"


def test_curves_are_as_long_as_was_asked_and_hold_extremes(served: Served, cookie: str) -> None:
    _, _, told = served.ask("GET", "/api/runs/full/series?name=loss&name=val/accuracy&points=50", Cookie=cookie)
    loss, own = told["series"]
    assert (loss["name"], own["name"]) == ("loss", "val/accuracy")
    assert len(loss["mean"]) == 50
    assert all(low <= mean <= high for low, mean, high in zip(loss["low"], loss["mean"], loss["high"], strict=True))
    steps = told["axes"][loss["axis"]]["steps"]
    assert steps[-1] == 399
    _, _, part = served.ask("GET", "/api/runs/full/series?name=loss&first=100&last=149", Cookie=cookie)
    assert part["axes"][0]["steps"] == list(range(100, 150))
    assert "low" not in part["series"][0]


def test_the_heat_map_shows_the_slow_rank(served: Served, cookie: str) -> None:
    _, _, heat = served.ask("GET", "/api/runs/full/heat?of=own&columns=40", Cookie=cookie)
    assert heat["ranks"] == [0, 1, 2, 3]
    assert all(len(row) == 40 for row in heat["seconds"])
    means = [sum(row) / len(row) for row in heat["seconds"]]
    assert means.index(max(means)) == 2


def test_the_world_and_what_happened_in_it(served: Served, cookie: str) -> None:
    _, _, world = served.ask("GET", "/api/runs/full/world", Cookie=cookie)
    assert [era["workers"] for era in world["eras"]] == [4, 3, 4]
    assert [(mark["kind"], mark["severity"]) for mark in world["marks"]] == [
        ("worker_lost", "bad"),
        ("worker_joined", "good"),
        ("alert", "bad"),
    ]


def test_checkpoints_say_whether_they_are_whole(served: Served, cookie: str, home: Path) -> None:
    _, _, told = served.ask("GET", "/api/runs/full/checkpoints", Cookie=cookie)
    problems = {one["step"]: one["problem"] for one in told["checkpoints"]}
    assert problems[100] == problems[300] == ""
    assert "bytes" in problems[200]
    # One whose size is right, and a byte is not: only reading it tells.
    [file] = (home / "runs" / "full" / "checkpoints").glob("step-000000100*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.chmod(stat.S_IRUSR | stat.S_IWUSR)
    file.write_bytes(data)
    name = file.parent.name
    body = {"folder": "checkpoints", "name": name}
    path = "/api/runs/full/checkpoints"
    status, _, found = served.ask("POST", path, body=body, Cookie=cookie, Origin=served.address)
    assert status == 200
    assert "have changed" in found["problem"]
    for bad in ({"folder": "..", "name": "full"}, {"folder": "logs", "name": "0.log"}, {}):
        assert served.ask("POST", path, body=bad, Cookie=cookie, Origin=served.address)[0] == 400


def test_logs_come_in_pieces_and_are_searched(served: Served, cookie: str) -> None:
    _, _, last = served.ask("GET", "/api/runs/full/logs?rank=1", Cookie=cookie)
    assert last["lines"][-1] == "rank 1 line 2999 green <b>plain</b>"
    _, _, before = served.ask("GET", f"/api/runs/full/logs?rank=1&end={last['start']}", Cookie=cookie)
    numbers = [int(line.split()[3]) for line in before["lines"] + last["lines"]]
    assert numbers == list(range(numbers[0], 3000))
    _, _, after = served.ask("GET", f"/api/runs/full/logs?rank=1&start={last['end']}", Cookie=cookie)
    assert after["lines"] == []
    _, _, told = served.ask("GET", "/api/runs/full/search?text=LINE+1234", Cookie=cookie)
    assert [(one["rank"], one["line"]) for one in told["found"]] == [(rank, 1234) for rank in range(4)]


def test_the_command_to_do_it_again_can_be_pasted(served: Served, cookie: str) -> None:
    _, _, run = served.ask("GET", "/api/runs/full", Cookie=cookie)
    assert run["reproduce"] == "cd '/home/ada/my models' && shoal run -n 4 train.py --lr 0.1"
    assert {one["name"]: one["source"] for one in run["settings"]} == {"batch_size": "script", "seed": "default"}


def test_stacks_of_a_run_that_ended_are_refused_in_words(served: Served, cookie: str) -> None:
    status, _, told = served.ask("POST", "/api/runs/full/stacks", Cookie=cookie, Origin=served.address)
    assert status == 400
    assert told["error"]["message"] == "Run full has ended: finished."


def test_news_come_as_they_happen(home: Path, served: Served, cookie: str) -> None:
    import http.client

    with add_run(home, "news", num_workers=1) as folder:
        assert served.ask("GET", "/api/runs/news", Cookie=cookie)[0] == 200
        call = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        call.request("GET", "/api/news?run=news", headers={"Cookie": cookie})
        stream = call.getresponse()
        assert stream.readline() == b"event: hello\n"
        Path(folder.path, "logs", "0.log").write_text("hello\n")
        lines = iter(stream.readline, b"")
        assert next(json.loads(line[6:])["changed"] for line in lines if b'"logs"' in line) == ["logs"]
        end(folder)
        assert any(b'"status"' in line for line in lines)
        stream.close()
        call.close()


def test_it_ends_when_told_even_while_pages_are_open(home: Path) -> None:
    import http.client

    with serve(home) as page:
        call = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
        call.request("GET", "/api/news?also=list", headers={"Cookie": page.log_in()})
        stream = call.getresponse()
        stream.readline()
        page.process.send_signal(signal.SIGINT)
        assert page.process.wait(30) == 0
        stream.close()
        call.close()


def test_it_listens_on_loopback_only(served: Served) -> None:
    table = Path(f"/proc/{served.process.pid}/net/tcp").read_text()
    mine = [line.split()[1] for line in table.splitlines() if f":{served.port:04X} " in line.split()[1] + " "]
    assert "0100007F" in {address.partition(":")[0] for address in mine}
    assert "00000000" not in {address.partition(":")[0] for address in mine}


def test_nothing_is_written_into_run_folders(home: Path, served: Served, cookie: str) -> None:
    def look() -> dict[str, float]:
        folder = home / "runs" / "full"
        return {str(path): path.stat().st_mtime for path in folder.rglob("*")}

    before = look()
    for route in ROUTES[:-1]:
        served.ask("GET", f"/api/{route}", Cookie=cookie)
    assert look() == before


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--port", "x"], "--port 'x' is not a port."),
        (["--port", "70000"], "is not a port"),
        (["--prot", "1"], "did you mean `--port`?"),
        (["--host", "203.0.113.9", "--port", "0"], "Cannot listen at 203.0.113.9"),
    ],
)
def test_mistakes_in_the_command(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dash", *args]) == 2
    assert words in capsys.readouterr().err


def test_a_port_that_is_taken_is_told(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dash", "--port", str(served.port)]) == 2
    assert "Address already in use" in capsys.readouterr().err


def test_a_run_that_was_removed_leaves_the_list(home: Path, served: Served, cookie: str) -> None:
    import shutil

    end(add_run(home, "short-lived"))
    assert _until(lambda: served.ask("GET", "/api/runs/short-lived", Cookie=cookie)[0] == 200)
    shutil.rmtree(home / "runs" / "short-lived")
    gone = lambda: "short-lived" not in json.dumps(served.ask("GET", "/api/runs", Cookie=cookie)[2])  # noqa: E731
    assert _until(gone)
    assert served.ask("GET", "/api/runs/short-lived", Cookie=cookie)[0] == 404


def _until(condition: object) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def test_no_file_stays_open(served: Served, cookie: str) -> None:
    count = lambda: len(os.listdir(f"/proc/{served.process.pid}/fd"))  # noqa: E731
    served.ask("GET", "/api/runs/full/series", Cookie=cookie)
    before = count()
    for _ in range(20):
        for route in ("series", "heat", "logs", "events", "checkpoints", "system"):
            served.ask("GET", f"/api/runs/full/{route}", Cookie=cookie)
    assert _until(lambda: count() <= before + 3)

"""A real service: what it was told it keeps, whoever asks must be known, and its jobs outlive it."""

import http.client
import json
import os
import re
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from served import Daemon, serving
from storm import RUNS_EVERY, check_account, storm

from shoal.service.client import Client, Refused
from shoal.service.places import find_login
from shoal.spec.errors import ShoalError, UserError
from shoal.testing import rigs

LINES = "import os, time\nwith open('log', 'a') as file:\n    file.write(f'{os.getpid()}\\n')\n"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One service for the tests that do it no harm."""
    home = tmp_path_factory.mktemp("service")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_HOME", str(home))
        with serving(home) as daemon:
            yield daemon


@pytest.fixture
def client(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("SHOAL_HOME", str(daemon.home))
    with daemon.client() as client:
        yield client


def wait_for(what: str, check, seconds: float = 30.0):
    until = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < until, f"{what}: not within {seconds} s"
        time.sleep(0.02)
    return found


def job_script(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "job.py").write_text(text)
    return folder


# --- cannot lose a job


def test_jobs_that_were_accepted_are_there_once_however_the_service_dies(home: Path):
    with serving(home) as daemon:
        account = storm(daemon, num_jobs=60, num_clients=8, num_kills=3, seed=1)
        with daemon.client() as client:
            assert client.queue()["total"] == 60 - len(range(0, 60, RUNS_EVERY)), "those that ran are over"
        assert daemon.stop() == 0, daemon.log
    check_account(daemon, account, 60)


def test_a_running_job_outlives_the_service_is_adopted_and_runs_once(home: Path):
    folder = job_script(home / "work", f"{LINES}while not os.path.exists('go'): time.sleep(0.05)\n")
    with serving(home) as daemon, daemon.client() as client:
        (job,) = client.submit("job.py", dir=str(folder))
        wait_for("it runs", lambda: client.job(job)["state"] == "running" and (folder / "log").exists())
        free = client.nodes()["nodes"][0]["free_cores"]
        daemon.kill()
        daemon.start()
        began = time.monotonic()
        wait_for("it is adopted", lambda: client.job(job)["is_seen"])
        adopted_seconds = time.monotonic() - began
        assert client.nodes()["nodes"][0]["free_cores"] == free
        (folder / "go").touch()
        told = client.wait(job, 30)
        assert (told["state"], told["attempts"]) == ("finished", 1), daemon.log
        assert len((folder / "log").read_text().splitlines()) == 1
        (node,) = client.nodes()["nodes"]
        assert (node["free_cores"], node["free_memory_bytes"]) == (node["cores"], node["memory_bytes"])
        assert adopted_seconds < 20, "a bound on a busy machine; benchmarks/service.py measures it"


def test_the_time_without_the_service_is_charged_to_no_job_that_had_ended(home: Path):
    folder = job_script(home / "work", f"{LINES}while not os.path.exists('go'): time.sleep(0.05)\n")
    began = time.monotonic()
    with serving(home) as daemon, daemon.client() as client:
        jobs = [client.submit("job.py", dir=str(folder), cores=0.1)[0] for _ in range(2)]
        wait_for("they run", lambda: all(client.job(job)["state"] == "running" for job in jobs))
        daemon.kill()
        _kill_keeper(daemon, jobs[1])
        (folder / "go").touch()
        wait_for("one has ended", Path(daemon.folder, "jobs", str(jobs[0]), "1", "ended.json").exists)
        ran, date = time.monotonic() - began, time.time()
        time.sleep(2.0)
        daemon.start()
        first, second = (client.wait(job, 60) for job in jobs)
        assert (first["state"], first["attempts"], second["attempts"]) == ("finished", 1, 2), daemon.log
        assert first["run_seconds"] <= ran
        assert first["ended"] <= date
        assert second["run_seconds"] <= time.monotonic() - began - 2.0
        (used,) = client.share()["shares"]
        assert used["worker_seconds"] == pytest.approx(first["run_seconds"] + second["run_seconds"], abs=0.1)


def _kill_keeper(daemon: Daemon, job: int) -> None:
    claimed = Path(daemon.folder, "jobs", str(job), "1", "claimed.json")
    os.kill(json.loads(claimed.read_text())["pid"], signal.SIGKILL)


def test_jobs_run_in_order_and_what_waits_for_a_failure_is_given_up(home: Path):
    folder = job_script(home / "work", f"{LINES}import sys\nsys.exit(int(sys.argv[1]))\n")
    with serving(home) as daemon, daemon.client() as client:
        row = {"dir": str(folder)}
        jobs = client.submit_all(
            [
                {**row, "args": ["job.py", "0"], "name": "first"},
                {**row, "args": ["job.py", "3"], "name": "second", "after": ["first"]},
                {**row, "args": ["job.py", "0"], "name": "third", "after": ["second"]},
            ]
        )
        states = [client.wait(job, 60)["state"] for job in jobs]
        assert states == ["finished", "failed", "cancelled"], daemon.log
        assert "job 2, which failed" in client.job(jobs[2])["message"]
        (node,) = client.nodes()["nodes"]
        assert node["free_cores"] == node["cores"]


# --- asked again, and asked wrongly


def test_the_same_request_from_many_at_once_is_done_once(client: Client, daemon: Daemon):
    row = {"args": ["train.py"], "dir": "/", "name": "often"}
    found: list[list[int]] = []

    def send() -> None:
        with daemon.client() as mine:
            found.append(mine.submit_all([row], held=True, key="one key"))

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert all(each == found[0] for each in found)
    assert client.queue(search="often")["total"] == 1
    with pytest.raises(Refused, match="another request") as caught:
        client.submit_all([{**row, "name": "other"}], held=True, key="one key")
    assert caught.value.status == 409


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"workers": 10_000}, r"at most \d+|largest"),
        ({"memory": "900T"}, r"at most|largest|\d+(\.\d)? GiB"),
        ({"partition": "defualt"}, "mean|default"),
        ({"name": "x" * (7 << 20)}, "characters"),
        ({"name": "x" * (10 << 20)}, "too long"),
        ({"after": [999_999]}, "no job 999999"),
        ({"after": ["../../../etc/passwd"]}, "passwd"),
    ],
)
def test_jobs_that_cannot_be_are_refused_at_once(client: Client, fields: dict[str, object], told: str):
    with pytest.raises(Refused) as caught:
        client.submit("train.py", dir="/", **fields)
    error = caught.value
    assert re.search(told, f"{error.message} {error.why} {error.hint}"), error.render()
    assert client.health()["problems"] == {}


@pytest.mark.parametrize(
    "id", ["../../etc", "%2e%2e%2f1", "1 OR 1=1", "job-1/../2", "0", "-1", "9" * 30, "\0", "\u202e", ".", "a/tokens"]
)
def test_hostile_ids_name_nothing(client: Client, id: str):
    for ask_for, told in (
        (lambda: client.job(id), "is not the number of a job|There is no job"),
        (lambda: client.cancel(id), "is not the number of a job|There is no job|is not a range"),
        (lambda: client.drain(id), "There is no node"),
        (lambda: client.put_person(f"/{id}"), "cannot be the name of a person"),
        (lambda: client.give_token(f"/{id}"), "cannot be the name of a person"),
        (lambda: client.revoke_token(id), "There is no token"),
    ):
        with pytest.raises(UserError, match=told):
            ask_for()


def ask(method: str, path: str, headers: dict[str, str], body: bytes | None = None) -> tuple[int, dict[str, object]]:
    login = find_login()
    assert login is not None
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(login.address).port, timeout=30)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        text = response.read()
        assert response.headers["x-frame-options"] == "DENY"
        return response.status, json.loads(text) if text else {}
    finally:
        connection.close()


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def test_no_address_without_a_token_and_none_for_other_hosts_and_pages(client: Client, daemon: Daemon):
    login = find_login()
    assert login is not None
    own = {"Authorization": f"Bearer {login.token}", "Origin": login.address, "Idempotency-Key": "k"}
    description = client.ask("GET", "/api/openapi.json")
    for path in [*description["paths"], "/", "/docs", "/nowhere"]:
        for method in METHODS:
            assert ask(method, path, {"Origin": login.address})[0] == 401, (method, path)
    for method in METHODS:
        assert ask(method, "/api/queue", {**own, "Origin": "http://evil.example"})[0] == 403, method
        assert ask(method, "/api/queue", {**own, "Host": "evil.example"})[0] == 421, method
        assert ask(method, "/api/queue", {**own, "Authorization": "Bearer shoal_wrong"})[0] == 401, method
    assert ask("GET", "/api/me", own)[0] == 200
    assert ask("POST", "/api/jobs", {name: own[name] for name in ("Authorization", "Origin")}, b"{}")[0] == 400


def test_a_state_of_jobs_that_are_over_shows_those(client: Client, daemon: Daemon):
    (job,) = client.submit("train.py", dir="/", held=True, name="short")
    assert [row["job"] for row in client.queue(state="held", search="short")["jobs"]] == [job]
    client.cancel(job)
    assert [row["job"] for row in client.queue(state="cancelled", search="short")["jobs"]] == [job]
    assert client.queue(state="finished", search="short")["jobs"] == []
    with pytest.raises(Refused, match="no state 'canceled'") as caught:
        client.queue(state="canceled")
    assert "`cancelled`" in caught.value.hint


def test_people_see_and_change_what_they_may(client: Client, daemon: Daemon):
    login = find_login()
    assert login is not None
    client.put_person("ann", max_jobs=2)
    client.put_person("eve", role="viewer")
    ann = Client(login.address, client.give_token("ann", days=1))
    eve = Client(login.address, client.give_token("eve", days=1))
    (job,) = client.submit("train.py", dir="/", held=True, env={"SECRET": "x"})
    (own,) = ann.submit("train.py", dir="/", held=True)
    assert eve.job(job)["env"] == {"SECRET": "…"}
    for who, act in ((ann, lambda: ann.cancel(job)), (eve, lambda: eve.submit("t.py")), (ann, ann.audit)):
        with pytest.raises(Refused) as caught:
            act()
        assert caught.value.status == 403, who
    with pytest.raises(Refused, match="2 jobs"):
        ann.submit("train.py", dir="/", held=True, array=2)
    (token,) = next(row for row in client.people()["people"] if row["person"] == "ann")["tokens"]
    client.revoke_token(token["id"])
    with pytest.raises(Refused, match="does not know") as caught:
        ann.me()
    assert caught.value.status == 401
    client.remove_person("eve")
    with pytest.raises(Refused):
        eve.me()
    client.cancel(job, own)
    assert client.audit(verify=1)["is_sound"]
    ann.close()
    eve.close()


def test_files_are_for_their_owner_only_and_there_is_one_service_a_home(daemon: Daemon, client: Client):
    for name in ("token", "service.db", "service.json"):
        assert stat.S_IMODE(os.stat(Path(daemon.folder, name)).st_mode) == 0o600, name
    second = Daemon(daemon.home)
    second.start()
    assert second.process is not None
    assert second.process.wait(timeout=30) != 0
    assert "is up already" in second.log
    assert client.me()["role"] == "admin"


def test_others_are_served_over_tls_only(home: Path):
    with serving(home, host="0.0.0.0") as daemon:
        login = find_login()
        assert login is not None
        assert login.address.startswith("https://")
        with Client(patience_seconds=5) as client:
            assert client.me()["role"] == "admin"
        port = urlsplit(login.address).port
        plain = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        plain.request("GET", "/api/me", headers={"Authorization": f"Bearer {login.token}"})
        with pytest.raises((OSError, http.client.HTTPException)):
            plain.getresponse()
        plain.close()
        with (
            Client(login.address, login.token, patience_seconds=0.0) as stranger,
            pytest.raises(ShoalError, match="does not answer"),
        ):
            stranger.me()
        assert daemon.stop() == 0, daemon.log


# --- each change once, by those who may, and whatever the date is

CHANGES = {
    "submit": ("POST", "/api/jobs", {"jobs": [{"args": ["t.py"], "dir": "/"}], "held": True}),
    "hold": ("PATCH", "/api/jobs", {"verb": "hold", "jobs": ["JOB"]}),
    "requeue": ("PATCH", "/api/jobs", {"verb": "requeue", "jobs": ["JOB"]}),
    "resize": ("PATCH", "/api/jobs", {"verb": "resize", "jobs": ["JOB"], "workers": 1}),
    "release": ("PATCH", "/api/jobs", {"verb": "release", "jobs": ["JOB"]}),
    "cancel": ("PATCH", "/api/jobs", {"verb": "cancel", "jobs": ["JOB"]}),
    "drain": ("PATCH", "/api/nodes/NODE", {"is_draining": True, "why": "x"}),
    "person": ("PUT", "/api/people/zoe", {"role": "viewer"}),
    "token": ("POST", "/api/people/zoe/tokens", {"digest": "ab" * 32, "days": 1}),
    "revoke": ("DELETE", "/api/tokens/TOKEN", {}),
    "remove": ("DELETE", "/api/people/zoe", {}),
    "undrain": ("PATCH", "/api/nodes/NODE", {"is_draining": False}),
}


def test_every_change_is_made_once_whatever_is_lost_on_the_way(client: Client, daemon: Daemon):
    """Half a request, one whose answer nobody reads, then two copies; and who may not is refused each of them."""
    login = find_login()
    assert login is not None
    described = client.ask("GET", "/api/openapi.json")["paths"]
    routes = {(method.upper(), path) for path in described for method in described[path] if method != "get"}
    assert {(method, re.sub("zoe", "{name}", path)) for method, path, _ in CHANGES.values()} == {
        (method, path.replace("{node}", "NODE").replace("{id}", "TOKEN")) for method, path in routes
    }
    (job,) = client.submit("train.py", dir="/", held=True)
    client.put_person("vic", role="viewer")
    client.put_person("ute")
    others = {name: client.give_token(name, days=1) for name in ("vic", "ute")}
    node = client.nodes()["nodes"][0]["node"]

    def count() -> int:
        """What people did: how a job that was released ends, the service notes when it sees it."""
        return sum(entry["who"] != "service" for entry in client.audit()["entries"])

    for act, (method, path, body) in CHANGES.items():
        if act == "revoke":
            (token,) = next(row for row in client.people()["people"] if row["person"] == "zoe")["tokens"]
            path = path.replace("TOKEN", token["id"])
        path = path.replace("NODE", node)
        data = json.dumps(body).replace('"JOB"', str(job)).encode()
        own = {"Authorization": f"Bearer {login.token}", "Origin": login.address, "Idempotency-Key": f"key {act}"}
        for name, secret in others.items():
            theirs = {**own, "Authorization": f"Bearer {secret}", "Idempotency-Key": f"{name} {act}"}
            if act != "submit" or name == "vic":
                assert ask(method, path, theirs, data)[0] == 403, (name, act)
        before = count()
        send_and_leave(method, path, {**own, "Content-Length": str(len(data))}, data[:-1])
        assert count() == before, act
        send_and_leave(method, path, {**own, "Content-Length": str(len(data))}, data)
        first, second = (ask(method, path, own, data) for _ in range(2))
        assert first == second, act
        assert first[0] == 200, (act, first)
        assert count() == before + 1, act
        assert ask(method, path, own, b'{"other": 1}')[0] in (400, 409), act
    assert client.audit(verify=1)["is_sound"]


def send_and_leave(method: str, path: str, headers: dict[str, str], data: bytes) -> None:
    """Send so much of a request, and go away without an answer."""
    login = find_login()
    assert login is not None
    port = urlsplit(login.address).port
    head = "".join(f"{name}: {value}\r\n" for name, value in {"Host": f"127.0.0.1:{port}", **headers}.items())
    with socket.create_connection(("127.0.0.1", port or 0)) as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)


@rigs.needs("libfaketime")
def test_the_date_may_jump_by_an_hour_while_a_job_runs(home: Path, monkeypatch: pytest.MonkeyPatch):
    folder = job_script(home / "work", f"{LINES}while not os.path.exists('go'): time.sleep(0.05)\n")
    began = time.monotonic()
    with rigs.clock_jump(0) as clock:
        for name, value in clock.env.items():
            monkeypatch.setenv(name, value)
        with serving(home) as daemon, daemon.client() as client:
            (job,) = client.submit("job.py", dir=str(folder), time="50m")
            wait_for("it runs", lambda: client.job(job)["state"] == "running" and (folder / "log").exists())
            for seconds in (3600, -3600):
                clock.jump(seconds)
                wait_for("a look after the jump", lambda: client.job(job)["is_seen"])
                daemon.kill()
                daemon.start()
                told = wait_for("adoption", lambda: (told := client.job(job))["is_seen"] and told)
                assert (told["state"], told["attempts"]) == ("running", 1)
                assert told["run_seconds"] < time.monotonic() - began
            (folder / "go").touch()
            told = client.wait(job, 60)
            assert (told["state"], told["attempts"]) == ("finished", 1), daemon.log
            assert told["run_seconds"] < time.monotonic() - began
            assert len((folder / "log").read_text().splitlines()) == 1
            assert client.audit(verify=1)["is_sound"]

"""The service: jobs accepted a second, each on disk before it is answered; how long a look at a long queue takes; how
soon jobs that run are known again after a kill; what it takes while nothing happens. Ray's job submission takes its
turn beside it."""

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks import harness

NUM_CLIENTS = 8
NUM_EACH = 100
NUM_QUEUED = 10_000
NUM_RAY = 4
IDLE_SECONDS = 60.0
WAITS = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)\n"


def main(rounds: int, is_quick: bool) -> dict[str, Any]:
    each, queued = (5, 200) if is_quick else (NUM_EACH, NUM_QUEUED)
    idle_seconds = 2.0 if is_quick else IDLE_SECONDS
    with tempfile.TemporaryDirectory() as folder, _home(folder):
        service = _Service(folder)
        harness.say("idle, as it was started")
        idle = {"idle, just started": _idle(service, idle_seconds)}
        with multiprocessing.get_context("spawn").Pool(NUM_CLIENTS) as clients, _ray(is_quick) as submit_ray:
            try:
                harness.say("jobs accepted a second")
                contenders = {"shoal": lambda: _submit_rate(clients, each)}
                if submit_ray is not None:
                    contenders["Ray"] = submit_ray
                rates = harness.interleave(contenders, rounds)
                harness.say("adoption")
                adopted = [_adopt_seconds(service, folder) for _ in range(1 if is_quick else rounds)]
                harness.say("looks at a long queue")
                looks = _look_seconds(queued, rounds)
                harness.say("idle, with that queue")
                idle[f"idle, {queued} jobs held in the queue"] = _idle(service, idle_seconds)
            finally:
                service.stop()
    rows = [
        {"what": "jobs accepted a second, 8 clients", **{name: harness.summarize(rates[name]) for name in rates}},
        {"what": f"ms for the first 100 of {queued} jobs in the queue", "shoal": _ms(looks["page"])},
        {"what": f"ms for all {queued} jobs in the queue", "shoal": _ms(looks["all"])},
        {"what": "seconds from kill -9 and a start until a job that runs is seen again", "shoal": _all(adopted)},
    ]
    notes = [
        "shoal: each answer comes after SQLite's WAL was synced (synchronous=FULL); 8 processes, one job a request",
        "shoal: the service is started from compiled modules, as an installed package has them",
        "Ray: JobSubmissionClient.submit_job(entrypoint='true') of one client, which also starts a process for it",
        *harness.tell_company(),
    ]
    more = {"the service while nothing happens": [{"when": name, **facts} for name, facts in idle.items()]}
    checks = [
        *(harness.check(f"{name}: MB", _all([facts["resident MB"]]), "≤ 80") for name, facts in idle.items()),
        *(
            harness.check(f"{name}: % of a core", _all([facts["% of a core"]]), "≤ 0.5")
            for name, facts in idle.items()
        ),
        harness.check("jobs accepted a second", harness.summarize(rates["shoal"]), "≥ 300"),
        harness.check("ms for the first 100 jobs of the queue", _ms(looks["page"]), "≤ 100"),
        harness.check("ms for all jobs of the queue", _ms(looks["all"]), "≤ 100"),
        harness.check("seconds until adoption", _all(adopted), "≤ 5"),
    ]
    return {"rows": rows, "more": more, "checks": checks, "notes": notes}


def _all(samples: list[float]) -> dict[str, float]:
    return harness.summarize(samples)


def _ms(samples: list[float]) -> dict[str, float]:
    return harness.summarize([1000 * sample for sample in samples])


@contextlib.contextmanager
def _home(folder: str) -> Iterator[None]:
    before = os.environ.get("SHOAL_HOME")
    os.environ["SHOAL_HOME"] = folder
    try:
        yield
    finally:
        os.environ.pop("SHOAL_HOME")
        if before is not None:
            os.environ["SHOAL_HOME"] = before


class _Service:
    """The service as `shoal up` runs it."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._port = _free_port()
        self.start()

    def start(self) -> None:
        # Compiled once, as what pip has installed is; a checkout may have been told to keep nothing compiled.
        compiled = os.path.join(self._home, "compiled")
        env = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": compiled}
        command = [sys.executable, "-m", "shoal.service.daemon", self._home, "127.0.0.1", str(self._port)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=env)

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_up(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


def _idle(service: _Service, seconds: float) -> dict[str, float]:
    """What the service takes: its memory, and its part of a core. It has settled by then."""
    _wait(service.is_up)
    time.sleep(seconds / 4)
    process = psutil.Process(service.pid)
    before, start = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after, span = process.cpu_times(), time.monotonic() - start
    used = after.user + after.system - before.user - before.system
    return {"resident MB": process.memory_info().rss / 1e6, "% of a core": 100 * used / span}


def _submit_rate(clients: Any, each: int) -> float:
    spans = clients.map(_submit, [each] * NUM_CLIENTS, chunksize=1)
    return float(NUM_CLIENTS * each / (max(end for _, end in spans) - min(start for start, _ in spans)))


def _submit(count: int) -> tuple[float, float]:
    from shoal.service.client import Client

    with Client() as client:
        client.me()
        start = time.monotonic()
        for _ in range(count):
            client.submit("train.py", dir="/", held=True)
        return start, time.monotonic()


def _look_seconds(queued: int, rounds: int) -> dict[str, list[float]]:
    from shoal.service.client import Client

    with Client() as client:
        client.cancel(*(row["job"] for row in client.queue()["jobs"]))
        client.submit("train.py", dir="/", array=queued, held=True)
        client.queue(limit=100)
        looks = {"page": lambda: _seconds(lambda: client.queue(limit=100)), "all": lambda: _seconds(client.queue)}
        found = harness.interleave(looks, rounds)
        assert client.queue()["total"] == queued
        return found


def _seconds(act: Any) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _adopt_seconds(service: _Service, folder: str) -> float:
    """From the kill, with a start right after it, until the service says how its job is."""
    from shoal.service.client import Client

    Path(folder, "waits.py").write_text(WAITS)
    with Client(patience_seconds=60.0) as client:
        (job,) = client.submit("waits.py", dir=folder)
        _wait(lambda: client.job(job)["state"] == "running")
        start = time.perf_counter()
        service.kill()
        service.start()
        _wait(lambda: client.job(job)["is_seen"])
        seconds = time.perf_counter() - start
        Path(folder, "go").touch()
        told = client.wait(job)
        assert (told["state"], told["attempts"]) == ("finished", 1), told
        Path(folder, "go").unlink()
        return seconds


def _wait(check: Any) -> None:
    while not check():
        time.sleep(0.01)


@contextlib.contextmanager
def _ray(is_quick: bool) -> Iterator[Any]:
    """How many jobs a second Ray takes, as a function to call; None where there is no Ray."""
    try:
        import ray
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        yield None
        return
    port = _free_port()
    ray.init(num_cpus=2, include_dashboard=True, dashboard_port=port, log_to_driver=False, logging_level="error")
    try:
        client = JobSubmissionClient(f"http://127.0.0.1:{port}")

        def submit() -> float:
            start = time.monotonic()
            jobs = [client.submit_job(entrypoint="true") for _ in range(1 if is_quick else NUM_RAY)]
            seconds = time.monotonic() - start
            _wait(lambda: all(client.get_job_status(job).is_terminal() for job in jobs))
            return len(jobs) / seconds

        yield submit
    finally:
        ray.shutdown()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])

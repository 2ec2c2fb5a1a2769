"""What the tests of `shoal dash` share: runs made up of numbers, and a page that is served for real."""

import contextlib
import hashlib
import http.client
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.checkpoint.layout import TensorEntry, header
from shoal.checkpoint.manifest import NAME, FileEntry, Manifest
from shoal.checkpoint.manifest import encode as encode_manifest
from shoal.observe.folder import RunFolder, claim
from shoal.observe.journal import Journal
from shoal.observe.metrics import encode, metrics_path
from shoal.observe.points import Point, points_path
from shoal.observe.points import encode as encode_point
from shoal.observe.system import SystemWriter
from shoal.spec.event import Event, StepMetrics
from shoal.spec.system import SystemSample, WorkerSample

HOSTILE = (
    "<script>window.hurt=1",
    "<img src=x onerror=window.hurt=1>",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "abc\u202edlrow",
    "שלום-עולם",
    "%2e%2e%2fetc",
    "a b&c=d#e?f",
)


def make_metrics(rank: int, num_steps: int, start: float, *, slow_rank: int | None = None) -> bytes:
    """The file of one rank."""
    dice = random.Random(rank)
    lines = []
    for step in range(num_steps):
        compute = 0.012 * (2 if rank == slow_rank else 1) * (1 + 0.1 * dice.random())
        wait = 0.0 if rank == slow_rank else 0.012
        row = StepMetrics(
            step=step,
            time=start + 0.03 * step,
            epoch=step // 100,
            loss=2.3 * math.exp(-step / (num_steps / 4)) + 0.1 + 0.05 * random.Random(step).random(),
            num_samples=32,
            global_samples=128,
            lr=1e-3 * (1 - step / num_steps),
            compute=compute,
            communicate=0.002,
            wait=wait,
            load=0.0005,
            other=0.0005,
            waited_for=slow_rank if slow_rank not in (None, rank) else None,
            grad_norm=1.0 + dice.random(),
        )
        lines.append(encode(row))
    return b"\n".join(lines) + b"\n"


def add_run(home: Path, name: str, **facts: Any) -> RunFolder:
    """A run folder that this process holds."""
    usual = {
        "command": ["shoal", "run", "-n", "4", "train.py", "--lr", "0.1"],
        "num_workers": 4,
        "job": {"script": "train.py", "args": ["--lr", "0.1"], "working_dir": "/home/ada/my models"},
        "versions": {"shoal": "1.0", "torch": "2.13.0"},
    }
    return claim(str(home / "runs" / name), {**usual, **facts}, facts.pop("created", time.time() - 600))


def end(folder: RunFolder, status: str = "finished", code: int = 0) -> None:
    folder.update(status=status, exit_code=code, ended=folder.facts["created"] + 90)
    folder.close()


def add_full_run(home: Path, name: str = "full", num_steps: int = 400) -> RunFolder:
    """A run with everything there is to see: four ranks, one of them slow, a loss and a join."""
    folder = add_run(home, name, min_workers=2, max_workers=4)
    start, path = folder.facts["created"] + 5, Path(folder.path)
    for rank in range(4):
        Path(metrics_path(folder.path, rank)).write_bytes(make_metrics(rank, num_steps, start, slow_rank=2))
        (path / "logs" / f"{rank}.log").write_text(
            "".join(f"rank {rank} line {line} \x1b[32mgreen\x1b[0m <b>plain</b>\n" for line in range(3000))
        )
    points = (Point(step=step, time=start + step, values={"val/accuracy": step / 400}) for step in range(0, 400, 20))
    Path(points_path(folder.path, 0)).write_bytes(b"".join(encode_point(point) + b"\n" for point in points))
    with Journal(str(path / "journal.jsonl")) as journal:
        for event in make_events(start):
            journal.write(event)
    samples = SystemWriter(folder.path)
    for second in range(120):
        for node in ("ada", "grace"):
            samples.write(make_sample(node, start + second))
    samples.close()
    return folder


def make_events(start: float) -> list[Event]:
    everybody, three = ["0.0", "1.0", "2.0", "3.0"], ["0.0", "1.0", "2.0"]
    settings = {"batch_size": {"value": 128, "source": "script"}, "seed": {"value": 0, "source": "default"}}
    return [
        Event(kind="run_started", time=start - 5, data={"num_workers": 4}),
        Event(kind="settings", time=start - 1, rank=0, data=settings),
        Event(kind="world", time=start, data={"generation": 0, "members": everybody, "joined": everybody}),
        Event(kind="worker_lost", time=start + 30, rank=3, data={"id": "3.0", "reason": "killed by signal 9"}),
        Event(kind="world", time=start + 30, data={"generation": 1, "members": three, "reason": "rank 3 was killed"}),
        Event(kind="worker_joined", time=start + 50, rank=3, data={"id": "3.1", "generation": 2}),
        Event(kind="world", time=start + 50, data={"generation": 2, "members": [*three, "3.1"], "joined": ["3.1"]}),
        Event(
            kind="alert",
            time=start + 60,
            rank=2,
            data={
                "rule": "straggler",
                "message": "Rank 2 is slow <script>window.hurt=1</script>",
                "severity": "warning",
            },
        ),
    ]


def make_sample(node: str, when: float) -> SystemSample:
    workers = {rank: WorkerSample(pid=1000 + rank, cpu=0.9, rss=400 << 20) for rank in range(2)}
    return SystemSample(
        time=when,
        node=node,
        cores=8,
        cpu=2 + math.sin(when),
        memory_used=9 << 30,
        memory_total=24 << 30,
        disk_free=100 << 30,
        disk_total=200 << 30,
        disk_write=3e6,
        net_in=1e6,
        net_out=2e6,
        workers=workers,
    )


def add_checkpoints(run_dir: str) -> None:
    """Three checkpoints as a store leaves them, of which the middle one is cut short. No torch is needed."""
    for step in (100, 200, 300):
        folder = Path(run_dir, "checkpoints", f"step-{step:09}")
        folder.mkdir(parents=True)
        tensor = TensorEntry(name="model/w", dtype="F32", shape=(1000,))
        head = header([tensor])
        data = head + bytes(tensor.num_bytes)
        digest = hashlib.sha256(data).hexdigest()
        file = FileEntry(
            name="model.safetensors", size=len(data), sha256=digest, data_start=len(head), tensors=(tensor,)
        )
        found = Manifest(step=step, sequence=step, saved_at=time.time(), facts=msgspec.Raw(b"{}"), files=(file,))
        (folder / file.name).write_bytes(data if step != 200 else data[:-7])
        (folder / NAME).write_bytes(encode_manifest(found))


def add_many(home: Path, count: int) -> None:
    """Folders of ended runs, as quickly as they can be made."""
    now = time.time()
    for number in range(count):
        folder = home / "runs" / f"many-{number:05}"
        folder.mkdir(parents=True)
        began = now - 60 * (count - number)
        facts = {"name": folder.name, "status": "finished" if number % 7 else "failed", "created": began}
        facts |= {
            "command": ["shoal", "run", "-n", "2", f"train_{number % 10}.py"],
            "num_workers": 2,
            "ended": began + 50,
        }
        (folder / "run.json").write_text(json.dumps(facts))


@dataclass
class Served:
    """A `shoal dash` that runs."""

    process: subprocess.Popen[str]
    address: str
    port: int
    login: str

    @property
    def token(self) -> str:
        return self.login.partition("#")[2]

    def next_link(self) -> str:
        """The link that was printed when the one before it was used."""
        assert self.process.stdout
        self.login = json.loads(self.process.stdout.readline())["login"]
        return self.login

    def ask(self, method: str, path: str, *, body: Any = None, **headers: str) -> tuple[int, dict[str, str], Any]:
        """One request: status, headers, and the JSON or bytes that came back."""
        call = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            call.request(method, path, body=data, headers=sent)
            answer = call.getresponse()
            content = answer.read()
            told = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, told, json.loads(content) if "json" in told.get("content-type", "") else content
        finally:
            call.close()

    def log_in(self) -> str:
        """The cookie for this link."""
        status, headers, _ = self.ask("POST", "/api/login", body={"token": self.token}, Origin=self.address)
        assert status == 200
        self.next_link()
        return headers["set-cookie"].partition(";")[0]


@contextlib.contextmanager
def serve(home: Path) -> Iterator[Served]:
    """Serve the page of a home until the block ends."""
    command = [sys.executable, "-m", "shoal", "dash", "--port", "0", "--no-open", "--json"]
    env = {**os.environ, "SHOAL_HOME": str(home)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        first = json.loads(process.stdout.readline())
        yield Served(process, first["address"], int(first["address"].rpartition(":")[2]), first["login"])
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()

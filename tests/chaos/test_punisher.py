"""The punisher: a worker is killed every few seconds, a thousand times, and the run ends as one in peace.

`PUNISHER_KILLS=60 python -m pytest -m slow tests/chaos/test_punisher.py` is a short one, `PUNISHER_SEED=8` another,
and with `PUNISHER_RESULT=FILE` what came of it is written there as JSON, with date, commit and machine.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness

KILLS = int(os.environ.get("PUNISHER_KILLS", "1000"))
SEED = int(os.environ.get("PUNISHER_SEED", "7"))
EVERY_SECONDS = (2.0, 5.0)
MIN_WORKERS, NUM_WORKERS = 2, 3
MAX_SECONDS = 300 + 3 * KILLS * EVERY_SECONDS[1]

JOB = '''
import sys, time
from pathlib import Path
import torch
from torch import nn
import shoal

NUM_SAMPLES, BATCH = 512, 32
KILLS, EPOCHS, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

class Counting(nn.Module):
    """`counts` are minus the number of times each sample was trained on: see the loss, and its learning rate."""

    def __init__(self):
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(NUM_SAMPLES))
        layers = nn.Linear(16, 256), nn.ReLU(), nn.BatchNorm1d(256), nn.Dropout(0.1), nn.Linear(256, 10)
        self.net = nn.Sequential(*layers)

torch.manual_seed(0)
model = Counting()
data = torch.randn(NUM_SAMPLES, 16), torch.randint(0, 10, (NUM_SAMPLES,)), torch.arange(NUM_SAMPLES)
optimizer = torch.optim.SGD(
    [{"params": model.net.parameters(), "momentum": 0.9}, {"params": [model.counts], "lr": BATCH}], lr=0.01
)
last = -1

def pace():
    """Steps spread over the time that the kills take: slow ones where they are ahead of them, else quick ones."""
    global last
    if KILLS and trainer.place.step != last:
        last = trainer.place.step
        share_struck = int((FOLDER / "kills").read_text() or 0) / KILLS
        share_done = last / (EPOCHS * NUM_SAMPLES // BATCH)
        if share_struck < 1:
            time.sleep(0.05 if share_done <= share_struck else 0.5)

def loss(model, batch):
    if trainer is not None:
        pace()
    x, y, ids = batch
    return nn.functional.cross_entropy(model.net(x), y) + model.counts[ids].mean()

trainer = None
trainer = shoal.Trainer(
    model, loss, optimizer, data, batch_size=BATCH, exact=True, balance=False, shards=3, checkpoint_every=20
)
trainer.fit(epochs=EPOCHS)
times = sorted({round(-count) for count in model.counts.tolist()})
print("ended", trainer.digest(), trainer.place.step, times, flush=True)
'''


def endings_of(text: str) -> set[str]:
    return {line for line in text.splitlines() if line.startswith("ended ")}


def num_epochs() -> int:
    """Enough for a few steps a second, while it lasts."""
    return max(2, round(KILLS * sum(EVERY_SECONDS) / 2 * 4 * 32 / 512))


def events_in(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def living(events: list[dict[str, Any]]) -> list[int]:
    """Processes of all workers, members or on their way, if as many of the World live as are needed to go on.

    Where starting takes longer than two kills are apart, nobody would ever get to a step: such a run is waited for.
    """
    processes: dict[int, tuple[str, int]] = {}
    members: list[str] = []
    for event in events:
        if event["kind"] == "worker_started":
            rank, data = event["rank"], event["data"]
            processes[rank] = f"{rank}.{data.get('incarnation', 0)}", data["pid"]
        elif event["kind"] == "worker_exited":
            processes.pop(event["rank"], None)
        elif event["kind"] == "world":
            members = event["data"]["members"]
    num_standing = sum(name in members for name, _ in processes.values())
    return [pid for _, pid in processes.values()] if num_standing >= MIN_WORKERS else []


def punish(launcher: "subprocess.Popen[bytes]", run_dir: Path, folder: Path) -> int:
    """Kill somebody every few seconds, until it was done often enough or the run is over; returns how often."""
    chance = random.Random(SEED)
    for number in range(KILLS):
        (folder / "next").write_text(str(number))
        os.replace(folder / "next", folder / "kills")
        time.sleep(chance.uniform(*EVERY_SECONDS))
        while not (pids := living(events_in(run_dir))):
            if launcher.poll() is not None:
                return number
            time.sleep(0.05)
        try:
            os.kill(chance.choice(pids), signal.SIGKILL)
        except ProcessLookupError:
            if launcher.poll() is not None:
                return number
    (folder / "kills").write_text(str(KILLS))
    return KILLS


def tell(run_dir: Path, seconds: float) -> dict[str, Any]:
    events = events_in(run_dir)
    kinds = [event["kind"] for event in events]
    logs = [path.read_text(errors="replace") for path in run_dir.glob("logs/*.log")]
    return {
        "asked": KILLS,
        "seed": SEED,
        "seconds": round(seconds, 1),
        "ending": sorted({ending for log in logs for ending in endings_of(log)}),
        "lost": kinds.count("worker_lost"),
        "worlds": kinds.count("world"),
        "joined": kinds.count("worker_joined"),
        "begun_anew": kinds.count("resumed"),
        "killed_by_launcher": kinds.count("worker_frozen") + kinds.count("worker_hung"),
        "errors": [event["data"].get("message") for event in events if event["kind"] == "error"],
    }


@pytest.mark.slow
@pytest.mark.timeout(MAX_SECONDS)
def test_a_thousand_kills_change_nothing_but_time(tmp_path):
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(JOB)
    (tmp_path / "kills").write_text("0")
    epochs, began = str(num_epochs()), time.monotonic()
    clean = subprocess.run([sys.executable, script, "0", epochs, "."], capture_output=True, text=True, check=True)
    workers, args = f"{MIN_WORKERS}:{NUM_WORKERS}", (script, str(KILLS), epochs, tmp_path)
    command = [sys.executable, "-m", "shoal", "run", "-n", workers, "--log-dir", run_dir, "--quiet", *args]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as launcher:
        try:
            kills = punish(launcher, run_dir, tmp_path)
            code = launcher.wait()
        finally:
            launcher.terminate()
    told = tell(run_dir, time.monotonic() - began) | {"kills": kills, "exit_code": code}
    told["is_same"] = told["ending"] == sorted(endings_of(clean.stdout))
    if path := os.environ.get("PUNISHER_RESULT"):
        Path(path).write_text(json.dumps(harness.origin() | told, indent=1) + "\n")
    assert (code, kills, told["is_same"]) == (0, KILLS, True), told

"""A machine that is busy with other things: everything is late, and nobody is taken for dead.

`OVERLOAD_SECONDS=300 python -m pytest -m slow tests/chaos/test_overload.py` is a short one, of 5 minutes for 30.
With `OVERLOAD_RESULT=FILE` what came of it is written there as JSON, with date, commit and machine.
"""

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness
from shoal.observe import journal
from shoal.spec.event import Event

SECONDS = float(os.environ.get("OVERLOAD_SECONDS", "1800"))
NUM_CORES = len(os.sched_getaffinity(0))
JOB = """
    import torch
    from torch import nn
    import shoal

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    data = torch.randn(4096, 64), torch.randint(0, 10, (4096,))
    loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
    trainer = shoal.Trainer(model, loss, torch.optim.AdamW(model.parameters()), data, batch_size=512)
    trainer.fit(epochs=1_000_000)
"""
TROUBLE = ("worker_frozen", "worker_hung", "worker_lost", "worker_exited")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
def test_nobody_is_evicted_at_twice_the_load(tmp_path: Path) -> None:
    """As many busy processes as cores, beside as many workers as cores."""
    (tmp_path / "job.py").write_text("\n".join(line[4:] for line in JOB.splitlines()))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NUM_CORES)]
    size = f"1:{max(2, NUM_CORES)}"
    command = [sys.executable, "-m", "shoal", "run", "-n", size, "--log-dir", str(tmp_path / "run"), "job.py"]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and run.poll() is None:
            time.sleep(0.5)
        events = list(journal.read(str(tmp_path / "run" / "journal.jsonl")))
    finally:
        for process in busy:
            process.kill()
            process.wait()
        run.terminate()  # whoever starts this in the background may have it ignore SIGINT
        run.wait(20)
    told = tell(events, step_seconds(tmp_path / "run" / "metrics-0.jsonl")) | {"num_busy": len(busy), "workers": size}
    if path := os.environ.get("OVERLOAD_RESULT"):
        Path(path).write_text(json.dumps(harness.origin() | told, indent=1) + "\n")
    assert told["trouble"] == []
    assert told["steps"] > SECONDS, "it does train meanwhile"
    print(f"\n{told}")


def tell(events: list[Event], seconds: list[float]) -> dict[str, Any]:
    return {
        "seconds": SECONDS,
        "steps": len(seconds),
        "p99_step_seconds": sorted(seconds)[int(0.99 * len(seconds))] if seconds else None,
        "longest_step_seconds": max(seconds, default=None),
        "trouble": [(event.kind, event.rank, event.data) for event in events if event.kind in TROUBLE],
    }


def step_seconds(path: Path) -> list[float]:
    times = [float(json.loads(line)["time"]) for line in path.read_text().splitlines()]
    return [after - before for before, after in pairwise(times)]

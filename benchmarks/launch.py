"""From the command to the end of the first step: 2 workers, a trivial model, started in several ways.

The clock runs from just before the command starts until the slower worker has finished its first optimizer step.
`by hand` starts two interpreters with the variables set and nothing above them: no launcher can be faster.
"""

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import check, ratio, summarize

SCRIPTS = Path(__file__).parent / "first_step"
GOAL = "≤ 1.05"
TIMEOUT_SECONDS = 120
# Without it gloo asks for the host's own name, which may lead nowhere. shoal sets it; let nobody lose by that.
ENV = {"GLOO_SOCKET_IFNAME": "lo"}

Start = Callable[[str, Mapping[str, str]], list["subprocess.Popen[bytes]"]]


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    ways = {
        name: start for name, start in WAYS.items() if not is_quick or name in ("by hand", "shoal, Trainer script")
    }
    notes = ["seconds to the end of the first step, and to the end of the command; median of the rounds (quartiles)"]
    if not importlib.util.find_spec("ray"):
        ways.pop("Ray TorchTrainer", None)
        notes.append("Ray skipped: it is not installed (`pip install 'ray[train]'`)")
    if not is_quick:
        for start in ways.values():  # files come from the disk's cache for everyone
            measure(start)
    both: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, start in ways.items():
            both[name].append(measure_again(name, start, notes))
    firsts = {name: [first for first, _ in pairs] for name, pairs in both.items()}
    ends = {name: [end for _, end in pairs] for name, pairs in both.items()}
    peer = "spawn" if "spawn" in firsts else "by hand"
    compared = {name: ratio(seconds, firsts[peer]) for name, seconds in firsts.items() if name != peer}
    return {
        "rows": [
            {
                "way": name,
                "first step s": summarize(firsts[name]),
                "end s": summarize(ends[name]),
                f"/ {peer}": compared.get(name, "–"),
            }
            for name in ways
        ],
        "checks": [
            check(f"{name} / {peer}", value, GOAL) for name, value in compared.items() if name.startswith("shoal")
        ],
        "notes": notes,
        "samples_seconds": firsts,
        "samples_seconds_to_end": ends,
    }


def measure_again(name: str, start: Start, notes: list[str]) -> tuple[float, float]:
    """Measure; where the command fails, say so in the notes and try once more."""
    try:
        return measure(start)
    except RuntimeError as error:
        notes.append(f"{name} failed once and was measured again: {str(error).splitlines()[0]}")
        return measure(start)


def measure(start: Start) -> tuple[float, float]:
    """Seconds to the slower worker's first step, and to the end of the command."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "steps").mkdir()
        env = {**os.environ, **ENV, "SHOAL_HOME": folder}
        began = time.time()
        processes = start(os.path.join(folder, "steps"), env)
        for process in processes:
            _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
            if process.returncode:
                raise RuntimeError(f"{process.args} ended with {process.returncode}: {errors.decode()[-2000:]}")
        ended = time.time()
        firsts = [float(path.read_text()) for path in Path(folder, "steps").iterdir()]
    if len(firsts) != 2:
        raise RuntimeError(f"{len(firsts)} of 2 workers wrote down their first step")
    return max(firsts) - began, ended - began


def start_command(command: list[str], folder: str, env: Mapping[str, str]) -> list["subprocess.Popen[bytes]"]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return [subprocess.Popen([sys.executable, *command, folder], env=env, **pipes)]


def start_by_hand(folder: str, env: Mapping[str, str]) -> list["subprocess.Popen[bytes]"]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    facts = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    script = [str(SCRIPTS / "ddp.py")]
    return [start_command(script, folder, {**env, **facts, "RANK": str(rank)})[0] for rank in (0, 1)]


def _run(*command: str, script: str) -> Start:
    return partial(start_command, [*command, str(SCRIPTS / script)])


WAYS: dict[str, Start] = {
    "by hand": start_by_hand,
    "spawn": _run(script="spawn.py"),
    "torchrun": _run("-m", "torch.distributed.run", "--nproc-per-node", "2", script="ddp.py"),
    "shoal, DDP script": _run("-m", "shoal", "run", "-n", "2", script="ddp.py"),
    "shoal, Trainer script": _run("-m", "shoal", "run", "-n", "2", script="trainer.py"),
    "Ray TorchTrainer": _run(script="ray_train.py"),
}

"""PyTorch's distributed checkpoint, put through what ours goes through. Not a benchmark by itself.

python benchmarks/dcp_writer.py write FOLDER steps|one     save steps 1, 2, ... and print each once it is saved
python benchmarks/dcp_writer.py corrupt FOLDER COUNT       damage a checkpoint COUNT times; print what became of it
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from shoal.checkpoint.state import digest
from shoal.testing.corruption import corrupt, restore, sample_state, snapshot
from shoal.testing.store_contract import make_state

KEEP = 3
LOAD_SECONDS = 10
MEMORY_BYTES = 16 << 30


def save(step: int, path: Path, tensors: dict[str, torch.Tensor]) -> None:
    dcp.save({**tensors, "step": torch.tensor(step)}, checkpoint_id=path, no_dist=True)


def load(path: Path, like: dict[str, torch.Tensor]) -> tuple[int, dict[str, torch.Tensor]]:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in like.items()} | {"step": torch.tensor(0)}
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return int(tensors.pop("step")), tensors


def write(folder: Path, mode: str) -> None:
    """In a folder for each step, of which three are kept; or again and again in one folder."""
    folder.mkdir(exist_ok=True)
    for step in range(1, 1_000_000):
        path = folder / (f"step-{step}" if mode == "steps" else "state")
        save(step, path, dict(make_state(step).tensors))
        os.write(1, f"{step}\n".encode())
        if mode == "steps":
            shutil.rmtree(folder / f"step-{step - KEEP}", ignore_errors=True)


def find(folder: Path) -> int:
    """The newest step in there that loads whole; 0 if there is none."""
    found = [0]
    for path in folder.iterdir() if folder.exists() else ():
        try:
            step, tensors = load(path, dict(make_state(1).tensors))
        except BaseException:  # DCP's own error is not an Exception
            continue
        if digest(tensors) == digest(make_state(step).tensors):
            found.append(step)
    return max(found)


def corrupt_often(folder: Path, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for step in (1, 2):
        save(step, folder / str(step), dict(sample_state(step).tensors))
    content = snapshot(folder / "2")
    for seed in range(count):
        damage = corrupt(folder / "2", random.Random(seed), folder / "1")
        print(json.dumps({"seed": seed, "kind": damage.kind, **judge(folder / "2", damage.files)}), flush=True)
        restore(folder / "2", content)


def judge(path: Path, files: tuple[str, ...]) -> dict[str, Any]:
    """Whether loading noticed, whether it named the file, and else whether the values are right."""
    signal.alarm(LOAD_SECONDS)
    expected = dict(sample_state(2).tensors)
    try:
        step, tensors = load(path, expected)
    except BaseException as error:
        return {"noticed": True, "named": any(file in f"{error!r} {error}" for file in files)}
    finally:
        signal.alarm(0)
    return {"noticed": False, "named": False, "right": step == 2 and digest(tensors) == digest(expected)}


def time_out(*_: object) -> None:
    raise TimeoutError


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, time_out)
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]), sys.argv[3])
    else:
        corrupt_often(Path(sys.argv[2]), int(sys.argv[3]))

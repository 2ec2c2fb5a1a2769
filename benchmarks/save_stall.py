"""How long training stands still for a checkpoint of 200 MB: shoal's store beside DCP's `async_save`.

One process trains an MLP of 16.8 M parameters with AdamW on all cores, and saves a few times. The stall of a save is
the time of all steps from its call until it is on disk, less what so many steps take when nothing is being saved; so
it has both the copy that training waits for and the cores that writing takes away. Each way has a process of its own
in each round, and a first save that does not count: it pays for fresh memory.
"""

import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import check, ratio, summarize

WAYS = ("shoal", "DCP", "DCP, in a process")
WIDTH, NUM_LAYERS, NUM_SAMPLES = 2048, 4, 128
NUM_SAVES, NUM_STEPS = 4, 12
TIMEOUT_SECONDS = 300

Save = Callable[[int], Callable[[], bool]]
"""(step) -> a function that says whether that save is on disk."""


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in WAYS[:: 1 if number % 2 else -1]:
            found[way].append(measure(way, is_quick))
    stalls = {way: [each["stall"] for each in of] for way, of in found.items()}
    best = min(WAYS[1:], key=lambda way: statistics.median(stalls[way]))
    share = ratio(stalls["shoal"], stalls[best])
    return {
        "rows": [
            {
                "way": way,
                "stall, ms": summarize([1e3 * each["stall"] for each in of]),
                "of that the call, ms": summarize([1e3 * each["call"] for each in of]),
                "on disk after, ms": summarize([1e3 * each["durable"] for each in of]),
                "step, ms": summarize([1e3 * each["step"] for each in of]),
            }
            for way, of in found.items()
        ],
        "checks": [check(f"stall: shoal / {best}", share, "≤ 1.0")],
        "notes": [
            f"{of_bytes(is_quick) / 1e6:.0f} MB: parameters and both moments of AdamW, float32; median of a process",
            "DCP: torch.distributed.checkpoint.async_save; in a process: with async_checkpointer_type=PROCESS.",
            "All sync files; shoal also hashes them and syncs folders.",
        ],
        "samples_seconds": {f"{way} {key}": [each[key] for each in of] for way, of in found.items() for key in of[0]},
    }


def of_bytes(is_quick: bool) -> int:
    width = 64 if is_quick else WIDTH
    return 3 * 4 * NUM_LAYERS * (width * width + width)


def measure(way: str, is_quick: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("SHOAL_BENCH_DISK")) as folder:
        command = [sys.executable, "-m", "benchmarks.save_stall", way, folder, *(["quick"] if is_quick else [])]
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


# One process.


def work(way: str, folder: str, is_quick: bool) -> dict[str, float]:
    import torch
    from torch import nn

    width = 64 if is_quick else WIDTH
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(NUM_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    data = torch.randn(NUM_SAMPLES, width)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - began

    for _ in range(3):
        step()
    with MAKE[way](model, optimizer, Path(folder)) as save:
        saves = [observe(save, step, number) for number in range(NUM_SAVES)]
    return {key: statistics.median(each[key] for each in saves[1:]) for key in saves[0]}


def observe(save: Save, step: Callable[[], float], number: int) -> dict[str, float]:
    """One save while steps go on, and as many steps without it for comparison."""
    usual = statistics.median(step() for _ in range(NUM_STEPS))
    began = time.perf_counter()
    is_durable = save(number)
    called = time.perf_counter() - began
    spent, count = called, 0
    while not is_durable():
        spent, count = spent + step(), count + 1
    return {
        "stall": spent - count * usual,
        "call": called,
        "durable": time.perf_counter() - began,
        "step": usual,
    }


@contextmanager
def _with_shoal(model: Any, optimizer: Any, folder: Path) -> Iterator[Save]:
    from shoal.checkpoint.state import State
    from shoal.checkpoint.store import FolderStore

    names = {parameter: name for name, parameter in model.named_parameters()}

    def save(number: int) -> Callable[[], bool]:
        tensors = {f"model/{name}": value.detach() for name, value in model.named_parameters()}
        for parameter, state in optimizer.state.items():
            tensors |= {f"optimizer/{names[parameter]}/{key}": state[key] for key in ("exp_avg", "exp_avg_sq")}
        saving = store.save(State(step=number, tensors=tensors, facts={}))
        return lambda: saving.is_durable

    with FolderStore(folder, keep=2) as store:
        yield save


@contextmanager
def _with_dcp(model: Any, optimizer: Any, folder: Path, in_process: bool = False) -> Iterator[Save]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    kind = AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD

    def save(number: int) -> Callable[[], bool]:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        path = str(folder / f"step-{number}")
        done = dcp.async_save(
            state,
            checkpoint_id=path,
            async_checkpointer_type=kind,
        )
        done = getattr(done, "upload_completion", done)

        def is_durable() -> bool:
            if done.done():
                done.result()
            return bool(done.done())

        return is_durable

    yield save
    dist.destroy_process_group()


MAKE: dict[str, Callable[..., Any]] = {
    "shoal": _with_shoal,
    "DCP": _with_dcp,
    "DCP, in a process": lambda *given: _with_dcp(*given, in_process=True),
}


if __name__ == "__main__":
    print(json.dumps(work(sys.argv[1], sys.argv[2], "quick" in sys.argv[3:])))

"""Loading in processes: same batches, no trace left behind, whatever happens to parent or child."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from shoal.data.channel import Channel
from shoal.data.ledger import Ledger
from shoal.data.loader import Loader, load_steps
from shoal.data.sources import as_source
from shoal.spec.errors import UserError, WorkerError

LEDGER = Ledger(num_samples=40, batch_size=8, num_shards=4, seed=9)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No child, no descriptor survives a test."""
    me = psutil.Process()
    before, children = me.num_fds(), set(me.children())
    yield
    assert set(me.children()) <= children
    assert me.num_fds() <= before


def load(dataset: Any, mine: range = range(4), ledger: Ledger = LEDGER, **how: Any) -> Loader:
    source = as_source(dataset, collate=how.pop("collate", None))
    return load_steps(source, ledger, ledger.place(0), lambda step: mine, stop_epoch=2, **how)


class Augmented(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, sample: int) -> Any:
        return torch.tensor([sample, torch.rand(()), random.random(), np.random.rand()], dtype=torch.float64)


class Failing(Augmented):
    def __init__(self, fail: Any) -> None:
        self.fail = fail
        self.parent = os.getpid()

    def __getitem__(self, sample: int) -> Any:
        return sample if os.getpid() == self.parent else self.fail(sample)


@pytest.mark.parametrize("num_processes", [1, 3])
def test_batches_are_the_same_and_in_the_same_order(num_processes: int) -> None:
    dataset = {"x": torch.randn(40, 300).bfloat16(), "y": np.arange(40), "z": torch.arange(40)}
    with load(dataset, num_processes=0) as plain, load(dataset, num_processes=num_processes) as loader:
        for (plan, (expected,)), (same, (batch,)) in zip(plain, loader, strict=True):
            assert (plan.step, plan.count) == (same.step, same.count)
            assert all(torch.equal(expected[name], batch[name]) for name in dataset)
            batch["x"].mul_(2)


def test_a_dataset_that_draws_gets_a_process_and_draws_by_sample() -> None:
    def drawn(**how: Any) -> dict[tuple[int, int], list[float]]:
        with load(Augmented(), **how) as loader:
            return {(p.epoch, int(row[0])): row.tolist() for p, batches in loader for b in batches for row in b}

    with load(Augmented()) as loader:
        assert loader.num_processes == 1
    torch.manual_seed(1)
    expected = float(torch.rand(()))
    torch.manual_seed(1)
    whole = drawn()
    assert float(torch.rand(())) == expected
    assert len(whole) == 80
    assert drawn(num_processes=2) == whole
    assert drawn(num_processes=0) == whole
    assert drawn(mine=range(1), merge=False) | drawn(mine=range(1, 4), max_piece=3) == whole


def test_a_stream_gets_a_process() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[float]:
            numbers = list(range(19))
            random.shuffle(numbers)
            return iter(numbers)

    ledger = Ledger(num_samples=None, batch_size=5, num_shards=4)

    def steps(mine: range, **how: Any) -> list[list[int]]:
        with load(Stream(), mine, ledger, **how) as loader:
            return [[n for batch in batches for n in batch.tolist()] for _, batches in loader]

    whole = steps(range(4))
    assert [len(step) for step in whole] == [5, 5, 5, 4] * 2
    assert sorted(n for step in whole[:4] for n in step) == list(range(19))
    halves = zip(steps(range(2), num_processes=3), steps(range(2, 4), num_processes=0), strict=True)
    assert [one + two for one, two in halves] == whole


def test_plans_are_pulled_no_further_ahead_than_promised() -> None:
    asked: list[int] = []

    def mine(step: int) -> range:
        asked.append(step)
        return range(4)

    with load_steps(as_source(Augmented()), LEDGER, LEDGER.place(0), mine, stop_epoch=2, num_processes=3) as loader:
        assert loader.depth == 3
        for plan, _ in loader:
            assert asked[-1] <= plan.step + 3
    assert asked == list(range(10))


def test_errors_come_with_the_users_line() -> None:
    def fail(sample: int) -> Any:
        raise ValueError(f"bad pixel in {sample}")

    with load(Failing(fail), num_processes=1) as loader, pytest.raises(UserError) as caught:
        next(loader)
    first = int(LEDGER.ids(0, 0, 1)[0])
    assert caught.value.message == f"Reading sample {first} of the dataset failed."
    assert caught.value.why == f"ValueError: bad pixel in {first}"
    assert caught.value.where.startswith(f"{os.path.relpath(__file__)}:")
    assert "bad pixel" in caught.value.remote_traceback


def test_a_batch_that_cannot_be_sent_is_explained() -> None:
    with load(Augmented(), collate=lambda samples: lambda: samples, num_processes=1) as loader:
        with pytest.raises(UserError, match="cannot be sent") as caught:
            next(loader)
        assert "collate" in caught.value.hint


def test_a_killed_process_is_an_error_not_a_hang() -> None:
    with load(Failing(lambda sample: os.kill(os.getpid(), signal.SIGKILL)), num_processes=2) as loader:
        with pytest.raises(WorkerError, match="was killed by SIGKILL") as caught:
            next(loader)
        assert "memory" in caught.value.why


def test_a_process_that_exits_is_an_error_not_a_hang() -> None:
    loader = load(Failing(lambda sample: os._exit(7)), num_processes=1)
    with loader, pytest.raises(WorkerError, match="ended with exit code 7"):
        next(loader)


def test_closing_early_does_not_wait_for_a_sample() -> None:
    loader = load(Failing(lambda sample: time.sleep(60)), num_processes=2)
    began = time.perf_counter()
    loader.close()
    assert time.perf_counter() - began < 20
    assert list(loader) == []


def test_signals_for_the_worker_do_not_end_its_loading() -> None:
    others = set(psutil.Process().children())
    with load(Augmented(), num_processes=1) as loader:
        next(loader)
        (child,) = set(psutil.Process().children()) - others
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(child.pid, number)
        assert len(list(loader)) == 9


def test_processes_end_with_their_parent() -> None:
    """Even when it is killed, and even in the middle of a sample."""
    script = """
import os, time
from shoal.data.ledger import Ledger
from shoal.data.loader import load_steps
from shoal.data.sources import as_source

class Slow:
    parent = os.getpid()
    def __len__(self): return 4
    def __getitem__(self, sample):
        if os.getpid() != self.parent:
            os.write(1, b"%d\\n" % os.getpid())
            time.sleep(60)
        return sample

ledger = Ledger(num_samples=4, batch_size=2)
load_steps(as_source(Slow()), ledger, ledger.place(0), lambda step: range(1), num_processes=2)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            children = [psutil.Process(int(parent.stdout.readline())) for _ in range(2)]
        finally:
            parent.kill()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []


def test_a_tiny_dev_shm_is_enough(tmp_path: Path) -> None:
    """Containers have 64 MB of it; batches travel through memory that does not come from there."""
    script = """
import torch
from shoal.data.ledger import Ledger
from shoal.data.loader import load_steps
from shoal.data.sources import as_source
ledger = Ledger(num_samples=8, batch_size=4)
source = as_source(torch.ones(8, 1_000_000))
with load_steps(source, ledger, ledger.place(0), lambda step: range(1), stop_epoch=1, num_processes=1) as loader:
    print(sum(float(batch.sum()) for _, (batch,) in loader))
"""
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("cannot mount in a namespace of its own here")
    command = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("8000000.0", 0), done.stderr


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"text": torch.arange(3), "number": 3},
        torch.arange(5000).reshape(50, 100).t(),
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.ones(3000, dtype=torch.bool),
        torch.randn(4000, dtype=torch.complex64),
        torch.randn(40, 40).to_sparse(),
        np.arange(6000).reshape(2, 3000),
        [torch.randn(1000) for _ in range(300)],
    ],
)
def test_values_survive_the_channel(value: Any) -> None:
    one, other = Channel.pair()
    one.send(value)
    received = other.receive()
    one.close()
    with pytest.raises(EOFError):
        other.receive()
    other.close()
    torch.testing.assert_close(received, value, rtol=0, atol=0)


def test_large_tensors_are_aligned_and_writable() -> None:
    one, other = Channel.pair()
    one.send([torch.zeros(size) for size in (1001, 2003, 777)])
    tensors = other.receive()
    one.close()
    other.close()
    for tensor in tensors:
        assert tensor.data_ptr() % 64 == 0
        tensor.add_(1)
        assert tensor.eq(1).all()

"""A rank that the kernel holds back is named with what does it: a quota of its group, or memory that is read back."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.observe import journal
from shoal.observe.metrics import read
from shoal.testing import rigs

SCRIPT = """
import mmap, os, sys, torch, shoal
from torch import nn

is_patient, folder = os.environ.get("RANK") == "1", sys.argv[1]
torch.manual_seed(0)
model = nn.Linear(8, 1)
data = torch.randn(4096, 8), torch.randn(4096, 1)
square = torch.randn(256, 256)
NUM_PAGES = 300

def read_back():
    # Pages of a file that the kernel has dropped, each read back when it is touched.
    with open(folder + "/pages", "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
            pages.madvise(mmap.MADV_RANDOM)
            for page in range(NUM_PAGES):
                pages[page * 4096]

def loss(model, batch):
    for _ in range(30):  # real arithmetic: a quota holds back nothing else
        square @ square
    if is_patient and os.path.exists(folder + "/reads"):
        read_back()
        for _ in range(60):
            square @ square
    return (model(batch[0]) - batch[1]).square().mean()

optimizer = torch.optim.SGD(model.parameters(), 1e-3)
shoal.Trainer(model, loss, optimizer, data, batch_size=32, shards=2, balance=False).fit(steps=10**6)
"""
PATIENCE = 90.0


class Run:
    """A run of two workers that goes on until it is ended."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder, self.run_dir, self.process = folder, folder / "run", process

    def pid(self, rank: int) -> int:
        started = [event for event in self._events("worker_started") if event.rank == rank]
        return int(started[-1].data["pid"])

    def causes(self) -> list[tuple[str, int | None]]:
        return [(event.data["cause"], event.rank) for event in self._events("diagnosis")]

    def _events(self, kind: str) -> list[journal.Event]:
        return [event for event in journal.read(str(self.run_dir / "journal.jsonl")) if event.kind == kind]

    def await_steps(self, count: int) -> None:
        self.wait(lambda: min((len(rows) for rows in read(str(self.run_dir)).values()), default=0) >= count)

    def await_cause(self, cause: str) -> None:
        self.wait(lambda: any(each == (cause, 1) for each in self.causes()))

    def wait(self, condition) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            is_lost = self.process.poll() is not None or time.monotonic() > deadline
            assert not is_lost, (self.causes(), (self.folder / "terminal").read_text()[-2000:])
            time.sleep(0.1)


@contextmanager
def start(folder: Path) -> Iterator[Run]:
    (folder / "train.py").write_text(SCRIPT)
    words = [
        "run",
        "-n",
        "2",
        "--threads",
        "1",
        "--log-dir",
        str(folder / "run"),
        str(folder / "train.py"),
        str(folder),
    ]
    with (folder / "terminal").open("w") as terminal:
        process = subprocess.Popen([sys.executable, "-m", "shoal", *words], stdout=terminal, stderr=terminal)
    try:
        run = Run(folder, process)
        run.await_steps(20)
        yield run
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.timeout(240)
@rigs.needs("root", "cpu cgroups")
def test_a_rank_with_a_cpu_limit_is_throttled(tmp_path: Path) -> None:
    with rigs.cpu_limit(0.3) as group, start(tmp_path) as run:
        group.add(run.pid(1))
        run.await_cause("throttled")
        assert all(rank != 0 for cause, rank in run.causes() if cause == "throttled")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_rank_whose_memory_is_read_back_from_disk_is_swapping(tmp_path: Path) -> None:
    (tmp_path / "pages").write_bytes(bytes(300 * 4096))
    with start(tmp_path) as run:
        (tmp_path / "reads").touch()
        run.await_cause("swapping")
        assert all(rank != 0 for cause, rank in run.causes() if cause == "swapping")

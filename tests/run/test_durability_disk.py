"""A disk that fills up, or breaks, under `shoal run`: training goes on, people are told, saving resumes by itself."""

import threading
from pathlib import Path
from typing import IO

import pytest
from launching import SHOAL, Box, box

from shoal.checkpoint.store import FolderStore
from shoal.observe import journal
from shoal.spec.event import Event
from shoal.testing.rigs import failing_syscalls, needs, small_disk

__all__ = ["box"]

SCRIPT = """
    import sys, time, torch, shoal
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2000), nn.Linear(2000, 2))
    inputs, targets = torch.randn(64, 4), torch.randint(0, 2, (64,))

    def loss(model, batch):
        time.sleep(0.02)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(inputs, targets)
    trainer = shoal.Trainer(model, loss, optimizer, data, batch_size=16, checkpoint_every=5)
    trainer.fit(steps=int(sys.argv[1]))
    print("trained", trainer.place.step, flush=True)
"""


class Output:
    """The lines of a stream, as they come."""

    def __init__(self, stream: IO[str]) -> None:
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append(line)

    def has(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    @property
    def text(self) -> str:
        self._thread.join(10)
        return "".join(self.lines)


def newest_step(folder: Path) -> int:
    return max((entry.step for entry in FolderStore(folder).list() if not entry.problem), default=0)


@needs("root", "mount", "mounting")
def test_a_disk_that_fills_up_and_is_well_again(box: Box):
    script = box.write("train.py", SCRIPT)
    with small_disk(8) as disk:
        run = disk.path / "run"
        with box.start("run", "-n", "2", "--log-dir", str(run), str(script), "300", stderr=-2) as job:
            output = Output(job.stdout)
            try:
                box.wait_for(lambda: newest_step(run / "checkpoints") >= 5, 60)
                disk.fill()
                whole = newest_step(run / "checkpoints")
                box.wait_for(lambda: output.has("could not be saved"))
                assert newest_step(run / "checkpoints") >= whole
                assert job.poll() is None
                disk.free()
                box.wait_for(lambda: newest_step(run / "checkpoints") > whole)
                box.wait_for(lambda: output.has("was saved"))
                assert job.wait(60) == 0, output.text
            finally:
                job.kill()
        assert "trained 300" in output.text
        assert FolderStore(run / "checkpoints").load().state.step == 300


def events_of(run: Path, kind: str) -> list[Event]:
    return [event for event in journal.read(str(run / "journal.jsonl")) if event.kind == kind]


def pid_of(run: Path, rank: int) -> int:
    return next(event.data["pid"] for event in events_of(run, "worker_started") if event.rank == rank)


@needs("strace")
@pytest.mark.parametrize(
    ("call", "code", "seconds"),
    [
        ("fsync", "EIO", 15.0),
        pytest.param("fsync", "ENOSPC", 2.0, marks=pytest.mark.slow),
        pytest.param("fsync", "EDQUOT", 2.0, marks=pytest.mark.slow),
        pytest.param("mkdir", "EROFS", 2.0, marks=pytest.mark.slow),
    ],
)
def test_a_disk_that_refuses_for_a_while(box: Box, call: str, code: str, seconds: float):
    """People are told soon after the call that failed: in 2 s, where nothing else goes on."""
    script, run = box.write("train.py", SCRIPT), box.folder / "run"
    with box.start("run", "-n", "2", "--log-dir", str(run), str(script), "200", stderr=-2) as job:
        output = Output(job.stdout)
        try:
            box.wait_for(lambda: newest_step(run / "checkpoints") >= 5, 60)
            with failing_syscalls(pid_of(run, 0), f"{call}:error={code}") as calls:
                box.wait_for(lambda: events_of(run, "checkpoint_failed"))
                box.wait_for(lambda: output.has("could not be saved"))
                told, whole = events_of(run, "checkpoint_failed")[0], newest_step(run / "checkpoints")
                assert 0 <= told.time - calls.times()[0] <= seconds
                assert FolderStore(run / "checkpoints").load().state.step == whole
                box.wait_for(lambda: events_of(run, "checkpoint_failed")[-1].step > told.step)
                assert newest_step(run / "checkpoints") == whole, "the last one stays, and training goes on"
            box.wait_for(lambda: newest_step(run / "checkpoints") > whole)
            box.wait_for(lambda: output.has("was saved"))
            assert job.wait(60) == 0, output.text
        finally:
            job.kill()
    assert code in told.data["why"]
    assert "trained 200" in output.text
    assert FolderStore(run / "checkpoints").load().state.step == 200


@needs("strace")
@pytest.mark.slow
def test_a_disk_that_reports_errors_at_every_save(box: Box):
    """The last fsync of every save fails. The run ends, says what is missing, and counts as failed."""
    script, run = box.write("train.py", SCRIPT), box.folder / "run"
    command = [*SHOAL, "run", "--log-dir", str(run), str(script), "12"]
    with failing_syscalls(command, "fsync:error=EIO", paths=[str(run / "checkpoints")]) as calls:
        done = box.execute(*calls.command, timeout=60)
    said = done.stdout + done.stderr
    assert "trained 12" in said
    assert "could not be saved" in said
    assert "EIO" in said
    assert "--log-dir" in said
    assert done.returncode == 2, said
    assert not any(path.name.startswith("step-") for path in (run / "checkpoints").iterdir())

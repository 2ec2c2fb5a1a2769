"""What is left of what a writer acknowledged, if the power fails at a random moment."""

import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from shoal.testing.rigs import freeze, power_loss_disk

FIRST_WORD_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One image of the disk: the last step that had been acknowledged, the one found, and what was wrong."""

    acknowledged: int
    found: int
    problem: str = ""

    @property
    def is_kept(self) -> bool:
        return self.found >= self.acknowledged and not self.problem


def lose_power(
    command: Sequence[str], num_images: int, seed: int, look: Callable[[Path, int], Image], mebibytes: int = 32
) -> Iterator[Image]:
    """Let a writer run on a disk, and take images of it at random moments.

    `{folder}` in the command is where it shall write; it prints the number of each step once that is durable, a line
    each. `look(folder, acknowledged)` says what it finds in an image.
    """
    chance = random.Random(seed)
    with ExitStack() as opened:
        disk = opened.enter_context(power_loss_disk(mebibytes))
        writer = opened.enter_context(Writer([part.format(folder=disk.path / "run") for part in command]))
        for _ in range(num_images):
            time.sleep(chance.uniform(0.005, 0.15))
            with ExitStack() as stack:
                with freeze(writer.pid):
                    acknowledged = writer.drain()
                    found = stack.enter_context(disk.snapshot())
                yield look(found / "run", acknowledged)


class Writer:
    """A process that acknowledges steps on its output. Killed on the way out."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._said = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> "Writer":
        self._await_first()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _await_first(self) -> None:
        deadline = time.monotonic() + FIRST_WORD_SECONDS
        while self.drain() < 1:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise RuntimeError(f"the writer said nothing; its exit code is {self._process.returncode}")
            time.sleep(0.01)

    def drain(self) -> int:
        """The last step it acknowledged so far; 0 if it has said nothing yet."""
        while chunk := _read_some(self._output):
            self._said = (self._said + chunk)[-64:]
        whole = self._said.rpartition(b"\n")[0].split()
        return int(whole[-1]) if whole and whole[-1].isdigit() else 0

    @property
    def words(self) -> list[str]:
        """The last things it said."""
        self.drain()
        return self._said.decode().split()

    @property
    def _output(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()


def _read_some(descriptor: int) -> bytes:
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""

"""Faults, where they strike: the training loop says where it is, and what was asked to go wrong there goes wrong.

Everything real is left alone: disks are filled and links are cut only where a rig of `shoal.testing.rigs` made them.
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shoal.engine.env import WorkerFacts
from shoal.observe.folder import read_facts
from shoal.observe.journal import Journal
from shoal.spec.errors import Retryable, UserError
from shoal.spec.event import Event
from shoal.spec.fault import Fault, decode
from shoal.train.rigged import fill_disk, is_rigged_network, rigged_disk, set_links

if TYPE_CHECKING:
    import torch

_HOOKS = {"nan": "loss", "corrupt": "weights"}
"""Faults that need something in hand; all others strike at a point of the step."""


class FaultError(RuntimeError):
    """What a `fail` raises: an error of the user's own code, as far as anybody can tell."""


def read_faults(facts: WorkerFacts, run_dir: str | None) -> "FaultPlan | None":
    """What is to go wrong in this process; None, which costs nothing, where nothing is."""
    if not facts.faults:
        return None
    faults = _mine(_decode(facts.faults), facts.rank, facts.incarnation)
    return FaultPlan(faults, rank=facts.rank, run_dir=run_dir, generation=facts.generation) if faults else None


def _decode(text: str) -> tuple[Fault, ...]:
    if not text.startswith("@"):
        return decode(text, "SHOAL_FAULTS")
    try:
        with open(text[1:], encoding="utf-8") as file:
            return decode(file.read(), text[1:])
    except OSError as error:
        raise UserError(f"Cannot read the faults in {text[1:]}.", why=error.strerror or "") from None


def _mine(faults: Sequence[Fault], rank: int, incarnation: int) -> dict[int, Fault]:
    return {
        number: fault
        for number, fault in enumerate(faults)
        if fault.rank is None or (fault.rank == rank and fault.incarnation in (None, incarnation))
    }


class FaultPlan:
    """The faults of one process, by their numbers in the list.

    A fault that ends the process is noted in the run folder first (`faults/NUMBER`), so that no replacement and no
    resumed run meets it again. Every strike is an event `fault` in the journal.
    """

    def __init__(
        self,
        faults: dict[int, Fault],
        *,
        rank: int,
        run_dir: str | None,
        generation: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rank, self._run_dir, self._generation, self._clock = rank, run_dir, generation, clock
        created = read_facts(run_dir).get("created") if run_dir else None
        self._started = float(created) if isinstance(created, int | float) else clock()
        self._last: dict[int, int] = {}
        self._rest: dict[int, int] = {}
        self._at: dict[str, list[tuple[int, Fault]]] = {}
        for number, fault in faults.items():
            self._at.setdefault(_HOOKS.get(fault.kind, fault.at), []).append((number, fault))

    def reach(self, point: str, step: int) -> None:
        """The loop is at this point of this step. May not return, return late, or raise."""
        for number, fault in self._at.get(point, ()):
            if self._is_due(number, fault, step):
                _ACTS[fault.kind](self, fault)

    def spoil(self, loss: "torch.Tensor", step: int) -> "torch.Tensor":
        """The loss of this step, or NaN in its place."""
        due = [self._is_due(number, fault, step) for number, fault in self._at.get("loss", ())]
        return loss * math.nan if any(due) else loss

    def corrupt(self, weights: "torch.Tensor", step: int, *, is_shared: bool = False) -> None:
        """Flip a bit of the largest value in a flat tensor, if it is time to; not of one that is everybody's."""
        for number, fault in self._at.get("weights", ()):
            if not self._is_due(number, fault, step):
                continue
            if is_shared:
                raise UserError(
                    "corrupt would change the parameters of all workers.",
                    why="they share one copy in memory, so there is no other to compare it with",
                    hint="give each its own: `-o transport=tcp`, or `Faults.run(..., options={'transport': 'tcp'})`",
                )
            _flip(weights.detach(), fault.bit)

    def _is_due(self, number: int, fault: Fault, step: int) -> bool:
        if number in self._last:
            is_due = step > self._last[number] and self._rest[number] > 0
        else:
            is_due = self._has_come(fault, step) and self._claim(number)
            self._rest[number] = fault.steps if is_due else self._rest.get(number, 0)
            if is_due:
                self._tell(fault, step)
        if is_due:
            self._last[number] = step
            self._rest[number] -= 1
        return is_due

    def _has_come(self, fault: Fault, step: int) -> bool:
        if fault.after_seconds is not None:
            return self._clock() - self._started >= fault.after_seconds
        assert fault.step is not None
        return step == fault.step or (fault.incarnation is None and step > fault.step)

    def _claim(self, number: int) -> bool:
        """Whether this fault has not struck yet, in any process of the run; from now on it has."""
        if self._run_dir is None:
            return True
        note = os.path.join(self._run_dir, "faults", str(number))
        try:
            os.makedirs(os.path.dirname(note), exist_ok=True)
            os.close(os.open(note, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            return True
        except OSError as error:
            self._last[number] = sys.maxsize
            if not os.path.exists(note):
                # Without a note it might strike again and again, so it does not.
                print(f"shoal: fault {number} cannot be noted and is left out: {error}", file=sys.stderr, flush=True)
            return False

    def _tell(self, fault: Fault, step: int) -> None:
        if self._run_dir is None:
            return
        data = {key: value for key, value in fault.to_plain().items() if key != "rank"}
        event = Event(
            kind="fault", time=time.time(), rank=self._rank, step=step, generation=self._generation, data=data
        )
        with Journal(os.path.join(self._run_dir, "journal.jsonl")) as journal:
            journal.write(event)

    # What each kind does.

    def _kill(self, fault: Fault) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()  # the signal may take a moment; nothing of ours may happen in it

    def _kill_launcher(self, fault: Fault) -> None:
        launcher = read_facts(self._run_dir).get("pid") if self._run_dir else None
        if launcher != os.getppid():
            raise UserError("kill_launcher finds no launcher.", hint="start the script with `shoal run`")
        os.kill(launcher, signal.SIGKILL)

    def _freeze(self, fault: Fault) -> None:
        # Somebody else has to wake us up. It holds none of our pipes: if we are killed, others must see them end.
        command = [sys.executable, "-I", "-S", "-c", _FREEZER, str(os.getpid()), str(fault.seconds or 0)]
        nowhere = subprocess.DEVNULL
        subprocess.run(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, check=False)

    def _hang(self, fault: Fault) -> None:
        until = math.inf if fault.seconds is None else time.monotonic() + fault.seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 3600.0))

    def _slow(self, fault: Fault) -> None:
        time.sleep(fault.seconds or 0.0)

    def _fail(self, fault: Fault) -> None:
        raise Retryable(fault.error) if fault.retryable else FaultError(fault.error)

    def _partition(self, fault: Fault) -> None:
        if not is_rigged_network():
            raise UserError(
                "partition may not cut the links of this machine.",
                why="the worker is not on a host that a rig made",
                hint="start the workers with `shoal.testing.rigs.hosts`: `hosts.start(1, command)`",
            )
        set_links(is_up=False)
        _later(fault.seconds, lambda: set_links(is_up=True))

    def _disk_full(self, fault: Fault) -> None:
        if self._run_dir is None or (disk := rigged_disk(self._run_dir)) is None:
            raise UserError(
                f"disk_full may not fill the disk of {self._run_dir or 'a run without a folder'}.",
                why="it is not a disk that a rig made",
                hint="keep the run on one: `with rigs.small_disk(16) as disk:` and `run_dir=f'{disk.path}/run'`",
            )
        filler = fill_disk(disk, fault.mebibytes)
        _later(fault.seconds, lambda: os.unlink(filler))


_ACTS: dict[str, Callable[[FaultPlan, Fault], None]] = {
    "kill": FaultPlan._kill,
    "kill_launcher": FaultPlan._kill_launcher,
    "freeze": FaultPlan._freeze,
    "hang": FaultPlan._hang,
    "slow": FaultPlan._slow,
    "fail": FaultPlan._fail,
    "partition": FaultPlan._partition,
    "disk_full": FaultPlan._disk_full,
}

_FREEZER = """
import os, sys, time
pid, seconds = int(sys.argv[1]), float(sys.argv[2])
if os.getppid() == pid:
    os.kill(pid, 19)
    time.sleep(seconds)
    if seconds and os.getppid() == pid:
        os.kill(pid, 18)
"""


def _flip(values: "torch.Tensor", bit: int | None) -> None:
    import torch

    size = values.element_size()
    if bit is None:  # the highest of the mantissa: 22 of a float32
        bit = round(-math.log2(torch.finfo(values.dtype).eps)) - 1
    if bit >= 8 * size:
        raise UserError(f"There is no bit {bit} in a {values.dtype}.", hint=f"give one of 0 to {8 * size - 1}")
    at = int(values.abs().argmax())
    values.view(torch.uint8)[at * size + bit // 8] ^= 1 << bit % 8


def _later(seconds: float | None, act: Callable[[], Any]) -> None:
    def attempt() -> None:
        with contextlib.suppress(OSError):  # whoever made the rig may have removed it
            act()

    if seconds is not None:
        timer = threading.Timer(seconds, attempt)
        timer.daemon = True
        timer.start()

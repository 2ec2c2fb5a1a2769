"""Faults: what is to go wrong in a run, written down beforehand, so that it goes wrong the same way each time."""

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shoal.spec.errors import UserError
from shoal.spec.event import Event
from shoal.spec.fault import KINDS, POINTS, Fault, decode, encode

MAX_VARIABLE_BYTES = 100_000
"""What we put into one environment variable. Linux refuses more than 128 KiB."""

_LASTING = {"freeze": 3.0, "hang": 3.0, "slow": 0.2, "partition": 3.0, "disk_full": 3.0}
"""Seconds that faults of a random schedule last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyRun:
    """What became of a run with faults. `events` is its whole journal."""

    exit_code: int
    status: str
    run_dir: str
    events: tuple[Event, ...]

    @property
    def strikes(self) -> tuple[Event, ...]:
        """The faults that did strike, in order."""
        return self.of("fault")

    def of(self, kind: str) -> tuple[Event, ...]:
        """The events of one kind."""
        return tuple(event for event in self.events if event.kind == kind)

    def log(self, rank: int) -> str:
        """What a worker printed, and those before it with that rank; empty where there was none."""
        path = Path(self.run_dir, "logs", f"{rank}.log")
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


@dataclass(frozen=True, slots=True)
class Faults:
    """A list of faults that never changes: each call returns a longer one.

    `rank` is the number of a worker, `step` counts from zero, `at` is a point of a step (`POINTS`). See `Fault` for
    `incarnation` and `after_seconds`, which every call takes. In a map, `item=5` strikes whoever has that item.
    """

    faults: tuple[Fault, ...] = ()

    def kill(self, rank: int | None = None, step: int | None = None, *, at: str = "start", **when: Any) -> Self:
        """End a worker as `kill -9` does."""
        return self._with(kind="kill", rank=rank, step=step, at=at, **when)

    def kill_launcher(self, step: int | None = None, *, rank: int = 0, at: str = "start", **when: Any) -> Self:
        """End the launcher as `kill -9` does, when worker `rank` gets there."""
        return self._with(kind="kill_launcher", rank=rank, step=step, at=at, **when)

    def freeze(
        self,
        rank: int | None = None,
        step: int | None = None,
        seconds: float | None = None,
        *,
        at: str = "start",
        **when: Any,
    ) -> Self:
        """Stop a worker with all its threads (SIGSTOP), for so long, or until it is killed."""
        return self._with(kind="freeze", rank=rank, step=step, seconds=seconds, at=at, **when)

    def hang(
        self,
        rank: int | None = None,
        step: int | None = None,
        seconds: float | None = None,
        *,
        at: str = "start",
        **when: Any,
    ) -> Self:
        """Let a worker wait for nothing, as in a deadlock: its other threads live on and send beats."""
        return self._with(kind="hang", rank=rank, step=step, seconds=seconds, at=at, **when)

    def slow(
        self,
        rank: int | None = None,
        step: int | None = None,
        seconds: float = 0.2,
        steps: int = 1,
        *,
        at: str = "start",
        **when: Any,
    ) -> Self:
        """Let each of so many steps take so much longer."""
        return self._with(kind="slow", rank=rank, step=step, seconds=seconds, steps=steps, at=at, **when)

    def fail(
        self,
        rank: int | None = None,
        step: int | None = None,
        error: str = "a fault was asked for",
        *,
        retryable: bool = False,
        at: str = "forward",
        **when: Any,
    ) -> Self:
        """Raise an exception in the worker; with `retryable`, one after which it may be replaced."""
        return self._with(kind="fail", rank=rank, step=step, error=error, retryable=retryable, at=at, **when)

    def nan(self, rank: int, step: int | None = None, steps: int = 1, **when: Any) -> Self:
        """Make the loss, and so the gradients, not a number."""
        return self._with(kind="nan", rank=rank, step=step, steps=steps, **when)

    def corrupt(self, rank: int, step: int | None = None, *, bit: int | None = None, **when: Any) -> Self:
        """Flip a bit of a worker's largest parameter: by default one that changes it by a quarter to a half.

        `bit` counts from the lowest: of a float32, 0 to 22 are its mantissa, 23 to 30 its exponent, and 31 its sign.
        Raises UserError in the run where all workers share one copy.
        """
        return self._with(kind="corrupt", rank=rank, step=step, bit=bit, **when)

    def partition(
        self, rank: int, step: int | None = None, seconds: float | None = None, *, at: str = "start", **when: Any
    ) -> Self:
        """Cut a worker off. It must be on a host of `rigs.hosts`; links of real machines are left alone."""
        return self._with(kind="partition", rank=rank, step=step, seconds=seconds, at=at, **when)

    def disk_full(
        self,
        after_step: int | None = None,
        mebibytes: float | None = None,
        seconds: float | None = None,
        *,
        rank: int = 0,
        **when: Any,
    ) -> Self:
        """Fill the disk of the run folder, by so much or wholly. It must be a `rigs.small_disk`, never a real one."""
        when = {"step": after_step, "at": "updated"} | when
        return self._with(kind="disk_full", rank=rank, mebibytes=mebibytes, seconds=seconds, **when)

    @classmethod
    def random(
        cls,
        seed: int,
        *,
        num_workers: int,
        count: int,
        kinds: Sequence[str] = ("kill",),
        every: tuple[float, float] = (2, 5),
        unit: str = "steps",
        at: Sequence[str] = POINTS[:-1],
    ) -> Self:
        """A punisher: `count` faults, so many steps (or seconds) apart, on random ranks, at random points.

        The same seed gives the same list. Replacements are struck too.
        """
        _check_random(num_workers, count, kinds, every, unit)
        chance = random.Random(seed)
        faults, when = [], 0.0
        for _ in range(count):
            when += chance.randint(*map(int, every)) if unit == "steps" else chance.uniform(*every)
            kind = chance.choice(list(kinds))
            more: dict[str, Any] = {"at": chance.choice(list(at))} if "at" in KINDS[kind] else {}
            more |= {"seconds": _LASTING[kind]} if kind in _LASTING else {}
            more |= {"step": int(when)} if unit == "steps" else {"after_seconds": round(when, 2)}
            faults.append(Fault(kind=kind, rank=chance.randrange(num_workers), incarnation=None, **more))
        return cls(tuple(faults))

    @classmethod
    def parse(cls, text: str, source: str = "the list of faults") -> Self:
        """Read JSON as `to_json` writes it; a mistake is a UserError that names the fault and the field."""
        return cls(decode(text, source))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read a JSON file of faults."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise UserError(
                f"Cannot read the faults in {os.fspath(path)}.",
                why=why or "",
                hint="name a JSON file, as `Faults.write` makes them",
            ) from None
        return cls.parse(text, os.fspath(path))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file that `read` and `shoal run --faults` understand."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    def to_json(self) -> str:
        return encode(self.faults)

    def env(self) -> dict[str, str]:
        """The variable that tells workers of these faults, whoever starts them."""
        text = self.to_json()
        if len(text) > MAX_VARIABLE_BYTES:
            raise UserError(
                f"{len(self.faults)} faults are {len(text)} bytes, too many for an environment variable.",
                hint="write them to a file, and set SHOAL_FAULTS to `@` and its absolute path",
            )
        return {"SHOAL_FAULTS": text}

    def run(
        self,
        script: str,
        *args: str,
        num_workers: int | str = 2,
        env: Mapping[str, str] | None = None,
        options: Mapping[str, str] | None = None,
        run_dir: str | None = None,
        is_quiet: bool = True,
    ) -> FaultyRun:
        """Run a script with these faults, as `shoal run -n NUM_WORKERS SCRIPT ARGS` does, and return when it is over.

        A run that fails is returned, not raised; a job that cannot start raises UserError. Call it in a main thread.
        """
        from shoal.testing.faulty_run import run_with

        return run_with(
            self,
            (script, *args),
            num_workers=num_workers,
            env=env,
            options=options,
            run_dir=run_dir,
            is_quiet=is_quiet,
        )

    def __len__(self) -> int:
        return len(self.faults)

    def __iter__(self) -> Iterator[Fault]:
        return iter(self.faults)

    def _with(self, item: int | None = None, **facts: Any) -> Self:
        if item is not None:
            facts["step"] = item
        elif facts["rank"] is None:
            raise UserError(
                f"A {facts['kind']} does not say whom it strikes.", hint="give a `rank`, or the `item` of a map"
            )
        try:
            return type(self)((*self.faults, Fault(**facts)))
        except TypeError as error:
            raise UserError(
                f"{facts['kind']}: {error}.", hint="see docs/faults.md for what each fault takes"
            ) from None


def _check_random(num_workers: int, count: int, kinds: Sequence[str], every: tuple[float, float], unit: str) -> None:
    if unit not in ("steps", "seconds"):
        raise UserError(f"Faults cannot be {unit!r} apart.", hint="unit is 'steps' or 'seconds'")
    if num_workers < 1 or count < 0:
        raise UserError(f"There are {num_workers} workers to strike {count} times.", hint="give 1 or more workers")
    if not 0 <= every[0] <= every[1]:
        raise UserError(f"every is {every}.", hint="give the shortest and the longest distance, such as (2, 5)")
    if unknown := [kind for kind in kinds if kind not in KINDS] or ([] if kinds else ["nothing"]):
        raise UserError(f"There is no fault {unknown[0]!r}.", hint=f"use some of: {', '.join(KINDS)}")

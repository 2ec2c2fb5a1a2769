"""Recording more of some steps than of others, because somebody asked while the run went on."""

import atexit
import contextlib
import gzip
import json
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from shoal.observe.asks import Ask, ask_path, read_ask
from shoal.observe.lines import Appender
from shoal.observe.recorder import Recorder
from shoal.observe.spans import encode, spans_path
from shoal.observe.trace import Span
from shoal.spec.spans import MAX_SPANS, SPANS

LOOK_SECONDS = 0.25
EARLY_STEPS, MAX_EARLY_SPANS = range(10, 13), 2000
"""Steps of each run that are looked into unasked: warm-up is over, and runs that have ended have them, too."""
MAX_OPERATORS = 200


class Recording(Protocol):
    """Something that is being recorded in steps. `stop` returns what is to be said of it."""

    def stop(self) -> dict[str, Any]: ...


class Asked:
    """Looks between two steps whether something is asked of this rank, and sees to it for as many steps.

    Costs a look at the clock in each step, and one at a file four times a second. Nothing here raises into the run.
    A few steps early in the run are looked into unasked, of which nothing is told.
    """

    def __init__(
        self,
        run_dir: str | None,
        rank: int,
        recorder: Recorder,
        kinds: dict[str, Callable[[str, int, int], Recording]] | None = None,
    ) -> None:
        self._path = ask_path(run_dir, rank) if run_dir else None
        self._run_dir, self._rank, self._recorder = run_dir or "", rank, recorder
        self._kinds = kinds or KINDS
        self._due = 0.0
        self._seen: tuple[int, int] | None = None
        self._ask: Ask | None = None
        self._recording: Recording | None = None
        self._left = 0
        self._num_steps, self._early = 0, None if run_dir is None else _Early(run_dir, rank)

    def stepped(self, step: int) -> None:
        """A step is over; `step` is its number."""
        if self._early is not None:
            self._num_steps += 1
            if self._num_steps == EARLY_STEPS.start and self._ask is None:
                self._early.begin(step + 1)
            elif self._num_steps >= EARLY_STEPS.stop:
                self._end_early()
        if self._ask is not None:
            self._left -= 1
            if self._left <= 0:
                self._end(step)
            return
        now = time.monotonic()
        if self._path is None or now < self._due:
            return
        self._due = now + LOOK_SECONDS
        if (ask := self._news()) is not None:
            self._begin(ask, step)

    def close(self) -> None:
        """The training is over: what was recorded so far is kept."""
        self._end_early()
        if self._ask is not None:
            self._end(None)

    def _news(self) -> Ask | None:
        assert self._path is not None
        try:
            facts = os.stat(self._path)
        except OSError:
            return None
        stamp = facts.st_mtime_ns, facts.st_ino
        if stamp == self._seen:
            return None
        self._seen = stamp
        ask = read_ask(self._path)
        return ask if ask is not None and ask.pid == os.getpid() else None

    def _end_early(self) -> None:
        early, self._early = self._early, None
        if early is not None:
            early.end()

    def _begin(self, ask: Ask, step: int) -> None:
        self._end_early()
        self._ask, self._left = ask, ask.num_steps
        atexit.register(self.close)  # not all scripts close their trainer
        self._recorder.event("recording", step + 1, id=ask.id, what=ask.what, num_steps=ask.num_steps)
        try:
            self._recording = self._kinds[ask.what](self._run_dir, self._rank, step + 1)
        except Exception as error:  # a profiler of the user's own may be running: that is no reason to end a run
            self._tell(step, {"problem": f"{type(error).__name__}: {error}"})

    def _end(self, step: int | None) -> None:
        assert self._ask is not None
        try:
            facts = self._recording.stop() if self._recording is not None else {}
        except Exception as error:
            facts = {"problem": f"{type(error).__name__}: {error}"}
        if step is None:
            facts["ended_early"] = True
        self._tell(step, facts)

    def _tell(self, step: int | None, facts: dict[str, Any]) -> None:
        assert self._ask is not None
        ask, self._ask, self._recording = self._ask, None, None
        atexit.unregister(self.close)
        done = ask.num_steps - max(0, self._left)
        self._recorder.flush()  # whoever reads of it finds the steps, too
        self._recorder.event("recorded", step, id=ask.id, what=ask.what, num_steps=done, **facts)


class Profile:
    """`torch.profiler` from one step to another: a trace file, and beside it a table of operators."""

    def __init__(self, run_dir: str, rank: int, step: int) -> None:
        from torch.profiler import ProfilerActivity, profile

        folder = os.path.join(run_dir, "profiles")
        os.makedirs(folder, exist_ok=True)
        self._path = os.path.join(folder, f"rank-{rank}-step-{step}")
        kinds = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=kinds)
        self._profile.start()
        self._began = time.perf_counter()

    def stop(self) -> dict[str, Any]:
        seconds = time.perf_counter() - self._began
        self._profile.stop()
        plain, packed, table = f"{self._path}.json", f"{self._path}.json.gz", f"{self._path}-operators.json"
        self._profile.export_chrome_trace(plain)
        with open(plain, "rb") as source, gzip.open(packed, "wb", compresslevel=3) as target:
            while block := source.read(1 << 20):
                target.write(block)
        with contextlib.suppress(OSError):
            os.unlink(plain)
        operators = [_row(each) for each in self._profile.key_averages()]
        operators.sort(key=lambda row: row["self_device_seconds"] + row["self_cpu_seconds"], reverse=True)
        facts = {"seconds": seconds, "operators": operators[:MAX_OPERATORS]}
        with open(table, "w", encoding="utf-8") as file:
            json.dump(facts, file)
        return {"path": packed, "table": table, "seconds": seconds}


def _row(average: Any) -> dict[str, Any]:
    """One operator, over all its calls. The profiler counts microseconds."""
    return {
        "name": str(average.key),
        "num_calls": int(average.count),
        "self_cpu_seconds": 1e-6 * float(average.self_cpu_time_total),
        "cpu_seconds": 1e-6 * float(average.cpu_time_total),
        "self_device_seconds": 1e-6 * float(getattr(average, "self_device_time_total", 0.0)),
    }


class _Early:
    """Spans of a few steps that nobody asked for; none where the rank has some already. Nothing here raises."""

    def __init__(self, run_dir: str, rank: int) -> None:
        self._run_dir, self._rank = run_dir, rank
        self._spans: FineSpans | None = None

    def begin(self, step: int) -> None:
        if not os.path.exists(spans_path(self._run_dir, self._rank)):
            self._spans = FineSpans(self._run_dir, self._rank, step, MAX_EARLY_SPANS)

    def end(self) -> None:
        if self._spans is not None:
            with contextlib.suppress(Exception):
                self._spans.stop()


class FineSpans:
    """What happens inside of steps, from one to another, into `spans-RANK.jsonl`."""

    def __init__(self, run_dir: str, rank: int, step: int, most: int = MAX_SPANS) -> None:
        self._path, self._first = spans_path(run_dir, rank), step
        # Spans are taken by a clock that never jumps; this is what it has to be moved by.
        self._shift = time.time() - time.perf_counter()
        SPANS.start(most)

    def stop(self) -> dict[str, Any]:
        taken = SPANS.stop()
        lines = (
            encode(
                Span(
                    name=each.name,
                    kind=each.kind,
                    start=each.began + self._shift,
                    seconds=each.seconds,
                    step=each.step,
                    args=each.args,
                )
            )
            for each in taken
        )
        file = Appender(self._path)
        data = b"".join(lines)
        written = file.append(data)
        file.close()
        facts: dict[str, Any] = {"path": self._path, "first_step": self._first, "num_spans": len(taken)}
        facts |= {"num_dropped": SPANS.num_dropped} if SPANS.num_dropped else {}
        return {**facts, **({"problem": "the disk refused to take it"} if written < len(data) else {})}


KINDS: dict[str, Callable[[str, int, int], Recording]] = {"profile": Profile, "spans": FineSpans}

"""`shoal demo`: the promise, shown in a minute."""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, TextIO

from shoal.spec.fault import Fault, encode
from shoal.spec.job import Job

if TYPE_CHECKING:
    from shoal.observe.explain import Explanation

WIDTH = 78


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One run of the demo. Where `kill_step` is given, rank 1 is killed with SIGKILL when it gets there."""

    title: str
    module: str
    num_workers: int
    args: tuple[str, ...] = ()
    kill_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescue:
    """What a run did when a worker was killed: after how many seconds there was a next step, and another worker.

    Both are None where that never happened. `num_steps` were committed in all.
    """

    num_steps: int
    recovery_seconds: float | None
    away_seconds: float | None
    effective_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is read off an act: the digest of its parameters, its speed, where its time went, what a loss did."""

    module: str
    num_workers: int
    run_dir: str
    digest: str
    samples_per_second: float
    shares: dict[str, float]
    words: tuple[str, ...]
    num_samples: int = 0
    rescue: Rescue | None = None


ACTS = (
    Act(title="a small GPT learns Python's documentation, 1 worker", module="shoal.demo.text", num_workers=1),
    Act(title="the same GPT, 2 workers", module="shoal.demo.text", num_workers=2),
    Act(title="a CNN with batch statistics and dropout, 1 worker", module="shoal.demo.digits", num_workers=1),
    Act(
        title="the same CNN, 2 workers: one of them is killed",
        module="shoal.demo.digits",
        num_workers=2,
        kill_step=12,
    ),
    Act(title="shoal against DistributedDataParallel, taking turns", module="shoal.demo.race", num_workers=2),
)


def main(argv: Sequence[str]) -> int:
    """Run the acts one after the other and say what they showed. Exit code 1 where a promise was not kept."""
    parser = argparse.ArgumentParser(prog="shoal demo", description="Show what shoal does, in about a minute.")
    parser.add_argument("--json", action="store_true", help="print what was seen as JSON; the rest goes to stderr")
    options = parser.parse_args(list(argv))
    out = sys.stderr if options.json else sys.stdout
    started = time.monotonic()
    seen = []
    for number, act in enumerate(ACTS, start=1):
        print(f"\n── {number}/{len(ACTS)}  {act.title} ".ljust(WIDTH, "─"), file=out, flush=True)
        exit_code, result = play(act, out)
        if exit_code:
            return exit_code
        seen.append(result)
    print(sum_up(seen, time.monotonic() - started), file=out)
    if options.json:
        print(json.dumps([asdict(each) for each in seen]))
    return 0 if all(is_kept for _, is_kept in compare(seen)) else 1


def play(act: Act, out: TextIO) -> tuple[int, Seen]:
    """Run one act as `shoal run` would, and read its folder."""
    from shoal.observe.explain import explain
    from shoal.run import Keep, run_job

    job, range_ = _make_job(act)
    command = ("shoal", "run", "-n", range_, "--threads", "1", "-m", act.module, *act.args)
    outcome = run_job(job, keep=Keep(command=command), out=out)
    words = _read_logs(outcome.run_dir)
    found = re.search(r"digest of the parameters: (\w+)", words)
    explanation = explain(outcome.run_dir)
    breakdown = explanation.breakdown
    return outcome.exit_code, Seen(
        module=act.module,
        num_workers=act.num_workers,
        run_dir=outcome.run_dir,
        digest=found[1] if found else "",
        samples_per_second=breakdown.samples_per_second if breakdown else 0.0,
        shares=asdict(breakdown.shares) if breakdown else {},
        words=tuple(words.splitlines()[-3:]),
        num_samples=breakdown.num_samples if breakdown else 0,
        rescue=_find_rescue(explanation),
    )


def _make_job(act: Act) -> tuple[Job, str]:
    """The job of an act, and what `-n` would be."""
    job = Job(
        module=act.module,
        args=act.args,
        num_workers=act.num_workers,
        threads_per_worker=1,
        working_dir=os.getcwd(),
    )
    if act.kill_step is None:
        return job, str(act.num_workers)
    fault = Fault(kind="kill", rank=1, step=act.kill_step)
    return replace(job, min_workers=1, env={"SHOAL_FAULTS": encode([fault])}), f"1:{act.num_workers}"


def _read_logs(run_dir: str) -> str:
    """What all workers printed, the lowest first: whoever leads in the end has the last word."""
    words = ""
    for path in sorted(Path(run_dir, "logs").glob("*.log")):
        words += path.read_text(encoding="utf-8", errors="replace")
    return words


def _find_rescue(explanation: "Explanation") -> Rescue | None:
    history, breakdown = explanation.history, explanation.breakdown
    if history is None or breakdown is None or not history.losses:
        return None
    return Rescue(
        num_steps=breakdown.num_steps,
        recovery_seconds=history.losses[0].recovery_seconds,
        away_seconds=history.losses[0].away_seconds,
        effective_ratio=history.effective_ratio,
    )


def compare(seen: Sequence[Seen]) -> list[tuple[str, bool]]:
    """For each model that was trained several times: are the parameters the same, bit for bit, and the samples?"""
    results: dict[str, set[tuple[str, int]]] = {}
    for each in seen:
        if each.digest:
            results.setdefault(each.module, set()).add((each.digest, each.num_samples))
    return [(module, len(found) == 1) for module, found in results.items()]


def sum_up(seen: Sequence[Seen], seconds: float) -> str:
    """What the acts showed, as a table, and what to type next."""
    lines = ["", f"── what you saw, in {seconds:.0f} s ".ljust(WIDTH, "─"), ""]
    lines.append(f"  {'model':20}{'workers':>8}{'samples/s':>11}{'compute':>9}{'comm':>6}{'wait':>6}  parameters")
    for each in seen:
        if each.digest:
            shares = [f"{100 * each.shares.get(name, 0):.0f} %" for name in ("compute", "communicate", "wait")]
            columns = f"{each.samples_per_second:>11.0f}{shares[0]:>9}{shares[1]:>6}{shares[2]:>6}"
            workers = f"{each.num_workers}" if each.rescue is None else f"1:{each.num_workers}"
            lines.append(f"  {each.module:20}{workers:>8}{columns}  {each.digest}")
    for module, is_equal in compare(seen):
        first, second = (each for each in seen if each.module == module)
        lines += ["", *_wrap(f"{module}: {_tell(first, second, is_equal=is_equal)}")]
    lines += ["", *_wrap(f"{seen[-1].words[-1]}.")]
    name = os.path.basename(next((each for each in seen if each.rescue), seen[1]).run_dir)
    lines += [
        "",
        "Type next:",
        f"  shoal explain {name}",
        "  shoal ps",
        "  shoal run -n 2 examples/01_one_file.py      (from a clone)",
    ]
    return "\n".join(lines)


def _tell(first: Seen, second: Seen, *, is_equal: bool) -> str:
    """What a second run of the same model showed."""
    same = "the same parameters to the last bit" if is_equal else "DIFFERENT parameters: please report this"
    rescue = second.rescue
    if rescue is None:
        ratio = second.samples_per_second / first.samples_per_second
        return f"{second.num_workers} workers are {ratio:.2f} times as fast as 1, and give {same}."
    if rescue.recovery_seconds is None:
        return f"rank 1 was killed (kill -9) and no step followed, with {same}."
    back = "" if rescue.away_seconds is None else f", and another worker was in after {rescue.away_seconds:.1f}\xa0s"
    once = "each counted once" if second.num_samples == first.num_samples else f"instead of {first.num_samples:,}"
    return (
        f"rank 1 was killed (kill -9). The next step was done {rescue.recovery_seconds:.2f}\xa0s later{back}. "
        f"{second.num_samples:,} samples in {rescue.num_steps} steps, {once}, give {same} as undisturbed."
    )


def _wrap(text: str) -> list[str]:
    return wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)

"""`shoal demo`: the promise, shown in a minute."""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

from shoal.spec.job import Job

WIDTH = 78


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One run of the demo."""

    title: str
    module: str
    num_workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is read off an act: the digest of its parameters, its speed, and where its time went."""

    module: str
    num_workers: int
    run_dir: str
    digest: str
    samples_per_second: float
    shares: dict[str, float]
    words: tuple[str, ...]


ACTS = (
    Act(title="a small GPT learns Python's documentation, 1 worker", module="shoal.demo.text", num_workers=1),
    Act(title="the same GPT, 2 workers", module="shoal.demo.text", num_workers=2),
    Act(title="a CNN with batch statistics and dropout, 1 worker", module="shoal.demo.digits", num_workers=1),
    Act(title="the same CNN, 2 workers", module="shoal.demo.digits", num_workers=2),
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
    return 0 if all(is_equal for _, is_equal in compare(seen)) else 1


def play(act: Act, out: TextIO) -> tuple[int, Seen]:
    """Run one act as `shoal run` would, and read its folder."""
    from shoal.observe.explain import explain
    from shoal.run import Keep, run_job

    job = Job(module=act.module, num_workers=act.num_workers, threads_per_worker=1, working_dir=os.getcwd())
    command = ("shoal", "run", "-n", str(act.num_workers), "--threads", "1", "-m", act.module)
    outcome = run_job(job, keep=Keep(command=command), out=out)
    with open(os.path.join(outcome.run_dir, "logs", "0.log"), encoding="utf-8", errors="replace") as log:
        words = log.read()
    found = re.search(r"digest of the parameters: (\w+)", words)
    breakdown = explain(outcome.run_dir).breakdown
    return outcome.exit_code, Seen(
        module=act.module,
        num_workers=act.num_workers,
        run_dir=outcome.run_dir,
        digest=found[1] if found else "",
        samples_per_second=breakdown.samples_per_second if breakdown else 0.0,
        shares=asdict(breakdown.shares) if breakdown else {},
        words=tuple(words.splitlines()[-3:]),
    )


def compare(seen: Sequence[Seen]) -> list[tuple[str, bool]]:
    """For each model that was trained with different numbers of workers: are the parameters the same, bit for bit?"""
    digests: dict[str, set[str]] = {}
    for each in seen:
        if each.digest:
            digests.setdefault(each.module, set()).add(each.digest)
    return [(module, len(found) == 1) for module, found in digests.items()]


def sum_up(seen: Sequence[Seen], seconds: float) -> str:
    """What the acts showed, as a table, and what to type next."""
    lines = ["", f"── what you saw, in {seconds:.0f} s ".ljust(WIDTH, "─"), ""]
    lines.append(f"  {'model':22}{'workers':>8}{'samples/s':>11}{'compute':>9}{'comm':>6}{'wait':>6}  parameters")
    for each in seen:
        if each.digest:
            shares = [f"{100 * each.shares.get(name, 0):.0f} %" for name in ("compute", "communicate", "wait")]
            columns = f"{each.samples_per_second:>11.0f}{shares[0]:>9}{shares[1]:>6}{shares[2]:>6}"
            lines.append(f"  {each.module:22}{each.num_workers:>8}{columns}  {each.digest}")
    lines.append("")
    for module, is_equal in compare(seen):
        one, two = (each.samples_per_second for each in seen if each.module == module)
        same = "the same parameters to the last bit" if is_equal else "DIFFERENT parameters: please report this"
        lines.append(f"  {module}: 2 workers are {two / one:.2f} times as fast as 1, and give {same}.")
    lines.append(f"  {seen[-1].words[-1]}.")
    name = os.path.basename(seen[1].run_dir)
    lines += [
        "",
        "Type next:",
        f"  shoal explain {name}",
        "  shoal ps",
        "  shoal run -n 2 examples/01_one_file.py      (from a clone)",
    ]
    return "\n".join(lines)

"""A run with faults, started and seen through from Python."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.spec.errors import UserError
from shoal.testing.faults import MAX_VARIABLE_BYTES, FaultyRun

if TYPE_CHECKING:
    from shoal.spec.job import Job
    from shoal.testing.faults import Faults


def run_with(
    faults: "Faults",
    command: Sequence[str],
    *,
    num_workers: int | str,
    env: Mapping[str, str] | None,
    options: Mapping[str, str] | None,
    run_dir: str | None,
    is_quiet: bool,
) -> FaultyRun:
    """See `Faults.run`."""
    from tempfile import TemporaryDirectory

    from shoal.observe.journal import read
    from shoal.run import Keep, run_job

    with TemporaryDirectory(prefix="shoal-faults-") as folder:
        job = make_job(command, num_workers, {**(env or {}), **variables(faults, folder)}, options or {})
        keep = Keep(dir=run_dir, command=("Faults.run", *command))
        outcome = run_job(job, keep=keep, is_quiet=is_quiet)
    return FaultyRun(
        exit_code=outcome.exit_code,
        status=outcome.status,
        run_dir=outcome.run_dir,
        events=tuple(read(os.path.join(outcome.run_dir, "journal.jsonl"))),
    )


def make_job(
    command: Sequence[str], num_workers: int | str, env: Mapping[str, str], options: Mapping[str, str]
) -> "Job":
    """The job that `shoal run -n NUM_WORKERS COMMAND` makes."""
    from shoal.spec.job import Job

    script, *args = command
    least, most = parse_workers(num_workers)
    return Job(
        script=script,
        args=tuple(args),
        num_workers=most,
        min_workers=least,
        env=env,
        options=options,
        working_dir=os.getcwd(),
    )


def parse_workers(num_workers: int | str) -> tuple[int | None, int]:
    """The fewest (None where the run is not elastic) and the most workers of `3` or `"2:4"`."""
    least, colon, most = str(num_workers).rpartition(":")
    try:
        counts = int(least) if colon else None, int(most)
    except ValueError:
        counts = None, 0
    if counts[1] < 1 or not 1 <= (counts[0] or 1) <= counts[1] or counts[0] == 0:
        raise UserError(
            f"num_workers is {num_workers!r}.",
            hint="give a whole number, 1 or more, or the fewest and the most: '2:4'",
        )
    return counts


def variables(faults: "Faults", folder: str) -> dict[str, str]:
    """The variable with the faults themselves, or with the name of a file in `folder` where they are too many."""
    if len(faults.to_json()) <= MAX_VARIABLE_BYTES:
        return faults.env()
    path = Path(folder, "faults.json").absolute()
    faults.write(path)
    return {"SHOAL_FAULTS": f"@{path}"}

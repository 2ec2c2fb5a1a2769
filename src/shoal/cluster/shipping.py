"""What is handed to a cluster with `shoal submit`: a folder, a command, and a name. Nothing here talks to anybody."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.spec.errors import UserError

MAX_SHIPPED_BYTES = 256 << 20
"""What a folder may have that is copied to every machine of a run. Ray itself takes 512 MiB, compressed."""
STOP_SECONDS = 20
"""What a run has to end in after `shoal cancel`, before it is killed."""
RUN, COMMAND, BY, VERSION = "shoal_run", "shoal_command", "shoal_by", "shoal_version"
"""What is noted with each submission."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A run to be handed over. `run_args` are those of `shoal run` there. `folder` is copied; it runs in the copy.

    `env` is set for the launcher and its workers. `num_workers` is how many it needs at least. `dir` is its run
    folder on the head, where that is not to be in the usual place.
    """

    name: str
    run_args: Sequence[str]
    folder: str
    num_workers: int
    dir: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    is_resumed: bool = False
    command: str = ""
    by: str = ""


def check_run_name(name: str) -> str:
    """Raise UserError unless a run can be submitted under this name: it becomes part of addresses and files."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", name, re.ASCII):
        raise UserError(f"{name[:80]!r} cannot be the name of a run.", hint="use letters, digits and dashes")
    return name


def inside(path: str, folder: str) -> str:
    """A script's path within the folder that is shipped; raises UserError where it lies elsewhere."""
    relative = os.path.relpath(os.path.realpath(os.path.join(folder, path)), os.path.realpath(folder))
    if relative.startswith(os.pardir + os.sep):
        raise UserError(
            f"{path!r} is not in the folder you are in.",
            why="that folder is copied to the cluster, with the modules that the script imports, and nothing else",
            hint=f"`cd {shlex.quote(os.path.dirname(path) or '.')}`, and submit it from there",
        )
    return relative


def entrypoint(python: str, submission: Submission) -> str:
    """The command that Ray runs on the head. `exec`: a signal reaches the launcher itself."""
    if submission.dir is not None:
        kept = ["--log-dir", submission.dir]
    else:
        kept = ["--resume" if submission.is_resumed else "--name", submission.name]
    return "exec " + shlex.join(
        [python, "-m", "shoal", "run", "--engine", "ray", "--address", "auto", *kept, *submission.run_args]
    )


def runtime_env(folder: str, env: Mapping[str, str]) -> dict[str, object]:
    """What Ray is to prepare on every machine of the run. `folder` is a path here, or where it was put."""
    # A launcher that is less important than others would seem dead where the machine is busy.
    own = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS), "RAY_worker_niceness": "0"}
    return {"working_dir": folder, "env_vars": {**env, **own}}


def notes(submission: Submission, version: str) -> dict[str, str]:
    """What is written down with a submission, for those who list them."""
    return {RUN: submission.name, COMMAND: submission.command, BY: submission.by, VERSION: version}


def next_id(name: str, taken: Sequence[str]) -> str:
    """The id of a submission that goes on with a run: Ray takes none twice. Pure."""
    if name not in taken:
        return name
    number = 2
    while f"{name}.{number}" in taken:
        number += 1
    return f"{name}.{number}"


def check_size(sizes: Mapping[str, int], folder: str, *, is_all: bool = True) -> None:
    """Raise UserError where a folder is too large to be copied to every machine. `sizes` are of what it has on top.

    `is_all`: they are complete; else they were too large already.
    """
    total = sum(sizes.values())
    if total <= MAX_SHIPPED_BYTES:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    told = ", ".join(f"{name} {sizes[name] / 2**20:.0f} MiB" for name in largest)
    raise UserError(
        f"{folder} is too large to be copied to the cluster: "
        f"{'' if is_all else 'more than '}{total / 2**20:.0f} MiB.",
        why=f"at most {MAX_SHIPPED_BYTES >> 20} MiB are, to every machine; the largest here: {told}",
        hint="name what is not needed in a file .rayignore (or .gitignore), and keep data in a folder that all "
        "machines have, or behind a URL; or submit from a folder with the code alone",
    )

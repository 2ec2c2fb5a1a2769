"""`shoal run`, and how a run is described on the command line."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.spec.errors import UserError
from shoal.verb_parser import RUN_OPTIONS, Parser, parse_count, split_at_script

if TYPE_CHECKING:
    from shoal.observe.runs import RunInfo
    from shoal.spec.job import Job


def run(argv: list[str]) -> int:
    """`shoal run`: start a script with several workers."""
    ours, rest = split_at_script(argv)
    options = _run_parser().parse_args(ours)
    from shoal.engine.grounds import Where
    from shoal.run import Keep, run_job

    resumed = _find_resumed(options) if options.resume is not None else None
    job = read_job(options, rest, resumed.facts.get("job", {}) if resumed else {}, _count_slots(options))
    keep = Keep(
        dir=resumed.path if resumed else options.log_dir,
        name=check_name(options),
        is_resumed=resumed is not None,
        command=("shoal", "run", *argv),
        send_to=tuple(dict.fromkeys(options.to or ())),
    )
    where = Where(
        engine=options.engine,
        address=options.address,
        hosts=options.hosts,
        master=options.master,
        options={name: value for name, value in job.options.items() if name.startswith("engine.")},
    )
    outcome = run_job(job, keep=keep, out=sys.stderr if options.json else None, is_quiet=options.quiet, where=where)
    if options.json:
        import json

        sys.stdout.write(json.dumps(summary_of(outcome)) + "\n")
    return outcome.exit_code


def _count_slots(options: argparse.Namespace) -> int:
    """How many workers there are where nobody says it."""
    if options.hosts is None and options.engine != "mpi":
        return 1
    from shoal.engine.mpi import find_hosts

    return sum(host.num_slots for host in find_hosts(options.hosts)) or 1


def _run_parser() -> Parser:
    parser = Parser("run", "Start a script with several workers on this machine.", "[-n N] [OPTIONS] SCRIPT [ARGS]")
    for flags, settings in RUN_OPTIONS:
        parser.add_argument(*flags, **settings)
    return parser


def read_job(
    options: argparse.Namespace, rest: list[str], recorded: Mapping[str, Any], default_workers: int = 1
) -> "Job":
    """The job that was asked for; `recorded` is that of the run it goes on with."""
    from shoal.spec.job import Job

    if rest:
        script, module = (None, rest[0]) if options.module else (rest[0], None)
    else:
        script, module = recorded.get("script"), recorded.get("module")
    if not script and not module:
        raise UserError("No script was named.", hint="for example: `shoal run -n 2 train.py`")
    options_before = dict(recorded.get("options", {}))
    if options.num_workers is None:
        least, most = recorded.get("min_workers"), recorded.get("num_workers") or default_workers
    else:
        least, most = parse_range(options.num_workers)
        options_before.pop("engine.start", None)  # it was one of the numbers that could be had then
    if least is not None and options.framework != "torch":
        raise UserError(
            f"Workers cannot come and go under --framework {_check_framework(options.framework)}.",
            why="its variables tell each of them who the others are, once",
            hint=f"use `-n {most}`",
        )
    return Job(
        script=script,
        module=module,
        args=tuple(rest[1:] if rest else recorded.get("args", ())),
        num_workers=most,
        min_workers=least,
        threads_per_worker=None if options.threads is None else parse_count(options.threads, "--threads"),
        python=options.python,
        env={**_read_faults(options.faults), **_read_env(options.env)},
        framework=_check_framework(options.framework),
        options={**options_before, **parse_pairs(options.option, "-o")},
        working_dir=_here() if rest else recorded.get("working_dir") or _here(),
    )


def _read_faults(path: str | None) -> dict[str, str]:
    """The variable that tells workers of the faults in a file, which are looked at first."""
    if path is None:
        return {}
    from shoal.testing.faults import Faults

    Faults.read(path)
    return {"SHOAL_FAULTS": f"@{os.path.abspath(path)}"}


def _read_env(texts: Sequence[str] | None) -> dict[str, str]:
    """Variables for the workers. One without a value has that of the launcher, if it is set there."""
    from shoal.engine.env import inherited_env

    ours = inherited_env() if texts else {}
    return parse_pairs([f"{text}={ours[text]}" if text in ours else text for text in texts or ()], "--env")


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:
        raise UserError("The folder you are in does not exist any more.", hint="`cd` into one that does") from None


def _find_resumed(options: argparse.Namespace) -> "RunInfo":
    from shoal.engine.env import shoal_home
    from shoal.files import is_url, mask
    from shoal.observe.runs import find_run

    if options.log_dir or options.name:
        raise UserError("--resume goes on in the folder of that run.", hint="leave --log-dir and --name out")
    run = find_run(shoal_home(), options.resume)
    if is_url(options.resume) and run.status == "running":
        raise UserError(
            f"{mask(options.resume)} is a run that goes on, on {run.host}.",
            why="its launcher has brought the run folder up to date within the last minute",
            hint="wait until it has ended. If its machine is lost, try again in a minute",
        )
    return run


def check_name(options: argparse.Namespace) -> str | None:
    name: str | None = options.name
    if name is not None and options.log_dir is not None:
        raise UserError(
            "Both --log-dir and --name were given.",
            why="each of them names the run folder",
            hint="leave one of them out",
        )
    if name is not None and (os.sep in name or name in ("", ".", "..") or name.startswith("-") or "\0" in name):
        raise UserError(f"{name!r} cannot be the name of a run.", hint="use letters, digits and dashes")
    return name


def _check_framework(name: str) -> str:
    if name not in ("torch", "tensorflow", "jax"):
        why = "those that are built on torch need none: Lightning, Accelerate and the Trainer of transformers"
        raise UserError(f"There is no framework {name!r}.", why=why, hint="use `tensorflow`, `jax` or nothing at all")
    return name


def parse_range(text: str) -> tuple[int | None, int | None]:
    """The value of `-n` as (least, most): 2:8 is (2, 8), and what may not change has no least."""
    if ":" not in text:
        return None, parse_workers(text)
    ends = text.split(":")
    if len(ends) != 2 or not all(end.strip().isdecimal() and end.isascii() for end in ends):
        raise UserError(
            f"-n {text!r} is not a range.",
            why="it has two whole numbers: how many workers at least, and at most",
            hint="for example: `-n 2:8`",
        )
    least, most = (parse_count(end, "-n") for end in ends)
    if least > most:
        raise UserError(
            f"-n {text} asks for at least {least} workers and at most {most}.",
            why="the smaller number comes first",
            hint=f"use `-n {most}:{least}`",
        )
    return least, most


def parse_workers(text: str) -> int | None:
    """The value of `-n`: a count, or None for `auto`."""
    return None if text == "auto" else parse_count(text, "-n", " or `auto`")


def parse_pairs(texts: Sequence[str] | None, flag: str) -> dict[str, str]:
    pairs = {}
    for text in texts or ():
        name, has_value, value = text.partition("=")
        if not has_value or not name.strip() or "\0" in text:
            raise UserError(f"{flag} {text!r} is not of the form NAME=VALUE.", hint=f"for example: `{flag} SEED=1`")
        pairs[name] = value
    return pairs


def summary_of(outcome: Any) -> dict[str, Any]:
    """What `--json` prints about a run."""
    from dataclasses import asdict

    facts = asdict(outcome)
    for end in facts["exits"]:
        del end["result"]
    failures = facts.pop("failures")
    return {**facts, "cause": failures[0] if failures else None, "num_failures": len(failures)}

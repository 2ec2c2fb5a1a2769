"""`shoal submit`: hand a job to the service, or a run to a Ray cluster. It goes on when you are gone.

Which of them is one rule: with `--cluster` or `--address` the cluster, else the service that is up here or that
`shoal login` named, else the cluster that this machine is in.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.spec.errors import ShoalError, UserError
from shoal.verb_parser import RUN_OPTIONS, Options, Parser, split_at_script
from shoal.verbs.launching import check_name, parse_pairs, read_job

if TYPE_CHECKING:
    from shoal.service.client import Client
    from shoal.spec.job import Job

_NOT_SUBMITTED = ("--engine", "--hosts", "--master", "--faults", "--quiet", "--json")
"""Options of `shoal run` that make no sense where nobody watches, or are said otherwise."""

_QUEUE_OPTIONS: Options = (
    (("--class",), {"metavar": "NAME", "dest": "job_class", "help": "serving, interactive, training or batch"}),
    (("--priority",), {"metavar": "N", "help": "the higher the earlier, within its class (default: 0)"}),
    (("--partition",), {"metavar": "NAME", "help": "which part of the nodes (default: default)"}),
    (("--account",), {"metavar": "NAME", "help": "whose share it counts to (default: your own)"}),
    (("--cores",), {"metavar": "N", "help": "cores of each worker (default: 1)"}),
    (("--memory",), {"metavar": "SIZE", "help": "memory of each worker, such as 4G; more than that ends the job"}),
    (("--gpus",), {"metavar": "N", "help": "GPUs of each worker; below 1 a share of one"}),
    (("--disk",), {"metavar": "SIZE", "help": "room on the disk for each worker, such as 20G"}),
    (("--kind",), {"metavar": "NAME", "action": "append", "help": "a kind of node it can run on; may be repeated"}),
    (
        ("--data",),
        {
            "metavar": "PATH",
            "action": "append",
            "help": "what it reads: machines that have it go first; may be repeated",
        },
    ),
    (("--time",), {"metavar": "TIME", "help": "how long it may run, such as 90s, 45m, 2h or 1d"}),
    (
        ("--after",),
        {
            "metavar": "JOB",
            "action": "append",
            "help": "start when that job, or 17-26, has finished; may be repeated",
        },
    ),
    (("--array",), {"metavar": "N", "help": "so many copies, told apart by SHOAL_ARRAY_INDEX"}),
    (("--no-preempt",), {"action": "store_true", "help": "never stop it for others"}),
    (("--max-preemptions",), {"metavar": "N", "help": "stop it for others at most so often"}),
    (("--hold",), {"action": "store_true", "help": "keep it until `shoal release`"}),
    (("--wait",), {"action": "store_true", "help": "return when it is over, with its exit code"}),
)

_FIELDS = {
    "job_class": "class",
    "partition": "partition",
    "account": "account",
    "memory": "memory",
    "disk": "disk",
    "time": "time",
    "kind": "kinds",
    "data": "data",
}
_NUMBERS = {"priority": int, "array": int, "max_preemptions": int, "cores": float, "gpus": float}

_OPTIONS: Options = (
    *((flags, settings) for flags, settings in RUN_OPTIONS if flags[-1] not in _NOT_SUBMITTED),
    *_QUEUE_OPTIONS,
    (("--cluster",), {"action": "store_true", "help": "to the Ray cluster of this machine, not to the service"}),
    (("-f", "--follow"), {"action": "store_true", "help": "show what it prints; Ctrl-C leaves it alone"}),
    (("--json",), {"action": "store_true", "help": "as JSON"}),
)


def submit(argv: list[str]) -> int:
    """`shoal submit`: hand it over, and say how to get at it."""
    parser = Parser(
        "submit",
        "Put a job into the queue of the service, from a command or from a file, and return. With --cluster or "
        "--address, or where there is no service: hand it to a Ray cluster.",
        "[-n N|MIN:MAX] [OPTIONS] SCRIPT [ARGS]\n       shoal submit [OPTIONS] JOB.toml",
    )
    for flags, settings in _OPTIONS:
        parser.add_argument(*flags, **settings)
    parser.set_defaults(faults=None)
    ours, rest = split_at_script(argv, _OPTIONS)
    options = parser.parse_args(ours)
    from shoal.service.places import find_login

    if options.cluster or options.address is not None:
        return _to_cluster(options, rest, argv)
    if find_login() is not None:
        return _to_service(options, rest)
    if rest and rest[0].endswith(".toml"):
        raise _no_service()
    return _to_cluster(options, rest, argv)


def _no_service() -> UserError:
    hint = "`shoal up` starts one; `shoal up --cluster` begins a cluster of machines instead"
    return UserError("No service is up on this machine.", hint=hint)


# --- to the service


def _to_service(options: argparse.Namespace, rest: list[str]) -> int:
    from shoal.service.client import Client

    for flag, value in (("--log-dir", options.log_dir), ("--resume", options.resume)):
        if value is not None:
            raise UserError(
                f"{flag} is not for the queue.",
                why="a job's run folder is named after its number",
                hint="leave it out; `shoal requeue JOB` goes on with a job that is over",
            )
    given, held = _given(options), options.hold
    if rest and rest[0].endswith(".toml"):
        from shoal.verbs.job_file import read_job_file

        if len(rest) > 1:
            raise UserError(
                f"{rest[1]!r} stands after the file.", hint="options come before it; arguments stand in it"
            )
        if any(getattr(options, name) for name in ("python", "threads", "option", "to", "module")):
            raise UserError("The file says how its jobs are run.", hint='put such options into its "args"')
        rows, is_held = read_job_file(rest[0], given)
        held = held or is_held
    else:
        rows = [{**_row(options, rest), **given}]
    with Client() as client:
        jobs = client.submit_all(rows, held=held)
        return _tell(client, jobs, options)


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a job that were named on the command line."""
    fields = {field: getattr(options, name) for name, field in _FIELDS.items()}
    fields |= {
        name: _parse_number(getattr(options, name), f"--{name.replace('_', '-')}", kind)
        for name, kind in _NUMBERS.items()
    }
    fields |= {"workers": options.num_workers, "name": options.name, "after": options.after}
    fields["preemptible"] = False if options.no_preempt else None
    fields["env"] = parse_pairs(options.env, "--env") or None
    return {name: value for name, value in fields.items() if value is not None}


def _parse_number(text: str | None, flag: str, kind: type) -> int | float | None:
    try:
        return None if text is None else kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise UserError(f"{flag} {text!r} is not a number.", hint=f"give it {what}") from None


def _row(options: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    """A job from a command. What can be seen to be wrong with it here is said here."""
    job = read_job(options, rest, {})
    if job.num_workers is None:
        raise UserError("-n auto measures on this machine alone.", hint="give -n a number, or a range such as 1:8")
    if _is_here():
        from shoal.engine.entry import entry_of
        from shoal.run import check_options

        entry_of(job)
        check_options(job)
    target = job.module or job.script or ""
    return {"args": handed_on(options, target, job.args), "dir": job.working_dir}


def _is_here() -> bool:
    """Whether the service sees the same files as we do, as far as we know."""
    from shoal.service.places import read_up, service_folder

    return read_up(service_folder()) is not None


def _tell(client: "Client", jobs: Sequence[int], options: argparse.Namespace) -> int:
    from shoal.verbs.printing import many, put

    first, last = jobs[0], jobs[-1]
    span = str(first) if len(jobs) == 1 else f"{first}-{last}"
    commands = {
        "queue": f"shoal queue {first}" if len(jobs) == 1 else "shoal queue",
        "logs": f"shoal logs job-{first} --follow",
        "cancel": f"shoal cancel {span}",
    }
    if not _is_here():  # what it prints is kept where it runs
        del commands["logs"]
    about = {"queue": "how far it is, and why", "logs": "what it prints, once it runs", "cancel": "end it"}
    head = f"job {first}" if len(jobs) == 1 else f"{many(len(jobs), 'job')}, {span}"
    text = [f"submitted {head}: {'it goes' if len(jobs) == 1 else 'they go'} on without this terminal", ""]
    longest = max(map(len, commands.values()))
    text += [f"  {commands[verb]:{longest}}   {about[verb]}" for verb in commands]
    is_waiting = options.wait or options.follow
    if is_waiting:
        sys.stderr.write("\n".join(text) + "\n\n")
        return _wait(client, jobs, as_json=options.json, shows_output=options.follow)
    put(
        {"jobs": list(jobs), "runs": [f"job-{job}" for job in jobs], "commands": commands},
        options.json,
        "\n".join(text),
    )
    return 0


def _wait(client: "Client", jobs: Sequence[int], *, as_json: bool, shows_output: bool) -> int:
    """Wait until all are over; returns the exit code of the first that did not finish. Ctrl-C leaves them alone."""
    from shoal.verbs.printing import put, say

    ends = []
    try:
        for job in jobs:
            if shows_output:
                _show_output(client, job)
            ends.append(client.wait(job, on_look=_Teller(job)))
    except KeyboardInterrupt:
        say(f"\njob {jobs[len(ends)]} goes on; `shoal cancel {jobs[len(ends)]}` ends it")
        raise
    text = "\n".join(f"job {end['job']}: {end['state']}" + _because(end) for end in ends)
    put({"jobs": ends}, as_json, text)
    bad = [end for end in ends if end["state"] != "finished"]
    return 0 if not bad else int(bad[0]["exit_code"] or 1) if bad[0]["state"] == "failed" else 143


def _because(end: dict[str, Any]) -> str:
    from shoal.observe.clean import one_line

    return f" ({one_line(end['message'] or end['cause'])})" if end["state"] != "finished" else ""


class _Teller:
    """Says on stderr what changes while somebody waits."""

    def __init__(self, job: int) -> None:
        self._job, self._said = job, ""

    def __call__(self, told: dict[str, Any]) -> None:
        from shoal.observe.clean import one_line
        from shoal.verbs.printing import say

        text = f"job {self._job}: {told['state']}" + (f": {one_line(told['why'])}" if told["why"] else "")
        if text != self._said:
            self._said = text
            say(text)


def _show_output(client: "Client", job: int) -> None:
    """What a job prints, from its start to its end or to its next pause; where its folder is here."""
    import time

    from shoal.engine.env import shoal_home
    from shoal.observe.logs import print_logs
    from shoal.service.client import OVER
    from shoal.verbs.printing import say

    if not _is_here():
        say("what it prints is kept on the machine with the service")
        return
    teller, home = _Teller(job), shoal_home()
    while (told := client.job(job))["state"] not in OVER:
        teller(told)
        if told["state"] == "running":
            try:
                print_logs(home, told["run"], sys.stdout, follow=True)
                return
            except ShoalError:
                pass  # its folder is not there yet
        time.sleep(0.2)
    with contextlib.suppress(ShoalError):
        print_logs(home, told["run"], sys.stdout)


# --- to a cluster


def _to_cluster(options: argparse.Namespace, rest: list[str], argv: Sequence[str]) -> int:
    for flags, settings in _QUEUE_OPTIONS:
        name = str(settings.get("dest") or flags[-1].lstrip("-").replace("-", "_"))
        if getattr(options, name):
            raise UserError(
                f"{flags[-1]} is for the queue of a service, not for a Ray cluster.",
                hint="`shoal up` starts a service" if not options.cluster else "leave it out, or leave --cluster out",
            )
    job = read_job(options, rest, {})
    from random import SystemRandom
    from time import time

    from shoal.cluster import submitted
    from shoal.cluster.shipping import Submission, check_run_name, inside
    from shoal.engine.entry import entry_of
    from shoal.observe.folder import new_run_name
    from shoal.run import check_options, command_facts

    _check_for_cluster(options, job)
    entry_of(job)
    check_options(job)
    script = job.module or inside(job.script or "", job.working_dir)
    folder_name = os.path.basename(os.path.normpath(options.log_dir)) if options.log_dir is not None else None
    name = options.resume or check_name(options) or folder_name or new_run_name(script, time(), SystemRandom())
    workers = ["-n", options.num_workers] if options.num_workers is not None else []
    submission = Submission(
        name=check_run_name(name),
        dir=options.log_dir,
        run_args=[*workers, *handed_on(options, script, job.args)],
        folder=job.working_dir,
        num_workers=job.min_workers or job.num_workers or 1,
        options={key: value for key, value in job.options.items() if key.startswith("engine.")},
        env=dict(job.env),
        is_resumed=options.resume is not None,
        command=" ".join(command_facts(("shoal", "submit", *argv), job.env)),
        by=submitted.submitter(),
    )
    try:
        return submitted.submit(submission, options.address, as_json=options.json, follow=options.follow)
    except UserError as error:
        has_none = error.message.startswith("This machine is in no Ray cluster")
        raise _no_service() if has_none and not options.cluster else error from None


def _check_for_cluster(options: argparse.Namespace, job: "Job") -> None:
    if job.num_workers is None:
        raise UserError("-n auto measures on this machine alone.", hint="give -n a number")
    if options.resume is not None and (options.log_dir or options.name):
        raise UserError("--resume goes on in the folder of that run.", hint="leave --log-dir and --name out")
    if options.log_dir is not None and not os.path.isabs(options.log_dir):
        raise UserError(
            f"--log-dir {options.log_dir!r} is not a path on the head of the cluster.",
            why="the run goes on there, in a copy of this folder",
            hint="begin it with `/`; a folder that all machines share is best",
        )


def handed_on(options: argparse.Namespace, script: str, args: Sequence[str]) -> list[str]:
    """What `shoal run` is told there, but for `-n`. Variables go another way, which is not shown to everybody."""
    given = [
        *(("--python", options.python) if options.python is not None else ()),
        *(("--threads", options.threads) if options.threads is not None else ()),
        *(("--framework", options.framework) if options.framework != "torch" else ()),
        *(part for text in options.option or () for part in ("-o", text)),
        *(part for text in options.to or () for part in ("--to", text)),
        *(("-m",) if options.module else ()),
    ]
    return [*given, "--", script, *args]

"""Wiring: from a job to workers that run, and back to what became of them."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

from shoal.engine.engine import PYTHON
from shoal.engine.entry import entry_of, find_python
from shoal.engine.env import RunFacts, is_loading_call, shoal_home
from shoal.engine.fit import PLAIN_WORKER_BYTES, TORCH_WORKER_BYTES, check_memory
from shoal.engine.grounds import Where, find_ground
from shoal.engine.log import limit_of
from shoal.engine.machine import available_cores
from shoal.engine.nursery import num_at_start, wants_spare
from shoal.engine.signals import StopSignals, grace_of
from shoal.engine.story import as_error, tell_failures
from shoal.files import mask
from shoal.observe.folder import RunFolder, claim, create, local_folder, newest_step, read_facts
from shoal.spec.errors import ShoalError, UserError
from shoal.spec.job import Job
from shoal.train.mesh import check_share, make_mesh
from shoal.train.settings import make_settings
from shoal.version import __version__
from shoal.watch import Crew, Outcome, Watch, say

if TYPE_CHECKING:
    from shoal.alerting import Alerts

ALERTS_FILE = "alerts.toml"
"""In SHOAL_HOME: where alerts go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Where a run is kept and what it starts from.

    `dir` is the run folder itself; without it, a folder `name` under SHOAL_HOME/runs, or one with a new name.
    A folder that holds a run already is refused unless `is_resumed`. Its numbers go to `send_to`, too, and the whole
    folder to `copy_to`, a URL.
    """

    dir: str | None = None
    name: str | None = None
    is_resumed: bool = False
    command: Sequence[str] = ()
    send_to: Sequence[str] = ()
    copy_to: str | None = None


def run_job(
    job: Job,
    *,
    keep: Keep | None = None,
    out: TextIO | None = None,
    is_quiet: bool = False,
    where: Where | None = None,
) -> Outcome:
    """Run a job, here or where it says, and show it: output of workers on `out` (stdout), our own words on stderr.

    Raises UserError, before anything has started, for a job that cannot work. A worker's failure is shown and
    returned, not raised. Ctrl-C, SIGTERM and a closed terminal end all workers within 3 s.
    """
    entry = entry_of(job)
    if keep is not None and keep.send_to:
        from shoal.observe.exporters import parse_target

        for text in keep.send_to:
            parse_target(text)
    job, keep = _bring_to_url(job, keep or Keep())
    check_options(job)
    ground = find_ground(where or Where())
    if job.num_workers is None:
        if ground is not None:
            raise UserError("-n auto measures on this machine alone.", hint="give -n a number, or leave --engine out")
        job = _choose_workers(job)
        check_options(job)
    worker_bytes = PLAIN_WORKER_BYTES if entry[0] == "program" else TORCH_WORKER_BYTES
    first = num_at_start(job.options, job.min_workers, job.num_workers or 1)
    if ground is None:
        check_memory(first, worker_bytes, job.options)
        if not is_quiet and first > available_cores():
            _tell_of_cluster(first, available_cores())
    wants_spare(job.options)
    grace_of(job.options)
    limit_of(job.options)
    crew = Crew(
        job=job,
        python=find_python(job.python),
        entry_of=lambda rank: entry,
        stdin_fd=_stdin_fd(),
        ground=ground,
        alerts=find_alerts(job.options),
    )
    with StopSignals() as stops:
        outcome = _run(crew, keep, stops, None if is_quiet else out or sys.stdout)
    _tell(outcome, is_quiet)
    return outcome


def _tell_of_cluster(num_workers: int, num_cores: int) -> None:
    """More workers than cores are started here: say so where there are other machines."""
    from shoal.engine.clusters import find_cluster

    try:
        cluster = find_cluster()
    except UserError:  # whoever wants to use it is told
        return
    if cluster is not None:
        there = f"{num_workers} workers share {num_cores} core{'s' * (num_cores != 1)} here"
        say(f"shoal: {there}; `--engine ray` has them on all machines of the cluster of {cluster.head}")


def find_alerts(options: Mapping[str, str]) -> "Alerts | None":
    """What the user has said about alerts; None where that is nothing. Raises UserError for what cannot be."""
    home = shoal_home()
    if not any(name.startswith("alert.") for name in options) and not os.path.exists(os.path.join(home, ALERTS_FILE)):
        return None
    from shoal.alerting import read_alerts

    return read_alerts(os.path.join(home, ALERTS_FILE), options)


def check_options(job: Job) -> None:
    """Refuse, before anybody starts, settings that cannot be, or a split that these workers cannot make.

    What the script says is not known here: workers refuse that before their first step. Where the number of workers
    is still to be measured, nothing is said about it.
    """
    settings, origins = make_settings({"batch_size": 1}, job.options)
    if job.num_workers is None:
        return
    mesh = make_mesh(job.num_workers, settings.split, is_elastic=job.min_workers is not None)
    if origins["batch_size"] != "script":
        check_share(settings.split, settings.batch_size, mesh.num_copies)


def launch(
    function: Callable[..., Any],
    num_workers: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    run_dir: str | None = None,
    threads_per_worker: int | None = None,
    is_quiet: bool = False,
    engine: str | None = None,
    address: str | None = None,
    hosts: str | None = None,
    master: str | None = None,
    options: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `function(*args, **kwargs)` in `num_workers` new processes; returns what each returned, by rank.

    The processes see the same variables as under `shoal run` (RANK, WORLD_SIZE, ...). Functions of a script or a
    notebook cell, lambdas and closures travel by value; the script itself is not run again, so it needs no
    `if __name__ == "__main__"`. If a worker fails, the others are stopped and WorkerError is raised with its
    traceback. Interrupting the call ends all workers.

    With `engine` the processes are on other machines: `ray` (at `address`, or where this process is connected to
    already), `mpi` (on `hosts`) or `spark` (at `master`, or those of the active session). One of these three says
    which engine it is, too. `options` are those of the command line that begin with `engine.`.
    """
    from shoal.engine.call import ENTRY, name_of, pack_call, read_result

    _check_launch(function, num_workers)
    where = Where(engine=engine, address=address, hosts=hosts, master=master, options=dict(options or {}))
    ground = find_ground(where)
    job = job_of(function, num_workers, threads_per_worker, env, is_here=ground is None)
    job, keep = _bring_to_url(job, Keep(dir=run_dir, command=("shoal.launch", name_of(function))))
    call = pack_call(function, args, kwargs or {})
    alerts = find_alerts({})
    crew = Crew(job=job, python=PYTHON, entry_of=lambda rank: ENTRY, call=call, ground=ground, alerts=alerts)
    outcome = _run(crew, keep, None, None if is_quiet else sys.stdout)
    if outcome.failures:
        raise _remote_error(outcome)
    return [read_result(end.rank, end.result) for end in outcome.exits]


def job_of(
    function: Callable[..., Any],
    num_workers: int,
    threads_per_worker: int | None,
    env: Mapping[str, str] | None,
    *,
    is_here: bool = True,
) -> Job:
    """The job of calling a function in so many workers. Raises UserError where the memory is not enough for them."""
    from shoal.engine.call import name_of

    job = Job(
        script=f"<{name_of(function)}>",
        num_workers=num_workers,
        threads_per_worker=threads_per_worker,
        env=dict(env or {}),
        working_dir=os.getcwd(),
    )
    if is_here:
        worker_bytes = TORCH_WORKER_BYTES if "torch" in sys.modules else PLAIN_WORKER_BYTES
        check_memory(num_workers, worker_bytes, job.options)
    return job


def _check_launch(function: Callable[..., Any], num_workers: int) -> None:
    if not callable(function):
        raise UserError(
            f"launch needs a function, not a {type(function).__name__}.", hint="for example: `shoal.launch(train, 2)`"
        )
    if not isinstance(num_workers, int) or num_workers < 1:
        raise UserError(f"num_workers is {num_workers!r}.", hint="give it a whole number, 1 or more")
    if is_loading_call():
        raise UserError(
            "shoal.launch was called while a worker imported the module of its function.",
            why="every worker would start workers of its own, without end",
            hint='put the call under `if __name__ == "__main__":`',
        )


def _remote_error(outcome: Outcome) -> ShoalError:
    error = as_error(outcome.failures[0])
    if error.hint:  # Python shows the message alone
        error.add_note("\n".join(error.render().splitlines()[1:]))
    if error.remote_traceback:
        error.add_note(f"\nIn worker {error.rank}:\n{error.remote_traceback.rstrip()}")
    error.add_note(f"logs: {os.path.join(outcome.run_dir, 'logs')}")
    return error


def _choose_workers(job: Job) -> Job:
    from shoal.auto import choose

    say("shoal: -n auto: measuring ...")
    job, why = choose(job)
    say(f"shoal: -n auto: {why}")
    return job


def _run(crew: Crew, keep: Keep, stops: StopSignals | None, out: TextIO | None) -> Outcome:
    """Keep the run in a folder, see it through, and say in the folder what became of it."""
    job = crew.job
    with open_folder(job, keep) as folder:
        facts = RunFacts(
            name=folder.name,
            dir=folder.path,
            num_workers=crew.num_workers,
            min_workers=job.min_workers,
            is_resumed=keep.is_resumed,
        )
        watch = Watch(folder, facts, stops, out, keep.send_to, keep.copy_to)
        try:
            outcome = watch.run(crew)
        except BaseException as error:
            is_failure = isinstance(error, Exception)
            note_end(
                folder, "failed" if is_failure else "stopped", getattr(error, "exit_code", 1) if is_failure else 130
            )
            watch.close()
            raise
        note_end(folder, outcome.status, outcome.exit_code)
        watch.close()
        return outcome


def _bring_to_url(job: Job, keep: Keep) -> tuple[Job, Keep]:
    """A run folder at a URL is one here, of the same name, that is copied there; checkpoints go there at once."""
    if keep.dir is None:
        return job, keep
    if keep.is_resumed:
        return job, replace(keep, copy_to=read_facts(keep.dir).get("copied_to"))
    from shoal.observe.mirror import check_unused, url_of

    url = url_of(keep.dir)
    if url is None:
        return job, keep
    check_unused(url)
    here = os.path.join(shoal_home(), "runs", url.name)
    options = {"checkpoint_dir": keep.dir, **job.options}
    return replace(job, options=options), replace(keep, dir=here, copy_to=keep.dir)


def open_folder(job: Job, keep: Keep) -> RunFolder:
    """Make or take the folder of a run, and hold it."""
    hidden = dict.fromkeys(job.env, "***")
    facts = {
        "command": command_facts(keep.command, job.env),
        "job": asdict(replace(job, env=hidden)),
        "num_workers": job.num_workers and num_at_start(job.options, job.min_workers, job.num_workers),
        **({"min_workers": job.min_workers, "max_workers": job.num_workers} if job.min_workers is not None else {}),
        **({"copied_to": keep.copy_to} if keep.copy_to is not None else {}),
        "versions": {"shoal": __version__, "python": sys.version.split()[0]} | _torch_version(),
    }
    home = shoal_home()
    now = time.time()
    if keep.dir is None and keep.name is None:
        from random import SystemRandom

        return create(home, job.script or job.module or "run", facts, now, SystemRandom())
    path = local_folder(keep.dir if keep.dir is not None else os.path.join(home, "runs", keep.name or ""))
    if not keep.is_resumed:
        _check_unused(path)
    folder = claim(path, facts, now, is_new=not keep.is_resumed)
    _link(folder, home)
    return folder


def command_facts(command: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """A command as it may be written down: without the values of variables, and without passwords."""
    return [_hide_env(part, env) for part in command]


def _hide_env(part: str, env: Mapping[str, str]) -> str:
    part = mask(part)
    name, has_value, _ = part.removeprefix("--env=").partition("=")
    return f"{part[: len(part) - len(part.removeprefix('--env='))]}{name}=***" if has_value and name in env else part


def _torch_version() -> dict[str, str]:
    """Read from the names of installed packages: asking torch itself would take a second."""
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            if name.startswith("torch-") and name.endswith(".dist-info"):
                return {"torch": name.removeprefix("torch-").removesuffix(".dist-info")}
    return {}


def _check_unused(path: str) -> None:
    facts = read_facts(path)
    if facts and facts.get("status") != "running":
        raise UserError(
            f"{path} already holds a run, which {facts.get('status')}.",
            why="its journal, logs and checkpoints would be mixed with those of this one",
            hint=f"name another folder, or go on with that run: `--resume {path}`",
        )


def _link(folder: RunFolder, home: str) -> None:
    """Let `shoal ps` find a run that is kept elsewhere. Where home cannot be written, its path still finds it."""
    link = os.path.join(home, "runs", folder.name)
    try:
        os.makedirs(os.path.dirname(link), exist_ok=True)
        if not os.path.lexists(link):
            os.symlink(folder.path, link)
    except OSError:
        pass


def note_end(folder: RunFolder, status: str, exit_code: int) -> None:
    """Say in the folder what became of the run."""
    try:
        folder.update(status=status, exit_code=exit_code, ended=time.time())
    except ShoalError as error:  # a full disk must not hide what became of the run
        say(error.render())


def _tell(outcome: Outcome, is_quiet: bool) -> None:
    """Say in the end what became of the run, where that is not plain already."""
    logs = os.path.join(outcome.run_dir, "logs")
    if outcome.failures:
        if is_quiet and outcome.failures[0].traceback:
            say(outcome.failures[0].traceback.rstrip())
        say(tell_failures(outcome.failures, outcome.exits, logs))
    if outcome.stopped_by:
        say(f"shoal: stopped by {_name_signal(outcome.stopped_by)} after {outcome.seconds:.1f} s; logs in {logs}")
        if (step := newest_step(outcome.run_dir)) is not None:
            say(f"shoal: saved at step {step}; go on with `shoal run --resume {outcome.name}`")


def _name_signal(name: str) -> str:
    return {"SIGINT": "Ctrl-C", "SIGHUP": "a closed terminal (SIGHUP)"}.get(name, name)


def _stdin_fd() -> int | None:
    """Our input, for rank 0, unless it is a terminal: workers have none, and could not read from it."""
    try:
        return None if sys.stdin.isatty() else sys.stdin.fileno()
    except (OSError, ValueError, AttributeError):
        return None

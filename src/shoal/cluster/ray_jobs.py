"""Submitted runs, as Ray keeps them: `python -m shoal.cluster.ray_jobs`, a process of its own for each question.

It reads one question as a line of JSON, and writes lines of JSON: what it is doing, what a run printed, and in the
end the answer or what is wrong. Ray reads its environment when it is imported, once, and may wait for long;
whoever asks can end it at any time, and the run goes on.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from shoal.cluster import at_head, measuring
from shoal.cluster.shipping import (
    MAX_SHIPPED_BYTES,
    RUN,
    Submission,
    check_size,
    entrypoint,
    next_id,
    notes,
    runtime_env,
)
from shoal.cluster.versions import versions_here
from shoal.engine.env import set_all
from shoal.engine.ray import check_room, connect, import_ray, no_cluster, patience, probe, read_request
from shoal.spec.errors import ShoalError, UserError

ANSWER_SECONDS = 30.0
MOST_FILES = 100_000
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")

Facts = dict[str, Any]


def say(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


class Jobs(Protocol):
    """The submissions of a cluster, by one of the two ways that Ray has."""

    def all(self) -> dict[str, Facts]: ...
    def head(self, submission: Submission) -> Facts | None: ...
    def rows(self, names: Sequence[str]) -> dict[str, Facts]: ...
    def check_room(self, submission: Submission) -> None: ...
    def submit(self, folder: str, job: Facts) -> None: ...
    def stop(self, job_id: str) -> bool: ...
    def logs(self, job_id: str) -> str: ...
    def tail(self, job_id: str) -> Iterator[str]: ...


class ByCluster:
    """Through the cluster itself, from one of its machines. No dashboard is needed, and Ray's own TLS holds."""

    def __init__(self, address: str | None) -> None:
        self._ray, _ = connect(address)
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        heads = [node for node in alive if "node:__internal_head__" in node["Resources"]]
        if not heads:
            raise UserError("The cluster has no head now.", hint="try again in a moment")
        self._head = heads[0]["NodeID"]
        self._agent = self._find_agent()

    def _find_agent(self) -> str:
        """Where the agent listens that takes submissions."""
        prefix = import_module("ray.dashboard.consts").DASHBOARD_AGENT_ADDR_NODE_ID_PREFIX
        kv = import_module("ray.experimental.internal_kv")
        found = kv._internal_kv_get(f"{prefix}{self._head}", namespace="dashboard")
        if not found:
            raise UserError(
                "This Ray cluster takes no submissions.",
                why="no agent for that is on its head: it comes with `ray[default]`, not with `ray` alone, and does "
                "not start where its port, 52365 if no other was given, is taken",
                hint="mend that on the head and start Ray again; or use `shoal run --engine ray`",
            )
        host, port, _ = json.loads(found)
        return f"http://{host}:{port}"

    def all(self) -> dict[str, Facts]:
        common = import_module("ray.dashboard.modules.job.common")
        client = common.JobInfoStorageClient(import_module("ray._private.worker").global_worker.gcs_client)
        found = asyncio.run(client.get_all_jobs())
        return {job_id: _facts(info) for job_id, info in found.items()}

    def head(self, submission: Submission) -> Facts | None:
        return dict(self._call(at_head.facts_of_head, submission.name, submission.dir))

    def rows(self, names: Sequence[str]) -> dict[str, Facts]:
        return dict(self._call(at_head.rows_of, list(names)))

    def check_room(self, submission: Submission) -> None:
        request = read_request(submission.options)
        if not patience(self._ray, request):
            check_room(self._ray, request, submission.num_workers)

    def submit(self, folder: str, job: Facts) -> None:
        packaging = import_module("ray._private.runtime_env.working_dir")
        with tempfile.TemporaryDirectory() as scratch:
            shipped = packaging.upload_working_dir_if_needed(
                {"working_dir": folder}, include_gitignore=True, scratch_dir=scratch, logger=_quiet()
            )
        prepared = {**job["runtime_env"], "working_dir": shipped["working_dir"]}
        # Ray means to do so by itself, but does not know its head where the dashboard is off.
        place = {"ray.io/node-id": self._head}
        job = {**job, "runtime_env": prepared, "entrypoint_label_selector": place}
        self._call(at_head.submit_here, self._agent, job)

    def stop(self, job_id: str) -> bool:
        return bool(self._call(at_head.stop_here, self._agent, job_id))

    def logs(self, job_id: str) -> str:
        return str(self._call(at_head.logs_here, self._agent, job_id))

    def tail(self, job_id: str) -> Iterator[str]:
        tail = self._ray.remote(num_cpus=0, max_retries=0, num_returns="streaming")(at_head.tail_here)
        there = tail.options(scheduling_strategy=self._at(self._head))
        for part in there.remote(self._agent, job_id):
            yield self._ray.get(part)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Have the head call a function of ours."""
        call = self._ray.remote(num_cpus=0, max_retries=0)(function).options(scheduling_strategy=self._at(self._head))
        try:
            return self._ray.get(call.remote(*args), timeout=ANSWER_SECONDS)
        except self._ray.exceptions.GetTimeoutError:
            raise ShoalError(
                f"The head of the cluster did not answer within {ANSWER_SECONDS:.0f} s.",
                hint="see whether it is busy: `shoal nodes`",
            ) from None
        except self._ray.exceptions.RayError as error:
            raise _not_done(str(getattr(error, "cause", None) or error)) from None

    def _at(self, node: str) -> Any:
        scheduling = import_module("ray.util.scheduling_strategies")
        return scheduling.NodeAffinitySchedulingStrategy(node, soft=False)


class ByDashboard:
    """Through the dashboard of a cluster that this machine is not in: `http://HOST:8265`."""

    def __init__(self, url: str) -> None:
        probe(url, 8265)
        # Ray would rather believe its environment than its arguments.
        set_all({"RAY_API_SERVER_ADDRESS": url})
        import_ray()
        try:
            self._client = import_module("ray.job_submission").JobSubmissionClient(url)
        except ConnectionError as error:
            raise no_cluster(url, str(error)) from None
        except RuntimeError as error:
            raise _not_done(str(error)) from None

    def all(self) -> dict[str, Facts]:
        jobs = self._client.list_jobs()
        return {job.submission_id: _facts(job) for job in jobs if job.submission_id is not None}

    def head(self, submission: Submission) -> Facts | None:
        return None

    def rows(self, names: Sequence[str]) -> dict[str, Facts]:
        return {}

    def check_room(self, submission: Submission) -> None:
        read_request(submission.options)

    def submit(self, folder: str, job: Facts) -> None:
        prepared = {**job["runtime_env"], "working_dir": folder}
        try:
            self._client.submit_job(**{**job, "runtime_env": prepared})
        except RuntimeError as error:
            raise _not_done(str(error)) from None

    def stop(self, job_id: str) -> bool:
        return bool(self._client.stop_job(job_id))

    def logs(self, job_id: str) -> str:
        return str(self._client.get_job_logs(job_id))

    def tail(self, job_id: str) -> Iterator[str]:
        loop = asyncio.new_event_loop()
        parts = self._client.tail_job_logs(job_id)
        with contextlib.closing(loop):
            while True:
                try:
                    yield loop.run_until_complete(anext(parts))
                except StopAsyncIteration:
                    return


def open_jobs(address: str | None) -> Jobs:
    """The submissions of the cluster at an address, or of that which this machine is in."""
    if address is not None and address.startswith("ray://"):
        raise UserError(
            f"Nothing can be submitted to {address}.",
            why="that is the address for programs that stay connected",
            hint="use that of the dashboard, `http://HOST:8265`; or, on a machine of the cluster, `HOST:6379`",
        )
    if address is not None and address.startswith(("http://", "https://")):
        return ByDashboard(address)
    return ByCluster(address)


def submit(jobs: Jobs, submission: Submission) -> Facts:
    """Hand a run over; returns what its submitter should know."""
    known = jobs.all()
    head = jobs.head(submission)
    _check_new(submission, known, head)
    here = versions_here()
    if head is not None and head["versions"]["shoal"] != here["shoal"]:
        raise UserError(
            f"The head of the cluster has shoal {head['versions']['shoal']}, and this machine {here['shoal']}.",
            why="the run would be started by another shoal than the one that was asked",
            hint=f"install shoal {head['versions']['shoal']} here, or {here['shoal']} there",
        )
    jobs.check_room(submission)
    num_files, num_bytes = measure_folder(submission.folder, submission.run_args)
    say(progress=f"copying {submission.folder}: {num_files} files, {num_bytes / 2**20:.1f} MiB")
    job_id = next_id(submission.name, list(known))
    jobs.submit(
        submission.folder,
        {
            "entrypoint": entrypoint("python" if head is None else head["python"], submission),
            "submission_id": job_id,
            "runtime_env": runtime_env(submission.folder, submission.env),
            "metadata": notes(submission, here["shoal"]),
        },
    )
    return {"run": submission.name, "id": job_id, "folder": None if head is None else head["run"]}


def _check_new(submission: Submission, known: Mapping[str, Facts], head: Facts | None) -> None:
    """Raise UserError where a name is taken; or, for a run that is to go on, where there is none or it still runs."""
    name = submission.name
    before = [job for job in known.values() if job["notes"].get(RUN) == name]
    if not submission.is_resumed:
        if name in known or (head is not None and head["has_run"]):
            raise UserError(
                f"There is a run {name!r} on the cluster already.",
                why="it was submitted before" if name in known else f"its folder is {head['run'] if head else ''}",
                hint=f"use another `--name`, or go on with that run: `--resume {name}`",
            )
        return
    if any(job["status"] not in ENDED for job in before):
        raise UserError(f"Run {name!r} has not ended.", hint=f"`shoal cancel {name}` ends it")
    if head is not None and not head["has_run"]:
        raise UserError(
            f"There is no run {name!r} on the cluster.",
            why=f"there is no folder {head['run']} on its head",
            hint="`shoal ps --cluster` lists those that were submitted",
        )


def measure_folder(folder: str, run_args: Sequence[str]) -> tuple[int, int]:
    """How many files Ray would copy, and their bytes; raises UserError where these are too many.

    So it does where the script is none of them. Walks as Ray does when it copies, with what it leaves out.
    """
    packaging = import_module("ray._private.runtime_env.packaging")
    constants = import_module("ray._private.ray_constants")
    root, files = Path(folder), set[str]()
    sizes: dict[str, int] = {}

    def count(path: Path) -> None:
        if path.is_file():
            relative = path.relative_to(root)
            files.add(str(relative))
            sizes[relative.parts[0]] = sizes.get(relative.parts[0], 0) + path.stat().st_size
            if sum(sizes.values()) > 4 * MAX_SHIPPED_BYTES or len(files) > MOST_FILES:
                raise _Enough

    excludes = [packaging._get_excludes(root, constants.get_runtime_env_default_excludes())]
    try:
        packaging._dir_travel(root, excludes, count, include_gitignore=True, logger=_quiet())
    except _Enough:
        check_size(sizes, folder, is_all=False)
        raise UserError(
            f"{folder} has more than {MOST_FILES} files.",
            why="all of them would be copied to every machine of the run",
            hint="submit from a folder with the code alone, or name what is not needed in a file .rayignore",
        ) from None
    except OSError as error:
        raise UserError(
            f"{folder} cannot be copied to the cluster.",
            why=f"{error.strerror}: {error.filename}",
            hint="make it readable, or name it in a file .rayignore",
        ) from None
    check_size(sizes, folder)
    script = run_args[list(run_args).index("--") + 1] if "-m" not in run_args else None
    if script is not None and script not in files:
        raise UserError(
            f"{script!r} would not be copied to the cluster.",
            why="a .gitignore or .rayignore names it, or it lies in a folder that is never copied",
            hint="take it out of that file",
        )
    return len(files), sum(sizes.values())


class _Enough(Exception):
    """A folder is too large, however much larger it may be."""


def list_submitted(jobs: Jobs) -> list[Facts]:
    """Every run that was submitted, newest first, with what its folder tells where that can be asked."""
    known = {job_id: job for job_id, job in jobs.all().items() if RUN in job["notes"]}
    rows = jobs.rows(sorted({job["notes"][RUN] for job in known.values()})) if known else {}
    return [
        {"id": job_id, **job, "row": rows.get(job["notes"][RUN])}
        for job_id, job in sorted(known.items(), key=lambda each: -(each[1]["started"] or 0.0))
    ]


def find(jobs: Jobs, text: str) -> tuple[str, Facts]:
    """The newest submission of the run that is meant: a name, its beginning or end where only one fits, or `last`."""
    found = list_submitted(jobs)
    names = list(dict.fromkeys(job["notes"][RUN] for job in found))
    if text == "last" and names:
        text = names[0]
    fitting = (
        [name for name in names if name == text]
        or [name for name in names if name.startswith(text)]
        or [name for name in names if name.endswith(text)]
    )
    if len(fitting) != 1:
        raise UserError(
            f"{len(fitting)} submitted runs fit {text!r}." if fitting else f"No run {text!r} was submitted here.",
            why=f"there are: {', '.join((fitting or names)[:5])}" if names else "none was submitted to this cluster",
            hint="`shoal ps --cluster` lists them",
        )
    job = next(job for job in found if job["notes"][RUN] == fitting[0])
    return job["id"], job


def logs(jobs: Jobs, text: str) -> Facts:
    """Say what a run has printed so far."""
    job_id, job = find(jobs, text)
    if job["node"] is None and job["status"] not in ENDED:
        raise UserError(f"Run {job['notes'][RUN]!r} has not started yet.", hint="`--follow` waits for it")
    say(text=output_of(jobs.logs(job_id), begun=False)[1])
    return job


def follow(jobs: Jobs, text: str) -> Facts:
    """Say what a run prints until it has ended; returns what became of it."""
    job_id, _ = find(jobs, text)
    say(is_under_way=True)
    _await(jobs, job_id, lambda job: job["node"] is not None or job["status"] in ENDED, "it has not started yet")
    begun = False
    try:
        for part in jobs.tail(job_id):
            begun, text = output_of(part, begun)
            if text:
                say(text=text)
    except (RuntimeError, OSError) as error:  # its logs may be gone with their machine; its end is known all the same
        say(progress=f"its output cannot be read: {' '.join(str(error).split())[:200]}")
    return _await(jobs, job_id, lambda job: job["status"] in ENDED, "it is ending")


def output_of(part: str, begun: bool) -> tuple[bool, str]:
    """What the run itself printed; before that, Ray tells what it does. Pure."""
    if begun:
        return True, part
    found = re.search(r"^Running entrypoint for job .*$\n?", part, re.MULTILINE)
    return (True, part[found.end() :]) if found else (False, "")


def cancel(jobs: Jobs, text: str) -> Facts:
    """End a run that was submitted; returns what became of it."""
    job_id, job = find(jobs, text)
    if job["status"] in ENDED:
        return {**job, "was_running": False}
    say(progress=f"{job['notes'][RUN]}: asked to end")
    jobs.stop(job_id)
    ended = _await(jobs, job_id, lambda job: job["status"] in ENDED, "it is ending")
    return {**ended, "was_running": True}


def _await(jobs: Jobs, job_id: str, is_met: Callable[[Facts], bool], what: str) -> Facts:
    told_at = time.monotonic() + 3.0
    while not is_met(job := jobs.all()[job_id]):
        if time.monotonic() > told_at:
            told_at += 10.0
            say(progress=f"{job['notes'].get(RUN, job_id)}: {what}")
        time.sleep(0.3)
    return job


def _facts(info: Any) -> Facts:
    """A submission as we tell it; both of Ray's ways have these in common."""
    node = getattr(info, "driver_node_id", None)
    return {
        "status": str(getattr(info.status, "value", info.status)),
        "message": info.message or "",
        "started": None if info.start_time is None else info.start_time / 1e3,
        "ended": None if info.end_time is None else info.end_time / 1e3,
        "exit_code": info.driver_exit_code,
        "notes": dict(info.metadata or {}),
        "node": node,
    }


def _not_done(why: str) -> ShoalError:
    """What Ray says in many lines, in one."""
    lines = [line.strip() for line in why.splitlines() if line.strip()]
    if "ModuleNotFoundError" in why:
        missing = next(line for line in lines if "ModuleNotFoundError" in line)
        return UserError(
            "The head of the cluster cannot do this.", why=missing, hint="install the same `shoal[ray]` there"
        )
    return ShoalError(
        "The cluster refused.", why=lines[-1][:400] if lines else "", hint="see whether `shoal nodes` works"
    )


def _quiet() -> logging.Logger:
    logger = logging.getLogger("shoal.ray_jobs")
    logger.disabled = True
    return logger


def measure_links(address: str | None, nodes: Sequence[Facts]) -> list[Facts]:
    """How fast these machines reach each other."""
    ray, _ = connect(address)
    say(is_under_way=True)
    return measuring.measure(ray, nodes, lambda text: say(progress=text))


ACTS: dict[str, Callable[[str | None, Any], Any]] = {
    "submit": lambda address, facts: submit(open_jobs(address), Submission(**facts)),
    "list": lambda address, _: list_submitted(open_jobs(address)),
    "logs": lambda address, text: logs(open_jobs(address), text),
    "follow": lambda address, text: follow(open_jobs(address), text),
    "cancel": lambda address, text: cancel(open_jobs(address), text),
    "links": measure_links,
}


def _end_with_asker() -> None:
    """Our input ends when whoever asked is gone, however that came about."""
    sys.stdin.read()
    os._exit(1)


def main() -> int:
    # What Ray writes to its output is not for those who read JSON.
    kept, sys.stdout = sys.stdout, os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    del kept
    question = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_asker, daemon=True).start()
    try:
        answer = ACTS[question["verb"]](question["address"], question["facts"])
    except ShoalError as error:
        is_user = isinstance(error, UserError)
        say(error={"message": error.message, "why": error.why, "hint": error.hint}, is_user=is_user)
        return 1
    say(answer=answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What can happen to a job in the queue: functions from a job to the job after it, which may say why not. Pure."""

from dataclasses import replace
from typing import Protocol

from shoal.place.cluster import Allocation, Devices
from shoal.service.job import (
    CANCELLED,
    FAILED,
    FINISHED,
    RUNNING,
    STARTING,
    STOPPING,
    WAITING,
    Asked,
    Job,
    check_gpus,
)
from shoal.spec.errors import UserError

BACK = "back in the queue"
MAX_LOST = 5
"""How often a job whose attempt vanished, or lost a machine that it cannot do without, is started again: one that
takes machines down would never come to rest."""


class Sight(Protocol):
    """What a keeper says of an attempt, as far as it changes the job."""

    @property
    def state(self) -> str: ...
    @property
    def cause(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def exit_code(self) -> int | None: ...
    @property
    def num_workers(self) -> int | None: ...
    @property
    def step(self) -> int | None: ...


def submit(number: int, owner: str, asked: Asked, now: float, wall: float, *, is_held: bool = False) -> Job:
    return Job(
        number=number,
        owner=owner,
        asked=asked,
        is_held=is_held,
        min_workers=asked.min_workers,
        max_workers=asked.max_workers,
        submitted_at=now,
        changed_at=now,
        submitted_wall=wall,
    )


def hold(job: Job) -> Job:
    """Keep it from starting, or from going on where it is being stopped. One that runs is not stopped by this."""
    if job.state != WAITING and job.wish != "preempt":
        stops = f"`shoal requeue {job.number}` stops it and puts it back in the queue, where this keeps it"
        raise _cannot(job, "be held", "submit it again with `--hold`" if job.is_over else stops)
    return replace(job, is_held=True)


def release(job: Job) -> Job:
    if job.is_over:
        back = f"`shoal requeue {job.number}` puts it back in the queue"
        raise _cannot(job, "be released", "submit it again" if job.state == FINISHED else back)
    return replace(job, is_held=False)


def cancel(job: Job, why: str, now: float, wall: float) -> Job:
    """End it for good. What is over stays as it is."""
    if job.is_over or job.wish == "cancel":
        return job
    if job.state == WAITING:
        return replace(job, state=CANCELLED, cause="cancelled", message=why, changed_at=now, ended_wall=wall)
    return replace(job, state=STOPPING, wish="cancel", message=why, changed_at=now)


def requeue(job: Job, now: float) -> Job:
    """Back into the queue: one that runs is stopped first, one that failed goes on from its newest checkpoint."""
    if job.state == FINISHED:
        raise _cannot(job, "be put back", "submit it again")
    if job.state == WAITING or job.wish == "preempt":
        return job
    if job.is_active:
        return stop(job, "preempt", "requeued", now)
    return replace(
        job, state=WAITING, wish="", cause="", message="", exit_code=None, num_lost=0, changed_at=now, ended_wall=None
    )


def resize(job: Job, least: int | None, most: int) -> Job:
    """Other bounds for its workers. One that runs must be elastic, and is brought within them; it cannot leave those
    that it was started with. For one that is being stopped they are those of its next start."""
    if job.is_over:
        raise _cannot(job, "be resized", "submit it again with another -n")
    runs = job.is_active and not job.wish
    if runs and not job.asked.is_elastic:
        hint = f"submit it with a range, such as `-n 1:{max(most, 2)}`; or `shoal requeue {job.number}` first"
        raise UserError(f"Job {job.number} runs with a fixed number of workers.", hint=hint)
    least = min(job.min_workers, most) if least is None else least
    if not 1 <= least <= most:
        raise UserError(f"At least {least} workers and at most {most} is no range.", hint="for example: `-n 2:8`")
    if not job.asked.is_elastic:
        least = most
    check_gpus(job.asked.gpus, most)
    if runs and job.span and not job.span[0] <= least <= most <= job.span[1]:
        first, last = job.span
        raise UserError(
            f"Job {job.number} runs, and cannot have {least} to {most} workers before its next start.",
            why=f"it was started with `-n {first}:{last}`",
            hint=f"stay within that; or `shoal requeue {job.number}`, and then this again",
        )
    return replace(job, min_workers=least, max_workers=most)


def start(
    job: Job,
    allocation: Allocation,
    devices: Devices,
    now: float,
    wall: float = 0.0,
    why: str = "",
    memory_bytes: int | None = None,
    kinds: tuple[str, ...] = (),
) -> Job:
    """Reserve nodes, and take the next token. Its keeper is started only after this is on disk.

    With `memory_bytes` each worker has less memory than was asked for.
    """
    assert job.state == WAITING, job
    num_workers = sum(allocation.values())
    told = f"started with {num_workers} worker{'s' * (num_workers > 1)}"
    if job.change.startswith(BACK):  # why, is to be read for as long as it runs
        why = f"it was {job.change}"
    return replace(
        job,
        state=STARTING,
        token=job.token + 1,
        wish="",
        allocation=dict(allocation),
        devices=dict(devices),
        target=None,
        target_devices={},
        span=(job.min_workers, job.max_workers),
        node_kinds=kinds,
        changed_at=now,
        accrued_at=now,
        began_at=now,
        lowered_bytes=memory_bytes,
        change=told if why in ("", "start") else f"{told}: {why}",
        change_wall=wall,
        message="",
        cause="",
        exit_code=None,
    )


def change_size(
    job: Job,
    allocation: Allocation,
    devices: Devices,
    now: float,
    wall: float = 0.0,
    why: str = "",
    kinds: tuple[str, ...] = (),
) -> Job:
    """Reserve more at once, or say what is to be left: what goes is given back when its workers are gone."""
    before, after = job.num_wanted, sum(allocation.values())
    sizes = f"{before} to {after} workers"
    # The reason speaks of the sizes that were decided: where only part of it is done at once, of those.
    cause = why.partition(" workers: ")[2] or why
    told = f"{sizes}: {cause}" if cause else sizes
    job = replace(accrue(job, now), change=told, change_wall=wall, node_kinds=kinds)
    if sum(allocation.values()) >= job.num_reserved:
        return replace(
            job, allocation=dict(allocation), devices=dict(devices), target=None, target_devices={}, changed_at=now
        )
    return replace(job, target=dict(allocation), target_devices=dict(devices), changed_at=now)


def stop(job: Job, wish: str, why: str, now: float) -> Job:
    """Have the attempt end. A wish to cancel is not taken back by a later one to preempt."""
    if not job.is_active or job.wish in (wish, "cancel"):
        return job
    return replace(job, state=STOPPING, wish=wish, message=why, changed_at=now)


def preempt(job: Job, why: str, now: float, wall: float) -> Job:
    """Have the attempt end for the sake of others: it goes on later."""
    stopping = stop(job, "preempt", why, now)
    if stopping is job:
        return job
    return replace(
        stopping, num_preempted=job.num_preempted + 1, change=f"stopped, to go on later: {why}", change_wall=wall
    )


def accrue(job: Job, now: float) -> Job:
    """Add up what it has had since that was done last."""
    if not job.is_active or now <= job.accrued_at:
        return job
    seconds = now - job.accrued_at
    return replace(
        job,
        accrued_at=now,
        run_seconds=job.run_seconds + seconds,
        service_seconds=job.service_seconds + seconds * job.size,
        kind_seconds=kind_seconds_at(job, now),
    )


def kind_seconds_at(job: Job, now: float) -> dict[str, float]:
    """How long it has run on each kind of node, to this moment."""
    seconds = max(now - job.accrued_at, 0.0) if job.is_active else 0.0
    return {**job.kind_seconds, **{kind: job.kind_seconds.get(kind, 0.0) + seconds for kind in job.node_kinds}}


def see(job: Job, seen: Sight, now: float, wall: float, ended: tuple[float, float] | None = None) -> Job:
    """The job after a look at its attempt. What was seen of an attempt that is not its newest must not come here.

    `ended`, clock and date, is when an attempt ended that is over, where that is known: it may be a while ago, and
    nothing is charged for the time since.
    """
    if not job.is_active:
        return job
    if seen.state == "absent":
        # Nobody but the service starts attempts: one that is to start will be started with the same token.
        return job if job.state == STARTING else _end(job, "lost", "its process is gone", None, now, wall)
    if seen.state == "ended":
        at, date = ended or (now, wall)
        at = min(max(at, job.accrued_at), now)
        return _end(_know_step(job, seen), seen.cause, seen.message, seen.exit_code, at, date)
    if job.stopping_seconds is not None and not job.wish and (seen.step or 0) > (job.last_step or 0):
        # Now it is further than it was when it was stopped: that is what stopping it has cost.
        cost = job.stopping_seconds + max(0.0, now - job.began_at)
        job = replace(job, stop_seconds=cost, stopping_seconds=None)
    if job.state == STARTING and seen.state == "running":
        job = replace(job, state=RUNNING, has_run=True, started_wall=job.started_wall or wall)
    if job.target is not None and seen.num_workers is not None and seen.num_workers <= job.num_wanted:
        job = accrue(job, now)
        left = dict(job.target or {})
        job = replace(job, allocation=left, devices=job.target_devices, target=None, target_devices={})
    return job


def _know_step(job: Job, seen: Sight) -> Job:
    """How far it came, for whoever measures how long it takes to come further."""
    return job if seen.step is None else replace(job, last_step=max(seen.step, job.last_step or 0))


def _end(job: Job, cause: str, message: str, exit_code: int | None, now: float, wall: float) -> Job:
    job = accrue(job, now)
    freed = replace(
        job,
        allocation={},
        devices={},
        target=None,
        target_devices={},
        wish="",
        changed_at=now,
        exit_code=exit_code,
        lowered_bytes=None,
        stopping_seconds=max(0.0, now - job.changed_at) if job.wish == "preempt" and job.last_step else None,
    )
    if cause == "finished":
        return replace(freed, state=FINISHED, cause=cause, message=message, has_run=True, ended_wall=wall)
    if job.wish == "cancel" or cause == "cancelled":
        return replace(
            freed, state=CANCELLED, cause="cancelled", message=job.message or message, has_run=True, ended_wall=wall
        )
    if cause == "preempted" or (job.wish == "preempt" and cause != "out_of_memory"):
        return replace(
            freed,
            state=WAITING,
            has_run=True,
            num_stops=job.num_stops + 1,
            stopped_at=now,
            cause="",
            message=job.message or message,
        )
    if cause == "out_of_memory" and job.lowered_bytes is not None:
        why = "it needed the memory that it had given back, and has it again"
        return replace(
            freed, state=WAITING, has_run=True, stopped_at=now, keeps_memory=True, cause="", message=why, change=why
        )
    if cause == "lost" and job.num_lost < MAX_LOST:
        # A job that never got as far as a run folder has nothing to go on with.
        return replace(
            freed,
            state=WAITING,
            num_lost=job.num_lost + 1,
            stopped_at=now,
            cause="",
            message=message,
            change=f"{BACK}: {message}",
            change_wall=wall,
        )
    return replace(freed, state=FAILED, cause=cause or "failed", message=message, has_run=True, ended_wall=wall)


def fail_to_start(job: Job, message: str, now: float, wall: float) -> Job:
    """Nothing could be started of it, and trying again would not help."""
    if job.state != STARTING:
        return job
    return _end(replace(job, wish=""), "failed", message, None, now, wall)


def give_up(job: Job, first: int, what: str, now: float, wall: float) -> Job:
    """It waits for a job that will never finish well, so it ends too."""
    return cancel(job, f"it was to run after job {first}, which {what}", now, wall)


def _cannot(job: Job, verb: str, hint: str) -> UserError:
    return UserError(f"Job {job.number} cannot {verb}.", why=f"it is {job.state}", hint=hint)

"""What a keeper is told: the attempt to make, from a job that has its nodes. Pure."""

from shoal.service.job import Job
from shoal.service.orders import Orders
from shoal.service.settings import Settings

INDEX = "SHOAL_ARRAY_INDEX"


def orders_for(job: Job, settings: Settings, engine: str) -> Orders:
    """The same job and token give the same orders, before and after a crash."""
    asked = job.asked
    args = asked.run_args if engine == "local" else ("--engine", engine, *asked.run_args)
    limit = asked.time_limit_seconds
    env = {**asked.env, "SHOAL_JOB": str(job.number)}
    return Orders(
        job=str(job.number),
        token=job.token,
        argv=args,
        cwd=asked.working_dir,
        env=env if asked.index is None else {**env, INDEX: str(asked.index)},
        run_name=job.run_name,
        is_resumed=job.has_run,
        min_workers=job.min_workers,
        max_workers=job.max_workers,
        num_workers=job.num_reserved,
        allocation=dict(job.allocation),
        devices=dict(job.devices),
        memory_bytes=job.memory_bytes,
        cores=asked.cores,
        time_limit_seconds=None if limit is None else max(limit - job.run_seconds, 1.0),
        grace_seconds=settings.grace_seconds,
    )

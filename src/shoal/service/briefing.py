"""What a keeper is told: the attempt to make, from a job that has its nodes. Pure."""

from collections.abc import Mapping

from shoal.service.job import Job
from shoal.service.orders import Orders
from shoal.service.settings import Settings

INDEX = "SHOAL_ARRAY_INDEX"


def orders_for(job: Job, settings: Settings, engine: str, addresses: Mapping[str, str]) -> Orders:
    """The same job and token give the same orders, before and after a crash. `addresses` are those of its nodes."""
    asked = job.asked
    args = asked.run_args if engine == "local" else (*_on_ray(job, settings, addresses), *asked.run_args)
    limit = asked.time_limit_seconds
    least, most = job.span or (job.min_workers, job.max_workers)
    return Orders(
        job=str(job.number),
        token=job.token,
        argv=args,
        cwd=asked.working_dir,
        env=env_of(job),
        run_name=job.run_name,
        is_resumed=job.has_run,
        min_workers=least,
        max_workers=most,
        num_workers=job.num_reserved,
        allocation=dict(job.allocation),
        devices=dict(job.devices),
        memory_bytes=job.memory_bytes,
        cores=asked.cores,
        time_limit_seconds=None if limit is None else max(limit - job.run_seconds, 1.0),
        grace_seconds=settings.grace_seconds,
    )


def env_of(job: Job) -> dict[str, str]:
    """What the environment of a job's workers has more than that of their machine."""
    index = {} if job.asked.index is None else {INDEX: str(job.asked.index)}
    return {**job.asked.env, "SHOAL_JOB": str(job.number), **index}


def places_of(allocation: Mapping[str, int], addresses: Mapping[str, str]) -> dict[str, int]:
    """How many workers are to be at which address; where that is not known, the name says it."""
    return {addresses.get(name, name): workers for name, workers in allocation.items()}


def _on_ray(job: Job, settings: Settings, addresses: Mapping[str, str]) -> tuple[str, ...]:
    """What Ray is asked for: what each worker needs, on the machines that were chosen for them and on no others."""
    asked = job.asked
    places = places_of(job.allocation, addresses)
    options = {
        "engine.cpus": f"{asked.cores:g}",
        "engine.gpus": f"{asked.gpus:g}",
        "engine.memory": str(asked.memory_bytes),
        "engine.nodes": ",".join(f"{place}={workers}" for place, workers in places.items()),
    }
    each = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    # The launcher has these, and its workers are elsewhere. Values may be secrets, and commands are seen by all.
    passed_on = [f"--env={name}" for name in env_of(job)]
    there = ("--address", settings.ray_address) if settings.ray_address else ()
    return ("--engine", "ray", *there, "--threads", str(max(1, int(asked.cores))), *passed_on, *each)

"""What is told of jobs, nodes, people and shares: plain values for the API. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from shoal.observe.clean import clean
from shoal.place.cluster import Node, Partition
from shoal.place.decision import Wait
from shoal.service.job import Job
from shoal.service.learned import Prospect
from shoal.service.people import ADMIN, Person, Token
from shoal.spec.prediction import Prediction

MAX_PREDICTIONS = 20


def tell_job(
    job: Job, now: float, wait: Wait | None = None, seen: Any = None, prospect: Prospect | None = None
) -> dict[str, Any]:
    """A job as lists show it."""
    asked, is_active, is_over = job.asked, job.is_active, job.is_over
    since = job.changed_at if is_active else job.stopped_at or job.submitted_at
    return {
        "job": job.number,
        "name": asked.name,
        "owner": job.owner,
        "state": job.shown_state,
        "why": _why(job, wait),
        "position": wait.position if wait and not is_active else 0,
        "eta_seconds": wait.eta_seconds if wait and not is_active else None,
        "left_seconds": prospect.left_seconds if prospect is not None and not is_over else None,
        "workers": _workers(job, seen),
        "min_workers": job.min_workers,
        "max_workers": job.max_workers,
        "is_elastic": asked.is_elastic,
        "class": asked.job_class,
        "priority": asked.priority,
        "partition": asked.partition,
        "account": job.account,
        "cores": asked.cores,
        "memory_bytes": job.memory_bytes,
        "gpus": asked.gpus,
        "disk_bytes": asked.disk_bytes,
        "nodes": dict(job.allocation),
        "waited_seconds": 0.0 if is_active or is_over else max(0.0, now - since),
        "run_seconds": job.run_seconds + (max(0.0, now - job.accrued_at) if is_active else 0.0),
        "submitted": job.submitted_wall,
        "started": job.started_wall,
        "ended": job.ended_wall,
        "is_seen": seen is not None,
        "step": getattr(seen, "step", None),
        "loss": getattr(seen, "loss", None),
        "exit_code": job.exit_code,
        "cause": job.cause,
        "message": job.message,
        "run": job.run_name,
        "num_stops": job.num_stops,
        "num_preempted": job.num_preempted,
        "change": job.change,
        "changed": job.change_wall,
        "array": asked.array,
        "index": asked.index,
        "after": asked.after,
    }


def _workers(job: Job, seen: Any) -> int:
    number = getattr(seen, "num_workers", None)
    return number if isinstance(number, int) and job.is_active else job.num_reserved


def _why(job: Job, wait: Wait | None) -> str:
    if job.is_over:
        return ""
    if job.is_active:
        return job.message if job.wish else ""
    if job.is_held:
        return f"held; `shoal release {job.number}` lets it start"
    return wait.why if wait is not None else "it has just come in"


def tell_more(job: Job, who: Person, rules: Partition) -> dict[str, Any]:
    """What only the page of one job shows. Variables may be secrets: others see their names."""
    asked = job.asked
    budgets = [each for each in (asked.max_preemptions, rules.max_preemptions) if each is not None]
    is_theirs = who.name == job.owner or who.role == ADMIN
    return {
        "args": list(asked.run_args),
        "dir": asked.working_dir,
        "env": dict(asked.env) if is_theirs else dict.fromkeys(asked.env, "…"),
        "kinds": list(asked.kinds),
        "data": list(asked.data),
        "time_limit_seconds": asked.time_limit_seconds,
        "is_preemptible": asked.is_preemptible,
        "max_preemptions": min(budgets, default=None),
        "asked_memory_bytes": asked.memory_bytes,
        "stop_seconds": job.stop_seconds,
        "attempts": job.token,
        "worker_seconds": job.service_seconds,
    }


def tell_learned(prospect: Prospect | None, predictions: Sequence[Prediction]) -> dict[str, Any]:
    """How far off what is expected of a job may be and where it is from, and how well its speed was predicted."""
    from shoal.observe.predictions import judge

    known = prospect or Prospect()
    accuracy = judge(predictions)
    return {
        "left_spread": known.spread if known.left_seconds is not None else None,
        "left_told_by": known.told_by,
        "pause_seconds": known.stop_seconds,
        "predictions": [msgspec.to_builtins(made) | {"error": made.error} for made in predictions[-MAX_PREDICTIONS:]],
        "accuracy": None if accuracy is None else msgspec.to_builtins(accuracy),
    }


def tell_nodes(
    nodes: Iterable[Node], machines: Mapping[str, Node], jobs: Iterable[Job], drained: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Every node with what of it is reserved, and for which jobs."""
    used: dict[str, list[tuple[Job, int]]] = {}
    for job in jobs:
        for name, workers in job.allocation.items():
            used.setdefault(name, []).append((job, workers))
    return [_tell_node(node, machines.get(node.name, node), used.pop(node.name, []), drained) for node in nodes] + [
        {**_tell_node(Node(name=name, cores=0.0), Node(name=name, cores=0.0), held, drained), "is_alive": False}
        for name, held in used.items()
    ]


def _tell_node(node: Node, machine: Node, held: list[tuple[Job, int]], drained: Mapping[str, str]) -> dict[str, Any]:
    cores = sum(job.asked.cores * workers for job, workers in held)
    memory = sum(job.memory_bytes * workers for job, workers in held)
    gpus = sum(job.asked.gpus * workers for job, workers in held)
    return {
        "node": node.name,
        "is_alive": True,
        "kind": node.kind,
        "partition": node.partition,
        "is_draining": node.is_draining,
        "why_draining": drained.get(node.name, ""),
        "cores": node.cores,
        "free_cores": node.cores - cores,
        "memory_bytes": node.memory_bytes,
        "free_memory_bytes": node.memory_bytes - memory,
        "gpus": node.gpus,
        "free_gpus": node.gpus - gpus,
        "machine_cores": machine.cores,
        "machine_memory_bytes": machine.memory_bytes,
        "jobs": [{"job": job.number, "owner": job.owner, "workers": workers} for job, workers in held],
    }


def tell_people(
    people: Mapping[str, Person], tokens: Iterable[Token], jobs: Iterable[Job], now: float, who: Person
) -> list[dict[str, Any]]:
    """People with what they have in the queue. Of tokens, owners and admins are told the names."""
    given: dict[str, list[Token]] = {}
    for token in tokens:
        given.setdefault(token.person, []).append(token)
    jobs = list(jobs)
    return [
        {
            "person": person.name,
            "role": person.role,
            "account": person.account,
            "max_jobs": person.max_jobs,
            "max_workers": person.max_workers,
            "num_jobs": sum(job.owner == person.name for job in jobs),
            "num_workers": sum(job.num_reserved for job in jobs if job.owner == person.name),
            "tokens": [
                {
                    "id": token.id,
                    "made": token.made_wall,
                    "ends_in_seconds": None if token.ends_at is None else token.ends_at - now,
                    "is_revoked": token.is_revoked,
                }
                for token in given.get(person.name, ())
                if who.role == ADMIN or who.name == person.name
            ],
        }
        for person in people.values()
    ]


def tell_shares(
    rows: Iterable[Mapping[str, Any]],
    jobs: Iterable[Job],
    shares: Mapping[str, float],
    now: float,
    half_life_seconds: float,
) -> list[dict[str, Any]]:
    """Who used how much, lately and in all, and has how many workers now. What runs now is counted to this moment."""
    found: dict[tuple[str, str], dict[str, Any]] = {}

    def row_of(person: str, account: str) -> dict[str, Any]:
        fresh = {"person": person, "account": account, "worker_seconds": 0.0, "lately": 0.0, "num_workers": 0}
        return found.setdefault((person, account), fresh)

    for row in rows:
        told = row_of(row["person"], row["account"])
        told["worker_seconds"] += row["worker_seconds"]
        told["lately"] += decay(row["lately"], now - row["at"], half_life_seconds)
    for job in jobs:
        told = row_of(job.owner, job.account)
        told["num_workers"] += job.num_reserved
        since = max(0.0, now - job.accrued_at) * job.size if job.is_active else 0.0
        told["worker_seconds"] += since
        told["lately"] += since
    total = sum(row["lately"] for row in found.values())
    return [
        {
            **row,
            "person": clean(row["person"]),
            "weight": shares.get(row["account"], 1.0),
            "part": row["lately"] / total if total else 0.0,
        }
        for row in sorted(found.values(), key=lambda row: (-row["lately"], row["person"], row["account"]))
    ]


def decay(amount: float, seconds: float, half_life_seconds: float) -> float:
    """What is left of an amount after a while: half of it after each half-life."""
    return float(amount * 0.5 ** (max(seconds, 0.0) / half_life_seconds))

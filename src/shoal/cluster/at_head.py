"""What Ray calls on the head for those who submit runs from other machines.

The agent that takes submissions speaks plain HTTP, and its token would travel with it. So nobody speaks to it from
another machine: a task of Ray's does, on the head itself, and Ray carries question and answer, encrypted where it is.
"""

import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from shoal.cluster.versions import versions_here
from shoal.engine.env import shoal_home
from shoal.observe.ps import list_rows, plain_row


def facts_of_head(name: str, folder: str | None) -> dict[str, Any]:
    """What a submitter should know: our interpreter, our versions, and whether there is a run of that name."""
    usual = os.path.join(shoal_home(), "runs", name)
    has_run = any(os.path.lexists(os.path.join(each, "run.json")) for each in (usual, folder or usual))
    return {"python": sys.executable, "versions": versions_here(), "has_run": has_run, "run": folder or usual}


def rows_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What the run folders here tell of these runs."""
    wanted = set(names)
    return {row.run.name: plain_row(row) for row in list_rows(shoal_home(), time.time()) if row.run.name in wanted}


def submit_here(agent: str, job: dict[str, Any]) -> str:
    """Hand a job to Ray's agent on this machine; returns its id."""
    request = import_module("ray.dashboard.modules.job.common").JobSubmitRequest(**job)

    async def ask(client: Any) -> str:
        return str((await client.submit_job_internal(request)).submission_id)

    return str(_with_client(agent, ask))


def stop_here(agent: str, job_id: str) -> bool:
    """Have a job end; returns whether it was running."""

    async def ask(client: Any) -> bool:
        return bool((await client.stop_job_internal(job_id)).stopped)

    return bool(_with_client(agent, ask))


def logs_here(agent: str, job_id: str) -> str:
    """What a job has printed so far."""

    async def ask(client: Any) -> str:
        return str((await client.get_job_logs_internal(job_id)).logs)

    return str(_with_client(agent, ask))


def tail_here(agent: str, job_id: str) -> Iterator[str]:
    """What a job has printed and prints, until it ends."""
    loop = asyncio.new_event_loop()
    client = loop.run_until_complete(_open(agent))
    try:
        parts = client.tail_job_logs(job_id)
        while True:
            try:
                yield loop.run_until_complete(anext(parts))
            except StopAsyncIteration:
                return
    finally:
        loop.run_until_complete(client.close())
        loop.close()


def _with_client(agent: str, ask: Any) -> Any:
    async def run() -> Any:
        client = await _open(agent)
        try:
            return await ask(client)
        finally:
            await client.close()

    return asyncio.run(run())


async def _open(agent: str) -> Any:
    return import_module("ray.dashboard.modules.job.job_head").JobAgentSubmissionClient(agent)

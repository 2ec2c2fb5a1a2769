"""News for pages that are open, as server-sent events: which parts of a run have changed."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence

from shoal.dash.index import RunIndex
from shoal.dash.opened import Signature, sign
from shoal.observe.runs import read_run

LOOK_SECONDS = 0.15
LIST_LOOKS = 4
JOBS_LOOKS = 6
PING_LOOKS = 100
MAX_STREAMS = 64


class Streams:
    """Counts who listens. With nobody there, nothing is looked at."""

    def __init__(self, index: RunIndex, is_over: Callable[[], bool], jobs_version: Callable[[], str]) -> None:
        self._index = index
        self._jobs_version = jobs_version
        self._is_over = is_over
        self.num_open = 0

    async def news(self, paths: Sequence[tuple[str, str]], *, has_list: bool, has_jobs: bool) -> AsyncIterator[str]:
        """What changes in runs, each an (id, path), in the list and in the queue, until nobody listens any more."""
        self.num_open += 1
        try:
            signatures = {run_id: await asyncio.to_thread(_sign, path) for run_id, path in paths}
            version, looks = self._index.version, 0
            queue = await asyncio.to_thread(self._jobs_version) if has_jobs else ""
            # Whoever reads after this hears of everything that changes then.
            yield message("hello", {})
            while not self._is_over():
                await asyncio.sleep(LOOK_SECONDS)
                looks += 1
                for run_id, path in paths:
                    before, signatures[run_id] = signatures[run_id], await asyncio.to_thread(_sign, path)
                    if changed := differing(before, signatures[run_id]):
                        yield message("run", {"id": run_id, "changed": changed})
                if looks % LIST_LOOKS == 0 and has_list:
                    await asyncio.to_thread(self._index.refresh, LOOK_SECONDS)
                    if self._index.version != version:
                        version = self._index.version
                        yield message("runs", {"version": version})
                if looks % JOBS_LOOKS == 0 and has_jobs:
                    before_jobs, queue = queue, await asyncio.to_thread(self._jobs_version)
                    if queue != before_jobs:
                        yield message("jobs", {})
                if looks % PING_LOOKS == 0:
                    yield ": still there\n\n"
        finally:
            self.num_open -= 1


def _sign(path: str) -> Signature:
    return sign(read_run(path), path)


def differing(before: Signature, after: Signature) -> list[str]:
    """The parts that changed."""
    return sorted(part for part in {*before, *after} if before.get(part) != after.get(part))


def message(kind: str, data: object) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"

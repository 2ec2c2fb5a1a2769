"""News for pages that are open, as server-sent events: which parts of a run have changed."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.dash.index import RunIndex
from shoal.dash.opened import Signature, sign
from shoal.observe.runs import read_run

LOOK_SECONDS = 0.15
LIST_LOOKS = 4
SYSTEM_LOOKS = 4
JOBS_LOOKS = 6
PING_LOOKS = 100
MAX_STREAMS = 64


@dataclass(frozen=True, slots=True)
class _Watch:
    """Something that has news when its version differs from before; it is asked for it every so many looks."""

    num_looks: int
    version: Callable[[], Any]


class Streams:
    """Counts who listens. With nobody there, nothing is looked at."""

    def __init__(self, index: RunIndex, is_over: Callable[[], bool], jobs_version: Callable[[], str]) -> None:
        self._index = index
        self._is_over = is_over
        self._watched = {
            "list": _Watch(LIST_LOOKS, self._list_version),
            "system": _Watch(SYSTEM_LOOKS, self._system_version),
            "jobs": _Watch(JOBS_LOOKS, jobs_version),
        }
        self.num_open = 0

    async def news(self, paths: Sequence[tuple[str, str]], also: Collection[str] = ()) -> AsyncIterator[str]:
        """What changes in runs, each an (id, path), until nobody listens any more; `also` is what else is watched.

        That may be the list of runs (`list`), the machines of all runs that go on (`system`) and the queue (`jobs`).
        """
        self.num_open += 1
        try:
            signatures = {run_id: await asyncio.to_thread(_sign, path) for run_id, path in paths}
            watched = {name: watch for name, watch in self._watched.items() if name in also}
            versions = {name: await asyncio.to_thread(watch.version) for name, watch in watched.items()}
            looks = 0
            # Whoever reads after this hears of everything that changes then.
            yield message("hello", {})
            while not self._is_over():
                await asyncio.sleep(LOOK_SECONDS)
                looks += 1
                for run_id, path in paths:
                    before, signatures[run_id] = signatures[run_id], await asyncio.to_thread(_sign, path)
                    if changed := differing(before, signatures[run_id]):
                        yield message("run", {"id": run_id, "changed": changed})
                for name, watch in watched.items():
                    if looks % watch.num_looks == 0:
                        known, versions[name] = versions[name], await asyncio.to_thread(watch.version)
                        if versions[name] != known:
                            yield message(name, {})
                if looks % PING_LOOKS == 0:
                    yield ": still there\n\n"
        finally:
            self.num_open -= 1

    def _list_version(self) -> Any:
        self._index.refresh(LOOK_SECONDS)
        return self._index.version

    def _system_version(self) -> Any:
        self._index.refresh(LOOK_SECONDS)
        return {one.id: sign(None, one.row.run.path).get("system") for one in self._index.running()}


def _sign(path: str) -> Signature:
    return sign(read_run(path), path)


def differing(before: Signature, after: Signature) -> list[str]:
    """The parts that changed."""
    return sorted(part for part in {*before, *after} if before.get(part) != after.get(part))


def message(kind: str, data: object) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"

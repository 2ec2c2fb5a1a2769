"""The runs there are, kept in memory: a list of ten thousand is looked through again in milliseconds."""

import hashlib
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.observe.clean import clean
from shoal.observe.ps import Row, row_of
from shoal.observe.runs import read_run

FULL_SECONDS = 5.0
MAX_PAGE = 500
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")

Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A run in the list; `stamp` changes when its run.json does."""

    id: str
    row: Row
    stamp: Stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which part of the list is wanted, and in which order."""

    search: str = ""
    status: str = ""
    sort: str = "created"
    is_ascending: bool = False
    offset: int = 0
    limit: int = 100


class RunIndex:
    """All runs of a home. `version` grows with every change; `num_read` of `num_found` tells how far a look is.

    `refresh` may be called from any thread, one at a time does the work. What has ended is read again only when its
    run.json changes; what runs is read at every look.
    """

    def __init__(self, home: str, now: Callable[[], float] = time.time) -> None:
        self.version = 0
        self.num_read = self.num_found = 0
        self._folder = os.path.join(home, "runs")
        self._now = now
        self._listed: dict[str, Listed] = {}
        self._names: dict[str, str] = {}
        self._looking = threading.Lock()
        self._looked_at = -math.inf
        self._full_at = -math.inf

    def refresh(self, max_age_seconds: float = 0.0) -> None:
        """Look again, unless a look began that short a time before this call, or since."""
        asked_at = time.monotonic()
        with self._looking:
            if self._looked_at <= asked_at - max_age_seconds:
                self._looked_at = time.monotonic()
                self._look(is_full=self._looked_at - self._full_at >= FULL_SECONDS)

    def find(self, run_id: str) -> Listed | None:
        """The run with this id. The id is only looked up: it never becomes part of a path."""
        name = self._names.get(run_id)
        return self._listed.get(name) if name is not None else None

    def running(self) -> list[Listed]:
        """The runs that go on, the newest first."""
        running = [one for one in list(self._listed.values()) if one.row.run.status == "running"]
        return sorted(running, key=lambda one: _SORTS["created"](one.row), reverse=True)

    def page(self, query: Query) -> dict[str, Any]:
        """A part of the list, as JSON values."""
        listed = list(self._listed.values())
        found = [one for one in listed if _fits(one.row, query)]
        found.sort(key=lambda one: _SORTS[query.sort](one.row), reverse=not query.is_ascending)
        if query.sort != "created":
            found.sort(key=lambda one: _is_missing(_SORTS[query.sort](one.row)))
        counts: dict[str, int] = {}
        for one in listed:
            counts[one.row.run.status] = counts.get(one.row.run.status, 0) + 1
        return {
            "version": self.version,
            "total": len(listed),
            "matching": len(found),
            "reading": [self.num_read, self.num_found] if self.num_read < self.num_found else None,
            "statuses": counts,
            "offset": query.offset,
            "rows": [plain(one) for one in found[query.offset : query.offset + min(query.limit, MAX_PAGE)]],
        }

    def _look(self, *, is_full: bool) -> None:
        names = self._newest_first(is_full=is_full)
        gone = self._listed.keys() - set(names)
        for name in gone:
            self._names.pop(run_id(name), None)
            del self._listed[name]
        self.version += bool(gone)
        due = [name for name in names if is_full or self._is_due(name)]
        # Only the first look takes long enough for anybody to ask how far it is.
        self.num_found, self.num_read = len(due), 0
        for name in due:
            self._read(name)
            self.num_read += 1
        if is_full:
            self._full_at = time.monotonic()

    def _newest_first(self, *, is_full: bool) -> list[str]:
        """Names of folders; in a full look those that changed last come first, so that they are soon there."""
        try:
            with os.scandir(self._folder) as entries:
                found = [entry.name for entry in entries]
        except OSError:
            return []
        if is_full and not self._listed:
            found.sort(key=lambda name: _stamp(os.path.join(self._folder, name))[0], reverse=True)
        return found

    def _is_due(self, name: str) -> bool:
        known = self._listed.get(name)
        return known is None or known.row.run.status == "running"

    def _read(self, name: str) -> None:
        path = os.path.join(self._folder, name)
        known, stamp = self._listed.get(name), _stamp(os.path.join(path, "run.json"))
        if known is not None and known.stamp == stamp and known.row.run.status != "running":
            return
        run = read_run(path) if stamp[0] else None
        if run is None:
            return
        # Whose facts are needed reads them again: ten thousand of them would take forty megabytes.
        row = row_of(replace(run, name=name, facts={}), self._now())
        if known is None or _without_time(known.row) != _without_time(row):
            self.version += 1
        self._listed[name] = Listed(id=run_id(name), row=row, stamp=stamp)
        self._names[run_id(name)] = name


def run_id(name: str) -> str:
    """What a run is called in addresses: its name where that is plain, else a digest of it."""
    if _PLAIN.fullmatch(name):
        return name
    return "~" + hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:20]


def plain(one: Listed) -> dict[str, Any]:
    """A run of the list as JSON values that are safe to show."""
    run = one.row.run
    return {
        "id": one.id,
        "name": clean(run.name.encode("utf-8", "replace").decode()),
        "status": clean(run.status),
        "exit_code": run.exit_code,
        "created": run.created,
        "ended": run.ended,
        "seconds": one.row.seconds,
        "workers": run.num_workers,
        "min_workers": run.min_workers,
        "max_workers": run.max_workers,
        "step": one.row.step,
        "loss": one.row.loss,
        "items": one.row.items,
        "command": clean(run.command.encode("utf-8", "replace").decode()),
        "host": clean(run.host),
    }


def _stamp(path: str) -> Stamp:
    try:
        facts = os.stat(path)
    except OSError:
        return 0, 0, 0
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


def _without_time(row: Row) -> Row:
    return replace(row, seconds=None)


def _fits(row: Row, query: Query) -> bool:
    if query.status and row.run.status != query.status:
        return False
    words = query.search.casefold().split()
    text = f"{row.run.name} {row.run.command} {row.run.status}".casefold() if words else ""
    return all(word in text for word in words)


def _is_missing(value: Any) -> bool:
    return value is None or value != value or value == -math.inf


_SORTS: Mapping[str, Callable[[Row], Any]] = {
    "created": lambda row: (row.run.created, row.run.name),
    "name": lambda row: row.run.name,
    "status": lambda row: row.run.status,
    "workers": lambda row: _or_least(row.run.num_workers),
    "seconds": lambda row: _or_least(row.seconds),
    "step": lambda row: _or_least(row.step),
    "loss": lambda row: _or_least(row.loss),
    "command": lambda row: row.run.command,
}
SORTS: Iterable[str] = _SORTS.keys()


def _or_least(value: float | None) -> float:
    return -math.inf if value is None or value != value else value

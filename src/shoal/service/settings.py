"""`service.toml`: which policy, which partitions with which caps, whose shares, and what nodes may be used for."""

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.engine.fit import parse_bytes
from shoal.place.cluster import CLASSES, Node, Partition
from shoal.service.growing import Growth
from shoal.spec.errors import UserError
from shoal.verb_parser import unknown

FILE = "service.toml"
MOST_GROWTH = 1000
"""A policy looks at each machine that may come."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """What jobs may use of a node, where that is not all of it; and which partition it is in."""

    cores: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    gpus: int | None = None
    partition: str = "default"
    kind: str | None = None
    holds: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the file says. All of it can be left out, and so can the file."""

    policy: str = "fifo"
    round_seconds: float = 60.0
    grace_seconds: float = 30.0
    is_warm: bool = True
    usage_half_life_seconds: float = 7 * 86400.0
    learn_seconds: float = 30.0
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    nodes: Mapping[str, NodeLimits] = field(default_factory=dict)
    ray_address: str = ""
    growth: Mapping[str, Growth] = field(default_factory=dict)

    @property
    def partition_names(self) -> list[str]:
        return sorted({"default", *self.partitions, *(limits.partition for limits in self.nodes.values())})


def read_settings(home: str, policies: Callable[[], Mapping[str, object]]) -> Settings:
    """The settings of a service; where something is wrong with them, a UserError says in which line."""
    path = os.path.join(home, FILE)
    try:
        with open(path, "rb") as file:
            text = file.read().decode()
    except FileNotFoundError:
        return Settings()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path} cannot be read.", why=why) from None
    return parse_settings(text, path, policies)


def parse_toml(text: str, path: str) -> dict[str, Any]:
    """TOML, or an error with the line and the column."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        place = f"{path}:{found[1]}:{found[2]}" if found else path
        why = re.sub(r" \(at .*\)$", "", str(error))
        raise UserError(f"{path} is not TOML.", where=place, why=why, hint="docs/service.md has an example") from None


def parse_settings(text: str, path: str, policies: Callable[[], Mapping[str, object]]) -> Settings:
    table = _Table(parse_toml(text, path), path, "")
    policy = table.text("policy", "fifo")
    if policy != "fifo" and policy not in policies():
        raise unknown(policy, f"policy for {path}:", policies(), f"use one of: {', '.join(policies())}")
    found = Settings(
        policy=policy,
        round_seconds=table.duration("round", 60.0),
        grace_seconds=table.duration("grace", 30.0),
        is_warm=table.flag("warm", True),
        usage_half_life_seconds=table.duration("usage_half_life", 7 * 86400.0),
        learn_seconds=table.duration("learn", 30.0),
        partitions={name: _partition(name, each) for name, each in table.tables("partitions")},
        shares=table.numbers("shares"),
        nodes={name: _limits(each) for name, each in table.tables("nodes")},
        ray_address=_ray_address(table),
        growth={name: _growth(name, each) for name, each in table.tables("grows")},
    )
    table.check_all_read()
    if found.growth and not found.ray_address:
        raise table.wrong("grows", "only a Ray cluster grows: `ray` is to be its address")
    return found


def _partition(name: str, table: "_Table") -> Partition:
    classes = table.texts("classes", CLASSES)
    for each in classes:
        if each not in CLASSES:
            raise unknown(each, f"class for partitions.{name}:", CLASSES, f"use some of: {', '.join(CLASSES)}")
    found = Partition(
        name=name,
        lends=table.flag("lends", True),
        max_workers_per_user=table.count("max_workers_per_user"),
        max_workers_per_job=table.count("max_workers_per_job"),
        max_user_share=table.number("max_user_share", 1.0),
        max_preemptions=table.count("max_preemptions"),
        classes=frozenset(classes),
    )
    table.check_all_read()
    return found


def _limits(table: "_Table") -> NodeLimits:
    cores = table.number("cores", -1.0)
    found = NodeLimits(
        cores=None if cores < 0 else cores,
        memory_bytes=table.size("memory"),
        disk_bytes=table.size("disk"),
        gpus=table.count("gpus"),
        partition=table.text("partition", "default"),
        kind=table.text("kind", "") or None,
        holds=frozenset(os.path.normpath(path) for path in table.texts("holds", ())),
    )
    table.check_all_read()
    return found


def _ray_address(table: "_Table") -> str:
    address = table.text("ray", "")
    host, _, port = address.rpartition(":")
    if address and not (host and port.isascii() and port.isdecimal() and int(port) < 65536):
        raise table.wrong("ray", "it is to be the address of a Ray cluster, HOST:PORT")
    return address


def _growth(name: str, table: "_Table") -> Growth:
    gpus = table.count("gpus") or 0
    node = Node(
        name=name,
        kind=table.text("kind", "gpu" if gpus else "cpu"),
        cores=table.number("cores", 0.0),
        memory_bytes=table.size("memory") or 0,
        gpus=gpus,
        partition=table.text("partition", "default"),
    )
    found = Growth(node=node, most=table.count("most") or 0)
    if not (node.cores or node.gpus) or not found.most or found.most > MOST_GROWTH:
        raise table.wrong("most", f"a group of machines has cores or gpus, and `most` of 1 to {MOST_GROWTH:,}")
    table.check_all_read()
    return found


def apply_limits(node: Node, settings: Settings, drained: Mapping[str, str]) -> Node:
    """A machine as jobs may use it. Pure."""
    limits = settings.nodes.get(node.name, NodeLimits())
    return Node(
        name=node.name,
        kind=limits.kind or node.kind,
        cores=node.cores if limits.cores is None else min(node.cores, limits.cores),
        memory_bytes=min(node.memory_bytes, limits.memory_bytes or node.memory_bytes),
        gpus=node.gpus if limits.gpus is None else min(node.gpus, limits.gpus),
        disk_bytes=min(node.disk_bytes or limits.disk_bytes, limits.disk_bytes)
        if limits.disk_bytes
        else node.disk_bytes,
        partition=limits.partition,
        holds=node.holds | limits.holds,
        is_draining=node.is_draining or node.name in drained,
    )


def parse_duration(text: str, what: str = "a duration") -> float:
    """Seconds, from `90`, `30s`, `45m`, `2h`, `1d`, `1:30:00`."""
    try:
        if ":" in text:
            parts = [float(part) for part in text.split(":")]
            seconds = sum(part * 60.0**place for place, part in enumerate(reversed(parts)))
            is_sound = len(parts) <= 3 and all(part >= 0 for part in parts)
        else:
            unit = _UNITS.get(text[-1:].lower())
            seconds = float(text[:-1] if unit else text) * (unit or 1.0)
            is_sound = True
    except ValueError:
        is_sound, seconds = False, 0.0
    if not is_sound or not 0 < seconds < 1e9:
        raise UserError(f"{text[:40]!r} is not {what}.", hint="write it like 90s, 45m, 2h or 1d")
    return seconds


class _Table:
    """A table of the file that knows its place, and what of it was asked for."""

    def __init__(self, values: Mapping[str, Any], path: str, place: str) -> None:
        self._values, self._path, self._place = values, path, place
        self._read: set[str] = set()

    def _get(self, name: str, kinds: tuple[type, ...], what: str, default: Any) -> Any:
        self._read.add(name)
        value = self._values.get(name, default)
        if value is not default and (not isinstance(value, kinds) or (bool not in kinds and isinstance(value, bool))):
            raise self.wrong(name, f"it is to be {what}")
        return value

    def wrong(self, name: str, why: str) -> UserError:
        shown = f"{self._place}{name} = {self._values.get(name)!r}"[:120]
        return UserError(f"{self._path}: {shown} cannot be used.", why=why, hint="docs/service.md has an example")

    def text(self, name: str, default: str) -> str:
        return str(self._get(name, (str,), "a text", default))

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._get(name, (bool,), "true or false", default))

    def number(self, name: str, default: float) -> float:
        value = float(self._get(name, (int, float), "a number", default))
        if value != default and not 0 <= value < 1e12:
            raise self.wrong(name, "it is to be a number of 0 or more")
        return value

    def count(self, name: str) -> int | None:
        value = self._get(name, (int,), "a whole number", None)
        if value is not None and value < 0:
            raise self.wrong(name, "it is to be 0 or more")
        return value  # type: ignore[no-any-return]

    def size(self, name: str) -> int | None:
        text = self.text(name, "")
        try:
            return parse_bytes(text) if text else None
        except UserError:
            raise self.wrong(name, 'it is to be a size such as "48G"') from None

    def duration(self, name: str, default: float) -> float:
        value = self._get(name, (int, float, str), 'a duration such as "2h"', default)
        return parse_duration(str(value), f"a duration for {self._place}{name} of {self._path}")

    def texts(self, name: str, default: tuple[str, ...]) -> tuple[str, ...]:
        value = self._get(name, (list,), "a list of texts", default)
        if not all(isinstance(each, str) for each in value):
            raise self.wrong(name, "it is to be a list of texts")
        return tuple(value)

    def numbers(self, name: str) -> dict[str, float]:
        table = self._get(name, (dict,), "a table of numbers", {})
        inner = _Table(table, self._path, f"{self._place}{name}.")
        return {key: inner.number(key, 1.0) for key in table}

    def tables(self, name: str) -> list[tuple[str, "_Table"]]:
        found = self._get(name, (dict,), "a table", {})
        for key, value in found.items():
            if not isinstance(value, dict):
                raise UserError(f"{self._path}: {name}.{key} cannot be used.", why="it is to be a table")
        return [(key, _Table(value, self._path, f"{name}.{key}.")) for key, value in found.items()]

    def check_all_read(self) -> None:
        for name in self._values:
            if name not in self._read:
                error = unknown(name, f"setting in {self._path}:", sorted(self._read), "docs/service.md lists them")
                raise error

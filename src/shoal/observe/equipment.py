"""What each worker of a run computed with, where they are not all alike: device, precision, threads, memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.observe.clean import one_line
from shoal.spec.event import Event

KINDS = ("worker_settings", "piece")
"""The events this is told by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equipment:
    """A worker's own. `piece` is how many samples it computes at a time, None: as many as it likes.

    `peak_bytes` is the most memory it was seen to use with such pieces, where that was measured.
    """

    rank: int
    device: str
    precision: str
    threads: int
    memory_bytes: int | None
    memory_from: str
    piece: int | None
    peak_bytes: int | None = None


def find_equipment(events: Iterable[Event]) -> tuple[Equipment, ...]:
    """The newest of each worker; nothing where all are alike and none is bounded by its memory."""
    found: dict[int, Equipment] = {}
    for event in events:
        if event.rank is None or event.kind not in KINDS:
            continue
        if event.kind == "worker_settings":
            found[event.rank] = _read(event.rank, event.data)
        elif event.rank in found:
            piece, peak = _whole(event.data.get("samples")), _whole(event.data.get("peak_bytes"))
            # The peak is that of pieces as they were before.
            peak = peak if piece == event.data.get("before") else None
            found[event.rank] = replace(found[event.rank], piece=piece, peak_bytes=peak)
    return tuple(found[rank] for rank in sorted(found)) if is_worth_telling(list(found.values())) else ()


def is_worth_telling(found: Sequence[Equipment]) -> bool:
    kinds = {(each.device.partition(":")[0], each.precision, each.threads) for each in found}
    return len(kinds) > 1 or any(each.piece is not None for each in found)


def _read(rank: int, data: Mapping[str, Any]) -> Equipment:
    return Equipment(
        rank=rank,
        device=one_line(data.get("device", "")),
        precision=one_line(data.get("precision", "")),
        threads=_whole(data.get("threads")) or 0,
        memory_bytes=_whole(data.get("memory_bytes")),
        memory_from=one_line(data.get("memory_from") or ""),
        piece=_whole(data.get("piece")),
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def write_equipment(found: Sequence[Equipment]) -> Iterator[str]:
    """A table, one line a worker."""
    yield f"{'rank':6}{'device':9}{'precision':11}{'threads':9}{'memory':11}samples at a time"
    for each in found:
        memory = "" if each.memory_bytes is None else _mb(each.memory_bytes)
        yield (
            f"{each.rank:<6}{each.device:9}{each.precision:11}{each.threads:<9}{memory:11}"
            + ("all of its share" if each.piece is None else f"{each.piece} ({_why(each)})")
        )


def _why(each: Equipment) -> str:
    peak = "" if each.peak_bytes is None else f", {_mb(each.peak_bytes)} used"
    return f"{each.memory_from}{peak}"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MB"

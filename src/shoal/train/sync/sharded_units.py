"""Parameters that travel together, and which part of them each worker keeps."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.train.flat import CHUNK, PARAMETER_ALIGNMENT, Chunk, FlatLayout, round_up


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of the parameter with this number; they are at `at` of what this worker keeps."""

    index: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Some parameters in one flat buffer, of which each rank keeps an equal part.

    `indices` are the parameters' numbers and `offsets` their places in the buffer; `at` is where this worker's part
    is in all that it keeps. `home` names the module whose calls need them: "" if that is not known.
    """

    number: int
    home: str
    indices: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int
    part: int
    at: int
    segments: tuple[Segment, ...]
    chunks: tuple[Chunk, ...]


def plan_units(
    layout: FlatLayout, blocks: Sequence[tuple[str, Sequence[int]]], rank: int, size: int, at: int = 0
) -> list[Unit]:
    """Units of (home, numbers of parameters), as rank of so many sees them; its parts are kept from `at` on."""
    units: list[Unit] = []
    for number, (home, indices) in enumerate(blocks):
        unit = _plan_unit(layout, number, home, indices, at, rank, size)
        units.append(unit)
        at += unit.part
    return units


def _plan_unit(
    layout: FlatLayout, number: int, home: str, indices: Sequence[int], at: int, rank: int, size: int
) -> Unit:
    # Parameters of one group of the optimizer are neighbours, so that few chunks are needed.
    indices = sorted(indices, key=lambda index: group_of(layout, index))
    offsets: list[int] = []
    end = 0
    for index in indices:
        offsets.append(end)
        end = round_up(end + layout.sizes[index], PARAMETER_ALIGNMENT)
    part = round_up(-(-end // size), PARAMETER_ALIGNMENT)
    mine = range(rank * part, (rank + 1) * part)
    segments = []
    for index, offset in zip(indices, offsets, strict=True):
        low, high = max(offset, mine.start), min(offset + layout.sizes[index], mine.stop)
        if low < high:
            segments.append(Segment(index, low - offset, high - offset, at + low - mine.start))
    return Unit(
        number=number,
        home=home,
        indices=tuple(indices),
        offsets=tuple(offsets),
        size=part * size,
        part=part,
        at=at,
        segments=tuple(segments),
        chunks=tuple(_cut_chunks(layout, segments)),
    )


def _cut_chunks(layout: FlatLayout, segments: Sequence[Segment]) -> list[Chunk]:
    """What the optimizer works on: neighbours of one group together, none too large. Padding belongs to nobody."""
    chunks: list[Chunk] = []
    for segment in segments:
        group, start = group_of(layout, segment.index), segment.at
        stop = start + segment.stop - segment.start
        while start < stop:
            last = chunks[-1] if chunks else None
            if last is not None and last.stop == start and last.group == group and last.stop - last.start < CHUNK:
                end = min(stop, last.start + CHUNK)
                chunks[-1] = Chunk(start=last.start, stop=end, group=group)
            else:
                end = min(stop, start + CHUNK)
                chunks.append(Chunk(start=start, stop=end, group=group))
            start = end
    return chunks


def group_of(layout: FlatLayout, index: int) -> int:
    """The optimizer's group that a parameter belongs to."""
    starts = [chunk.start for chunk in layout.chunks]
    return layout.chunks[max(0, bisect_right(starts, layout.offsets[index]) - 1)].group


def cut_by_size(sizes: Sequence[int], order: Sequence[int], bucket: int) -> list[tuple[str, list[int]]]:
    """Neighbours in this order, up to so many elements together; one that is larger is by itself."""
    blocks: list[tuple[str, list[int]]] = []
    room = 0
    for index in order:
        if not blocks or sizes[index] > room:
            blocks.append(("", []))
            room = bucket
        blocks[-1][1].append(index)
        room -= sizes[index]
    return blocks

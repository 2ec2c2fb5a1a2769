"""What is usually asked for, and how much of a node's free GPUs is lost to it: what placement tries not to add to."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.place.cluster import Node
from shoal.place.space import MILLI, Ints, Need, Rooms, State

Floats = NDArray[np.float64]
Typical = tuple[int, tuple[tuple[float, int, int, int, int], ...]]
"""A size of device, and the needs that ask for such: their part, cores, memory, disk and number of devices."""

POPULAR = 0.95
"""Rare needs are left out: what one job in a hundred asks for says little about where the others should go."""
MAX_TYPICAL = 64


@dataclass(frozen=True, slots=True)
class Mix:
    """Needs with GPUs, by how often they come. Made of the jobs that are there now, waiting and running.

    `parts` sum to one. `steps` are the sizes of device that needs can use, `step_of` which of them each has. `usual`
    is how many cores (thousandths) and bytes of memory go with a thousandth of a GPU on average. `scarce` says
    of each kind of node how much of it is asked for by name, beside what is asked for in general.
    """

    parts: Floats
    cores: Ints
    memory: Ints
    disk: Ints
    whole: Ints
    steps: Ints
    step_of: Ints
    on_kind: NDArray[np.bool_]
    usual: tuple[float, float]
    scarce: Floats
    by_kind: tuple[tuple["Typical", ...], ...]

    def lost_in(self, state: State) -> float:
        """The same as `lost`, for one node: less than a tenth of the time."""
        cores, memory, disk, gpus = state[1], state[2], state[3], state[4:]
        free = sum(gpus)
        used = 0.0
        for size, needs in self.by_kind[state[0]]:
            # From the fullest to the emptiest: whatever comes after the first that is large enough is so, too.
            first = bisect_left(gpus, size)
            count = len(gpus) - first
            if not count:
                continue
            usable = sum(gpus[first:])
            for part, each_cores, each_memory, each_disk, whole in needs:
                if count >= whole and cores >= each_cores and memory >= each_memory and disk >= each_disk:
                    used += part * usable
        bare = 0.0
        for have, usual in ((cores, self.usual[0]), (memory, self.usual[1])):
            if usual > 0:
                bare = max(bare, free - have / usual)
        return free - used + bare

    def lost(self, rooms: Rooms) -> Floats:
        """Thousandths of GPUs on each node that are free and that the needs of this mix could not use.

        Averaged over the needs: all that is free where the need has no room, else the devices too small for it. And
        what is left without cores or memory if the node goes on being filled with what is usual.
        """
        free = rooms.gpu.sum(axis=1)
        big = rooms.gpu[:, None, :] >= self.steps[None, :, None]
        usable = np.where(big, rooms.gpu[:, None, :], 0).sum(axis=2)[:, self.step_of]
        fits = big.sum(axis=2)[:, self.step_of] >= self.whole
        fits &= self.on_kind[rooms.kind]
        for have, wanted in ((rooms.cores, self.cores), (rooms.memory, self.memory), (rooms.disk, self.disk)):
            fits &= have[:, None] >= wanted
        bare = np.zeros(len(free))
        for have, each in zip((rooms.cores, rooms.memory), self.usual, strict=True):
            if each > 0:
                bare = np.maximum(bare, free - have / each)
        return np.asarray(free - (usable * fits) @ self.parts + bare, np.float64)


def mix_of(counts: Mapping[Need, int], nodes: Sequence[Node], kinds: Sequence[str]) -> Mix | None:
    """The mix of so many workers of each need; None where nobody asks for GPUs. `kinds` are those of the nodes."""
    asked = sorted(((count, need) for need, count in counts.items() if need.gpu and count), key=_by_count)
    total = sum(count for count, _ in asked)
    if not total:
        return None
    typical, covered = [], 0
    for count, need in asked[:MAX_TYPICAL]:
        if covered >= POPULAR * total:
            break
        typical.append((count, need))
        covered += count
    needs = [need for _, need in typical]
    sizes = [MILLI if need.whole else need.share for need in needs]
    steps = sorted(set(sizes))
    gpus = sum(count * need.gpu for count, need in asked)
    return Mix(
        parts=np.array([count / covered for count, _ in typical]),
        cores=np.array([need.cores for need in needs], np.int64),
        memory=np.array([need.memory for need in needs], np.int64),
        disk=np.array([need.disk for need in needs], np.int64),
        whole=np.array([max(need.whole, 1) for need in needs], np.int64),
        steps=np.array(steps, np.int64),
        step_of=np.array([steps.index(size) for size in sizes], np.int64),
        on_kind=np.array([[not need.kinds or kind in need.kinds for need in needs] for kind in kinds], np.bool_),
        usual=(
            sum(count * need.cores for count, need in asked) / gpus,
            sum(count * need.memory for count, need in asked) / gpus,
        ),
        scarce=_scarce(asked, nodes, kinds),
        by_kind=tuple(_typical(kind, typical, covered) for kind in kinds),
    )


def _typical(kind: str, typical: Sequence[tuple[int, Need]], covered: int) -> tuple[Typical, ...]:
    """The needs that can be met on nodes of this kind, by the size of device they ask for."""
    found: dict[int, list[tuple[float, int, int, int, int]]] = {}
    for count, need in typical:
        if not need.kinds or kind in need.kinds:
            row = (count / covered, need.cores, need.memory, need.disk, max(need.whole, 1))
            found.setdefault(MILLI if need.whole else need.share, []).append(row)
    return tuple((size, tuple(rows)) for size, rows in sorted(found.items()))


def _scarce(asked: Sequence[tuple[int, Need]], nodes: Sequence[Node], kinds: Sequence[str]) -> Floats:
    """For each kind, GPUs asked for by that name for each one there is, as a part of what is asked for in all."""
    there = dict.fromkeys(kinds, 0)
    for node in nodes:
        there[node.kind] += node.gpus * MILLI
    wanted = dict.fromkeys(kinds, 0.0)
    for count, need in asked:
        able = sum(there.get(kind, 0) for kind in need.kinds)
        for kind in need.kinds if able else ():
            if kind in wanted:
                wanted[kind] += count * need.gpu / able
    overall = sum(count * need.gpu for count, need in asked) / max(sum(there.values()), 1)
    return np.array([wanted[kind] / max(overall, 1e-12) for kind in kinds])


def _by_count(item: tuple[int, Need]) -> tuple[int, int, int, int, int, int, list[str]]:
    """The most frequent first; the rest of it only makes the order certain."""
    count, need = item
    return -count, need.whole, need.share, need.cores, need.memory, need.disk, sorted(need.kinds)

"""What is free on every node, as arrays that placement scans at once; whole numbers, so that nothing is lost."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shoal.place.cluster import Ask, Node

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
State = tuple[int, ...]
"""Kind, cores, memory, disk, then the GPUs from the fullest to the emptiest: all that placement sees of one node."""

MILLI = 1000
PLENTY = 1 << 40
UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class Need:
    """An `Ask` in thousandths of cores and GPUs, and bytes. `share` is of one device, `whole` are whole ones."""

    cores: int
    memory: int
    disk: int
    whole: int
    share: int
    kinds: frozenset[str]
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Every look for room asks for it, so it is worked out once.
        parts = (self.cores, self.memory, self.disk, self.whole, self.share, self.kinds)
        object.__setattr__(self, "_hash", hash(parts))

    def __hash__(self) -> int:
        return self._hash

    @property
    def anywhere(self) -> "Need":
        """The same on any kind of nodes."""
        return Need(self.cores, self.memory, self.disk, self.whole, self.share, frozenset())

    @property
    def as_guest(self) -> "Need":
        """What it takes beside the job whose GPUs it shares."""
        return Need(self.cores, self.memory, self.disk, 0, 0, self.kinds)

    @property
    def gpu(self) -> int:
        return self.whole * MILLI + self.share


def need_of(ask: Ask) -> Need:
    """Whole numbers, rounded up: a worker never gets less than it asked for."""
    gpus = -int(-ask.gpus * MILLI // 1)
    whole, share = (0, gpus) if gpus < MILLI else (-(-gpus // MILLI), 0)
    return Need(-int(-ask.cores * MILLI // 1), ask.memory_bytes, ask.disk_bytes, whole, share, ask.kinds)


@dataclass(frozen=True, slots=True)
class Rooms:
    """What some nodes have free, row by row: as they are, or as they would be."""

    cores: Ints
    memory: Ints
    disk: Ints
    gpu: Ints
    kind: Ints


class Table:
    """What some nodes, or states, have free, as arrays: for a look at many of them at once.

    GPUs have a row of devices for each node, `gpu[node, device]` free thousandths. Devices that a node does not have
    are zero. `tops` are the cores, memory and GPUs of the largest node, full or not.
    """

    def __init__(
        self, kind: Ints, cores: Ints, memory: Ints, disk: Ints, gpu: Ints, tops: tuple[int, int, int]
    ) -> None:
        self.kind, self.cores, self.memory, self.disk, self.gpu, self.tops = kind, cores, memory, disk, gpu, tops
        self.whole: Ints = (gpu == MILLI).sum(axis=1)
        self.gpu_sum: Ints = gpu.sum(axis=1)

    def counts(self, need: Need, at: Ints | slice) -> Ints:
        """How many workers with that need have room on each of these nodes."""
        room: Ints | None = None
        for free, wanted in ((self.cores, need.cores), (self.memory, need.memory), (self.disk, need.disk)):
            if wanted > 0:
                fits = free[at] // wanted
                room = fits if room is None else np.minimum(room, fits)
        if need.whole:
            fits = self.whole[at] // need.whole
            room = fits if room is None else np.minimum(room, fits)
        elif need.share:
            fits = (self.gpu[at] // need.share).sum(axis=1)
            room = fits if room is None else np.minimum(room, fits)
        if room is None:
            return np.full(len(self.cores[at]), PLENTY, np.int64)
        # Nodes can be overbooked where their size was lowered under running jobs.
        return np.maximum(room, 0)

    def rooms(self, at: Ints | slice) -> Rooms:
        """What these nodes have free now."""
        return Rooms(self.cores[at], self.memory[at], self.disk[at], self.gpu[at], self.kind[at])

    def rooms_after(self, need: Need, at: Ints | slice) -> Rooms:
        """What these nodes would have free with one worker more, on the devices that `pick_devices` would choose.

        There must be room for it on each of them.
        """
        gpu = self.gpu[at]
        if need.whole:
            is_empty = gpu == MILLI
            gpu = np.where(is_empty & (is_empty.cumsum(axis=1) <= need.whole), 0, gpu)
        elif need.share:
            gpu = gpu.copy()
            fullest = np.where(gpu >= need.share, gpu, PLENTY).argmin(axis=1)
            gpu[np.arange(len(gpu)), fullest] -= need.share
        return Rooms(
            self.cores[at] - need.cores, self.memory[at] - need.memory, self.disk[at] - need.disk, gpu, self.kind[at]
        )


class Space:
    """Room on the nodes. `take` and `give_back` change it; what changed is in `changes`, so that others can follow.
    While `num_returns` stays the same, what had no room still has none.

    What one node has free are numbers in lists: workers come and go one by one, and arrays take longer for that.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.index = {node.name: at for at, node in enumerate(nodes)}
        self.num_gpus = [node.gpus for node in nodes]
        self.kinds = sorted({node.kind for node in nodes})
        number = {kind: at for at, kind in enumerate(self.kinds)}
        self.kind = [number[node.kind] for node in nodes]
        self.cores = [int(node.cores * MILLI) for node in nodes]
        self.memory = [node.memory_bytes for node in nodes]
        self.disk = [node.disk_bytes for node in nodes]
        self.width = max(max(self.num_gpus, default=0), 1)
        self.gpu = [[MILLI] * gpus + [0] * (self.width - gpus) for gpus in self.num_gpus]
        most = max(self.cores, default=0), max(self.memory, default=0), max(self.num_gpus, default=0) * MILLI
        self.tops = max(most[0], 1), max(most[1], 1), max(most[2], 1)
        self.changes: list[int] = []
        self.num_returns = 0

    def copy(self) -> "Space":
        """Another one with the same room, whose changes begin from here."""
        other = object.__new__(Space)
        other.nodes, other.index, other.num_gpus, other.tops = self.nodes, self.index, self.num_gpus, self.tops
        other.kinds, other.kind, other.width = self.kinds, self.kind, self.width
        other.cores, other.memory, other.disk = self.cores.copy(), self.memory.copy(), self.disk.copy()
        other.gpu = [devices.copy() for devices in self.gpu]
        other.changes, other.num_returns = [], 0
        return other

    def table(self) -> Table:
        """All nodes as they are now."""
        kind, cores, memory, disk = (
            np.array(part, np.int64) for part in (self.kind, self.cores, self.memory, self.disk)
        )
        gpu = np.array(self.gpu, np.int64).reshape(len(self.nodes), self.width)
        return Table(kind, cores, memory, disk, gpu, self.tops)

    def state(self, at: int) -> State:
        """What one node has free."""
        return self.kind[at], self.cores[at], self.memory[at], self.disk[at], *sorted(self.gpu[at])

    def pick_devices(self, at: int, need: Need, workers: int, had: Sequence[int] = ()) -> tuple[int, ...]:
        """The best fitting devices for so many workers on one node: those they `had`, then the fullest with room."""
        if need.whole:
            free = self.gpu[at]
            kept = [device for device in had if device < len(free) and free[device] == MILLI]
            empty = [device for device, room in enumerate(free) if room == MILLI and device not in kept]
            return tuple([*kept, *empty][: need.whole * workers])
        free = self.gpu[at].copy()
        picked: list[int] = []
        for device in had[:workers] if need.share else ():
            if device < len(free) and free[device] >= need.share:
                free[device] -= need.share
                picked.append(device)
        for _ in range(workers - len(picked) if need.share else 0):
            rooms = [(room, device) for device, room in enumerate(free) if room >= need.share]
            if not rooms:
                break
            device = min(rooms)[1]
            free[device] -= need.share
            picked.append(device)
        return tuple(picked)

    def take(self, at: int, need: Need, workers: int, devices: Sequence[int]) -> None:
        self._add(at, need, -workers, devices)

    def give_back(self, at: int, need: Need, workers: int, devices: Sequence[int]) -> None:
        self.num_returns += 1
        self._add(at, need, workers, devices)

    def _add(self, at: int, need: Need, workers: int, devices: Sequence[int]) -> None:
        self.cores[at] += workers * need.cores
        self.memory[at] += workers * need.memory
        self.disk[at] += workers * need.disk
        if devices:
            step = MILLI if need.whole else need.share
            step = step if workers > 0 else -step
            row = self.gpu[at]
            for device in devices:
                row[device] += step
        self.changes.append(at)


def mask_of(nodes: Iterable[Node], kinds: frozenset[str]) -> Bools:
    """Nodes where new workers of these kinds may start: not draining, and of an allowed kind."""
    return np.array([not node.is_draining and (not kinds or node.kind in kinds) for node in nodes], np.bool_)


def count_in(state: State, need: Need) -> int:
    """The same as `Table.counts`, for one node."""
    room = UNBOUNDED
    for free, wanted in ((state[1], need.cores), (state[2], need.memory), (state[3], need.disk)):
        if wanted > 0:
            room = min(room, free // wanted)
    if need.whole:
        room = min(room, state[4:].count(MILLI) // need.whole)
    elif need.share:
        room = min(room, sum([free // need.share for free in state[4:]]))
    return PLENTY if room == UNBOUNDED else max(room, 0)


def state_after(state: State, need: Need) -> State:
    """The same as `Table.rooms_after`, for one node."""
    gpus = state[4:]
    if need.whole:
        # Those that nobody uses stand last.
        gpus = (0,) * need.whole + gpus[: len(gpus) - need.whole]
    elif need.share:
        first = bisect_left(gpus, need.share)
        left = gpus[first] - need.share
        rest = gpus[:first] + gpus[first + 1 :]
        place = bisect_left(rest, left)
        gpus = (*rest[:place], left, *rest[place:])
    return state[0], state[1] - need.cores, state[2] - need.memory, state[3] - need.disk, *gpus

"""What is free on every node, as arrays that placement scans at once; whole numbers, so that nothing is lost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shoal.place.cluster import Ask, Node

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
MILLI = 1000
PLENTY = 1 << 40


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


class Space:
    """Room on the nodes. `take` and `give_back` change it; what changed is in `changes`, so that others can follow.
    While `num_returns` stays the same, what had no room still has none.

    GPUs have a row of devices for each node, `gpu[node, device]` free thousandths. Devices that a node does not have
    are zero.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.index = {node.name: at for at, node in enumerate(nodes)}
        self.cores: Ints = np.array([int(node.cores * MILLI) for node in nodes], np.int64)
        self.memory: Ints = np.array([node.memory_bytes for node in nodes], np.int64)
        self.disk: Ints = np.array([node.disk_bytes for node in nodes], np.int64)
        self.num_gpus: Ints = np.array([node.gpus for node in nodes], np.int64)
        width = max(int(self.num_gpus.max(initial=0)), 1)
        self.gpu: Ints = np.where(np.arange(width)[None, :] < self.num_gpus[:, None], MILLI, 0).astype(np.int64)
        self.whole: Ints = self.num_gpus.copy()
        self.gpu_sum: Ints = self.num_gpus * MILLI
        self.kinds = sorted({node.kind for node in nodes})
        number = {kind: at for at, kind in enumerate(self.kinds)}
        self.kind: Ints = np.array([number[node.kind] for node in nodes], np.int64)
        self.tops = tuple(max(int(v.max(initial=0)), 1) for v in (self.cores, self.memory, self.gpu_sum))
        self.changes: list[int] = []
        self.num_returns = 0

    def copy(self) -> "Space":
        """Another one with the same room, whose changes begin from here."""
        other = object.__new__(Space)
        other.nodes, other.index, other.num_gpus, other.tops = self.nodes, self.index, self.num_gpus, self.tops
        other.kinds, other.kind = self.kinds, self.kind
        other.cores, other.memory, other.disk = self.cores.copy(), self.memory.copy(), self.disk.copy()
        other.gpu, other.whole, other.gpu_sum = self.gpu.copy(), self.whole.copy(), self.gpu_sum.copy()
        other.changes, other.num_returns = [], 0
        return other

    def with_room(self, kind: Ints, cores: Ints, memory: Ints, disk: Ints, gpu: Ints) -> "Space":
        """Nodes that have this room, one a row, in place of those of this space."""
        other = object.__new__(Space)
        other.nodes, other.index, other.num_gpus, other.tops = (), {}, (gpu > 0).sum(axis=1), self.tops
        other.kinds, other.kind = self.kinds, kind
        other.cores, other.memory, other.disk, other.gpu = cores, memory, disk, gpu
        other.whole, other.gpu_sum = (gpu == MILLI).sum(axis=1), gpu.sum(axis=1)
        other.changes, other.num_returns = [], 0
        return other

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

    def pick_devices(self, at: int, need: Need, workers: int, had: Sequence[int] = ()) -> tuple[int, ...]:
        """The best fitting devices for so many workers on one node: those they `had`, then the fullest with room."""
        free = self.gpu[at].tolist()
        if need.whole:
            kept = [device for device in had if device < len(free) and free[device] == MILLI]
            empty = [device for device, room in enumerate(free) if room == MILLI and device not in kept]
            return tuple([*kept, *empty][: need.whole * workers])
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
                before = int(row[device])
                row[device] = before + step
                self.whole[at] += (before + step == MILLI) - (before == MILLI)
            self.gpu_sum[at] += step * len(devices)
        self.changes.append(at)


def mask_of(nodes: Iterable[Node], kinds: frozenset[str]) -> Bools:
    """Nodes where new workers of these kinds may start: not draining, and of an allowed kind."""
    return np.array([not node.is_draining and (not kinds or node.kind in kinds) for node in nodes], np.bool_)

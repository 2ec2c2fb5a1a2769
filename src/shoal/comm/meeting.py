"""Where the ranks of a host meet: turns that all take together, and memory that all can see."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shoal.comm.blocks import STAGE_BYTES, Array, arithmetic_of
from shoal.comm.board import CALL, COLLECTIVE, PLACE, Board
from shoal.comm.group import Call, disagreement
from shoal.comm.memory import Descriptor, map_memory, reserve
from shoal.comm.passing import Swap
from shoal.spec.errors import UserError

_NUM_KEPT = 256
_END_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Shared:
    """Equal pieces of memory, one owned by each rank, visible to all. Bytes; page aligned; zero at first."""

    mine: torch.Tensor
    all: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Kept:
    """Memory that has a name: what this rank gives of it to whoever does not map it yet, and all that is mapped here.

    `maps` are by inode, which tells whether descriptors that come from different ranks are of the same memory.
    """

    num_bytes: int
    given: Descriptor
    maps: Mapping[int, torch.Tensor]


class Meeting:
    """Turns on a Board, in which all ranks announce what they do and wait for each other.

    A rank that has passed turn t knows that everyone has finished what they did before they announced t. So memory
    written for turn t may be written again for turn t + 2 without asking: the stage has an even and an odd slot.

    `before` is what was `kept` in a group that this one takes the place of. Memory of those names is taken on as it
    is, by whoever was there: only newcomers map it, and nobody takes new pages or copies what is in it.
    """

    def __init__(self, board: Board, swap: Swap, before: Mapping[str, Kept] | None = None) -> None:
        self.rank, self.size, self.turn = board.rank, board.size, 0
        self.board, self._swap = board, swap
        self._line = board.line(COLLECTIVE, self.rank)
        self._peer_lines = [(peer, board.line(COLLECTIVE, peer)) for peer in range(self.size) if peer != self.rank]
        self._shared: list[Shared] = []
        self._before, self.kept = dict(before or {}), dict[str, Kept]()
        self._stage = self.share(2 * STAGE_BYTES, "stage")
        self._scratch = torch.empty(STAGE_BYTES, dtype=torch.uint8)
        self._slots: dict[torch.dtype, list[list[Array]]] = {}
        self._small_slots: dict[tuple[torch.dtype, int], tuple[list[list[Array]], Array]] = {}

    def arrive(self) -> None:
        """Take the next turn: return when everyone has."""
        self.turn += 1
        self.board.signal(COLLECTIVE, self.turn)
        self.board.wait(COLLECTIVE, self.turn)

    def agree(self, code: int, place: int = 0) -> bool:
        """Take the next turn with everyone who made the same call; True if their tensors have the same place, too.

        Raises on every rank where the codes differ. All have then taken one turn, and the group goes on.
        """
        words, parity, same_place = self.board.words, (self.turn + 1) & 1, True
        words[self._line + CALL + parity] = code
        words[self._line + PLACE + parity] = place
        self.arrive()
        for peer, at in self._peer_lines:
            if (theirs := words[at + CALL + parity]) != code:
                raise disagreement(self.rank, code, peer, theirs)
            if words[at + PLACE + parity] != place:
                same_place = False
        return same_place

    def share(self, num_bytes: int, name: str = "") -> Shared:
        """Memory that tensors can be combined in. A collective; costs about 0.3 ms a MiB, for taking the pages."""
        self._shared.append(self.share_sparsely(num_bytes, name, at_once=True))
        return self._shared[-1]

    def share_sparsely(self, num_bytes: int, name: str = "", *, at_once: bool = False) -> Shared:
        """Like `share`, but pages are taken when first touched, and tensors on it are ordinary ones to `find`."""
        self.agree(Call("share", num_bytes).code)
        every = self._exchange(self._offer(num_bytes, name, at_once=at_once), num_bytes, name, at_once=at_once)
        return Shared(every[self.rank], every)

    def common(self, num_bytes: int, name: str = "") -> torch.Tensor:
        """One piece of memory, made by rank 0 and mapped by all."""
        self.agree(Call("common", num_bytes).code)
        return self._exchange(self._offer(num_bytes, name) if self.rank == 0 else None, num_bytes, name)[0]

    def _offer(self, num_bytes: int, name: str, *, at_once: bool = True) -> Descriptor:
        """What this rank gives: what it had of that name and size in the group before, else new memory."""
        before = self._before.get(name)
        if before is not None and before.num_bytes == num_bytes:
            return before.given
        return Descriptor(reserve(num_bytes, at_once=at_once))

    def _exchange(
        self, mine: Descriptor | None, num_bytes: int, name: str, *, at_once: bool = True
    ) -> list[torch.Tensor]:
        """Everyone's memory, mapped here. A descriptor is kept of memory that has a name.

        What others give is touched when it is needed: of most memory each rank needs only a part.
        """
        opened: list[int] = []
        before = self._before.pop(name, None)
        known = before.maps if before is not None else {}
        try:
            opened = self._swap(mine.number if mine is not None else -1)
            given = {peer: other for peer, other in enumerate(opened) if other >= 0}
            numbers = [os.fstat(other).st_ino for other in given.values()]
            maps = [
                known[number] if number in known else _map(other, num_bytes, at_once=at_once and peer == self.rank)
                for number, (peer, other) in zip(numbers, given.items(), strict=True)
            ]
            if name:
                mine = mine or Descriptor(os.dup(opened[0]))
                self.kept[name] = Kept(num_bytes, mine, dict(zip(numbers, maps, strict=True)))
            else:
                self.arrive()  # nobody closes before all have opened
        except OSError as error:
            self._await_loss()
            raise UserError(f"Could not map the memory of another worker: {error}.", rank=self.rank) from error
        finally:
            for descriptor in set(opened) - {-1}:
                os.close(descriptor)
        return maps

    def _await_loss(self) -> None:
        """Raise MemberLost if a peer is gone. A process loses its descriptors a moment before it counts as ended."""
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            self.board.check_peers()
            time.sleep(0.005)

    def find(self, flat: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
        """A tensor's place in shared memory, as a number equal on all ranks, and everyone's there; 0 if nowhere."""
        begin, num_bytes = flat.data_ptr(), flat.nbytes
        for index, shared in enumerate(self._shared, start=1):
            offset = begin - shared.mine.data_ptr()
            if 0 <= offset <= shared.mine.nbytes - num_bytes:
                return index << 48 | offset, [t[offset : offset + num_bytes].view(flat.dtype) for t in shared.all]
        return 0, []

    def slots(self, dtype: torch.dtype) -> list[list[Array]]:
        """The stage as arrays: of even and odd turns, of every rank, STAGE_BYTES each."""
        if dtype not in self._slots:
            view = arithmetic_of(dtype).view
            halves = [[t[h * STAGE_BYTES : (h + 1) * STAGE_BYTES] for t in self._stage.all] for h in (0, 1)]
            self._slots[dtype] = [[view(tensor.view(dtype)) for tensor in half] for half in halves]
        return self._slots[dtype]

    def small_slots(self, dtype: torch.dtype, numel: int) -> tuple[list[list[Array]], Array]:
        """The beginning of each slot and of the scratch; kept, because cutting them costs more than small sums."""
        key = (dtype, numel)
        if key not in self._small_slots:
            if len(self._small_slots) >= _NUM_KEPT:
                self._small_slots.clear()
            halves = [[slot[:numel] for slot in half] for half in self.slots(dtype)]
            self._small_slots[key] = halves, self.scratch(dtype)[:numel]
        return self._small_slots[key]

    def scratch(self, dtype: torch.dtype) -> Array:
        """A private block for sums under way."""
        return arithmetic_of(dtype).view(self._scratch.view(dtype))


def _map(fd: int, num_bytes: int, *, at_once: bool) -> torch.Tensor:
    return torch.frombuffer(map_memory(fd, at_once=at_once), dtype=torch.uint8)[:num_bytes]

"""Where the ranks of a host meet: turns that all take together, and memory that all can see."""

import os
import time
from dataclasses import dataclass

import torch

from shoal.comm.blocks import STAGE_BYTES, Array, arithmetic_of
from shoal.comm.board import CALL, COLLECTIVE, PLACE, Board
from shoal.comm.group import Call, disagreement
from shoal.comm.memory import map_memory, reserve
from shoal.comm.passing import Swap
from shoal.spec.errors import UserError

_NUM_KEPT = 256
_END_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Shared:
    """Equal pieces of memory, one owned by each rank, visible to all. Bytes; page aligned; zero at first."""

    mine: torch.Tensor
    all: list[torch.Tensor]


class Meeting:
    """Turns on a Board, in which all ranks announce what they do and wait for each other.

    A rank that has passed turn t knows that everyone has finished what they did before they announced t. So memory
    written for turn t may be written again for turn t + 2 without asking: the stage has an even and an odd slot.
    """

    def __init__(self, board: Board, swap: Swap) -> None:
        self.rank, self.size, self.turn = board.rank, board.size, 0
        self.board, self._swap = board, swap
        self._line = board.line(COLLECTIVE, self.rank)
        self._peer_lines = [(peer, board.line(COLLECTIVE, peer)) for peer in range(self.size) if peer != self.rank]
        self._shared: list[Shared] = []
        self._stage = self.share(2 * STAGE_BYTES)
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

    def share(self, num_bytes: int) -> Shared:
        """Memory that tensors can be combined in. A collective; costs about 0.3 ms a MiB, for taking the pages."""
        self._shared.append(self.share_sparsely(num_bytes, at_once=True))
        return self._shared[-1]

    def share_sparsely(self, num_bytes: int, *, at_once: bool = False) -> Shared:
        """Like `share`, but pages are taken when first touched, and tensors on it are ordinary ones to `find`."""
        self.agree(Call("share", num_bytes).code)
        every = self._exchange(reserve(num_bytes, at_once=at_once), at_once=at_once)
        every = [tensor[:num_bytes] for tensor in every]
        return Shared(every[self.rank], every)

    def common(self, num_bytes: int) -> torch.Tensor:
        """One piece of memory, made by rank 0 and mapped by all."""
        self.agree(Call("common", num_bytes).code)
        return self._exchange(reserve(num_bytes) if self.rank == 0 else -1, at_once=True)[0][:num_bytes]

    def _exchange(self, fd: int, *, at_once: bool) -> list[torch.Tensor]:
        """Everyone's memory, mapped here. The descriptors are closed again: the mappings keep the memory."""
        opened: list[int] = []
        try:
            opened = self._swap(fd)
            maps = [map_memory(other, at_once=at_once) for other in opened if other >= 0]
            self.arrive()  # nobody closes before all have opened
        except OSError as error:
            self._await_loss()
            raise UserError(f"Could not map the memory of another worker: {error}.", rank=self.rank) from error
        finally:
            for descriptor in {fd, *opened} - {-1}:
                os.close(descriptor)
        return [torch.frombuffer(memory, dtype=torch.uint8) for memory in maps]

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

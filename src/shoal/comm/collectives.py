"""The collectives of a Meeting: what each rank copies and combines, and between which turns.

All of them take flat tensors that `flatten` has accepted, and cut them into blocks that stay in the cache. A slot of
the stage is written before the turn it is read after; see `Meeting` for why two slots are enough.
"""

from collections.abc import Callable

import numpy as np
import torch

from shoal.comm.blocks import (
    BLOCK_BYTES,
    LINE_BYTES,
    STAGE_BYTES,
    Array,
    arithmetic_of,
    cut_blocks,
    cut_evenly,
    reduce_terms,
)
from shoal.comm.group import Call, Op
from shoal.comm.meeting import Meeting

Plan = Callable[[], None]

# Below this, one turn in which everyone adds everything beats two turns in which everyone adds a part.
SMALL_BYTES = 16 << 10
# Up to this many ranks the same holds for tensors of any size that must pass through the stage anyway.
FEW_RANKS = 3


def plan_all_reduce(meeting: Meeting, flat: torch.Tensor, op: Op) -> Plan:
    """Prepare an all_reduce of this very tensor; calling the plan does it."""
    if meeting.size == 1:
        return lambda: None
    code = Call("all_reduce", flat.numel(), flat.dtype, op).code
    if flat.nbytes <= SMALL_BYTES:
        return _plan_small(meeting, flat, op, code)
    return _plan_large(meeting, flat, op, code)


def _plan_large(meeting: Meeting, flat: torch.Tensor, op: Op, code: int) -> Plan:
    """In place if all ranks' tensors live in the same place of shared memory, else through the stage."""
    plan_staged = _plan_whole if meeting.size <= FEW_RANKS else _plan_sliced
    place, everyone = meeting.find(flat)
    if place:
        reduce = _plan_slice(meeting, [arithmetic_of(flat.dtype).view(tensor) for tensor in everyone], flat.dtype, op)
    else:
        reduce = plan_staged(meeting, flat, op)

    def run() -> None:
        with np.errstate(all="ignore"):  # infinite gradients are for the trainer to judge
            if not meeting.agree(code, place):
                # Some rank's tensor lives elsewhere. All ranks see that, and take the way that needs no place.
                plan_staged(meeting, flat, op)()
            else:
                reduce()
                if place:
                    meeting.arrive()

    return run


def _plan_small(meeting: Meeting, flat: torch.Tensor, op: Op, code: int) -> Plan:
    """One block, one turn: show ours, combine everyone's."""
    rank, arithmetic = meeting.rank, arithmetic_of(flat.dtype)
    combine, copy, out = arithmetic.combine[op], arithmetic.copy, arithmetic.view(flat)
    slots, scratch = meeting.small_slots(flat.dtype, len(out))

    def run() -> None:
        terms = slots[(meeting.turn + 1) & 1]
        copy(terms[rank], out)
        meeting.agree(code)
        with np.errstate(all="ignore"):
            reduce_terms(terms, out, scratch, combine)

    return run


def _plan_whole(meeting: Meeting, flat: torch.Tensor, op: Op) -> Plan:
    """Block by block: show ours, combine everyone's into it. One turn a block, no results to pass on."""
    rank, arithmetic = meeting.rank, arithmetic_of(flat.dtype)
    combine, copy, scratch = arithmetic.combine[op], arithmetic.copy, meeting.scratch(flat.dtype)
    steps = []
    for block in _blocks(flat):
        slots = []
        for half in meeting.slots(flat.dtype):
            cut = [slot[: len(block)] for slot in half]
            # Our own term is read where it is: the lines of the result must be loaded anyway.
            slots.append((cut[rank], [*cut[:rank], block, *cut[rank + 1 :]]))
        steps.append((block, slots, scratch[: len(block)]))

    def run() -> None:
        for block, slots, total in steps:
            shown, terms = slots[(meeting.turn + 1) & 1]
            copy(shown, block)
            meeting.arrive()
            reduce_terms(terms, block, total, combine)

    return run


def _plan_sliced(meeting: Meeting, flat: torch.Tensor, op: Op) -> Plan:
    """Block by block: show ours, reduce a slice, take the result. Two turns a block, the work divided among many."""
    copy, steps = arithmetic_of(flat.dtype).copy, []
    for block in _blocks(flat):
        halves = [[slot[: len(block)] for slot in half] for half in meeting.slots(flat.dtype)]
        slots = [(half[meeting.rank], _plan_slice(meeting, half, flat.dtype, op)) for half in halves]
        steps.append((block, slots))

    def run() -> None:
        for block, slots in steps:
            mine, reduce_slice = slots[(meeting.turn + 1) & 1]
            copy(mine, block)
            meeting.arrive()
            reduce_slice()
            meeting.arrive()
            copy(block, mine)

    return run


def _plan_slice(meeting: Meeting, everyone: list[Array], dtype: torch.dtype, op: Op) -> Plan:
    """Reduce our slice of everyone's array and give it to everyone, while the others do the other slices."""
    rank, arithmetic, steps = meeting.rank, arithmetic_of(dtype), []
    combine, copy, scratch = arithmetic.combine[op], arithmetic.copy, meeting.scratch(dtype)
    part = cut_evenly(len(everyone[0]) if everyone else 0, meeting.size, dtype.itemsize)[rank]
    for block in cut_blocks(part, BLOCK_BYTES // dtype.itemsize) if everyone else []:
        terms = [array[block] for array in everyone]
        steps.append((terms, terms[rank], scratch[: len(terms[0])], terms[:rank] + terms[rank + 1 :]))

    def run() -> None:
        for terms, mine, total, others in steps:
            reduce_terms(terms, mine, total, combine)
            for other in others:
                copy(other, mine)

    return run


def reduce_scatter(meeting: Meeting, out: torch.Tensor, whole: torch.Tensor, op: Op) -> None:
    """Fill `out` with this rank's part of the combined `whole`; straight from shared memory if it lives there."""
    arithmetic = arithmetic_of(out.dtype)
    place, everyone = meeting.find(whole)
    in_place = meeting.agree(Call("reduce_scatter", whole.numel(), whole.dtype, op).code, place) and place
    scratch, combine = meeting.scratch(out.dtype), arithmetic.combine[op]
    target, source, numel = arithmetic.view(out), arithmetic.view(whole), out.numel()
    if in_place:
        begin = meeting.rank * numel
        views = [arithmetic.view(tensor)[begin : begin + numel] for tensor in everyone]
        for part in cut_blocks(slice(0, numel), BLOCK_BYTES // out.element_size()):
            reduce_terms([view[part] for view in views], target[part], scratch[: part.stop - part.start], combine)
        meeting.arrive()
        return
    piece = STAGE_BYTES // meeting.size // LINE_BYTES * LINE_BYTES // out.element_size()
    for part in cut_blocks(slice(0, numel), piece):
        slots, length = meeting.slots(out.dtype)[(meeting.turn + 1) & 1], part.stop - part.start
        for rank in range(meeting.size):
            begin = rank * numel + part.start
            arithmetic.copy(slots[meeting.rank][rank * piece :][:length], source[begin : begin + length])
        meeting.arrive()
        terms = [slot[meeting.rank * piece :][:length] for slot in slots]
        reduce_terms(terms, target[part], scratch[:length], combine)


def all_gather(meeting: Meeting, out: torch.Tensor, flat: torch.Tensor) -> None:
    """Fill `out` with everyone's tensor, block by block through the stage."""
    meeting.agree(Call("all_gather", flat.numel(), flat.dtype).code)
    arithmetic = arithmetic_of(flat.dtype)
    source, rows = arithmetic.view(flat), arithmetic.view(out).reshape(meeting.size, flat.numel())
    for part in cut_blocks(slice(0, flat.numel()), STAGE_BYTES // flat.element_size()):
        slots, length = meeting.slots(flat.dtype)[(meeting.turn + 1) & 1], part.stop - part.start
        arithmetic.copy(slots[meeting.rank][:length], source[part])
        meeting.arrive()
        for row, slot in zip(rows, slots, strict=True):
            arithmetic.copy(row[part], slot[:length])


def broadcast(meeting: Meeting, flat: torch.Tensor, root: int) -> None:
    """Give everyone the root's tensor, block by block through its stage."""
    meeting.agree(Call("broadcast", flat.numel(), flat.dtype, root=root).code)
    copy = arithmetic_of(flat.dtype).copy
    for block in _blocks(flat):
        slot = meeting.slots(flat.dtype)[(meeting.turn + 1) & 1][root][: len(block)]
        if meeting.rank == root:
            copy(slot, block)
        meeting.arrive()
        if meeting.rank != root:
            copy(block, slot)


def _blocks(flat: torch.Tensor) -> list[Array]:
    view = arithmetic_of(flat.dtype).view(flat)
    return [view[part] for part in cut_blocks(slice(0, len(view)), STAGE_BYTES // flat.element_size())]

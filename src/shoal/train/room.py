"""How many samples a worker computes at a time: as many as its memory holds, found by measuring.

Pieces of a step are added up, so their size changes nothing but rounding, and each worker chooses its own. What a
forward keeps for its backward was counted once, before training (`Traits.saved_bytes`). Where a multiple of that
fits, nothing is bounded and nothing measured. Else steps begin with small pieces, and these grow as far as what was
measured lets them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import nn

from shoal.comm.group import Group, Op
from shoal.data.ledger import Ledger
from shoal.engine.env import WorkerFacts
from shoal.engine.machine import forget_peak, free_memory, peak_memory_bytes, used_memory_bytes
from shoal.spec.errors import UserError
from shoal.train.flat import num_bytes_of
from shoal.train.freed import give_back, give_back_at_once
from shoal.train.settings import Settings
from shoal.train.traits import Traits

CAUTION = 8.0
"""How many times as much as was counted a step may take, until it is measured: work space, gradients, data."""

CAUTION_UNASKED = 2.0
"""The same where nobody has set a limit, and only the machine's own memory ends somewhere."""

MARGIN = 0.9
"""The part of what is left that pieces are chosen for: memory is taken in other sizes than it is asked for."""

MOST_GROWTH = 4
"""How many times as large pieces may become at once: what a sample takes need not be the same in larger pieces."""

ALARM = 0.95
"""Steps that pass this part of what is left make pieces smaller: memory that is freed in pieces is not all of use."""

WORTHWHILE = 1.25
"""Pieces that would not become so many times as large stay as they are."""

STEPS_EACH = 2
"""How many steps are measured before pieces change: in the first of a run the optimizer has no state yet."""


STATE = 3
"""What training will keep besides parameters, in parameters: a gradient and the two moments of Adam."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The most memory that this worker may use, and what says so: "machine", "cgroup", "ulimit" or a setting."""

    num_bytes: int
    source: str

    @property
    def is_set(self) -> bool:
        """Somebody has set it: it is not just where the machine's memory ends."""
        return self.source != "machine"

    @property
    def caution(self) -> float:
        return CAUTION if self.is_set else CAUTION_UNASKED

    def __str__(self) -> str:
        return f"{mib(self.num_bytes)} ({self.source})"


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory that was in use in steps whose largest piece had so many samples."""

    piece: int
    num_bytes: int


def first_piece(saved_bytes: float, used: int, limit: Limit, wanted: int) -> int | None:
    """How many samples to begin with, of which each keeps `saved_bytes`; None: all that are wanted, unmeasured."""
    room, each = max(0, limit.num_bytes - used), saved_bytes * limit.caution
    if each * wanted <= room:
        return None
    return max(1, min(wanted, int(room / each)))


def choose_piece(peaks: Sequence[Peak], used: int, limit: int, wanted: int) -> int:
    """The most samples, up to those wanted, with which memory should stay within the limit.

    A line through what was measured is followed from the last peak on; with one peak it begins at `used`, which was
    in use before the first step. Never more than a few times as many as were measured, and never less than one.
    """
    last = peaks[-1]
    slopes = [
        (last.num_bytes - other.num_bytes) / (last.piece - other.piece)
        for other in peaks[:-1]
        if other.piece != last.piece
    ]
    slope = max(slopes, default=0.0)
    if slope <= 0:  # only one was measured, or noise was larger than what a sample takes
        slope = (last.num_bytes - used) / last.piece
    most = min(wanted, last.piece * MOST_GROWTH)
    if slope <= 0:
        return most
    return max(1, min(most, last.piece + int((part_of(limit, used, MARGIN) - last.num_bytes) // slope)))


def part_of(limit: int, used: int, part: float) -> float:
    """The memory in use when so much of what is left is taken."""
    return used + (limit - used) * part


@dataclass(frozen=True, slots=True)
class Gauge:
    """Memory in use on a device, and the most since it was told to forget. Bytes.

    `economize`: from now on what is freed shall be free for others, though it costs time.
    """

    used: Callable[[], int]
    peak: Callable[[], int]
    forget: Callable[[], None]
    economize: Callable[[], None] = lambda: None


def gauge_of(device: torch.device) -> Gauge:
    """That of this process in main memory, or on its GPU."""
    if device.type == "cuda":
        return Gauge(
            used=lambda: int(torch.cuda.memory_allocated(device)),
            peak=lambda: int(torch.cuda.max_memory_allocated(device)),
            forget=lambda: torch.cuda.reset_peak_memory_stats(device),
        )
    return Gauge(used=used_memory_bytes, peak=peak_memory_bytes, forget=forget_peak, economize=_give_back)


def _give_back() -> None:
    give_back_at_once()
    give_back()


def find_limit(memory: int | None, device: torch.device, num_sharing: int) -> Limit | None:
    """What this worker may use, one of so many on its machine; None where nobody knows. `memory` is the setting."""
    if memory is not None:
        return Limit(memory, f"memory={mib(memory, is_option=True)}")
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return Limit(free + int(torch.cuda.memory_reserved(device)), "machine")
    room = free_memory(num_sharing)
    return None if room is None else Limit(used_memory_bytes() + room.num_bytes, room.limited_by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What pieces take. `unit` samples at least are computed together, and a step has `batch_size` over all workers.

    `is_cuttable`: any number of samples may be a piece. Else pieces are what they are, and only looked at before the
    first step. `num_parts` workers hold a copy together: they compute the same pieces, so none chooses for itself.
    A part keeps at least `saved_bytes` of a sample.
    """

    saved_bytes: float
    unit: int
    batch_size: int
    is_cuttable: bool
    num_parts: int = 1


class Room:
    """Bounds this worker's pieces (`piece`, None: not at all) by its memory.

    `enter` before the first step of each World, then `open` before each step and `close` after it. Where nothing is
    bounded, these do nothing. `tell` writes down what was chosen. Measuring a step costs about 0.1 ms.
    """

    piece: int | None = None
    limit: Limit | None = None

    def __init__(self, gauge: Gauge, find: Callable[[], Limit | None], need: Need, tell: Callable[..., None]) -> None:
        self._gauge, self._find, self._need, self._tell = gauge, find, need, tell
        self._peaks: list[Peak] = []
        self._used = self._wanted = self._num_steps = self._highest = 0
        self._is_settled = False

    def enter(self, wanted: int) -> bool:
        """Up to `wanted` samples may be this worker's now; True the first time.

        Raises UserError where not even a unit fits.
        """
        is_first = not self._wanted
        if is_first:
            self.limit, self._used = self._find(), self._gauge.used()
            self.check(self.limit)
        if wanted > self._wanted and self.limit is not None and self._is_ours:
            self._is_settled = False
            if self.piece is None:
                self.piece = first_piece(self._need.saved_bytes, self._used, self.limit, wanted)
                if self.piece is not None:
                    self._gauge.economize()
        self._wanted = max(wanted, self._wanted)
        return is_first

    @property
    def _is_ours(self) -> bool:
        """This worker chooses by itself, and goes on choosing."""
        return self._need.is_cuttable and self._need.num_parts == 1

    def propose(self, state_bytes: int) -> int:
        """How many samples of a step fit here at a time, of a part of the model whose state will take so much more.

        A part keeps no more of a piece than the whole model would; the first stage of a pipeline keeps its layers of
        as many pieces as there are stages, which comes to the same.
        """
        need, limit = self._need, self._find()
        if limit is None or not need.is_cuttable:
            return need.batch_size
        used = self._gauge.used() + state_bytes
        piece = first_piece(need.saved_bytes * need.num_parts, used, limit, need.batch_size)
        return need.batch_size if piece is None else piece

    def share(self, piece: int) -> None:
        """Those who hold a copy together have found that so many fit for all of them."""
        if self._need.is_cuttable and piece < self._need.batch_size:
            self.piece = piece
            self._gauge.economize()

    def check(self, limit: Limit | None) -> None:
        """Raise UserError where it is known already that not even a unit fits."""
        if limit is None:
            return
        need, used = self._need, self._gauge.used()
        room, least = limit.num_bytes - used, need.saved_bytes * need.unit
        if room > least:
            return
        hint = f"give it memory={mib((used + 2 * least) / MARGIN, is_option=True)} or more"
        if not need.is_cuttable and room > 0:
            num_shards = ceil(need.batch_size * need.saved_bytes / room)
            hint = f"cut steps into more shards, on all workers: shards={num_shards}"
        samples = "one sample needs" if need.unit == 1 else f"{need.unit} samples need"
        raise _too_little(limit, f"it uses {mib(used)} already, and {samples} at least {mib(least)} more", hint)

    def open(self) -> None:
        """A step begins."""
        if self.piece is not None and self._is_ours:
            self._gauge.forget()

    def close(self, step: int, largest: int) -> bool:
        """It is over, and its largest piece had so many samples. True if pieces are of another size from now on."""
        if self.piece is None or self.limit is None or not largest or not self._is_ours:
            return False
        self._highest, self._num_steps = max(self._highest, self._gauge.peak()), self._num_steps + 1
        is_over = self._highest > part_of(self.limit.num_bytes, self._used, ALARM)
        if self._num_steps < STEPS_EACH or (self._is_settled and not is_over):
            return False
        peak, before = Peak(largest, self._highest), self.piece
        self._num_steps = self._highest = 0
        self.piece = self._choose(peak, before, self.limit, is_over=is_over)
        was_settled, self._is_settled = self._is_settled, self.piece <= before
        if self.piece != before or not was_settled:
            self._tell("piece", step, samples=self.piece, before=before, peak_bytes=peak.num_bytes)
        return self.piece != before

    def _choose(self, peak: Peak, before: int, limit: Limit, *, is_over: bool) -> int:
        if peak.num_bytes > limit.num_bytes and not self._is_settled and peak.piece == 1:
            enough = mib(peak.num_bytes / MARGIN, is_option=True)
            why = f"one sample at a time takes {mib(peak.num_bytes)} in all"
            raise _too_little(limit, why, f"give it memory={enough} or more")
        self._peaks = [*(other for other in self._peaks if other.piece != peak.piece), peak]
        piece = choose_piece(self._peaks, self._used, limit.num_bytes, self._wanted)
        # A share may be smaller than what would fit, and the last step of an epoch smaller than others.
        grows = piece >= WORTHWHILE * before and peak.piece == before
        return piece if grows or is_over else before


def make_room(
    settings: Settings,
    traits: Traits,
    ledger: Ledger,
    device: torch.device,
    facts: WorkerFacts,
    tell: Callable[..., None],
) -> Room:
    """The room of a worker.

    Shards that must be computed by themselves are what they are.
    """
    is_cuttable = traits.is_plain and not settings.exact
    num_parts = settings.split.num_parts if settings.split is not None else 1
    need = Need(
        saved_bytes=traits.saved_bytes / num_parts,
        unit=1 if is_cuttable else -(-settings.batch_size // ledger.num_shards),
        batch_size=settings.batch_size,
        is_cuttable=is_cuttable,
        num_parts=num_parts,
    )
    return Room(gauge_of(device), lambda: find_limit(settings.memory, device, facts.local_world_size), need, tell)


def agree_on_piece(room: Room, model: nn.Module, group: Group) -> int:
    """How many samples fit at a time on the worker that has the least room for its part of the model."""
    state_bytes = STATE * num_bytes_of(model)
    fitting = torch.tensor([-float(room.propose(state_bytes))])
    group.all_reduce(fitting, Op.MAX).wait()
    return int(-fitting)


def _too_little(limit: Limit, why: str, hint: str) -> UserError:
    return UserError(f"This worker's memory of {limit} is too little.", why=why, hint=hint)


def mib(num_bytes: float, *, is_option: bool = False) -> str:
    """A size as people read it, or as they write it in an option."""
    return f"{ceil(num_bytes / 2**20)}{'' if is_option else ' '}MB"

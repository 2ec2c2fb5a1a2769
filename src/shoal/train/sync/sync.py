"""How the copies of a model agree: the protocol, and what travels with a step."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from shoal.train.flat import FlatModel
from shoal.train.inherit import Holding
from shoal.train.tree import Node

if TYPE_CHECKING:
    from shoal.train.sync.table import NotFinite


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one shard (or a run of merged shards, under the first one's number) says of a step.

    `weight` is what the loss sum is to be divided by: the number of samples, or the user's own weights.
    `buffers` are the values that the model's changing buffers have after this shard's forward.
    """

    shard: int
    weight: float
    loss: float
    num_samples: int
    buffers: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a worker says of itself in a step: which step it is in, how fast it is, what it wishes to do after it.

    `checksum` is of a part of its parameters, where each worker has its own.
    """

    step: int
    seconds_per_sample: float = 0.0
    wish: int = 0
    checksum: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The rows of a step, combined. `loss` is the true mean; `buffers` the mean over samples; `wish` the largest.

    `has_news`: everybody told its speed just now, as it does in each step in which all take part.
    """

    weight: float
    loss: float
    buffers: torch.Tensor | None
    seconds_per_sample: tuple[float, ...]
    wish: int = 0
    has_news: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How noisy gradients are: estimates of |G|^2 and of the trace of a sample's covariance.

    Neither is biased, so either may come out below 0. Their ratio is the gradient noise scale, in samples.
    """

    signal: float
    variance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What all workers know after a step. `norm` is the gradient's, before clipping. Durations are seconds.

    `noise` is looked at in some steps only.
    """

    totals: Totals
    norm: float
    communicate: float
    wait: float
    waited_for: int | None
    noise: Noise | None = None


class Collector(Protocol):
    """Takes gradients from backward as they come. `unused` are the parameters that none has reached yet, by number.

    `stalled` is how many seconds of the step it has waited for other workers.
    """

    unused: set[int]
    stalled: float

    def open(self, node: Node, *, is_last: bool) -> None:
        """The next backward belongs to the shards of `node`."""
        ...

    def close(self) -> None:
        """Backward is over: what it did not reach counts as zero."""
        ...


class Held(Protocol):
    """What a worker holds of all that is trained: see `Replica`.

    `is_shared`: all workers of a host hold one and the same.
    """

    flat: FlatModel
    is_shared: bool

    @property
    def holding(self) -> Holding | None:
        """What is held here of state that is divided; None where every member has all of it."""
        ...

    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """All state that must survive, of what is held here, by name."""
        ...

    def scalars(self) -> list[dict[str, float]]:
        """What the optimizer counts, per parameter group."""
        ...

    def restore(self, tensors: Mapping[str, torch.Tensor], scalars: Sequence[Mapping[str, float]]) -> None:
        """Put back whole tensors. All members do this and meet before they go on."""
        ...

    def show(self, *, is_average: bool) -> None:
        """Let the model see the moving average, or its parameters again. All members call it together."""
        ...

    def assemble(self) -> None:
        """Let the model have all its parameters until the next step. All members call it together."""
        ...


class Sync(Protocol):
    """Turns gradients of parts of a batch into one update of the whole.

    A step is: `begin`, then for each piece `gradients.open`, backward, `gradients.close`, with `post` before the
    last backward, then `finish`. After `finish` returns, all members have the same parameters; where copies train by
    themselves for a while, they have them after `agree`. `is_round_over`: a good moment for it.
    """

    is_round_over: bool

    @property
    def gradients(self) -> Collector: ...
    @property
    def replica(self) -> Held: ...

    def begin(self, num_shards: int, assignment: Sequence[range]) -> None:
        """Start a step of `num_shards` shards; `assignment` says which of them each rank has."""
        ...

    def post(self, rows: Sequence[Row], mine: range, standing: Standing) -> None:
        """Tell the others what this worker's shards weigh and lost, and where it stands."""
        ...

    def finish(self) -> Outcome:
        """Sum, agree and update.

        Raises where a member is gone, a value is not finite, or copies were not equal; nothing was changed then.
        """
        ...

    def agree(self) -> None:
        """Have the same parameters as all other members, if that is not so after each step. All call it together."""
        ...

    def resolve(
        self, survivors: Sequence[int], gather: Callable[[str, str], list[str]], *, is_first: bool
    ) -> "Outcome | NotFinite | None":
        """After a loss, when all survivors (by their old ranks) stand still: complete the step under way, or drop it.

        Calls `gather` twice, for `judged` and for `settled`; one survivor is the first.
        """
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """All state that must survive, whole, on the first copy; others may get less. All copies call it together."""
        ...

    def checksum(self, step: int) -> int:
        """Of the part of this worker's own parameters that is looked at in this step; 0 where all share one copy."""
        ...

    def detach(self) -> None:
        """Let go of the model, whose parameters stay where they are."""
        ...

    def close(self) -> None:
        """Give parameters memory of their own again and release what is shared."""
        ...

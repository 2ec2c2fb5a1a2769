"""How large a piece of a step may be, so that a pipeline gets as many micro-batches as it was promised."""

from shoal.data.ledger import Cut, Ledger, cut_step
from shoal.data.shares import assign
from shoal.spec.errors import UserError
from shoal.spec.strategy import Pipeline
from shoal.train.mesh import check_share
from shoal.train.settings import Settings


def largest_piece(settings: Settings, ledger: Ledger, num_copies: int, *, is_merging: bool) -> int | None:
    """Most samples in one forward. Refuses more micro-batches than there are samples or shards to make them of.

    Where shards must be computed one by one, they are the micro-batches: the result must not depend on the split.
    """
    wanted = settings.split.pipeline if settings.split is not None else None
    if wanted is None:
        return settings.microbatch_size
    check_share(settings.split, settings.batch_size, num_copies)
    if not is_merging:
        _check_shards(wanted, ledger.num_shards, num_copies)
        return settings.microbatch_size
    share = max(1, settings.batch_size // num_copies)
    piece = _fit(ledger, min(wanted.num_microbatches, share), num_copies)
    return piece if settings.microbatch_size is None else min(piece, settings.microbatch_size)


def _check_shards(wanted: Pipeline, num_shards: int, num_copies: int) -> None:
    if wanted.microbatches is not None and num_shards // num_copies < wanted.microbatches:
        raise UserError(
            f"{num_shards // num_copies} shards of each copy are too few for {wanted.microbatches} micro-batches.",
            why="the model draws random numbers or changes buffers, or exact=True: then each shard is a micro-batch",
            hint=f"use shards={wanted.microbatches * num_copies}, or microbatches={max(1, num_shards // num_copies)}",
        )


def _fit(ledger: Ledger, num_microbatches: int, num_copies: int) -> int:
    """The smallest piece with which a copy's share of a whole step is at most so many pieces."""
    shares = assign(ledger.num_shards, [1.0] * num_copies)
    piece = -(-ledger.batch_size // (num_copies * num_microbatches))
    while any(_count(ledger, mine, piece) > num_microbatches for mine in shares):
        piece += 1
    return piece


def _count(ledger: Ledger, mine: range, piece: int) -> int:
    return len(cut_step(ledger.batch_size, Cut(num_shards=ledger.num_shards, mine=mine, merge=True, max_piece=piece)))

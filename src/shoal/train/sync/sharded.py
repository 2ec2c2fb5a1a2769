"""Which way to shard: by what is to be divided, and by what connects the workers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shoal.comm.group import Group
from shoal.comm.shm import ShmGroup
from shoal.spec.errors import UserError
from shoal.spec.strategy import Sharded
from shoal.train.chunked import ELEMENTWISE, is_elementwise
from shoal.train.freed import give_back, give_back_at_once
from shoal.train.homes import choose_blocks
from shoal.train.sync.across import Across
from shoal.train.sync.sharded_host import HostShardedSync
from shoal.train.sync.sharded_message import MessageShardedSync
from shoal.train.sync.shared import SharedMemorySync
from shoal.train.sync.sync import Sync

SMALLEST_BLOCK = 1024
"""Elements: what is smaller is not worth a message of its own in any model."""


def make_sharded(
    wanted: Sharded,
    group: Group,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    across: Across | None,
    homes: Mapping[str, Sequence[str]] | None,
    keywords: Mapping[str, Any],
) -> Sync:
    """The sync for a level of sharding. Raises UserError for what cannot be divided.

    `homes` says where in the model each parameter is used; without it none can come and go with its block. What has
    been divided stays so (`is_inherited`): its parts come later, from those who hold them.

    On one host `SharedMemorySync` is the answer for "optimizer": all workers see one set of parameters and optimizer
    state anyhow, and each updates its part of it.
    """
    check_sharded(wanted, optimizer)
    sync: Sync
    if not isinstance(group, ShmGroup) or across is not None or keywords["is_inherited"]:
        _check_not_exact(wanted, keywords["exact"], "sync=shoal.all_reduce()")
        give_back_at_once()
        blocks = find_blocks(model, homes) if wanted.level == "parameters" and homes is not None else None
        source = None if keywords["is_inherited"] else keywords["source"]
        rest = _without(keywords, "exact", "is_inherited", "source")
        sync = MessageShardedSync(
            group, model, optimizer, level=wanted.level, blocks=blocks, across=across, source=source, **rest
        )
    elif wanted.level == "optimizer":
        sync = SharedMemorySync(group, model, optimizer, **_without(keywords, "is_inherited", "is_mirrored"))
    else:
        _check_not_exact(wanted, keywords["exact"], "sync=shoal.sharded('optimizer')")
        rest = _without(keywords, "exact", "is_inherited", "is_mirrored")
        sync = HostShardedSync(group, model, optimizer, **rest)
    give_back()
    return sync


def _without(keywords: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if name not in names}


def find_blocks(model: nn.Module, homes: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Which parameters come and go together: an eighth of the model at a time, or a layer where that is larger."""
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    limit = max(SMALLEST_BLOCK, sum(sizes.values()) // 8)
    return choose_blocks(sizes, homes, limit, limit // 16)


def check_sharded(wanted: Sharded, optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError for an optimizer whose update of an element looks at others."""
    if not is_elementwise(optimizer):
        fitting = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise UserError(
            f"{type(optimizer).__name__} cannot be sharded.",
            why=f"sync={wanted} cuts tensors anywhere, and this optimizer may look at whole ones",
            hint=f"use one of torch.optim's {fitting}; or sync=shoal.all_reduce()",
        )


def _check_not_exact(wanted: Sharded, exact: bool, instead: str) -> None:
    if exact:
        raise UserError(
            f"exact=True and sync={wanted} do not go together.",
            why="exact sums need the gradients of several shards at once, which is what this sharding does away with",
            hint=f"use {instead}, or leave exact=True out",
        )

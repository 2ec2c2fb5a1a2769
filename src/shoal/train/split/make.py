"""From what a script asks for to what computes it: the Split of a run, and the cut of the model that it makes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shoal.comm.group import Group
from shoal.observe.recorder import Recorder
from shoal.spec.errors import UserError
from shoal.spec.strategy import Split as Wanted
from shoal.train.compute import Compute
from shoal.train.cut import Cut
from shoal.train.split.pipeline_make import make_pipeline
from shoal.train.split.split import Split
from shoal.train.split.tensor import cut_for_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What a model is cut with. `first` are the first samples: what cutting by measured time needs; `few` are
    some of them.

    `group` are all workers, `parts` those of one copy.
    """

    compute: Compute
    optimizer: torch.optim.Optimizer
    group: Group
    parts: Group
    first: Any
    few: Any
    recorder: Recorder
    rank: Callable[[], int]
    reach: Callable[[str], None]


def make_split(wanted: Wanted, material: Material, known: Mapping[str, Any] | None = None) -> tuple[Split, Cut]:
    """Let the model hold only the part of it that is ours; returns what computes with it, and who holds what.

    All workers call it together, except where others were cut before: `known` is the `facts` of their cut.
    """
    if wanted.pipeline is not None and wanted.tensor is not None:
        raise UserError(
            f"split={wanted} is one cut too many.",
            why="a stage of a pipeline cannot be cut into parts of its layers yet",
            hint="use one of shoal.pipeline(...) and shoal.tensor(...)",
        )
    if wanted.pipeline is not None:
        return make_pipeline(wanted.pipeline, material, known)
    assert wanted.tensor is not None
    return cut_for_run(wanted.tensor, material, known)

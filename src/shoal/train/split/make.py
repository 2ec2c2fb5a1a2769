"""From what a script asks for to what computes it: the Split of a run, and the cut of the model that it makes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shoal.observe.recorder import Recorder
from shoal.spec.strategy import Split as Wanted
from shoal.train.compute import Compute
from shoal.train.cut import Cut
from shoal.train.groups import Groups
from shoal.train.split.split import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What a model is cut with. `first` are the first samples: what cutting by measured time needs; `few` are
    some of them.
    """

    compute: Compute
    optimizer: torch.optim.Optimizer
    first: Any
    few: Any
    recorder: Recorder
    rank: Callable[[], int]
    reach: Callable[[str], None]


class Draft(Protocol):
    """How a model can be cut. To find that out takes a while, but nobody else: a newcomer does it before it joins."""

    def divide(self, groups: Groups, known: Mapping[str, Any] | None) -> tuple[Split, Cut]:
        """Let the model hold only the part of it that is ours; returns what computes with it, and who holds what.

        Everyone calls it together, except where others were cut before: `known` is the `facts` of their cut, and
        nothing is said to anybody.
        """
        ...


def draft_split(wanted: Wanted, material: Material) -> Draft:
    """Find out how the model can be cut. Raises UserError where it cannot."""
    # Most runs cut nothing, and need not wait for a sixth of all our code.
    from shoal.train.split.both import BothDraft
    from shoal.train.split.pipeline_make import PipelineDraft
    from shoal.train.split.tensor import TensorDraft

    tensor, pipeline = wanted.tensor, wanted.pipeline
    stages = PipelineDraft(pipeline, material) if pipeline is not None and pipeline.size > 1 else None
    slices = TensorDraft(tensor, material) if tensor is not None and tensor.size > 1 else None
    if stages is not None and slices is not None:
        return BothDraft(stages, slices)
    made = stages or slices
    assert made is not None, "one worker holds a copy: it is not cut"
    return made

"""A copy in stages, each of which several workers hold in slices of its layers."""

from collections.abc import Mapping
from typing import Any

from shoal.train.cut import Cut, Held
from shoal.train.groups import Groups
from shoal.train.split.pipeline import Pipelined
from shoal.train.split.pipeline_make import PipelineDraft
from shoal.train.split.split import Forward, Work
from shoal.train.split.tensor import CutLayers, TensorDraft, gathered


class CutStages:
    """Every slice runs a pipeline of its own, whose layers talk to the other slices of their stage."""

    def __init__(self, stages: Pipelined, layers: CutLayers) -> None:
        self._stages, self._layers = stages, layers

    @property
    def idle(self) -> float:
        return self._stages.idle

    def run(self, work: Work) -> None:
        self._stages.run(work)

    def use(self, function: Forward, batch: Any) -> Any:
        return self._stages.use(function, batch)

    def meet(self, groups: Groups) -> None:
        self._stages.meet(groups)
        self._layers.meet(groups)


class BothDraft:
    """Layers are cut first, in a model that is whole and can still be tried; then it is cut into stages.

    What a stage hands on is whole: the next one may cut its layers in another way.
    """

    def __init__(self, stages: PipelineDraft, slices: TensorDraft) -> None:
        stages.check_calls(slices.layers)
        self._stages, self._slices = stages, slices

    def divide(self, groups: Groups, known: Mapping[str, Any] | None) -> tuple[CutStages, Cut]:
        assert groups.stages is not None
        bounds = self._stages.agree(groups.everyone, known)  # by measuring a model that computes alone
        layers, slices = self._slices.divide(groups, known)
        pipelined, stages = self._stages.keep(groups.stages, bounds, gathered)
        return CutStages(pipelined, layers), product(stages, slices)


def product(stages: Cut, slices: Cut) -> Cut:
    """Who holds what, if each stage is held in slices: parts are numbered stage by stage."""
    num_stages = max(map(len, stages.held.values()))
    num_slices = max(map(len, slices.held.values()))
    held: dict[str, list[Held]] = {}
    for name in {**stages.held, **slices.held}:
        by_stage, by_slice = stages.held.get(name, [...] * num_stages), slices.held.get(name, [...] * num_slices)
        held[name] = [None if stage is None else part for stage in by_stage for part in by_slice]
    return Cut(held=held, facts={**stages.facts, **slices.facts})

"""A copy whose layers are cut: each worker holds a slice of every large weight, and layers talk to other parts."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shoal.comm.group import Group
from shoal.spec.errors import UserError
from shoal.spec.strategy import Tensor
from shoal.train.agree import check_agreement
from shoal.train.chunked import is_elementwise
from shoal.train.compute import Compute, uncompiled
from shoal.train.cut import Cut, Held, Slice
from shoal.train.flat import num_bytes_of, shorten
from shoal.train.freed import give_back
from shoal.train.groups import Groups
from shoal.train.saving import say
from shoal.train.split.split import Forward, Work
from shoal.train.split.tensor_check import Comparison
from shoal.train.split.tensor_layers import cut_parameters, install
from shoal.train.split.tensor_plan import Plan, Planner
from shoal.train.split.tensor_portion import Layout, Parts, Portion, Stuck, slice_of
from shoal.train.split.tensor_trial import Trial
from shoal.train.split.whole import Whole

if TYPE_CHECKING:
    from shoal.train.split.make import Material


class CutLayers:
    """Computes as a whole model does: only that layers were cut and talk, and what they give may be cut, too."""

    idle = 0.0

    def __init__(self, whole: Whole, parts: Parts) -> None:
        self._whole, self._parts = whole, parts

    def run(self, work: Work) -> None:
        self._whole.run(work)

    def use(self, function: Forward, batch: Any) -> Any:
        return gathered(self._whole.use(function, batch))

    def meet(self, groups: Groups) -> None:
        assert groups.slices is not None
        self._parts.meet(groups.slices)


def find_plan(model: nn.Module, wanted: Tensor, trial: Trial) -> Plan:
    """How each layer is cut. `trial` runs the loss, which needs the model, some times."""
    with trial.undisturbed():
        return Planner(model, wanted.size, wanted.plan, trial.forward).find()


def cut_layers(model: nn.Module, plan: Plan, parts: Parts, trial: Trial) -> Cut:
    """Let `model` hold slices: ours of those that `parts` hold together. Returns who holds what.

    All parts must have the same model and samples: `trial` is run before and after, and a model that then computes
    something else is refused.
    """
    check_agreement(parts.group, {"the plan of split=tensor": plan})
    comparison = Comparison(trial)
    cut = cut_alone(model, plan, parts)
    comparison.check(cut, parts.part)
    return cut


def cut_alone(model: nn.Module, plan: Plan, parts: Parts) -> Cut:
    """`cut_layers` where that was tried before, by others."""
    cut = _slice(model, plan, parts)
    for name, layer in plan.items():
        install(model.get_submodule(name), layer, parts)
    _leave_fast_paths(model)
    return cut


def _slice(model: nn.Module, plan: Plan, parts: Parts) -> Cut:
    """Keep our slice of each parameter that is cut, in a memory of its own."""
    layouts: dict[int, Layout] = {}
    for name, layer in plan.items():
        module = model.get_submodule(name)
        layouts |= {id(module.get_parameter(key)): layout for key, layout in cut_parameters(module, layer)}
    held: dict[str, list[Held]] = {}
    tensors = {key: value for key, value in model.state_dict(keep_vars=True).items() if id(value) in layouts}
    for key, value in tensors.items():
        layout = layouts[id(value)]
        held[key] = list(_slices(layout, value.shape[layout.dim], parts.num_parts))
    for value in {id(value): value for value in tensors.values()}.values():
        layout = layouts[id(value)]
        mine = slice_of(layout, value.shape[layout.dim], parts).of(value.detach()).clone()
        # A graph that someone still has knows the old shape of the gradient; autograd forgets that with the type.
        value.data = mine.new_empty(0, dtype=torch.float64 if mine.dtype != torch.float64 else torch.float32)
        value.data = mine
    return Cut(held=held, facts={"plan": _written(plan)})


def _slices(layout: Layout, size: int, num_parts: int) -> list[Held]:
    share = size // layout.blocks // num_parts
    return [Slice(layout.dim, n * share, (n + 1) * share, size, layout.blocks) for n in range(num_parts)]


def _leave_fast_paths(model: nn.Module) -> None:
    """torch's transformers read the weights of their layers directly in evaluation, but not where there are hooks."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.register_forward_pre_hook(_nothing)
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _nothing(module: nn.Module, args: Any) -> None:
    return None


def gathered(value: Any) -> Any:
    """Outputs as everybody knows them."""
    if isinstance(value, Portion):
        return value.region.gather(value, Stuck("it is the model's output"))
    if isinstance(value, Mapping):
        return {key: gathered(each) for key, each in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(gathered(each) for each in value)
    return value


# A run's own.


class TensorDraft:
    """A plan for the layers of a run's model."""

    def __init__(self, wanted: Tensor, material: "Material") -> None:
        self._material, self._model, self._size = material, uncompiled(material.compute.model), wanted.size
        _check_settings(material.compute, material.optimizer)
        self._trial = Trial(material.compute, material.few)
        self._plan = find_plan(self._model, wanted, self._trial)

    @property
    def layers(self) -> list[str]:
        return list(self._plan)

    def divide(self, groups: Groups, known: Mapping[str, Any] | None) -> tuple[CutLayers, Cut]:
        """Cut the model, and tell how. Raises UserError where it is not the same afterwards."""
        assert groups.slices is not None
        model, material = self._model, self._material
        region, before = Parts(groups.slices), num_bytes_of(model)
        split = CutLayers(Whole(material.compute, material.rank, material.reach), region)
        if known is not None:
            _check_same_plan(_written(self._plan), known["plan"])
            cut = cut_alone(model, self._plan, region)
        else:
            _check_same_kernels(groups.slices)
            cut = cut_layers(model, self._plan, region, self._trial)
            self._tell(before)
        give_back()
        return split, cut

    def _tell(self, before: int) -> None:
        facts = {"layers": _written(self._plan), "bytes_whole": before, "bytes_held": num_bytes_of(self._model)}
        recorder = self._material.recorder
        if recorder.rank == 0:
            recorder.event("tensor_plan", None, **facts)
        say(_summary(self._size, facts), recorder.rank)


def _written(plan: Plan) -> dict[str, str]:
    return {name: str(layer) for name, layer in plan.items()}


def _check_same_plan(mine: Mapping[str, str], known: Mapping[str, str]) -> None:
    if mine != known:
        raise UserError(
            "This worker would cut the model in another way than the others did.",
            why="its model, its first samples or its version of shoal are not theirs",
            hint="let every worker make the same model, with the same versions of everything",
        )


def _check_settings(compute: Compute, optimizer: torch.optim.Optimizer) -> None:
    """What cannot be had with layers that are cut."""
    if compute.settings.exact:
        raise _impossible(
            "exact=True",
            "parts of a layer add up in another order than one process does, so bits would differ",
            "leave one of them out: without exact=True the result is that of one process up to rounding",
        )
    if uncompiled(compute.model) is not compute.model:
        raise _impossible(
            "torch.compile", "it cannot see through what the parts say to each other", "do not compile the model"
        )
    if not is_elementwise(optimizer):
        raise _impossible(
            f"the optimizer {type(optimizer).__name__}",
            "it looks at whole tensors, of which each worker has a part",
            "use one that looks at each element by itself, such as SGD or AdamW",
        )


def _impossible(what: str, why: str, hint: str) -> UserError:
    return UserError(f"split=shoal.tensor(...) does not go together with {what}.", why=why, hint=hint)


def _check_same_kernels(group: Group) -> None:
    """Parameters that are not cut are updated by each part: they stay the same if all parts compute alike."""
    facts = {
        "the number of threads (`threads=`)": torch.get_num_threads(),
        "the kind of processor": torch.backends.cpu.get_cpu_capability(),
    }
    check_agreement(group, facts)


def _summary(num_parts: int, facts: Mapping[str, Any]) -> str:
    """The plan in one line."""
    layers = facts["layers"]
    held, whole = (facts[key] / 1e6 for key in ("bytes_held", "bytes_whole"))
    names = dict.fromkeys(f"{_pattern(name)} {style}" for name, style in layers.items())
    shown = shorten(list(names), 8)
    return f"shoal: tensor({num_parts}) cuts {len(layers)} layers, {held:.2g} of {whole:.2g} MB a worker: {shown}"


def _pattern(name: str) -> str:
    """The name of a layer without the number of its block, so that equal layers of many blocks are told once."""
    return re.sub(r"(^|[.])[0-9]+[.]", r"\1*.", name, count=1)

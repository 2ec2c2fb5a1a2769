"""Which layers are cut, and how: found by rehearsing, or said by the script."""

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from math import gcd
from typing import get_args

from torch import nn

from shoal.spec.errors import UserError
from shoal.train.flat import shorten
from shoal.train.split.tensor_layers import LayerCut, Style, cut_parameters, features_of, is_linear
from shoal.train.split.tensor_rehearsal import Rehearsal

STYLES = (*get_args(Style), "replicate")

BLOCKS = (1, 3, 2)
"""What a layer's outputs may be: one thing, queries, keys and values, or two halves such as a gate and its values."""

MOST_RUNS = 24
"""Rehearsals; a model needs two or three."""

LARGE = 0.1
"""A layer with this share of all parameters is cut even where its inputs come whole."""

Plan = dict[str, LayerCut]


class Planner:
    """Finds a plan for `num_parts`. `forward` runs the loss once; `wanted` are the script's own patterns."""

    def __init__(
        self, model: nn.Module, num_parts: int, wanted: Mapping[str, str] | None, forward: Callable[[], object]
    ) -> None:
        self._model, self._num_parts, self._forward = model, num_parts, forward
        modules = dict(model.named_modules())
        self._attentions = {n: m for n, m in modules.items() if type(m) is nn.MultiheadAttention}
        inside = {f"{name}.out_proj" for name in self._attentions}
        self._linears = {n: m for n, m in modules.items() if is_linear(m) and n not in inside}
        self._embeddings = {n: m for n, m in modules.items() if type(m) is nn.Embedding}
        self._tied = set(_tied(model))
        self._forced = self._read(wanted or {})
        self._sizes: dict[str, set[int]] = {}

    def _read(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """The script's styles by layer; later patterns win."""
        kinds = {**self._linears, **self._embeddings, **self._attentions}
        known = {name: kinds[name] for name, _ in self._model.named_modules() if name in kinds}
        forced: dict[str, str] = {}
        for pattern, style in wanted.items():
            if style not in STYLES:
                raise _wrong_plan(f"{style!r} is not a style", f"use one of: {', '.join(STYLES)}")
            names = [name for name in known if fnmatchcase(name, pattern)]
            if not names:
                most = shorten(list(known), 8) or "none"
                raise _wrong_plan(f"{pattern!r} matches no layer that can be cut", f"there are: {most}")
            for name in names:
                _check_kind(name, known[name], style)
            forced.update(dict.fromkeys(names, style))
        return forced

    def find(self) -> Plan:
        """The plan. Raises UserError where a size is not a multiple of the number of parts, or nothing can be cut."""
        rehearsal = self._rehearse()
        plan = self._chosen(rehearsal)
        for name, layer in self._attentions.items():
            if self._forced.get(name, "heads") == "heads" and _has_plain_heads(layer):
                plan[name] = LayerCut("heads")
                self._sizes[name] = {int(layer.num_heads)}
        plan.update(self._lone(plan, rehearsal))
        self._check_sizes(plan)
        self._check_tied(plan)
        if not plan:
            raise UserError(
                f"Nothing in this model can be cut into {self._num_parts} parts.",
                why="no linear layer's outputs lead to another's inputs in a way that is known, and none is large",
                hint="leave `split=` out, or name layers: `shoal.tensor(2, plan={'layers.*.fc1': 'colwise'})`",
            )
        order = {name: index for index, (name, _) in enumerate(self._model.named_modules())}
        return dict(sorted(plan.items(), key=lambda item: order[item[0]]))

    def _rehearse(self) -> Rehearsal:
        """Try all linear layers as sources, with one kind of blocks after the other, until those left are good."""
        tries = {
            name: [each for each in BLOCKS if features_of(layer)[1] % each == 0]
            for name, layer in self._linears.items()
            if name not in self._tied and self._forced.get(name, "colwise") == "colwise"
        }
        whole = frozenset(self._tied) | {n for n, style in self._forced.items() if style in ("replicate", "colwise")}
        for _ in range(MOST_RUNS):
            rehearsal = Rehearsal({name: left[0] for name, left in tries.items() if left}, whole)
            rehearsal.run(self._model, self._linears, self._forward)
            at_first_hand = [name for name in rehearsal.failures if tries.get(name)]
            others = [name for name in rehearsal.met_whole if tries.get(name)]
            if not at_first_hand and not others:
                return rehearsal
            for name in at_first_hand:
                tries[name] = tries[name][1:]
            if not at_first_hand:
                tries.update({name: [] for name in others})
        return Rehearsal({}, whole)

    def _chosen(self, rehearsal: Rehearsal) -> Plan:
        sources = {source for calls in rehearsal.rows.values() for names, _ in calls for source in names}
        plan = {name: LayerCut("colwise", rehearsal.sources[name]) for name in sources}
        for name, calls in rehearsal.rows.items():
            plan[name] = LayerCut("rowwise", next(iter(calls))[1])
        for name, style in self._forced.items():
            if style == "colwise":  # good or not: where it leads to nothing, its outputs are gathered
                plan.setdefault(name, LayerCut("colwise"))
            elif style in ("rowwise", "embedding"):
                plan.setdefault(name, LayerCut("rowwise" if style == "rowwise" else "embedding"))
        for name, cut in plan.items():
            self._sizes[name] = rehearsal.sizes[name] | {_size(self._layer(name), cut) // cut.blocks}
        return plan

    def _layer(self, name: str) -> nn.Module:
        return self._model.get_submodule(name)

    def _lone(self, plan: Plan, rehearsal: Rehearsal) -> Plan:
        """Large layers that are not in a pair, as a classifier behind convolutions: by inputs, which are sliced."""
        total = sum(parameter.numel() for parameter in self._model.parameters())
        found: Plan = {}
        for name, layer in self._linears.items():
            num_inputs, num_outputs = features_of(layer)
            taken = {*plan, *self._forced, *self._tied, *rehearsal.used_outside}
            is_free = name not in taken and name in rehearsal.called
            is_large = num_inputs * num_outputs >= LARGE * total and num_outputs <= num_inputs
            if is_free and is_large and num_inputs % self._num_parts == 0:
                found[name] = LayerCut("rowwise")
        return found

    def _check_sizes(self, plan: Plan) -> None:
        sizes = sorted((size, name) for name in plan for size in self._sizes.get(name, ()))
        for size, name in sizes:  # heads come before channels: there are fewer of them
            if size % self._num_parts:
                raise _does_not_divide(name, plan[name], size, self._num_parts, gcd(*(size for size, _ in sizes)))

    def _check_tied(self, plan: Plan) -> None:
        """Layers that share a parameter must cut it alike, as an embedding and the head that uses its table."""
        found: dict[int, tuple[str, object]] = {}
        for owner, module in self._model.named_modules():
            where = dict(cut_parameters(module, plan[owner])) if owner in plan else {}
            for name, parameter in module.named_parameters(recurse=False):
                first, layout = found.setdefault(id(parameter), (owner, where.get(name)))
                if layout != where.get(name):
                    raise _wrong_plan(
                        f"{first!r} and {owner!r} share a parameter and are cut in different ways",
                        f"give both the same: `plan={{{first!r}: 'replicate', {owner!r}: 'replicate'}}`",
                    )


def _size(layer: nn.Module, cut: LayerCut) -> int:
    if isinstance(layer, nn.Embedding):
        return layer.num_embeddings
    return features_of(layer)[cut.style == "colwise"]


def _tied(model: nn.Module) -> Iterator[str]:
    """Modules that share a parameter with another."""
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            other = owners.setdefault(id(parameter), name)
            if other != name:
                yield from (other, name)


def _has_plain_heads(layer: nn.Module) -> bool:
    assert isinstance(layer, nn.MultiheadAttention)
    return layer.bias_k is None and layer.bias_v is None and not layer.add_zero_attn


def _check_kind(name: str, layer: nn.Module, style: str) -> None:
    if isinstance(layer, nn.Embedding):
        fitting = ["embedding", "replicate"]
        if style == "embedding" and (layer.max_norm is not None or layer.sparse):
            raise _wrong_plan(f"{name!r} has max_norm= or sparse=True", "leave them out, or use 'replicate'")
    else:
        fitting = ["heads" if isinstance(layer, nn.MultiheadAttention) else "colwise", "replicate"]
        fitting += ["rowwise"] if "colwise" in fitting else []
    if style == "heads" and "heads" in fitting and not _has_plain_heads(layer):
        raise _wrong_plan(f"{name!r} has add_bias_kv= or add_zero_attn=", "leave them out, or use 'replicate'")
    if style not in fitting:
        what = f"{name!r} is of type {type(layer).__name__}, which cannot be {style!r}"
        raise _wrong_plan(what, f"use {' or '.join(map(repr, fitting))}")


def _wrong_plan(what: str, hint: str) -> UserError:
    return UserError(
        f"The plan of split=shoal.tensor(...) does not work: {what}.",
        why="a plan is a dict from names of layers, or patterns such as 'layers.*.fc1', to styles",
        hint=hint,
    )


def _does_not_divide(name: str, cut: LayerCut, size: int, num_parts: int, common: int) -> UserError:
    fitting = [f"tensor({n})" for n in range(2, common + 1) if common % n == 0]
    use = f"use {' or '.join(fitting[:4])}, or " if fitting else ""
    return UserError(
        f"tensor({num_parts}) does not fit this model: {size} in layer {name!r} is not a multiple of {num_parts}.",
        why=f"it is cut {cut.style}: {size} heads or channels, of which every worker must get equally many",
        hint=f"{use}keep it whole: `plan={{{name!r}: 'replicate'}}`",
    )

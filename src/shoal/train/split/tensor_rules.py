"""How functions of torch act on a part of a tensor: which rule each of them has, and what happens without one."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shoal.spec.errors import UserError
from shoal.train.split import tensor_elements as elements
from shoal.train.split import tensor_shapes as shapes
from shoal.train.split import tensor_sums as sums
from shoal.train.split.tensor_elements import Args, Kwargs, Rule, name_of
from shoal.train.split.tensor_portion import Portion, Stuck


def apply(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call a function of torch that was given portions: by its rule, or else on whole tensors."""
    portions = [*_portions(args), *_portions(kwargs.values())]
    name = name_of(func)
    region = portions[0].region
    try:
        if name not in RULES:
            raise Stuck(f"{name} has no rule for parts")
        rule = RULES[name]
        if rule is not elements.fact:
            region.look(portions)
        return rule(func, args, kwargs, portions)
    except Stuck as stuck:
        _check_not_in_place(name, stuck)
        why = stuck.with_traceback(None)  # which would keep all that is in sight
    wholes = {id(each): region.gather(each, why) for each in portions}
    return func(*_replace(args, wholes), **_replace(dict(kwargs), wholes))


Portion.apply = staticmethod(apply)


def _portions(values: Any) -> Iterator[Portion]:
    for value in values:
        if isinstance(value, Portion):
            yield value
        elif isinstance(value, list | tuple):
            yield from _portions(value)


def _replace(values: Any, by: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(values, Portion):
        return by[id(values)]
    if isinstance(values, dict):
        return {key: _replace(value, by) for key, value in values.items()}
    if type(values) in (list, tuple):
        return type(values)(_replace(value, by) for value in values)
    return values


def _check_not_in_place(name: str, stuck: Stuck) -> None:
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        raise UserError(
            f"{name} cannot change an activation of which each worker has a part.",
            why=str(stuck),
            hint="keep the layer whole with `plan={NAME: 'replicate'}`, or do not change activations in place",
        )


TABLE: dict[Rule, str] = {
    elements.fact: """
        .shape .dtype .device .ndim .is_cuda .is_cpu .is_sparse .is_nested .is_quantized .layout .is_mps size dim
        numel ndimension nelement is_floating_point is_complex element_size __len__ get_device""",
    elements.local_fact: ".requires_grad is_contiguous new_zeros new_ones new_empty new_full new_tensor",
    elements.elementwise: """
        add add_ sub sub_ rsub __rsub__ mul mul_ div div_ __rdiv__ true_divide floor_divide remainder pow __rpow__ neg
        abs exp log log1p expm1 sqrt rsqrt reciprocal square sin cos tanh tanh_ sigmoid sigmoid_ erf erfc sign round
        floor ceil clamp clamp_ clip clamp_min clamp_max maximum minimum fmod lerp addcmul addcdiv where masked_fill
        masked_fill_ nan_to_num relu relu_ relu6 gelu silu silu_ mish elu elu_ celu selu leaky_relu leaky_relu_
        softplus softsign hardtanh hardswish hardsigmoid logsigmoid tanhshrink softshrink threshold eq ne lt le gt ge
        logical_and logical_or logical_not isnan isfinite isinf zeros_like ones_like full_like clone contiguous detach
        positive __and__ __or__ __invert__ bitwise_and bitwise_or bitwise_not""",
    elements.convert: "to float double half bfloat16 type type_as cpu cuda",
    elements.dropout: "dropout dropout_",
    elements.draw_like: "rand_like randn_like bernoulli",
    shapes.reshape: "view reshape flatten unflatten ravel view_as reshape_as squeeze unsqueeze",
    shapes.move: "transpose permute movedim moveaxis swapaxes swapdims t .T .mT .H .mH select narrow __getitem__",
    shapes.expand: "expand",
    shapes.take_apart: "chunk split unbind",
    shapes.join: "cat concat stack",
    shapes.repeat_each: "repeat_interleave",
    sums.reduce: """
        sum mean amax amin max min argmax argmin prod softmax log_softmax softmin logsumexp cumsum cumprod sort any
        all""",
    sums.glu: "glu",
    sums.normalize: "layer_norm rms_norm",
    sums.linear: "linear",
    sums.matmul: "matmul bmm __matmul__ __rmatmul__",
    sums.einsum: "einsum",
    sums.attend: "scaled_dot_product_attention",
}
"""By the names of functions, methods and (with a dot) properties. What is not here gets the whole tensor."""

RULES = {name: rule for rule, names in TABLE.items() for name in names.split()}

"""What must survive: the state of a run at the end of a step, and a digest to compare parameters by."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from shoal.checkpoint.facts import Fact
from shoal.checkpoint.layout import DTYPES, TensorEntry
from shoal.spec.errors import UserError

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, of_torch) for name, (of_torch, _) in DTYPES.items()}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything needed to go on after `step` steps as if nothing had happened.

    `tensors` are named `part/name`: `model/fc.weight`, `optimizer/fc.weight/exp_avg`, `ema/fc.weight`. `facts` are
    plain values: position in the data, seed, scheduler state, hyper-parameters. No worker count appears in either.
    """

    step: int
    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def part(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of one part, without its prefix: `state.part("model")["fc.weight"]`."""
        prefix = f"{name}/"
        return {key.removeprefix(prefix): value for key, value in self.tensors.items() if key.startswith(prefix)}


def describe(name: str, tensor: torch.Tensor) -> TensorEntry:
    """How a tensor is written down. One that cannot be kept is a UserError that names it and says why."""
    if not _is_name(name):
        raise UserError(
            f"The checkpoint cannot keep a tensor named {str(name)[:80]!r}.",
            why="names are valid text of 1 to 4096 characters, and `__metadata__` is reserved by the file format",
            hint="give it another name",
        )
    problem = _problem(tensor)
    if problem:
        raise UserError(f"The checkpoint cannot keep tensor {name!r}: {problem[0]}.", why=problem[1], hint=problem[2])
    return TensorEntry(name, _NAMES[tensor.dtype], tuple(tensor.shape))


def _is_name(name: object) -> bool:
    if not isinstance(name, str) or name == "__metadata__":
        return False
    return 0 < len(name) <= 4096 and name == name.encode(errors="replace").decode()


def _problem(tensor: object) -> tuple[str, str, str] | None:
    if not isinstance(tensor, torch.Tensor):
        return f"it is a {type(tensor).__name__}", "only tensors can be tensors", "put plain values into the facts"
    if tensor.layout != torch.strided:
        return (
            "it is sparse",
            "the file format holds dense tensors",
            "save `tensor.to_dense()`, or indices and values",
        )
    if tensor.is_meta or torch.nn.parameter.is_lazy(tensor):
        return "it has no data", "it is a meta tensor or not initialised yet", "run the model once before saving it"
    if tensor.dtype not in _NAMES:
        return (
            f"its type is {tensor.dtype}",
            "the file format (safetensors) has no such type",
            "save it as another type; complex128 as `torch.view_as_real(tensor)`",
        )
    return None


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order; copies only what is on a device or not contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """The sha256 of names, types, shapes and bytes: equal exactly if the tensors are equal bit for bit.

    The order of the mapping, strides, devices and who shares memory with whom do not matter. 64 hex digits; people
    compare the first 12 (`short`). Costs one pass over the bytes: about 1.4 GB a second on one core.
    """
    total = hashlib.sha256()
    for name in sorted(tensors):
        entry = describe(name, tensors[name])
        total.update(f"{len(name)}:{name} {entry.dtype} {entry.shape}\n".encode())
        total.update(as_bytes(tensors[name]))
    return total.hexdigest()


def short(full_digest: str) -> str:
    """The part of a digest that people read."""
    return full_digest[:12]

"""What the user's loss is given in place of a model that is cut into stages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shoal.spec.errors import UserError


class Left(BaseException):
    """Leaves the user's function after its call of the model: only the last stage knows what comes of it."""


class StandIn:
    """Called as the model is; `act` does the rest. Everything else that a model is cannot be had in a pipeline."""

    def __init__(self, model: nn.Module, act: Callable[..., Any]) -> None:
        self.__model, self.__act, self.num_calls = model, act, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return self.__act(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__model, name)
        if isinstance(value, torch.Tensor | nn.Module) or callable(value):
            raise UserError(
                f"`{name}` of the model was used in a pipeline.",
                why="no worker has the whole model, so all that can be done with it is to call it: `model(...)`",
                hint=f"move what needs `{name}` into the model's forward",
            )
        return value

    def check_called(self) -> None:
        """After a loss has returned."""
        if self.num_calls != 1:
            raise wrong_calls(self.num_calls)


def wrong_calls(num_calls: int) -> UserError:
    times = "did not call the model" if num_calls == 0 else f"called the model {num_calls} times"
    return UserError(
        f"The loss {times}.",
        why="in a pipeline a micro-batch goes through the stages once, forwards and back",
        hint="call the model exactly once in the loss; for several inputs, join them: `model(torch.cat([a, b]))`",
    )


class CallForm:
    """How the loss calls the model: which tensors it gives, and what else, which must be the same every time."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        leaves, self._spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self._rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, in order."""
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if spec != self._spec or is_tensor != self._is_tensor or rest != self._rest:
            raise UserError(
                "The model was called in another way than by the loss on the first samples.",
                why="it was cut into stages along that call: which arguments there are, and all but tensors in them",
                hint="call it with the same arguments everywhere: in the loss, in `evaluate` and in `predict`",
            )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

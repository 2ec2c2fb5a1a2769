"""A user's optimizer that looks at whole tensors, run as it is on every worker."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from shoal.train.flat import FlatModel


class WholeOptimizer:
    """Gives each parameter its part of the flat gradient and lets the optimizer do the rest."""

    def __init__(self, optimizer: torch.optim.Optimizer, flat: FlatModel, gradient: torch.Tensor) -> None:
        self.optimizer = optimizer
        self._flat = flat
        self._gradients: list[torch.Tensor | None] = list(flat.views(gradient))

    def use(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take these from now on, flat, one for each parameter."""
        pairs = zip(gradients, self._flat.parameters, strict=True)
        self._gradients = [None if gradient is None else gradient.view(each.shape) for gradient, each in pairs]

    def step(self, allocate: Callable[[str], torch.Tensor]) -> None:
        """State stays where the optimizer puts it."""
        for parameter, gradient in zip(self._flat.parameters, self._gradients, strict=True):
            # What another part of the model holds is empty here, and without a gradient no optimizer looks at it.
            parameter.grad = gradient if parameter.numel() else None
        self.optimizer.step()
        for parameter in self._flat.parameters:
            parameter.grad = None

    state_names: Sequence[str] = ()

    def release(self) -> None:
        """It has its own parameters."""

    def forget(self) -> None:
        self.optimizer.state.clear()

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in zip(self._flat.layout.names, self._flat.parameters, strict=True):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{name}/{key}", value

    def scalars(self) -> list[dict[str, float]]:
        """None: counts are tensors of their own in `named_state`."""
        return [{} for _ in self.optimizer.param_groups]

    def restore(
        self,
        state: Mapping[str, torch.Tensor],
        scalars: Sequence[Mapping[str, float]],
        allocate: Callable[[str], torch.Tensor],
    ) -> None:
        for name, parameter in zip(self._flat.layout.names, self._flat.parameters, strict=True):
            for key, value in state.items():
                owner, _, field = key.rpartition("/")
                if owner == name:
                    self.optimizer.state[parameter][field] = value.to(parameter.device, copy=True)

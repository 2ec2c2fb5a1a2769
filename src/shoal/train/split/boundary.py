"""What stages hand on to each other: any values, tensors as they are and the rest told once."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shoal.checkpoint import facts as coding
from shoal.comm.group import Group, Work
from shoal.spec.errors import UserError
from shoal.train.handover import share_facts
from shoal.train.split.schedule import Message


def describe_values(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Everything about a value but what is in its tensors, as plain data; those are appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(value.shape), value.requires_grad]}
    if isinstance(value, tuple | list):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [describe_values(item, tensors) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[key, describe_values(item, tensors)] for key, item in value.items()]}
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise UserError(
        f"A stage of the pipeline cannot hand on a {type(value).__name__}.",
        why="stages hand on tensors, numbers and texts, and lists and dicts of them",
        hint="choose other cuts with `shoal.pipeline(2, cuts=(...))`, or return tensors from that layer",
    )


def rebuild_values(fact: Any, tensors: Iterator[torch.Tensor], device: torch.device) -> Any:
    """The value that was described, with these tensors."""
    ((kind, content),) = fact.items()
    match kind:
        case "tensor":
            return next(tensors)
        case "list" | "tuple":
            made = [rebuild_values(item, tensors, device) for item in content]
            return made if kind == "list" else tuple(made)
        case "dict":
            return {key: rebuild_values(item, tensors, device) for key, item in content}
        case "dtype":
            return getattr(torch, content)
        case "device":
            return device
    return content


def tensors_in(fact: Any) -> list[tuple[torch.dtype, list[int], bool]]:
    """Type, shape, and whether it wants a gradient, of each tensor that was described."""
    ((kind, content),) = fact.items()
    if kind == "tensor":
        return [(getattr(torch, content[0]), content[1], content[2])]
    if kind not in ("list", "tuple", "dict"):
        return []
    items = [item for _, item in content] if kind == "dict" else content
    return [found for item in items for found in tensors_in(item)]


def signature(data: Any) -> Hashable:
    """What shapes follow from: two batches of one signature make stages hand on the same shapes."""
    if isinstance(data, torch.Tensor):
        return (str(data.dtype), tuple(data.shape))
    if isinstance(data, Mapping):
        return tuple((key, signature(value)) for key, value in data.items())
    if isinstance(data, list | tuple):
        return tuple(signature(value) for value in data)
    return type(data).__name__


class Mail:
    """Values on their way between the workers of one copy. Nothing that is sent makes its sender wait.

    The first values under a key tell their shapes, and later ones do not: `key` must be one that sender and receiver
    know, and that shapes follow from. `expect` says in which order others will send.
    """

    def __init__(self, parts: Group, device: torch.device) -> None:
        self._parts, self._device = parts, device
        self._facts: dict[Hashable, Any] = {}
        self._sent: dict[int, deque[tuple[Work, torch.Tensor]]] = {peer: deque() for peer in range(parts.size)}
        self._most = 16 * parts.size
        self._expected: dict[int, deque[Message]] = {}
        self._early: dict[Message, Any] = {}

    def expect(self, orders: Mapping[int, Sequence[Message]]) -> None:
        """What each of the others will send to us in this step."""
        self._expected = {peer: deque(messages) for peer, messages in orders.items()}

    def take(self, message: Message, source: int, receive: Callable[[Message], Any]) -> Any:
        """A message of this step. Those that were sent before it are received, too, and kept."""
        while message not in self._early:
            following = self._expected[source].popleft()
            self._early[following] = receive(following)
        return self._early.pop(message)

    def send(self, values: Any, to: int, key: Hashable) -> list[torch.Tensor]:
        """Send any values. Returns the tensors in them."""
        tensors: list[torch.Tensor] = []
        fact, known = describe_values(values, tensors), self._facts.get(key)
        if known is None:
            self._facts[key] = fact
            text = torch.frombuffer(bytearray(coding.encode({"values": fact})), dtype=torch.uint8)
            self.send_tensors([torch.tensor([text.numel()]), text], to)
        elif known != fact:
            raise UserError(
                "What a stage of the pipeline hands on has another shape than with a batch of the same shape before.",
                why="its shape follows from what is in the batch, and the next stage cannot know it",
                hint="pad to a fixed shape, or choose other cuts with `shoal.pipeline(2, cuts=(...))`",
            )
        self.send_tensors(tensors, to)
        return tensors

    def recv(self, source: int, key: Hashable) -> tuple[Any, list[torch.Tensor]]:
        """What describes the values that were sent under this key, and their tensors."""
        if key not in self._facts:
            size = torch.empty(1, dtype=torch.int64)
            self._parts.recv(size.view(torch.uint8), source).wait()
            text = torch.empty(int(size), dtype=torch.uint8)
            self._parts.recv(text, source).wait()
            self._facts[key] = coding.decode(bytes(text.tolist()))["values"]
        fact = self._facts[key]
        return fact, self.recv_tensors([(dtype, shape) for dtype, shape, _ in tensors_in(fact)], source)

    def send_tensors(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        sent = self._sent[to]
        for tensor in tensors:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            if flat.numel():
                sent.append((self._parts.send(flat, to), flat))
        while len(sent) > self._most:  # so many are never under way: it was received, and can be let go of
            sent.popleft()[0].wait()

    def recv_tensors(self, shapes: Sequence[tuple[torch.dtype, Sequence[int]]], source: int) -> list[torch.Tensor]:
        made = [torch.empty(list(shape), dtype=dtype, device=self._device) for dtype, shape in shapes]
        for tensor in made:
            if tensor.numel():
                self._parts.recv(tensor.view(-1).view(torch.uint8), source).wait()
        return made

    def fill(self, tensor: torch.Tensor, source: int) -> None:
        """Receive one tensor of known shape, in place."""
        self._parts.recv(tensor, source).wait()

    def settle(self) -> None:
        """Everything that was sent has been received."""
        for sent in self._sent.values():
            while sent:
                sent.popleft()[0].wait()

    def share(self, values: Any, source: int) -> Any:
        """The values of one worker, on all."""
        tensors: list[torch.Tensor] = []
        is_source = self._parts.rank == source
        fact = share_facts(self._parts, {"v": describe_values(values, tensors)} if is_source else None, source)["v"]
        if not is_source:
            shapes = tensors_in(fact)
            tensors = [torch.empty(shape, dtype=dtype, device=self._device) for dtype, shape, _ in shapes]
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        for tensor in tensors:
            if tensor.numel():
                self._parts.broadcast(tensor.view(-1).view(torch.uint8), root=source).wait()
        return values if is_source else rebuild_values(fact, iter(tensors), self._device)


class Arrival:
    """Activations that came from the stage before. Backward leaves their `gradients` here."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.gradients: tuple[torch.Tensor, ...] = ()

    def enter(self) -> tuple[torch.Tensor, ...]:
        """The same tensors as results of a computation: layers may change them in place, unlike leaves."""
        if not self.tensors:
            return ()
        anchor = torch.zeros((), requires_grad=True)
        entered: tuple[torch.Tensor, ...] = _Enter.apply(anchor, self)  # type: ignore[no-untyped-call]
        return entered


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, arrival: Arrival) -> tuple[torch.Tensor, ...]:
        ctx.arrival = arrival
        tensors, arrival.tensors = tuple(arrival.tensors), ()
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        ctx.arrival.gradients = gradients
        return None, None

"""A copy that several workers hold as stages: micro-batches follow each other through them, forwards and back.

Every worker of a copy loads the same samples and calls the user's loss. Its call of the model runs this worker's
stage on what the stage before handed on; all but the last stage leave the loss there. So what the loss gives to the
model is known everywhere and need not travel, and whatever the loss sets around the call holds in every stage.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from shoal.comm.group import Group
from shoal.spec.strategy import Order
from shoal.train.compute import Compute, autocast, uncompiled
from shoal.train.errors import in_user_code
from shoal.train.groups import Groups
from shoal.train.loss import move
from shoal.train.split.boundary import Arrival, Mail, rebuild_values, signature, tensors_in
from shoal.train.split.schedule import Message, Op, idle_of, list_messages, plan_order
from shoal.train.split.split import Forward, Work
from shoal.train.split.stages import Root, Stage
from shoal.train.split.standin import CallForm, Left, StandIn, wrong_calls
from shoal.train.sync.sync import Row
from shoal.train.traits import read_randomness


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of the model's forward, as it is in training and in evaluation."""

    index: int
    train: Stage
    evaluate: Stage
    train_root: Root
    evaluate_root: Root


@dataclass(slots=True, kw_only=True)
class Flight:
    """A micro-batch between its forward and its backward in one chunk."""

    arrival: Arrival | None = None
    given: list[torch.Tensor] = field(default_factory=list)
    total: torch.Tensor | None = None
    factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One copy's workers in a row: `num_chunks` chunks, in turn. `chunks` are ours."""

    parts: Group
    schedule: Order
    chunks: dict[int, Chunk]
    num_chunks: int
    form: CallForm

    def worker(self, chunk: int) -> int:
        return chunk % self.parts.size

    @property
    def last_worker(self) -> int:
        return self.worker(self.num_chunks - 1)

    def order(self, worker: int, num_microbatches: int) -> tuple[Op, ...]:
        return plan_order(self.schedule, self.parts.size, worker, num_microbatches)


class Pipelined:
    """Runs this worker's chunks of the model in the order of the schedule."""

    idle = 0.0

    def __init__(self, compute: Compute, line: Line, rank: Callable[[], int], reach: Callable[[str], None]) -> None:
        self._compute, self._line, self._rank, self._reach = compute, line, rank, reach
        self._model = uncompiled(compute.model)
        self._rows: dict[int, Row] = {}
        self._begin()
        self._data: Sequence[Any] = ()
        self._signatures: list[Any] = []
        self._buffers = owned_buffers(self._model, compute.buffers.tensors)

    def meet(self, groups: Groups) -> None:
        assert groups.stages is not None
        self._line = replace(self._line, parts=groups.stages)
        self._begin()

    def _begin(self) -> None:
        self._mail = Mail(self._line.parts, self._compute.device)
        self._flights: dict[tuple[int, int], Flight] = {}

    # Training.

    def run(self, work: Work) -> None:
        parts, num_pieces = self._line.parts, len(work.plan.pieces)
        self.idle = idle_of(self._line.schedule, parts.size, num_pieces)
        orders = {worker: self._line.order(worker, num_pieces) for worker in range(parts.size)}
        self._mail.expect(
            {
                peer: list_messages(order, parts.size, parts.rank)
                for peer, order in orders.items()
                if peer != parts.rank
            }
        )
        self._data = [move(data, self._compute.device) for data in work.pieces]
        self._signatures = [signature(data) for data in self._data]
        self._rows, self._flights = {}, {}
        mine = orders[parts.rank]
        for number, op in enumerate(mine):
            if op.is_forward:
                self._forward(op, work)
                self._reach("forward")
            else:
                self._backward(op, work, is_last=number + 1 == len(mine))
        self._mail.settle()
        work.sync.post(self._share_rows(work), work.mine, work.standing())

    def _forward(self, op: Op, work: Work) -> None:
        plan, piece, data = work.plan, work.plan.pieces[op.microbatch], self._data[op.microbatch]
        flight, chunk = Flight(), self._line.chunks[op.chunk]
        is_last = op.chunk + 1 == self._line.num_chunks
        given: tuple[Any, ...] = ()

        def act(*args: Any, **kwargs: Any) -> Any:
            nonlocal given
            if stand_in.num_calls > 1:
                raise wrong_calls(stand_in.num_calls)
            inputs = self._line.form.tensors(args, kwargs)
            given = chunk.train(chunk.train_root, *inputs, *self._arrive(op, flight))
            if not is_last:
                raise Left
            return given[0]

        stand_in = StandIn(self._model, act)
        compute = self._compute
        compute.prepare(plan, piece, work.at_start)
        with in_user_code(self._rank(), plan.step, data, "loss(model, batch)", compute.loss):
            with self._fresh_buffers(), autocast(compute.settings.precision, compute.device):
                try:
                    result = compute.loss(cast(nn.Module, stand_in), data)
                    stand_in.check_called()
                except Left:
                    pass
            if is_last:
                flight.total, flight.factor, row = compute.conclude(
                    result, plan, piece, has_buffers=work.at_start is not None
                )
                self._add_row(op.microbatch, row, work)
            else:
                self._hand_on(op, given, flight)
                self._add_row(op.microbatch, self._own_row(op.microbatch, work), work)
        self._flights[op.chunk, op.microbatch] = flight

    def _arrive(self, op: Op, flight: Flight) -> tuple[Any, ...]:
        """What the chunk before hands on, ready to be differentiated; and random numbers go on where it ended."""
        if op.chunk == 0:
            return ()
        source = self._line.worker(op.chunk - 1)
        message = Message(True, op.chunk, op.microbatch)
        fact, tensors, randomness = self._mail.take(message, source, lambda found: self._receive(found, source))
        if randomness is not None:
            set_randomness(randomness, self._compute.device)
        wanted = [needs for _, _, needs in tensors_in(fact)]
        flight.arrival = Arrival([tensor for tensor, needs in zip(tensors, wanted, strict=True) if needs])
        entered = iter(flight.arrival.enter())
        ready = [next(entered) if needs else tensor for tensor, needs in zip(tensors, wanted, strict=True)]
        values: tuple[Any, ...] = rebuild_values(fact, iter(ready), self._compute.device)
        return values

    def _receive(self, message: Message, source: int) -> Any:
        """Any message of this step, as it comes."""
        if message.is_forward:
            fact, tensors = self._mail.recv(source, (message.chunk, self._signatures[message.microbatch]))
            randomness = None
            if self._compute.is_random:
                randomness = read_randomness(self._compute.device)
                self._mail.fill(randomness, source)
            return fact, tensors, randomness
        given = self._flights[message.chunk, message.microbatch].given
        return self._mail.recv_tensors([(tensor.dtype, tensor.shape) for tensor in given], source)

    def _hand_on(self, op: Op, given: tuple[Any, ...], flight: Flight) -> None:
        to, key = self._line.worker(op.chunk + 1), (op.chunk + 1, self._signatures[op.microbatch])
        tensors = self._mail.send(given, to, key)
        if self._compute.is_random:
            self._mail.send_tensors([read_randomness(self._compute.device)], to)
        flight.given = [tensor for tensor in tensors if tensor.requires_grad]

    def _backward(self, op: Op, work: Work, *, is_last: bool) -> None:
        piece, flight = work.plan.pieces[op.microbatch], self._flights[op.chunk, op.microbatch]
        gradients = self._gradients(op, flight)
        work.sync.gradients.open((piece.shards.start, piece.shards.stop), is_last=is_last)
        given = [flight.total] if flight.total is not None else flight.given
        with in_user_code(self._rank(), work.plan.step, self._data[op.microbatch], "the backward of the loss"):
            if given:
                torch.autograd.backward(given, gradients)
        work.sync.gradients.close()
        del self._flights[op.chunk, op.microbatch]
        if flight.arrival is not None:
            self._mail.send_tensors(flight.arrival.gradients, self._line.worker(op.chunk - 1))

    def _gradients(self, op: Op, flight: Flight) -> list[torch.Tensor]:
        if flight.total is not None:
            return [torch.tensor(flight.factor, dtype=flight.total.dtype, device=flight.total.device)]
        source, message = self._line.worker(op.chunk + 1), Message(False, op.chunk, op.microbatch)
        found: list[torch.Tensor] = self._mail.take(message, source, lambda each: self._receive(each, source))
        return found

    # What is told of a step.

    def _own_row(self, number: int, work: Work) -> Row:
        piece = work.plan.pieces[number]
        buffers = self._compute.buffers.read() if work.at_start is not None else None
        return Row(shard=piece.shards.start, weight=0.0, loss=0.0, num_samples=piece.num_samples, buffers=buffers)

    def _add_row(self, number: int, row: Row, work: Work) -> None:
        """Each chunk changes buffers of its own, from what they were at the start."""
        before = self._rows.get(number)
        if before is not None and before.buffers is not None:
            assert row.buffers is not None
            assert work.at_start is not None
            row = replace(row, buffers=torch.where(row.buffers.ne(work.at_start), row.buffers, before.buffers))
        self._rows[number] = row

    def _share_rows(self, work: Work) -> list[Row]:
        """The last stage knows what each piece weighs and lost; each stage knows its own buffers."""
        rows = [self._rows[number] for number in sorted(self._rows)]
        told = torch.tensor([[row.weight, row.loss] for row in rows], dtype=torch.float64).reshape(-1)
        if rows:
            self._line.parts.broadcast(told, root=self._line.last_worker).wait()
        pairs = told.view(-1, 2).tolist()
        return [replace(row, weight=weight, loss=loss) for row, (weight, loss) in zip(rows, pairs, strict=True)]

    @contextmanager
    def _fresh_buffers(self) -> Iterator[None]:
        """Inside, a forward changes copies: backward may need what another forward would overwrite."""
        copies = {id(buffer): buffer.clone() for _, _, buffer in self._buffers}
        for owner, name, buffer in self._buffers:
            owner._buffers[name] = copies[id(buffer)]
        try:
            yield
        finally:
            for owner, name, buffer in self._buffers:
                buffer.copy_(cast(torch.Tensor, owner._buffers[name]).detach())
                owner._buffers[name] = buffer

    # Using the model.

    def use(self, function: Forward, batch: Any) -> Any:
        """All workers run the function, and each call of the model goes through all stages."""
        return function(cast(nn.Module, StandIn(self._model, self._answer)), batch)

    def _answer(self, *args: Any, **kwargs: Any) -> Any:
        line, received, output = self._line, (), None
        inputs = line.form.tensors(args, kwargs)
        key = signature(inputs)
        for index, chunk in line.chunks.items():
            if index > 0:
                fact, tensors = self._mail.recv(line.worker(index - 1), ("use", index, key))
                received = rebuild_values(fact, iter(tensors), self._compute.device)
            given = chunk.evaluate(chunk.evaluate_root, *inputs, *received)
            if index + 1 == line.num_chunks:
                output = given[0]
            else:
                self._mail.send(given, line.worker(index + 1), ("use", index + 1, key))
        self._mail.settle()
        return self._mail.share(output, line.last_worker)


def owned_buffers(model: nn.Module, changing: Sequence[torch.Tensor]) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Which module has each of these buffers, and under which name."""
    wanted = {id(buffer) for buffer in changing}
    return [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and id(buffer) in wanted
    ]


def set_randomness(state: torch.Tensor, device: torch.device) -> None:
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[size:], device)

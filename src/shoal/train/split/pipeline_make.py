"""From a whole model to stages: how it is called, where it is cut, and what of it this worker keeps."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shoal.comm.group import Group
from shoal.spec.errors import UserError
from shoal.spec.strategy import Pipeline
from shoal.train.compute import Compute, autocast, uncompiled
from shoal.train.cut import Cut, Held
from shoal.train.errors import in_user_code
from shoal.train.evaluation import evaluating
from shoal.train.flat import named_tensors, shorten
from shoal.train.groups import Groups
from shoal.train.handover import share_facts
from shoal.train.loss import move
from shoal.train.saving import say
from shoal.train.split.balance import choose_bounds, measure_parts, stage_bytes
from shoal.train.split.counting import check_counting, find_changed, read_numbers
from shoal.train.split.cutting import Places, find_places, given_places
from shoal.train.split.pipeline import Chunk, Line, Pipelined
from shoal.train.split.programs import write_down
from shoal.train.split.schedule import CHUNKS, count_kept, ideal_bubble
from shoal.train.split.stages import Program, Stage
from shoal.train.split.standin import CallForm, StandIn
from shoal.train.traits import keeping_buffers

if TYPE_CHECKING:
    from shoal.train.split.make import Material

Given = Callable[[tuple[Any, ...]], tuple[Any, ...]]

STATE_BYTES = 4
"""Of a parameter, its gradient and the two moments of Adam, in parameters: what the state of a stage needs."""


class PipelineDraft:
    """A forward that was written down, and where it can be cut into stages."""

    def __init__(self, wanted: Pipeline, material: "Material") -> None:
        compute = material.compute
        self._wanted, self._material = wanted, material
        self._model = model = uncompiled(compute.model)
        self._num_chunks = CHUNKS[wanted.schedule] * wanted.size
        check_settings(wanted, compute, model)
        batch = move(material.first, compute.device)
        with untouched(model), autocast(compute.settings.precision, compute.device):
            numbers = read_numbers(model)
            args, kwargs = capture_call(compute, model, batch, material.rank())
            changed = find_changed(model, numbers)
            self._programs = write_programs(model, args, kwargs, self._num_chunks, wanted.cuts or ())
            check_counting(model, self._programs[0], changed)
        self._places = find_places(self._programs[0], model, compute.buffers.tensors)
        self._form = CallForm(args, kwargs)
        self._inputs = self._form.tensors(args, kwargs)
        if wanted.cuts is not None:
            self._bounds_at(wanted.cuts)
        else:
            self._places.check_enough(self._num_chunks)

    def _bounds_at(self, cuts: Sequence[str]) -> list[int]:
        return given_places(self._places, cuts, self._num_chunks, len(self._programs[0].nodes))

    def divide(self, groups: Groups, known: Mapping[str, Any] | None) -> tuple[Pipelined, Cut]:
        """Cut the model into stages, the same ones everywhere, and keep only ours."""
        assert groups.stages is not None
        return self.keep(groups.stages, self.agree(groups.everyone, known))

    def agree(self, group: Group, known: Mapping[str, Any] | None) -> list[int]:
        """Where stages begin and end, the same for all; and tell it."""
        compute, wanted = self._material.compute, self._wanted
        if known is not None:
            return self._bounds_at(known["cuts"])
        bounds = self._bounds_at(wanted.cuts) if wanted.cuts is not None else []
        report: dict[str, Any] = {}
        if not bounds:
            with untouched(self._model), autocast(compute.settings.precision, compute.device):
                bounds, report = agree_on_bounds(
                    self._programs[0], self._places, self._inputs, wanted, compute, group
                )
        self._inputs = []
        tell(wanted, self._material, self._names(bounds), self._num_chunks, report)
        return bounds

    def _names(self, bounds: Sequence[int]) -> list[str]:
        return [self._places.name_at(at) for at in bounds[1:-1]]

    def keep(self, stages: Group, bounds: Sequence[int], given: Given = tuple) -> tuple[Pipelined, Cut]:
        """Keep the parameters of our stage only. `given` is done to all that a stage hands on."""
        compute, programs, model = self._material.compute, self._programs, self._model
        names = self._names(bounds)
        chunks = make_chunks(programs, bounds, names, stages, given)
        owners = owners_of(programs[0], bounds, stages.size, [*model.parameters(), *compute.buffers.tensors])
        check_alike(programs, names, owners, stages.size)
        cut = keep_ours(model, owners, stages, names)
        line = Line(
            parts=stages,
            schedule=self._wanted.schedule,
            chunks=chunks,
            num_chunks=self._num_chunks,
            form=self._form,
        )
        return Pipelined(compute, line, self._material.rank, self._material.reach), cut

    def check_calls(self, layers: Iterable[str]) -> None:
        """Layers that are cut must be called as such: not read by code that knows only their parameters."""
        direct = {name.rpartition(".")[0] for program in self._programs for name in program.direct()}
        odd = [name for name in layers if any(f"{owner}.".startswith(f"{name}.") for owner in direct)]
        if odd:
            raise UserError(
                f"{shorten(odd)} cannot be cut within a stage.",
                why="the forward reads parameters of it directly, or cannot be followed in layers",
                hint="call the layer itself; or use one of shoal.pipeline(...) and shoal.tensor(...)",
            )


def check_settings(wanted: Pipeline, compute: Compute, model: nn.Module) -> None:
    """Refuse what cannot be computed stage by stage."""
    settings = compute.settings
    if settings.compile:
        raise UserError(
            "compile=True does not work with a pipeline.",
            why="torch.compile compiles the model as a whole, and no worker has the whole model",
            hint="leave compile= out, or compile layers yourself: `model.layers[0].compile()`",
        )
    if settings.exact and settings.max_norm is not None:
        raise UserError(
            "exact=True does not work with max_norm= in a pipeline.",
            why="the norm is added up stage by stage, so its last bits would depend on where the model is cut",
            hint="leave max_norm= out, or exact=True",
        )
    if settings.exact and wanted.schedule == "interleaved":
        raise UserError(
            "exact=True does not work with the interleaved schedule.",
            why="gradients of a worker's two chunks come in turns, and would be added up in another order",
            hint='use schedule="1f1b"',
        )
    if model._forward_hooks or model._forward_pre_hooks or model._backward_hooks:
        raise UserError(
            f"The model ({type(model).__name__}) has hooks on itself.",
            why="in a pipeline no worker calls the whole model, so they would not be called",
            hint="put hooks on its layers instead",
        )


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Inside, forwards and backwards may be tried: buffers, gradients and random numbers are as before afterwards."""
    with keeping_buffers(model), torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for parameter in model.parameters():
                parameter.grad = None


def capture_call(
    compute: Compute, model: nn.Module, batch: Any, rank: int
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """What the loss gives to the model, on the first samples; it must call it once."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def act(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return model(*args, **kwargs)

    stand_in = StandIn(model, act)
    with (
        torch.no_grad(),
        in_user_code(rank, 0, batch, "loss(model, batch), tried on the first samples", compute.loss),
    ):
        compute.loss(cast(nn.Module, stand_in), batch)
        stand_in.check_called()
    return calls[0]


def write_programs(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], num_chunks: int, cuts: Sequence[str]
) -> tuple[Program, Program]:
    """The forward in training, and in evaluation: a model's code may ask in which it is."""
    train = write_down(model, args, kwargs, num_chunks, cuts)
    with evaluating(model):
        return train, write_down(model, args, kwargs, num_chunks, cuts)


def agree_on_bounds(
    program: Program, places: Places, inputs: Sequence[torch.Tensor], wanted: Pipeline, compute: Compute, group: Group
) -> tuple[list[int], dict[str, Any]]:
    """Measure on rank 0, and cut everywhere where that says. `inputs` are those of one micro-batch."""
    facts: dict[str, Any] | None = None
    if group.rank == 0:
        every = [0, *places.allowed, len(program.nodes)]
        held = [*compute.model.parameters(), *compute.model.buffers()]
        seconds, saved = measure_parts(
            program, every, inputs, lambda: autocast(compute.settings.precision, compute.device), held
        )
        state = [STATE_BYTES * places.num_bytes(start, stop) for start, stop in pairwise(every)]
        kept = count_kept(wanted.schedule, wanted.size, wanted.num_microbatches)
        need = stage_bytes(state, saved, kept)
        chosen = choose_bounds(seconds, need, len(kept))
        spans = list(pairwise(chosen))
        facts = {
            "bounds": [every[index] for index in chosen],
            "ms": [round(1e3 * sum(seconds[start:stop]), 3) for start, stop in spans],
            "mib": [round(need(stage, *span) / 2**20, 3) for stage, span in enumerate(spans)],
        }
    told = share_facts(group, facts, 0)
    return told.pop("bounds"), told


def make_chunks(
    programs: tuple[Program, Program], bounds: Sequence[int], names: Sequence[str], parts: Group, given: Given
) -> dict[int, Chunk]:
    def stage(program: Program, start: int, stop: int) -> Stage:
        made = program.extract(start, stop)
        return lambda *values: given(made(*values))

    train, evaluate = programs
    other = evaluate_bounds(evaluate, names)
    return {
        index: Chunk(
            index=index,
            train=stage(train, bounds[index], bounds[index + 1]),
            evaluate=stage(evaluate, other[index], other[index + 1]),
            train_root=train.root,
            evaluate_root=evaluate.root,
        )
        for index in range(parts.rank, len(bounds) - 1, parts.size)
    }


def evaluate_bounds(program: Program, names: Sequence[str]) -> list[int]:
    """The same cuts in the forward of evaluation."""
    found = {layer.name: layer.at for layer in program.layers}
    missing = [name for name in names if name not in found]
    bounds = [0, *(found.get(name, 0) for name in names), len(program.nodes)]
    if missing or bounds != sorted(bounds):
        raise UserError(
            f"The model takes another way in evaluation: {(missing or names)[0]} is not called in the same place.",
            why="a pipeline has the same stages in training and in evaluation",
            hint="choose other cuts with `shoal.pipeline(2, cuts=(...))`",
        )
    return bounds


def owners_of(program: Program, bounds: Sequence[int], size: int, values: Sequence[torch.Tensor]) -> dict[int, int]:
    """Of every such value, by identity, the worker whose chunk reads it; what nobody reads is the first's."""
    chunk_of = {
        key: next(index for index in range(len(bounds) - 1) if first < bounds[index + 1])
        for key, (_, first, _) in program.spans().items()
    }
    return {id(value): chunk_of.get(id(value), 0) % size for value in values}


def check_alike(
    programs: tuple[Program, Program], names: Sequence[str], owners: Mapping[int, int], size: int
) -> None:
    """What a stage reads in evaluation must be what it has in training."""
    bounds = evaluate_bounds(programs[1], names)
    for key, (name, first, last) in programs[1].spans().items():
        workers = {next(i for i in range(len(bounds) - 1) if at < bounds[i + 1]) % size for at in (first, last)}
        if key in owners and workers != {owners[key]}:
            raise UserError(
                f"{name} is read by another stage in evaluation than in training.",
                why="a stage has the parameters of its own layers only",
                hint="choose other cuts with `shoal.pipeline(2, cuts=(...))`",
            )


def keep_ours(model: nn.Module, owners: Mapping[int, int], parts: Group, cuts: Sequence[str]) -> Cut:
    """Let go of other stages' parameters. Buffers are small and stay; those that change are their stage's."""
    held: dict[str, Sequence[Held]] = {
        name: [... if part == owners[id(value)] else None for part in range(parts.size)]
        for name, value in named_tensors(model)
        if id(value) in owners
    }
    for parameter in model.parameters():
        if owners[id(parameter)] != parts.rank:
            parameter.data = parameter.data.new_empty(0)
    return Cut(held=held, facts={"cuts": list(cuts)})


def tell(
    wanted: Pipeline, material: "Material", names: Sequence[str], num_chunks: int, report: Mapping[str, Any]
) -> None:
    """Show where the model was cut."""
    if material.rank() != 0:
        return
    data = {"split": str(wanted), "cuts": list(names), "chunks": num_chunks, **report}
    data["ideal_bubble"] = ideal_bubble(wanted.schedule, wanted.size, wanted.num_microbatches)
    material.recorder.event("pipeline", None, **data)
    starts = ["the first layer", *names]
    shown = [
        f"{start} ({report['ms'][index]:.3g} ms, {report['mib'][index]:.3g} MiB)" if report else start
        for index, start in enumerate(starts)
    ]
    say(f"shoal: pipeline of {num_chunks} stages beginning with {', '.join(shown)}", 0)

"""Everything a trainer needs before its first step, made and checked one by one."""

import math
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shoal import files
from shoal.checkpoint.foreign import ELSEWHERE, read_weights
from shoal.checkpoint.store import FolderStore
from shoal.checkpoint.transfer import transfer
from shoal.comm.group import Group, Op
from shoal.comm.rendezvous import Rendezvous, nobody_looks
from shoal.comm.rendezvous import open_store as open_meeting
from shoal.comm.shm import ShmGroup
from shoal.data.columns import ColumnSource
from shoal.data.ledger import Ledger, Place, check_batch_size
from shoal.data.sources import Source, as_source
from shoal.data.stream import StreamSource
from shoal.engine.env import WorkerFacts, shoal_home
from shoal.files import Url, locate
from shoal.observe import runs
from shoal.observe.folder import read_facts
from shoal.observe.recorder import Recorder
from shoal.spec.errors import UserError
from shoal.spec.strategy import AllReduce, Local, Sharded
from shoal.train.agree import find_different_data
from shoal.train.chunked import is_elementwise
from shoal.train.compute import autocast
from shoal.train.errors import in_user_code
from shoal.train.flat import plan_flat, shorten
from shoal.train.lone import LoneRun
from shoal.train.loss import Loss, as_sum, move
from shoal.train.own_numbers import log_to, own_folder
from shoal.train.room import Limit, Room, first_piece, gauge_of
from shoal.train.saving import SaveReport, say
from shoal.train.settings import Settings, values_of
from shoal.train.sync.across import Across
from shoal.train.sync.local import LocalSync
from shoal.train.sync.message import MessageSync
from shoal.train.sync.sharded import make_sharded
from shoal.train.sync.shared import SharedMemorySync, share_slots
from shoal.train.sync.sync import Sync
from shoal.train.traits import ChangingBuffers, Traits, probe
from shoal.train.waiting import Waiting

SHARDS_ALONE = 8
"""Into how many shards a step is cut where each must be computed by itself: enough to share out, few to be fast."""

SHARDS_MERGED = 256
"""And where neighbours can be computed together: then more of them cost nothing, and shares are finer."""

_num_trainers = 0


def count_trainers() -> int:
    """How many trainers this process has made before: each needs a meeting place of its own."""
    global _num_trainers
    _num_trainers += 1
    return _num_trainers - 1


def open_run(
    facts: WorkerFacts, run_dir: str | None, is_resumed: bool, opened: ExitStack
) -> tuple[str | None, Recorder]:
    """The run folder: the launcher's, or one of our own where there is no launcher of ours."""
    if is_resumed and facts.run_dir is None and run_dir is None:
        raise UserError(
            "resume=True does not say which run to continue.",
            why="without a launcher and without `run_dir=`, every start has a new run folder",
            hint="name its folder with `run_dir=`, or start with `shoal run --resume RUN`",
        )
    own = own_folder()
    run_dir = facts.run_dir or run_dir or own
    if facts.run_dir is None and facts.rank == 0 and (own is None or run_dir != own):
        run_dir = opened.enter_context(LoneRun(run_dir, is_resumed)).path
    recorder = Recorder(run_dir, facts.rank, facts.world_size, facts.control_fd, generation=facts.generation)
    opened.callback(recorder.close)
    opened.callback(log_to(run_dir, facts.rank, recorder).flush)
    return run_dir, recorder


def start_from(model: nn.Module, init_from: str | None, strict: bool, recorder: Recorder) -> None:
    """Take over the weights of another run, checkpoint or file."""
    if init_from is None:
        return
    path = init_from if files.is_url(init_from) else find_weights(init_from)
    done = transfer(model, read_weights(path), strict=strict)
    recorder.event("initialized", source=files.mask(str(path)), report=done.report())
    if recorder.rank == 0 and not strict:
        print(done.report(), file=sys.stderr)


def find_weights(init_from: str | os.PathLike[str]) -> Path:
    """The file or folder that was named, or the folder of a run of that name."""
    if not isinstance(init_from, str | os.PathLike):
        raise UserError(
            f"init_from is of type {type(init_from).__name__}.",
            why="it must name a run, a checkpoint folder, or a file of weights",
            hint="save the weights first, or copy them with `model.load_state_dict(...)`",
        )
    path = Path(init_from)
    if path.exists():
        return path
    if path.suffix or len(path.parts) > 1:
        raise UserError(
            f"There is no {path} to start from.",
            why=f"looked for {path.absolute()}",
            hint="check the path that `init_from=` names; a run is named as `shoal ps` shows it",
        )
    return Path(runs.find_run(shoal_home(), str(init_from)).path)


def make_source(dataset: Any, collate: Any, settings: Settings, *, is_whole: bool = True) -> Source:
    source = as_source(dataset, collate=collate, copies=Path(shoal_home(), "cache"))
    if is_whole and source.num_samples is not None:
        check_batch_size(source.num_samples, settings.batch_size)
    return source


@cache
def meeting(address: str, port: int, rank: int, size: int) -> dist.Store:
    """Where the workers meet. One for all trainers of a process: it ends with rank 0's, under the others' feet."""
    return open_meeting(address, port, rank, size)


def meet(facts: WorkerFacts, settings: Settings, trainer: int) -> Rendezvous:
    """Where the workers of a run of fixed size find each other."""
    store = None
    if facts.world_size > 1:
        store = dist.PrefixStore(
            f"trainer-{trainer}", meeting(facts.master_addr, facts.master_port, facts.rank, facts.world_size)
        )
    return Rendezvous(
        facts.rank,
        facts.world_size,
        settings.timeout_seconds,
        store=store,
        generation=facts.generation,
        look=Waiting(facts.control_fd).look if facts.control_fd is not None else nobody_looks,
        interface=facts.interface,
    )


def probe_model(
    model: nn.Module,
    loss: Loss,
    source: Source,
    settings: Settings,
    device: torch.device,
    rank: int,
    limit: Limit | None = None,
) -> Traits:
    """Run the loss once on the first samples: what the model does besides computing, and whether it works at all.

    Where somebody has set a limit of memory, two samples first say how many may be tried.
    """
    count = -(-settings.batch_size // SHARDS_ALONE)

    def attempt(count: int) -> Traits:
        batch = move(first_samples(source, count), device)

        def forward() -> None:
            what = "loss(model, batch), tried on the first samples"
            with in_user_code(rank, 0, batch, what, loss), autocast(settings.precision, device):
                as_sum(loss(model, batch), 1)

        return probe(model, forward, settings.seed, count, device)

    if limit is not None and limit.is_set and count > 2:
        saved_bytes = attempt(2).saved_bytes
        count = max(2, first_piece(saved_bytes, gauge_of(device).used(), limit, count) or count)
    return attempt(count)


def first_samples(source: Source, count: int) -> Any:
    if isinstance(source, StreamSource):
        return source.first(count)
    return source.fetch(np.arange(min(count, source.num_samples)))


def make_ledger(settings: Settings, source: Source, traits: Traits, num_workers: int) -> Ledger:
    """Fix how steps are cut. It depends on the settings and the model, never on the number of workers.

    Copies that train by themselves are an exception: there a shard is what one of them learns from at a time.
    """
    num_shards = choose_shards(settings, traits)
    if isinstance(settings.sync, Local):
        # Each is an update of one copy: one for each, if nothing is said.
        num_shards = settings.shards or num_workers
    if num_shards < num_workers:
        raise UserError(
            f"{num_workers} workers are too many for a step of {settings.batch_size} samples in {num_shards} shards.",
            why="a shard is computed by one worker, so some workers would have nothing to do",
            hint=f"start fewer (`-n {num_shards}`), or use a batch_size and `shards=` of {num_workers} or more",
        )
    return Ledger(
        num_samples=source.num_samples,
        batch_size=settings.batch_size,
        num_shards=num_shards,
        seed=settings.seed,
        shuffle=settings.shuffle,
    )


def choose_shards(settings: Settings, traits: Traits) -> int:
    if settings.shards is not None:
        if settings.shards > settings.batch_size:
            raise UserError(
                f"A batch of {settings.batch_size} samples cannot be cut into {settings.shards} shards.",
                why="a shard has at least one sample",
                hint=f"use shards={settings.batch_size} or fewer",
            )
        _check_exact_shards(settings, settings.shards)
        return settings.shards
    alone = settings.exact or not traits.is_plain
    num_shards = SHARDS_ALONE if alone else SHARDS_MERGED
    if alone and settings.microbatch_size:
        num_shards = max(num_shards, math.ceil(settings.batch_size / settings.microbatch_size))
    return min(num_shards, settings.batch_size)


def check_rounds(settings: Settings, ledger: Ledger, epochs: int | None, steps: int | None) -> None:
    """Refuse to train for less than a round, where that is known: nobody would ever agree on the way."""
    if not isinstance(settings.sync, Local) or settings.sync.every is None:
        return
    every, num_steps = settings.sync.every, steps
    if epochs and ledger.steps_per_epoch is not None:
        num_steps = epochs * ledger.steps_per_epoch
    if num_steps and every > num_steps:
        raise UserError(
            f"The workers would agree every {every} steps, and fit() is to take {num_steps}.",
            why="a round that is longer than the run is never completed",
            hint=f"use every={num_steps} or less, or train longer",
        )


def tell_round(settings: Settings, ledger: Ledger, rank: int) -> None:
    """How long a loop of the user's own will be is not known: where an epoch is less than a round, say so."""
    every = settings.sync.every if isinstance(settings.sync, Local) else None
    if every is None or ledger.steps_per_epoch is None or every <= ledger.steps_per_epoch:
        return
    first = -(-every // ledger.steps_per_epoch)
    say(
        f"shoal: an epoch has {ledger.steps_per_epoch} step(s), and the workers agree every {every}: first in epoch "
        f"{first}. A loop that ends before that leaves each of them with parameters of its own",
        rank,
    )


def _check_exact_shards(settings: Settings, num_shards: int) -> None:
    """In exact mode sums are taken shard by shard, so a shard must be computed in one piece."""
    largest = -(-settings.batch_size // num_shards)
    if settings.exact and settings.microbatch_size is not None and largest > settings.microbatch_size:
        raise UserError(
            f"Shards of {largest} samples do not fit into microbatch_size={settings.microbatch_size} in exact mode.",
            why="sums are taken shard by shard in exact mode, so each is computed in one piece",
            hint=f"use shards={-(-settings.batch_size // settings.microbatch_size)} or more, or leave shards= out",
        )


def make_sync(
    group: Group,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    num_shards: int,
    *,
    source: int = 0,
    is_elastic: bool = False,
    is_inherited: bool = False,
    reach: Callable[[str], None] = lambda point: None,
    across: Across | None = None,
    buffers: ChangingBuffers | None = None,
    homes: Mapping[str, Sequence[str]] | None = None,
) -> Sync:
    """One set of parameters in shared memory where that is possible, else a copy for each worker.

    With `is_inherited` state that was divided comes later, part by part, and the source has no parameters.
    """
    share_rest(group, model, source)
    keywords: dict[str, Any] = {
        "num_shards": num_shards,
        "exact": settings.exact,
        "max_norm": settings.max_norm,
        "ema_decay": settings.ema,
        "source": source,
        "is_elastic": is_elastic,
        "reach": reach,
    }
    if isinstance(settings.sync, Local):
        del keywords["exact"]
        return LocalSync(group, model, optimizer, settings.sync, buffers=buffers, across=across, **keywords)
    if isinstance(settings.sync, Sharded):
        # What a split has made of a model may use parameters elsewhere, and what torch.compile makes has no hooks.
        known = None if settings.split is not None or settings.compile else homes
        keywords |= {"is_inherited": is_inherited, "is_mirrored": is_elastic and settings.redundancy > 0}
        return make_sharded(settings.sync, group, model, optimizer, across, known, keywords)
    if isinstance(group, ShmGroup) and is_elementwise(optimizer) and across is None:
        return SharedMemorySync(group, model, optimizer, **keywords)
    is_mixed = find_mixed(group, next(model.parameters()).device, exact=settings.exact)
    return MessageSync(group, model, optimizer, across=across, is_mixed=is_mixed, **keywords)


def take_memory(
    group: Group, model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings, num_shards: int
) -> None:
    """Take, in a group of one, what this worker will bring into a group with others: they would wait for it.

    Nothing where they are going to send messages, or divide the model.
    """
    is_plain = isinstance(settings.sync, AllReduce) and settings.split is None and settings.transport != "tcp"
    if is_plain and isinstance(group, ShmGroup) and is_elementwise(optimizer):
        share_slots(group, *plan_flat(model, optimizer), num_shards, exact=settings.exact)


def find_mixed(group: Group, device: torch.device, *, exact: bool) -> bool:
    """Whether some of the group compute on a GPU and others do not. All members call it together."""
    on_gpu = torch.tensor([device.type != "cpu"], dtype=torch.int32)
    group.all_reduce(on_gpu).wait()
    is_mixed = 0 < int(on_gpu) < group.size
    if exact and is_mixed:
        raise UserError(
            "exact=True needs workers of one kind, and some compute on a GPU and others on a CPU.",
            why="their kernels add in other orders, so results differ in the last bits",
            hint='use device="cpu" on all workers, or leave exact=True out',
        )
    return is_mixed


def share_rest(group: Group, model: nn.Module, source: int) -> None:
    """Give everyone the source's buffers and frozen parameters."""
    state = model.state_dict(keep_vars=True)
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    for value in tensors:
        if not value.requires_grad and value.numel():
            data = value.detach().contiguous().view(-1).view(torch.uint8).clone()
            group.broadcast(data, root=source).wait()
            value.detach().copy_(data.view(value.dtype).view(value.shape))


def check_same_data(group: Group, source: Source, recorder: Recorder) -> None:
    """Refuse datasets that were cut by rank, or warn where they only seem to be."""
    rank = find_different_data(group, source) if group.size > 1 else None
    if rank is None:
        return
    error = UserError(
        f"The workers have different datasets: that of rank {rank} is not that of rank 0.",
        why="it was cut by rank already, and would be divided a second time; or made at random without a seed",
        hint="pass the whole dataset to every worker: shoal divides it, so that each sample is used once",
    )
    # Code that reads samples may have a randomness of its own; columns are what they are.
    if isinstance(source, ColumnSource):
        raise error
    recorder.event("different_data", message=error.message)
    say(error.at(rank=rank).render().replace("error:", "warning:", 1), recorder.rank)


def check_unused(group: Group, sync: Sync, unused: str) -> None:
    """Parameters that no worker's samples reached in the first step are most likely a mistake."""
    layout = sync.replica.flat.layout
    used = torch.ones(len(layout.names), dtype=torch.int32)
    used[list(sync.gradients.unused)] = 0
    group.all_reduce(used, Op.MAX).wait()
    names = [name for name, is_used in zip(layout.names, used.tolist(), strict=True) if not is_used]
    if names and unused == "error":
        raise UserError(
            f"{len(names)} parameter(s) got no gradient: {shorten(names)}.",
            why="no sample of the whole batch reached them, so training cannot change them",
            hint="freeze them with `requires_grad_(False)`, remove them, or pass unused='zero'",
        )


def check_same_step(group: Group, step: int) -> None:
    """All workers must resume from the same checkpoint."""
    everyone = torch.empty(group.size, dtype=torch.int64)
    group.all_gather(everyone, torch.tensor([step])).wait()
    if len(set(everyone.tolist())) > 1:
        raise UserError(
            f"The workers found different checkpoints: steps {sorted(set(everyone.tolist()))}.",
            why="they do not see the same run folder, or it changed while they started",
            hint="put the run folder where all workers see it",
        )


def open_store(
    facts: WorkerFacts,
    run_dir: str | None,
    settings: Settings,
    recorder: Recorder,
    trainer: int,
    opened: ExitStack,
    is_resumed: bool,
) -> FolderStore | None:
    """Where checkpoints go; None where nothing is kept. A URL is asked first whether it can be used."""
    where = settings.checkpoint_dir or run_dir
    if where is None:
        return None
    folder = locate(where)
    if isinstance(folder, Url):
        files.check(folder)
    report = SaveReport(recorder)
    # Trainers of one launched run share its folder; a lone trainer has a folder to itself.
    name = "checkpoints" if trainer == 0 or facts.run_dir is None else f"checkpoints-{trainer}"
    store = FolderStore(folder / name, keep=settings.keep, on_event=report.tell)
    is_first = facts.rank == 0 and facts.incarnation == 0 and not is_resumed
    if settings.checkpoint_dir is not None and run_dir is not None and is_first:
        _check_unused_place(store, float(read_facts(run_dir).get("created") or 0.0))
    if settings.checkpoint_dir is not None and run_dir is not None and facts.rank == 0:
        with suppress(OSError):  # this machine may not see the run folder
            Path(run_dir, ELSEWHERE).write_text(str(folder if isinstance(folder, Url) else folder.absolute()))
    opened.push(report)
    opened.callback(store.close)
    return store


def _check_unused_place(store: FolderStore, created: float) -> None:
    """Old checkpoints of another run would go as new ones come. Those since it was `created` are this run's own."""
    if there := [entry for entry in store.list() if entry.saved_at < created]:
        raise UserError(
            f"{store.folder.parent} already holds the checkpoints of a run, up to step {there[0].step}.",
            why="those of this one would be mixed with them, and replace them",
            hint="choose another `checkpoint_dir`, or go on from there with `Trainer(..., resume=True)`",
        )


def record_settings(
    recorder: Recorder,
    settings: Settings,
    origins: Mapping[str, str],
    ledger: Ledger,
    traits: Traits,
    sync: str,
    num_parameters: int,
) -> None:
    """Write down every value in effect and where it came from."""
    if recorder.rank != 0:
        return
    values = {name: {"value": value, "source": origins[name]} for name, value in values_of(settings).items()}
    values["shards"] = {"value": ledger.num_shards, "source": origins["shards"] if settings.shards else "chosen"}
    values["threads"] = {"value": torch.get_num_threads(), "source": origins["threads"]}
    found = {"sync": sync, "is_random": traits.is_random, "changing_buffers": len(traits.changing)}
    found |= {"parameters": num_parameters}
    values |= {name: {"value": value, "source": "found"} for name, value in found.items()}
    recorder.event("settings", None, **values)


def record_worker(recorder: Recorder, step: int, settings: Settings, device: torch.device, room: Room) -> None:
    """Write down what this worker has for itself, which may be other than what its neighbours have."""
    limit = room.limit
    recorder.event(
        "worker_settings",
        step,
        host=platform.node(),
        device=str(device),
        precision=settings.precision,
        threads=torch.get_num_threads(),
        memory_bytes=None if limit is None else limit.num_bytes,
        memory_from=None if limit is None else limit.source,
        piece=room.piece,
    )


def next_goal(
    ledger: Ledger, goal: Place, epochs: int | None, steps: int | None
) -> tuple[int | None, int | None, Place | None]:
    """Where training so much more ends: (epoch, step, place); the place of a stream is not known beforehand."""
    amount = epochs if steps is None else steps
    if (epochs is None) == (steps is None) or not isinstance(amount, int) or isinstance(amount, bool) or amount < 0:
        given = [f"{name}={value!r}" for name, value in (("epochs", epochs), ("steps", steps)) if value is not None]
        raise UserError(
            f"fit({', '.join(given)}) does not say how long to train.",
            why="exactly one of epochs= and steps= must be given, a whole number of 0 or more",
            hint="use `trainer.fit(epochs=3)` or `trainer.fit(steps=1000)`",
        )
    if steps is not None:
        stop = goal.step + steps
        return None, stop, ledger.place(ledger.position(stop))
    epoch = goal.epoch + amount
    if ledger.num_samples is None:
        return epoch, None, None
    return epoch, None, ledger.place(epoch * ledger.num_samples)


def last_step(ledger: Ledger, stop_epoch: int | None, stop_step: int | None) -> int | None:
    """How many steps there will be in all, where that is known."""
    if stop_step is not None or stop_epoch is None or ledger.steps_per_epoch is None:
        return stop_step
    return stop_epoch * ledger.steps_per_epoch

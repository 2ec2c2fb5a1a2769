"""Loading in a thread, or between two steps: order, depth, errors, random numbers, and a clean end."""

import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from shoal.data.ledger import Ledger, StepPlan, plan_steps
from shoal.data.loader import Loader, load_steps
from shoal.data.loading import BackgroundLoading, InlineLoading
from shoal.data.sources import as_source
from shoal.spec.errors import UserError

LEDGER = Ledger(num_samples=20, batch_size=6, num_shards=3, seed=4)


def all_of(step: int) -> range:
    return range(3)


def plans(**how: Any) -> Iterator[StepPlan]:
    return plan_steps(LEDGER, LEDGER.place(0), all_of, **how)


class Numbers(Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, sample: int) -> int:
        return sample


class Augmented(Numbers):
    """Sample plus noise from all three generators."""

    def __getitem__(self, sample: int) -> Any:
        return torch.tensor([sample, torch.rand(()), random.random(), np.random.rand()], dtype=torch.float64)


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shoal-loader"]


@pytest.mark.parametrize("dataset", [torch.arange(20), Numbers()])
def test_batches_come_in_the_order_of_the_ledger(dataset: Any) -> None:
    with load_steps(as_source(dataset), LEDGER, LEDGER.place(0), all_of, stop_epoch=2) as loader:
        assert isinstance(loader._loading, BackgroundLoading)
        steps = list(loader)
    assert [plan.count for plan, _ in steps] == [6, 6, 6, 2] * 2
    for plan, (batch,) in steps:
        assert batch.tolist() == LEDGER.ids(plan.epoch, plan.offset, plan.offset + plan.count).tolist()
    assert not loader_threads()


def test_a_batch_for_each_piece() -> None:
    with Loader(as_source(torch.arange(20)), plans(stop_step=2, merge=False)) as loader:
        for plan, batches in loader:
            assert [batch.tolist() for batch in batches] == [piece.ids.tolist() for piece in plan.pieces]
            assert len(batches) == 3


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_plans_are_pulled_no_further_ahead_than_promised(depth: int) -> None:
    pulled = []

    def watched() -> Iterator[StepPlan]:
        for plan in plans(stop_epoch=5):
            pulled.append(plan.step)
            yield plan

    with Loader(as_source(torch.arange(20)), watched(), depth=depth) as loader:
        for plan, _ in loader:
            assert pulled[-1] <= plan.step + depth
    assert pulled == list(range(20))


def test_how_long_the_caller_waited_is_recorded() -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Numbers):
        def __getitem__(self, sample: int) -> int:
            if threading.current_thread().name == "shoal-loader":
                entered.set()
                go_on.wait(10)
            return sample

    with Loader(as_source(Slow()), plans(stop_step=2)) as loader:
        entered.wait(10)
        threading.Timer(0.05, go_on.set).start()
        next(loader)
        assert 0.01 < loader.load_seconds < 5
        first = loader.load_seconds
        next(loader)
        assert loader.total_load_seconds == pytest.approx(first + loader.load_seconds)


def test_closing_early_ends_the_thread_at_the_next_sample() -> None:
    read = []

    class Watched(Numbers):
        def __getitem__(self, sample: int) -> int:
            read.append(sample)
            if loader_threads() and len(read) > 5:
                closing.wait(10)
            return sample

    closing = threading.Event()
    ledger = Ledger(num_samples=20, batch_size=20)
    loader = load_steps(as_source(Watched()), ledger, ledger.place(0), lambda step: range(1), stop_epoch=1)
    while len(read) <= 5:
        pass
    threading.Timer(0.05, closing.set).start()
    loader.close()
    assert len(read) < 20
    assert not loader_threads()
    assert list(loader) == []


def test_errors_surface_with_the_step_they_belong_to() -> None:
    class Broken(Numbers):
        def __getitem__(self, sample: int) -> int:
            if sample == bad:
                raise KeyError("no such key")
            return sample

    bad = int(LEDGER.ids(0, 8, 9)[0])
    assert bad not in (0, 10, 19)
    with Loader(as_source(Broken()), plans()) as loader:
        assert next(loader)[0].step == 0
        for _ in range(2):
            with pytest.raises(UserError, match=f"Reading sample {bad} of the dataset failed") as caught:
                next(loader)
            assert caught.value.where.startswith(f"{os.path.relpath(__file__)}:")
    assert not loader_threads()


def test_a_failure_of_the_plans_themselves_surfaces() -> None:
    def failing() -> Iterator[StepPlan]:
        yield from plans(stop_step=1)
        raise ZeroDivisionError

    with Loader(as_source(torch.arange(20)), failing()) as loader, pytest.raises(ZeroDivisionError):
        list(loader)


def samples_by_id(mine: range, noise: int, **how: Any) -> dict[tuple[int, int], list[float]]:
    """(epoch, sample) -> what was drawn for it, as read by a worker that has these shards."""
    random.seed(noise)
    np.random.seed(noise)
    torch.manual_seed(noise)
    found = {}
    source = as_source(Augmented())
    with load_steps(
        source, LEDGER, LEDGER.place(0), lambda step: mine, stop_epoch=2, num_processes=0, **how
    ) as loader:
        assert isinstance(loader._loading, InlineLoading)
        for plan, batches in loader:
            torch.rand(1)
            for batch in batches:
                found.update({(plan.epoch, int(row[0])): row.tolist() for row in batch})
    return found


def test_augmentation_depends_on_the_sample_and_the_epoch_only() -> None:
    whole = samples_by_id(range(3), noise=1)
    assert len(whole) == 40
    shared = samples_by_id(range(1), noise=2, merge=False) | samples_by_id(range(1, 3), noise=3, max_piece=2)
    assert shared == whole
    assert whole[0, 3] != whole[1, 3]
    assert whole[0, 3][1:] != whole[0, 4][1:]


@pytest.mark.parametrize("dataset", [torch.arange(20), Numbers(), Augmented()])
def test_loading_does_not_disturb_the_random_numbers_of_training(dataset: Any) -> None:
    def draw() -> list[float]:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        drawn = []
        with Loader(as_source(dataset), plans(stop_epoch=3), num_processes=0) as loader:
            for _ in loader:
                drawn += [float(torch.rand(())), random.random(), np.random.rand()]
        return drawn

    expected = draw()
    torch.manual_seed(5)
    assert [float(torch.rand(())) for _ in range(12)] == expected[::3]


def test_a_stream_can_be_read_between_the_steps() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

    ledger = Ledger(num_samples=None, batch_size=4, num_shards=3)
    source = as_source(Stream())
    with load_steps(source, ledger, ledger.place(0), all_of, stop_epoch=2, num_processes=0) as loader:
        steps = [(plan.step, plan.epoch, batch.tolist()) for plan, (batch,) in loader]
    assert steps[2:4] == [(2, 0, [8, 9]), (3, 1, [0, 1, 2, 3])]


@pytest.mark.parametrize(("depth", "num_processes"), [(0, None), (2, -1)])
def test_impossible_loaders_are_refused(depth: int, num_processes: int | None) -> None:
    with pytest.raises(UserError, match="A loader cannot have"):
        Loader(as_source(torch.arange(20)), plans(), depth=depth, num_processes=num_processes)

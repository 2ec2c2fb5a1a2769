"""Streams: every worker walks the same one, each sample is used once, and the epoch ends when it ends."""

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from shoal.data.ledger import Ledger, Place, StepPlan, plan_steps
from shoal.data.shares import assign
from shoal.data.sources import as_source
from shoal.data.stream import StreamReader, StreamSource
from shoal.spec.errors import UserError


class Lengths:
    """A stream whose epochs have the given lengths, the last one repeated; sample n of epoch e is 1000 * e + n."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.epoch = 0
        self.opened: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.opened.append(self.epoch)
        length = self.lengths[min(self.epoch, len(self.lengths) - 1)]
        return iter(range(1000 * self.epoch, 1000 * self.epoch + length))


def walk(
    dataset: Any, ledger: Ledger, mine: range, place: Place | None = None, epochs: int = 2
) -> list[tuple[StepPlan, list[int]]]:
    reader = StreamReader(StreamSource(dataset, collate=list), ledger.seed, stop_epoch=epochs)
    steps = []
    for plan in plan_steps(ledger, place or ledger.place(0), lambda step: mine):
        loaded = reader.load(plan)
        if loaded is None:
            return steps
        steps.append((loaded[0], [sample for batch in loaded[1] for sample in batch]))
    raise AssertionError("the plans of a stream do not end")


def stream_ledger(batch_size: int, num_shards: int = 4) -> Ledger:
    return Ledger(num_samples=None, batch_size=batch_size, num_shards=num_shards)


def test_epochs_end_when_the_stream_ends() -> None:
    steps = walk(Lengths(10, 7, 4), stream_ledger(4), range(4), epochs=3)
    assert [(p.step, p.epoch, p.offset, p.position, p.count) for p, _ in steps] == [
        (0, 0, 0, 0, 4),
        (1, 0, 4, 4, 4),
        (2, 0, 8, 8, 2),
        (3, 1, 0, 10, 4),
        (4, 1, 4, 14, 3),
        (5, 2, 0, 17, 4),
    ]
    assert steps[-1][1] == [2000, 2001, 2002, 2003]
    afters = [plan.after for plan, _ in steps]
    assert afters[:-1] == [plan.place for plan, _ in steps[1:]]
    assert afters[-1] == Place(step=6, epoch=3, offset=0, position=21)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.integers(1, 12),
    st.integers(1, 9),
    st.lists(st.floats(0.1, 5), min_size=1, max_size=4),
)
def test_workers_share_a_stream_without_a_word(
    lengths: list[int], batch_size: int, num_shards: int, shares: list[float]
) -> None:
    ledger = stream_ledger(batch_size, num_shards)
    workers = [walk(Lengths(*lengths), ledger, mine) for mine in assign(num_shards, shares)]
    assert len({len(steps) for steps in workers}) == 1
    used = [sample for step in zip(*workers, strict=True) for _, samples in step for sample in samples]
    assert used == [*Lengths(*lengths)] + [1000 + n for n in range(lengths[min(1, len(lengths) - 1)])]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=3), st.integers(1, 8), st.data())
def test_resuming_from_the_position_alone_walks_to_the_same_place(
    lengths: list[int], batch_size: int, data: st.DataObject
) -> None:
    ledger = stream_ledger(batch_size)
    whole = walk(Lengths(*lengths), ledger, range(4), epochs=3)
    done = data.draw(st.integers(0, len(whole) - 1))
    plan = whole[done][0]
    rest = walk(Lengths(*lengths), ledger, range(4), ledger.place(plan.position), epochs=3)
    assert [(p.epoch, p.offset, p.position, s) for p, s in rest] == [
        (p.epoch, p.offset, p.position, s) for p, s in whole[done:]
    ]
    with_epoch = walk(dataset := Lengths(*lengths), ledger, range(4), plan.place, epochs=3)
    assert [(p.place, s) for p, s in with_epoch] == [(p.place, s) for p, s in whole[done:]]
    assert min(dataset.opened) == plan.epoch


class Shuffling(IterableDataset):
    """Shuffles by the generators of the process, as many streams do."""

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(12))
        random.shuffle(numbers)
        for number in numbers:
            yield number + int(torch.randint(100, ())) * 100 + int(np.random.randint(10)) * 10_000


def test_a_stream_that_shuffles_is_the_same_for_every_worker_and_leaves_generators_alone() -> None:
    ledger = stream_ledger(5)

    def collate_with_noise(samples: list[int]) -> list[int]:
        torch.rand(len(samples))
        return samples

    def run(mine: range, noise: int) -> list[int]:
        random.seed(noise)
        torch.manual_seed(noise)
        reader = StreamReader(as_source(Shuffling(), collate=collate_with_noise), seed=3, stop_epoch=2)
        steps = [reader.load(plan) for plan in plan_steps(ledger, ledger.place(0), lambda step: mine, stop_step=6)]
        return [sample for _, batches in steps for batch in batches for sample in batch]

    whole, first, second = run(range(4), 1), run(range(2), 2), run(range(2, 4), 3)
    assert sorted(first + second) == sorted(whole)
    assert sorted(n % 100 for n in whole[:12]) == list(range(12))
    assert whole[:12] != whole[12:]
    after = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), after)


def test_a_stream_that_does_not_start_anew_is_found_out() -> None:
    class Once(IterableDataset):
        def __init__(self) -> None:
            self.numbers = iter(range(6))

        def __iter__(self) -> Iterator[int]:
            return self.numbers

    with pytest.raises(UserError) as caught:
        walk(Once(), stream_ledger(4), range(4))
    assert caught.value.message == "The stream (Once) gave no sample in epoch 1."
    assert "start anew" in caught.value.why


def test_an_iterable_dataset_that_is_its_own_iterator_works() -> None:
    class Own(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            self.number = 0
            return self

        def __next__(self) -> int:
            self.number += 1
            if self.number > 3:
                raise StopIteration
            return self.number

    assert [samples for _, samples in walk(Own(), stream_ledger(4), range(4))] == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("epochs", [1, 2])
def test_an_empty_stream_is_an_error_not_a_loop(epochs: int) -> None:
    with pytest.raises(UserError, match="gave no sample in epoch 0"):
        walk(Lengths(0), stream_ledger(4), range(4), epochs=epochs)
    with pytest.raises(UserError, match="gave no sample in epoch 0"):
        walk(Lengths(0), stream_ledger(4), range(4), Place(step=1, epoch=0, offset=4, position=4), epochs=epochs)


def test_a_failure_inside_a_stream_names_its_line() -> None:
    class Failing(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise OSError("disk on fire")

    with pytest.raises(UserError) as caught:
        walk(Failing(), stream_ledger(4), range(4))
    assert caught.value.message == "The stream (Failing) failed in epoch 0, after sample 0."
    assert caught.value.why == "OSError: disk on fire"
    assert caught.value.where.startswith(f"{os.path.relpath(__file__)}:")


def test_hugging_face_streams_shuffle_by_epoch() -> None:
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_dict({"y": list(range(30))}).to_iterable_dataset(num_shards=3).shuffle(seed=1)
    ledger = stream_ledger(8)
    steps = walk(stream, ledger, range(4))
    numbers = [row["y"] for _, rows in steps for row in rows]
    assert sorted(numbers[:30]) == sorted(numbers[30:]) == list(range(30))
    assert numbers[:30] != numbers[30:]
    workers = [walk(stream, ledger, mine) for mine in (range(1), range(1, 4))]
    shared = [row["y"] for step in zip(*workers, strict=True) for _, rows in step for row in rows]
    assert shared == numbers

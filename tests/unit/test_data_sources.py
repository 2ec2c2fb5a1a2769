"""What may be called a dataset, what a batch of it looks like, and what is said about one that is none."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from shoal.data.columns import ColumnSource
from shoal.data.samples import MapSource
from shoal.data.sources import as_source
from shoal.data.stream import StreamSource
from shoal.spec.errors import UserError

IDS = np.array([3, 0, 7])


class Squares(Dataset):
    """Sample i is (a vector of i, i squared)."""

    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, sample: int) -> Any:
        return torch.full((2,), float(sample)), sample * sample


def test_one_tensor() -> None:
    source = as_source(torch.arange(20).reshape(10, 2))
    assert len(source) == 10
    assert source.fetch(IDS).tolist() == [[6, 7], [0, 1], [14, 15]]


@pytest.mark.parametrize("kind", [tuple, list])
def test_several_tensors_and_arrays(kind: type) -> None:
    features, labels = torch.arange(10.0).reshape(10, 1), np.arange(10) * 2
    x, y = as_source(kind([features, labels])).fetch(IDS)
    assert x.tolist() == [[3.0], [0.0], [7.0]]
    assert y.tolist() == [6, 0, 14]


def test_a_dict_of_tensors_gives_a_dict() -> None:
    batch = as_source({"x": torch.arange(10), "y": np.arange(10.0)}).fetch(IDS)
    assert {name: value.tolist() for name, value in batch.items()} == {"x": [3, 0, 7], "y": [3.0, 0.0, 7.0]}


def test_a_tensor_dataset_is_read_as_columns() -> None:
    source = as_source(TensorDataset(torch.arange(10), torch.arange(10) + 1))
    assert isinstance(source, ColumnSource)
    assert [column.tolist() for column in source.fetch(IDS)] == [[3, 0, 7], [4, 1, 8]]


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.uint8, torch.complex64, torch.complex128],
)
def test_tensors_of_any_type_keep_it(dtype: torch.dtype) -> None:
    data = torch.arange(20).reshape(10, 2).to(dtype)
    batch = as_source(data).fetch(IDS)
    assert batch.dtype == dtype
    assert torch.equal(batch, data[torch.from_numpy(IDS)])


def test_tensors_that_are_not_contiguous_or_need_gradients() -> None:
    data = torch.arange(20.0).reshape(2, 10).t().requires_grad_()
    batch = as_source(data).fetch(IDS)
    assert torch.equal(batch, data[torch.from_numpy(IDS)])
    assert not batch.requires_grad


def test_a_file_mapped_read_only_is_not_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(40.0).reshape(10, 4))
    batch = as_source(np.load(tmp_path / "x.npy", mmap_mode="r")).fetch(IDS)
    assert type(batch) is torch.Tensor
    assert batch[2].tolist() == [28.0, 29.0, 30.0, 31.0]


def test_changing_a_batch_in_place_leaves_the_dataset_alone() -> None:
    data = torch.arange(10.0)
    source = as_source(data)
    source.fetch(np.arange(10)).mul_(0)
    assert data.tolist() == list(range(10))


def test_batches_begin_at_a_boundary_whatever_the_rows() -> None:
    source = as_source(np.arange(70, dtype=np.float32).reshape(10, 7)[1:])
    assert all(source.fetch(np.arange(start, start + 3)).data_ptr() % 64 == 0 for start in range(5))


def test_map_style_datasets() -> None:
    x, y = as_source(Squares()).fetch(IDS)
    assert (x.tolist(), y.tolist()) == ([[3.0, 3.0], [0.0, 0.0], [7.0, 7.0]], [9, 0, 49])
    _, y = as_source(Subset(Squares(), [5, 6, 7, 8])).fetch(np.array([0, 3]))
    assert y.tolist() == [25, 64]
    _, y = as_source(ConcatDataset([Squares(4), Squares(10)])).fetch(np.array([3, 4, 5]))
    assert y.tolist() == [9, 0, 1]
    assert as_source([(1.0, 2), (3.0, 4)]).fetch(np.array([1]))[1].tolist() == [4]


def test_samples_are_read_together_where_the_dataset_offers_it() -> None:
    asked = []

    class Together(Squares):
        def __getitems__(self, samples: list[int]) -> list[Any]:
            asked.append(samples)
            return [self[sample] for sample in samples]

    as_source(Together()).fetch(IDS)
    assert asked == [[3, 0, 7]]


def test_a_list_of_many_tensors_is_samples() -> None:
    images = [torch.full((2, 2), float(number)) for number in range(5)]
    assert as_source(images).fetch(np.array([4])).tolist() == [[[4.0, 4.0], [4.0, 4.0]]]


def test_collate_gets_samples_whatever_the_dataset_is() -> None:
    def pair(samples: list[Any]) -> list[Any]:
        return [type(samples[0]), len(samples)]

    assert as_source((torch.arange(10), torch.arange(10)), collate=pair).fetch(IDS) == [tuple, 3]
    assert as_source({"x": torch.arange(10)}, collate=pair).fetch(IDS) == [dict, 3]
    assert as_source(Squares(), collate=pair).fetch(IDS) == [tuple, 3]
    ragged = [torch.zeros(length) for length in (1, 2, 3)]
    padded = as_source(ragged, collate=lambda samples: torch.nn.utils.rnn.pad_sequence(samples))
    assert padded.fetch(np.array([0, 2])).shape == (3, 2)


def test_drawing_random_numbers_is_found_out_and_leaves_no_trace() -> None:
    class Noisy(Squares):
        def __init__(self, draw: Any) -> None:
            super().__init__()
            self.draw = draw

        def __getitem__(self, sample: int) -> Any:
            return float(self.draw())

    import random

    state = torch.get_rng_state()
    assert not as_source(Squares()).draws
    for draw in (torch.rand, random.random, np.random.rand, lambda: torch.empty(1).normal_(), np.random.randn):
        source = as_source(Noisy(draw) if draw is not torch.rand else Noisy(lambda: torch.rand(())))
        assert source.draws
    generator = torch.Generator().manual_seed(1)
    assert not as_source(Noisy(lambda: torch.rand((), generator=generator))).draws
    assert torch.equal(torch.get_rng_state(), state)
    assert as_source(Squares(), collate=lambda samples: torch.rand(2)).draws


def test_a_source_is_its_own_source() -> None:
    source = as_source(torch.arange(3))
    assert as_source(source) is source


def error_of(dataset: Any, **how: Any) -> UserError:
    try:
        source = as_source(dataset, **how)
        source.fetch(np.arange(min(4, len(source))))
    except UserError as error:
        return error
    pytest.fail("nothing was said")


class Broken(Squares):
    def __getitem__(self, sample: int) -> Any:
        if sample == 2:
            return [1, 2, 3][sample + 40]
        return super().__getitem__(sample)


class Uneven(Squares):
    def __getitem__(self, sample: int) -> Any:
        return {"x": torch.zeros(3 if sample < 3 else 4), "y": sample}


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (torch.empty(0, 3), r"empty: the tensor has shape \(0, 3\)"),
        ((torch.zeros(3), torch.zeros(4)), "different lengths: tensor 0 has 3 samples, tensor 1 has 4"),
        ({"x": torch.zeros(3), "y": torch.zeros(4)}, "different lengths: column 'x' has 3 samples, column 'y' has 4"),
        (torch.tensor(1.0), "single number"),
        (np.array(["a", "b"]), "has type <U1, which no tensor can hold"),
        (np.arange(4, dtype=">i4"), "has type >i4"),
        (Squares(0), r"\(Squares\) is empty"),
        ([], r"\(list\) is empty"),
        ({}, "is of type dict, which cannot be used"),
        (42, "is of type int, which cannot be used"),
        (None, "is of type NoneType, which cannot be used"),
        ({1, 2}, "is of type set, which cannot be used"),
        (DataLoader(Squares()), "is a DataLoader"),
        ((number for number in range(3)), "a generator, which can be walked only once"),
        (iter([1, 2]), "walked only once"),
        (Broken(), "Reading sample 2 of the dataset failed"),
        (Uneven(), r"Samples 0 and 3 cannot .* item\['x'\] is a Tensor of shape \(3,\) .* a Tensor of shape \(4,\)"),
        (
            [(1, 2), (1, None)],
            r"Samples 0 and 1 .* item\[1\] is of type int in the first and of type NoneType",
        ),
        ([(1, 2), (1,)], r"Samples 0 and 1 .* item\[1\] is of type int in the first and missing"),
        ([object(), object()], "Samples 0 to 1 could not be collated"),
    ],
)
def test_what_is_said_about_a_dataset_that_does_not_work(dataset: Any, message: str) -> None:
    assert re.search(message, error_of(dataset).message)


def test_a_failure_in_the_users_code_names_its_line() -> None:
    error = error_of(Broken())
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "[sample + 40]" in text)
    assert error.where == f"{os.path.relpath(__file__)}:{line}"
    assert error.why == "IndexError: list index out of range"
    assert "IndexError" in error.remote_traceback


def test_a_failure_in_a_collate_function_names_its_line() -> None:
    def collate(samples: list[Any]) -> Any:
        raise ValueError("no")

    error = error_of(Squares(), collate=collate)
    assert error.message == "Samples 0 to 3 could not be collated into a batch."
    assert error.where.startswith(f"{os.path.relpath(__file__)}:")


def test_a_dataset_without_a_length_is_told_how_to_be_a_stream() -> None:
    class NoLength(Dataset):
        def __getitem__(self, sample: int) -> int:
            return sample

    error = error_of(NoLength())
    assert error.message == "The length of the dataset (NoLength) is not known."
    assert "IterableDataset" in error.hint


def test_streams_are_recognised() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    class Plain:
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    for dataset in (Stream(), Plain()):
        source = as_source(dataset)
        assert isinstance(source, StreamSource)
        assert source.num_samples is None


def test_columns_with_collate_are_read_together() -> None:
    assert isinstance(as_source(torch.arange(3), collate=len), MapSource)

"""Mistakes in the data."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mistakes import INPUTS, TARGETS, Mistake, fit, use
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset


class Failing(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Any:
        if number == 17:
            raise KeyError("label")
        return INPUTS[number], TARGETS[number]


class Stream(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return ((INPUTS[number], TARGETS[number]) for number in range(self.length))


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


DATA = [
    Mistake(
        did="a dataset shorter than a batch",
        act=lambda: fit(batch_size=100),
        error="The dataset has 40 samples, fewer than one batch of 100.",
        do="use batch_size=40 or less",
    ),
    Mistake(
        did="an empty dataset",
        act=lambda: fit(data=(torch.zeros(0, 4), torch.zeros(0))),
        error="The dataset is empty: tensor 0 has shape (0, 4).",
        do="check the path or the filter",
    ),
    Mistake(
        did="an empty list",
        act=lambda: fit(data=[]),
        error="The dataset (list) is empty.",
        do="check the path or the filter",
    ),
    Mistake(
        did="an empty stream",
        act=lambda: fit(data=Stream(0)),
        error="The stream (Stream) gave no sample in epoch 0.",
        do="its `__iter__` must start from the beginning",
    ),
    Mistake(
        did="columns of different lengths",
        act=lambda: fit(data=(INPUTS, TARGETS[:39])),
        error="The tensors of the dataset have different lengths: tensor 0 has 40 samples, tensor 1 has 39.",
        do="wrap them in a torch Dataset",
    ),
    Mistake(
        did="a DataLoader as the dataset",
        act=lambda: fit(data=DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=10)),
        error="The dataset is a DataLoader, which makes batches of its own.",
        do="`dataset=loader.dataset`",
    ),
    Mistake(
        did="a generator as the dataset",
        act=lambda: fit(data=((x, y) for x, y in zip(INPUTS, TARGETS, strict=True))),
        error="The dataset is a generator, which can be walked only once.",
        do="whose `__iter__` starts from the beginning",
    ),
    Mistake(
        did="something else as the dataset",
        act=lambda: fit(data=42),
        error="The dataset is of type int, which cannot be used as one.",
        do="pass tensors, numpy arrays",
    ),
    Mistake(
        did="samples of different shapes",
        act=lambda: fit(data=[torch.zeros(number % 2 + 1) for number in range(40)]),
        error="Samples 0 and 1 cannot go into one batch: the sample is a Tensor of shape (1,) in the first and a "
        "Tensor of shape (2,) in the second.",
        do="pass `collate=` a function",
    ),
    Mistake(
        did="a dataset that fails for a sample",
        act=lambda: fit(data=Failing(), steps=4),
        error="Reading sample 17 of the dataset failed.",
        do="try `dataset[17]` by itself",
        step=2,
    ),
    Mistake(
        did="a file that is not there",
        act=lambda: fit(data="train.parquet"),
        error="There is no file train.parquet",
        do="check the path",
    ),
    Mistake(
        did="a file that is damaged",
        act=lambda: fit(data=write("damaged.parquet", "not a table")),
        error="damaged.parquet cannot be read.",
        do="check that it is a whole .parquet file",
    ),
    Mistake(
        did="evaluating on a stream",
        act=lambda: use(lambda trainer: trainer.evaluate(Stream(40))),
        error="A stream (Stream) cannot be evaluated or predicted on.",
        do="`list(stream)`",
        step=0,
    ),
]

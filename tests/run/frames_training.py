"""What the tests of collections share: rows, and training on them whatever they lie in."""

from typing import Any

import torch

import shoal

NUM_ROWS, EPOCHS, BATCH = 48, 2, 8


USED: list[int] = []
"""The rows that losses were computed of, by `id`."""


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    USED.extend(batch["id"].tolist())
    inputs = torch.stack([batch["x"], batch["y"]], 1).float()
    return (model(inputs).squeeze(1) - batch["label"].float()).square().mean()


def trained(dataset: Any, run_dir: str) -> tuple[str, list[int]]:
    """The digest of the parameters after some epochs, and the rows that were used for them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with shoal.Trainer(model, loss, optimizer, dataset, batch_size=BATCH, run_dir=run_dir) as trainer:
        trainer.fit(steps=1)
        USED.clear()
        trainer.fit(epochs=EPOCHS)
        return trainer.digest(), list(USED)


def digest_of(dataset: Any) -> str:
    """The same, in a worker of `shoal.launch`."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with shoal.Trainer(model, loss, optimizer, dataset, batch_size=BATCH, exact=True) as trainer:
        trainer.fit(epochs=EPOCHS)
        return trainer.digest()


def arrays() -> dict[str, torch.Tensor]:
    """The rows as tensors, in the order in which collections are to have them."""
    number = torch.arange(NUM_ROWS)
    return {"id": number, "x": number * 0.25, "y": (number % 7).float(), "label": number % 2}


def check_sameness(shards: Any, tmp_path: Any) -> None:
    """Training on shards is training on a Parquet file and on tensors with the same rows, each used once an epoch."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    file = tmp_path / "same.parquet"
    parquet.write_table(pa.table({name: column.numpy() for name, column in arrays().items()}), file)
    (ours, used), (files, _), (tensors, _) = (
        trained(data, str(tmp_path / f"run-{number}")) for number, data in enumerate((shards, file, arrays()))
    )
    assert ours == files == tensors
    assert sorted(used[NUM_ROWS - BATCH :]) == list(range(NUM_ROWS)), "the second epoch has each row once"

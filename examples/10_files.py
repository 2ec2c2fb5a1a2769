"""Data from files: Parquet, CSV, Arrow.

    python examples/10_files.py
    shoal run -n 2 examples/10_files.py

A path is a dataset. Reading files needs `pip install 'shoal[features]'`; docs/data.md lists all kinds of data.
"""

import tempfile
from pathlib import Path

import polars
import torch
import torch.nn.functional as F

import shoal

folder = tempfile.TemporaryDirectory()

# Something to read: apartments in two files with the same columns. (Each worker writes its own here; a real dataset
# lies where all of them can read it.)
torch.manual_seed(0)
size, rooms, floor = torch.rand(3_000) * 100 + 20, torch.randint(1, 6, (3_000,)), torch.randint(0, 8, (3_000,))
rent = 5 + 0.12 * size + 0.5 * rooms + 0.2 * floor + 0.3 * torch.randn(3_000)
table = polars.DataFrame({"size": size, "rooms": rooms, "floor": floor, "rent": rent})
table[:1_500].write_parquet(Path(folder.name) / "part-0.parquet")
table[1_500:].write_parquet(Path(folder.name) / "part-1.parquet")


def loss(model, batch):
    """A batch of a table is a dict: one tensor for each column of numbers."""
    inputs = torch.stack([batch["size"] / 25 - 3, batch["rooms"] - 3, batch["floor"] / 2 - 2], dim=1)
    return F.mse_loss(model(inputs.float()).squeeze(1), batch["rent"].float())


torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters(), 0.3)
trainer = shoal.Trainer(model, loss, optimizer, f"{folder.name}/part-*.parquet", batch_size=100)
trainer.fit(epochs=8)

weights = ", ".join(f"{value:.2f}" for value in (model.weight[0] / torch.tensor([25, 1, 2])).tolist())
print(f"rent per square metre, room and floor: {weights} (made with 0.12, 0.50, 0.20)")
trainer.close()

"""What a run measured, as a data frame and in files of other tools.

    python examples/19_numbers.py

Trains for a moment, logs a number of its own, and looks at the run as one does in a notebook. The same files come
from the command line: `shoal run --to csv train.py`, or later `shoal send last --to parquet`.
"""

import csv
import os
import tempfile

import torch

import shoal
from shoal.cli import main

torch.manual_seed(0)
x = torch.randn(2000, 8)
y = x.sum(1, keepdim=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def loss(model, batch):
    inputs, wanted = batch
    return (model(inputs) - wanted).square().mean()


with tempfile.TemporaryDirectory() as place:
    folder = os.path.join(place, "run")
    with shoal.Trainer(model, loss, optimizer, (x, y), batch_size=50, run_dir=folder) as trainer:
        for _ in range(3):
            trainer.fit(epochs=1)
            shoal.log({"val/error": (model(x) - y).abs().mean()})

    run = shoal.open_run(folder)  # of a run of `shoal run`: its name, or "last"
    frame = run.frame(names=["loss", "val/error"])
    print(run.status, frame.shape, frame.columns)
    print(f"loss {frame['loss'][0]:.2f} -> {frame['loss'][-1]:.4f}, and {len(run.events())} events")
    print("a notebook shows", run._repr_html_().count("<svg"), "plot")

    # What the command line does: `shoal send RUN --to csv:PATH`.
    path = os.path.join(place, "numbers.csv")
    main(["send", folder, "--to", f"csv:{path}"])
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    print(f"{len(rows)} rows; the last error is {float(rows[-1]['val/error']):.3f}")

"""Lightning, with as many devices as there are workers."""

import json
import os

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    """A line, and how many samples this rank has seen."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.num_samples = 0

    def training_step(self, batch, _):
        x, y = batch
        self.num_samples += len(x)
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(int(os.environ["RANK"]))
model = Model()
data = TensorDataset(torch.arange(128.0).view(32, 4) / 128, torch.ones(32, 1))
trainer = lightning.Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=int(os.environ["WORLD_SIZE"]),
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(data, batch_size=4))
rank, world, weights = trainer.global_rank, trainer.world_size, model.layer.weight.flatten().tolist()
print(json.dumps({"rank": rank, "world": world, "samples": model.num_samples, "weights": weights}))

"""The Trainer of Hugging Face's transformers, with a model that is downloaded from nowhere."""

import json

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Counted(Trainer):
    """Counts what this rank has seen."""

    num_samples = 0

    def training_step(self, model, inputs, *args):
        self.num_samples += len(inputs["labels"])
        return super().training_step(model, inputs, *args)


config = BertConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
data = [{"input_ids": torch.arange(6) + i % 16, "labels": i % 2} for i in range(32)]
arguments = TrainingArguments(
    "out", num_train_epochs=1, per_device_train_batch_size=4, report_to="none", save_strategy="no", disable_tqdm=True
)
torch.manual_seed(arguments.process_index)
trainer = Counted(BertForSequenceClassification(config), arguments, train_dataset=data)
trainer.train()
rank, world, weights = (
    arguments.process_index,
    arguments.world_size,
    trainer.model.classifier.weight.flatten().tolist(),
)
print(json.dumps({"rank": rank, "world": world, "samples": trainer.num_samples, "weights": weights}))

"""What a real training run needs: a schedule, clipping, micro-batches, averaged weights, evaluation, predictions.

    python examples/09_everyday.py
    shoal run -n 2 examples/09_everyday.py

Every setting can also be given from outside, without touching the file:

    shoal run -n 2 -o max_norm=0.5 -o microbatch_size=32 examples/09_everyday.py
"""

import torch
import torch.nn.functional as F

import shoal

torch.manual_seed(0)
points = torch.randn(6_000, 20)
labels = (points[:, :10].norm(dim=1) > points[:, 10:].norm(dim=1)).long()
train, test = (points[:5_000], labels[:5_000]), (points[5_000:], labels[5_000:])

model = torch.nn.Sequential(torch.nn.Linear(20, 128), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(128, 2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=100)


def loss(model, batch):
    points, labels = batch
    return F.cross_entropy(model(points), labels)


def measure(model, batch):
    """What `evaluate` is to measure: a number, or several with names. Each is a mean, or (sum, weight)."""
    points, labels = batch
    answers = model(points)
    return {
        "loss": F.cross_entropy(answers, labels),
        "accuracy": (answers.argmax(dim=1) == labels).float().mean(),
    }


trainer = shoal.Trainer(
    model,
    loss,
    optimizer,
    train,
    batch_size=250,
    scheduler=scheduler,  # steps after every training step; schedule="epoch" for after every epoch
    max_norm=1.0,  # clips the gradient of the whole batch, as one process would
    microbatch_size=125,  # at most so many samples in one forward; gradients are accumulated
    ema=0.98,  # keeps a moving average of the weights beside them
)
trainer.fit(epochs=5)

# All workers share the work of evaluating, and every sample counts once. The answer does not depend on their number.
found = trainer.evaluate(test, measure)
with trainer.averaged():
    averaged = trainer.evaluate(test, measure)
    answers = trainer.predict(test[0]).argmax(dim=1)  # one row a sample, in the order of the dataset, on every worker

print(f"weights as trained: {100 * found['accuracy']:.1f} % right, loss {found['loss']:.3f}")
print(f"averaged weights:   {100 * averaged['accuracy']:.1f} % right, loss {averaged['loss']:.3f}")
print(f"the first ten answers: {answers[:10].tolist()}")
trainer.close()

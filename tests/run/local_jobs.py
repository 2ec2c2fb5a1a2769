"""What workers of the tests of local steps do."""

import json
import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import shoal


def make(width=16):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4))
    x = torch.randn(240, 8)
    return model, (x, (x[:, :4].argmax(1)).long())


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def everything():
    """Accumulation, bf16, clipping, a schedule, an average, in a loop of one's own: what each worker ends with."""
    model, data = make()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    trainer = shoal.Trainer(
        model,
        loss,
        optimizer,
        data,
        batch_size=48,
        sync=shoal.diloco(8, fragments=2),
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9),
        microbatch_size=7,
        precision="bf16",
        max_norm=0.5,
        ema=0.9,
        checkpoint_every=10,
    )
    losses = []
    while trainer.place.step < 30:
        losses += [trainer.step(batch) for batch in trainer]
    before = trainer.evaluate(data)["loss"]
    digest = trainer.digest()
    with trainer.averaged():
        averaged = trainer.evaluate(data)["loss"]
        averaged_digest = trainer.digest()
    after = trainer.evaluate(data)["loss"]
    trainer.save(wait=True)
    trainer.close()
    return {
        "same": (before, digest, averaged, averaged_digest, after, optimizer.param_groups[0]["lr"]),
        "own": losses,
    }


def train(steps, **settings):
    """Train; says the digest and the loss after it, and the step at which training began."""
    model, data = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    trainer = shoal.Trainer(model, loss, optimizer, data, batch_size=48, **settings)
    began = trainer.place.step
    trainer.fit(steps=steps)
    print(json.dumps({"began": began, "digest": trainer.digest(), "loss": trainer.evaluate(data)["loss"]}))
    trainer.close()


def uneven(sync, steps, seconds):
    """A worker's batch takes so many seconds; returns its samples, how long all took, and when rounds ended."""
    model, _ = make()
    data = torch.arange(4096).float().unsqueeze(1).expand(4096, 8).contiguous()
    seen, rank = [], int(os.environ["RANK"])

    def slow_loss(model, batch):
        time.sleep(seconds[rank])
        seen.extend(batch[:, 0].long().tolist())
        return model(batch / 4096).square().mean()

    model.eval()  # no batch statistics: of one sample there are none
    trainer = shoal.Trainer(
        model, slow_loss, torch.optim.SGD(model.parameters(), 1e-3), data, batch_size=8, sync=sync, unused="zero"
    )
    seen.clear()  # making a trainer looks at the first samples
    ends, began = [], time.perf_counter()
    for batch in trainer:
        trainer.step(batch)
        if trainer._team.sync.is_round_over:
            ends.append(time.perf_counter() - began)
        if trainer.place.step == steps:
            break
    trainer.save()  # all agree, as in the end of `fit`
    spent = time.perf_counter() - began
    trainer.close()
    return seen, spent, ends


def with_bad_sample():
    """Sample 5 has no loss. Returns the digest in the end, and this worker's own losses."""
    model, (x, y) = make()
    x[5] = float("nan")
    trainer = shoal.Trainer(
        model.eval(), loss, torch.optim.SGD(model.parameters(), 0.1), (x, y), batch_size=48, sync="local:5"
    )
    losses = [trainer.step(batch) for batch in trainer]
    found = trainer.digest(), losses
    trainer.close()
    return found


def too_long():
    model, data = make()
    trainer = shoal.Trainer(
        model, loss, torch.optim.SGD(model.parameters(), 0.1), data, batch_size=48, sync=shoal.local(20)
    )
    try:
        trainer.fit(steps=19)
    except shoal.UserError as error:
        return error.render()
    finally:
        trainer.close()


if __name__ == "__main__":
    train(int(sys.argv[1]))

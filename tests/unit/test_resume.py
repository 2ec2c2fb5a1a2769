"""What a checkpoint says of hyper-parameters and schedulers comes back as it was."""

import torch
from torch import nn

from shoal.checkpoint import facts
from shoal.train.resume import hyper_parameters, plain


def test_keys_and_tuples_survive_a_checkpoint():
    """A resumed MultiStepLR looks its steps up as numbers: as text it would never find them."""
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.5)
    told = {"scheduler": plain(schedule.state_dict()), "group": hyper_parameters(optimizer.param_groups[0])}
    back = facts.decode(facts.encode(told))
    assert back["scheduler"]["milestones"] == {2: 1, 5: 1}
    assert back["group"]["betas"] == (0.9, 0.999)

"""Saving in the background while training goes on, and going on from what was saved."""

from pathlib import Path

import torch

from shoal.checkpoint.state import State, digest
from shoal.checkpoint.store import FolderStore
from shoal.checkpoint.transfer import transfer


def make_run() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 32, generator=generator)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def state_of(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for index, entries in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{index}/{name}": tensor for name, tensor in entries.items()}
    return State(step=step, tensors=tensors, facts={"groups": optimizer.state_dict()["param_groups"]})


def put_back(state: State, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    transfer(model, state.part("model"))
    found: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in state.part("optimizer").items():
        index, name = key.split("/")
        found.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": found, "param_groups": state.facts["groups"]})


def test_a_save_holds_the_step_it_was_asked_at_while_training_goes_on(tmp_path: Path):
    model, optimizer = make_run()
    expected = {}
    with FolderStore(tmp_path, keep=None) as store:
        for step in range(10):
            train(model, optimizer, step, step + 1)
            state = state_of(step + 1, model, optimizer)
            expected[step + 1] = digest(state.tensors)
            store.save(state)  # the next step begins at once, on the same tensors
        assert {step: digest(store.load(step).state.tensors) for step in expected} == expected


def test_going_on_from_a_checkpoint_changes_nothing(tmp_path: Path):
    model, optimizer = make_run()
    train(model, optimizer, 0, 6)
    with FolderStore(tmp_path) as store:
        store.save(state_of(6, model, optimizer))
        train(model, optimizer, 6, 12)
        again, again_optimizer = make_run()
        loaded = store.load().state
        put_back(loaded, again, again_optimizer)
    train(again, again_optimizer, loaded.step, 12)
    assert digest(again.state_dict()) == digest(model.state_dict())

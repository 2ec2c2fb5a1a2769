"""Workers import torch without looking for garbage meanwhile, and with everything else as ever."""

import pytest
from launching import Box, box

__all__ = ["box"]

SCRIPT = """
import gc, sys
before = gc.get_freeze_count()
import torch
import importlib
assert gc.isenabled()
print("frozen", before == 0, gc.get_freeze_count() > 0)
print("finders", [type(f).__module__ for f in sys.meta_path if type(f).__name__ == "TorchFinder"])
print("spec", torch.__spec__.name, importlib.util.find_spec("torch").name)
"""


def test_what_torch_made_is_not_looked_at_again(box: Box) -> None:
    (box.folder / "script.py").write_text(SCRIPT)
    done = box.run("run", "-n", "1", "script.py")
    assert done.returncode == 0, done.stderr
    assert "frozen True True" in done.stdout
    assert "finders []" in done.stdout
    assert "spec torch torch" in done.stdout


def test_a_script_that_has_no_torch_says_so_itself(box: Box) -> None:
    """It is looked for as everybody does: a `torch.py` beside the script is the one."""
    (box.folder / "torch.py").write_text("import gc\nassert not gc.isenabled()\n")
    (box.folder / "script.py").write_text("import gc, torch\nprint('own', torch.__file__, gc.isenabled())\n")
    done = box.run("run", "-n", "1", "script.py")
    assert "own" in done.stdout
    assert "torch.py True" in done.stdout


OPTIMIZERS = """
import sys
import torch

def train(make, num_steps=3, backend=None):
    '''Parameters after so many steps, and a state that was saved, loaded and used once more.'''
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 2)
    optimizer = make(net.parameters())
    forward, step = net, optimizer.step
    if backend is not None:
        forward, step = torch.compile(net, backend=backend), torch.compile(optimizer.step, backend=backend)
    for _ in range(num_steps):
        optimizer.zero_grad()
        forward(torch.ones(3, 4)).square().sum().backward()
        assert torch.is_grad_enabled()
        step()
        assert torch.is_grad_enabled()
    again = make(net.parameters())
    again.load_state_dict(optimizer.state_dict())
    again.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])

WAYS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01),
}
"""
PLAIN = """
plain = {name: train(make) for name, make in WAYS.items()}
print("dynamo", "torch._dynamo" in sys.modules)
"""
COMPILED = """
compiled = {name: train(make, backend="aot_eager") for name, make in WAYS.items()}
after = {name: train(make) for name, make in WAYS.items()}
code = sys.modules["torch.optim.optimizer"]._use_grad_for_differentiable(print).__code__
steps = [torch.optim.SGD.step, torch.optim.Adam.step, torch.optim.RMSprop.step]
assert all(code in (step.__code__, step.__wrapped__.__code__) for step in steps)  # torch may have a hook around it
assert torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable is not torch.optim.Optimizer.zero_grad.__wrapped__
print("same", all(torch.allclose(compiled[name], after[name], atol=1e-6) for name in WAYS))
"""
ALIKE = 'print("alike", all(torch.equal(plain[name], after[name]) for name in WAYS))\n'


def test_an_optimizer_does_not_import_the_compiler(box: Box) -> None:
    """Not before somebody compiles. From then on, everything is as torch made it."""
    (box.folder / "script.py").write_text(OPTIMIZERS + PLAIN + COMPILED + ALIKE)
    done = box.run("run", "-n", "1", "script.py")
    assert done.returncode == 0, done.stderr
    assert "dynamo False" in done.stdout
    assert "same True" in done.stdout
    assert "alike True" in done.stdout


@pytest.mark.slow
def test_a_script_that_compiles_first_finds_torch_as_it_is(box: Box) -> None:
    (box.folder / "script.py").write_text(OPTIMIZERS + COMPILED)
    done = box.run("run", "-n", "1", "script.py")
    assert done.returncode == 0, done.stderr
    assert "same True" in done.stdout

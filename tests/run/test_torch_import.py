"""Workers import torch without looking for garbage meanwhile, and with everything else as ever."""

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

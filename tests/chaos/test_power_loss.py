"""The power fails at a random moment: what was acknowledged is there, and whole.

The page cache survives kill -9, so only images of the disk show that acknowledged means durable.
"""

import sys
from pathlib import Path

import pytest

from shoal.checkpoint.fence import in_force
from shoal.checkpoint.state import digest
from shoal.checkpoint.store import FolderStore
from shoal.testing.power_loss import Image, lose_power
from shoal.testing.rigs import needs
from shoal.testing.store_contract import make_state

pytestmark = needs("root", "mounting", "mkfs.ext4", "loop devices")
WRITER = (sys.executable, "-m", "shoal.testing.checkpoint_writer", "write", "{folder}", "1000000")


def look(folder: Path, acknowledged: int) -> Image:
    """What a run finds that starts after the power came back."""
    loaded = FolderStore(folder).load()
    step = loaded.state.step
    is_whole = digest(loaded.state.tensors) == digest(make_state(step).tensors)
    problem = "" if is_whole and not loaded.skipped else f"{loaded.skipped or 'other tensors'}"
    return Image(acknowledged=acknowledged, found=step, problem=problem)


def assert_nothing_lost(images: list[Image], num_images: int) -> None:
    assert len(images) == num_images
    assert [image for image in images if not image.is_kept] == []
    assert images[-1].acknowledged > images[0].acknowledged


def test_power_loss_at_a_few_moments():
    assert_nothing_lost(list(lose_power([*WRITER, "1", "0"], 6, seed=1, look=look)), 6)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("keep", ["1", "3"])
def test_power_loss_at_a_hundred_moments(keep: str):
    assert_nothing_lost(list(lose_power([*WRITER, keep, "0"], 100, seed=int(keep), look=look)), 100)


def test_a_fence_is_durable_before_anything_rests_on_it():
    """Each image that holds a checkpoint of a generation also holds its fence."""

    def look_at_fence(folder: Path, acknowledged: int) -> Image:
        newest = FolderStore(folder).list()[0]
        is_fenced = in_force(folder).generation >= newest.generation
        return Image(acknowledged=acknowledged, found=newest.generation, problem="" if is_fenced else "no fence")

    code = (
        "import os, sys; from shoal.checkpoint.store import FolderStore\n"
        "from shoal.testing.store_contract import make_state\n"
        "store = FolderStore(sys.argv[1], keep=2)\n"
        "for generation in range(1, 100000):\n"
        "    assert store.fence(generation)\n"
        "    assert store.save(make_state(generation), wait=True).is_durable\n"
        "    os.write(1, f'{generation}\\n'.encode())\n"
    )
    images = list(
        lose_power(
            [sys.executable, "-c", code.replace("{", "{{").replace("}", "}}"), "{folder}"], 6, 3, look_at_fence
        )
    )
    assert_nothing_lost(images, 6)

"""One run that goes from cell to cell, each resumed from the checkpoint of the one before, against one process."""

import json
import math
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.store import FolderStore
from tests.numerics import cells, chain, everything
from tests.numerics.everything import ALONE, Cell

CHAIN = (
    (4, Cell(sync="sharded:parameters", transport="tcp")),
    (2, Cell(split="pipeline:2")),
    (1, ALONE),
    (4, Cell(split="tensor:2+pipeline:2")),
    (2, Cell(sync="diloco:2,overlap=0")),
    (2, Cell()),
)
"""With how many workers, in which cell. Up to DiLoCo each step is that of one process."""

NUM_SYNCHRONOUS = 4
STEPS = 4
"""Of each: two of its rounds in DiLoCo, and no whole epoch, which is 5."""

TOLERANCE = 2e-4
"""As a part of the largest of a tensor: of parameters, their average and the moments of AdamW, which divides by the
size of a gradient and so lets the last bits of sums in another order grow (see test_local.py). A moment or an average
that is lost on the way differs by more than a hundred times this."""

Result = dict[str, Any]


def run_link(number: int, folder: Path) -> Result:
    """What all the workers of a link of the chain find, who must all find the same."""
    num_workers, cell = CHAIN[number]
    args = (json.dumps(asdict(cell)), str(goal_of(number)))
    logs = everything.run_script(chain.__file__, args, num_workers, folder, is_resumed=number > 0)
    results = [json.loads(re.findall(r"RESULT (.*)", log)[-1]) for log in logs]
    alike = ("began", "digests", "lr") if cell.is_local else results[0].keys()  # copies tell of their own losses
    assert all(result[name] == results[0][name] for result in results for name in alike)
    return dict(results[0])


def goal_of(number: int) -> int:
    return STEPS * (number + 1)


def go_on_alone(folder: Path, goals: list[int], *, is_resumed: bool = False) -> Result:
    threads = torch.get_num_threads()
    try:
        return chain.go_on(ALONE, goals, run_dir=str(folder), resume=is_resumed)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """One process without a break, and the folder with its state at the end of each link."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    return folder, go_on_alone(folder, [goal_of(number) for number in range(NUM_SYNCHRONOUS)])


def check_links(results: list[Result]) -> None:
    """Each began where the one before had ended, to the last bit."""
    for number, result in enumerate(results):
        assert result["began"] == STEPS * number
        assert number == 0 or result["digests"][0] == results[number - 1]["digests"][1]
        assert result["lr"] == pytest.approx(0.01 * 0.95 ** goal_of(number))


def check_same(found: Path, expected: Path, step: int) -> None:
    ours, theirs = (FolderStore(folder / "checkpoints").load(step).state.tensors for folder in (found, expected))
    named = [name for name in theirs if not name.startswith(("anchor/", "momentum/"))]
    assert any(name.startswith("optimizer/") for name in named)
    assert any(name.startswith("ema/") for name in named)
    far = {name: cells.distance(ours[name], theirs[name]) for name in named}
    assert max(far.values()) <= TOLERANCE, (step, max(far, key=far.__getitem__), max(far.values()))


def check_against(alone: tuple[Path, Result], folder: Path, results: list[Result]) -> None:
    losses = [loss for result in results for loss in result["losses"]]
    assert losses == pytest.approx(alone[1]["losses"][: len(losses)], rel=TOLERANCE)
    for number in range(len(results)):
        check_same(folder, alone[0], goal_of(number))


@pytest.mark.slow
def test_from_four_that_share_parameters_to_two_stages_to_one(alone: tuple[Path, Result], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    results = [run_link(number, folder) for number in range(2)]
    results.append(go_on_alone(folder, [goal_of(2)], is_resumed=True))
    check_links(results)
    check_against(alone, folder, results)


@pytest.mark.slow
def test_a_run_goes_through_all_kinds_of_cells(alone: tuple[Path, Result], tmp_path: Path) -> None:
    """After DiLoCo, which is not what one process does, copies that agree in each step are one process again."""
    folder, other = tmp_path / "run", tmp_path / "other"
    results = [run_link(number, folder) for number in range(len(CHAIN) - 1)]
    shutil.copytree(folder / "checkpoints", other / "checkpoints")
    results.append(run_link(len(CHAIN) - 1, folder))
    check_links(results)
    check_against(alone, folder, results[:NUM_SYNCHRONOUS])
    assert all(map(math.isfinite, results[NUM_SYNCHRONOUS]["losses"]))
    assert results[NUM_SYNCHRONOUS]["digests"][0] != results[NUM_SYNCHRONOUS]["digests"][1]
    expected = go_on_alone(other, [goal_of(len(CHAIN) - 1)], is_resumed=True)
    assert results[-1]["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE)
    check_same(folder, other, goal_of(len(CHAIN) - 1))

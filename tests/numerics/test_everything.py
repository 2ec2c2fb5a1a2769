"""Recomputed activations, accumulation, clipping by the norm of the whole model, and a break, in every cell at once.

Eight steps, a checkpoint, and four more by new processes, against twelve of one process; in float32 and in bf16.
Where copies train by themselves, each clips for itself, so they are compared with the same in plain torch. Tolerances
are those of the matrix (`cells.TOLERANCES`): sums are taken in another order, and each step lets that grow.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.numerics import cells, everything
from tests.numerics.everything import ALONE, BREAK, CELLS, MAX_NORM, STEPS, Cell, trained

NORM_TOLERANCES = {"float32": 1e-4, "bf16": 5e-2}
"""Of the norm of a gradient, which is of parameters that differ by as much as `cells.TOLERANCES` says."""

QUICK = Cell(sync="sharded:gradients")


@dataclass(frozen=True, slots=True)
class Found:
    """What a training came to: its parameters by name, and the norms of gradients of each copy."""

    tensors: Mapping[str, torch.Tensor]
    norms: list[list[float]]


@dataclass(frozen=True, slots=True)
class Finished:
    """A run of some cells, in a folder."""

    folder: Path
    some: list[Cell]

    def found(self, cell: Cell, precision: str) -> Found:
        number = trained(self.some).index((cell, precision))
        num_parts = cells.SPLITS[cell.split]
        told = [self._norms(rank, number) for rank in range(cells.NUM_COPIES * num_parts)]
        for rank, norms in enumerate(told):
            # Bits of a sum over stages depend on who adds it up.
            assert norms == pytest.approx(told[rank - rank % num_parts], rel=1e-6), "parts know of different norms"
        return Found(cells.load_saved(self.folder, number), told[::num_parts])

    def _norms(self, rank: int, number: int) -> list[float]:
        return everything.norms_of(self.folder, rank, self.some, (BREAK, STEPS))[number]


def run_broken_off(some: list[Cell], folder: Path) -> Finished:
    """Up to the break, and by new processes to the end."""
    num_workers = cells.NUM_COPIES * cells.SPLITS[some[0].split]
    for goal in (BREAK, STEPS):
        logs = everything.start(some, num_workers, folder, goal, is_resumed=goal > BREAK)
        told = [list(map(json.loads, re.findall(r"^RECOMPUTED (.*)$", log, re.MULTILINE))) for log in logs]
        for number, (cell, _) in enumerate(trained(some)):
            assert {block for each in told for block in each[number]} == {0, 1}, f"{cell} remembers activations"
    return Finished(folder, some)


class BySplit(dict[str, Finished]):
    """All cells of a split, run when one of them is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, split: str) -> Finished:
        self[split] = run_broken_off(CELLS[split], self._folder / split)
        return self[split]


class Expected(dict[tuple[Cell, str], Found]):
    """What cells should come to: what one process does, or copies in plain torch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "alone"

    def __missing__(self, key: tuple[Cell, str]) -> Found:
        cell, precision = key
        if cell.is_local:
            self[key] = simulated(cell, precision)
        elif cell != ALONE:
            return self[ALONE, precision]
        else:
            everything.start([ALONE], 1, self._folder, STEPS)
            norms = everything.norms_of(self._folder, 0, [ALONE], (STEPS,))
            for number, (_, each) in enumerate(trained([ALONE])):
                self[ALONE, each] = Found(cells.load_saved(self._folder, number), [norms[number]] * cells.NUM_COPIES)
        return self[key]


def simulated(cell: Cell, precision: str) -> Found:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers have
    try:
        copies = everything.simulate(cell, precision).copies
    finally:
        torch.set_num_threads(before)
    tensors = {f"model/{name}": value for name, value in copies[0].model.state_dict().items()}
    return Found(tensors, [each.norms for each in copies])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> BySplit:
    return BySplit(tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return Expected(tmp_path_factory.mktemp("expected"))


def check(run: Finished, cell: Cell, expected: Expected) -> None:
    for precision in cells.PRECISIONS:
        ours, theirs = run.found(cell, precision), expected[cell, precision]
        named = [name for name in theirs.tensors if name.startswith("model/")]
        far = max(cells.distance(ours.tensors[name], theirs.tensors[name]) for name in named)
        assert far <= cells.TOLERANCES[precision], (precision, far)
        for found, wanted in zip(ours.norms, theirs.norms, strict=True):
            assert min(found) > 2 * MAX_NORM, "a step was not clipped"
            assert found == pytest.approx(wanted, rel=NORM_TOLERANCES[precision]), precision


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for some in CELLS.values() for cell in some], ids=str)
def test_a_cell_does_everything_at_once(cell: Cell, finished: BySplit, expected: Expected) -> None:
    check(finished[cell.split], cell, expected)


@pytest.mark.slow
def test_divided_state_does_everything_at_once(expected: Expected, tmp_path: Path) -> None:
    check(run_broken_off([QUICK], tmp_path / "run"), QUICK, expected)

"""Each Split x Sync x precision trains as one process does, over 50 steps, on an MLP, a CNN and a GPT."""

import json
from pathlib import Path

import pytest

from tests.numerics import cells


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """What one process comes to, with the batches of copies that agree in each step (False) or not (True)."""
    folder = tmp_path_factory.mktemp("alone")
    return {is_local: cells.run_alone(folder / str(is_local), is_local=is_local) for is_local in (False, True)}


@pytest.mark.slow
@pytest.mark.parametrize(("split", "sync"), cells.CELLS)
def test_a_cell_trains_as_one_process_does(split: str, sync: str, alone: dict[bool, Path], tmp_path: Path) -> None:
    found = cells.deviations(cells.run_cell(split, sync, tmp_path / "run"), alone[sync.startswith("local")])
    for name, deviation in found.items():
        assert deviation <= cells.TOLERANCES[name.partition("-")[2]], (name, found)


def test_the_page_shows_what_was_found() -> None:
    """`python -m tests.numerics.cells` tries all cells and writes both."""
    found = json.loads(cells.FOUND.read_text())
    assert cells.write_page(found) == cells.PAGE.read_text()
    for cell in found["cells"].values():
        assert all(value <= found["tolerances"][name.partition("-")[2]] for name, value in cell.items())

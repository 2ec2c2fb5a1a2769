"""Random damage, drawn from seeds: each is found, the file is named, and the next older checkpoint is used."""

import random
from pathlib import Path

import pytest

from shoal.checkpoint.state import digest
from shoal.checkpoint.store import FolderStore
from shoal.testing.corruption import DAMAGES, LIES, Damage, corrupt, forge, restore, sample_state, snapshot

NEWER, OLDER = "step-000000002", "step-000000001"


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    store = FolderStore(tmp_path / "checkpoints", max_file_bytes=10_000)
    for step in (1, 2):
        store.save(sample_state(step), wait=True)
    return store


def assert_found(store: FolderStore, damage: Damage, seed: int) -> None:
    loaded = store.load()
    assert loaded.state.step == 1, (seed, damage)
    assert digest(loaded.state.tensors) == digest(sample_state(1).tensors)
    (skipped,) = loaded.skipped
    assert skipped.path.name == NEWER
    assert skipped.reason.startswith(damage.files), (seed, damage, skipped.reason)


def damage_by_seed(folder: Path, seed: int) -> Damage:
    """A quarter of them by someone who means harm."""
    chance = random.Random(seed)
    return forge(folder / NEWER, chance) if seed % 4 == 3 else corrupt(folder / NEWER, chance, folder / OLDER)


def run_seeds(store: FolderStore, seeds: range) -> set[str]:
    content, kinds = snapshot(store.folder / NEWER), set()
    for seed in seeds:
        damage = damage_by_seed(store.folder, seed)
        assert_found(store, damage, seed)
        restore(store.folder / NEWER, content)
        kinds.add(damage.kind)
    assert store.load().state.step == 2
    return kinds


def test_a_hundred_random_corruptions(store: FolderStore):
    assert len(run_seeds(store, range(120))) > 15


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_random_corruptions(store: FolderStore):
    kinds = run_seeds(store, range(1000, 2000))
    assert kinds == {*DAMAGES, *(f"hostile manifest: {lie}" for lie in LIES)}

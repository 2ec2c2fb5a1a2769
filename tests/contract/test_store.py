"""Every store keeps the same promises."""

from pathlib import Path

import pytest

from shoal.checkpoint.store import FolderStore
from shoal.testing.store_contract import OpenStore, StoreContract


class TestFolderStore(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda: FolderStore(tmp_path / "run" / "checkpoints", keep=2)


class TestFolderStoreWithManyFiles(StoreContract):
    """Each tensor in a file of its own."""

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda: FolderStore(tmp_path, keep=2, max_file_bytes=1)

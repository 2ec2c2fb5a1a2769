"""Every store keeps the same promises."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.checkpoint.store import FolderStore
from shoal.testing.store_contract import OpenStore, StoreContract
from tests.webhdfs import webhdfs_server


class TestFolderStore(StoreContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda: FolderStore(tmp_path / "run" / "checkpoints", keep=2)


class TestWebHdfs(StoreContract):
    """Our side of the conversation only: no Hadoop was asked (docs/files.md)."""

    @pytest.fixture
    def open_store(self) -> Iterator[OpenStore]:
        pytest.importorskip("fsspec")
        pytest.importorskip("requests")
        with webhdfs_server() as server:
            yield lambda: FolderStore(f"{server.url}/run/checkpoints", keep=2)


class TestObjectStore(StoreContract):
    """A real server, reached by URL as any other: see `rigs.stores`."""

    @pytest.fixture
    def open_store(self, bucket: str) -> OpenStore:
        return lambda: FolderStore(f"{bucket}/run/checkpoints", keep=2)


class TestFolderStoreWithManyFiles(StoreContract):
    """Each tensor in a file of its own."""

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> OpenStore:
        return lambda: FolderStore(tmp_path, keep=2, max_file_bytes=1)

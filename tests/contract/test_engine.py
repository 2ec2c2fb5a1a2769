"""Every engine keeps the same promises."""

from collections.abc import Iterator

import pytest

from shoal.engine.local import LocalEngine
from shoal.testing.engine_contract import EngineContract


class TestLocalEngine(EngineContract):
    @pytest.fixture
    def engine(self) -> Iterator[LocalEngine]:
        engine = LocalEngine()
        yield engine
        engine.stop(0.0)


class TestLocalEngineOnAnOldKernel(TestLocalEngine):
    """Where no descriptor says that a process has ended."""

    @pytest.fixture(autouse=True)
    def no_pid_fd(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shoal.engine.local.open_pid_fd", lambda pid: -1)

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

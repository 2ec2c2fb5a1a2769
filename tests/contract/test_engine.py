"""Every engine keeps the same promises."""

import sys
from collections.abc import Iterator

import pytest

from shoal.engine.fleet import Fleet
from shoal.engine.hosts import Host, HostsGround
from shoal.engine.local import LocalEngine
from shoal.engine.mpi import make_ground
from shoal.testing import rigs
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


class TestFleet(EngineContract):
    """Agents as processes of this machine, two with two slots each."""

    @pytest.fixture
    def engine(self) -> Iterator[Fleet]:
        hosts = [Host(name=name, num_slots=2) for name in ("a", "b")]
        engine = Fleet(HostsGround(hosts, "127.0.0.1", lambda host, python: [sys.executable, *python]), num_slots=4)
        yield engine
        engine.stop(0.0)
        engine.close()


@pytest.mark.slow
@rigs.needs("mpirun")
class TestFleetByMpirun(EngineContract):
    """An agent that mpirun itself has started."""

    @pytest.fixture
    def engine(self) -> Iterator[Fleet]:
        engine = Fleet(make_ground("localhost:4", {}), num_slots=4)
        yield engine
        engine.stop(0.0)
        engine.close()

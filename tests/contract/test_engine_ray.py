"""Actors of a real Ray cluster keep the promises of every engine."""

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.engine.fleet import Fleet
from shoal.engine.ray import RayGround, read_request
from shoal.engine.wire import Invitation
from shoal.testing.engine_contract import EngineContract
from shoal.testing.rigs.rays import ray_cluster

ray: Any = pytest.importorskip("ray", reason="Ray is not installed: pip install 'shoal[ray]'")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster(4, is_open=True) as cluster:
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        yield ray
        ray.shutdown()


@pytest.fixture(scope="module")
def fleet(cluster: Any) -> Iterator[Fleet]:
    fleet = Fleet(RayGround(cluster, read_request({}), is_ours=False), num_slots=3)
    yield fleet
    fleet.stop(0.0)
    fleet.close()


class TestFleetOnRay(EngineContract):
    @pytest.fixture
    def engine(self, fleet: Fleet) -> Iterator[Fleet]:
        yield fleet
        fleet.stop(0.0)
        fleet.poll()


def test_an_agent_that_dies_before_its_first_word_is_started_again(cluster: Any) -> None:
    """The launcher never heard of it, and cannot miss it: Ray had put it on a machine that was gone."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ground = RayGround(cluster, read_request({"engine.cpus": "0.5"}), is_ours=False)
        try:
            ground.open(Invitation.new("127.0.0.1", silent.getsockname()[1]), 1, 1)
            silent.settimeout(60.0)
            first = silent.accept()[0]
            cluster.kill(ground._slots[0].actor, no_restart=True)
            until = time.monotonic() + 60.0
            silent.settimeout(0.2)
            second = None
            while second is None and time.monotonic() < until:
                ground.look()
                try:
                    second = silent.accept()[0]
                except TimeoutError:
                    continue
            assert second is not None, "nobody came in its place"
            first.close()
            second.close()
        finally:
            ground.close()

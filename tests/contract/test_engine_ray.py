"""Actors of a real Ray cluster keep the promises of every engine."""

from collections.abc import Iterator
from typing import Any

import pytest

from shoal.engine.fleet import Fleet
from shoal.engine.ray import RayGround, read_request
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

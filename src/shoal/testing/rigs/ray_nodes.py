"""Nodes for Ray's autoscaler, as its own tests have them, but each with an address: Ray imports this by its name."""

from functools import partial
from typing import Any

import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class WithAddresses(FakeMultiNodeProvider):
    """The first node is at 127.0.0.2, the next at 127.0.0.3, and so on."""

    def _create_node_with_resources_and_labels(self, *facts: Any) -> None:
        parameter: Any = ray._private.parameter
        plain = parameter.RayParams
        with self.lock:
            parameter.RayParams = partial(plain, node_ip_address=f"127.0.0.{self._next_node_id + 2}")
            try:
                super()._create_node_with_resources_and_labels(*facts)  # type: ignore[no-untyped-call]
            finally:
                parameter.RayParams = plain

"""Which engine is meant, by its name or by an option that only it has; and whether its machines become more."""

import pytest

from shoal.engine.grounds import Where, engine_of, find_ground
from shoal.engine.ray import has_node_types
from shoal.spec.errors import UserError


@pytest.mark.parametrize(
    ("where", "engine"),
    [
        (Where(), "local"),
        (Where(engine="local"), "local"),
        (Where(address="10.0.0.1:6379"), "ray"),
        (Where(hosts="a:2,b:2"), "mpi"),
        (Where(master="spark://a:7077"), "spark"),
        (Where(engine="ray"), "ray"),
        (Where(engine="ray", address="10.0.0.1:6379"), "ray"),
    ],
)
def test_an_option_that_only_one_engine_has_says_which_it_is(where: Where, engine: str) -> None:
    assert engine_of(where) == engine


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (
            Where(engine="mpi", address="a:1"),
            "--address was given, and the engine is mpi. it says where `--engine ray`",
        ),
        (Where(engine="local", hosts="a:1"), "--hosts was given, and the engine is local."),
        (Where(address="a:1", hosts="b:1"), "--address and --hosts were both given. the first is for `--engine ray`"),
        (Where(engine="rya"), "There is no engine 'rya'."),
    ],
)
def test_what_disagrees_is_told(where: Where, words: str) -> None:
    with pytest.raises(UserError) as caught:
        find_ground(where)
    assert words in f"{caught.value.message} {caught.value.why}"


STARTED = {"active_nodes": {"ray.head.default": 1}, "idle_nodes": None, "pending_launches": {}, "pending_nodes": []}


@pytest.mark.parametrize(
    ("status", "does_grow"),
    [
        ({}, False),
        ({"autoscaler_report": None}, False),
        # In a cluster that people made, each node is of a type of its own.
        ({"autoscaler_report": {**STARTED, "active_nodes": {"node_4f3a": 1}}}, False),
        ({"autoscaler_report": {**STARTED, "active_nodes": {}, "idle_nodes": {"node_4f3a": 2}}}, False),
        ({"autoscaler_report": {"node_type_mapping": {"4f3a": "node_4f3a"}}}, False),
        ({"autoscaler_report": {"node_type_mapping": {"4f3a": "ray.head.default"}}}, True),
        ({"autoscaler_report": STARTED}, True),
        ({"autoscaler_report": {**STARTED, "active_nodes": {}, "pending_launches": {"cpu": 1}}}, True),
        ({"autoscaler_report": {**STARTED, "active_nodes": {}, "pending_nodes": [["ip", "cpu", "up"]]}}, True),
    ],
)
def test_whether_a_cluster_grows_is_seen_from_what_its_autoscaler_reports(status: dict, does_grow: bool) -> None:
    assert has_node_types(status) is does_grow

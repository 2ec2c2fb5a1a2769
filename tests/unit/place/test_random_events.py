"""Whatever happens, promises are kept: nothing twice, no gang in parts, no loops, nobody beside free room."""

from dataclasses import replace

import pytest
from driving import drive

from shoal.place.cluster import Cluster, Node, Queued
from shoal.place.decision import Place, Stop
from shoal.place.policies import POLICIES


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(4))
def test_promises_hold_whatever_happens(name, seed):
    drive(POLICIES[name], seed=seed, num_events=150, is_mild=seed % 2 == 0)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_promises_hold_where_jobs_share_their_gpus(name):
    drives = [
        drive(POLICIES[name], seed=seed, num_events=80, is_mild=is_mild, is_shared=True)
        for seed, is_mild in ((0, True), (5, False), (7, False))
    ]
    pairs = sum(run.num_pairs for run in drives)
    assert pairs > 10, "they did share"


NODES = (Node(name="a", cores=4), Node(name="b", cores=4))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_gang_that_lost_a_node_is_stopped_and_starts_again_whole(name):
    gang = Queued(id="g", min_workers=4, max_workers=4, allocation={"a": 2, "gone": 2}, run_seconds=10.0)
    (decision,) = POLICIES[name](Cluster(now=100.0, nodes=NODES, jobs=(gang,)))
    assert decision == Stop(job="g", why="its nodes are gone")
    waits = replace(gang, allocation={}, stopped_at=100.0)
    (decision,) = POLICIES[name](Cluster(now=160.0, nodes=NODES, jobs=(waits,)))
    assert sum(decision.allocation.values()) == 4


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_an_elastic_job_goes_on_with_what_is_left_and_shrinks_when_asked(name):
    job = Queued(id="e", max_workers=4, is_elastic=True, allocation={"a": 2, "gone": 2}, changed_at=90.0)
    (decision,) = POLICIES[name](Cluster(now=100.0, nodes=NODES, jobs=(job,)))
    assert isinstance(decision, Place)
    assert decision.allocation["a"] >= 2
    asked = replace(job, max_workers=2, allocation={"a": 3})
    (decision,) = POLICIES[name](Cluster(now=100.0, nodes=NODES, jobs=(asked,)))
    assert sum(decision.allocation.values()) == 2

"""What a cluster that grows is asked for: what jobs that wait lack, nothing else, and not for ever."""

from dataclasses import replace

import pytest

from shoal.place.cluster import Node
from shoal.place.decision import Wait
from shoal.place.policies import POLICIES
from shoal.service.deciding import can_do, cluster_of
from shoal.service.growing import (
    NOTHING,
    PATIENCE_SECONDS,
    Growth,
    Hope,
    Wanted,
    bundles_of,
    find_wanted,
    go_on,
    tell_waits,
)
from shoal.service.job import Asked, Job
from shoal.service.people import Person
from shoal.service.settings import Settings
from shoal.service.transitions import start

GIB = 1 << 30
HERE = (Node(name="head", cores=2.0, memory_bytes=4 * GIB),)
GROWTH = {
    "small": Growth(node=Node(name="small", cores=2.0, memory_bytes=4 * GIB), most=3),
    "gpu": Growth(node=Node(name="gpu", kind="gpu", cores=4.0, gpus=2), most=1),
}


def job(number: int, **fields: object) -> Job:
    workers = fields.pop("workers", 1)
    more = {"min_workers": workers, "max_workers": workers, **fields}
    asked = Asked(run_args=("t.py",), name="t", working_dir="/", **more)  # type: ignore[arg-type]
    found = Job(number=number, owner="ann", asked=asked, submitted_at=float(number))
    return replace(found, min_workers=asked.min_workers, max_workers=asked.max_workers)


def runs(number: int, allocation: dict[str, int], **fields: object) -> Job:
    begun = start(job(number, workers=sum(allocation.values()), **fields), allocation, {}, 0.0)
    return replace(begun, state="running")


def wanted(*jobs: Job, nodes=HERE, present=None, people=None, policy: str = "fifo") -> Wanted:
    cluster = cluster_of(jobs, nodes, Settings(), people or {}, {}, {}, {}, 1000.0)
    _, waits, _ = can_do(POLICIES[policy](cluster), {job.number: job for job in jobs}, nodes, people or {})
    return find_wanted(cluster, waits, GROWTH, present or {})


@pytest.mark.parametrize("policy", list(POLICIES))
def test_what_does_not_fit_is_asked_for_and_what_will_fit_is_not(policy: str) -> None:
    found = wanted(runs(1, {"head": 2}), job(2, cores=2.0, workers=2), policy=policy)
    assert found.nodes == {"small": 2}
    assert found.jobs == {2: {"small": 2}}
    assert [(ask.cores, ask.gpus) for ask in found.asks] == [(2.0, 0.0)] * 2
    assert wanted(job(1, workers=2), policy=policy) == NOTHING


def test_what_is_free_is_used_first() -> None:
    """Three workers of one core, and one core is free: two have to be elsewhere, and one machine takes both."""
    found = wanted(runs(1, {"head": 1}), job(2, workers=3))
    assert found.nodes == {"small": 1}
    assert len(found.asks) == 2


def test_jobs_share_what_is_to_come() -> None:
    found = wanted(runs(1, {"head": 2}), job(2), job(3), job(4))
    assert found.nodes == {"small": 2}
    assert sorted(found.jobs) == [2, 3, 4]


def test_an_elastic_job_gets_what_it_needs_to_begin() -> None:
    found = wanted(runs(1, {"head": 2}), job(2, min_workers=2, max_workers=6, is_elastic=True))
    assert found.nodes == {"small": 1}


def test_no_more_are_asked_for_than_there_may_be() -> None:
    full = runs(1, {"head": 2})
    assert wanted(full, job(2, cores=2.0, workers=6)) == NOTHING, "all of them together take five"
    found = wanted(full, *(job(number, cores=2.0, workers=2, kinds=("cpu",)) for number in (2, 3)))
    assert found.nodes == {"small": 2}, "the second one would not fit beside the first"
    assert wanted(full, job(2, cores=2.0, workers=2, kinds=("cpu",)), present={"small": 2}) == NOTHING
    assert wanted(full, job(2, cores=2.0), present={"small": 2}).nodes == {"small": 1}


def test_kinds_and_memory_decide_which_group_it_is() -> None:
    full = runs(1, {"head": 2})
    assert wanted(full, job(2, gpus=1.0)).nodes == {"gpu": 1}
    assert wanted(full, job(2, kinds=("gpu",))).nodes == {"gpu": 1}
    assert wanted(full, job(2, memory_bytes=3 * GIB)).nodes == {"small": 1}
    assert wanted(full, job(2, memory_bytes=5 * GIB)) == NOTHING


def test_nothing_is_asked_for_whoever_waits_for_something_else() -> None:
    full = runs(1, {"head": 2})
    assert wanted(full, replace(job(2), is_held=True)) == NOTHING
    assert wanted(full, job(2, after=(1,))) == NOTHING
    ann = {"ann": Person(name="ann", role="user", max_workers=2)}
    assert wanted(full, job(2), people=ann) == NOTHING


def test_what_is_cancelled_or_has_started_is_not_asked_for_any_more() -> None:
    full, waits = runs(1, {"head": 2}), job(2)
    asked = Hope(wanted=wanted(full, waits), since=5.0)
    assert asked.is_asked(6.0)
    nodes = (*HERE, replace(GROWTH["small"].node, name="10.0.0.7"))
    assert wanted(full, waits, nodes=nodes, present={"small": 1}) == NOTHING, "it has room now"
    assert wanted(full, runs(2, {"10.0.0.7": 1}), nodes=nodes, present={"small": 1}) == NOTHING
    assert not go_on(asked, wanted(full, replace(waits, state="cancelled")), 7.0).is_asked(7.0)


def test_what_does_not_come_is_not_asked_for_for_ever() -> None:
    same = Wanted(nodes={"small": 1})
    hope = go_on(Hope(), same, 100.0)
    hope = go_on(hope, same, 400.0)
    assert (hope.since, hope.is_asked(400.0)) == (100.0, True)
    assert not hope.is_asked(100.0 + PATIENCE_SECONDS)
    assert hope.is_asked(100.0 + 2 * PATIENCE_SECONDS)
    assert go_on(hope, Wanted(nodes={"small": 2}), 900.0).is_asked(900.0), "something else may be had"


def test_ray_hears_of_what_is_there_and_what_is_missing() -> None:
    """It takes what is asked for as a whole that has to fit into empty machines."""
    present = [{"CPU": 2.0, "GPU": 0.0}, {"CPU": 0.0, "GPU": 0.0}]
    found = wanted(runs(1, {"head": 2}), job(2, gpus=1.0), job(3, cores=0.5, memory_bytes=GIB))
    assert bundles_of(found, GROWTH, present) == [
        {"CPU": 2.0},
        {"CPU": 1.0, "GPU": 1.0},
        {"CPU": 0.5, "memory": float(GIB)},
    ]
    no_memory = {"gpu": GROWTH["gpu"]}
    assert bundles_of(found, no_memory, [])[-1] == {"CPU": 0.5}, "a group without memory would never be found to fit"
    assert bundles_of(NOTHING, GROWTH, []) == []


def test_the_reason_says_what_was_asked_for() -> None:
    hope = Hope(wanted=Wanted(nodes={"small": 2}, jobs={2: {"small": 2}}), since=0.0)
    waits = {number: Wait(job=str(number), why="needs 1 core", position=number, eta_seconds=9.0) for number in (1, 2)}
    told = tell_waits(waits, hope, GROWTH, 1.0)
    assert told[1] == waits[1]
    assert told[2].why == "asked the cluster for 2 more nodes of 'small' (2 cores, 4 GiB of memory)"
    assert told[2].eta_seconds is None
    later = tell_waits(waits, hope, GROWTH, PATIENCE_SECONDS + 1.0)
    assert "did not add them within 10 minutes" in later[2].why

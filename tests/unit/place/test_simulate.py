"""The simulator: virtual time, the policies of the service, results that can be told beforehand."""

import pytest

from shoal.place.cluster import Ask, Node, Partition, Queued
from shoal.place.policies import POLICIES
from shoal.place.simulate import Setting, simulate
from shoal.place.traces.plain import PlainWork
from shoal.spec.errors import UserError


def job(name, at, seconds, workers=1, **more):
    queued = Queued(
        id=name, ask=Ask(cores=0, gpus=1), min_workers=workers, max_workers=workers, submitted_at=at, **more
    )
    return PlainWork(queued, seconds, workers)


def nodes(count, gpus=4):
    return tuple(Node(name=f"n{number}", kind="t4", gpus=gpus) for number in range(count))


def test_jobs_start_in_rounds_and_end_when_their_work_is_done():
    result = simulate([job("a", 0, 90), job("b", 61, 30, workers=4)], POLICIES["fifo"], Setting(nodes=nodes(1)))
    ends = {outcome.job: outcome.ended_at for outcome in result.outcomes}
    assert ends == {"a": 150.0, "b": 210.0}, "b waits for the round after a has ended"
    assert [moment.used for moment in result.moments] == [1, 1, 4, 0]


def test_a_stop_costs_what_it_costs_and_is_counted():
    long = job("long", 0, 1000, workers=4, stop_seconds=30)
    urgent = job("urgent", 100, 10, workers=4, job_class="interactive")
    result = simulate([long, urgent], POLICIES["fifo"], Setting(nodes=nodes(1)))
    outcomes = {outcome.job: outcome for outcome in result.outcomes}
    assert outcomes["long"].num_stops == 1
    # Starts at 60 and pauses 30; stopped at 120 with 970 s to go, starts again at 180.
    assert outcomes["long"].ended_at == 180 + 30 + 970
    assert outcomes["urgent"].ended_at == 130


def test_a_partition_says_how_often_a_job_may_be_stopped():
    def stops(most):
        urgent = [job(f"u{at}", 100 + 300 * at, 10, workers=4, job_class="interactive") for at in range(3)]
        setting = Setting(nodes=nodes(1), partitions={"default": Partition(max_preemptions=most)})
        result = simulate([job("long", 0, 2000, workers=4), *urgent], POLICIES["fifo"], setting)
        return {outcome.job: outcome.num_stops for outcome in result.outcomes}["long"]

    assert [stops(most) for most in (None, 2, 0)] == [3, 2, 0]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_everything_ends_under_every_policy_and_the_same_way_twice(name):
    def once():
        work = [job(f"j{i}", 7 * i, 50 + 131 * i % 900, workers=1 + i % 5, stop_seconds=5) for i in range(60)]
        return simulate(work, POLICIES[name], Setting(nodes=nodes(3)))

    result = once()
    assert sorted(outcome.job for outcome in result.outcomes) == sorted(f"j{i}" for i in range(60))
    assert all(outcome.jct_seconds is not None for outcome in result.outcomes)
    assert once().outcomes == result.outcomes


def test_a_cluster_without_nodes_and_jobs_that_never_fit_are_told():
    with pytest.raises(UserError, match="no nodes"):
        simulate([job("a", 0, 1)], POLICIES["fifo"], Setting(nodes=()))
    for seconds in (0.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="do not work"):
            simulate([job("a", 0, 1)], POLICIES["fifo"], Setting(nodes=nodes(1), round_seconds=seconds))
    with pytest.raises(UserError, match="can never start"):
        simulate([job("a", 0, 1, workers=9)], POLICIES["fifo"], Setting(nodes=nodes(1), round_seconds=3600))

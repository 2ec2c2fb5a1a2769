"""Sizes of elastic jobs: who gains most gets most, and a change must pay."""

from dataclasses import replace

import pytest

from shoal.place.cluster import Ask, Cluster, Node, Partition, Queued
from shoal.place.decision import Place
from shoal.place.goodput import most_goodput
from shoal.place.lengths import Lengths
from shoal.place.sizing import Member, sizes_between, worths
from shoal.place.traces.plain import Power

NODES = tuple(Node(name=f"n{number}", kind="t4", gpus=4) for number in range(4))


def elastic(name, exponent, **more):
    fields = {"ask": Ask(cores=0, gpus=1), "max_workers": 16, "is_elastic": True, "stop_seconds": 30.0} | more
    return Queued(id=name, rate=Power(exponent), **fields)


def placed(*jobs, **more):
    decisions = most_goodput(Cluster(now=1000.0, nodes=NODES, jobs=jobs, **more))
    return {one.job: sum(one.allocation.values()) for one in decisions if isinstance(one, Place)}


def test_who_scales_well_gets_more_and_everyone_gets_something():
    sizes = placed(elastic("good", 0.95), elastic("bad", 0.2), elastic("worse", 0.1))
    assert sum(sizes.values()) <= 16
    assert sizes["good"] >= 12
    assert min(sizes.values()) >= 1


def test_the_one_that_is_soon_done_gets_more():
    near, far = elastic("near", 0.7, remaining_seconds=100.0), elastic("far", 0.7, remaining_seconds=50000.0)
    sizes = placed(near, far)
    assert sizes["near"] > sizes["far"]


def test_what_does_not_pay_for_its_pause_is_left_as_it_is():
    running = elastic("a", 0.9, allocation={"n0": 4, "n1": 4, "n2": 4}, remaining_seconds=20.0, run_seconds=900.0)
    assert placed(running) == {}
    assert placed(replace(running, remaining_seconds=1e6)) == {"a": 16}


def test_caps_and_gangs_hold_for_sizes():
    both = [elastic("a", 1.0, owner="eve"), elastic("b", 1.0, owner="eve", min_workers=2)]
    sizes = placed(*both, partitions={"default": Partition(max_workers_per_user=5)})
    assert sum(sizes.values()) <= 5
    assert sizes["b"] >= 2
    assert placed(both[0], partitions={"default": Partition(max_workers_per_job=3)})["a"] <= 3


def test_a_higher_class_starts_though_others_have_grown():
    grown = elastic("grown", 1.0, allocation={node.name: 4 for node in NODES}, run_seconds=900.0)
    urgent = Queued(id="urgent", ask=Ask(cores=0, gpus=1), min_workers=4, max_workers=4, job_class="interactive")
    sizes = placed(grown, urgent)
    assert sizes["urgent"] == 4
    assert sizes["grown"] <= 12


def test_sizes_are_parts_of_a_node_and_whole_ones():
    assert sizes_between(1, 64, 4) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    assert sizes_between(3, 3, 4) == [3]


def test_lengths_are_learned_by_what_is_known_at_submission():
    lengths = Lengths().learned(("train.py", "small"), 10.0).learned(("train.py", "large"), 100.0)
    assert lengths.expect(("train.py", "large")) == 100.0
    assert lengths.expect(("train.py", "new"), done=20.0) == 80.0
    assert lengths.expect(("other.py",)) is None
    assert lengths.expect(("train.py", "small"), done=25.0) == 25.0


def member(name, left, *, weight=1.0, exponent=0.5):
    speeds = {size: float(size) ** exponent for size in (1, 2, 4, 8, 16)}
    return Member(Queued(id=name, max_workers=16, weight=weight), 0, left, speeds)


def test_worths_are_those_with_which_completion_times_are_least_in_sum():
    # With speed = workers ** 0.5 the shares of 16 workers are as the squares of worths: 1/9, 3/9 and 5/9.
    found = worths([member("short", 10.0), member("long", 1000.0), member("middle", 100.0)], 16, 0.5)
    squares = [worth**2 for worth in found]
    assert [square / sum(squares) for square in squares] == pytest.approx([5 / 9, 1 / 9, 3 / 9])


def test_a_weight_counts_as_so_many_jobs():
    # The one that ends last is worth what waits for nothing but itself: its weight.
    last, first = worths([member("long", 100.0, weight=3.0), member("short", 1.0)], 16, 0.5)
    assert (last, first) == pytest.approx((3.0, (4.0**2 - 3.0**2) ** 0.5))

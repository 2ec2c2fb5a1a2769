"""Two jobs on the same GPUs: who shares with whom, what becomes of the other one, and how fast they are."""

import json

import pytest

from shoal.place.cluster import Ask, Cluster, Node, Queued, guests_of
from shoal.place.decision import Place, Stop, Wait
from shoal.place.finish import finish_fair
from shoal.place.policies import POLICIES, first_come, shortest_remaining_first
from shoal.place.rules import USUAL
from shoal.place.simulate import Setting, simulate
from shoal.place.traces.gavel import PairSpeeds, Speeds, StepsWork, read_throughputs
from shoal.place.traces.opening import read_trace
from shoal.spec.errors import UserError

NODES = (Node(name="fast", kind="v100", gpus=1, cores=4), Node(name="slow", kind="k80", gpus=1, cores=4))
ONE = NODES[:1]


def rate_of(mine=0.8, theirs=0.9):
    return lambda other, kind: (mine, theirs) if kind == "v100" else None


def job(name, at=0.0, shares=True, cores=1.0, **more):
    more = {"pair_rate": rate_of() if shares else None, "rate": Speeds({"v100": 1.0, "k80": 0.5}), **more}
    return Queued(id=name, ask=Ask(cores=cores, gpus=1), submitted_at=at, **more)


def running(name, at=0.0, node="fast", device=0, **more):
    return job(name, at, allocation={node: 1}, devices={node: (device,)}, **more)


def decide(*jobs, nodes=ONE, policy=first_come, now=1000.0):
    return {item.job: item for item in policy(Cluster(now=now, nodes=nodes, jobs=jobs))}


def test_who_waits_shares_the_gpu_of_one_that_may_be_shared_and_says_so():
    found = decide(running("a"), job("b", 1.0))
    assert found["b"] == Place(
        job="b", allocation={"fast": 1}, devices={"fast": (0,)}, why="shares the GPUs of job a"
    )
    assert "a" not in found


def test_nobody_shares_who_was_not_asked_or_was_never_measured_there_or_gains_nothing():
    for host, guest in (
        (running("a", shares=False), job("b", 1.0)),
        (running("a"), job("b", 1.0, shares=False)),
        (running("a", node="slow"), job("b", 1.0)),
        (running("a"), job("b", 1.0, pair_rate=rate_of(0.5, 0.6))),
        (running("a", is_preemptible=False), job("b", 1.0)),
        (running("a"), job("b", 1.0, min_workers=2, max_workers=2)),
    ):
        node = NODES[0] if host.allocation == {"fast": 1} else NODES[1]
        assert isinstance(decide(host, guest, nodes=(node,))["b"], Wait)


def test_what_a_guest_needs_besides_must_be_there():
    assert isinstance(decide(running("a", cores=3.0), job("b", 1.0, cores=2.0))["b"], Wait)


def test_two_share_and_a_third_does_not():
    a, b = running("a"), running("b", 1.0)
    assert guests_of([a, b]) == {"b": "a"}
    found = decide(a, b, job("c", 2.0), now=10.0)
    assert set(found) == {"c"}
    assert isinstance(found["c"], Wait)


def test_a_guest_takes_a_gpu_that_is_free():
    alike = {"rate": Speeds({"v100": 1.0, "k80": 0.9})}
    found = decide(running("a", **alike), running("b", 1.0, **alike), nodes=NODES)
    assert [dict(item.allocation) for item in found.values()] == [{"slow": 1}]


def test_who_is_more_urgent_gets_the_gpu_and_both_are_stopped():
    found = decide(running("a"), running("b", 1.0), job("c", 2.0, shares=False, job_class="serving"))
    assert isinstance(found["a"], Stop)
    assert isinstance(found["b"], Stop)
    assert found["c"].devices == {"fast": (0,)}


def test_neither_of_a_pair_is_stopped_for_a_peer_before_both_are_due():
    peer = job("c", 2.0, shares=False, remaining_seconds=1.0)
    old = {"run_seconds": 10 * USUAL.quantum_seconds, "remaining_seconds": 900.0}
    a, young = running("a", **old), running("b", 1.0, changed_at=990.0, run_seconds=10.0, remaining_seconds=900.0)
    assert not any(
        isinstance(item, Stop) for item in decide(a, young, peer, policy=shortest_remaining_first).values()
    )
    b = running("b", 1.0, **old)
    found = decide(a, b, peer, policy=shortest_remaining_first)
    assert isinstance(found["c"], Place)


def test_with_its_host_gone_a_guest_has_the_gpu_and_nobody_else_gets_it():
    found = decide(running("b", 1.0), job("c", 2.0, shares=False), now=10.0)
    assert set(found) == {"c"}
    assert isinstance(found["c"], Wait)


def test_who_was_on_a_node_that_is_gone_is_stopped_with_its_guest():
    for policy in POLICIES.values():
        found = decide(running("a", node="gone"), running("b", 1.0, node="gone"), policy=policy)
        assert {name: item.why for name, item in found.items()} == dict.fromkeys("ab", "its nodes are gone")


def test_finish_leaves_alone_what_all_would_wait_for_in_the_end():
    slowed = {"pair_rate": rate_of(0.7, 0.7)}
    short = {"remaining_seconds": 100.0, "run_seconds": 900.0, **slowed}
    long = running("long", -5000.0, remaining_seconds=1000.0, changed_at=990.0, **slowed)
    assert isinstance(decide(long, job("short", -4000.0, **short), policy=finish_fair)["short"], Wait)
    kept = long.having(pair_rate=rate_of(0.97, 0.7))
    guest = job("short", -4000.0, **{**short, "pair_rate": rate_of(0.7, 0.97)})
    assert isinstance(decide(kept, guest, policy=finish_fair)["short"], Place)


def test_speeds_of_pairs_come_from_the_table_and_only_with_as_many_workers(tmp_path):
    both = {"('a', 1)": {"null": 10.0, "('b', 1)": [8.0, 3.0], "('b', 2)": [9.0, 9.0]}, "('b', 1)": {"null": 4.0}}
    path = tmp_path / "throughputs.json"
    path.write_text(json.dumps({"v100": {**both, "('b', 2)": {"null": 5.0}}}))
    table = read_throughputs(path)
    a, b, wide = (PairSpeeds(table, name, workers) for name, workers in (("a", 1), ("b", 1), ("b", 2)))
    assert a(job("b", pair_rate=b), "v100") == (0.8, 0.75)
    assert a(job("b", pair_rate=b), "k80") is None
    assert a(job("wide", pair_rate=wide), "v100") is None
    assert a(job("other", pair_rate=None), "v100") is None


def test_a_trace_that_knows_nothing_of_pairs_says_so(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("submitted_at,seconds\n0,1\n")
    with pytest.raises(UserError, match="how fast two jobs are on the same GPUs"):
        read_trace(trace, shares_gpus=True)


def test_the_simulator_runs_two_at_the_speeds_that_were_measured_and_counts_the_gpu_once():
    a, b = (StepsWork(job(name, at), {"v100": 1.0}, 900.0) for name, at in (("a", 0.0), ("b", 1.0)))
    result = simulate([a, b], first_come, Setting(nodes=ONE, round_seconds=100.0))
    ended = {outcome.job: outcome.ended_at for outcome in result.outcomes}
    # Both start at 100. `a` does 90 steps in each round, and is done after 10; `b` has 800 then, and goes on alone.
    assert ended == {"a": 1100.0, "b": 1200.0}
    assert max(moment.used for moment in result.moments) == 1
    assert sum(outcome.service_seconds for outcome in result.outcomes) == 1100.0

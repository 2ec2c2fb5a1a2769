"""Mixed clusters: who goes to which kind of node, and the policies on them."""

from dataclasses import replace

import pytest

from shoal.place.cluster import Ask, Cluster, Node, Queued
from shoal.place.decision import Place, Stop, Wait
from shoal.place.finish import finish_fair
from shoal.place.kinds import choose_kinds, fill_kinds
from shoal.place.policies import POLICIES
from shoal.place.simulate import Setting, simulate
from shoal.place.traces.gavel import Speeds, StepsWork

SPEEDS = (0.0, 0.1, 0.5, 0.9)
NODES = (Node(name="fast", kind="v100", gpus=2), Node(name="slow", kind="k80", gpus=4))


def job(name, v100=1.0, k80=0.5, workers=1, **more):
    return Queued(
        id=name,
        ask=Ask(cores=0, gpus=1),
        min_workers=workers,
        max_workers=workers,
        rate=Speeds({"v100": v100, "k80": k80}),
        **more,
    )


def cluster(*jobs, nodes=NODES, now=1000.0):
    return Cluster(now=now, nodes=nodes, jobs=tuple(jobs))


def places(decisions):
    return {item.job: dict(item.allocation) for item in decisions if isinstance(item, Place)}


def test_the_fast_kind_goes_to_who_gains_most_not_to_who_came_first():
    jobs = [job("a", k80=0.9), job("b", k80=0.8), job("c", k80=0.1), job("d", k80=0.2)]
    assert choose_kinds(cluster(*jobs), jobs) == {"a": "k80", "b": "k80", "c": "v100", "d": "v100"}


def test_with_much_waiting_each_kind_takes_those_who_are_best_off_there():
    suited = [job(f"s{number}", k80=0.9, submitted_at=number) for number in range(6)]
    picky = [job(f"p{number}", k80=0.05, submitted_at=10 + number) for number in range(6)]
    chosen = choose_kinds(cluster(*suited, *picky), suited + picky)
    assert sorted(name for name, kind in chosen.items() if kind == "v100") == ["p0", "p1"]
    assert sum(kind == "k80" for kind in chosen.values()) == 4


def test_who_would_be_late_elsewhere_chooses_before_who_loses_more_there():
    long, picky = job("long", k80=0.5, remaining_seconds=900.0), job("picky", k80=0.1, remaining_seconds=50.0)
    nodes = (Node(name="fast", kind="v100", gpus=1), NODES[1])
    found = {
        within: choose_kinds(cluster(long, picky, nodes=nodes), [long, picky], within=within)
        for within in (1000.0, 2000.0)
    }
    assert found == {1000.0: {"long": "v100", "picky": "k80"}, 2000.0: {"long": "k80", "picky": "v100"}}


def test_a_kind_on_which_a_job_cannot_run_is_never_given():
    jobs = [job(f"j{number}", k80=0.0) for number in range(4)]
    decisions = fill_kinds(cluster(*jobs), jobs)
    assert places(decisions) == {"j0": {"fast": 1}, "j1": {"fast": 1}}
    assert sum(isinstance(item, Wait) for item in decisions) == 2


def test_the_workers_of_a_job_stay_on_one_kind_if_one_has_room_for_all():
    busy = job("busy", allocation={"slow": 1}, devices={"slow": (0,)}, is_preemptible=False)
    wide = job("wide", workers=4)
    assert "wide" not in places(fill_kinds(cluster(busy, wide), [busy, wide])), "5 GPUs are free, but not of one kind"
    whole = job("whole", workers=6)
    assert places(fill_kinds(cluster(whole), [whole])) == {"whole": {"fast": 2, "slow": 4}}


def test_nobody_waits_for_the_best_kind_beside_room_on_another_one():
    """Four cores are left on the fast kind, but not the memory: only the slow one has room."""
    nodes = (
        Node(name="fast", kind="v100", cores=5.0, memory_bytes=1),
        Node(name="slow", kind="k80", cores=5.0, memory_bytes=9),
    )
    alike = {"min_workers": 1, "max_workers": 2, "rate": Speeds({"v100": 1.0, "k80": 0.1})}
    first, second = (Queued(id=name, ask=Ask(memory_bytes=1), **alike) for name in "ab")
    found = fill_kinds(cluster(first, second, nodes=nodes), [first, second])
    assert {name: set(at) for name, at in places(found).items()} == {"a": {"fast"}, "b": {"slow"}}
    never = replace(second, rate=Speeds({"v100": 1.0, "k80": 0.0}))
    (place, wait) = fill_kinds(cluster(first, never, nodes=nodes), [first, never])
    assert (place.job, wait.job) == ("a", "b")


def test_a_running_job_moves_to_the_kind_that_got_free_and_is_told_why():
    waits = job("w", allocation={"slow": 1}, devices={"slow": (0,)}, run_seconds=500.0, changed_at=100.0)
    (decision,) = fill_kinds(cluster(waits), [waits])
    assert decision.allocation == {"fast": 1}
    assert decision.why == "moved from k80 to v100 nodes: it gains most there"


def test_a_job_that_just_changed_or_must_not_be_stopped_stays():
    for more in ({"changed_at": 990.0}, {"is_preemptible": False}):
        stays = job("s", allocation={"slow": 1}, devices={"slow": (0,)}, run_seconds=500.0, **more)
        assert fill_kinds(cluster(stays), [stays]) == []


def test_one_on_a_borrowed_node_stays_there_too_if_it_must_not_be_stopped():
    nodes = (Node(name="own", kind="v100", gpus=2, partition="own"), Node(name="lent", kind="k80", gpus=4))
    more = {"partition": "own", "is_preemptible": False, "run_seconds": 500.0}
    stays = job("s", allocation={"lent": 1}, devices={"lent": (0,)}, **more)
    assert fill_kinds(cluster(stays, nodes=nodes), [stays]) == []


def test_a_small_gain_is_not_worth_a_restart():
    here = job("h", k80=0.95, allocation={"slow": 1}, devices={"slow": (0,)}, run_seconds=5000.0, stop_seconds=30.0)
    assert fill_kinds(cluster(here, now=9000.0), [here]) == []


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_ends_everything_on_a_mixed_cluster(name):
    def work():
        return [
            StepsWork(
                job(
                    f"j{at}",
                    k80=SPEEDS[at % 4],
                    submitted_at=31.0 * at,
                    workers=1 + at % 2,
                    stop_seconds=5.0 * (at % 2),
                ),
                {"v100": 1.0, "k80": SPEEDS[at % 4]},
                left=60.0 + 97 * at % 300,
            )
            for at in range(12)
        ]

    first = simulate(work(), POLICIES[name], Setting(nodes=NODES))
    assert all(outcome.ended_at is not None for outcome in first.outcomes)
    assert first.outcomes == simulate(work(), POLICIES[name], Setting(nodes=NODES)).outcomes


def one_kind(*jobs, now=1000.0):
    return cluster(*jobs, nodes=(Node(name="n", kind="v100", gpus=1),), now=now)


def test_finish_runs_who_is_furthest_behind_for_its_length():
    long = job("long", submitted_at=0.0, remaining_seconds=900.0)
    short = job("short", submitted_at=500.0, remaining_seconds=100.0)
    # Alone they take 900 and 100 s: the short one is behind by 6 of its lengths, the long one by 2.1 of its own. A
    # third makes the whole so much that neither is what the end waits for.
    rest = job("rest", submitted_at=999.0, remaining_seconds=850.0)
    assert places(finish_fair(one_kind(long, short, rest))) == {"short": {"n": 1}}


def test_finish_starts_what_the_end_of_all_would_wait_for():
    nodes = (Node(name="n", kind="v100", gpus=2),)
    long = job("long", submitted_at=990.0, remaining_seconds=10_000.0)
    shorts = [job(f"s{number}", submitted_at=0.0, remaining_seconds=500.0) for number in range(4)]
    assert "long" in places(finish_fair(cluster(long, *shorts, nodes=nodes)))


def test_finish_takes_jobs_of_unknown_length_to_need_as_long_again():
    old = job("old", submitted_at=0.0, run_seconds=900.0, service_seconds=900.0, num_stops=0, stopped_at=900.0)
    new = job("new", submitted_at=0.0)
    assert places(finish_fair(one_kind(old, new))) == {"new": {"n": 1}}


def test_finish_does_not_stop_the_running_for_nothing():
    runs = job("r", submitted_at=0.0, remaining_seconds=500.0, run_seconds=500.0, allocation={"n": 1})
    runs = replace(runs, devices={"n": (0,)})
    waits = job("w", submitted_at=500.0, remaining_seconds=1000.0)
    assert not any(isinstance(item, Stop) for item in finish_fair(one_kind(runs, waits)))

"""What is learned is used: the same decisions as live, from jobs whose speed or length was measured."""

from dataclasses import replace

import pytest

from shoal.place.batching import Batching, LearnedRate
from shoal.place.cluster import Node
from shoal.place.decision import Place, Wait
from shoal.place.lengths import Lengths
from shoal.place.policies import POLICIES
from shoal.place.throughput import Observation, fit
from shoal.service.asking import read_submission
from shoal.service.deciding import can_do, cluster_of
from shoal.service.job import Asked, Job
from shoal.service.learned import (
    OWN_STEPS,
    Hopeful,
    Insight,
    Learned,
    Pace,
    Usual,
    explain_waits,
    is_settling,
    like_of,
    patience_of,
)
from shoal.service.settings import NodeLimits, Settings, apply_limits, parse_settings
from shoal.service.transitions import accrue, change_size, start
from shoal.spec.errors import UserError

NODE = Node(name="a", cores=6.0, memory_bytes=1 << 34)


def job(number: int, *args: str, owner: str = "ann", **fields: object) -> Job:
    asked = Asked(run_args=args or (f"{number}.py",), name="t", working_dir="/", **fields)  # type: ignore[arg-type]
    return Job(number=number, owner=owner, asked=asked, min_workers=asked.min_workers, max_workers=asked.max_workers)


def elastic(number: int, workers: int = 0, most: int = 6) -> Job:
    asked = job(number, min_workers=1, max_workers=most, is_elastic=True)
    return replace(start(asked, {"a": workers}, {}, 0.0, kinds=("cpu",)), state="running") if workers else asked


def rate(seconds: dict[int, float]) -> Hopeful:
    """What these step times of a batch of 64 teach, by workers."""
    seen = [
        Observation(
            nodes=1, workers=workers, micro_batch=64 / workers, step_seconds=each, sync_seconds=None, kind="cpu"
        )
        for workers, each in seconds.items()
    ]
    likely = LearnedRate(throughput=fit(seen), batching=Batching(initial=64, largest=64, largest_micro=64))
    return Hopeful(likely, replace(likely, optimism=1.0, _tables={}, _grids={}), max(seconds))


SCALES = {workers: 1.0 / workers for workers in (1, 2, 3, 6)}
FLAT = {1: 0.5, 2: 0.52, 3: 0.53, 6: 0.57}


def decide(jobs: list[Job], learned: Learned, policy: str, now: float = 1000.0, nodes: tuple[Node, ...] = (NODE,)):
    """As the dispatcher does; returns what is to be done, and why others wait."""
    settings, usual = Settings(policy=policy), Usual(nodes)
    patience = patience_of(jobs, settings)

    def with_learned(job, shown):
        known = learned.know(job, shown.max_workers, usual, now, None, patience.get("default"))
        return known.shown(shown, is_settling=is_settling(job, settings, now))

    cluster = cluster_of(jobs, nodes, settings, {}, {}, {}, {}, now, learned=with_learned)
    decisions = POLICIES[policy](cluster)
    todo, waits, _ = can_do(decisions, {each.number: each for each in jobs}, nodes, {})
    return decisions, {each.number: sum(each.allocation.values()) for each in todo}, explain_waits(waits, cluster)


# --- rates


def test_of_two_elastic_jobs_the_one_that_scales_gets_the_workers():
    jobs = [elastic(1, 3), elastic(2, 3)]
    insights = {1: Insight(rate=rate(SCALES), largest=6), 2: Insight(rate=rate(FLAT), largest=6)}
    decisions, done, _ = decide(jobs, Learned(insights=insights), "goodput")
    wanted = {int(each.job): sum(each.allocation.values()) for each in decisions if isinstance(each, Place)}
    assert wanted[2] == 1
    assert wanted[1] >= 4
    assert done == {2: 1}, "the other grows when those workers are gone"
    assert decide(jobs, Learned(), "goodput")[1] == {}, "of which nothing is known, nobody is resized"


def test_a_resize_is_weighed_by_what_it_costs_and_not_by_what_a_stop_does():
    jobs = [elastic(1, 3), elastic(2, 3)]

    def done(resize_seconds: float) -> dict[int, int]:
        costs = {"largest": 6, "pause_seconds": 500.0, "resize_seconds": resize_seconds}
        insights = {1: Insight(rate=rate(SCALES), **costs), 2: Insight(rate=rate(FLAT), **costs)}
        return decide(jobs, Learned(insights=insights), "goodput")[1]

    assert done(0.5) == {2: 1}
    assert done(1e6) == {}


def test_a_job_keeps_its_size_for_a_round():
    jobs = [replace(elastic(1, 3), changed_at=990.0), replace(elastic(2, 3), changed_at=990.0)]
    insights = {1: Insight(rate=rate(SCALES), largest=6), 2: Insight(rate=rate(FLAT), largest=6)}
    assert decide(jobs, Learned(insights=insights), "goodput")[1] == {}


def test_a_job_that_waits_is_as_fast_as_one_like_it_was():
    past, new = elastic(1), elastic(2)
    learned = Learned(rates={like_of(new)[:3]: rate(FLAT)})
    assert decide([new], learned, "goodput")[1] == {2: 1}
    assert decide([past], learned, "goodput")[1] == {1: 6}, "another script"


def test_beside_others_a_job_of_unknown_speed_begins_small():
    jobs = [elastic(1), elastic(2)]
    assert decide(jobs, Learned(), "goodput")[1] == {1: 1, 2: 1}
    assert decide(jobs[:1], Learned(), "goodput")[1] == {1: 6}
    late = replace(elastic(3, 1), run_seconds=1000.0)
    assert decide([late, elastic(4)], Learned(), "goodput")[1][3] > 1, "it will not be measured any more"


def test_what_is_uncertain_is_tried_and_no_more_than_twice_of_what_was():
    known = rate({2: 1.0})
    assert known("cpu", 4, 1) > known.likely("cpu", 4, 1)
    assert known("cpu", 4, 1) <= 2 * known("cpu", 2, 1) * (1 + 1e-9)
    learned, usual = Learned(insights={1: Insight(rate=known, largest=2)}), Usual([NODE])
    assert learned.know(elastic(1, 2), 6, usual, 0.0, patience=0.0).max_workers == 4
    assert learned.know(elastic(1, 2), 6, usual, 0.0).max_workers == 6, "other policies have no use for it"
    assert learned.know(elastic(1, 2), 1, usual, 0.0, patience=0.0).max_workers == 1, "what was asked is never passed"


# --- lengths


def learned_from(*jobs: tuple[Job, float]) -> Learned:
    return Learned(lengths=Lengths().learned_all((like_of(job), seconds) for job, seconds in jobs))


def test_the_one_known_to_be_short_goes_first():
    learned = learned_from((job(1, "long.py"), 900.0), (job(2, "short.py"), 10.0))
    node = (replace(NODE, cores=1.0),)
    jobs = [job(3, "long.py"), job(4, "short.py")]
    for policy in ("sjf", "srtf", "goodput"):
        assert decide(jobs, learned, policy, nodes=node)[1] == {4: 1}, policy
    assert decide(jobs, Learned(), "sjf", nodes=node)[1] == {3: 1}


def test_who_waits_is_told_when_it_starts_once_something_like_that_has_finished():
    node = (replace(NODE, cores=1.0),)
    running = replace(start(job(3, "long.py"), {"a": 1}, {}, 900.0), state="running")
    jobs = [running, job(4, "other.py")]
    wait = decide(jobs, Learned(), "fifo", nodes=node)[2][4]
    assert wait.eta_seconds is None
    assert "nothing like job 3 has finished yet" in wait.why
    wait = decide(jobs, learned_from((job(1, "long.py"), 300.0)), "fifo", nodes=node)[2][4]
    assert wait.eta_seconds == pytest.approx(200.0)
    assert wait.why.endswith("job 3 is expected to end first")


def know(learned: Learned, of: Job, now: float = 100.0, step: int | None = None):
    return learned.know(of, of.max_workers, Usual([NODE]), now, step)


def test_lengths_come_from_the_most_alike_with_how_sure_they_are():
    learned = learned_from(
        (job(1, "t.py", "--lr", "1"), 100.0),
        (job(2, "t.py", "--lr", "2"), 300.0),
        (job(3, "t.py", "--lr", "2"), 310.0),
        (job(4, "t.py", "--lr", "2"), 290.0),
        (job(5, "sub/t.py", owner="bob"), 1000.0),
    )
    exact = know(learned, job(20, "t.py", "--lr", "2"))
    assert (exact.remaining_seconds, exact.told_by) == (300.0, "3 jobs like it")
    script = know(learned, job(21, "t.py", "--lr", "3"))
    assert (script.remaining_seconds, script.told_by) == (250.0, "4 jobs with that script")
    assert know(learned, job(22, "t.py", "--lr", "1")).spread == 0.5
    assert exact.spread < script.spread
    assert know(learned, job(23, "else/t.py")).told_by == "4 jobs of the same owner and name"
    assert know(learned, job(24, "x/t.py", owner="eve")).told_by == "5 jobs of that name"
    assert know(learned, job(25, "u.py")).remaining_seconds is None


def test_what_a_job_has_done_is_not_ahead_of_it():
    learned = learned_from((job(1, "t.py"), 100.0), (job(2, "t.py"), 200.0))
    running = replace(start(job(9, "t.py"), {"a": 1}, {}, 0.0), state="running")
    assert know(learned, running, now=120.0).remaining_seconds == pytest.approx(80.0)
    late = know(learned, running, now=300.0)
    assert (late.remaining_seconds, late.told_by) == (300.0, "it has run longer than any job like it")
    capped = replace(running, asked=replace(running.asked, time_limit_seconds=130.0))
    assert know(learned, capped, now=120.0).remaining_seconds == pytest.approx(80.0)
    assert know(learned, replace(capped, run_seconds=125.0, accrued_at=120.0), now=120.0).left_seconds == 5.0


def test_its_own_steps_tell_better():
    running = elastic(9, 2)
    pace = Pace(goal=100, step=40, step_seconds=1.0, num_steps=40, workers=2)
    learned = replace(learned_from((running, 9999.0)), insights={9: Insight(rate=rate(SCALES), largest=6, pace=pace)})
    found = know(learned, running, step=50)
    assert (found.left_seconds, found.told_by) == (pytest.approx(50.0), OWN_STEPS)
    assert found.remaining_seconds == pytest.approx(50.0 / 3, rel=0.1), "with six workers"
    assert know(learned, running, step=200).left_seconds == 0.0


def test_the_time_until_a_start_is_for_the_workers_a_job_has():
    node = (replace(NODE, cores=2.0),)
    running = elastic(3, 2, most=4)
    learned = learned_from((running, 4000.0))
    (wait,) = (
        each
        for each in decide([running, job(4, min_workers=2, max_workers=2)], learned, "fifo", 1000.0, node)[0]
        if isinstance(each, Wait)
    )
    assert wait.eta_seconds == pytest.approx(1000.0), "4000 s on one worker, of which 2 did 1000 s"


# --- costs, kinds, data


def test_what_a_stop_costs_is_measured_or_that_of_jobs_alike():
    one = job(1, "t.py")
    assert know(Learned(), one).stop_seconds == 0.0
    learned = Learned(pauses={(): 3.0, like_of(one)[:1]: 7.0})
    assert know(learned, one).stop_seconds == 7.0
    assert know(learned, job(2, "u.py")).stop_seconds == 3.0
    own = replace(learned, insights={1: Insight(pause_seconds=9.0, resize_seconds=0.5)})
    assert know(own, elastic(1, 2)).stop_seconds == 9.0
    assert know(own, elastic(1, 2)).resize_seconds == 0.5
    assert know(own, one).resize_seconds is None


def test_time_is_counted_for_each_kind_of_node():
    begun = start(job(1), {"a": 1}, {}, 10.0, kinds=("cpu", "gpu"))
    moved = change_size(begun, {"a": 2}, {}, 30.0, kinds=("gpu",))
    assert accrue(moved, 35.0).kind_seconds == {"cpu": 20.0, "gpu": 25.0}
    shown = cluster_of([moved], [NODE], Settings(), {}, {}, {}, {}, 40.0).jobs[0]
    assert shown.kind_seconds == {"cpu": 20.0, "gpu": 30.0}


def test_nodes_that_have_the_data_are_preferred():
    settings = Settings(nodes={"b": NodeLimits(holds=frozenset({"/data/images"}))})
    nodes = tuple(apply_limits(replace(NODE, name=name), settings, {}) for name in ("a", "b", "c"))
    for data, held in (("/data/images/train", "b"), ("/data/imagesque", "a"), ("/data", "a")):
        (asked,) = read_submission({"jobs": [{"args": ["t.py"], "dir": "/", "data": [data]}]}).jobs
        decisions = POLICIES["fifo"](cluster_of([replace(job(1), asked=asked)], nodes, settings, {}, {}, {}, {}, 0.0))
        assert [list(each.allocation) for each in decisions if isinstance(each, Place)] == [[held]], data


def test_data_are_paths():
    (asked,) = read_submission({"jobs": [{"args": ["t.py"], "dir": "/jobs", "data": ["set", "/a/../b", "set"]}]}).jobs
    assert asked.data == ("/jobs/set", "/b")
    for bad in ("s3://bucket/x", ""):
        with pytest.raises(UserError, match="not a path"):
            read_submission({"jobs": [{"args": ["t.py"], "dir": "/", "data": [bad]}]})
    found = parse_settings('learn = "5s"\n[nodes.a]\nholds = ["/data/"]\n', "service.toml", dict)
    assert (found.learn_seconds, found.nodes["a"].holds) == (5.0, frozenset({"/data"}))

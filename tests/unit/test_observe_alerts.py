"""When people are woken up, and when not: rules, without processes."""

import math
from random import Random

import pytest
from observing import event, make_step

from shoal.observe.alerts import GIB, NAMES, Alert, Limits, Memory, Sight, judge, replay
from shoal.spec.event import StepMetrics
from shoal.spec.system import SystemSample


def rows(count, *, start=0, seconds=0.5, begin=1000.0, **changes) -> list[StepMetrics]:
    """Steps at equal distances."""
    steps = range(start, start + count)
    return [make_step(step, time=begin + seconds * step, **changes) for step in steps]


def losses(values):
    return [make_step(step, time=1000.0 + 0.5 * step, loss=loss) for step, loss in enumerate(values)]


def rules_of(alerts):
    return [(alert.rule, alert.rank, alert.is_resolved) for alert in alerts]


def told(metrics, events=(), limits=None, **more):
    return list(replay(metrics, list(events), limits or Limits(), **more))


def test_a_run_in_which_nothing_is_wrong():
    """Half an hour with noise in losses and times, evaluations of a minute, and checkpoints."""
    random = Random(7)
    time, steps = 1000.0, {0: [], 1: []}
    for step in range(6000):
        time += 0.2 * random.lognormvariate(0, 0.3) + (60.0 if step % 1000 == 999 else 0.0)
        loss = (2.0 * math.exp(-step / 2000) + 0.2) * random.lognormvariate(0, 0.25)
        own = [0.1 * random.lognormvariate(0, 0.2) for _ in range(2)]
        for rank in (0, 1):
            wait = max(own) - own[rank]
            row = make_step(step, time=time, loss=loss, compute=own[rank], wait=wait)
            steps[rank].append(row)
    saved = [event("checkpoint_saved", 1000.0 + 100 * n) for n in range(15)]
    ended = event("run_ended", time, status="finished", exit_code=0)
    assert told(steps, [*saved, ended]) == []


def test_no_progress_is_told_once_and_so_is_its_end():
    metrics = {0: [*rows(20), *rows(5, start=20, begin=1500.0)]}
    found = told(metrics)
    assert rules_of(found) == [("no_progress", None, False), ("no_progress", None, True)]
    assert found[0].step == 19
    assert found[0].severity == "error"
    assert "stacks" in found[0].hint
    assert "No step has ended for 8:" in found[0].message


def test_long_steps_have_longer_patience_and_the_start_has_any():
    assert told({0: rows(20, seconds=100.0)}, until=1000.0 + 1900 + 900) == []
    assert rules_of(told({0: rows(20, seconds=100.0)}, until=1000.0 + 1900 + 1100)) == [("no_progress", None, False)]
    assert told({0: rows(2)}, until=9000.0) == []
    assert told({0: rows(20)}, [event("run_ended", 1020.0, status="finished")], until=9000.0) == []
    assert rules_of(told({0: rows(20)}, limits=Limits(no_progress=10), until=1030.0)) == [
        ("no_progress", None, False)
    ]


def test_a_loss_that_jumps_and_comes_back():
    values = [1.0 + 0.01 * (n % 5) for n in range(60)]
    found = told({0: losses([*values, 9.0, 9.5, 9.0, 8.0, *values])})
    assert rules_of(found) == [("loss_spike", None, False), ("loss_spike", None, True)]
    assert found[0].step == 62
    assert told({0: losses([*values, 9.0, *values, 9.0, *values])}) == []  # a hard batch
    assert told({0: losses([-value for value in values] + [-1.02] * 50)}) == []


def test_a_loss_that_stays_high_is_told_once():
    found = told({0: losses([1.0] * 60 + [5.0] * 500)})
    assert rules_of(found)[0] == ("loss_spike", None, False)
    assert len(found) == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number(bad):
    found = told({0: losses([1.0] * 10 + [bad] * 5 + [1.0] * 30)})
    assert rules_of(found) == [("nan", None, False), ("nan", None, True)]
    assert found[0].step == 10
    assert found[0].severity == "error"


def test_a_gradient_that_is_no_number_and_a_step_that_was_left_out():
    bad = make_step(3, time=1001.5, grad_norm=math.inf)
    assert "norm of the gradient is inf at step 3" in told({0: [*rows(3), bad]})[0].message
    skipped = [
        event("step_skipped", 1001.0, rank=rank, step=2, message="The loss of rank 1 is nan.") for rank in (0, 1)
    ]
    (found,) = told({0: rows(3)}, skipped)
    assert (found.rule, found.message, found.step) == ("nan", "The loss of rank 1 is nan.", 2)


def test_a_bad_number_that_was_diagnosed_is_not_shown_a_second_time():
    seen = event("diagnosis", 1001.0, rank=1, cause="nan", message="Rank 1 computed what is no number.")
    skipped = event("step_skipped", 1001.0, rank=0, step=2, message="The loss is nan.")
    (found,) = told({0: rows(3)}, [skipped, seen])
    assert (found.message, found.is_told) == ("Rank 1 computed what is no number.", True)


def uneven(slow, steps=range(200), seconds=0.5):
    """Two ranks of which one computes longer; the other waits for it."""
    metrics = {0: [], 1: []}
    for step in steps:
        time = 1000.0 + seconds * step
        metrics[0].append(make_step(step, time=time, compute=0.1, wait=slow - 0.1, waited_for=1))
        metrics[1].append(make_step(step, time=time, compute=slow, wait=0.0, waited_for=None))
    return metrics


def test_a_straggler_has_a_rank_a_cause_and_a_cost():
    found = told(uneven(0.3))
    assert rules_of(found) == [("straggler", 1, False)]
    assert "computes slower" in found[0].message
    assert "% of the time" in found[0].why
    assert found[0].hint
    assert told(uneven(0.11)) == []
    assert told(uneven(0.3, range(50))) == []  # too short to be sure
    assert told(uneven(0.3), limits=Limits(straggler=0.9)) == []


def test_little_is_remembered():
    memory = Memory()
    for look in range(1000):
        judge(Sight(now=1000.0 + look, steps={0: rows(2, start=2 * look)}), memory, Limits())
    assert sum(map(len, memory.window.values())) < 100


def test_a_straggler_that_recovers():
    after = uneven(0.1, range(200, 400))
    before = uneven(0.3)
    found = told({rank: before[rank] + after[rank] for rank in (0, 1)})
    assert rules_of(found) == [("straggler", 1, False), ("straggler", 1, True)]


def test_what_was_diagnosed_is_not_told_a_second_time():
    seen = event("diagnosis", 1001.0, rank=1, cause="slow_compute", message="Rank 1 is slow.", why="w", hint="h")
    (found,) = told(uneven(0.3), [seen])
    assert (found.message, found.is_told) == ("Rank 1 is slow.", True)


def test_the_disk():
    memory, limits = Memory(), Limits()

    def look(free, now, total=500 * GIB):
        return rules_of(judge(Sight(now=now, disk_free=free, disk_total=total), memory, limits))

    assert look(3 * GIB, 1.0) == []
    assert look(GIB, 2.0) == [("disk_low", None, False)]
    assert look(GIB, 3.0) == []
    assert look(int(2.1 * GIB), 4.0) == []  # not yet
    assert look(4 * GIB, 5.0) == [("disk_low", None, True)]
    assert look(GIB, 6.0) == []  # within the cool-down, and so its end is not told either
    assert look(4 * GIB, 7.0) == []
    assert look(GIB, 700.0) == [("disk_low", None, False)]
    assert judge(Sight(now=1.0, disk_free=GIB, disk_total=4 * GIB), Memory(), limits) == []  # a small disk
    low = Limits(disk_low=5 * GIB)
    assert rules_of(judge(Sight(now=1.0, disk_free=4 * GIB), Memory(), low)) == [("disk_low", None, False)]


def test_the_disk_of_a_recorded_run():
    free = [9, 1, 1, 1, 9, 9]
    samples = [
        SystemSample(time=1000.0 + 5 * place, node="a", cores=2, disk_free=each * GIB, disk_total=500 * GIB)
        for place, each in enumerate(free)
    ]
    assert rules_of(told({}, samples=samples)) == [("disk_low", None, False), ("disk_low", None, True)]


def test_workers_that_are_lost_and_come_back():
    events = [
        event("worker_lost", 1000.0, id="1.0", code=-9, reason="killed by signal 9"),
        event("waiting_for_workers", 1000.1, present=1, min_workers=2),
        event("worker_lost", 1000.2, id="2.0", code=1, reason="\x1b[31mred"),
        event("world", 1001.0, generation=1, members=["0.0", "1.1"], joined=["1.1"]),
        event("worker_joined", 1001.0, id="1.1", generation=1),
        event("worker_lost", 1003.0, id="1.1", code=-9, reason="killed by signal 9"),
    ]
    found = told({}, events, look_seconds=0.05)
    assert rules_of(found) == [
        ("worker_lost", 1, False),
        ("too_few_workers", None, False),
        ("worker_lost", 2, False),
        ("too_few_workers", None, True),
        ("worker_lost", 1, True),
    ]
    assert found[0].why == "killed by signal 9"
    assert found[2].why == "red"
    assert all(alert.is_told for alert in found if alert.rule == "worker_lost")


def test_what_else_is_told():
    events = [
        event("worker_hung", 1000.0, rank=1, where="train.py:13 in __getitem__"),
        event("worker_went_on", 1005.0, rank=1),
        event(
            "checkpoint_failed", 1006.0, rank=0, step=5, message="Cannot save.", why="No space left", hint="free some"
        ),
        event("checkpoint_saved", 1008.0, rank=0, step=6),
        event("replica_diverged", 1010.0, rank=1, step=7),
        event("run_ended", 1020.0, status="failed", cause={"type": "ValueError", "message": "no\nnumber", "rank": 1}),
    ]
    found = told({}, events)
    assert rules_of(found) == [
        ("worker_hung", 1, False),
        ("worker_hung", 1, True),
        ("checkpoint_failed", None, False),
        ("checkpoint_failed", None, True),
        ("replica_diverged", 1, False),
        ("run_failed", 1, False),
    ]
    assert found[0].why == "it is in train.py:13 in __getitem__"
    assert found[-1].why == "ValueError: no number"
    assert all(alert.hint for alert in found if not alert.is_resolved)
    assert {alert.rule for alert in found} <= {*NAMES}


def test_a_run_that_was_stopped_by_hand_is_no_alert():
    assert told({}, [event("run_ended", 1000.0, status="stopped", exit_code=130)]) == []


def test_rules_that_are_off_say_nothing():
    metrics = {0: losses([1.0] * 10 + [math.nan] * 5)}
    assert told(metrics, limits=Limits(off=frozenset({"nan"}))) == []
    assert told(metrics, [event("run_ended", 1010.0, status="failed")], limits=Limits(off=frozenset(NAMES))) == []


@pytest.mark.parametrize(
    "data",
    [{}, {"cause": 5, "status": "failed"}, {"id": None, "reason": {}, "members": 3}, {"id": "x.y", "message": ["a"]}],
)
def test_events_that_make_no_sense_break_nothing(data):
    kinds = ("worker_lost", "world", "worker_joined", "worker_hung", "step_skipped", "run_ended", "checkpoint_failed")
    kinds += ("diagnosis", "replica_diverged", "waiting_for_workers", "checkpoint_saved", "worker_went_on")
    told({}, [event(kind, 1000.0, **data) for kind in kinds])


def test_words():
    alert = Alert(rule="nan", message="Bad.", why="so it is", hint="do it", rank=1, step=3, time=5.0)
    assert alert.text() == "Bad (so it is). Do: do it"
    assert alert.event().data == {
        "rule": "nan",
        "message": "Bad.",
        "why": "so it is",
        "hint": "do it",
        "severity": "warning",
        "rank": 1,
    }

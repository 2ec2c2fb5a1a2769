"""What can happen to a job, move by move: nothing is held by one that is over, and no token comes twice."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.service import transitions as moves
from shoal.service.briefing import orders_for
from shoal.service.job import Asked, Job, decode_job, encode_asked, encode_facts
from shoal.service.orders import Seen
from shoal.service.settings import Settings
from shoal.spec.errors import UserError

ASKED = Asked(run_args=("train.py",), name="train", working_dir="/", min_workers=1, max_workers=4, is_elastic=True)


def new(asked: Asked = ASKED) -> Job:
    return moves.submit(1, "ann", asked, now=10.0, wall=1000.0)


def running(asked: Asked = ASKED, workers: int = 2) -> Job:
    return moves.see(
        moves.start(new(asked), {"a": workers}, {}, 11.0), Seen(state="running", num_workers=workers), 12, 1
    )


def ended(cause: str, **more: object) -> Seen:
    return Seen(state="ended", cause=cause, message="so it is", **more)  # type: ignore[arg-type]


def test_a_job_goes_from_waiting_to_finished_and_gives_back_what_it_had():
    job = running()
    assert (job.state, job.token, job.num_reserved) == ("running", 1, 2)
    done = moves.see(job, ended("finished", exit_code=0), 32.0, 2000.0)
    assert (done.state, done.num_reserved, done.exit_code, done.ended_wall) == ("finished", 0, 0, 2000.0)
    assert done.service_seconds == 2 * (32 - 11)


def test_what_ended_while_nobody_looked_is_charged_until_then():
    job = moves.accrue(running(), 20.0)
    for at, charged in ((25.0, 25), (19.0, 20), (5000.0, 4000)):
        done = moves.see(job, ended("finished"), 4000.0, 9000.0, (at, 1025.0))
        assert done.service_seconds == 2 * (charged - 11)
        assert (done.changed_at, done.ended_wall) == (charged, 1025.0)


@pytest.mark.parametrize(
    ("wish", "cause", "state"),
    [
        ("", "failed", "failed"),
        ("", "out_of_memory", "failed"),
        ("", "time_limit", "failed"),
        ("", "lost", "waiting"),
        ("", "preempted", "waiting"),
        ("preempt", "failed", "waiting"),
        ("preempt", "out_of_memory", "failed"),
        ("preempt", "finished", "finished"),
        ("cancel", "finished", "finished"),
        ("cancel", "cancelled", "cancelled"),
        ("cancel", "failed", "cancelled"),
        ("cancel", "lost", "cancelled"),
    ],
)
def test_how_an_attempt_ends_and_what_was_wished_decide_what_becomes_of_the_job(wish, cause, state):
    job = moves.stop(running(), wish, "why", 13.0) if wish else running()
    after = moves.see(job, ended(cause), 14.0, 1.0)
    assert (after.state, after.allocation, after.wish) == (state, {}, "")


def test_a_job_that_is_lost_again_and_again_fails_in_the_end():
    job = new()
    for _ in range(moves.MAX_LOST):
        job = moves.see(moves.start(job, {"a": 1}, {}, 1.0), ended("lost"), 2.0, 1.0)
        assert job.state == "waiting"
    assert job.change.startswith("back in the queue"), "nobody would know that it begins again"
    assert "it was back in the queue" in moves.start(job, {"a": 1}, {}, 1.0).change
    job = moves.see(moves.start(job, {"a": 1}, {}, 1.0), ended("lost"), 2.0, 1.0)
    assert (job.state, job.cause, job.token) == ("failed", "lost", moves.MAX_LOST + 1)
    assert moves.requeue(job, 3.0).num_lost == 0


def test_an_attempt_that_is_not_there_yet_is_waited_for_and_one_that_ran_is_lost():
    starting = moves.start(new(), {"a": 1}, {}, 11.0)
    assert moves.see(starting, Seen(), 12.0, 1.0) is starting
    assert moves.see(running(), Seen(), 12.0, 1.0).num_lost == 1


def test_what_a_job_shrinks_by_is_free_only_when_its_workers_are_gone():
    job = moves.change_size(running(workers=4), {"a": 1}, {}, 20.0)
    assert (job.num_reserved, job.num_wanted) == (4, 1)
    still = moves.see(job, Seen(state="running", num_workers=3), 21.0, 1.0)
    assert still.num_reserved == 4
    gone = moves.see(job, Seen(state="running", num_workers=1), 22.0, 1.0)
    assert (gone.num_reserved, gone.target) == (1, None)


def test_people_are_told_why_not():
    with pytest.raises(UserError, match="cannot be held"):
        moves.hold(running())
    done = moves.see(running(), ended("finished"), 1.0, 1.0)
    for move in (moves.release, lambda job: moves.requeue(job, 1.0), lambda job: moves.resize(job, 1, 2)):
        with pytest.raises(UserError, match="cannot"):
            move(done)
    with pytest.raises(UserError, match="fixed number"):
        moves.resize(running(replace(ASKED, is_elastic=False)), None, 3)
    with pytest.raises(UserError, match="no range"):
        moves.resize(running(), 5, 3)
    with pytest.raises(UserError, match="of a GPU each"):
        moves.resize(new(replace(ASKED, gpus=0.5, max_workers=1)), 1, 2)
    assert moves.cancel(done, "late", 1.0, 1.0) is done


def test_one_that_is_being_stopped_can_be_kept_from_going_on():
    stopping = moves.hold(moves.requeue(running(), 13.0))
    assert stopping.state == "stopping"
    assert moves.see(stopping, ended("preempted"), 14.0, 1.0).shown_state == "held"
    with pytest.raises(UserError, match="cannot be held"):
        moves.hold(moves.cancel(running(), "c", 13.0, 1.0))


def test_one_that_runs_stays_within_the_bounds_it_was_started_with():
    job = running(replace(ASKED, min_workers=2))
    assert (moves.resize(job, 3, 3).min_workers, moves.resize(job, 3, 3).span) == (3, (2, 4))
    for least, most in ((None, 1), (2, 5), (5, 6)):
        with pytest.raises(UserError, match="before its next start") as caught:
            moves.resize(job, least, most)
        assert "-n 2:4" in caught.value.why
    stopping = moves.resize(moves.requeue(job, 13.0), 1, 8)
    waiting = moves.see(stopping, ended("preempted"), 14.0, 1.0)
    again = moves.start(waiting, {"a": 8}, {}, 15.0)
    assert (again.span, orders_for(again, Settings(), "local", {}).max_workers) == ((1, 8), 8)
    assert orders_for(moves.resize(again, 2, 4), Settings(), "local", {}).max_workers == 8
    fixed = moves.requeue(running(replace(ASKED, is_elastic=False)), 13.0)
    assert moves.resize(fixed, None, 3).min_workers == 3


MOVES = {
    "hold": moves.hold,
    "release": moves.release,
    "cancel": lambda job: moves.cancel(job, "c", 5.0, 1.0),
    "requeue": lambda job: moves.requeue(job, 5.0),
    "resize": lambda job: moves.resize(job, 1, 3),
    "start": lambda job: moves.start(job, {"a": 2}, {}, 5.0) if job.state == "waiting" else job,
    "shrink": lambda job: moves.change_size(job, {"a": 1}, {}, 6.0) if job.state == "running" else job,
    "preempt": lambda job: moves.stop(job, "preempt", "p", 5.0),
    "absent": lambda job: moves.see(job, Seen(), 7.0, 1.0),
    "runs": lambda job: moves.see(job, Seen(state="running", num_workers=2), 7.0, 1.0),
    **{
        cause: lambda job, cause=cause: moves.see(job, ended(cause), 8.0, 1.0)
        for cause in ("finished", "failed", "out_of_memory", "preempted", "cancelled", "lost")
    },
}


@given(st.lists(st.sampled_from(sorted(MOVES)), max_size=30))
def test_whatever_happens_only_active_jobs_hold_nodes_and_tokens_only_grow(names):
    job = new()
    for name in names:
        try:
            after = MOVES[name](job)
        except UserError:
            continue
        assert bool(after.allocation) == after.is_active
        assert not after.wish or after.state == "stopping"
        assert after.token == job.token + (after.state == "starting" and job.state == "waiting")
        assert after.service_seconds >= job.service_seconds
        if job.state == "finished":
            assert after is job
        job = after
        assert decode_job(encode_asked(job.asked), encode_facts(job)) == job

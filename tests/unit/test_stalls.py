"""Waiting for other parts of a copy: what it was, and for whom. Pure functions, and a clock around a group."""

import pytest
import torch
from observing import event, make_step, make_steps

from shoal.comm.clocked import Clock, Clocked, ClockedWork
from shoal.comm.connect import connect
from shoal.observe.breakdown import break_down
from shoal.observe.diagnose import diagnose, find_cut
from shoal.observe.spending import spend
from shoal.observe.turns import Turn, merge_turns, waits_in
from shoal.train.split.schedule import ideal_bubble, idle_of
from shoal.train.stalls import divide_stall


class TestStall:
    def test_what_the_schedule_makes_all_wait_is_a_bubble(self):
        # Two stages, 4 micro-batches of 10 ms: each waits for 10 ms while it computes 40.
        stall = divide_stall(0.010, 0.0, 0.040, idle_of("1f1b", 2, 4))
        assert stall == pytest.approx((0.0, 0.010, 0.0))

    def test_beyond_it_the_busiest_is_waited_for(self):
        # The other stage takes 20 ms for each: 40 ms more in all.
        stall = divide_stall(0.052, 0.040, 0.040, idle_of("1f1b", 2, 4))
        assert stall == pytest.approx((0.040, 0.010, 0.002))

    def test_without_a_schedule_what_is_left_is_communication(self):
        assert divide_stall(0.005, 0.002, 0.1, 0.0) == pytest.approx((0.002, 0.0, 0.003))

    def test_nobody_waits_longer_than_it_took(self):
        stall = divide_stall(0.001, 0.5, 0.04, 0.25)
        assert stall == pytest.approx((0.001, 0.0, 0.0))

    @pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
    def test_the_part_of_a_step_and_of_computing_are_two_words_for_one_thing(self, schedule):
        idle = idle_of(schedule, 4, 6)
        assert idle / (1 + idle) == pytest.approx(ideal_bubble(schedule, 4, 6))
        assert idle_of(schedule, 4, 0) == 0.0


class Late:
    """Work that takes its time, by a clock that is turned by hand."""

    def wait(self) -> None:
        return None


class TestClock:
    def test_calls_are_timed_and_give_what_the_group_gives(self):
        clock = Clock()
        group = Clocked(connect(0, 1), clock, [5])
        tensor = torch.ones(4)
        group.all_reduce(tensor).wait()
        everyone = torch.zeros(4)
        group.all_gather(everyone, tensor).wait()
        group.broadcast(tensor).wait()
        part = torch.zeros(4)
        group.reduce_scatter(part, tensor).wait()
        group.barrier()
        assert torch.equal(everyone, part)
        assert (group.rank, group.size) == (0, 1)
        before = clock.seconds
        assert before > 0
        ClockedWork(Late(), clock, 5).wait()
        assert clock.seconds > before
        group.close()


def turn(*rows):
    return Turn(1, {rank: make_step(**row) for rank, row in enumerate(rows)})


class TestWaits:
    def test_who_passes_a_wait_on_is_not_blamed(self):
        found = turn({"wait": 0.1, "waited_for": 1}, {"wait": 0.09, "waited_for": 2}, {"wait": 0.0})
        assert sorted(waits_in(found)) == [(0, 2, 0.1), (1, 2, 0.09)]

    def test_who_waited_for_far_less_is(self):
        found = turn({"wait": 0.1, "waited_for": 1}, {"wait": 0.02, "waited_for": 2}, {"wait": 0.0})
        assert sorted(waits_in(found)) == [(0, 1, 0.1), (1, 2, 0.02)]

    def test_two_that_wait_for_each_other_come_to_an_end(self):
        found = turn({"wait": 0.1, "waited_for": 1}, {"wait": 0.1, "waited_for": 0})
        assert sorted(waits_in(found)) == [(0, 1, 0.1), (1, 0, 0.1)]

    def test_one_who_is_not_known_is_named(self):
        assert list(waits_in(turn({"wait": 0.1, "waited_for": 7}))) == [(0, 7, 0.1)]

    def test_a_bubble_is_waited_for_nobody(self):
        metrics = {
            rank: make_steps(60, compute=0.012, wait=0.006, bubble=0.0055, waited_for=1 - rank) for rank in range(2)
        }
        turns = merge_turns(metrics)
        spent = spend(turns, ())
        assert spent is not None
        assert spent.waited_for == pytest.approx({0: 60 * 0.0005, 1: 60 * 0.0005})
        kinds = {finding.kind: finding for finding in diagnose(break_down(metrics))}
        assert "uneven_steps" not in kinds
        assert kinds["pipeline_bubble"].gain == pytest.approx(0.0055 / 0.021 / 2, rel=0.01)


class TestCut:
    def test_what_is_held_is_known_from_events(self):
        assert find_cut([]) == ""
        assert find_cut([event("settings"), event("pipeline")]) == "stages"
        assert find_cut([event("tensor_plan")]) == "slices"

    def test_a_slow_stage_is_not_told_to_share_samples(self):
        metrics = {
            rank: make_steps(60, compute=0.01 * (1 + rank), wait=0.01 * (1 - rank), waited_for=None if rank else 1)
            for rank in range(2)
        }
        (slow,) = [each for each in diagnose(break_down(metrics), [event("pipeline")]) if each.kind == "slow_compute"]
        assert slow.rank == 1
        assert "cuts=" in slow.change
        assert "sharing the batch" not in slow.change
        (slow,) = [each for each in diagnose(break_down(metrics)) if each.kind == "slow_compute"]
        assert "sharing the batch" in slow.change

    def test_messages_between_slices_are_not_gradients(self):
        metrics = {rank: make_steps(60, communicate=0.01) for rank in range(2)}
        found = {each.kind: each for each in diagnose(break_down(metrics), [event("tensor_plan")])}
        assert "slices of the model" in found["communication_bound"].what

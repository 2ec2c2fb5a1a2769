"""From metrics to findings: pure functions, tested with numbers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observing import event, make_step, make_steps

from shoal.observe.breakdown import break_down, count_warmup
from shoal.observe.diagnose import diagnose
from shoal.observe.finding import ms


def make_ranks(*ranks, steps=60):
    """Metrics in which all ranks end each step together: whoever is ahead waits for the last."""
    ranks = [
        {"compute": 0.01, "communicate": 0.001, "load": 0.0, "other": 0.0, "num_samples": 32, **rank}
        for rank in ranks
    ]
    own = [rank["compute"] + rank["load"] + rank["other"] for rank in ranks]
    last = max(range(len(own)), key=own.__getitem__)
    samples = sum(rank["num_samples"] for rank in ranks)
    return {
        number: make_steps(
            steps,
            wait=max(own) - own[number],
            waited_for=last if number != last and own[number] < max(own) else None,
            global_samples=samples,
            **rank,
        )
        for number, rank in enumerate(ranks)
    }


def kinds(metrics, events=()):
    return [finding.kind for finding in diagnose(break_down(metrics), events)]


def find(metrics, kind):
    return next(finding for finding in diagnose(break_down(metrics)) if finding.kind == kind)


class TestBreakdown:
    def test_no_metrics_have_no_breakdown(self):
        assert break_down({}) is None
        assert break_down({0: []}) is None
        assert diagnose(None) == []

    def test_a_single_step_is_enough(self):
        found = break_down({0: [make_step()]})
        assert found.num_steps == 1
        assert found.warmup_steps == 0
        assert found.slowest is None

    def test_shares_add_up_and_are_those_of_the_ranks(self):
        found = break_down(make_ranks({"compute": 0.01}, {"compute": 0.02}))
        for shares in (found.shares, found.ranks[0].shares, found.ranks[1].shares):
            parts = (shares.compute, shares.communicate, shares.wait, shares.load, shares.other)
            assert sum(parts) == pytest.approx(1)
        assert found.ranks[0].shares.wait == pytest.approx(0.01 / 0.021)
        assert found.ranks[1].shares.wait == 0
        assert found.shares.wait == pytest.approx(0.005 / 0.021)

    def test_who_is_waited_for_is_counted(self):
        found = break_down(make_ranks({}, {"compute": 0.02}, {}, steps=50))
        assert [times.num_waited_for for times in found.ranks] == [0, 2 * 49, 0]
        assert found.ranks[1].waited_seconds == pytest.approx(98 * 0.01)
        assert found.slowest == 1

    def test_warmup_is_counted_apart(self):
        steps = make_steps(50)
        steps[:3] = [replace(step, compute=1.0) for step in steps[:3]]
        found = break_down({0: steps})
        assert found.warmup_steps == 3
        assert found.warmup_seconds == pytest.approx(3 * 1.004)
        assert found.step_median_seconds == pytest.approx(0.02)
        assert found.step_p99_seconds == pytest.approx(0.02)

    def test_throughput_is_over_wall_time(self):
        assert break_down({0: make_steps(101)}).samples_per_second == pytest.approx(64 / 0.02)

    def test_losses_that_are_not_numbers_are_counted(self):
        steps = make_steps(10)
        steps[4:] = [replace(step, loss=float("nan")) for step in steps[4:]]
        found = break_down({0: steps})
        assert [found.num_bad_losses, found.first_bad_step] == [6, 5]

    @given(st.lists(st.floats(0, 100), max_size=200))
    def test_warmup_is_never_the_run(self, seconds):
        assert count_warmup(seconds) <= max(0, len(seconds) - 2)

    @given(
        st.dictionaries(
            st.integers(0, 5),
            st.lists(st.builds(make_step, st.integers(0, 99), compute=st.floats(0, 1), loss=st.floats())),
        )
    )
    def test_any_metrics_give_a_breakdown_and_findings(self, metrics):
        found = break_down(metrics)
        assert (found is None) == (not any(metrics.values()))
        diagnose(found)

    def test_steps_without_any_time_break_nothing(self):
        steps = make_steps(5, time=0.0, compute=0.0, communicate=0.0, wait=0.0, load=0.0, other=0.0)
        found = break_down({0: steps, 1: steps})
        assert found.samples_per_second == 0
        diagnose(found)


class TestFindings:
    def test_a_run_that_computes_is_healthy(self):
        assert kinds(make_ranks({}, {})) == ["healthy"]
        assert kinds(make_ranks({})) == ["healthy"]

    def test_a_slow_rank_has_a_name_a_cause_and_a_gain(self):
        metrics = make_ranks({}, {"compute": 0.02}, {})
        assert kinds(metrics) == ["slow_compute"]
        found = find(metrics, "slow_compute")
        assert found.rank == 1
        assert "2.00 times" in found.why
        assert found.gain == pytest.approx(0.01 / 0.021)
        # By speed: 96 samples at 3200 + 1600 + 3200 a second take 12 ms instead of 20.
        assert "save 38 %" in found.change

    def test_a_rank_whose_data_comes_late(self):
        metrics = make_ranks({}, {"load": 0.01})
        assert kinds(metrics)[0] == "slow_input"
        assert find(metrics, "slow_input").gain == pytest.approx(0.01 / 0.021)
        assert "loaders=" in find(metrics, "slow_input").change

    def test_a_rank_with_too_many_samples(self):
        metrics = make_ranks({}, {"compute": 0.02, "num_samples": 64})
        assert kinds(metrics) == ["uneven_shares"]
        # 96 samples on two equal ranks take 15 ms instead of 20.
        assert find(metrics, "uneven_shares").gain == pytest.approx(0.005 / 0.021)

    def test_a_rank_that_does_more_than_train(self):
        assert kinds(make_ranks({"other": 0.005}, {}))[0] == "busy_elsewhere"

    def test_ranks_that_take_turns_in_being_late(self):
        even = make_ranks({"compute": 0.01}, {"compute": 0.014})
        odd = make_ranks({"compute": 0.014}, {"compute": 0.01})
        mixed = {rank: [(even, odd)[i % 2][rank][i] for i in range(60)] for rank in (0, 1)}
        assert kinds(mixed) == ["uneven_steps"]

    def test_steps_that_are_too_short_to_share(self):
        even = make_ranks({"compute": 0.001}, {"compute": 0.0014})
        odd = make_ranks({"compute": 0.0014}, {"compute": 0.001})
        mixed = {rank: [(even, odd)[i % 2][rank][i] for i in range(60)] for rank in (0, 1)}
        assert "short_steps" in kinds(mixed)
        assert "batch_size" in find(mixed, "short_steps").change

    def test_steps_that_wait_for_data(self):
        metrics = make_ranks({"load": 0.01}, {"load": 0.01})
        assert kinds(metrics) == ["input_bound"]
        assert find(metrics, "input_bound").gain == pytest.approx(0.01 / 0.021)

    def test_steps_that_communicate(self):
        metrics = make_ranks({"communicate": 0.01}, {"communicate": 0.01})
        assert kinds(metrics) == ["communication_bound"]
        assert find(metrics, "communication_bound").gain == pytest.approx(0.25)

    def test_one_rank_is_never_bound_by_communication(self):
        assert kinds(make_ranks({"communicate": 0.01})) == ["healthy"]

    def test_small_steps_with_much_around_them(self):
        assert kinds(make_ranks({"other": 0.005}, {"other": 0.005})) == ["much_else"]

    def test_a_late_start_is_told_from_a_slow_rank(self):
        metrics = make_ranks({}, {}, steps=600)
        metrics[1][0] = replace(metrics[1][0], time=metrics[1][0].time + 2.5)
        metrics[0][0] = replace(metrics[0][0], time=metrics[0][0].time + 2.5, wait=2.5, waited_for=1)
        assert kinds(metrics) == ["late_start", "healthy"]
        assert find(metrics, "late_start").rank == 1
        assert "2.5 s" in find(metrics, "late_start").what

    def test_long_warmup_rare_long_steps_and_bad_losses(self):
        steps = make_steps(120)
        steps[0] = replace(steps[0], compute=5.0)
        steps[100] = steps[110] = replace(steps[110], compute=0.2)
        steps[119] = replace(steps[119], loss=float("inf"))
        assert set(kinds({0: steps})) == {"long_warmup", "rare_long_steps", "bad_loss"}

    def test_more_threads_than_cores(self):
        told = event("settings", threads={"value": 2, "source": "argument"}, num_cores=2)
        found = diagnose(break_down(make_ranks({}, {})), [told])
        assert found[0].kind == "too_many_threads"
        assert "--threads 1" in found[0].change

    def test_the_largest_gain_comes_first(self):
        found = diagnose(
            break_down(make_ranks({"load": 0.004, "communicate": 0.02}, {"load": 0.004, "communicate": 0.02}))
        )
        gains = [finding.gain for finding in found]
        assert len(gains) == 2
        assert gains == sorted(gains, reverse=True)

    def test_every_finding_has_something_to_do_or_is_harmless(self):
        for metrics in (make_ranks({}, {"compute": 0.02}), make_ranks({"load": 0.01}), make_ranks({"other": 0.01})):
            assert all(finding.change for finding in diagnose(break_down(metrics)))


def test_short_durations_read_well():
    assert [ms(value) for value in (2.5, 0.0201, 0.00035, 0)] == ["2.50 s", "20.1 ms", "350 µs", "0 µs"]

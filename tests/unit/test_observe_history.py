"""Elastic runs as `shoal explain` tells them: made-up steps and Worlds whose costs can be worked out by hand."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observing import Home, event, make_step, write_metrics

from shoal.observe.breakdown import break_down, break_down_turns
from shoal.observe.clean import columns
from shoal.observe.diagnose import diagnose
from shoal.observe.explain import explain
from shoal.observe.history import tell_history
from shoal.observe.journal import Journal
from shoal.observe.turns import merge_turns

START = 1000.0


def step(number, end, seconds=0.1, *, other=0.0, samples=64, **changes):
    """One step that ended at START + `end` and took so long."""
    parts = {"communicate": 0.0, "wait": 0.0, "load": 0.0, "compute": seconds - other, "other": other}
    return make_step(number, time=START + end, global_samples=samples, **{**parts, **changes})


def world(at, generation, members, joined=(), reason=""):
    return event("world", START + at, generation=generation, members=members, joined=list(joined), reason=reason)


# Two workers take steps of 0.1 s. Rank 1 is killed at 1.0 in step 10, which the other completes at 1.3 and goes on
# with steps of 0.2 s. At 2.1 another one is let in, 0.05 s late, and from then on steps take 0.1 s again.
BOTH = [step(number, 0.1 * (number + 1)) for number in range(10)]
ALONE = [step(10, 1.3, 0.3, other=0.1), *(step(11 + i, 1.5 + 0.2 * i, 0.2) for i in range(4))]
AGAIN = [step(15 + i, 2.25 + 0.1 * i) for i in range(5)]
METRICS = {0: [*BOTH, *ALONE, *AGAIN], 1: [*BOTH[:7], *AGAIN]}
EVENTS = [
    event("worker_started", START - 1.0, rank=0, pid=1),
    event("worker_started", START - 1.0, rank=1, pid=2),
    world(-0.1, 0, ["0.0", "1.0"], ["0.0", "1.0"], "all are ready"),
    event("worker_signaled", START + 1.0, rank=1, signal="SIGKILL"),
    event("worker_exited", START + 1.04, rank=1, code=-9),
    event("worker_lost", START + 1.05, rank=1, id="1.0", code=-9, reason="rank 1 was killed by signal 9"),
    world(1.06, 1, ["0.0"], reason="rank 1 was killed by signal 9"),
    event("worker_started", START + 1.07, rank=1, pid=3, incarnation=1),
    world(2.12, 2, ["0.0", "1.1"], ["1.1"], "1 joined"),
    event("worker_joined", START + 2.12, rank=1, id="1.1", generation=2),
]


@pytest.fixture
def history():
    return tell_history(EVENTS, merge_turns(METRICS, EVENTS))


class TestTurns:
    def test_every_step_counts_once_whoever_recorded_it(self):
        turns = merge_turns(METRICS, EVENTS)
        assert [turn.step for turn in turns] == list(range(20))
        assert [len(turn.metrics) for turn in turns] == [2] * 7 + [1] * 8 + [2] * 5

    def test_a_second_trainer_is_not_a_step_taken_again(self):
        first = [step(number, 0.1 * number) for number in range(5)]
        second = [step(number, 1 + 0.1 * number) for number in range(5)]
        turns = merge_turns({0: first + second, 1: first[3:] + second})
        assert [turn.step for turn in turns] == [*range(5), *range(5)]
        assert [len(turn.metrics) for turn in turns] == [1, 1, 1, 2, 2, 2, 2, 2, 2, 2]
        assert not any(turn.is_undone for turn in turns)

    def test_steps_before_a_way_back_do_not_count(self):
        before = [step(number, 0.1 * number) for number in range(10)]
        after = [step(number, 2 + 0.1 * number) for number in range(6, 12)]
        back = event("resumed", START + 1.5, rank=0, step=6, path="x")
        turns = merge_turns({0: before + after}, [back])
        assert [turn.step for turn in turns if turn.is_undone] == [6, 7, 8, 9]
        assert break_down({0: before + after}, [back]).num_steps == 12

    def test_clocks_that_differ_do_not_tear_a_step_apart(self):
        early = [step(number, 0.1 * number) for number in range(20)]
        late = [step(number, 0.1 * number + 0.35) for number in range(3, 20)]
        turns = merge_turns({0: early, 1: late})
        assert [turn.step for turn in turns] == list(range(20))

    @settings(max_examples=50)
    @given(
        st.dictionaries(st.integers(0, 3), st.lists(st.tuples(st.integers(0, 9), st.floats(0, 9)))),
        st.lists(st.tuples(st.sampled_from(["world", "resumed", "worker_lost", "worker_joined"]), st.floats(0, 9))),
    )
    def test_nothing_is_lost_or_doubled_and_nothing_breaks(self, rows, marks):
        metrics = {rank: [step(number, end) for number, end in steps] for rank, steps in rows.items()}
        events = [
            event(kind, START + at, rank=0, step=1, generation=i, members=["0.0"], joined=["0.0"], id="0.0")
            for i, (kind, at) in enumerate(marks)
        ]
        turns = merge_turns(metrics, events)
        assert sum(len(turn.metrics) for turn in turns) == sum(map(len, metrics.values()))
        diagnose(break_down_turns(turns))
        tell_history(events, turns)


class TestBreakdown:
    def test_only_steps_taken_together_are_compared(self):
        """Alone a worker has twice the samples; that does not make it slow."""
        found = break_down(METRICS, EVENTS)
        assert found.num_steps == 20
        assert [times.num_steps for times in found.ranks] == [19, 11]
        assert [times.num_steps for times in found.compared] == [11, 11]
        assert [finding.kind for finding in diagnose(found)] == ["healthy"]

    def test_who_comes_later_is_not_late(self):
        rows = [step(number, 0.1 * number) for number in range(60)]
        found = break_down({0: rows, 1: rows[40:]})
        assert all(times.start_delay_seconds == 0 for times in found.ranks)

    def test_what_a_loss_cost_is_not_a_part_of_steps(self):
        assert break_down(METRICS, EVENTS).ranks[0].shares.other == 0
        assert break_down(METRICS).ranks[0].shares.other > 0


class TestHistory:
    def test_a_run_of_fixed_size_has_none(self):
        assert tell_history([event("run_started")], merge_turns(METRICS)) is None

    def test_worlds_over_time(self, history):
        assert [len(era.members) for era in history.eras] == [2, 1, 2]
        assert [era.num_steps for era in history.eras] == [10, 5, 5]
        assert history.eras[1].seconds == pytest.approx(1.06)
        assert history.eras[2].seconds is None

    def test_what_a_loss_costs(self, history):
        (loss,) = history.losses
        assert (loss.worker, loss.id) == (1, "1.0")
        assert loss.time == START + 1.0
        assert loss.recovery_seconds == pytest.approx(0.3)
        assert loss.away_seconds == pytest.approx(1.12)
        # Five steps of 0.2 s, each 0.1 s longer than with two workers.
        assert loss.slower_seconds == pytest.approx(0.5)

    def test_what_a_join_costs(self, history):
        (join,) = history.joins
        assert join.start_seconds == pytest.approx(1.05)
        assert join.cost_seconds == pytest.approx(0.05)

    def test_the_time_adds_up(self, history):
        spent = history.spent
        assert spent.wall == pytest.approx(2.65)
        # 15 steps of 0.1 s, and five of 0.2 s: of the one that was interrupted only that counts.
        assert spent.productive == pytest.approx(2.5)
        assert spent.losses == pytest.approx(0.1)
        assert spent.joins == pytest.approx(0.05)
        assert spent.redone == 0
        assert spent.between == pytest.approx(0)
        assert history.effective_ratio == pytest.approx(2.5 / 2.65)
        assert (history.num_samples, history.num_interrupted, history.num_redone) == (20 * 64, 1, 0)

    def test_time_between_steps_is_told_apart(self):
        rows = [step(0, 0.1), step(1, 0.2), step(2, 1.3)]
        found = tell_history(EVENTS[2:3], merge_turns({0: rows}))
        assert found.spent.between == pytest.approx(1.0)
        assert found.effective_ratio == pytest.approx(0.3 / 1.3)

    def test_when_all_are_lost_their_steps_are_redone(self):
        again = [step(number, 5 + 0.1 * number) for number in range(12)]
        events = [
            *EVENTS[:3],
            event("worker_lost", START + 1.01, rank=0, id="0.0", reason=""),
            event("worker_lost", START + 1.01, rank=1, id="1.0", reason=""),
            world(4.8, 1, ["0.1", "1.1"], ["0.1", "1.1"]),
        ]
        found = tell_history(events, merge_turns({0: BOTH + again}, events))
        assert found.num_redone == 10
        assert found.num_samples == 12 * 64
        assert found.spent.redone == pytest.approx(1.0)
        assert [loss.recovery_seconds for loss in found.losses] == [pytest.approx(3.99)] * 2

    def test_what_only_the_lost_had_learned_is_counted_once(self):
        """Local steps: after the loss the other goes back from step 10 to 6 and on to 12, and nothing was undone."""
        again = [step(number, 1.5 + 0.1 * number) for number in range(6, 12)]
        events = [*EVENTS[:7], event("relearning", START + 1.1, rank=0, step=6, until=10)]
        found = tell_history(events, merge_turns({0: BOTH + again, 1: BOTH}, events))
        assert found.num_samples == 12 * 64
        assert found.num_redone == 0

    def test_a_worker_that_was_never_let_in_costs_nothing(self):
        lost = event("worker_lost", START + 2.0, rank=1, id="1.7", reason="")
        found = tell_history([*EVENTS, lost], merge_turns(METRICS, EVENTS))
        assert len(found.losses) == 1
        assert found.num_unused == 1

    def test_a_freeze_counts_from_the_silence_on(self):
        events = [each for each in EVENTS if each.kind != "worker_signaled"]
        events.insert(3, event("worker_frozen", START + 1.03, rank=1, silent_seconds=0.23, waited_seconds=0.2))
        (loss,) = tell_history(events, merge_turns(METRICS, events)).losses
        assert loss.time == pytest.approx(START + 0.8)

    def test_a_stop_long_ago_is_not_what_ended_it(self):
        stop = event("worker_signaled", START - 60.0, rank=1, signal="SIGSTOP")
        events = [EVENTS[0], EVENTS[1], stop, *EVENTS[2:]]
        (loss,) = tell_history(events, merge_turns(METRICS, events)).losses
        assert loss.time == START + 1.0

    def test_one_lost_without_a_step_after_it(self):
        events = [*EVENTS[:3], event("worker_lost", START + 9.0, rank=1, id="1.0", reason="")]
        (loss,) = tell_history(events, merge_turns({0: BOTH}, events)).losses
        assert loss.recovery_seconds is None
        assert loss.away_seconds is None

    def test_skipped_steps_are_counted_once_for_all_ranks(self):
        skips = [event("step_skipped", START + 0.5, rank=rank, step=5) for rank in (0, 1)]
        assert tell_history([*EVENTS, *skips], merge_turns(METRICS, EVENTS)).num_skipped == 1


class TestText:
    @pytest.fixture
    def path(self, tmp_path):
        run = Home(str(tmp_path)).add_ended(min_workers=1, max_workers=2, created=START - 2)
        write_metrics(run, METRICS)
        with Journal(f"{run}/journal.jsonl") as log:
            for each in EVENTS:
                log.write(each)
        return run

    def test_all_of_it_is_told(self, path):
        text = explain(path).text(100)
        assert "1 to 2 workers, 1.6 on average; 1 loss, 1 join" in text
        assert "3.1s  World 1    1 worker (0)          5 steps  rank 1 was killed by signal 9" in text
        assert "3.0s  1        300 ms     1.12 s    500 ms  killed by signal 9" in text
        assert "4.1s  1         1.05 s       50 ms" in text
        assert "from a loss to the next step: 300 ms" in text
        assert "effective training time: 94.3 % of 2.65 s" in text
        assert "the rest: losses 100 ms (4 %), joins 50 ms (2 %)" in text
        assert "worker lost" not in text

    def test_where_lost_state_came_from(self, path):
        with Journal(f"{path}/journal.jsonl") as log:
            for moment, source in ((1.1, "mirror"), (1.9, "mirror"), (2.2, "checkpoint")):
                log.write(event("state_rebuilt", START + moment, rank=0, step=10, **{"from": source}))
        text = explain(path).text(100)
        assert "what only the lost held came back from its mirror twice, from the checkpoint once" in text
        assert "state rebuilt" not in text

    def test_json_has_the_same(self, path):
        found = json.loads(explain(path).json())["history"]
        assert found["effective_ratio"] == pytest.approx(2.5 / 2.65)
        assert found["eras"][2]["joined"] == ["1.1"]
        assert found["losses"][0]["recovery_seconds"] == pytest.approx(0.3)

    @pytest.mark.parametrize("width", [30, 60, 80])
    @pytest.mark.parametrize("is_ascii", [False, True])
    def test_it_fits(self, path, width, is_ascii):
        body = explain(path).text(width, is_ascii=is_ascii).partition("\nfiles\n")[0]
        assert max(map(columns, body.splitlines())) <= width
        assert body.isascii() or not is_ascii

    def test_of_many_worlds_some_are_shown(self, path):
        with Journal(f"{path}/journal.jsonl") as log:
            for number in range(3, 500):
                log.write(world(2.6 + number / 1000, number, ["0.0"]))
        text = explain(path).text(100)
        assert "490 more Worlds: `--json` has all" in text
        assert text.count("World ") == 10


@pytest.mark.parametrize("odd", [7, "no", {"a": 1}, [[1], None], 1e300])
def test_events_of_another_kind_of_shoal_are_survived(odd):
    fields = ("id", "members", "joined", "generation", "until", "reason", "from", "signal", "silent_seconds")
    kinds = ("worker_lost", "worker_joined", "worker_hung", "relearning", "state_rebuilt", "step_settled", "fault")
    events = [*EVENTS, *(event(kind, START + 1.1, 1, 3, **dict.fromkeys(fields, odd)) for kind in ("world", *kinds))]
    assert tell_history(events, merge_turns(METRICS, events)) is not None

"""What is wrong with a run while it runs: from made-up messages of workers to names and causes."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from observing import event, make_step

from shoal.engine.cause import Failure
from shoal.observe.diagnosis import CAUSES, Diagnosis
from shoal.observe.gauge import Link, Strain, read_strain
from shoal.observe.live import SILENT, Live, Road, classify, disk_cause, find_slow_end
from shoal.observe.straggling import explain_straggler, find_straggler
from shoal.observe.window import MAX_ROWS, StepRow, Window, read_rows
from shoal.spec.event import Event

NOBODY = lambda rank, seconds: ""  # noqa: E731


def row(step: int, compute: float = 0.03, **more: Any) -> StepRow:
    facts = {"communicate": 0.001, "wait": 0.0, "load": 0.0, "other": 0.0005, "num_samples": 16, "num_values": 1024}
    return StepRow(step=step, compute=compute, **{**facts, **more})


def rows_of(ranks: int, steps: int, change: Any = None) -> dict[int, dict[int, StepRow]]:
    chance = Random(0)
    rows: dict[int, dict[int, StepRow]] = {rank: {} for rank in range(ranks)}
    for step in range(steps):
        for rank in range(ranks):
            made = row(step, 0.03 * chance.uniform(0.9, 1.1))
            rows[rank][step] = change(rank, made) if change is not None else made
    return rows


def slow(rank: int, since: int, **changes: float) -> Any:
    def change(each: int, made: StepRow) -> StepRow:
        if each != rank or made.step < since:
            return made
        return made._replace(**{name: getattr(made, name) * factor for name, factor in changes.items()})

    return change


class TestStraggler:
    def test_ranks_that_are_alike_have_none(self):
        assert find_straggler(rows_of(4, 64)) is None

    @pytest.mark.parametrize("rank", [0, 1, 3])
    def test_a_rank_twice_as_slow_is_named_after_a_dozen_steps(self, rank):
        found = find_straggler(rows_of(4, 50, slow(rank, 38, compute=2.0)))
        assert found is not None
        assert (found.rank, found.part) == (rank, "compute")
        assert 0.3 < found.cost < 0.6

    def test_a_few_slow_steps_are_a_hiccup(self):
        assert find_straggler(rows_of(4, 50, slow(1, 44, compute=2.0))) is None

    def test_a_slow_rank_is_named_though_it_was_given_less_to_do(self):
        rows = rows_of(3, 50, slow(2, 30, compute=2.0))
        for step in range(36, 50):  # half of the samples in the same time: nobody waits
            made = rows[2][step]
            rows[2][step] = made._replace(compute=made.compute / 2, num_samples=8)
        found = find_straggler(rows)
        assert found is not None
        assert (found.rank, found.part) == (2, "compute")

    def test_what_it_took_with_more_while_it_was_well_does_not_clear_a_rank(self):
        rows = rows_of(3, 50, slow(2, 36, compute=2.0))
        for step in range(36, 50):  # others have more of the samples by now, and nobody waits
            for rank in (0, 1):
                rows[rank][step] = rows[rank][step]._replace(compute=0.06, num_samples=32)
        found = find_straggler(rows, shares={2: {16: 0.06, 32: 0.065}})
        assert found is not None
        assert (found.rank, found.part) == (2, "compute")

    def test_a_copy_that_has_no_samples_in_some_steps_is_compared_in_the_others(self):
        rows = rows_of(3, 50, slow(2, 20, compute=2.0))
        for step in range(20, 50, 3):  # it is given less, a step at a time
            rows[2][step] = rows[2][step]._replace(compute=0.0, num_samples=0)
            rows[0][step] = rows[0][step]._replace(compute=0.06, num_samples=32)
        for step in range(20, 50):  # and nobody waits
            rows[1][step] = rows[1][step]._replace(between=0.03)
            rows[0][step] = rows[0][step]._replace(between=0.03 if step % 3 != 2 else 0.0)
        found = find_straggler(rows)
        assert found is not None
        assert (found.rank, found.part) == (2, "compute")

    @pytest.mark.parametrize(("before", "is_slow"), [(0.06, True), (0.03, False)])
    def test_a_rank_with_fewer_samples_is_slow_only_if_it_took_longer_with_more(self, before, is_slow):
        # What takes as long with 8 samples as with 16 is not spent on samples.
        rows = rows_of(2, 40, lambda rank, made: made._replace(num_samples=8) if rank else made)
        found = find_straggler(rows, shares={1: {8: 0.03, 16: before}})
        assert (found is not None) == is_slow

    def test_what_it_took_with_most_before_it_fell_ill_does_not_clear_a_rank(self):
        # Well with 20 samples, ill with 16, and now it has 8: it takes as long as it once took with 20.
        rows = rows_of(2, 40, lambda rank, made: made._replace(num_samples=8) if rank else made)
        found = find_straggler(rows, shares={1: {20: 0.0375, 16: 0.06, 8: 0.03}})
        assert found is not None
        assert found.rank == 1

    @pytest.mark.parametrize(("is_ill", "least", "most"), [(True, 36, 40), (False, 0, 0)])
    def test_a_copy_among_three_whose_steps_vary_by_chance(self, is_ill, least, most):
        def is_found(seed: int) -> bool:
            chance = Random(seed)

            def change(rank: int, made: StepRow) -> StepRow:
                factor = 2 if is_ill and rank == 2 and made.step >= 40 else 1
                late = {"between": 0.09} if rank != 2 and made.step >= 40 else {}  # nobody waits for it
                return made._replace(compute=0.083 * factor + chance.expovariate(1 / 0.015), **late)

            found = find_straggler(rows_of(3, 64, change))
            return found is not None and (found.rank, found.part) == (2, "compute")

        assert least <= sum(map(is_found, range(40))) <= most

    def test_machines_that_are_known_to_differ_are_not_blamed_for_it(self):
        rows = rows_of(2, 40, lambda rank, made: made._replace(num_samples=8) if rank else made)
        assert find_straggler(rows, are_alike=False) is None
        assert find_straggler(rows, are_alike=True) is not None

    def test_long_steps_need_fewer(self):
        found = find_straggler(rows_of(2, 20, slow(1, 14, compute=2.0)))
        assert found is None
        rows = rows_of(
            2, 20, lambda rank, made: made._replace(compute=30 * made.compute * (1 + (rank and made.step > 13)))
        )
        found = find_straggler(rows)
        assert found is not None
        assert found.rank == 1

    @pytest.mark.parametrize(
        ("change", "strain", "cause"),
        [
            ({"compute": 2.0}, Strain(seconds=1.0, cpu=0.9), "slow_compute"),
            ({"compute": 2.0}, Strain(seconds=1.0, cpu=0.4, throttled=0.5), "throttled"),
            ({"compute": 2.0}, Strain(seconds=1.0, cpu=0.4, major_faults=500), "swapping"),
            ({"compute": 2.0}, Strain(seconds=1.0, cpu=0.5, run_delay=0.45), "no_core"),
            ({"compute": 2.0, "num_values": 2}, Strain(seconds=1.0), "uneven_data"),
            ({"compute": 4.0, "num_values": 2}, Strain(seconds=1.0), "uneven_data"),
            ({"compute": 2.0, "num_samples": 2, "num_values": 2}, Strain(seconds=1.0), "uneven_shares"),
            ({"other": 100.0}, Strain(seconds=1.0), "busy_elsewhere"),
        ],
    )
    def test_the_cause_is_what_the_numbers_say(self, change, strain, cause):
        rows = rows_of(3, 40, slow(1, 20, **change))
        found = find_straggler(rows)
        assert found is not None
        told = explain_straggler(found, rows, strain)
        assert (told.cause, told.rank) == (cause, 1)
        assert told.cause in CAUSES
        assert told.why
        assert told.hint
        assert told.cost

    def test_late_data_is_slow_input(self):
        rows = rows_of(3, 40, lambda rank, made: made._replace(load=0.04) if rank == 2 else made)
        found = find_straggler(rows)
        assert found is not None
        assert explain_straggler(found, rows, Strain(seconds=1.0)).cause == "slow_input"


def progress(rank: int, rows: list[StepRow], time: float = 1000.0, **strain: Any) -> Event:
    packed = [
        [made.step, *(round(1e6 * part) for part in made[1:7]), made.num_samples, made.num_values, made.waited_for]
        for made in rows
    ]
    told = {"seconds": 0.2, "cpu": 0.2, "run_delay": 0.0, "throttled": 0.0, "major_faults": 0, **strain}
    return event("progress", time, rank, rows[-1].step + 1 if rows else 0, window=packed, strain=told)


def play(live: Live, rows: dict[int, dict[int, StepRow]], *, strain: Any = None) -> list[Diagnosis]:
    """Tell a run in pieces of five steps, 0.2 s apart."""
    told, now = [], 100.0
    for start in range(0, max(map(len, rows.values())), 5):
        now += 0.2
        for rank, mine in rows.items():
            some = [mine[step] for step in range(start, min(start + 5, len(mine)))]
            live.hear(progress(rank, some, 1000.0 + now, **(strain(rank) if strain else {})), now, 1000.0 + now)
        told += live.look(now, NOBODY)
    return told


class TestLive:
    def test_a_clean_run_has_nothing(self):
        assert play(Live(), rows_of(4, 2000)) == []

    def test_a_slow_rank_is_told_once_and_within_twenty_steps(self):
        (told,) = play(Live(), rows_of(3, 200, slow(1, 100, compute=2.0)))
        assert (told.cause, told.rank) == ("slow_compute", 1)
        assert told.step is not None
        assert told.step <= 120

    def test_who_waits_for_a_core_is_named_only_if_that_lasts(self):
        rows = rows_of(3, 120, slow(1, 40, compute=2.0))
        starved = lambda rank: {"run_delay": 0.12 if rank == 1 else 0.0}  # noqa: E731
        assert play(Live(), rows, strain=starved) == []
        (told,) = play(Live(), rows_of(3, 700, slow(1, 40, compute=2.0)), strain=starved)
        assert (told.cause, told.rank) == ("no_core", 1)

    def test_the_first_steps_of_a_world_say_nothing(self):
        live = Live()
        play(live, rows_of(2, 50))
        live.hear(event("world", generation=1), 200.0, 1000.0)
        assert live.look(200.1, NOBODY) == []

    def test_a_stopped_process_that_is_waited_for_is_frozen(self):
        live = Live()
        live.hear(event("waiting", 1000.0, 0, members=["1.0"], seconds=1.2), 10.0, 1000.0)
        assert live.look(10.1, lambda rank, seconds: "S") == []
        (told,) = live.look(10.2, lambda rank, seconds: "T")
        assert (told.cause, told.rank) == ("frozen", 1)
        assert live.look(10.3, lambda rank, seconds: "T") == []

    def test_one_that_does_not_answer_on_another_machine_is_frozen(self):
        live = Live()
        live.hear(event("waiting", 1000.0, 0, members=["1.0", "2.0"], seconds=4.0), 10.0, 1000.0)
        live.hear(event("waiting", 1000.0, 2, members=["1.0"], seconds=4.0), 10.0, 1000.0)
        (told,) = live.look(10.1, lambda rank, seconds: SILENT)
        assert (told.cause, told.rank) == ("frozen", 1)

    @pytest.mark.parametrize(("offset", "is_off"), [(5.0, True), (-30.0, True), (0.4, False), (-1.5, False)])
    def test_clocks_that_are_off(self, offset, is_off):
        live = Live()
        for beat in range(4):
            live.hear(event("beat", 1000.0 + beat + offset, 1), 10.0 + beat, 1000.0 + beat)
        told = live.look(20.0, NOBODY)
        assert [(each.cause, each.rank) for each in told] == ([("clock_skew", 1)] if is_off else [])

    def test_one_late_message_is_no_skew(self):
        live = Live()
        for delay in (0.0, 9.0, 0.0):
            live.hear(event("beat", 1000.0 - delay, 1), 10.0, 1000.0)
        assert live.look(20.0, NOBODY) == []

    def test_what_workers_and_the_coordinator_found_gets_a_name(self):
        live = Live()
        live.hear(
            event("step_skipped", 1.0, 0, 7, workers=[2], message="The loss is nan.", why="w", hint="h"), 1.0, 1.0
        )
        live.hear(
            event("step_skipped", 1.0, 1, 7, workers=[2], message="The loss is nan.", why="w", hint="h"), 1.0, 1.0
        )
        live.hear(event("replica_diverged", 1.0, 1, 9, worker=1, is_sure=True), 1.0, 1.0)
        live.hear(event("worker_frozen", 1.0, 3, silent_seconds=2.0), 1.0, 1.0)
        live.hear(event("worker_lost", 2.0, 3, reason="killed by signal 9"), 2.0, 2.0)
        live.hear(event("worker_lost", 2.0, 0, reason="killed by signal 9"), 2.0, 2.0)
        told = live.look(3.0, NOBODY)
        assert [(each.cause, each.rank) for each in told] == [("nan", 2), ("diverged", 1), ("frozen", 3), ("dead", 0)]

    def test_a_full_disk_is_told_once_for_all_ranks(self):
        live = Live()
        for rank in (1, 0, 2):
            message = "cannot write /r/metrics-1.jsonl: No space left on device. The run goes on; ..."
            live.hear(event("trouble", 1.0, rank, message=message), 1.0, 1.0)
        (told,) = live.look(2.0, NOBODY)
        assert (told.cause, told.rank) == ("disk_full", 1)

    def test_nonsense_from_a_users_own_code_is_passed_over(self):
        live = Live()
        for data in ({}, {"window": 3}, {"window": [[1, "x"]], "strain": []}, {"members": 5, "seconds": "x"}):
            for kind in ("progress", "waiting", "replica_diverged", "step_skipped", "trouble"):
                live.hear(Event(kind=kind, time=1.0, rank=0, data=data), 1.0, 1.0)
        assert {each.cause for each in live.look(2.0, NOBODY)} <= {"nan"}


class TestFailures:
    def failure(self, rank: int, **more: Any) -> Failure:
        return Failure(**{"rank": rank, "time": 1.0, "exit_code": 1, "message": "RuntimeError: boom", **more})

    def diagnose(self, *failures: Failure) -> tuple[str, int | None]:
        live = Live()
        live.failed(failures)
        (told,) = live.look(1.0, NOBODY)
        return told.cause, told.rank

    def test_death_and_errors(self):
        assert self.diagnose(self.failure(2, cause="dead", message="The worker was killed by SIGKILL.")) == (
            "dead",
            2,
        )
        assert self.diagnose(self.failure(1)) == ("failed", 1)
        full = self.failure(1, message="OSError: [Errno 28] No space left on device")
        assert self.diagnose(full) == ("disk_full", 1)
        shapes = self.failure(1, message="RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)")
        assert self.diagnose(shapes) == ("shape_mismatch", 1)

    def test_the_one_most_ranks_accuse(self):
        told = [self.failure(rank, cause="shape_mismatch", ranks=(rank, 0 if rank else 1)) for rank in (1, 2, 0)]
        assert self.diagnose(*told) == ("shape_mismatch", 0)

    def test_a_lost_peer_is_no_news_after_what_was_told(self):
        live = Live()
        live.hear(event("worker_frozen", 1.0, 1, silent_seconds=2.0), 1.0, 1.0)
        assert len(live.look(1.0, NOBODY)) == 1
        live.failed([self.failure(0, is_lost_peer=True)])
        assert live.look(2.0, NOBODY) == []


class TestLinks:
    def road(self, sender: int, receiver: int, rate: float, before: float | None = 1e8, busy: float = 0.5) -> Road:
        link = Link(to="10.0.0.9", num_bytes=1, busy_seconds=1.0, rtt_seconds=0.001)
        return Road(sender=sender, receivers=(receiver,), rate=rate, before=before, busy=busy, last=link)

    def test_links_that_are_alike(self):
        assert find_slow_end([self.road(0, 1, 9e7), self.road(1, 2, 3e7), self.road(2, 0, 1.1e8)]) is None

    def test_the_end_that_slow_links_have_in_common(self):
        roads = [self.road(0, 1, 1e7), self.road(1, 2, 5e6), self.road(2, 0, 1e8)]
        found = find_slow_end(roads)
        assert found is not None
        assert found[0] == 1
        roads = [self.road(0, 1, 1e7), self.road(1, 0, 5e6)]
        found = find_slow_end(roads)
        assert found is not None
        assert found[0] == 1

    def test_a_link_that_was_always_far_slower(self):
        found = find_slow_end([self.road(0, 1, 1e8, None), self.road(1, 2, 5e6, None), self.road(2, 0, 1e8, None)])
        assert found is not None
        assert found[0] == 1

    def test_an_idle_link_does_not_matter(self):
        assert find_slow_end([self.road(0, 1, 1e6, busy=0.01), self.road(1, 0, 1e8)]) is None


class TestWindow:
    def test_all_ranks_leave_out_alike(self):
        first, second = Window(), Window()
        for step in range(200):
            first.add(make_step(step), 0.02 * step)
            second.add(make_step(step), 0.02 * step)
            if step == 100:
                second.take()
        mine, theirs = ([made.step for made in read_rows(each.take())] for each in (first, second))
        assert len(mine) <= MAX_ROWS
        assert len(set(mine) & set(theirs)) >= 6

    def test_what_is_between_steps_is_counted(self):
        window = Window()
        window.add(make_step(1, waited_for=1), 10.0)
        window.add(replace(make_step(2), num_values=7), 10.5)
        first, second = read_rows(window.take())
        assert (first.waited_for, first.between, second.num_values) == (1, 0.0, 7)
        assert second.between == pytest.approx(0.48, abs=1e-3)
        assert read_rows(window.take()) == []


def test_texts_of_disks_and_errors():
    assert disk_cause("OSError: [Errno 28] No space left on device") == "disk_full"
    assert disk_cause("cannot write /r/x: Input/output error") == "disk_failed"
    assert disk_cause("all is well") is None
    assert classify("ValueError: no") == "failed"


def test_strain_that_makes_no_sense():
    assert read_strain(None) == Strain()
    assert read_strain({"cpu": "x", "links": [[1], "y"]}) == Strain()


def test_a_diagnosis_says_its_cost_in_percent():
    told = Diagnosis(cause="dead", rank=1, message="Rank 1\x1b[2J is dead.", why="w", hint="h", cost=0.254)
    assert told.facts() == {"cause": "dead", "message": told.message, "why": "w", "hint": "h", "cost": 25.4}
    assert told.text() == "Rank 1 is dead. [costs 25 % of the time]\n  why: w\n   do: h"

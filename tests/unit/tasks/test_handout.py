"""Whatever workers do, every item has one result: random deaths, hangs, delays, duplicates and late words."""

import random
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.tasks.decision import Decision, Fail, Give, GiveUp, Kill, Retry, Start, TakeBack
from shoal.tasks.handout import BACKOFF_SECONDS, MAX_IDLE_DEATHS, SLOW_SECONDS, START_SECONDS, Handout

Message = tuple[str, tuple[int, ...]]


class Process:
    """A worker as far as a launcher can tell: what it was sent, what it is in, and what it has said."""

    def __init__(self, worker: int, incarnation: int) -> None:
        self.worker, self.incarnation = worker, incarnation
        self.todo: deque[int] = deque()
        self.unsent: list[int] = []
        self.said: deque[Message] = deque([("ready", ())])
        self.running: int | None = None
        self.since = 0.0
        self.is_hung = False
        self.is_dead = False


class Simulation:
    """Random processes around a Handout. `poison` are items that kill whoever begins them, always."""

    def __init__(self, seed: int, num_items: int, workers: int, retries: int, poison: set[int]) -> None:
        self.chance = random.Random(seed)
        self.handout = Handout(workers, retries=retries, timeout_seconds=1.0)
        self.num_items, self.poison = num_items, poison
        self.processes: dict[int, Process] = {}
        self.gone: list[Process] = []
        self.now = 0.0
        self.counted: list[int] = []
        self.given_up: list[int] = []
        self.failures: dict[int, int] = {}
        self.trouble = 200

    def run(self) -> None:
        for _ in range(20_000):
            self.now += self.chance.choice((0.001, 0.01, 0.1))
            self.pull()
            for decision in self.handout.decide(self.now):
                self.do(decision)
            if self.handout.is_over:
                return
            self.happen()
        raise AssertionError("it does not come to an end")

    def pull(self) -> None:
        wanted = min(self.handout.room(self.handout.num_open), self.num_items - self.handout.num_added)
        self.handout.added(self.chance.randint(0, wanted))
        if self.handout.num_added == self.num_items:
            self.handout.completed()

    def do(self, decision: Decision) -> None:
        match decision:
            case Start(worker, incarnation):
                assert worker not in self.processes, "a second process for a worker that lives"
                self.processes[worker] = Process(worker, incarnation)
                self.handout.started(worker, incarnation, self.now)
            case Give(worker, numbers):
                self.processes[worker].todo.extend(numbers)
            case TakeBack(worker):
                self.give_back(self.processes[worker])
            case Kill(worker):
                self.processes[worker].is_dead = True
            case Retry(number):
                self.failures[number] = self.failures.get(number, 0) + 1
            case GiveUp(number):
                self.given_up.append(number)
            case Fail():
                raise AssertionError("no worker died without an item so often")

    def give_back(self, process: Process) -> None:
        if self.chance.random() < 0.8 and not process.is_hung:
            self.flush(process)
            process.said.append(("returned", tuple(process.todo)))
            process.todo.clear()

    def happen(self) -> None:
        for process in list(self.processes.values()):
            if process.is_dead:
                self.bury(process)
                continue
            self.act(process)
            self.handout.seen(process.worker, process.incarnation, process.running, process.since)
            self.deliver(process)
        if self.gone and self.chance.random() < 0.3:
            self.deliver(self.chance.choice(self.gone))  # words of the dead arrive late

    def act(self, process: Process) -> None:
        if process.is_hung:
            return
        if process.running is None and process.todo:
            process.running, process.since = process.todo.popleft(), self.now
            if process.running in self.poison:
                process.is_dead = True
            elif self.has_trouble():
                self.strike(process)
        elif process.running is not None and self.chance.random() < 0.7:
            process.unsent.append(process.running)
            process.running = None
        if not process.todo or self.chance.random() < 0.3:
            self.flush(process)

    def has_trouble(self) -> bool:
        self.trouble -= 1
        return self.trouble > 0 and self.chance.random() < 0.2

    def strike(self, process: Process) -> None:
        kind = self.chance.choice(("die", "hang", "retryable"))
        process.is_dead, process.is_hung = kind == "die", kind == "hang"
        if kind == "retryable":
            assert process.running is not None
            process.said.append(("retryable", (process.running,)))
            process.running = None

    def flush(self, process: Process) -> None:
        done, process.unsent = tuple(process.unsent), []
        if done:
            process.said.append(("done", done))
            if self.chance.random() < 0.2:
                process.said.append(("done", done))  # twice

    def deliver(self, process: Process) -> None:
        if process.said and self.chance.random() < 0.8:
            kind, numbers = process.said.popleft()
            worker, incarnation = process.worker, process.incarnation
            match kind:
                case "ready":
                    self.handout.ready(worker, incarnation, self.now)
                case "done":
                    self.handout.worked(len(numbers), 0.001 * len(numbers))
                    counts = [n for n in numbers if self.handout.finished(worker, incarnation, n, self.now)]
                    self.counted += counts
                case "retryable":
                    self.handout.retryable(worker, incarnation, numbers[0], "it may pass", self.now)
                case "returned":
                    self.handout.returned(worker, incarnation, numbers, self.now)

    def bury(self, process: Process) -> None:
        """Its last words may be heard before its end is known, or after it, or never."""
        while process.said and self.chance.random() < 0.5:
            self.deliver(process)
        del self.processes[process.worker]
        self.gone.append(process)
        self.handout.exited(process.worker, process.incarnation, process.running, "it died", self.now)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    num_items=st.integers(0, 60),
    workers=st.integers(1, 5),
    retries=st.integers(0, 3),
    poison=st.sets(st.integers(0, 59), max_size=3),
)
def test_every_item_has_exactly_one_result(seed, num_items, workers, retries, poison):
    simulation = Simulation(seed, num_items, workers, retries, poison)
    simulation.run()
    everything = sorted(simulation.counted + simulation.given_up)
    assert everything == list(range(num_items)), "each item is counted once, or given up once"
    assert not poison & set(simulation.counted)
    assert all(count <= retries for count in simulation.failures.values())
    assert all(simulation.failures.get(number, 0) == retries for number in simulation.given_up)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), workers=st.integers(1, 4))
def test_nothing_is_given_up_where_retries_suffice(seed, workers):
    simulation = Simulation(seed, 40, workers, retries=10_000, poison=set())
    simulation.run()
    assert sorted(simulation.counted) == list(range(40))
    assert not simulation.given_up


# What is decided, one rule at a time.


def begin(workers: int = 2, items: int = 10, **options: object) -> Handout:
    """A map whose workers are ready; nothing is given yet."""
    handout = Handout(workers, **options)  # type: ignore[arg-type]
    handout.added(items)
    handout.completed()
    for decision in handout.decide(0.0):
        assert isinstance(decision, Start)
        handout.started(decision.worker, decision.incarnation, 0.0)
        handout.ready(decision.worker, decision.incarnation, 0.0)
    return handout


def given_to(handout: Handout, now: float = 0.0) -> dict[int, tuple[int, ...]]:
    """All that is given now, by worker."""
    found: dict[int, tuple[int, ...]] = {}
    for decision in handout.decide(now):
        if isinstance(decision, Give):
            found[decision.worker] = found.get(decision.worker, ()) + decision.numbers
    return found


def decisions(handout: Handout, kind: type, now: float) -> Iterator[Decision]:
    return (each for each in handout.decide(now) if isinstance(each, kind))


def test_no_more_workers_than_items_are_started():
    assert [type(each) for each in Handout(4).decide(0.0)] == [Start] * 4
    handout = Handout(4)
    handout.added(2)
    handout.completed()
    assert handout.decide(0.0) == [Start(0, 0), Start(1, 0)]


def test_each_gets_one_to_work_on_and_one_ahead_while_nothing_is_known():
    assert given_to(begin()) == {0: (0, 2), 1: (1, 3)}


def test_quick_items_come_in_batches_and_the_last_ones_in_smaller_ones():
    handout = begin(items=1000)
    given_to(handout)
    handout.worked(10, 10 * 0.0001)
    assert [len(numbers) for numbers in given_to(handout).values()] == [100, 100]
    handout = begin(items=44)
    given_to(handout)
    handout.worked(10, 10 * 0.0001)
    assert max(len(numbers) for numbers in given_to(handout).values()) <= 20


def test_whoever_is_faster_gets_more():
    handout = begin(items=100)
    given_to(handout)
    for step in range(1, 20):
        for number in list(handout._hands[0].held):
            handout.finished(0, 0, number, step * 0.01)
        handout.decide(step * 0.01)
    assert handout.num_done > 30
    assert handout._hands[1].held.keys() == {1, 3}


def test_a_late_result_of_a_worker_that_was_given_up_is_dropped():
    handout = begin(workers=1, items=1, timeout_seconds=1.0)
    given_to(handout)
    handout.seen(0, 0, 0, 0.0)
    assert [type(each) for each in handout.decide(1.5)] == [Kill, Retry]
    assert not handout.finished(0, 0, 0, 1.6)
    handout.exited(0, 0, 0, "killed", 1.7)
    assert next(decisions(handout, Start, 1.7)) == Start(0, 1)
    handout.started(0, 1, 1.7)
    handout.ready(0, 1, 1.8)
    assert given_to(handout, 1.9) == {0: (0,)}
    assert not handout.finished(0, 0, 0, 1.9)
    assert handout.finished(0, 1, 0, 2.0)
    assert not handout.finished(0, 1, 0, 2.0)
    assert handout.is_over


def test_a_frozen_worker_that_has_not_begun_is_given_up_too():
    handout = begin(workers=1, items=1, timeout_seconds=1.0)
    given_to(handout)
    assert [type(each) for each in handout.decide(1.5)] == [Kill]


def test_a_worker_that_does_not_start_is_given_up_after_a_while():
    handout = Handout(1, timeout_seconds=1.0)
    handout.added(1)
    handout.decide(0.0)
    handout.started(0, 0, 0.0)
    assert not list(decisions(handout, Kill, START_SECONDS - 1))
    assert list(decisions(handout, Kill, START_SECONDS + 1))


def test_only_the_item_a_worker_died_in_is_blamed():
    handout = begin(workers=1, items=3, retries=0)
    given_to(handout)
    handout.exited(0, 0, 0, "it died", 1.0)
    given_up, start = handout.decide(1.0)
    assert given_up == GiveUp(0, 0, 1, "it died")
    assert start == Start(0, 1)
    handout.started(0, 1, 1.0)
    handout.ready(0, 1, 1.0)
    assert given_to(handout, 1.0) == {0: (1, 2)}


def test_an_item_that_failed_goes_to_another_worker_after_a_pause():
    handout = begin(items=2)
    given_to(handout)
    handout.finished(1, 0, 1, 0.1)
    handout.retryable(0, 0, 0, "it may pass", 0.1)
    assert given_to(handout, 0.1) == {}
    assert handout.next_due() == pytest.approx(0.1 + BACKOFF_SECONDS)
    assert given_to(handout, 0.1 + BACKOFF_SECONDS) == {1: (0,)}


def test_what_a_slow_worker_has_not_begun_goes_to_one_that_is_idle():
    handout = begin(items=4)
    assert given_to(handout) == {0: (0, 2), 1: (1, 3)}
    handout.seen(0, 0, 0, 0.0)
    for number in (1, 3):
        handout.finished(1, 0, number, 0.06)
    handout.worked(2, 0.06)
    assert handout.decide(0.06) == [TakeBack(0)]
    assert handout.decide(0.07) == [], "it is asked once"
    handout.returned(0, 0, (2,), 0.08)
    assert given_to(handout, 0.08) == {1: (2,)}


def test_results_that_wait_behind_a_slow_item_are_asked_for():
    handout = begin(workers=1, items=2)
    given_to(handout)
    handout.seen(0, 0, 1, 0.0)
    assert not list(decisions(handout, TakeBack, SLOW_SECONDS / 2))
    assert list(decisions(handout, TakeBack, 2 * SLOW_SECONDS)) == [TakeBack(0)]


def test_workers_that_end_before_they_begin_anything_end_the_map():
    handout = begin(workers=1, items=1)
    for incarnation in range(MAX_IDLE_DEATHS):
        handout.exited(0, incarnation, None, "exit code 1", 1.0)
        found = handout.decide(1.0)
        handout.started(0, incarnation + 1, 1.0)
    assert Fail("exit code 1") in found


def test_items_are_pulled_in_bounded_numbers():
    handout = Handout(2)
    assert handout.room(0) == 8
    assert handout.room(100) == 0
    handout.worked(100, 100 * 1e-6)
    assert handout.room(0) == 2 * 3 * 4096
    handout.limit_batch(1 << 20)
    assert handout.room(0) == 2 * 3 * 2

"""What copies that train by themselves owe when one of them is lost: every shard counts once in every fragment.

`Story` is a run of made-up copies that learn at speeds of their own, agree on fragments that take their time, and are
lost and replaced at any moment. Only the books, the rounds, and what follows from them are real.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.data.ledger import Place
from shoal.train.sync.local_book import Account, Book, Owed, deal, find_owed
from shoal.train.sync.local_rounds import Round, first_round

Unit = tuple[int, int]


def place(step: int) -> Place:
    return Place(step=step, epoch=0, offset=step, position=step)


@dataclass(eq=False)
class Flight:
    """Fragments' ways that left at one step, from those who have come to it: copy -> what it had learned."""

    fragment: int
    due: int
    step: int
    ways: dict["Copy", tuple[list[Unit], int]] = field(default_factory=dict)
    is_taken: bool = False


@dataclass(eq=False)
class Copy:
    book: Book
    now: Round
    left: list[int]
    own: list[list[Unit]]
    flight: Flight | None = None
    before: tuple[Round, int] | None = None
    num_flights: int = 0


class Story:
    def __init__(
        self, seed: int, *, num_copies: int, num_shards: int, fragments: int, every: int, delay: int
    ) -> None:
        self.random = random.Random(seed)
        self.num_shards, self.end = num_shards, 4 * every + 1
        self.agreed = [Counter[Unit]() for _ in range(fragments)]
        self.flights: list[Flight] = []
        sync = shoal.local(every, fragments=fragments, overlap=delay)
        self.begin([(first_round(sync, 0), [0] * fragments)] * num_copies, Owed(), 0)

    def begin(self, copies: list[tuple[Round, list[int]]], owed: Owed, step: int) -> None:
        self.copies = []
        for now, left in copies:
            book = Book(len(self.agreed))
            book.begin(place(step), owed)
            self.copies.append(Copy(book, now, list(left), [[] for _ in self.agreed]))
        self.flights = []
        self.running = {copy: self.run(copy) for copy in self.copies}

    def run(self, copy: Copy) -> Iterator[None]:
        """One copy's steps. It stops wherever it may be lost, or must wait."""
        while (step := copy.book.account().step) < self.end:
            for shard in self.shards_of(copy, step):
                lacking = copy.book.learn(step, shard)
                for own, lacks in zip(copy.own, lacking, strict=True):
                    own += [(step, shard)] * lacks
            copy.book.reach(place(step + 1))
            yield
            if copy.flight is not None and step + 1 >= copy.flight.due:
                yield from self.land(copy)
            fragment = copy.now.leaving(step + 1, copy.left) if copy.flight is None else None
            if fragment is not None:
                self.leave(copy, fragment, step + 1)
                if not copy.now.delay:
                    yield from self.land(copy)

    def shards_of(self, copy: Copy, step: int) -> tuple[int, ...]:
        number, size = self.copies.index(copy), len(self.copies)
        left = copy.book.owed.at(step)
        return tuple(range(self.num_shards))[number::size] if left is None else deal(left, step, size)[number]

    def leave(self, copy: Copy, fragment: int, step: int) -> None:
        if copy.num_flights == len(self.flights):
            self.flights.append(Flight(fragment, step + copy.now.delay, step))
        flight = self.flights[copy.num_flights]
        assert (flight.fragment, flight.step) == (fragment, step), "all leave with the same, before the same step"
        copy.before = copy.now, copy.left[fragment]
        copy.left[fragment] = copy.now.leaves(fragment)
        if fragment == len(self.agreed) - 1:
            copy.now = replace(copy.now, start=copy.now.end)
        flight.ways[copy] = list(copy.own[fragment]), copy.book.mark
        copy.flight = flight

    def land(self, copy: Copy) -> Iterator[None]:
        assert copy.flight is not None
        while len(copy.flight.ways) < len(self.copies):
            yield
        self.take_in(copy)

    def take_in(self, copy: Copy) -> None:
        flight = copy.flight
        assert flight is not None
        if not flight.is_taken:
            flight.is_taken = True
            for units, _ in flight.ways.values():
                self.agreed[flight.fragment].update(units)
        units, mark = flight.ways[copy]
        del copy.own[flight.fragment][: len(units)]
        copy.book.agree([flight.fragment], flight.step, mark)
        copy.flight, copy.num_flights = None, copy.num_flights + 1

    def go_on(self) -> bool:
        """Let one copy go on. False when nobody has anything more to do."""
        for copy in self.random.sample(self.copies, len(self.copies)):
            if next(self.running[copy], "over") != "over":
                return True
        return False

    def change(self, num_lost: int, num_new: int) -> None:
        """Some are lost, some come. What is on its way is taken in by all or by nobody."""
        lost = self.random.sample(self.copies, min(num_lost, len(self.copies) - 1))
        left = [copy for copy in self.copies if copy not in lost]
        for flight in self.flights:
            is_complete = len(flight.ways) == len(self.copies)
            has_one_taken_it = any(copy.flight is not flight for copy in left if copy in flight.ways)
            if not has_one_taken_it and not (is_complete and self.random.random() < 0.5):
                self.take_back(flight, left)
        for copy in left:
            if copy.flight is not None:
                self.take_in(copy)
        accounts = [Account.of(copy.book.account().to_plain()) for copy in left]
        for copy in left:
            for agreed, own in zip(self.agreed, copy.own, strict=True):
                agreed.update(own)
        owed, step = find_owed(accounts, self.num_shards)
        assert step <= min(account.step for account in accounts)
        states = [(copy.now, copy.left) for copy in left]
        assert all(state == states[0] for state in states), "all who are left are in the same round"
        self.begin([states[0]] * (len(left) + num_new), owed, step)

    def take_back(self, flight: Flight, left: list[Copy]) -> None:
        if flight.is_taken:  # by one who is lost, and nobody will ever know
            for units, _ in flight.ways.values():
                self.agreed[flight.fragment].subtract(units)
        for copy in left:
            if copy.flight is flight:
                assert copy.before is not None
                copy.now, copy.left[flight.fragment] = copy.before
                copy.flight = None


@settings(max_examples=300)
@given(st.data())
def test_whoever_is_lost_and_whenever_every_shard_counts_once_in_every_fragment(data):
    fragments = data.draw(st.integers(1, 3))
    spacing = data.draw(st.integers(1, 4))
    num_copies = data.draw(st.integers(1, 4))
    story = Story(
        data.draw(st.integers(0, 10**6)),
        num_copies=num_copies,
        num_shards=data.draw(st.integers(num_copies, 6)),
        fragments=fragments,
        every=fragments * spacing,
        delay=data.draw(st.integers(0, spacing - 1)),
    )
    for num_lost, num_new, after in data.draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 60)), max_size=5)
    ):
        for _ in range(after):
            story.go_on()
        story.change(num_lost, num_new)
    for _ in range(50_000):
        if not story.go_on():
            break
    else:
        raise AssertionError("they wait for each other")
    story.change(0, 0)
    everything = Counter((step, shard) for step in range(story.end) for shard in range(story.num_shards))
    assert all(agreed == everything for agreed in story.agreed)
    assert all(copy.book.account().step == story.end for copy in story.copies)


def test_what_is_owed_is_what_only_the_lost_had():
    """Three copies, one shard each; they agreed before step 4. The third is lost when the others are at 6 and 7."""
    books = [Book(1), Book(1)]
    for number, (book, steps) in enumerate(zip(books, (2, 3), strict=True)):
        book.begin(place(4))
        for step in range(4, 4 + steps):
            assert book.learn(step, number) == [True]
            book.reach(place(step + 1))
    owed, step = find_owed([book.account() for book in books], 3)
    assert step == 4
    assert [owed.at(step) for step in range(4, 8)] == [(2,), (2,), (0, 2), None]


def test_a_fragment_that_was_agreed_on_since_does_not_learn_twice():
    """Two copies and two fragments: the first was agreed on before step 2, the second last before step 0."""
    book = Book(2)
    book.begin(place(0))
    for step in range(3):
        book.learn(step, 0)
        book.reach(place(step + 1))
        if step == 1:
            book.agree([0], 2, book.mark)
    owed, step = find_owed([book.account()], 2)
    assert step == 0
    assert [owed.at(step) for step in range(4)] == [(1,), (1,), (1,), None]
    book.begin(place(0), owed)
    assert [book.learn(step, 1) for step in range(3)] == [[False, True], [False, True], [True, True]]


def test_nothing_is_owed_after_all_have_agreed():
    book = Book(2)
    book.begin(place(0))
    book.learn(0, 1)
    book.reach(place(1))
    book.agree([0, 1], 1, book.mark)
    owed, step = find_owed([book.account()], 3)
    assert (owed.first, owed.until, step) == (1, 1, 1)


@pytest.mark.parametrize("num_copies", [1, 2, 3])
def test_what_is_owed_is_dealt_out_evenly(num_copies):
    counts = [0] * num_copies
    for step in range(12):
        parts = deal((3, 5), step, num_copies)
        assert sorted(shard for part in parts for shard in part) == [3, 5]
        counts = [count + len(part) for count, part in zip(counts, parts, strict=True)]
    assert len(set(counts)) == 1

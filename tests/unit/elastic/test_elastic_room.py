"""Machines come and go under a run: who is started is who has a place to be."""

from typing import Any

from shoal.elastic.coordinator import Coordinator
from shoal.elastic.decision import Decision, Kill, Start, Tell
from shoal.elastic.message import read_world


class Run:
    """A coordinator whose workers say what is expected of them, on machines with so much room."""

    def __init__(self, num_workers: int, room: int | None, min_workers: int = 1, max_workers: int = 3) -> None:
        self.coordinator = Coordinator(min_workers=min_workers, max_workers=max_workers)
        self.now = 0.0
        self.last: list[Decision] = []
        for worker in range(num_workers):
            self.do(self.coordinator.started(worker, 100 + worker, self.now))
        self.room(room)

    def do(self, decisions: list[Decision]) -> "Run":
        self.last = decisions
        return self

    def room(self, room: int | None) -> "Run":
        return self.do(self.coordinator.roomed(room, self.now))

    def resize(self, num_workers: int, *going: int) -> "Run":
        return self.do(self.coordinator.resized(num_workers, self.now, frozenset(going)))

    def start(self, worker: int) -> "Run":
        return self.do(self.coordinator.started(worker, 100 + worker, self.now))

    def hear(self, worker: int, kind: str, **data: Any) -> "Run":
        return self.do(self.coordinator.heard(worker, kind, data, self.now))

    def ready(self, worker: int) -> "Run":
        return self.hear(worker, "ready", trainer=0, call=0, process={"pid": 100 + worker, "node": "here"})

    def exit(self, worker: int, code: int = -9) -> "Run":
        return self.do(self.coordinator.exited(worker, code, self.now, is_retryable=False))

    def tick(self, seconds: float = 0.1) -> "Run":
        self.now += seconds
        return self.do(self.coordinator.ticked(self.now))

    def all_in(self) -> "Run":
        """Everyone who was started is in the first World, and at work."""
        workers = list(self.coordinator.state.processes)
        for worker in workers:
            self.ready(worker)
        for worker in workers:
            self.hear(worker, "gather", generation=0, trainer=0, key="enter", value=None, step=0)
        for worker in workers:
            self.hear(worker, "beat", generation=0, trainer=0, call=0, step=1, is_stepping=True)
        return self

    @property
    def starts(self) -> list[int]:
        return [each.worker for each in self.last if isinstance(each, Start)]

    @property
    def kills(self) -> list[int]:
        return [each.worker for each in self.last if isinstance(each, Kill)]

    @property
    def world(self) -> tuple[str, ...]:
        """Whom the newest World has that was just published."""
        told = [each for each in self.last if isinstance(each, Tell) and each.message["kind"] == "world"]
        return read_world(told[0].message).ids if told else ()


def test_a_run_begins_with_whom_there_is_room_for() -> None:
    run = Run(2, room=2)
    assert run.starts == []
    assert run.ready(0).world == ()
    assert run.ready(1).world == ("0.0", "1.0")
    assert run.tick().starts == []


def test_a_run_does_not_begin_with_fewer_than_it_needs() -> None:
    run = Run(1, room=1, min_workers=2)
    assert run.ready(0).world == ()
    assert run.tick().world == ()
    assert run.room(2).starts == [1]
    run.start(1)
    assert run.ready(1).world == ("0.0", "1.0")


def test_room_that_comes_before_the_run_began_is_used_from_the_beginning() -> None:
    run = Run(2, room=2)
    assert run.room(3).starts == [2]
    run.ready(0)
    assert run.ready(1).world == ()
    run.start(2)
    assert run.ready(2).world == ("0.0", "1.0", "2.0")


def test_room_that_goes_before_the_run_began_is_not_waited_for() -> None:
    run = Run(3, room=3)
    run.ready(0).ready(1)
    run.room(2)
    assert run.exit(2).world == ("0.0", "1.0")
    assert run.starts == []


def test_with_a_machine_its_worker_is_lost_and_not_replaced() -> None:
    run = Run(3, room=3).all_in()
    assert run.room(2).last == []
    assert run.exit(2).world == ("0.0", "1.0")
    assert run.starts == []
    assert run.tick(100.0).starts == []


def test_a_worker_that_dies_alone_is_replaced_at_once() -> None:
    run = Run(3, room=3).all_in()
    assert run.exit(1).starts == [1]
    run = Run(2, room=2).all_in()
    assert run.exit(1).starts == [1]


def test_when_there_is_room_again_the_missing_come() -> None:
    run = Run(3, room=3).all_in()
    run.room(2)
    run.exit(2)
    assert run.room(3).starts == [2]
    assert run.room(4).starts == []
    assert run.tick().starts == []


def test_the_lowest_missing_numbers_come_first() -> None:
    run = Run(3, room=3).all_in()
    run.room(1)
    run.exit(0).exit(1)
    assert run.starts == []
    assert run.room(2).starts == [0]
    run.start(0)
    assert run.room(3).starts == [1]


def test_room_for_fewer_than_live_ends_nobody() -> None:
    run = Run(3, room=3).all_in()
    for room in (2, 0, 1):
        assert run.room(room).last == []
        assert run.tick().kills == []
    assert run.coordinator.world is not None
    assert run.coordinator.world.size == 3


def test_all_are_lost_and_wait_for_machines() -> None:
    run = Run(2, room=2, max_workers=2).all_in()
    run.room(0)
    run.exit(0).exit(1)
    assert run.starts == []
    assert run.tick(100.0).starts == []
    assert not run.coordinator.is_over
    assert run.room(1).starts == [0]
    run.start(0)
    assert run.ready(0).world == ("0.1",)


def test_two_places_for_three_that_are_missing() -> None:
    """Those who were asked for and are not there yet have a place, too."""
    run = Run(3, room=3).all_in()
    run.room(0)
    run.exit(0).exit(1).exit(2)
    assert run.room(2).starts == [0, 1]
    assert run.tick().starts == []
    run.start(0)
    assert run.tick().starts == []
    run.start(1)
    assert run.tick().starts == []


def test_a_size_that_was_asked_for_before_the_run_began_stays() -> None:
    run = Run(3, room=3)
    assert run.resize(2).kills == [2]
    assert run.room(4).starts == []
    run.exit(2)
    assert run.starts == []
    assert run.coordinator.state.num_wanted == 2


def test_more_than_there_is_room_for_may_be_asked_for() -> None:
    run = Run(3, room=3).all_in()
    run.room(2)
    run.exit(2)
    run.resize(2)
    assert run.resize(3).starts == []
    assert run.room(3).starts == [2]


def let_go(run: Run) -> tuple[str, ...]:
    """All stand still, and the next World is published."""
    world = run.coordinator.world
    assert world is not None
    for member in world.members:
        run.hear(member.worker, "boundary", generation=world.generation, trainer=0, call=0, step=2)
        if run.world:
            return run.world
    return ()


def test_workers_of_a_machine_that_is_given_up_go_whatever_their_numbers() -> None:
    run = Run(4, room=4, max_workers=4).all_in()
    run.resize(2, 0, 1)
    assert let_go(run) == ("2.0", "3.0")
    for worker in (0, 1):
        run.exit(worker, 0)
        assert run.starts == []
    assert run.room(2).starts == []
    # Those who are there stay, and what is wanted besides them is started.
    assert run.resize(3).starts == []
    assert run.room(3).starts == [0]
    assert run.coordinator.state.wanted == [0, 2, 3]


def test_a_run_that_moves_as_a_whole_keeps_its_numbers() -> None:
    """There are no other numbers: those on the machine that is given up are wanted all the same."""
    run = Run(2, room=2, max_workers=2).all_in()
    assert run.resize(2, 0, 1).kills == []
    assert run.coordinator.state.wanted == [0, 1]


def test_a_worker_that_is_lost_while_others_go_is_not_missed() -> None:
    run = Run(3, room=3, max_workers=3).all_in()
    run.resize(2, 0)
    run.exit(0)
    assert run.starts == []
    assert run.tick(120).starts == []
    assert run.resize(3).starts == [0]

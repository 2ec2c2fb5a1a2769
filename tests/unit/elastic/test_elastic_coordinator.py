"""The rules of membership, one by one: what is decided when."""

from shoal.elastic.coordinator import Coordinator
from shoal.elastic.decision import Fail, Kill, Note, Start, Tell
from shoal.elastic.message import read_world


class Run:
    """A coordinator with workers that say what is expected of them."""

    def __init__(self, num_workers: int = 3, min_workers: int = 1, max_workers: int = 4) -> None:
        self.coordinator = Coordinator(min_workers=min_workers, max_workers=max_workers)
        self.now = 0.0
        self.last: list = []
        for worker in range(num_workers):
            self.start(worker)

    def do(self, decisions: list) -> list:
        self.last = decisions
        return decisions

    def start(self, worker: int) -> list:
        return self.do(self.coordinator.started(worker, 100 + worker, self.now))

    def hear(self, worker: int, kind: str, **data) -> list:
        return self.do(self.coordinator.heard(worker, kind, data, self.now))

    def ready(self, worker: int, call: int = 0) -> list:
        return self.hear(worker, "ready", trainer=0, call=call, process={"pid": 100 + worker, "node": "here"})

    def beat(self, *workers: int, step: int = 1, call: int = 0, is_stepping: bool = True) -> list:
        generation = self.coordinator.world.generation
        for worker in workers:
            found = self.hear(
                worker, "beat", generation=generation, trainer=0, call=call, step=step, is_stepping=is_stepping
            )
        return found

    def gather(self, worker: int, generation: int, value=None, key: str = "enter", step: int = 0) -> list:
        return self.hear(worker, "gather", generation=generation, trainer=0, key=key, value=value, step=step)

    def exit(self, worker: int, code: int = -9, is_retryable: bool = False) -> list:
        return self.do(self.coordinator.exited(worker, code, self.now, is_retryable=is_retryable))

    def stand(self, *workers: int, call: int = 0, **more) -> list:
        generation = self.coordinator.world.generation
        for worker in workers:
            found = self.hear(worker, "boundary", generation=generation, trainer=0, call=call, step=2, **more)
        return found

    def all_in(self) -> "Run":
        """Everyone who was started is in the first World, and at work."""
        workers = list(self.coordinator.state.processes)
        for worker in workers:
            self.ready(worker)
        for worker in workers:
            self.gather(worker, 0)
        self.beat(*workers)
        return self

    def worlds(self) -> dict[int, tuple[str, ...]]:
        """What each worker is told about the World."""
        told = [d for d in self.last if isinstance(d, Tell) and d.message["kind"] == "world"]
        return {d.worker: read_world(d.message).ids for d in told}

    def told(self, kind: str) -> list[int]:
        return [d.worker for d in self.last if isinstance(d, Tell) and d.message["kind"] == kind]

    def starts(self) -> list[int]:
        return [d.worker for d in self.last if isinstance(d, Start)]

    def kills(self) -> list[int]:
        return [d.worker for d in self.last if isinstance(d, Kill)]

    def notes(self) -> list[str]:
        return [d.kind for d in self.last if isinstance(d, Note)]

    def fails(self) -> list[str]:
        return [d.message for d in self.last if isinstance(d, Fail)]


def test_the_first_world_waits_for_all():
    run = Run(3)
    assert not run.ready(2)
    assert not run.ready(0)
    run.ready(1)
    assert run.worlds() == dict.fromkeys(range(3), ("0.0", "1.0", "2.0"))
    assert run.coordinator.world.is_fresh
    assert run.coordinator.world.generation == 0


def test_one_that_dies_before_the_first_world_is_replaced():
    run = Run(2)
    run.ready(0)
    run.exit(1)
    assert run.starts() == [1]
    run.start(1)
    run.ready(1)
    assert run.worlds() == dict.fromkeys(range(2), ("0.0", "1.1"))


def test_survivors_go_on_at_once_and_keep_their_order():
    run = Run(3).all_in()
    run.exit(1)
    assert run.worlds() == dict.fromkeys((0, 2), ("0.0", "2.0"))
    assert run.starts() == [1]
    assert run.notes() == ["worker_lost", "world"]
    assert isinstance(run.last[0], Tell), "the World comes first: survivors wait for it"
    assert "rank 1 was killed by signal 9" in run.last[0].message["reason"]


def test_a_second_loss_while_the_world_forms_gives_the_next_one_at_once():
    run = Run(3).all_in()
    run.exit(1)
    run.gather(0, 1)
    run.exit(2)
    assert run.worlds() == {0: ("0.0",)}
    assert run.coordinator.world.generation == 2
    assert not run.gather(0, 1), "a value for the World before is dropped"
    assert run.gather(0, 2)


def test_a_newcomer_comes_in_at_a_boundary():
    run = Run(3).all_in()
    run.exit(1)
    run.start(1)
    assert run.ready(1)
    assert run.told("called") == [1]
    assert run.told("hold") == [], "members are not at work yet"
    run.beat(0, 2)
    assert run.told("hold") == [0, 2]
    assert not run.stand(0)
    run.stand(2)
    assert run.worlds() == dict.fromkeys((0, 2, 1), ("0.0", "2.0", "1.1"))
    assert run.coordinator.world.joined == ("1.1",)
    assert run.notes() == ["world", "worker_joined"]


def test_if_the_newcomer_dies_meanwhile_members_go_on_and_are_left_in_peace():
    run = Run(2).all_in()
    run.exit(1)
    run.start(1)
    run.ready(1)
    run.beat(0)
    assert run.told("hold") == [0]
    run.exit(1)
    run.stand(0)
    assert run.worlds() == {0: ("0.0",)}
    run.start(1)
    run.ready(1)
    run.beat(0, step=5)
    assert run.told("hold") == [], "it was asked in vain just now"
    run.now += 2.0
    run.do(run.coordinator.ticked(run.now))
    assert run.told("hold") == [0]


def test_a_newcomer_elsewhere_is_not_let_in():
    run = Run(2).all_in()
    run.hear(0, "called", trainer=0, call=0, name="fit", result=None)
    run.exit(1)
    run.start(1)
    run.ready(1, call=0)
    assert run.last[0].message["calls"] == [{"trainer": 0, "call": 0, "name": "fit", "result": None}]
    run.beat(0, call=1)
    assert run.told("hold") == []
    run.ready(1, call=1)
    assert run.told("hold") == [0]


def test_calls_that_end_later_are_told_to_those_on_their_way():
    run = Run(2).all_in()
    run.exit(1)
    run.start(1)
    run.ready(1)
    run.hear(0, "called", trainer=0, call=0, name="evaluate", result={"loss": 1.5})
    assert run.told("called") == [1]
    assert not run.hear(0, "called", trainer=0, call=0, name="evaluate", result={"loss": 1.5})


def test_resizing_down_lets_the_highest_go():
    run = Run(4, min_workers=1).all_in()
    run.do(run.coordinator.resized(2, 0.0))
    assert run.told("hold") == [0, 1, 2, 3]
    run.stand(0, 1, 2, 3)
    assert run.worlds() == dict.fromkeys(range(4), ("0.0", "1.0")), "those who go are told, too"
    assert not run.exit(3, 0)
    assert not run.exit(2, -9), "it was let go: no loss"
    assert not run.coordinator.state.is_ending


def test_resizing_up_starts_workers():
    run = Run(2).all_in()
    run.do(run.coordinator.resized(9, 0.0))
    assert run.starts() == [2, 3]
    assert run.notes() == ["resized"]


def test_too_few_wait_for_replacements():
    run = Run(2, min_workers=2).all_in()
    run.exit(1)
    assert not run.worlds()
    assert run.notes() == ["worker_lost", "waiting_for_workers"]
    run.start(1)
    run.ready(1)
    assert run.worlds() == dict.fromkeys((0, 1), ("0.0", "1.1"))


def test_too_few_inside_an_evaluation_finish_it_first():
    run = Run(2, min_workers=2).all_in()
    run.beat(0, 1, is_stepping=False)
    run.exit(1)
    assert run.worlds() == {0: ("0.0",)}
    run.gather(0, 1)
    run.beat(0, is_stepping=False)
    assert run.told("hold") == [0]
    run.stand(0)
    assert run.notes() == ["waiting_for_workers"]
    assert not run.worlds()
    run.start(1)
    run.ready(1)
    assert run.worlds() == dict.fromkeys((0, 1), ("0.0", "1.1"))


def test_too_few_that_stand_go_on_when_the_run_ends():
    run = Run(2, min_workers=2).all_in()
    run.beat(0, 1, is_stepping=False)
    run.exit(1)
    run.gather(0, 1)
    run.beat(0)
    run.stand(0)
    assert not run.worlds()
    run.do(run.coordinator.stopping("Ctrl-C", 0.0))
    assert run.worlds() == {0: ("0.0",)}


def test_who_ends_well_is_not_replaced_nor_is_anyone_after():
    run = Run(3).all_in()
    assert not run.exit(0, 0)
    run.exit(1, -9)
    assert not run.starts()
    assert run.worlds() == {2: ("2.0",)}
    assert not run.exit(2, 0)
    assert run.coordinator.is_over


def test_members_that_need_one_who_ended_well_go_on_without_it():
    run = Run(2).all_in()
    run.exit(0, 0)
    assert not run.worlds(), "usually all end together"
    run.hear(1, "waiting", generation=0, members=["0.0"], seconds=1.0)
    assert run.worlds() == {1: ("1.0",)}


def test_a_newcomer_that_waits_while_the_run_ends_is_told_to_stop():
    run = Run(2).all_in()
    run.exit(1)
    run.start(1)
    run.ready(1)
    run.exit(0, 0)
    assert run.told("stop") == [1]


def test_the_users_error_is_left_to_the_caller():
    run = Run(2).all_in()
    assert not run.exit(1, 1)
    assert not run.exit(0, -15), "the caller ends the others"
    assert run.coordinator.is_over


def test_a_retryable_error_is_a_loss():
    run = Run(2).all_in()
    run.exit(1, 75, is_retryable=True)
    assert run.starts() == [1]


def test_six_losses_in_a_row_end_the_run():
    run = Run(1)
    for _ in range(5):
        run.exit(0)
        assert not run.fails()
        run.now += 60.0
        run.do(run.coordinator.ticked(run.now))
        run.start(0)
    run.exit(0)
    assert run.fails() == ["Workers were lost 6 times in a row without a step in between."]


def test_nine_replacements_may_be_lost_while_others_have_the_state():
    run = Run(2).all_in()
    run.exit(1)
    for _ in range(9):
        run.now += 60.0
        run.do(run.coordinator.ticked(run.now))
        run.start(1)
        run.exit(1)
        assert not run.fails()
    run.now += 60.0
    run.do(run.coordinator.ticked(run.now))
    run.start(1)
    run.exit(1)
    assert run.fails() == ["Workers were lost 10 times in a row without a step in between."]


def test_steps_in_between_forgive_losses():
    run = Run(3).all_in()
    for round_ in range(8):
        run.exit(1)
        assert not run.fails()
        run.start(1)
        run.ready(1)
        run.beat(0, 2, step=10 * round_ + 10)
        run.stand(0, 2)
        assert "worker_joined" in run.notes()
        run.beat(0, 2, 1, step=10 * round_ + 15)


def test_steps_that_no_beat_told_of_forgive_losses_too():
    run = Run(3).all_in()
    for round_ in range(8):
        run.exit(1)
        assert not run.fails()
        run.start(1)
        run.ready(1)
        for worker in (0, 2):
            run.gather(worker, run.coordinator.world.generation, step=10 * round_ + 10)
        run.beat(0, 2, step=0)
        run.stand(0, 2)
        assert "worker_joined" in run.notes()


def test_beginning_again_is_no_step():
    """All are lost at their first step, one after the other, three times."""
    run = Run(2).all_in()
    for round_ in range(3):
        run.exit(0)
        assert not run.fails()
        run.exit(1)
        assert bool(run.fails()) == (round_ == 2)
        if run.fails():
            break
        for worker in (0, 1):
            run.start(worker)
        for worker in (0, 1):
            run.ready(worker)
        for worker in (0, 1):
            run.gather(worker, run.coordinator.world.generation)
        run.beat(0, 1, step=0)
    assert run.fails() == ["Workers were lost 6 times in a row without a step in between."]


def test_one_that_has_nothing_to_go_on_with_is_no_loss():
    run = Run(3).all_in()
    for _ in range(9):
        run.hear(1, "aside", generation=run.coordinator.world.generation)
        run.exit(1, 75, is_retryable=True)
        assert not run.fails()
        run.start(1)
        run.ready(1)
        run.beat(0, 2, step=1)
        run.stand(0, 2)


def test_too_few_go_on_where_replacements_cannot_catch_up():
    run = Run(2, min_workers=2, max_workers=2).all_in()
    run.exit(1)
    assert run.notes() == ["worker_lost", "waiting_for_workers"]
    run.start(1)
    run.ready(1, call=3)
    assert not run.worlds()
    run.hear(1, "idle", reason="no checkpoint")
    assert run.worlds() == {0: ("0.0",)}
    assert "going_on_with_few" in run.notes()
    run.exit(0, 0)
    assert run.told("stop") == [1]


def test_a_member_without_a_seat_stays_until_the_end_and_is_told_then():
    run = Run(3).all_in()
    run.hear(2, "aside", generation=0)
    run.exit(0, 0)
    assert run.told("stop") == [2]


def test_newcomers_do_not_wait_for_a_member_without_a_seat():
    run = Run(3).all_in()
    run.exit(0)
    for worker in (1, 2):
        run.gather(worker, 1)
    run.hear(2, "aside", generation=1)
    run.beat(1, step=1)
    run.start(0)
    run.ready(0)
    run.stand(1)
    assert run.worlds()[2] == ("1.0", "2.0", "0.1"), "whoever holds the state comes first"


def test_a_member_without_a_seat_hears_that_its_call_is_over():
    run = Run(3).all_in()
    run.hear(2, "aside", generation=0)
    run.hear(0, "called", trainer=0, call=0, name="fit", result={"step": 3})
    assert run.told("called") == [2]


def test_members_without_a_seat_do_not_keep_the_state():
    run = Run(3).all_in()
    run.hear(2, "aside", generation=0)
    run.beat(2, step=0)
    run.exit(0)
    run.exit(1)
    assert run.kills() == [2], "all begin anew"


def test_a_newcomer_that_is_ended_with_the_run_is_not_lost():
    run = Run(2).all_in()
    run.exit(1)
    run.start(1)
    run.exit(0, 0)
    assert run.kills() == [1]
    run.exit(1)
    assert not run.notes()


def test_one_that_was_let_in_while_the_others_ended_is_not_lost():
    run = Run(2).all_in()
    run.exit(1)
    run.beat(0, step=2)
    run.start(1)
    run.ready(1)
    run.stand(0)
    assert run.worlds()[1] == ("0.0", "1.1")
    run.exit(0, 0)
    (kill,) = [d for d in run.last if isinstance(d, Kill)]
    assert (kill.worker, kill.why) == (1, "everyone who had a state has left")
    run.exit(1)
    assert not run.notes()
    assert not run.starts()
    assert run.coordinator.is_over


def test_one_that_fails_again_and_again_is_started_later_and_later():
    run = Run(2).all_in()
    pauses = []
    for step in range(5):
        run.exit(1)
        began = run.now
        while not run.starts():
            run.now += 0.1
            run.do(run.coordinator.ticked(run.now))
        pauses.append(round(run.now - began))
        run.start(1)
        run.beat(0, step=step + 2)
    assert pauses == [0, 0, 1, 2, 4]


def test_the_loss_of_all_begins_again():
    run = Run(2).all_in()
    run.hear(0, "called", trainer=0, call=0, name="fit", result=None)
    run.exit(1)
    run.start(1)
    run.ready(1)
    run.exit(0)
    assert run.kills() == [1], "it passed over a call, and nobody has what that call made"
    run.exit(1)
    run.start(0)
    run.start(1)
    assert run.ready(0) == []
    run.ready(1)
    assert run.worlds() == dict.fromkeys(range(2), ("0.1", "1.2"))
    assert run.coordinator.world.is_fresh


def test_values_are_gathered_in_rank_order_once():
    run = Run(2).all_in()
    assert not run.gather(1, 0, "b", key="port")
    assert not run.gather(1, 0, "again", key="port")
    run.gather(0, 0, "a", key="port")
    assert [d.message["values"] for d in run.last] == [["a", "b"], ["a", "b"]]
    assert not run.gather(0, 0, "late", key="port")


def test_words_of_the_dead_and_of_strangers_mean_nothing():
    run = Run(2).all_in()
    run.exit(1)
    assert not run.hear(1, "ready", trainer=0, call=0)
    run.start(1)
    assert not run.hear(1, "ready", member="1.0", trainer=0, call=0)
    assert not run.hear(1, "ready", trainer=0, call=0, process={"pid": 7})
    assert not run.hear(0, "progress", loss=1.0)
    assert not run.exit(3)


def test_stopping_tells_everyone_and_replaces_nobody():
    run = Run(2).all_in()
    run.do(run.coordinator.stopping("asked to", 0.0))
    assert run.told("stop") == [0, 1]
    run.exit(1)
    assert not run.starts()


def test_members_who_hold_parts_of_the_state_are_let_go_one_at_a_time():
    run = Run(4).all_in()
    run.do(run.coordinator.resized(2, 0.0))
    run.stand(0, 1, 2, 3, most_leaving=1)
    assert run.worlds()[0] == ("0.0", "1.0", "3.0")
    run.exit(2, 0)
    run.beat(0, 1, 3, step=2)
    assert run.told("hold") == [0, 1, 3]
    run.stand(0, 1, 3, most_leaving=1)
    assert run.worlds()[0] == ("0.0", "1.0")

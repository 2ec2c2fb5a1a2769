"""Hypothesis drives the coordinator itself: any order of starts, words, deaths and resizes keeps its promises."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shoal.elastic.coordinator import Coordinator
from shoal.elastic.decision import Fail, Kill, Start, Tell
from shoal.elastic.message import read_world

MOST = 4
workers = st.integers(0, MOST - 1)


class Launcher(RuleBasedStateMachine):
    """Does what is decided, a little later or at once, and lets anything happen in between."""

    def __init__(self) -> None:
        super().__init__()
        self.coordinator = Coordinator(min_workers=2, max_workers=MOST)
        self.now = 0.0
        self.pids: dict[int, int] = {}
        self.ids: dict[int, str] = {}
        self.counts: dict[int, int] = {}
        self.to_start: list[int] = []
        self.to_kill: list[int] = []
        self.standing: set[str] = set()
        self.told: dict[int, object] = {}
        self.has_failed = False
        for worker in range(3):
            self._start(worker)

    def _start(self, worker: int) -> None:
        assert worker not in self.pids, "two processes of one worker"
        self.counts[worker] = self.counts.get(worker, -1) + 1
        self.pids[worker] = 1000 * worker + self.counts[worker]
        self.ids[worker] = f"{worker}.{self.counts[worker]}"
        self._do(self.coordinator.started(worker, self.pids[worker], self.now))

    def _do(self, decisions) -> None:
        for decision in decisions:
            if isinstance(decision, Start):
                assert decision.worker not in self.to_start
                self.to_start.append(decision.worker)
            elif isinstance(decision, Kill):
                assert decision.worker in self.pids
                assert decision.worker not in self.to_kill, "killed twice"
                self.to_kill.append(decision.worker)
            elif isinstance(decision, Fail):
                self.has_failed = True
            elif isinstance(decision, Tell) and decision.message["kind"] == "world":
                self._hear_world(decision)

    def _hear_world(self, decision: Tell) -> None:
        world = read_world(decision.message)
        assert self.told.setdefault(world.generation, world) == world, "two Worlds of one generation"
        living = set(self.ids.values())
        assert living.issuperset(world.ids), "a World with a dead member"
        earlier = {i for g, w in self.told.items() if g < world.generation for i in w.ids}
        outside = (earlier & living) - set(world.ids)
        assert outside <= self.standing, "someone outside can still write"

    @precondition(lambda self: self.to_start)
    @rule()
    def start(self):
        self._start(self.to_start.pop(0))

    @rule(worker=workers, call=st.integers(0, 1))
    def ready(self, worker, call):
        if worker in self.pids:
            data = {"trainer": 0, "call": call, "process": {"pid": self.pids[worker], "node": "a"}}
            self._do(self.coordinator.heard(worker, "ready", data, self.now))

    @rule(worker=workers, step=st.integers(0, 20), lag=st.integers(0, 1))
    def beat(self, worker, step, lag):
        generation = self._generation() - lag
        data = {"generation": generation, "trainer": 0, "call": 0, "step": step, "is_stepping": bool(step % 2)}
        self._do(self.coordinator.heard(worker, "beat", data, self.now))

    @rule(worker=workers, lag=st.integers(0, 1))
    def gather(self, worker, lag):
        data = {"generation": self._generation() - lag, "trainer": 0, "key": "enter", "value": worker}
        decisions = self.coordinator.heard(worker, "gather", data, self.now)
        for decision in decisions:
            if isinstance(decision, Tell) and decision.message["kind"] == "gathered":
                members = self.coordinator.world.members
                assert decision.message["values"] == [member.worker for member in members]
        self._do(decisions)

    @rule(worker=workers)
    def boundary(self, worker):
        if worker in self.pids and self.coordinator.state.is_held:
            self.standing.add(self.ids[worker])
            data = {"generation": self._generation(), "trainer": 0, "call": 0, "step": 1}
            self._do(self.coordinator.heard(worker, "boundary", data, self.now))

    @rule(worker=workers, peer=workers, seconds=st.floats(0, 30))
    def waiting(self, worker, peer, seconds):
        members = [self.ids.get(peer, "9.9")]
        data = {"generation": self._generation(), "members": members, "seconds": seconds}
        self._do(self.coordinator.heard(worker, "waiting", data, self.now))

    @rule(worker=workers, call=st.integers(0, 1))
    def called(self, worker, call):
        data = {"trainer": 0, "call": call, "name": "fit", "result": None}
        self._do(self.coordinator.heard(worker, "called", data, self.now))

    @rule(worker=workers, code=st.sampled_from((-9, -9, -9, 75, 0)))
    def exit(self, worker, code):
        if worker in self.pids:
            self._bury(worker, code)

    @precondition(lambda self: self.to_kill)
    @rule()
    def kill(self):
        self._bury(self.to_kill[0], -9)

    def _bury(self, worker: int, code: int) -> None:
        del self.pids[worker]
        self.standing.discard(self.ids.pop(worker))
        self.to_kill = [other for other in self.to_kill if other != worker]
        self._do(self.coordinator.exited(worker, code, self.now, is_retryable=code == 75))

    @rule(num_workers=st.integers(0, 6))
    def resize(self, num_workers):
        self._do(self.coordinator.resized(num_workers, self.now))

    @rule(seconds=st.sampled_from((0.1, 0.1, 0.2, 2.0, 60.0)))
    def tick(self, seconds):
        self.now += seconds
        self._do(self.coordinator.ticked(self.now))

    @rule()
    def settle_again(self):
        """What was concluded once is not concluded twice."""
        self._do(self.coordinator.ticked(self.now))
        assert not [d for d in self.coordinator.ticked(self.now) if not isinstance(d, Fail)]

    @invariant()
    def generations_grow(self):
        assert sorted(self.told) == list(range(len(self.told)))

    def _generation(self) -> int:
        return self.coordinator.world.generation if self.coordinator.world else 0


Launcher.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)
TestLauncher = Launcher.TestCase

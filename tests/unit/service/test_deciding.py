"""From the queue to a policy and back: what policies are shown, what of their decisions is done, who is promised."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from shoal.place.cluster import CLASSES, Cluster, Node, Partition
from shoal.place.decision import Decision, Place, Stop, Wait
from shoal.place.policies import POLICIES
from shoal.place.reclaim import reclaim
from shoal.service import transitions
from shoal.service.deciding import (
    Promise,
    Todo,
    blocked_by,
    blocked_jobs,
    can_do,
    cluster_of,
    hopeless,
    still_promised,
    usage_of,
)
from shoal.service.job import Asked, Job
from shoal.service.orders import Seen
from shoal.service.people import Person
from shoal.service.settings import Settings
from shoal.service.transitions import change_size, start, stop

GIB = 1 << 30
NODES = (Node(name="a", cores=4.0, memory_bytes=8 * GIB), Node(name="b", cores=2.0, memory_bytes=4 * GIB))


def job(number: int, *, owner: str = "ann", **fields: object) -> Job:
    asked = Asked(run_args=("t.py",), name="t", working_dir="/", **fields)  # type: ignore[arg-type]
    return Job(number=number, owner=owner, asked=asked, min_workers=asked.min_workers, max_workers=asked.max_workers)


def begun(number: int, allocation: dict[str, int], devices: Mapping[str, tuple[int, ...]] | None = None, **more):
    return replace(start(job(number, **more), allocation, devices or {}, 0.0), state="running")


def place(number: int, why: str = "", **allocation: int) -> Place:
    return Place(job=str(number), allocation=allocation, why=why)


def shown(*jobs: Job, now: float = 0.0, nodes=NODES, settings=None, **more) -> Cluster:
    return cluster_of(jobs, nodes, settings or Settings(), {}, {}, {}, {}, now, **more)


class Box:
    """A service whose jobs do at once what they are told, at the next look."""

    def __init__(self, policy: str, nodes: tuple[Node, ...], *jobs: Job, now: float = 1000.0) -> None:
        self.policy, self.nodes, self.now = POLICIES[policy], nodes, now
        self.jobs = {job.number: job for job in jobs}
        self.promised: dict[int, Promise] = {}
        self.waits: dict[int, Wait] = {}
        self.peaks: dict[str, int] = {}
        self.settings = Settings()

    def look(self) -> None:
        for number, job in self.jobs.items():
            if job.state == "starting" or job.target is not None:
                seen = Seen(state="running", num_workers=job.num_wanted)
            elif job.state == "stopping":
                seen = Seen(state="ended", cause="preempted")
            else:
                continue
            self.jobs[number] = transitions.see(job, seen, self.now, 0.0)

    def decide(self) -> list[Todo]:
        self.promised = still_promised(self.promised, self.jobs, self.nodes)
        more = {"now": self.now, "nodes": self.nodes, "settings": self.settings, "promised": self.promised}
        cluster = shown(*self.jobs.values(), **more)
        decisions, lowers = reclaim(cluster, self.policy(cluster), self.peaks, self.policy)
        todo, self.waits, self.promised = can_do(
            decisions, self.jobs, self.nodes, {}, self.promised, self.now, lowers
        )
        for each in todo:
            job = self.jobs[each.number]
            if not each.allocation:
                after = transitions.preempt(job, each.why, self.now, 0.0)
            elif job.is_active:
                after = change_size(job, each.allocation, each.devices, self.now, 0.0, each.why)
            else:
                after = start(
                    job, each.allocation, each.devices, self.now, 0.0, each.why, memory_bytes=each.memory_bytes
                )
            self.jobs[each.number] = after
        return todo

    def settle(self, rounds: int = 10) -> None:
        """Until there is nothing more to do."""
        for _ in range(rounds):
            self.now += 1.0
            self.look()
            if not self.decide() and not self.promised:
                return
        raise AssertionError(f"there is no end to it: {self.jobs}, {self.waits}")


# --- what is shown


def test_one_that_is_stopping_holds_nothing_and_who_was_promised_its_nodes_runs_there():
    leaving = stop(begun(1, {"a": 4}, max_workers=4), "preempt", "for another", 1.0)
    jobs = {1: leaving, 2: job(2, min_workers=4, max_workers=4)}
    todo, waits, promised = can_do([place(2, a=4)], jobs, NODES, {}, {}, 2.0)
    assert todo == []
    assert waits[2].why == "its nodes are being made free by job 1"
    views = {each.id: each for each in shown(*jobs.values(), now=2.0, promised=promised).jobs}
    assert (views["1"].allocation, views["1"].num_stops) == ({}, 1)
    assert (views["2"].allocation, views["2"].changed_at) == ({"a": 4}, 2.0)
    gone = {2: jobs[2]}
    todo, _, promised = can_do([], gone, NODES, {}, promised, 3.0)
    assert [(each.number, each.allocation) for each in todo] == [(2, {"a": 4})]
    assert promised == {}


def test_one_that_is_cancelled_is_not_shown():
    assert shown(stop(begun(1, {"a": 4}), "cancel", "", 1.0)).jobs == ()


def test_promises_end_with_what_they_were_about():
    promised = {1: Promise(place=place(1, a=1), at=0.0)}
    assert still_promised(promised, {1: job(1)}, NODES) == promised
    assert still_promised(promised, {1: replace(job(1), is_held=True)}, NODES) == {}
    assert still_promised(promised, {1: begun(1, {"b": 1})}, NODES) == {}
    assert still_promised(promised, {1: replace(job(1), min_workers=2, max_workers=2)}, NODES) == {}, "resized"
    assert still_promised(promised, {}, NODES) == {}
    assert still_promised(promised, {1: job(1)}, NODES[1:]) == {}
    assert still_promised(promised, {1: job(1)}, (replace(NODES[0], is_draining=True), NODES[1])) == {}
    assert can_do([Stop(job="1", why="x")], {1: job(1)}, NODES, {}, promised)[::2] == ([], {})


def test_a_job_that_was_stopped_often_enough_is_not_stopped_again():
    settings = Settings(partitions={"default": Partition(max_preemptions=2)})
    for fields, count, expected in (({}, 1, True), ({}, 2, False), ({"max_preemptions": 1}, 1, False)):
        stopped = replace(begun(1, {"a": 1}, **fields), num_preempted=count)
        (view,) = shown(stopped, settings=settings).jobs
        assert view.is_preemptible == expected


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_budget_of_stops_holds_against_everybody(policy):
    nodes = (Node(name="n", cores=1.0),)
    box = Box(policy, nodes, begun(1, {"n": 1}, max_preemptions=1), job(2, job_class="serving"))
    box.settle()
    assert (box.jobs[1].state, box.jobs[1].num_preempted, box.jobs[2].state) == ("waiting", 1, "running")
    del box.jobs[2]
    box.settle()
    box.jobs[3] = job(3, job_class="serving")
    box.now += 10_000.0
    box.settle()
    assert (box.jobs[1].state, box.jobs[1].num_preempted, box.jobs[3].state) == ("running", 1, "waiting")


def test_what_stopping_cost_makes_turns_longer():
    job = replace(begun(1, {"a": 1}), has_run=True)
    ended = Seen(state="ended", cause="preempted", step=50)
    job = transitions.see(transitions.preempt(job, "x", 100.0, 0.0), ended, 103.0, 0.0)
    assert (job.num_preempted, job.stop_seconds, job.stopping_seconds) == (1, None, 3.0)
    job = start(job, {"a": 1}, {}, 200.0)
    for step, cost in ((50, None), (51, 11.0)):
        job = transitions.see(job, Seen(state="running", num_workers=1, step=step), 208.0, 0.0)
        assert job.stop_seconds == cost
    (view,) = shown(job).jobs
    assert view.stop_seconds == 11.0


# --- what is done


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_policy_counts_what_a_person_has_in_all(policy):
    """One that did not would stop others for jobs that then cannot start, again and again."""
    more = {"max_workers": 3, "is_elastic": True}
    jobs = [job(1), job(2, **more), job(3), job(4), job(5, owner="ben"), begun(6, {"b": 1})]
    jobs[3] = replace(begun(4, {"a": 1}), wish="cancel")
    people = {"ann": Person(name="ann", max_workers=4)}
    cluster = cluster_of(jobs, NODES, Settings(), people, {}, {}, {}, 0.0)
    decisions = POLICIES[policy](cluster)
    placed = {each.job: sum(each.allocation.values()) for each in decisions if isinstance(each, Place)}
    assert placed.pop("5") == 1
    assert sum(placed.values()) == 2  # one runs, another is being ended
    waits = [each.why for each in decisions if isinstance(each, Wait)]
    assert set(waits) == {"ann may use no more workers at once"}


def test_two_starts_never_share_a_core_and_a_quota_holds():
    jobs = {1: job(1, min_workers=3), 2: job(2, min_workers=3)}
    todo, _, promised = can_do([place(1, a=3), place(2, a=3)], jobs, NODES, {})
    assert [each.number for each in todo] == [1]
    assert promised == {}, "nobody leaves those nodes"
    people = {"ann": Person(name="ann", max_workers=4)}
    todo, waits, _ = can_do([place(1, a=3), place(2, b=2)], jobs, NODES, people)
    assert [each.number for each in todo] == [1]
    assert waits[2].why == "ann may use no more workers at once"


def test_a_gpu_that_is_being_given_up_is_not_given_out_though_others_are_free():
    nodes = (Node(name="a", cores=4.0, gpus=2),)
    leaving = stop(begun(1, {"a": 1}, {"a": (0,)}, gpus=1.0), "preempt", "", 1.0)
    wanted = Place(job="2", allocation={"a": 1}, devices={"a": (0,)})
    todo, waits, _ = can_do([wanted], {1: leaving, 2: job(2, gpus=1.0)}, nodes, {})
    assert todo == []
    assert waits[2].why == "its nodes are being made free by job 1"
    other = replace(wanted, devices={"a": (1,)})
    assert [each.number for each in can_do([other], {1: leaving, 2: job(2, gpus=1.0)}, nodes, {})[0]] == [2]


def test_a_fixed_job_is_never_resized_and_a_shrinking_one_keeps_its_nodes():
    fixed = begun(1, {"a": 2}, min_workers=2, max_workers=2, is_preemptible=False)
    assert can_do([place(1, a=3), place(1, a=1), place(1, b=2)], {1: fixed}, NODES, {})[0] == []
    elastic = begun(2, {"a": 4}, min_workers=1, max_workers=4, is_elastic=True)
    shrinking = change_size(elastic, {"a": 1}, {}, 1.0)
    assert can_do([place(3, a=1)], {2: shrinking, 3: job(3)}, NODES, {})[0] == []
    assert [each.number for each in can_do([Stop(job="2", why="x")], {2: elastic}, NODES, {})[0]] == [2]


def test_an_elastic_job_that_changes_nodes_keeps_what_both_have_in_common_and_is_never_in_two_places():
    elastic = begun(1, {"a": 2, "b": 2}, min_workers=2, max_workers=4, is_elastic=True)
    (todo,), _, promised = can_do([place(1, "x", a=4)], {1: elastic}, NODES, {})
    assert (todo.allocation, promised) == ({"a": 2}, {})
    (todo,), _, promised = can_do([place(1, "x", a=1)], {1: replace(elastic, allocation={"b": 2})}, NODES, {})
    assert todo.allocation == {}, "nothing in common: it is stopped, and starts there"
    assert promised[1].place.allocation == {"a": 1}
    (todo,), _, _ = can_do([place(1, "x", a=2, b=2)], {1: replace(elastic, allocation={"b": 2})}, NODES, {})
    assert todo.allocation == {"a": 2, "b": 2}


@pytest.mark.parametrize("is_elastic", [False, True])
def test_one_whose_nodes_are_all_gone_is_stopped_and_starts_where_it_was_given_others(is_elastic):
    ran = begun(1, {"gone": 2}, min_workers=1 if is_elastic else 2, max_workers=2, is_elastic=is_elastic)
    (todo,), _, promised = can_do([place(1, "x", a=2)], {1: ran}, NODES, {})
    assert todo.allocation == {}, "there is nothing left of it to go on with"
    assert promised[1].place.allocation == {"a": 2}


@pytest.mark.parametrize("is_preemptible", [True, False])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_one_whose_nodes_are_gone_starts_on_others_of_whatever_kind(policy, is_preemptible):
    nodes = (Node(name="fast", kind="v100", cores=2.0), Node(name="slow", kind="k80", cores=2.0))
    box = Box(policy, nodes, begun(1, {"gone": 1}, is_preemptible=is_preemptible))
    policy = box.policy
    box.policy = lambda cluster: policy(replace(cluster, jobs=tuple(replace(j, rate=_rate) for j in cluster.jobs)))
    box.decide()
    assert box.jobs[1].message == "its nodes are gone"
    box.settle()
    assert (box.jobs[1].state, box.jobs[1].allocation) == ("running", {"fast": 1})


def test_other_gpus_of_the_same_node_mean_another_start():
    nodes = (Node(name="a", cores=8.0, gpus=4),)
    fixed = begun(1, {"a": 1}, {"a": (0,)}, gpus=1.0)
    moved = Place(job="1", allocation={"a": 1}, devices={"a": (2,)}, why="moved: x")
    (todo,), _, promised = can_do([moved], {1: fixed}, nodes, {})
    assert (todo.allocation, todo.why) == ({}, "moved: x")
    assert promised[1].place == moved
    elastic = begun(1, {"a": 2}, {"a": (0, 1)}, gpus=1.0, max_workers=4, is_elastic=True)
    grown = Place(job="1", allocation={"a": 3}, devices={"a": (1, 0, 3)})
    (todo,), _, _ = can_do([grown], {1: elastic}, nodes, {})
    assert todo.devices == {"a": (0, 1, 3)}, "workers that run keep theirs, in their order"
    other = Place(job="1", allocation={"a": 3}, devices={"a": (1, 2, 3)})
    (todo,), _, _ = can_do([other], {1: elastic}, nodes, {})
    assert todo.allocation == {}
    first = Place(job="1", allocation={"a": 3}, devices={"a": (0, 2, 3)})
    (todo,), _, _ = can_do([first], {1: elastic}, nodes, {})
    assert (todo.allocation, todo.devices) == ({"a": 1}, {"a": (0,)}), "it goes on with the one that stays"


# --- decisions that take effect: policy, deciding and jobs together

BIG_AND_SMALL = (Node(name="big", cores=4.0), Node(name="small", cores=1.0))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_job_that_stands_in_the_way_of_a_higher_one_moves_to_where_it_fits_and_both_run(policy):
    box = Box(policy, BIG_AND_SMALL, begun(1, {"big": 1}), job(2, cores=4.0, job_class="serving"))
    box.settle()
    assert {number: (job.state, job.allocation) for number, job in box.jobs.items()} == {
        1: ("running", {"small": 1}),
        2: ("running", {"big": 1}),
    }
    assert box.jobs[1].num_preempted == 1


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_who_was_stopped_does_not_get_its_nodes_back_before_the_one_it_was_stopped_for(policy):
    nodes = (Node(name="n", cores=2.0),)
    fixed = replace(begun(1, {"n": 2}, min_workers=2, max_workers=2), submitted_at=0.0, run_seconds=10_000.0)
    waits = replace(job(2, cores=2.0), submitted_at=10.0)
    box = Box(policy, nodes, fixed, waits, now=20_000.0)
    before = dict(box.jobs)
    for _ in range(6):
        box.now += 1.0
        box.look()
        box.decide()
        if box.jobs[1].state == "waiting" and before[1].state != "waiting":
            assert box.jobs[2].state == "starting", "it was stopped for this one"
        before = dict(box.jobs)


def test_a_running_job_moves_to_the_kind_where_it_gains_most():
    nodes = (Node(name="fast", kind="v100", cores=2.0), Node(name="slow", kind="k80", cores=2.0))
    box = Box("las", nodes, begun(1, {"slow": 1}))
    policy = box.policy
    box.policy = lambda cluster: policy(replace(cluster, jobs=tuple(replace(j, rate=_rate) for j in cluster.jobs)))
    box.settle()
    assert box.jobs[1].allocation == {"fast": 1}
    assert box.jobs[1].state == "running"


def _rate(kind: str, workers: int, nodes: int) -> float:
    return (2.0 if kind == "v100" else 1.0) * workers


# --- reasons


def test_a_reason_says_what_changed_and_why():
    nodes = (Node(name="n", cores=8.0),)
    elastic = begun(1, {"n": 8}, min_workers=2, max_workers=8, is_elastic=True)
    box = Box("las", nodes, elastic, job(2, cores=1.0))
    box.settle()
    assert box.jobs[1].change == "8 to 7 workers: job 2 needs room"
    assert box.jobs[2].change == "started with 1 worker"
    del box.jobs[2]
    box.now += 100.0
    box.settle()
    assert box.jobs[1].change == "7 to 8 workers: there is room"
    box.jobs[3] = job(3, cores=8.0, job_class="serving")
    box.settle()
    assert box.jobs[1].change == "stopped, to go on later: serving job 3 goes first"


def test_the_reason_of_a_change_is_told_with_the_sizes_that_were_done():
    job = change_size(begun(1, {"a": 4}), {"a": 2}, {}, 1.0, 2.0, "4 to 3 workers: job 9 needs room")
    assert (job.change, job.change_wall) == ("4 to 2 workers: job 9 needs room", 2.0)
    assert change_size(begun(1, {"a": 4}), {"a": 2}, {}, 1.0).change == "4 to 2 workers"


# --- what counts


def test_two_workers_with_two_gpus_count_four_times_as_much_as_one_without():
    job = begun(1, {"a": 2}, gpus=2.0)
    (view,) = shown(job, now=10.0).jobs
    assert view.service_seconds == 40.0
    assert transitions.accrue(job, 10.0).service_seconds == 40.0
    assert transitions.accrue(begun(1, {"a": 2}, gpus=0.5), 10.0).service_seconds == 20.0


def test_why_a_job_cannot_start_whatever_is_free():
    after = job(3, after=(1, 2))
    assert blocked_by(after, {1: "finished", 2: "running"}, None) == "after job 2"
    assert blocked_by(after, {1: "finished", 2: "finished"}, None) == ""
    assert "no more workers" in blocked_by(job(1, min_workers=2), {}, 1)
    assert hopeless([after], {1: "finished", 2: "failed"}) == [(3, 2, "failed")]
    chain = [job(6, after=(5, 4)), job(5, after=(3,)), after, job(7, after=(1,))]
    cancelled = [(5, 3, "was cancelled"), (6, 5, "was cancelled")]
    states = {1: "finished", 2: "failed", 3: "waiting"}
    assert hopeless(chain, states) == [(3, 2, "failed"), *cancelled], "all at once"


def test_what_people_used_counts_to_their_lab():
    rows = [{"account": "lab/ann", "lately": 8.0, "at": 0.0}, {"account": "lab/bob", "lately": 4.0, "at": 10.0}]
    assert usage_of(rows, 10.0, 10.0) == {"lab": 8.0, "lab/ann": 4.0, "lab/bob": 4.0}


# --- memory that lies idle

ONE = (Node(name="a", cores=4.0, memory_bytes=8 * GIB),)


def holder(number: int = 1, **more: object) -> Job:
    fields: dict[str, object] = {"memory_bytes": 6 * GIB, **more}
    return replace(begun(number, {"a": 1}, **fields), run_seconds=5000.0)


def ask_for(jobs: list[Job], peaks: dict[str, int], nodes=ONE, policy: str = "fifo", settings=None, now=5000.0):
    cluster = shown(*jobs, now=now, nodes=nodes, settings=settings)
    decide = POLICIES[policy]
    decisions: list[Decision] = decide(cluster)
    after, lowers = reclaim(cluster, decisions, peaks, decide)
    assert (after == decisions) == (not lowers)
    return lowers


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"goodput"}))  # that one lets them take turns
def test_memory_that_lies_idle_goes_to_who_waits_for_it_and_nobody_loses_a_worker(policy):
    waits = replace(job(2, memory_bytes=4 * GIB), submitted_at=5000.0)
    box = Box(policy, ONE, holder(), waits, now=5000.0)
    box.peaks = {"1": GIB}
    box.settle()
    assert [job.state for job in box.jobs.values()] == ["running", "running"]
    assert box.jobs[1].memory_bytes == 3 * GIB // 2 + (256 << 20)
    assert "job 2 waits for memory" in box.jobs[1].change
    (view,) = [each for each in shown(*box.jobs.values()).jobs if each.id == "1"]
    assert view.ask.memory_bytes == box.jobs[1].memory_bytes
    for _ in range(50):
        box.now += 600.0
        box.settle()
    assert box.jobs[1].num_preempted == 1, "once"


def test_a_job_that_needs_what_it_gave_back_gets_it_again_and_keeps_it():
    lowered = transitions.see(
        replace(holder(), lowered_bytes=2 * GIB), Seen(state="ended", cause="out_of_memory"), 6000.0, 0.0
    )
    assert (lowered.state, lowered.memory_bytes, lowered.keeps_memory) == ("waiting", 6 * GIB, True)
    assert transitions.see(holder(), Seen(state="ended", cause="out_of_memory"), 1.0, 1.0).state == "failed"


@pytest.mark.parametrize(
    ("what", "giver", "waiting", "more"),
    [
        ("it uses what it has", {}, {}, {"peaks": {"1": 3 * GIB}}),
        ("nobody knows what it uses", {}, {}, {"peaks": {}}),
        ("it goes before the one that waits", {"job_class": "serving"}, {"job_class": "batch"}, {}),
        ("it has the higher priority", {"priority": 1}, {}, {}),
        ("it must not be stopped", {"is_preemptible": False}, {}, {}),
        ("it has not run for long", {}, {}, {"now": 100.0}),
        ("it would not be enough", {}, {"memory_bytes": 7 * GIB}, {}),
        ("cores are short, not memory", {"cores": 3.0}, {"cores": 2.0}, {}),
        ("cores are short as well", {"cores": 3.0}, {"cores": 2.0, "memory_bytes": 4 * GIB}, {}),
        (
            "the one that waits has reached a cap",
            {},
            {},
            {"settings": Settings(partitions={"default": Partition(max_workers_per_user=1)})},
        ),
        (
            "its node is of another kind",
            {},
            {"kinds": ("gpu",)},
            {"nodes": (*ONE, Node(name="g", kind="gpu", cores=4.0, memory_bytes=GIB))},
        ),
        (
            "its node is of another partition, that lends nothing",
            {"partition": "own"},
            {},
            {
                "nodes": (replace(ONE[0], partition="own"), Node(name="z", cores=1.0, memory_bytes=GIB)),
                "settings": Settings(partitions={"own": Partition(name="own", lends=False)}),
            },
        ),
    ],
)
@pytest.mark.parametrize("policy", ["fifo", "las", "fair"])
def test_memory_is_taken_from_nobody_if(policy, what, giver, waiting, more):
    peaks = more.pop("peaks", {"1": GIB}) if "peaks" in more else {"1": GIB}
    jobs = [holder(**giver), job(2, **{"memory_bytes": 4 * GIB, **waiting})]
    assert ask_for(jobs, peaks, policy=policy, **{k: v for k, v in more.items() if k != "peaks"}) == [], what


def test_as_few_as_have_enough_are_asked():
    nodes = (Node(name="a", cores=8.0, memory_bytes=16 * GIB),)
    jobs = [holder(number, memory_bytes=size * GIB) for number, size in ((1, 4), (2, 8), (3, 4))]
    peaks = dict.fromkeys(("1", "2", "3"), GIB // 4)

    def asked(memory_gib: int) -> list[str]:
        return [given.job for given in ask_for([*jobs, job(4, memory_bytes=memory_gib * GIB)], peaks, nodes)]

    assert asked(6) == ["2"], "who has most to give"
    assert asked(9) == ["2", "1"]
    assert asked(15) == []


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("holds", CLASSES)
@pytest.mark.parametrize("waits", CLASSES)
def test_an_elastic_job_gives_workers_to_who_waits_for_memory_if_its_class_does_not_go_first(policy, holds, waits):
    elastic = begun(1, {"a": 2}, memory_bytes=4 * GIB, max_workers=2, is_elastic=True, job_class=holds)
    box = Box(policy, ONE, elastic, job(2, memory_bytes=4 * GIB, job_class=waits), now=50.0)
    box.settle()
    gives = CLASSES.index(holds) <= CLASSES.index(waits)
    assert (box.jobs[1].num_reserved, box.jobs[2].num_reserved) == ((1, 1) if gives else (2, 0))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_jobs_that_cannot_start_change_nothing_for_others(policy: str):
    held = [replace(job(number, max_workers=4), is_held=True) for number in range(10, 20)]
    after = [job(number, after=(1,)) for number in range(20, 25)]
    others = [begun(1, {"a": 1}), job(2, max_workers=3), job(3, owner="bob", priority=3)]
    whole = [*held, *others, *after]
    blocked = blocked_jobs(whole, {1: "running"}, {})
    assert blocked == dict.fromkeys(range(10, 20), "held") | dict.fromkeys(range(20, 25), "after job 1")
    decide = POLICIES[policy]
    most, least = (
        decide(cluster_of(jobs, NODES, Settings(), {}, {}, {}, {1: "running"}, 5.0)) for jobs in (whole, others)
    )
    assert [each for each in most if int(each.job) not in blocked] == list(least)


def test_one_that_is_promised_nodes_is_not_blocked_and_quotas_count_what_is_held():
    jobs = [begun(1, {"a": 2}), job(2), job(3, owner="bob")]
    people = {"ann": Person(name="ann", role="user", max_workers=2)}
    assert set(blocked_jobs(jobs, {}, people)) == {2}
    assert blocked_jobs(jobs, {}, people, {2: Promise(place=place(2, a=1), at=0.0)}) == {}


def test_an_elastic_job_that_grows_keeps_its_gpus_in_their_order():
    node = Node(name="a", cores=8.0, memory_bytes=GIB, gpus=4)
    had = begun(1, {"a": 2}, {"a": (2, 0)}, gpus=1.0, max_workers=4, is_elastic=True)
    wanted = Place(job="1", allocation={"a": 4}, devices={"a": (0, 1, 2, 3)}, why="")
    (todo,), _, _ = can_do([wanted], {1: had}, [node], {})
    assert todo.devices == {"a": (2, 0, 1, 3)}

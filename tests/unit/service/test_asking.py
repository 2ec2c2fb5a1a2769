"""What may be submitted, and how those are told who ask for what cannot be."""

from dataclasses import replace

import pytest

from shoal.place.cluster import Node
from shoal.place.decision import Place, Stop, Wait
from shoal.service.asking import check_partition, find_circle, read_submission
from shoal.service.deciding import blocked_by, can_do, cluster_of, hopeless, usage_of
from shoal.service.job import Asked, Job, parse_number, parse_numbers
from shoal.service.people import Person
from shoal.service.reclaim import reclaim
from shoal.service.settings import Settings, parse_settings
from shoal.service.state import _never
from shoal.service.transitions import change_size, start, stop
from shoal.spec.errors import UserError

GIB = 1 << 30
NODES = (Node(name="a", cores=4.0, memory_bytes=8 * GIB), Node(name="b", cores=2.0, memory_bytes=4 * GIB))


def read(**fields: object):
    return read_submission({"jobs": [{"args": ["train.py"], "dir": "/", **fields}]})


def test_what_people_write_becomes_what_is_asked():
    (asked,) = read(workers="1:8", memory="4G", time="2h", priority=5, **{"class": "batch"}).jobs
    assert (asked.min_workers, asked.max_workers, asked.is_elastic) == (1, 8, True)
    assert (asked.memory_bytes, asked.time_limit_seconds, asked.name) == (4 * GIB, 7200.0, "train")
    assert [job.index for job in read(array=3).jobs] == [0, 1, 2]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"name": "x" * 10_000_000}, "name 'xxx"),
        ({"name": "a\nb"}, "cannot be the name"),
        ({"name": "\x1b[31mred"}, "cannot be the name"),
        ({"name": "17"}, "cannot be the name"),
        ({"dir": "relative"}, "not a folder"),
        ({"args": []}, "No script"),
        ({"args": ["a\0b"]}, "list of texts"),
        ({"args": ["-o", "engine.cpus=4", "train.py"]}, "cannot have `-o engine.cpus`"),
        ({"args": ["--option=engine.nodes=a=1", "train.py"]}, "cannot have `-o engine.nodes`"),
        ({"workers": "8:1"}, "not a number of workers"),
        ({"workers": -1}, "not a number of workers"),
        ({"workers": True}, "not a number of workers"),
        ({"memory": "much"}, "not a size"),
        ({"memory": -5}, "not a size"),
        ({"time": "soon"}, "not a time limit"),
        ({"class": "trainin"}, "trainin"),
        ({"priority": 10**12}, "priority is"),
        ({"cores": float("nan")}, "cores is"),
        ({"array": 0}, "array is"),
        ({"array": 10_001}, "array is"),
        ({"env": {"A=B": "c"}}, "cannot be set"),
        ({"after": ["../../etc"]}, "etc"),
        ({"aftr": [1]}, "aftr"),
    ],
)
def test_what_cannot_be_is_refused_in_a_few_words(fields, told):
    with pytest.raises(UserError, match=told) as caught:
        read(**fields)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("text", ["../1", "1/2", "", "0", "-1", "1e3", "٣", "1" * 40, "job-", "1;ls", "job-1\n"])
def test_hostile_numbers_are_no_jobs(text):
    with pytest.raises(UserError, match="not the number of a job"):
        parse_number(text)


def test_ranges_of_jobs():
    assert parse_numbers(["3", "job-7", "5-6", "5"]) == [3, 7, 5, 6]
    for bad in ("6-5", "1-1000000"):
        with pytest.raises(UserError, match="not a range"):
            parse_numbers([bad])


def test_jobs_that_wait_for_each_other_are_named():
    rows = [
        {"args": ["t.py"], "dir": "/", "name": name, "after": [other]}
        for name, other in (("a", "b"), ("b", "c"), ("c", "a"))
    ]
    with pytest.raises(UserError, match="wait for each other") as caught:
        read_submission({"jobs": rows})
    assert caught.value.why == "'a' after 'b' after 'c' after 'a'"
    rows[2]["after"] = []
    assert read_submission({"jobs": rows}).links == ((1,), (2,), ())
    assert find_circle([[0]]) == [0, 0]
    assert find_circle([[at + 1] for at in range(50_000)] + [[]]) == []


def test_an_unknown_partition_is_guessed_at():
    with pytest.raises(UserError) as caught:
        check_partition(read(partition="gpus").jobs[0], {"default", "gpu"})
    assert "gpu" in caught.value.hint


def test_a_job_that_never_fits_is_told_the_largest_that_would():
    problem = _never(read(workers=9).jobs[0], NODES, Settings())
    assert problem is not None
    assert "6" in f"{problem.message} {problem.why} {problem.hint}"
    assert _never(read(workers=6).jobs[0], NODES, Settings()) is None
    assert _never(read(memory="9G").jobs[0], NODES, Settings()) is not None


def test_settings_say_in_which_line_they_are_wrong():
    with pytest.raises(UserError) as caught:
        parse_settings('policy = "fifo"\nround = \n', "service.toml", dict)
    assert "service.toml:2:9" in caught.value.where
    with pytest.raises(UserError, match="polcy"):
        parse_settings('polcy = "fifo"', "service.toml", dict)
    found = parse_settings("[partitions.gpu]\nmax_workers_per_user = 4\n[shares]\nlab = 2\n", "service.toml", dict)
    assert (found.partition_names, found.shares) == (["default", "gpu"], {"lab": 2.0})


# --- what a policy is shown, and what of its decisions can be done


def job(number: int, *, owner: str = "ann", **fields: object) -> Job:
    asked = Asked(run_args=("t.py",), name="t", working_dir="/", **fields)  # type: ignore[arg-type]
    return Job(number=number, owner=owner, asked=asked, min_workers=asked.min_workers, max_workers=asked.max_workers)


def begun(number: int, allocation: dict[str, int], **fields: object) -> Job:
    return replace(start(job(number, **fields), allocation, {}, 0.0), state="running")


def place(number: int, **allocation: int) -> Place:
    return Place(job=str(number), allocation=allocation)


def test_nobody_starts_on_nodes_that_are_still_being_left():
    leaving = stop(begun(1, {"a": 4}), "preempt", "for another", 1.0)
    jobs = {1: leaving, 2: job(2, min_workers=4, max_workers=4)}
    shown = cluster_of(jobs.values(), NODES, Settings(), {}, {}, {}, {}, 2.0)
    assert [each.id for each in shown.jobs] == ["2"]
    todo, waits = can_do([place(2, a=4)], jobs, NODES, {})
    assert todo == []
    assert waits[2].why == "its nodes are being made free"
    assert len(can_do([place(2, a=4)], {2: jobs[2]}, NODES, {})[0]) == 1


def test_two_starts_never_share_a_core_and_a_quota_holds():
    jobs = {1: job(1, min_workers=3), 2: job(2, min_workers=3)}
    todo, _ = can_do([place(1, a=3), place(2, a=3)], jobs, NODES, {})
    assert [each.number for each in todo] == [1]
    people = {"ann": Person(name="ann", max_workers=4)}
    todo, _ = can_do([place(1, a=3), place(2, b=2)], jobs, NODES, people)
    assert [each.number for each in todo] == [1]


def test_a_fixed_job_is_never_resized_and_a_shrinking_one_keeps_its_nodes():
    fixed = begun(1, {"a": 2}, min_workers=2, max_workers=2)
    assert can_do([place(1, a=3), place(1, a=1)], {1: fixed}, NODES, {})[0] == []
    elastic = begun(2, {"a": 4}, min_workers=1, max_workers=4, is_elastic=True)
    shrinking = change_size(elastic, {"a": 1}, {}, 1.0)
    assert can_do([place(3, a=1)], {2: shrinking, 3: job(3)}, NODES, {})[0] == []
    assert [each.number for each in can_do([Stop(job="2", why="x")], {2: elastic}, NODES, {})[0]] == [2]


def test_why_a_job_cannot_start_whatever_is_free():
    after = job(3, after=(1, 2))
    assert blocked_by(after, {1: "finished", 2: "running"}, None) == "after job 2"
    assert blocked_by(after, {1: "finished", 2: "finished"}, None) == ""
    assert "no more workers" in blocked_by(job(1, min_workers=2), {}, 1)
    assert hopeless([after], {1: "finished", 2: "failed"}) == [(3, 2, "failed")]


def test_what_people_used_counts_to_their_lab():
    rows = [{"account": "lab/ann", "lately": 8.0, "at": 0.0}, {"account": "lab/bob", "lately": 4.0, "at": 10.0}]
    assert usage_of(rows, 10.0, 10.0) == {"lab": 8.0, "lab/ann": 4.0, "lab/bob": 4.0}


def test_memory_that_lies_idle_goes_to_who_waits_for_it():
    idle = begun(1, {"a": 3}, min_workers=1, max_workers=3, is_elastic=True, memory_bytes=2 * GIB)
    waits = Wait(job="2", why="memory is in use", position=1)
    jobs = {1: idle, 2: job(2, memory_bytes=5 * GIB)}
    (given,) = reclaim([waits], jobs, NODES, {1: GIB // 2}, 100.0)
    assert isinstance(given, Place)
    assert given.allocation == {"a": 1}
    assert reclaim([waits], jobs, NODES, {}, 10.0) == [], "not before it has settled"
    jobs[2] = job(2, memory_bytes=7 * GIB)
    assert reclaim([waits], jobs, NODES, {}, 100.0) == [], "nothing is taken where it is not enough"

"""What may be submitted, and how those are told who ask for what cannot be."""

from dataclasses import replace

import pytest

from shoal.place.cluster import Node
from shoal.service.asking import check_partition, find_circle, read_submission
from shoal.service.job import parse_number, parse_numbers
from shoal.service.settings import Settings, apply_limits, parse_settings
from shoal.service.state import _never
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
    ("args", "name"),
    [
        (["--threads", "2", "train.py"], "train"),
        (["--python", "/opt/python", "-m", "lab.train", "-n", "4"], "lab.train"),
        (["train.py", "--", "other.py", "-o", "engine.cpus=4"], "train"),
        (["17.py"], "17.py"),
        (["17"], "job"),
    ],
)
def test_options_of_the_launcher_stand_before_the_script_and_what_follows_is_its_own(args: list[str], name: str):
    assert read(args=args).jobs[0].name == name


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"name": "x" * 10_000_000}, "name 'xxx"),
        ({"name": "a\nb"}, "cannot be the name"),
        ({"name": "\x1b[31mred"}, "cannot be the name"),
        ({"name": "17"}, "cannot be the name"),
        ({"dir": "relative"}, "not a folder"),
        ({"env": {"A=B": "c"}}, "'A=B' cannot be set"),
        ({"account": "a\nb"}, "account 'a.{1,4}b' cannot be used"),
        ({"args": []}, "No script"),
        ({"args": ["a\0b"]}, "list of texts"),
        ({"args": ["--threads", "2"]}, "No script"),
        ({"args": ["--"]}, "No script"),
        ({"args": ["-n", "4", "train.py"]}, "cannot have `-n` among its args"),
        ({"args": ["-n4", "train.py"]}, "cannot have `-n` among its args"),
        ({"args": ["-oengine.cpus=4", "train.py"]}, "cannot have `-o engine.cpus`"),
        ({"args": ["--threads=1", "--resume=other", "train.py"]}, "cannot have `--resume` among"),
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
        ({"preemptible": "no"}, "preemptible is 'no'"),
        ({"preemptible": 0}, "preemptible is '0'"),
        ({"max_preemptions": -1}, "max_preemptions is"),
        ({"disk": "much"}, "'much' is not a size"),
        ({"after": ["9-3"]}, "9-3"),
        ({"after": ["1-20000"]}, "more than 10000 others"),
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


def test_a_job_may_wait_for_a_range_of_others():
    (asked,) = read(after=["17-19", 3, "job-18"]).jobs
    assert asked.after == (17, 18, 19, 3)


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
    with_disk = tuple(replace(node, disk_bytes=10 * GIB) for node in NODES)
    assert _never(read(disk="9G", workers=2).jobs[0], with_disk, Settings()) is None
    assert "10 GiB of disk" in str(_never(read(disk="11G").jobs[0], with_disk, Settings()).hint)
    huge = _never(read(memory="900T").jobs[0], NODES, Settings())
    assert huge.why == "it needs 1 core, 921,600 GiB of memory"


@pytest.mark.parametrize(
    ("gpus", "workers", "words"),
    [(0.5, 2, "share one"), (0.5, "1:4", "share one"), (1.5, 1, "whole GPUs"), (0.5, 1, ""), (2, 4, ""), (0, 4, "")],
)
def test_a_part_of_a_gpu_is_for_a_job_of_one_worker(gpus, workers, words):
    if not words:
        assert read(gpus=gpus, workers=workers).jobs[0].gpus == gpus
        return
    with pytest.raises(UserError) as caught:
        read(gpus=gpus, workers=workers)
    assert words in str(caught.value.why)


def test_settings_say_in_which_line_they_are_wrong():
    with pytest.raises(UserError) as caught:
        parse_settings('policy = "fifo"\nround = \n', "service.toml", dict)
    assert "service.toml:2:9" in caught.value.where
    with pytest.raises(UserError, match="polcy"):
        parse_settings('polcy = "fifo"', "service.toml", dict)
    for text in ('policy = "fare"', 'grace = "x"', '[partitions.gpu]\nclasses = ["servng"]'):
        with pytest.raises(UserError, match=r"service.toml|partitions\.gpu"):
            parse_settings(text, "service.toml", lambda: {"fair": 1})
    found = parse_settings("[partitions.gpu]\nmax_workers_per_user = 4\n[shares]\nlab = 2\n", "service.toml", dict)
    assert (found.partition_names, found.shares) == (["default", "gpu"], {"lab": 2.0})


def test_what_a_node_may_be_used_for_has_limits():
    text = '[partitions.gpu]\nmax_preemptions = 3\n[nodes.a]\ndisk = "5G"\ncores = 2\n[nodes.b]\nmemory = "1G"\n'
    settings = parse_settings(text, "service.toml", dict)
    assert settings.partitions["gpu"].max_preemptions == 3
    known, unknown = replace(NODES[0], disk_bytes=9 * GIB), NODES[0]
    assert apply_limits(known, settings, {}).disk_bytes == apply_limits(unknown, settings, {}).disk_bytes == 5 * GIB
    assert apply_limits(known, settings, {}).cores == 2
    assert apply_limits(replace(NODES[1], disk_bytes=GIB), settings, {}).disk_bytes == GIB
    with pytest.raises(UserError, match=r"nodes\.a\.memory = 'much' cannot") as caught:
        parse_settings('[nodes.a]\nmemory = "much"', "service.toml", dict)
    assert "48G" in caught.value.why


def test_so_many_links_that_the_service_would_be_busy_with_them_are_refused():
    with pytest.raises(UserError, match="More than 100,000 jobs"):
        parse_numbers(["1-100000", "1-2"])
    former = {"args": ["a.py"], "dir": "/", "array": 1001}
    latter = {"args": ["b.py"], "dir": "/", "array": 1001, "after": ["a"]}
    with pytest.raises(UserError, match="more than 1,000,000 times") as caught:
        read_submission({"jobs": [former, latter]})
    assert "one job between" in caught.value.hint
    between = {"args": ["c.py"], "dir": "/", "after": ["a"]}
    found = read_submission({"jobs": [former, between, {**latter, "after": ["c"]}]})
    assert (len(found.links[1001]), found.links[1002], found.links[-1]) == (1001, (1001,), (1001,))

"""What decides about an attempt: its command, its limits, why it ended; and the files that tell of it."""

import os
from dataclasses import asdict
from pathlib import Path

import pytest

from shoal.engine.cgroups import Parent
from shoal.service.attempts import look, resize, start, stop
from shoal.service.cage import LAUNCHER_BYTES, Cage, Limits, settings_of
from shoal.service.folders import RESERVED_BYTES, newest_token, read, reserve, take_lock, write, write_reserved
from shoal.service.launching import command_of
from shoal.service.orders import Orders, Size, orders_of
from shoal.service.resources import here
from shoal.service.verdict import Facts, judge
from shoal.spec.errors import UserError

ORDERS = Orders(job="7", token=3, argv=("train.py", "--lr", "1"), cwd="/x", run_name="job-7", memory_bytes=1 << 30)


@pytest.mark.parametrize("bad", ["../7", "a/b", "", ".", "..", "x" * 101, "a\0b", "-rf", "ä"])
def test_ids_never_become_paths(tmp_path: Path, bad: str) -> None:
    with pytest.raises(UserError, match="cannot be the id"):
        look(str(tmp_path), bad, 1)


@pytest.mark.parametrize("bad", [-1, True, "1", 10**16, 1.0])
def test_tokens_are_numbers(tmp_path: Path, bad: object) -> None:
    with pytest.raises(UserError, match="cannot be the number"):
        look(str(tmp_path), "7", bad)  # type: ignore[arg-type]


def test_orders_come_back_from_a_file_as_they_were(tmp_path: Path) -> None:
    orders = Orders(
        job="7", token=1, argv=("a", "b"), cwd="/", run_name="r", allocation={"n": 2}, devices={"n": (0, 3)}
    )
    write(tmp_path / "orders.json", asdict(orders), is_durable=True)
    assert orders_of(read(tmp_path / "orders.json")) == orders
    assert (tmp_path / "orders.json").stat().st_mode & 0o077 == 0, "variables may be secrets"


def test_a_run_begins_under_its_name_and_goes_on_in_its_folder() -> None:
    command = command_of(ORDERS, Path("/runs/job-7"), goes_on=False)
    assert command[-5:] == ["--name", "job-7", "train.py", "--lr", "1"]
    assert command[command.index("-n") + 1] == "1"
    assert "engine.grace=9.000" in command, "workers end before the keeper loses patience"
    again = command_of(ORDERS, Path("/runs/job-7"), goes_on=True)
    assert again[-5:] == ["--resume", "/runs/job-7", "train.py", "--lr", "1"]


def test_an_elastic_run_begins_with_what_it_was_given() -> None:
    orders = Orders(job="7", token=1, argv=("a",), cwd="/", run_name="r", min_workers=1, max_workers=4, num_workers=2)
    command = command_of(orders, Path("/r"), goes_on=False)
    assert command[command.index("-n") + 1] == "1:4"
    assert "engine.start=2" in command


def test_limits_in_both_versions_of_control_groups() -> None:
    limits = Limits(memory_bytes=1 << 30, cores=1.5, num_workers=2)
    size = str((2 << 30) + LAUNCHER_BYTES)
    assert set(settings_of("memory", limits, 1).values()) == {size}
    assert settings_of("memory", limits, 2) == {"memory.max": size, "memory.swap.max": "0"}
    assert settings_of("cpu", limits, 1) == {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "300000"}
    assert settings_of("cpu", limits, 2) == {"cpu.max": "300000 100000"}
    assert not any(settings_of(name, Limits(), version) for name in ("memory", "cpu", "pids") for version in (1, 2))


def test_a_job_that_gets_smaller_keeps_its_limit_while_it_uses_more(tmp_path: Path) -> None:
    for name, text in (("memory.max", "0"), ("memory.swap.max", "0"), ("memory.current", str(2 << 30))):
        (tmp_path / name).write_text(text)
    cage = Cage(Limits(memory_bytes=1 << 30, num_workers=3), {"memory": Parent(tmp_path, 2)})
    assert not cage.fit(1)
    (tmp_path / "memory.current").write_text(str(1 << 30))
    assert cage.fit(1)
    assert (tmp_path / "memory.max").read_text() == str((1 << 30) + LAUNCHER_BYTES)
    assert cage.names == ("memory",)
    assert Cage(Limits(memory_bytes=1)).names == ("watchdog",)


@pytest.mark.parametrize(
    ("facts", "cause", "code"),
    [
        (Facts(code=0, why="preempt"), "finished", 0),
        (Facts(code=143, why="preempt"), "preempted", 143),
        (Facts(code=-15, why="cancel"), "cancelled", 143),
        (Facts(code=-9, why="time", was_killed=True), "time_limit", 137),
        (Facts(code=1, why="preempt"), "failed", 1),
        (Facts(code=143), "failed", 143),
        (Facts(code=137, num_kills=1, peak_bytes=1 << 30), "out_of_memory", 137),
        (Facts(code=-9, over="rank 1 had 2 GiB", why="preempt"), "out_of_memory", 137),
        (Facts(code=1, is_watched=True, failure={"message": "MemoryError"}), "out_of_memory", 137),
        (Facts(code=1, failure={"message": "MemoryError"}), "failed", 1),
        (Facts(code=137, failure={"cause": "dead", "message": "It was killed."}), "failed", 137),
        (Facts(code=137, failure={"cause": "lost_machine", "message": "It was lost."}), "lost", 137),
        (Facts(code=137, failure={"cause": "lost_machine"}, why="cancel"), "cancelled", 137),
        (Facts(code=130, why="preempt"), "preempted", 130),
    ],
)
def test_why_an_attempt_ended(facts: Facts, cause: str, code: int) -> None:
    ended = judge(ORDERS, facts)
    assert (ended["cause"], ended["exit_code"]) == (cause, code)


def test_who_ran_out_of_memory_is_told_with_numbers() -> None:
    message = judge(ORDERS, Facts(code=-9, over="rank 1 had 2 GiB"))["message"]
    assert message == "Job 7 ran out of memory: rank 1 had 2 GiB, and asked for 1 GiB a worker."


def test_a_failure_is_told_in_the_words_of_the_run() -> None:
    ended = judge(ORDERS, Facts(code=1, failure={"message": "KeyError: 'x'", "why": "in f", "hint": "look"}))
    assert (ended["message"], ended["hint"]) == ("KeyError: 'x': in f.", "look")


def test_who_kills_a_launcher_is_named_by_the_signal() -> None:
    told = judge(ORDERS, Facts(code=-9))["message"]
    assert told.startswith("Its launcher was killed by SIGKILL; `shoal requeue 7`")
    assert "killed by signal 40;" in judge(ORDERS, Facts(code=-40))["message"]


def test_a_time_limit_is_told() -> None:
    assert judge(ORDERS, Facts(code=-15, why="time"))["message"] == "It was stopped at its time limit."
    assert "is an older one" in judge(ORDERS, Facts(code=-9, why="time", was_killed=True))["message"]
    assert judge(ORDERS, Facts(code=-15, why="preempt"))["message"] == ""


def test_reserved_room_becomes_the_file(tmp_path: Path) -> None:
    reserve(tmp_path / "ended.json")
    assert (tmp_path / "ended.reserved").stat().st_blocks * 512 >= RESERVED_BYTES
    write_reserved(tmp_path / "ended.json", {"cause": "finished"})
    assert os.listdir(tmp_path) == ["ended.json"]
    assert read(tmp_path / "ended.json") == {"cause": "finished"}


def test_one_holds_a_lock_and_another_does_not(tmp_path: Path) -> None:
    first = take_lock(tmp_path)
    assert first is not None
    assert take_lock(tmp_path) is None
    os.close(first)
    again = take_lock(tmp_path)
    assert again is not None
    os.close(again)


def test_what_was_never_ordered_is_left_alone(tmp_path: Path) -> None:
    stop(str(tmp_path), "7", 1, "cancel")
    resize(str(tmp_path), "7", 1, Size(num_workers=2))
    assert os.listdir(tmp_path) == []
    with pytest.raises(UserError, match="no reason"):
        stop(str(tmp_path), "7", 1, "boredom")


def test_a_lower_token_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "7" / "5").mkdir(parents=True)
    start(str(tmp_path), ORDERS)
    assert newest_token(tmp_path / "7") == 5
    assert look(str(tmp_path), "7", 3).state == "absent"


def test_this_machine_is_a_node() -> None:
    node = here()
    assert node.name == os.uname().nodename
    assert node.cores >= 1
    assert node.memory_bytes > 1 << 28
    assert node.disk_bytes > 0


def test_gpus_are_those_that_the_driver_lists(tmp_path: Path) -> None:
    for number in range(2):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA A100-SXM4-40GB\nIRQ: 1\n")
    node = here(root=str(tmp_path))
    assert (node.gpus, node.kind) == (2, "nvidia-a100-sxm4-40gb")

import signal
from typing import Any

import pytest

from shoal.engine.cause import Evidence, Failure, find_failures, looks_like_lost_peer, shell_code, should_stop
from shoal.engine.machine import OutOfMemoryKills
from shoal.engine.story import as_error, ranks, tell_failures
from shoal.spec.event import Event
from shoal.spec.job import WorkerExit

GLOO = "[pair.cc:553] Connection closed by peer [127.0.0.1]:49799."


def error(rank: int, time: float, kind: str = "ValueError", message: str = "bad", **data: Any) -> Event:
    step = data.pop("event_step", None)
    return Event(kind="error", time=time, rank=rank, step=step, data={"type": kind, "message": message, **data})


def end(rank: int, code: int, time: float) -> WorkerExit:
    return WorkerExit(rank=rank, code=code, time=time)


def first(**evidence: Any) -> Failure:
    return find_failures(Evidence(**evidence))[0]


def test_nobody_failed() -> None:
    assert find_failures(Evidence(exits=[end(0, 0, 1.0), end(1, 0, 2.0)])) == []


def test_the_earliest_exception_is_the_cause() -> None:
    found = find_failures(Evidence(errors=[error(0, 5.0, message="late"), error(1, 4.0, message="early")]))
    assert [failure.rank for failure in found] == [1, 0]
    assert found[0].message == "ValueError: early"


def test_a_lost_peer_is_a_consequence_even_if_it_was_seen_first() -> None:
    errors = [error(0, 10.0, "RuntimeError", GLOO), error(1, 10.2, message="the loss is bad")]
    found = find_failures(Evidence(errors=errors, exits=[end(0, 1, 10.1), end(1, 1, 10.4)]))
    assert [failure.rank for failure in found] == [1, 0]
    assert found[1].is_lost_peer


def test_a_killed_worker_is_the_cause_of_lost_peers() -> None:
    errors = [error(rank, 10.0, "DistBackendError", "NCCL error") for rank in (0, 2, 3)]
    exits = [end(1, -9, 10.05), *(end(rank, 1, 10.1) for rank in (0, 2, 3))]
    found = find_failures(Evidence(errors=errors, exits=exits))
    assert (found[0].rank, found[0].exit_code) == (1, 137)


def test_a_lost_machine_is_the_cause_of_what_the_others_say() -> None:
    lost = WorkerExit(rank=1, code=-9, time=10.4, machine="anna (10.0.0.2)")
    errors = [error(rank, 10.0, "MemberLost", "rank 1 is gone") for rank in (0, 2)]
    found = first(errors=errors, exits=[lost, end(0, 1, 10.1), end(2, 1, 10.1)])
    assert (found.rank, found.cause, found.exit_code) == (1, "lost_machine", 137)
    assert found.message == "The worker was lost with its machine, anna (10.0.0.2)."


def test_whose_machine_lacks_a_file_is_told() -> None:
    errors = [error(1, 10.0, "FileNotFoundError", "[Errno 2] No such file or directory: 'x.bin'")]
    assert first(errors=errors, nodes={0: "here", 1: "anna (10.0.0.2)"}).hint.startswith(
        "rank 1 is on anna (10.0.0.2):"
    )
    assert first(errors=errors).hint == "", "all are here"


def test_an_exception_long_after_a_lost_peer_is_another_story() -> None:
    errors = [error(0, 10.0, "RuntimeError", GLOO), error(1, 60.0)]
    assert first(errors=errors).rank == 0


def test_what_we_stopped_did_not_fail() -> None:
    exits = [end(1, 1, 10.0), end(0, -signal.SIGTERM, 10.6), end(2, -signal.SIGKILL, 12.6), end(3, 1, 11.0)]
    found = find_failures(Evidence(exits=exits, errors=[error(1, 9.9)], stopped_at=10.5))
    assert [failure.rank for failure in found] == [1]


def test_a_lone_lost_peer_is_shown_with_the_rank_that_left_early() -> None:
    exits = [end(1, 0, 10.2), end(2, 0, 10.1), end(0, 1, 10.3)]
    cause = first(exits=exits, errors=[error(0, 10.0, "RuntimeError", GLOO)])
    assert cause.why == "rank 1, 2 had ended already, without an error"
    assert "collective" in cause.hint
    handled_term = first(exits=[end(1, 0, 12.0)], errors=[error(0, 10.0, "RuntimeError", GLOO)], stopped_at=11.0)
    assert handled_term.why == ""


def test_the_loop_and_the_bootstrap_report_the_same_error_together() -> None:
    from_loop = error(1, 4.0, "UserError", "loss is nan", event_step=12, why="", hint="lower the lr", where="")
    from_bootstrap = error(1, 4.1, "UserError", "loss is nan", why="inf", hint="", where="train.py:7", exit_code=2)
    cause = first(errors=[from_loop, from_bootstrap], exits=[end(1, 2, 5.0)])
    assert (cause.step, cause.why, cause.hint, cause.where) == (12, "inf", "lower the lr", "train.py:7")
    assert (cause.time, cause.exit_code) == (4.0, 2)


def test_the_exit_code_is_that_of_the_exception_and_not_of_a_crash_after_it() -> None:
    assert first(errors=[error(0, 1.0, exit_code=1)], exits=[end(0, -signal.SIGABRT, 2.0)]).exit_code == 1
    assert first(errors=[error(0, 1.0, "SystemExit", "exit code 3")], exits=[end(0, 3, 2.0)]).exit_code == 3
    assert first(errors=[error(0, 1.0)]).exit_code == 1
    assert first(errors=[error(0, 1.0)], exits=[end(0, 0, 2.0)]).exit_code == 1


def test_an_exit_code_alone_comes_with_the_last_words() -> None:
    cause = first(exits=[end(0, 3, 1.0)], tails={0: "loading\nno such dataset\n\n"})
    assert (cause.exit_code, cause.message) == (3, "The worker ended with exit code 3.")
    assert cause.why == "its last line: no such dataset"


@pytest.mark.parametrize(
    ("kills", "why"),
    [
        (OutOfMemoryKills(cgroup=1, machine=1), "container or cgroup"),
        (OutOfMemoryKills(machine=1), "the machine had none left"),
        (OutOfMemoryKills(), "kill -9"),
    ],
)
def test_sigkill_is_explained(kills: OutOfMemoryKills, why: str) -> None:
    cause = first(exits=[end(0, -9, 1.0)], memory_kills=kills)
    assert cause.message == "The worker was killed by SIGKILL."
    assert why in cause.why
    assert "-n" in cause.hint


def test_a_crash_is_placed_in_the_users_code() -> None:
    tail = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at\n'
        '  File "/v/site-packages/torch/nn/x.py", line 3 in forward\n'
        '  File "/home/me/train.py", line 12 in crash\n'
        '  File "/home/me/train.py", line 20 in <module>\n'
    )
    cause = first(exits=[end(1, -11, 1.0)], tails={1: tail}, working_dir="/home/me")
    assert (cause.where, cause.exit_code) == ("train.py:12", 139)
    assert "SIGSEGV" in cause.message


def test_unknown_signals_have_a_number() -> None:
    assert "signal 200" in first(exits=[end(0, -200, 1.0)]).message
    assert "shoal did not" in first(exits=[end(0, -signal.SIGTERM, 1.0)]).why


@pytest.mark.parametrize(
    ("kind", "message", "is_lost"),
    [
        ("RuntimeError", GLOO, True),
        ("DistNetworkError", "The client socket has timed out", True),
        ("MemberLost", "rank 1 is gone", True),
        ("ConnectionResetError", "", True),
        ("RuntimeError", "NCCL error: remote process exited or there was a network error", True),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", False),
        ("ValueError", "the peer reviewed paper timed out", False),
        ("KeyError", "'timeout'", False),
    ],
)
def test_what_looks_like_a_lost_peer(kind: str, message: str, is_lost: bool) -> None:
    assert looks_like_lost_peer(kind, message) is is_lost


def failure(**changes: Any) -> Failure:
    return Failure(**{"rank": 1, "time": 10.0, "exit_code": 1, "message": "ValueError: bad", **changes})


@pytest.mark.parametrize(
    ("changes", "now", "expected"),
    [
        ({}, 10.1, False),  # the others may be about to say the same
        ({}, 10.4, True),
        ({"is_lost_peer": True}, 10.4, False),  # the cause may still come
        ({"is_lost_peer": True}, 11.1, True),
        ({"has_exited": False}, 11.1, False),
        ({"has_exited": False}, 12.1, True),  # it hangs
    ],
)
def test_when_the_others_are_stopped(changes: dict[str, Any], now: float, expected: bool) -> None:
    assert should_stop([failure(**changes)], now) is expected
    assert not should_stop([], now)


def test_codes_as_shells_show_them() -> None:
    assert [shell_code(code) for code in (0, 3, -9, -15)] == [0, 3, 137, 143]


def test_the_story_has_the_cause_first_and_the_rest_in_a_line_each() -> None:
    failures = [
        failure(step=4, where="train.py:7", why="it is nan", hint="lower the lr"),
        failure(rank=0, time=10.2, message="RuntimeError: gone " + "x" * 300 + "\nmore", where="train.py:9"),
        failure(rank=3, time=10.0),
        failure(rank=4, time=10.0),
    ]
    exits = [end(rank, -15, 11.0) for rank in range(6)]
    lines = tell_failures(failures, exits, "/r/logs").splitlines()
    assert lines[:4] == [
        "error: ValueError: bad",
        "   at: rank 1, step 4, train.py:7",
        "  why: it is nan",
        "   do: lower the lr",
    ]
    assert lines[4] == " also: ranks 3-4 with the same error"
    assert lines[5].startswith(" also: rank 0 (train.py:9), 0.2 s later: RuntimeError: gone xxx")
    assert len(lines[5]) < 170
    assert lines[6] == " also: ranks 2, 5 stopped by shoal, because of this"
    assert lines[7:] == [" logs: /r/logs"]


def test_a_failure_becomes_an_error_of_the_caller() -> None:
    raised = as_error(failure(step=3, where="a.py:1", traceback="Traceback ...", exit_code=137))
    assert (raised.rank, raised.step, raised.where, raised.exit_code) == (1, 3, "a.py:1", 137)
    assert raised.remote_traceback == "Traceback ..."


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([1], "rank 1"), ([2, 0, 1], "ranks 0-2"), ([0, 2, 3], "ranks 0, 2-3"), ([5, 7], "ranks 5, 7")],
)
def test_ranks_are_named_in_spans(numbers: list[int], text: str) -> None:
    assert ranks(numbers) == text

"""Groups in real processes: what only shows across process boundaries."""

import os
import signal
import socket
import time
from collections.abc import Iterator

import comm_checks
import pytest

from shoal.comm.rendezvous import open_store
from shoal.spec.errors import MemberLost, UserError
from shoal.testing.group_contract import join_impatiently, reduce_forever
from shoal.testing.ranks import ANSWER_SECONDS, Ranks, ranks_of


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with ranks_of(2, "shm") as ranks:
        yield ranks


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_long_wait_burns_no_core(pair: Ranks) -> None:
    used = pair.run(comm_checks.wait_long, seconds=2.0)
    assert used[1] < 0.05 * 2.0


def test_a_signal_wakes_a_sleeper(pair: Ranks) -> None:
    """Whoever is not woken sleeps longer than an answer may take."""
    assert pair.run(comm_checks.wake_up, rounds=100, nap_seconds=2 * ANSWER_SECONDS)[1] > 0


def test_nothing_is_put_into_dev_shm(pair: Ranks) -> None:
    before = os.listdir("/dev/shm")
    for names, mapped in pair.run(comm_checks.files_in_dev_shm):
        assert not [name for name in names if name not in before and "shoal" in name]
        assert mapped == []


def test_memory_can_be_passed_over_sockets(pair: Ranks) -> None:
    assert pair.run(comm_checks.share_by_sockets) == ["2 workers on one host, memory by sockets"] * 2


def test_a_forked_child_does_not_leave_for_its_parent(pair: Ranks) -> None:
    pair.run(comm_checks.fork_a_child)


def test_nobody_waits_for_a_call_that_others_do_not_join_when_closing() -> None:
    """gloo's destructor does, until the others have hung up; and they may wait for us."""
    with ranks_of(2, "tcp") as ranks:
        ranks.run(comm_checks.sum_twice)
        ranks.run(comm_checks.close_alone)
        assert ranks.run(comm_checks.close_after) == [[], []]


def test_where_memory_cannot_be_shared_all_ranks_use_sockets() -> None:
    with ranks_of(2, "shm") as ranks:
        for answer in ranks.run(comm_checks.fail_to_share, transport="auto"):
            assert answer.startswith(
                "tcp: the memory of another worker could not be opened (by proc, rank 1: [Errno 13]"
            )


def test_shared_memory_that_was_asked_for_but_cannot_be_had_is_an_error_everywhere() -> None:
    with ranks_of(2, "shm") as ranks:
        for error in ranks.attempt(comm_checks.fail_to_share, transport="shm"):
            assert isinstance(error, UserError)
            assert "Permission denied" in error.why


def test_a_script_may_use_its_own_process_group_at_the_same_address() -> None:
    with ranks_of(2, "shm") as ranks:
        ranks.run(comm_checks.beside_a_process_group, port=free_port(), is_hosted=False)


def test_a_store_that_someone_else_hosts_is_joined() -> None:
    port = free_port()
    hosted = open_store("127.0.0.1", port, 0, 2)
    with ranks_of(2, "shm") as ranks:
        ranks.run(comm_checks.beside_a_process_group, port=port, is_hosted=True)
    assert hosted.check(["shoal/0/process/0"])


def test_a_meeting_point_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="No meeting point"):
        open_store("127.0.0.1", free_port(), 1, 2, timeout_seconds=0.3)


def test_ranks_on_other_hosts_are_missed_when_they_do_not_answer() -> None:
    with ranks_of(3, "tcp") as ranks:
        ranks.run(comm_checks.join_as_if_far)
        ranks.start(reduce_forever, numel=200_000)
        time.sleep(0.3)
        ranks.kill(1)
        outcomes = ranks.outcomes()
        assert outcomes.pop(1) is None
        for error in outcomes:
            assert isinstance(error, MemberLost), error
            assert error.ranks == (1,)


def test_more_ranks_than_cores_and_a_death_in_the_middle() -> None:
    size = (os.cpu_count() or 1) + 2
    with ranks_of(size, "shm") as ranks:
        ranks.run(comm_checks.sum_shared, mebibytes=1, turns=20)
        ranks.start(comm_checks.sum_shared, mebibytes=1, turns=100_000)
        time.sleep(0.3)
        ranks.kill(1, signal.SIGKILL)
        killed = time.monotonic()
        outcomes = ranks.outcomes()
        assert outcomes.pop(1) is None
        for error in outcomes:
            assert isinstance(error, MemberLost), error
            assert 1 in error.ranks
            assert vars(error)["when"] - killed < 10.0


def test_a_death_while_memory_is_shared_is_a_loss() -> None:
    with ranks_of(3, "shm") as ranks:
        ranks.start(comm_checks.die_while_sharing)
        outcomes = ranks.outcomes()
        assert outcomes.pop(1) is None
        for error in outcomes:
            assert isinstance(error, MemberLost), error


def test_a_death_while_others_connect_is_a_loss() -> None:
    """They see that it is dead, and do not wait for what gloo makes of it."""
    with ranks_of(3, "tcp") as ranks:
        ranks.start(comm_checks.die_while_connecting)
        outcomes = ranks.outcomes()
        assert outcomes.pop(1) is None
        for error in outcomes:
            assert isinstance(error, MemberLost), error
            assert error.ranks == (1,)
            assert error.why == "the process ended without leaving the group"


def test_waiting_for_a_part_of_a_sum_has_a_limit() -> None:
    """Of a call that was made before, so that nobody is asked beforehand whether it makes the same."""
    with ranks_of(2, "tcp") as ranks:
        ranks.run(join_impatiently, generation=1)
        assert ranks.run(comm_checks.scatter, times=2) == [3000.0, 3000.0]
        ranks.kill(1, signal.SIGSTOP)
        ranks.start(comm_checks.scatter, times=1)
        (error,) = ranks.outcomes([0])
        assert isinstance(error, MemberLost), error
        assert error.ranks == (1,)

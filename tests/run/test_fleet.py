"""Agents and launchers under fire, all on this machine: who dies takes nobody along, and nobody stays behind."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from launching import AGENT, LEASE

from shoal.engine import fleet as fleets
from shoal.engine import guard as guards
from shoal.engine.clock import ClockOffset
from shoal.engine.door import MAX_GREETINGS
from shoal.engine.engine import CONTROL_FD, Listener
from shoal.engine.entry import command_of
from shoal.engine.fleet import Fleet
from shoal.engine.hosts import Host, HostsGround
from shoal.spec.errors import UserError
from shoal.spec.job import WorkerExit, WorkerSpec
from shoal.spec.system import SystemSample
from shoal.testing.engine_contract import shell, wait_for_exits, wait_for_file

BUSY = "trap '' TERM; while :; do echo $$ >> beats$RANK; sleep 0.02; done"

Make = Callable[..., Fleet]


def be_agent(first: str = "") -> list[str]:
    """The command of an agent. It starts one that outlives it, as mpirun does."""
    agent = [sys.executable, "-c", f"{AGENT}\n{first}\nraise SystemExit(agent.main())"]
    return ["/bin/sh", "-c", 'exec 3<&0; "$@" <&3 & wait', "sh", *agent]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes engines with agents on hosts `a` and `b`, two slots each; `first` is what agents do first, by host."""
    monkeypatch.setattr("shoal.engine.agents.SILENT_SECONDS", LEASE + 1.0)
    made: list[Fleet] = []

    def make(listener: Listener | None = None, **first: str) -> Fleet:
        hosts = [Host(name=name, num_slots=2) for name in ("a", "b")]
        ground = HostsGround(hosts, "127.0.0.1", lambda host, _: be_agent(first.get(host, "")))
        made.append(Fleet(ground, listener, num_slots=4))
        return made[-1]

    yield make
    for each in made:
        each.stop(0.0)
        each.close()


def wait_until(condition: Callable[[], object], engine: Fleet, seconds: float = 30.0) -> list[WorkerExit]:
    """Poll until that is so; what ended meanwhile."""
    exits: list[WorkerExit] = []
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        exits.extend(engine.poll(0.05))
    return exits


def agent_of(pid: int) -> psutil.Process:
    """The agent that started a worker."""
    parent = psutil.Process(pid).parent()
    assert parent is not None
    return parent


def is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def start_busy(engine: Fleet, folder: Path, num_workers: int = 4) -> dict[int, int]:
    """Workers that write as long as they live and do not listen, two with each agent; their processes."""
    engine.start([shell(folder, rank, BUSY) for rank in range(num_workers)])
    for rank in range(num_workers):
        wait_for_file(folder / f"beats{rank}")
    return dict(engine.pids)


def test_workers_of_a_killed_agent_are_dead_before_that_is_said(make: Make, tmp_path: Path) -> None:
    engine = make()
    pids = start_busy(engine, tmp_path)
    agent_of(pids[2]).kill()
    exits = wait_for_exits(engine, 2)
    assert is_dead(pids[2])
    assert is_dead(pids[3])
    assert [(end.rank, end.code) for end in exits] == [(2, -9), (3, -9)]
    assert engine.room == 2
    assert sorted(engine.pids) == [0, 1]
    # Another agent comes, and with it the same ranks.
    assert wait_until(lambda: engine.room == 4, engine) == []
    engine.start([shell(tmp_path, 2, "exit 5")])
    assert [(end.rank, end.code) for end in wait_for_exits(engine, 1)] == [(2, 5)]
    assert not is_dead(pids[0])


def test_workers_save_when_they_are_told_to_end_though_another_machine_is_lost(make: Make, tmp_path: Path) -> None:
    engine = make()
    saves = "trap 'sleep 2; exit 7' TERM; echo > ready$RANK; while :; do sleep 0.02; done"
    engine.start([shell(tmp_path, rank, saves) for rank in range(4)])
    for rank in range(4):
        wait_for_file(tmp_path / f"ready{rank}")
    agent_of(engine.pids[2]).kill()
    engine.stop(20.0)
    assert {end.rank: end.code for end in engine.poll()} == {0: 7, 1: 7, 2: -9, 3: -9}


def test_all_machines_are_lost_and_come_back(make: Make, tmp_path: Path) -> None:
    engine = make()
    pids = start_busy(engine, tmp_path)
    for rank in (0, 2):
        agent_of(pids[rank]).kill()
    assert len(wait_for_exits(engine, 4)) == 4
    assert engine.room == 0
    wait_until(lambda: engine.room == 4, engine)


def test_a_guard_that_begins_after_its_launcher_died_knows_whom_to_end() -> None:
    worker = subprocess.Popen(["/bin/sh", "-c", "trap '' TERM; while :; do sleep 1; done"], start_new_session=True)
    guard = [sys.executable, "-I", "-S", guards.__file__, "1", "0"]
    subprocess.run(guard, input=f"+{worker.pid}\n".encode(), timeout=20, check=True)
    assert worker.wait(20) == -signal.SIGKILL


def test_a_stopped_agent_has_no_workers_when_they_count_as_dead(make: Make, tmp_path: Path) -> None:
    """And when it goes on, it does nothing to those who took their place."""
    engine = make()
    engine.seat(range(4), 4)
    engine.start([shell(tmp_path, rank, BUSY) for rank in (0, 1, 2)])
    for rank in range(3):
        wait_for_file(tmp_path / f"beats{rank}")
    engine.kill(0)
    wait_for_exits(engine, 1)
    pids = dict(engine.pids)
    agent = agent_of(pids[2])
    agent.suspend()
    try:
        (end,) = wait_for_exits(engine, 1)
        assert (end.rank, end.code) == (2, -9)
        assert is_dead(pids[2])
        (tmp_path / "beats2").unlink()
        engine.start([shell(tmp_path, 2, BUSY)])
    finally:
        agent.resume()
    wait_for_file(tmp_path / "beats2")
    agent.wait(20)
    size = (tmp_path / "beats2").stat().st_size
    assert wait_until(lambda: (tmp_path / "beats2").stat().st_size > size + 100, engine) == []
    assert agent_of(engine.pids[2]).pid == agent_of(pids[1]).pid


def test_an_agent_that_was_stopped_for_a_moment_goes_on(make: Make, tmp_path: Path) -> None:
    engine = make()
    pids = start_busy(engine, tmp_path, 3)
    agent = agent_of(pids[2])
    agent.suspend()
    deadline = time.monotonic() + LEASE / 2
    while time.monotonic() < deadline:
        assert engine.poll(0.05) == []
    agent.resume()
    engine.kill(2)
    assert [end.rank for end in wait_for_exits(engine, 1)] == [2]
    assert engine.room == 4


def test_an_agent_does_not_wait_for_a_launcher_that_is_cut_off(make: Make, tmp_path: Path) -> None:
    """Nothing comes from it, not even an end: its workers are ended after the lease."""
    engine = make()
    pids = start_busy(engine, tmp_path, 1)
    engine._agents._is_closed.set()  # no beats from here on
    wait_until(lambda: is_dead(pids[0]), engine)
    assert [end.code for end in wait_for_exits(engine, 1)] == [-9]


def test_one_agent_is_being_lost_while_another_worker_is_started(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.engine.agents.ORPHANED_SECONDS", 2.0)
    engine = make()
    pids = start_busy(engine, tmp_path)
    engine.kill(0)
    wait_for_exits(engine, 1)
    agent_of(pids[2]).kill()
    wait_until(lambda: engine.room == 2, engine)
    assert sorted(engine.pids) == [1, 2, 3]
    seat = engine.seat([0], 1)[0]
    assert (seat.node, seat.local_rank) == ("a", 0)
    assert engine.seat([2], 1)[2].node == "b"
    engine.start([shell(tmp_path, 0, "exit 4")])
    ended = {end.rank: end.code for end in wait_for_exits(engine, 3)}
    assert ended == {0: 4, 2: -9, 3: -9}


def test_nothing_is_started_where_a_log_cannot_be_kept(make: Make, tmp_path: Path) -> None:
    engine = make()
    engine.seat(range(2), 2)
    good = shell(tmp_path, 0, "echo up > up0; sleep 60")
    bad = WorkerSpec(
        rank=1, command=good.command, env={}, working_dir=str(tmp_path), log_path=str(tmp_path / "no" / "1.log")
    )
    with pytest.raises(UserError, match="Worker 1 could not be started") as caught:
        engine.start([good, bad])
    assert "No such file" in caught.value.why
    assert engine.pids == {}
    engine.start([shell(tmp_path, 2, "exit 0")])
    wait_for_exits(engine, 1)
    assert not (tmp_path / "up0").exists()


def test_a_folder_that_is_not_there_is_named(make: Make, tmp_path: Path) -> None:
    spec = shell(tmp_path, 0, "exit 0")
    missing = WorkerSpec(
        rank=0, command=spec.command, env={}, working_dir=str(tmp_path / "gone"), log_path=spec.log_path
    )
    engine = make()
    with pytest.raises(UserError) as caught:
        engine.start([missing, shell(tmp_path, 1, "sleep 60")])
    assert caught.value.why == f"there is no folder {tmp_path / 'gone'} on that machine"
    assert engine.pids == {}
    assert engine.poll() == []


def test_a_script_that_is_not_there_is_named_before_anybody_starts(make: Make, tmp_path: Path) -> None:
    spec = shell(tmp_path, 0, "exit 0")
    command = command_of(sys.executable, 0, ("script", "train.py"))
    missing = WorkerSpec(rank=0, command=command, env={}, working_dir=str(tmp_path), log_path=spec.log_path)
    engine = make()
    with pytest.raises(UserError) as caught:
        engine.start([missing, shell(tmp_path, 1, "sleep 60")])
    assert caught.value.why == f"there is no script {tmp_path / 'train.py'} on that machine"
    assert engine.pids == {}


def test_a_machine_with_another_torch_is_not_taken(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "versions", lambda: {**fleets_versions, "torch": "1.0"})
    with pytest.raises(UserError, match=r"has torch .* and the launcher has 1\.0"):
        make().start([shell(tmp_path, 0, "exit 0")])


fleets_versions = fleets.versions()


def test_a_machine_that_comes_back_with_another_version_ends_nobody(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[str] = []
    engine = make(Listener(problem=problems.append))
    pids = start_busy(engine, tmp_path)
    monkeypatch.setattr(fleets, "versions", lambda: {**fleets_versions, "torch": "1.0"})
    agent_of(pids[2]).kill()
    exits = wait_until(lambda: any("takes no part" in text for text in problems), engine)
    assert [end.rank for end in exits] == [2, 3]
    assert engine.room == 2
    assert not is_dead(pids[0])


def test_what_workers_say_is_told_within_poll_only(make: Make, tmp_path: Path) -> None:
    """One agent is slow to start its worker. What that of the other says meanwhile is not lost, and not early."""
    slow = "import time\nstart = agent.Agent._start\n"
    slow += "agent.Agent._start = lambda *args: (time.sleep(1.5), start(*args))"
    told: list[tuple[str, bool]] = []
    is_polling = False
    listener = Listener(
        output=lambda rank, data: told.append((f"{rank}{data.decode()}", is_polling)),
        control=lambda rank, line: told.append((f"{rank}{line.decode()}", is_polling)),
    )
    engine = make(listener, b=slow)
    engine.seat(range(3), 3)
    program = "echo out; echo ready > /dev/fd/$0; exit 3"
    specs = [shell(tmp_path, rank, "") for rank in range(3)]
    commands = [("/bin/sh", "-c", program, CONTROL_FD)] * 3
    engine.start(
        [
            WorkerSpec(rank=s.rank, command=c, env=s.env, working_dir=s.working_dir, log_path=s.log_path)
            for s, c in zip(specs, commands, strict=True)
        ]
    )
    assert told == []
    assert sorted(engine.pids) == [0, 1, 2]
    is_polling = True
    assert [end.code for end in wait_for_exits(engine, 3)] == [3, 3, 3]
    assert all(is_told for _, is_told in told)
    assert {text for text, _ in told} == {f"{rank}{said}" for rank in range(3) for said in ("out\n", "ready")}


def test_strangers_keep_nobody_waiting(make: Make, tmp_path: Path) -> None:
    """Some say nothing, some say it slowly, some speak of other things; then they are told to go."""
    problems: list[str] = []
    engine = make(Listener(problem=problems.append))
    start_busy(engine, tmp_path, 1)
    assert engine._agents._door is not None
    place = ("127.0.0.1", engine._agents._door.invitation.port)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(place)) for _ in range(60)]
        for number, stranger in enumerate(strangers):
            stranger.sendall((b"", b"shoal-agent-1\n", b"GET / HTTP/1.0\r\n\r\n")[number % 3])
        engine.start([shell(tmp_path, 1, "exit 6")])
        assert [(end.rank, end.code) for end in wait_for_exits(engine, 1)] == [(1, 6)]
        wait_until(lambda: problems and len(engine._agents._door._greetings) == 40, engine)
        # On a busy machine people are told that machines are waited for, too.
        assert [each for each in problems if not each.startswith("waiting for")] == [
            "somebody who connected was turned away: it is no agent of this version"
        ]
        more = [stack.enter_context(socket.create_connection(place)) for _ in range(MAX_GREETINGS)]
        wait_until(lambda: len(engine._agents._door._greetings) == MAX_GREETINGS, engine)
        wait_until(lambda: is_closed(strangers[0]), engine)
        assert not is_closed(more[-1])
        engine.start([shell(tmp_path, 1, "exit 7")])
        assert [end.code for end in wait_for_exits(engine, 1)] == [7]


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while data := connection.recv(1 << 16):
            assert data.startswith(b"shoal-agent-1\n")
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def test_a_worker_that_prints_without_end_costs_bounded_memory(make: Make, tmp_path: Path) -> None:
    """200 MB pass through agent and launcher in a few seconds; neither keeps more than some megabytes of them."""
    engine = make()
    program = "import sys\nfor _ in range(3200): sys.stdout.buffer.write(bytes(65536))"
    engine.start([shell(tmp_path, 0, f'"{sys.executable}" -c "{program}"')])
    agent, launcher = agent_of(engine.pids[0]), psutil.Process()
    before = launcher.memory_info().rss
    most_here = most_there = 0
    exits: list[WorkerExit] = []
    deadline = time.monotonic() + 90
    while not exits and time.monotonic() < deadline:
        exits.extend(engine.poll(0.1))
        most_here = max(most_here, launcher.memory_info().rss - before)
        most_there = max(most_there, agent.memory_info().rss)
    assert [end.code for end in exits] == [0]
    parts = [*tmp_path.glob("0.log*")]
    assert sum(part.stat().st_size for part in parts) == 3200 * 65536
    for part in parts:
        part.unlink()
    print(f"launcher: {most_here >> 20} MB more, agent: {most_there >> 20} MB")
    assert most_here < 64 << 20
    assert most_there < 128 << 20


ORPHAN = """
import time
from shoal.engine import worker
from shoal.engine.env import WorkerFacts
from shoal.train.ending import Ending
worker.end_with_parent()
ending = Ending(WorkerFacts(control_fd=1, has_agent={has_agent}))
ending.is_stepping = True
print("stepping", flush=True)
while not ending.is_asked:
    time.sleep(0.01)
print("asks all others to end", flush=True)
"""
PARENT = """
import subprocess, sys, threading
def start():
    global child
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
thread = threading.Thread(target=start)
thread.start()
thread.join()
print(child.stdout.read().strip(), child.wait())
"""


@pytest.mark.parametrize(("has_agent", "said"), [(True, "-9"), (False, "asks all others to end 0")])
def test_who_has_lost_its_agent_does_not_end_the_run_for_all_others(has_agent: bool, said: str) -> None:
    """With the launcher gone the run is over; with an agent gone, only one machine.

    The kernel tells a worker when the thread that started it is gone: others of a process that is killed may still
    be there, so that it seems to live.
    """
    command = [sys.executable, "-c", PARENT, ORPHAN.format(has_agent=has_agent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == said


def test_clocks_of_machines_are_measured_while_they_beat(make: Make, tmp_path: Path) -> None:
    """One agent lives two minutes ahead of us, which it does not know."""
    told: dict[str, ClockOffset] = {}
    ahead = "import time; true_time = time.time; time.time = lambda: true_time() + 120.0"
    engine = make(Listener(clock=lambda offset: told.setdefault(offset.node, offset)), b=ahead)
    start_busy(engine, tmp_path)
    wait_until(lambda: len(told) == 2, engine)
    assert (told["a"].ranks, told["b"].ranks) == ((0, 1), (2, 3))
    for node, offset in (("a", 0.0), ("b", 120.0)):
        assert abs(told[node].offset_seconds - offset) <= told[node].error_seconds + 0.001, told[node]


def test_every_machine_says_what_its_workers_do(make: Make, tmp_path: Path) -> None:
    samples: list[SystemSample] = []
    engine = make(Listener(system=samples.append))
    pids = start_busy(engine, tmp_path)

    def is_told() -> bool:
        return {sample.node for sample in samples if len(sample.workers) == 2} == {"a", "b"}

    wait_until(is_told, engine)
    for sample in samples:
        assert {rank: pids[rank] for rank in sample.workers} == {rank: w.pid for rank, w in sample.workers.items()}
        assert set(sample.workers) <= ({0, 1} if sample.node == "a" else {2, 3})
    assert samples[-1].memory_total > 0

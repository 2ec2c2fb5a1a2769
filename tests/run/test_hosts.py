"""Hosts that mpirun or ssh reach: what is told of those that do not answer, and `shoal run --hosts` under fire."""

import signal
import time
from pathlib import Path

import psutil
import pytest
from launching import AGENT, LEASE, Box, box, mpirun_without_mpi

from shoal.engine.agent import CONNECTED
from shoal.engine.hosts import Host, HostsGround, first_words, parse_hosts
from shoal.engine.mpi import make_ground
from shoal.engine.native import find_py_spy
from shoal.engine.wire import Invitation
from shoal.spec.errors import UserError
from shoal.testing import rigs

__all__ = ["box"]


def test_a_host_that_fails_for_a_while_is_asked_again() -> None:
    """Also where it is one of those without which the run cannot go on."""
    failing = ["/bin/sh", "-c", "echo no route >&2; exit 9"]
    ground = HostsGround([Host(name="a")], "127.0.0.1", lambda host, _: failing)
    ground.open(Invitation.new("127.0.0.1", 9), 1, 1)
    try:
        for _ in range(2):
            with pytest.raises(UserError, match="No agent could be started on a") as caught:
                look_for_long(ground)
            assert caught.value.why == "no route"
    finally:
        ground.close()


def test_a_command_that_hangs_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.engine.hosts.HUNG_SECONDS", 0.3)
    commands = [["/bin/sleep", "600"], ["/bin/sh", "-c", f"echo {CONNECTED}; exec sleep 600"]]
    ground = HostsGround([Host(name="a")], "127.0.0.1", lambda host, _: commands.pop(0))
    ground.open(Invitation.new("127.0.0.1", 9), 1, 1)
    try:
        deadline = time.monotonic() + 20
        while commands and time.monotonic() < deadline:
            ground.look()
            time.sleep(0.02)
        assert not commands
        time.sleep(0.5)
        ground.look()
        assert ground.waiting_for(()) == "agents are starting", "this one has come"
    finally:
        ground.close()


def test_who_is_not_heard_of_is_named_in_time_unless_the_run_has_begun() -> None:
    commands = {"a": f"echo {CONNECTED}; exec sleep 600", "b": "exec sleep 600"}
    hosts = [Host(name="a"), Host(name="b")]
    ground = HostsGround(hosts, "127.0.0.1", lambda host, _: ["/bin/sh", "-c", commands[host]], 0.5)
    ground.open(Invitation.new("127.0.0.1", 9), 2, 2)
    try:
        with pytest.raises(UserError, match=r"No agent came from b within 0\.5 s") as caught:
            look_for_long(ground)
        assert "a firewall keeps it from 127.0.0.1, port 9 (the launcher)" in caught.value.why
    finally:
        ground.close()
    ground = HostsGround(hosts, "127.0.0.1", lambda host, _: ["/bin/sh", "-c", commands[host]], 0.5)
    ground.open(Invitation.new("127.0.0.1", 9), 2, 1)
    try:
        time.sleep(0.6)
        assert [told.message for told in ground.look()] == ["No agent came from b within 0.5 s."]
    finally:
        ground.close()


def test_pages_that_begin_with_a_line_have_a_reason_too() -> None:
    line = "-" * 60
    assert first_words(f"{line}\nIt was unable\nto connect.\n{line}\nor so\n{line}") == "It was unable\nto connect."
    assert first_words(f"ssh: no route\n{line}\npages") == "ssh: no route"
    assert first_words("") == ""


@rigs.needs("mpirun")
def test_of_pages_from_mpirun_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.engine.hosts.AGENT", ("-m", "shoal.engine.nothing"))
    ground = make_ground("localhost:1", {})
    ground.open(Invitation.new("127.0.0.1", 9), 1, 1)
    try:
        with pytest.raises(UserError) as caught:
            look_for_long(ground)
    finally:
        ground.close()
    assert caught.value.why.endswith("No module named shoal.engine.nothing")
    assert len(caught.value.why.splitlines()) <= 2


def look_for_long(ground: HostsGround) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        ground.look()
        time.sleep(0.02)


# Mistakes.


@pytest.mark.parametrize("text", ["", ",", "a:", "a:x", "a:0", "a:-1", ":3", "a:2,,b", "a:1.5", "a b:0"])
def test_nonsense_for_hosts_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="not a list of hosts"):
        parse_hosts(text)


def test_a_host_is_named_once() -> None:
    with pytest.raises(UserError, match="twice"):
        parse_hosts("a:1,b,a:2")
    assert parse_hosts(" a , b:3") == [Host(name="a"), Host(name="b", num_slots=3)]


def test_mpirun_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="mpirun was not found") as caught:
        make_ground("a:1", {})
    assert "apt install" in caught.value.hint


# With `shoal run`. In place of mpirun is a program that starts its command here.


@pytest.fixture
def hosts(box: Box) -> Box:
    """A box whose runs find a `mpirun` without MPI, and agents with a short lease."""
    mpirun_without_mpi(box, AGENT)
    return box


RUN = ("run", "--engine", "mpi", "--hosts", "localhost:2")
WRITING = """
    import os, time
    open(f"up{os.environ['RANK']}", "w").write(str(os.getpid()))
    while not os.path.exists("end"):
        time.sleep(0.02)
    print("bye", os.environ["RANK"])
"""


def pids_in(box: Box) -> list[int]:
    return [int((box.folder / f"up{rank}").read_text()) for rank in range(2)]


def test_a_killed_launcher_leaves_nobody_behind(hosts: Box) -> None:
    hosts.write("train.py", WRITING)
    launcher = hosts.start(*RUN, "train.py")
    hosts.wait_for_files("up0", "up1")
    launcher.kill()
    launcher.communicate(timeout=20)
    hosts.wait_for_peace()


def test_a_launcher_that_was_stopped_for_a_moment_loses_nobody(hosts: Box) -> None:
    hosts.write("train.py", WRITING)
    launcher = hosts.start(*RUN, "train.py")
    hosts.wait_for_files("up0", "up1")
    launcher.send_signal(signal.SIGSTOP)
    time.sleep(LEASE / 2)
    launcher.send_signal(signal.SIGCONT)
    time.sleep(0.2)
    hosts.write("end", "")
    assert "lost" not in launcher.communicate(timeout=60)[1]
    assert launcher.returncode == 0


def test_ctrl_z_pauses_the_workers_for_as_long_as_one_likes(hosts: Box) -> None:
    hosts.write("train.py", WRITING)
    launcher = hosts.start(*RUN, "train.py")
    hosts.wait_for_files("up0", "up1")
    workers = [psutil.Process(pid) for pid in pids_in(hosts)]
    launcher.send_signal(signal.SIGTSTP)
    hosts.wait_for(lambda: all(worker.status() == psutil.STATUS_STOPPED for worker in workers))
    hosts.wait_for(lambda: psutil.Process(launcher.pid).status() == psutil.STATUS_STOPPED)
    time.sleep(LEASE + 0.5)
    launcher.send_signal(signal.SIGCONT)
    hosts.write("end", "")
    out, problems = launcher.communicate(timeout=60)
    assert "lost" not in problems
    assert sorted(out.split()) == ["0", "1", "[0]", "[1]", "bye", "bye"]
    assert launcher.returncode == 0


def test_output_that_nobody_reads_costs_nobody_its_life(hosts: Box) -> None:
    """A launcher that is held by its terminal, or by `less`, for longer than the lease."""
    hosts.write(
        "train.py",
        """
        import os, time
        for number in range(20000):
            print(number, os.environ["RANK"] * 100)
        open(f"up{os.environ['RANK']}", "w").write("x")
        """,
    )
    launcher = hosts.start(*RUN, "train.py")
    time.sleep(LEASE + 3.0)
    assert launcher.poll() is None
    out, problems = launcher.communicate(timeout=60)
    assert "lost" not in problems
    assert launcher.returncode == 0
    assert out.count(" 19999 ") == 2
    assert all(len(hosts.log(rank).splitlines()) == 20000 for rank in range(2))


def test_ctrl_c_while_machines_are_waited_for(hosts: Box) -> None:
    hosts.write("bin/mpirun", "#!/bin/sh\nexec sleep 600\n")
    hosts.write("train.py", WRITING)
    launcher = hosts.start(*RUN, "train.py")
    assert launcher.stderr is not None
    assert "waiting for machines: agents are starting" in launcher.stderr.readline()
    launcher.send_signal(signal.SIGINT)
    _, problems = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert "Traceback" not in problems


def test_a_second_ctrl_c_does_not_wait(hosts: Box) -> None:
    hosts.write(
        "train.py",
        """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"up{os.environ['RANK']}", "w").write("x")
        time.sleep(600)
        """,
    )
    launcher = hosts.start(*RUN, "train.py")
    hosts.wait_for_files("up0", "up1")
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.4)
    launcher.send_signal(signal.SIGINT)
    _, problems = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert "Traceback" not in problems


def test_a_run_on_hosts_can_be_asked_and_told(hosts: Box) -> None:
    hosts.write("train.py", WRITING)
    launcher = hosts.start(*RUN, "--name", "r", "train.py")
    hosts.wait_for_files("up0", "up1")
    stacks = hosts.run("stacks", "r")
    assert stacks.returncode == 0, stacks.stderr
    assert stacks.stdout.count("train.py") >= 2
    native = hosts.run("stacks", "r", "--native")
    assert native.returncode == (0 if find_py_spy() else 2), native.stderr
    if find_py_spy():  # the agents ran it, who are not the launcher
        shown = native.stdout.split("--- rank ")[1:]
        assert len(shown) == 2
        assert all(("train.py" in text and "Thread" in text) or "may not look into" in text for text in shown)
    else:
        assert "on each machine of the run" in native.stderr
    resized = hosts.run("resize", "r", "-n", "1")
    assert "not elastic" in resized.stderr
    killed = hosts.run("kill", "r", "--rank", "1")
    assert killed.returncode == 0, killed.stderr
    _, problems = launcher.communicate(timeout=60)
    assert launcher.returncode == 137
    assert "SIGKILL" in problems


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--hosts", "localhost:1", "-n", "2", "train.py"), "The hosts have 1 slot, and 2 workers are needed"),
        (("--hosts", "no-such-host.invalid:2", "-n", "2", "train.py"), "no way to the host 'no-such-host.invalid'"),
        (("--hosts", "localhost:2", "-n", "2", "-o", "engine.mpirun='x", "train.py"), "engine.mpirun is"),
        (("--hosts", "localhost:x", "-n", "2", "train.py"), "not a list of hosts"),
        (("--hosts", "localhost:2", "-n", "2", "nothing.py"), "nothing.py"),
    ],
)
def test_mistakes_are_told_in_a_few_lines(hosts: Box, args: tuple[str, ...], said: str) -> None:
    hosts.write("train.py", WRITING)
    ended = hosts.run("run", "--engine", "mpi", *args)
    assert ended.returncode not in (0, None)
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_host_on_which_no_agent_starts_is_named(hosts: Box) -> None:
    hosts.write("bin/mpirun", "#!/bin/sh\necho 'ssh: connect to host b: refused' >&2; exit 3\n")
    hosts.write("train.py", WRITING)
    ended = hosts.run(*RUN, "train.py")
    assert ended.returncode != 0
    assert "No agent could be started on localhost." in ended.stderr
    assert "ssh: connect to host b: refused" in ended.stderr
    assert "Traceback" not in ended.stderr

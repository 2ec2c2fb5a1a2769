"""However a run is ended, all of it ends, in time."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from launching import IN_TIME, SHOAL, Box, box

__all__ = ["box"]

SLEEP = """
    import os, time
    open(f"up{os.environ['RANK']}", "w").close()
    time.sleep(60)
"""
# Ignores the polite way, and has children and grandchildren that do the same.
STUBBORN = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); open('{}', 'w').close(); time.sleep(60)"
    rank = os.environ["RANK"]
    subprocess.Popen([sys.executable, "-c", code.format("child" + rank)])
    while not os.path.exists("child" + rank):
        time.sleep(0.01)
    open("up" + rank, "w").close()
    time.sleep(60)
"""


def start_two(box: Box, source: str, **options: object) -> subprocess.Popen[str]:
    box.write("work.py", source)
    launcher = box.start("run", "-n", "2", "work.py", **options)
    box.wait_for_files("up0", "up1")
    return launcher


def wait_for_guard(box: Box) -> None:
    """It hears of workers when all are started, and then they are written down."""
    journal = box.only_run() / "journal.jsonl"
    box.wait_for(lambda: journal.exists() and journal.read_text().count('"worker_started"') == 2)


def workers_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(launcher.pid).children()
    return [child for child in children if "worker.py" in " ".join(child.cmdline())]


def test_killing_the_launcher_ends_its_workers(box: Box) -> None:
    launcher = start_two(box, SLEEP)
    launcher.kill()
    box.wait_for_peace()
    launcher.communicate()


def test_killing_the_launcher_ends_stubborn_workers_and_their_children(box: Box) -> None:
    launcher = start_two(box, STUBBORN)
    wait_for_guard(box)
    assert len(box.pids()) >= 6
    launcher.kill()
    launcher.communicate()
    box.wait_for_peace()


def test_killing_the_launcher_ends_a_stopped_worker(box: Box) -> None:
    launcher = start_two(box, SLEEP)
    wait_for_guard(box)
    for worker in workers_of(launcher):
        worker.send_signal(signal.SIGSTOP)
    launcher.kill()
    launcher.communicate()
    box.wait_for_peace()


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM"), (signal.SIGHUP, 129, "closed terminal")],
)
def test_a_signal_ends_the_run(box: Box, number: int, code: int, words: str) -> None:
    launcher = start_two(box, SLEEP)
    launcher.send_signal(number)
    _, told = launcher.communicate(timeout=IN_TIME)
    assert launcher.returncode == code
    assert told.startswith("shoal: stopped by ")
    assert words in told
    assert box.pids() == []
    facts = box.facts()
    assert (facts["status"], facts["exit_code"]) == ("stopped", code)
    assert box.events()[-1]["kind"] == "run_ended"


def test_ctrl_c_ends_stubborn_and_stopped_workers_in_time(box: Box) -> None:
    launcher = start_two(box, STUBBORN)
    workers_of(launcher)[0].send_signal(signal.SIGSTOP)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=IN_TIME)
    assert launcher.returncode == 130
    assert box.pids() == []


def test_a_second_ctrl_c_kills_at_once(box: Box) -> None:
    """After the first alone, workers would have a minute to end."""
    box.write("sitecustomize.py", "import shoal.watch; shoal.watch.GRACE_SECONDS = 60.0")
    box.env["PYTHONPATH"] = str(box.folder)
    ignore, note = "signal.signal(signal.SIGTERM, signal.SIG_IGN)", "lambda *_: open('told' + rank, 'w').close()"
    assert ignore in STUBBORN
    launcher = start_two(box, STUBBORN.replace(ignore, f"signal.signal(signal.SIGTERM, {note})"))
    launcher.send_signal(signal.SIGINT)
    box.wait_for_files("told0", "told1")
    time.sleep(0.4)  # sooner, it would count as the same
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=IN_TIME)
    assert launcher.returncode == 130
    assert box.pids() == []


def test_a_worker_may_save_before_it_ends(box: Box) -> None:
    source = """
        import os, signal, sys, time
        def save(*_):
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        open(f"up{os.environ['RANK']}", "w").close()
        time.sleep(60)
    """
    launcher = start_two(box, source)
    launcher.send_signal(signal.SIGTERM)
    shown, _ = launcher.communicate(timeout=IN_TIME)
    assert shown.count("saved") >= 1
    assert box.log(0) == box.log(1) == "saved\n"
    assert launcher.returncode == 143


def test_signals_that_were_ignored_stay_ignored(box: Box) -> None:
    source = """
        import os, time
        open(f"up{os.environ['RANK']}", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
    """
    launcher = start_two(box, source, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    launcher.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    (box.folder / "go").touch()
    launcher.communicate(timeout=IN_TIME)
    assert launcher.returncode == 0


def test_ctrl_z_pauses_the_workers_too(box: Box) -> None:
    source = """
        import os, time
        open(f"up{os.environ['RANK']}", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
    """
    launcher = start_two(box, source)
    workers = workers_of(launcher)
    launcher.send_signal(signal.SIGTSTP)
    box.wait_for(lambda: {worker.status() for worker in workers} == {psutil.STATUS_STOPPED})
    box.wait_for(lambda: psutil.Process(launcher.pid).status() == psutil.STATUS_STOPPED)
    launcher.send_signal(signal.SIGCONT)
    box.wait_for(lambda: psutil.STATUS_STOPPED not in {worker.status() for worker in workers})
    (box.folder / "go").touch()
    launcher.communicate(timeout=IN_TIME)
    assert launcher.returncode == 0


def read_from(fd: int, needle: bytes, seconds: float = 20.0) -> bytes:
    data, deadline = b"", time.monotonic() + seconds
    while needle not in data and time.monotonic() < deadline:
        if select.select([fd], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):
                data += os.read(fd, 65536)
    return data


def start_on_terminal(box: Box) -> tuple[int, int]:
    """The launcher in a session with a terminal of its own, as a shell would start it."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(box.folder)
        os.execve(SHOAL[0], [*SHOAL, "run", "-n", "2", "work.py"], box.env)
    return pid, terminal


def wait_for_process(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# forkpty in a process with threads (pytest plugins) is noted by Python 3.12; the child executes at once.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_closed_terminal_ends_the_run(box: Box) -> None:
    box.write("work.py", SLEEP)
    pid, terminal = start_on_terminal(box)
    box.wait_for_files("up0", "up1")
    os.close(terminal)
    box.wait_for_peace()
    assert wait_for_process(pid) == 129


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_ctrl_c_on_a_terminal_leaves_it_as_it_was(box: Box) -> None:
    import termios

    box.write("work.py", SLEEP + "    print('never')\n")
    pid, terminal = start_on_terminal(box)
    before = termios.tcgetattr(terminal)
    box.wait_for_files("up0", "up1")
    os.write(terminal, b"\x03")
    shown = read_from(terminal, b"logs\r\n")
    assert wait_for_process(pid) == 130
    assert b"stopped by Ctrl-C" in shown
    assert termios.tcgetattr(terminal) == before
    assert b"\x1b[?" not in shown  # no mode of the terminal was changed
    os.close(terminal)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_ctrl_c_works_while_the_terminal_is_held(box: Box) -> None:
    """Nobody reads what is printed, so the launcher hangs in a write."""
    box.write("work.py", SLEEP.replace("time.sleep(60)", "[print('x' * 100) for _ in range(10**9)]"))
    pid, terminal = start_on_terminal(box)
    box.wait_for_files("up0", "up1")
    time.sleep(0.5)
    os.kill(pid, signal.SIGINT)
    box.wait_for(lambda: len(box.pids()) <= 1, IN_TIME)
    read_from(terminal, b"logs in")
    assert wait_for_process(pid) == 130
    os.close(terminal)


def test_shared_memory_of_a_killed_worker_is_removed(box: Box) -> None:
    source = """
        import os, signal, time
        from multiprocessing.shared_memory import SharedMemory
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        memory = SharedMemory(create=True, size=4096)
        with open(f"name{os.environ['RANK']}", "w") as file:
            file.write(memory.name)
        open(f"up{os.environ['RANK']}", "w").close()
        time.sleep(60)
    """
    launcher = start_two(box, source)
    names = [(box.folder / f"name{rank}").read_text() for rank in range(2)]
    assert all(Path("/dev/shm", name).exists() for name in names)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=IN_TIME)
    assert not any(Path("/dev/shm", name).exists() for name in names)


def test_no_descriptor_is_inherited_by_accident(box: Box) -> None:
    source = """
        import os
        print(sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")))
    """
    box.write("fds.py", source)
    shown = eval(box.run("run", "fds.py").stdout)
    # Standard streams, the control pipe and its copy, and the file for stacks.
    assert len(shown) == 6, shown


def test_the_guard_holds_nothing_and_does_not_stay(box: Box) -> None:
    source = """
        import os, time
        open(f"up{os.environ['RANK']}", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
    """
    launcher = start_two(box, source)
    children = psutil.Process(launcher.pid).children
    (guard,) = box.wait_for(lambda: [child for child in children() if "guard.py" in " ".join(child.cmdline())])
    folder = Path("/proc", str(guard.pid), "fd")
    box.wait_for(lambda: sorted(os.listdir(folder)) == ["0", "1", "2"])  # while it starts, it reads files
    targets = {fd: os.readlink(folder / fd) for fd in ("0", "1", "2")}
    assert targets["1"] == targets["2"] == "/dev/null"
    (box.folder / "go").touch()
    launcher.communicate(timeout=IN_TIME)
    assert not psutil.pid_exists(guard.pid)


def test_what_a_worker_left_running_ends_with_the_run(box: Box) -> None:
    source = """
        import subprocess
        subprocess.Popen(["sleep", "60"])
        print("done")
    """
    box.write("leave.py", source)
    started = time.monotonic()
    done = box.run("run", "leave.py")
    assert (done.stdout, done.returncode) == ("done\n", 0)
    assert time.monotonic() - started < 20
    assert box.pids() == []

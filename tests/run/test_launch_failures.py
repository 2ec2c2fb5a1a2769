"""One worker fails: the others are stopped, the first cause is told first. Mistakes are found before the start."""

import fcntl
import json
import signal
import sys
import time

from launching import IN_TIME, Box, box

__all__ = ["box"]


def test_the_others_are_stopped_and_the_cause_is_told(box: Box) -> None:
    source = """
        import os, time
        def train():
            if os.environ["RANK"] == "1":
                raise ValueError("bad loss")
            time.sleep(60)
        train()
    """
    box.write("train.py", source)
    started = time.monotonic()
    done = box.run("run", "-n", "3", "train.py")
    assert time.monotonic() - started < 20
    assert done.returncode == 1
    logs = box.only_run() / "logs"
    assert done.stderr.splitlines() == [
        "error: ValueError: bad loss",
        "   at: rank 1, train.py:5",
        " also: ranks 0, 2 stopped by shoal, because of this",
        f" logs: {logs}",
    ]
    facts = box.facts()
    assert (facts["status"], facts["exit_code"], facts["num_workers"]) == ("failed", 1, 3)
    ended = box.events()[-1]
    assert (ended["kind"], ended["data"]["cause"]["rank"]) == ("run_ended", 1)
    codes = {event["rank"]: event["data"]["code"] for event in box.events() if event["kind"] == "worker_exited"}
    assert codes == {0: -15, 1: 1, 2: -15}


def test_a_lost_peer_does_not_hide_the_cause(box: Box) -> None:
    """Rank 0 sees the connection go before rank 1 has said why."""
    source = """
        import os, socket, time
        if os.environ["RANK"] == "1":
            os.mkfifo("wire")
            wire = open("wire", "w")
            try:
                raise ValueError("the true cause")
            finally:
                wire.close()
                while not os.path.exists("seen"):
                    time.sleep(0.01)
                time.sleep(0.2)
        while not os.path.exists("wire"):
            time.sleep(0.01)
        if not open("wire").read():
            open("seen", "w").close()
            raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:4711")
    """
    box.write("train.py", source)
    done = box.run("run", "-n", "2", "train.py")
    lines = done.stderr.splitlines()
    assert lines[:2] == ["error: ValueError: the true cause", "   at: rank 1, train.py:7"]
    assert lines[2].startswith(" also: rank 0 (train.py:17), 0.")
    assert "earlier: RuntimeError: [pair.cc:553] Connection closed" in lines[2]


def test_all_fail_alike(box: Box) -> None:
    box.write("train.py", "import not_installed_here")
    done = box.run("run", "-n", "3", "train.py")
    assert "with the same error" in done.stderr
    assert "install what provides 'not_installed_here'" in done.stderr


def test_a_worker_that_failed_and_hangs_is_ended(box: Box) -> None:
    source = """
        import threading, time
        threading.Thread(target=time.sleep, args=(60,)).start()
        raise ValueError("bad")
    """
    box.write("hang.py", source)
    started = time.monotonic()
    done = box.run("run", "hang.py")
    assert done.returncode == 1
    assert "error: ValueError: bad" in done.stderr
    assert time.monotonic() - started < 15


def test_a_crash_in_native_code_is_placed(box: Box) -> None:
    box.write("crash.py", "import ctypes\n\ndef f():\n    ctypes.string_at(0)\n\nf()\n")
    done = box.run("run", "crash.py")
    assert done.returncode == 139
    assert "error: The worker was killed by SIGSEGV.\n   at: rank 0, crash.py:4\n" in done.stderr


def test_kill_9_of_a_worker(box: Box) -> None:
    box.write("die.py", "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)")
    done = box.run("run", "-n", "2", "die.py")
    assert done.returncode == 137
    assert "killed by SIGKILL.\n   at: rank 1\n  why: killed from outside" in done.stderr


def test_a_failure_without_output_is_still_told(box: Box) -> None:
    box.write("fail.py", "print('shown nowhere'); raise ValueError('bad')")
    done = box.run("run", "--quiet", "fail.py")
    assert done.stdout == ""
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert "error: ValueError: bad\n   at: rank 0, fail.py:1" in done.stderr
    assert "shown nowhere" in box.log(0)


def test_the_summary_as_json(box: Box) -> None:
    box.write("fail.py", "print('out'); raise ValueError('bad')")
    done = box.run("run", "-n", "2", "--json", "fail.py")
    summary = json.loads(done.stdout)
    assert (summary["status"], summary["exit_code"], summary["num_workers"]) == ("failed", 1, 2)
    assert summary["cause"]["message"] == "ValueError: bad"
    assert [end["code"] for end in summary["exits"]] == [1, 1]
    assert summary["run_dir"] == str(box.only_run())
    assert "[0-1] out" in done.stderr


GOOD = "print('ran')"


def test_two_runs_in_one_folder(box: Box) -> None:
    box.write("wait.py", "import os, time\nopen('up', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)")
    first = box.start("run", "--log-dir", "out", "wait.py")
    box.wait_for_files("up")
    second = box.run("run", "--log-dir", "out", "wait.py")
    assert second.returncode == 2
    assert "in use by another run" in second.stderr
    (box.folder / "go").touch()
    first.communicate(timeout=IN_TIME)
    assert first.returncode == 0
    third = box.run("run", "--log-dir", "out", "wait.py")
    assert third.returncode == 2
    assert "already holds a run" in third.stderr
    assert "--resume" in third.stderr
    fourth = box.run("run", "--resume", "out")
    assert fourth.returncode == 0, fourth.stderr
    kinds = [json.loads(line)["kind"] for line in (box.folder / "out/journal.jsonl").read_text().splitlines()]
    assert kinds.count("run_started") == 2


def test_a_full_disk_at_the_start(box: Box) -> None:
    box.write("good.py", GOOD)
    done = box.run("run", "--log-dir", "/dev/full/x", "good.py")
    assert done.returncode == 2
    assert "as a run folder" in done.stderr


def test_a_log_that_cannot_be_written_does_not_end_the_run(box: Box) -> None:
    box.write("good.py", "print('ran')")
    (box.folder / "out/logs").mkdir(parents=True)
    (box.folder / "out/logs/0.log").symlink_to("/dev/full")
    done = box.run("run", "--log-dir", "out", "good.py")
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert "No space left on device" in done.stderr
    assert done.stderr.count("shoal: cannot write") == 1


def test_values_of_variables_are_not_kept(box: Box) -> None:
    box.write("good.py", "import os; print(os.environ['TOKEN'], os.environ['OTHER'])")
    done = box.run("run", "--env", "TOKEN=geheim", "--env=OTHER=auch", "good.py")
    assert done.stdout == "geheim auch\n"
    kept = (box.only_run() / "run.json").read_text() + (box.only_run() / "journal.jsonl").read_text()
    assert "geheim" not in kept
    assert "auch" not in kept
    assert "TOKEN=***" in kept


def test_the_lock_is_free_after_a_kill(box: Box) -> None:
    box.write("wait.py", "import time\nopen('up', 'w').close()\ntime.sleep(60)")
    launcher = box.start("run", "--name", "one", "wait.py")
    box.wait_for_files("up")
    launcher.kill()
    launcher.communicate()
    box.wait_for_peace()
    with (box.home / "runs/one/lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert "lost" in box.run("ps").stdout


def test_resuming_in_another_size(box: Box) -> None:
    source = """
        from shoal.engine.env import read_worker
        facts = read_worker()
        print(facts.is_resumed, facts.world_size, facts.options)
    """
    box.write("show.py", source)
    done = box.run("run", "--name", "first", "-o", "exact=1", "-o", "seed=3", "show.py")
    assert done.stdout == "False 1 {'exact': '1', 'seed': '3'}\n"
    done = box.run("run", "--resume", "first", "-n", "2", "-o", "seed=4", "show.py")
    assert {line.partition("] ")[2] for line in done.stdout.splitlines()} == {"True 2 {'exact': '1', 'seed': '4'}"}
    assert [path.name for path in (box.home / "runs").iterdir()] == ["first"]


def test_a_run_kept_elsewhere_is_listed(box: Box) -> None:
    box.write("good.py", GOOD)
    assert box.run("run", "--log-dir", "far/away", "good.py").returncode == 0
    assert "away" in box.run("ps").stdout
    assert box.run("logs", "last").stdout == "ran\n"
    assert (box.folder / "far/away/logs/0.log").read_text() == "ran\n"


def test_workers_without_a_home_that_can_be_written(box: Box) -> None:
    box.write("good.py", GOOD)
    box.env["SHOAL_HOME"] = "/proc/nowhere"
    done = box.run("run", "good.py")
    assert done.returncode == 2
    assert "SHOAL_HOME" in done.stderr or "--log-dir" in done.stderr
    assert box.run("run", "--log-dir", "out", "good.py").returncode == 0


def test_a_signal_of_a_worker_to_itself_is_not_ours(box: Box) -> None:
    box.write("term.py", f"import os; os.kill(os.getpid(), {int(signal.SIGTERM)})")
    done = box.run("run", "term.py")
    assert done.returncode == 143
    assert "shoal did not" in done.stderr


def test_the_working_folder_is_gone(box: Box) -> None:
    box.write("good.py", GOOD)
    gone = box.folder / "gone"
    gone.mkdir()
    command = f"cd {gone} && rmdir {gone} && exec {sys.executable} -m shoal run {box.folder}/good.py"
    done = box.execute("/bin/sh", "-c", command)
    assert done.returncode != 0
    assert done.stderr.startswith("error: The folder you are in does not exist")

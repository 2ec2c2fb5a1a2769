"""Eyes on real processes: full disks, killed launchers, several writers of one file."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from observed import python

from shoal.observe import folder, journal, metrics, runs
from shoal.spec.errors import UserError


def test_processes_that_share_a_journal_never_mix_their_lines(tmp_path):
    path = tmp_path / "journal.jsonl"
    code = """
log = journal.Journal(sys.argv[1])
for number in range(500):
    log.write(Event(kind="x", time=0.0, rank=int(sys.argv[2]), data={"n": number, "pad": "y" * (number % 300)}))
"""
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(python(code, path, rank)) for rank in range(3)]
        assert [writer.wait(30) for writer in writers] == [0, 0, 0]
    damaged = []
    found = list(journal.read(str(path), damaged.append))
    assert damaged == []
    for rank in range(3):
        assert [one.data["n"] for one in found if one.rank == rank] == list(range(500))


HOLD = """
from random import Random
run = folder.claim(sys.argv[1], {"command": ["train", "me"]}, time.time())
print(run.path, flush=True)
time.sleep(60)
"""


def test_a_killed_launcher_leaves_a_run_that_is_lost_and_can_be_taken_over(tmp_path):
    path = str(tmp_path / "run")
    with python(HOLD, path, stdout=subprocess.PIPE, text=True) as launcher:
        launcher.stdout.readline()
        assert runs.read_run(path).status == "running"
        with pytest.raises(UserError) as caught:
            folder.claim(path, {}, 0.0)
        assert f"process {launcher.pid}" in caught.value.why
        assert "train me" in caught.value.why
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    assert runs.read_run(path).status == "lost"
    folder.claim(path, {}, 0.0).close()


def test_looking_at_a_run_never_keeps_it_from_starting(tmp_path):
    path = str(tmp_path / "run")
    folder.claim(path, {}, 0.0).close()
    peek = "\nprint(1, flush=True)\nwhile True: runs.is_held(sys.argv[1])"
    with python(peek, path, stdout=subprocess.PIPE) as looking:
        looking.stdout.readline()
        for _ in range(50):
            folder.claim(path, {}, 0.0).close()


def test_steps_taken_before_the_end_of_the_process_are_on_disk(tmp_path):
    ends = {"normal": "", "exit": "sys.exit(3)", "crash": "raise ValueError"}
    for name, end in ends.items():
        run_dir = tmp_path / name
        run_dir.mkdir()
        code = f"\nrecorder = Recorder(sys.argv[1], 1, 2)\nfor n in range(1, 9): recorder.step(make_step(n))\n{end}"
        with python(code, run_dir, stderr=subprocess.DEVNULL) as process:
            process.wait(30)
        assert len(metrics.read(str(run_dir))[1]) == 8


def test_a_killed_process_loses_at_most_its_last_half_second(tmp_path):
    code = """
recorder = Recorder(sys.argv[1], 1, 2)
for n in range(1, 9): recorder.step(make_step(n))
time.sleep(2.0)
os.kill(os.getpid(), 9)
"""
    with python(code, tmp_path) as process:
        assert process.wait(30) == -9
    assert len(metrics.read(str(tmp_path))[1]) == 8


def test_a_forked_child_that_exits_repeats_nothing(tmp_path):
    code = """
recorder = Recorder(sys.argv[1], 1, 2)
for n in range(1, 9): recorder.step(make_step(n))
child = os.fork()
if not child:
    sys.exit(0)
os.waitpid(child, 0)
"""
    with python(code, tmp_path) as process:
        assert process.wait(30) == 0
    assert len(metrics.read(str(tmp_path))[1]) == 8


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 256 KB, which only root can make."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)], capture_output=True)
    if made.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_stops_neither_run_nor_metrics_for_good(small_disk, tmp_path):
    filler = small_disk / "filler"
    run = small_disk / "run"
    run.mkdir()
    code = """
recorder = Recorder(sys.argv[1], 1, 2)
for n in range(1, 101): recorder.step(make_step(n)); recorder.event("before", step=n)
recorder._metrics.flush()
with open(sys.argv[2], "wb", buffering=0) as file:
    try:
        while file.write(b"x" * 4096): pass
    except OSError: pass
for n in range(101, 401): recorder.step(make_step(n)); recorder.event("full", step=n)
recorder._metrics.flush()
os.unlink(sys.argv[2])
for n in range(401, 411): recorder.step(make_step(n)); recorder.event("after", step=n)
recorder.close()
"""
    with python(code, run, filler, stderr=subprocess.PIPE, text=True) as process:
        said = process.communicate(timeout=30)[1]
        assert process.returncode == 0, said
    assert [step.step for step in metrics.read(str(run))[1]] == list(range(1, 411))
    kinds = [one.kind for one in journal.read(str(run / "journal.jsonl"))]
    assert kinds.count("before") == 100
    assert kinds.count("after") == 10
    assert said.count("cannot write") == 2
    assert said.count("works again") == 2


def test_a_full_disk_is_told_before_a_run_starts(small_disk):
    with contextlib.suppress(OSError), open(small_disk / "filler", "wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    with pytest.raises(UserError) as caught:
        folder.claim(str(small_disk / "run"), {"command": "x" * 10_000}, 0.0)
    assert "No space left" in caught.value.why
    assert "free some space" in caught.value.hint


def test_logs_follow_a_live_run_to_its_end(tmp_path):
    path = tmp_path / "home" / "runs" / "live"
    run = folder.claim(str(path), {"num_workers": 2}, time.time())
    code = """
from shoal.observe.logs import print_logs
sys.exit(print_logs(sys.argv[1], "live", sys.stdout, follow=True))
"""
    with python(code, tmp_path / "home", stdout=subprocess.PIPE, text=True) as following:
        for number in range(3):
            for rank in range(2):
                with open(path / "logs" / f"{rank}.log", "a") as file:
                    file.write(f"line {number}\n")
            if number == 0:
                assert following.stdout.readline() in ("[0-1] line 0\n", "[0] line 0\n")
        run.close()
        text = following.communicate(timeout=30)[0]
        assert following.returncode == 0
    assert text.endswith(("[0-1] line 2\n", "[1] line 2\n"))


def test_nothing_heavy_is_imported(tmp_path):
    code = """
import shoal.observe.explain, shoal.observe.logs, shoal.observe.ps, shoal.observe.send
print([name for name in ("torch", "numpy", "tensorboard") if name in sys.modules])
"""
    with python(code, stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate(timeout=30)[0] == "[]\n"
    light = "import sys, shoal.observe.ps; print([name for name in ('msgspec', 'subprocess') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", light], capture_output=True, text=True).stdout == "[]\n"


def test_listing_runs_is_cheap(tmp_path):
    for number in range(20):
        with folder.claim(str(tmp_path / "runs" / f"run-{number}"), {"command": "x"}, float(number)) as run:
            run.update(status="finished", ended=float(number))
    code = """
import sys, time
from shoal.observe.ps import print_runs
print_runs(sys.argv[1], sys.stdout, as_json=True, show_all=True, width=80)
print(time.process_time(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)) == 20
    assert float(done.stderr) < 1.0  # 0.05 s where nothing else runs


def test_no_descriptor_and_no_thread_is_left(tmp_path):
    code = """
import threading
fds = len(os.listdir("/proc/self/fd"))
for n in range(5):
    read_fd, write_fd = os.pipe()
    with Recorder(sys.argv[1], 0, 2, write_fd) as recorder:
        recorder.step(make_step(1))
        recorder.event("x")
    os.close(read_fd)
    os.close(write_fd)
assert len(os.listdir("/proc/self/fd")) == fds
assert threading.active_count() == 1
"""
    with python(code, tmp_path) as process:
        assert process.wait(30) == 0
    assert len(list(Path(tmp_path).iterdir())) == 2

"""Whatever workers print arrives, in full in the logs, readable on the screen."""

import os
import subprocess
import sys
import time

from launching import IN_TIME, SHOAL, Box, box

__all__ = ["box"]


def test_a_hundred_thousand_lines(box: Box) -> None:
    box.write("many.py", "import sys\nsys.stdout.write(''.join(f'line {i}\\n' for i in range(100_000)))")
    started = time.monotonic()
    done = box.run("run", "-n", "2", "many.py")
    seconds = time.monotonic() - started
    expected = "".join(f"line {i}\n" for i in range(100_000))
    assert box.log(0) == box.log(1) == expected
    for rank in range(2):
        own = [line for line in done.stdout.splitlines() if line.startswith((f"[{rank}]", "[0-1]"))]
        assert [line.partition("] ")[2] for line in own] == expected.splitlines()
    assert seconds < 20


def test_printed_line_by_line(box: Box) -> None:
    box.write("prints.py", "for i in range(20_000): print('line', i)")
    done = box.run("run", "prints.py")
    assert done.stdout == "".join(f"line {i}\n" for i in range(20_000))


def test_bytes_of_any_kind(box: Box) -> None:
    source = """
        import os, sys
        sys.stdout.buffer.write(bytes(range(256)) * 100 + b"\\n")
        sys.stdout.buffer.write(b"x" * 3_000_000 + b"\\n")
        sys.stdout.buffer.write(b"\\rbar 1\\rbar 2\\rbar 3\\n")
        sys.stderr.write("an error without a newline")
    """
    box.write("odd.py", source)
    done = box.run("run", "-n", "2", "odd.py", text=False)
    assert done.returncode == 0
    for rank in range(2):
        kept = (box.only_run() / f"logs/{rank}.log").read_bytes()
        assert kept.startswith(bytes(range(256)) * 100 + b"\n" + b"x" * 3_000_000 + b"\n\rbar 1\rbar 2\rbar 3\n")
        assert kept.endswith(b"an error without a newline")
    assert done.stdout.count(b"x" * 100) > 0
    assert b"bar 1" not in done.stdout
    assert b"bar 3" in done.stdout
    assert b"an error without a newline\n" in done.stdout


def test_what_a_child_prints_after_the_worker_ended(box: Box) -> None:
    box.write("late.py", "import subprocess; subprocess.Popen('sleep 0.1; echo late', shell=True); print('first')")
    done = box.run("run", "late.py")
    # The child is ended with its worker; what it managed to say is kept.
    assert done.stdout in ("first\n", "first\nlate\n")


def test_nobody_reads_any_more(box: Box) -> None:
    """As in `shoal run ... | head -1`: the run goes on, and says nothing ugly."""
    box.write("talk.py", "import time\nfor i in range(300): print('line', i, flush=True); time.sleep(0.001)")
    command = f"{' '.join(SHOAL)} run talk.py | head -1"
    done = box.execute("/bin/bash", "-o", "pipefail", "-c", command)
    assert done.stdout == "line 0\n"
    assert done.stderr == ""
    assert done.returncode == 0
    assert box.log(0).endswith("line 299\n")
    assert box.facts()["status"] == "finished"


def test_no_output_at_all(box: Box) -> None:
    """A launcher whose standard streams are closed, as some daemons start their children."""
    box.write("talk.py", "print('hello')")
    done = box.execute("/bin/sh", "-c", f"exec {' '.join(SHOAL)} run talk.py <&- >&- 2>&-")
    assert done.returncode == 0
    assert box.log(0) == "hello\n"


def test_output_to_a_full_disk(box: Box) -> None:
    box.write("talk.py", "print('hello')")
    done = box.execute("/bin/sh", "-c", f"exec {' '.join(SHOAL)} run talk.py > /dev/full")
    assert "Traceback" not in done.stderr
    assert box.log(0) == "hello\n"


def test_lines_appear_as_they_are_printed(box: Box) -> None:
    box.write("slow.py", "import time\nprint('first')\ntime.sleep(60)")
    launcher = box.start("run", "-n", "2", "slow.py")
    assert launcher.stdout is not None
    assert "first" in launcher.stdout.readline()
    launcher.terminate()
    launcher.communicate(timeout=IN_TIME)


def test_a_flood_does_not_keep_the_launcher_from_ending(box: Box) -> None:
    source = """
        import os, time
        if os.environ["RANK"] == "1":
            time.sleep(0.5)
            raise ValueError("enough")
        while True:
            print("x" * 200)
    """
    box.write("flood.py", source)
    started = time.monotonic()
    with open(os.devnull, "w") as nowhere:
        done = box.run("run", "-n", "2", "flood.py", stdout=nowhere, stderr=subprocess.PIPE, capture_output=False)
    assert time.monotonic() - started < 15
    assert done.stderr.startswith("error: ValueError: enough\n   at: rank 1, flood.py:5\n")


def test_progress_is_shown_and_errors_are_journaled(box: Box) -> None:
    source = """
        import json, os, time
        from shoal.engine.env import read_worker
        fd = read_worker().control_fd
        def send(**event):
            os.write(fd, json.dumps(event).encode() + b"\\n")
        os.write(fd, b"not an event\\n{}\\n[1]\\n")
        send(kind="progress", time=time.time(), rank=0, data={"step": 3, "num_steps": 9, "loss": 0.25})
    """
    box.write("steps.py", source)
    done = box.run("run", "steps.py")
    assert done.returncode == 0
    assert "step 3/9" in done.stdout
    assert "loss 0.25" in done.stdout


def test_spawned_children_do_not_use_the_control_channel(box: Box) -> None:
    source = """
        import subprocess, sys
        from shoal.engine.env import read_worker
        assert read_worker().control_fd is not None
        code = "from shoal.engine.env import read_worker; print(read_worker().control_fd)"
        subprocess.run([sys.executable, "-c", code], check=True)
    """
    box.write("child.py", source)
    assert box.run("run", "child.py").stdout == "None\n"


def test_python_m_shoal_is_shoal(box: Box) -> None:
    assert box.run("--version").stdout == box.execute(str(sys.executable), "-m", "shoal", "-V").stdout

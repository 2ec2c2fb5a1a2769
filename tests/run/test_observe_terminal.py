"""The console on a real terminal."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
from observed import HEAD


class Terminal:
    """A real terminal (a pty) with a process on it."""

    def __init__(self, code, columns=80, rows=24):
        self.master, slave = pty.openpty()
        self.resize(columns, rows)
        self.process = subprocess.Popen([sys.executable, "-c", HEAD + code], stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.text = ""

    def resize(self, columns, rows=24):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, pattern, seconds=20.0):
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.text!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.master, 65536).decode()
                except OSError:  # the process has ended and all of its output is read
                    assert re.search(pattern, self.text), self.text
        return self.text

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal():
    opened = []
    yield lambda *args, **options: opened.append(Terminal(*args, **options)) or opened[-1]
    for one in opened:
        one.close()


class TestTerminal:
    def test_a_lone_process_draws_one_line_around_its_prints(self, terminal):
        screen = terminal("""
recorder = Recorder(None, 0, 1)
for step in range(60):
    time.sleep(0.01)
    recorder.step(make_step(step), 60)
    if step == 40:
        print("printed")
recorder.close()
print("after")
""")
        text = screen.read_until(r"after\r\n")
        assert "\r\x1b[Kprinted\r\n" in text
        assert re.search(r"step 60/60  loss 0\.01667[^\n]*\r\nafter\r\n$", text)
        assert "\x1b[?25l" not in text

    def test_a_crash_leaves_the_terminal_usable(self, terminal):
        screen = terminal("""
recorder = Recorder(None, 0, 1)
recorder.step(make_step(0), 60)
raise ValueError("on purpose")
""")
        text = screen.read_until(r"ValueError: on purpose\r\n(.|\n)*step 1/60[^\n]*\r\n$")
        assert "\r\x1b[KTraceback" in text

    def test_children_of_the_process_can_print(self, terminal):
        screen = terminal("""
recorder = Recorder(None, 0, 1)
recorder.step(make_step(0), 60)
import threading
drawing = threading.Thread(target=recorder._console._lock.acquire)  # another thread is drawing right now
drawing.start()
drawing.join()
child = os.fork()
if not child:
    print("from the child", flush=True)
    os._exit(0)
recorder._console.renew_lock()
os.waitpid(child, 0)
recorder.close()
print("after")
""")
        assert "\r\x1b[Kfrom the child\r\n" in screen.read_until(r"after\r\n")

    def test_a_resize_is_followed(self, terminal):
        screen = terminal("""
console = Console(sys.stdout, num_workers=2)
data = dict(num_steps=500, epoch=1, loss=1.234, samples_per_second=3412.0, workers=2, eta_seconds=42.0,
            compute=0.82, wait=0.06, communicate=0.09, load=0.03)
for step in range(100000):
    console.progress(Event(kind="progress", time=0.0, rank=0, step=step, data=data))
    time.sleep(0.02)
""")
        screen.read_until(r"load 3\b")
        screen.resize(30)
        screen.read_until(r"\x1b\[J|\x1b\[K")
        before = len(screen.text)
        time.sleep(0.3)
        screen.read_until(rf"(?s).{{{before + 60}}}")
        newest = re.split(r"\r\x1b\[(?:\d+A\x1b\[J|K)", screen.text)[-2]
        assert 0 < len(newest) < 30
        assert newest.startswith("step ")

    def test_a_terminal_that_goes_away_does_not_raise(self, terminal):
        screen = terminal("""
import signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
console = Console(sys.stdout, num_workers=2)
print("ready", flush=True)
while True:
    console.line(0, "x" * 100)
    console.tick()
    if not console._is_open:
        os._exit(7)
""")
        # Not right after "ready": the print itself must be over.
        screen.read_until(r"ready\r\n(.|\n)*x{100}")
        os.close(screen.master)
        screen.master = os.open(os.devnull, os.O_RDONLY)
        assert screen.process.wait(20) == 7

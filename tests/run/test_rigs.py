"""The rigs do what they say on this machine, and leave nothing behind."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.spec.errors import UserError
from shoal.testing import rigs
from shoal.testing.rigs import leftovers

PYTHON = sys.executable

needs_network = rigs.needs("root", "ip", "tc", "nsenter", "network namespaces")
needs_delay = rigs.needs("root", "ip", "tc", "nsenter", "network namespaces", "gcc", "tun devices")
needs_mounts = rigs.needs("root", "mounting")
needs_ext4 = rigs.needs("root", "mounting", "mkfs.ext4", "loop devices")

ECHO = """
import socket, sys
server = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
while True:
    peer, _ = server.accept()
    with peer:
        while data := peer.recv(1 << 20):
            if len(data) < 100:
                peer.sendall(data)
            elif data.endswith(b"."):
                peer.sendall(b"!")
"""

CLIENT = """
import json, socket, sys, time
address, num_bytes = sys.argv[1], int(sys.argv[2])
with socket.create_connection((address, 5000), 10) as peer:
    times = []
    for _ in range(9):
        started = time.perf_counter()
        peer.sendall(b"x")
        peer.recv(1)
        times.append(time.perf_counter() - started)
    started = time.perf_counter()
    if num_bytes:
        peer.sendall(bytes(num_bytes) + b".")
        peer.recv(1)
    print(json.dumps([sorted(times)[4], time.perf_counter() - started]))
"""


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def names_left() -> list[str]:
    """Everything with the name of a rig, anywhere."""
    mounts = re.findall(r"shoal-rig-\S+", Path("/proc/self/mountinfo").read_text())
    places = [leftovers.NAMESPACES, Path("/tmp"), Path("/dev/shm"), *leftovers._group_parents()]
    found = [path.name for place in places if place.is_dir() for path in place.glob("shoal-rig-*")]
    return [name for name in mounts + found if f"-{os.getpid()}-" in name or leftovers.is_orphan(name)]


@pytest.fixture(autouse=True)
def nothing_left():
    before = names_left()  # the tests of this process may share a store that stays until their end
    yield
    assert [name for name in names_left() if name not in before] == []


def measure(hosts: rigs.Hosts, num_bytes: int) -> tuple[float, float]:
    """Seconds for one byte there and back, and for so many bytes there."""
    server = hosts.start(1, [PYTHON, "-c", ECHO], stdout=subprocess.PIPE)
    assert server.stdout is not None
    with server.stdout:
        assert server.stdout.readline() == b"listening\n"
    return transfer(hosts, num_bytes)


def transfer(hosts: rigs.Hosts, num_bytes: int) -> tuple[float, float]:
    command = [PYTHON, "-c", CLIENT, hosts.address(1), str(num_bytes)]
    done = hosts.run(0, command, capture_output=True, check=True, timeout=30)
    there_and_back, seconds = json.loads(done.stdout)
    return there_and_back, seconds


@needs_network
def test_hosts_reach_each_other_and_nothing_else():
    with rigs.hosts(3) as hosts:
        assert hosts.count == 3
        measure(hosts, 0)
        links = hosts.run(0, ["ip", "-json", "link"], capture_output=True, check=True).stdout
        assert {link["ifname"] for link in json.loads(links)} == {"lo", "eth0"}
        routes = hosts.run(0, ["ip", "route"], capture_output=True, text=True, check=True).stdout
        assert "default" not in routes


@needs_network
def test_a_slow_link():
    with rigs.hosts(2, rate_mbit=40) as hosts:
        _, seconds = measure(hosts, 2_000_000)  # 0.4 s at 40 Mbit
        assert 0.3 < seconds < 5.0
        hosts.shape(0)
        assert transfer(hosts, 2_000_000)[1] < 0.3


@needs_delay
def test_a_long_link():
    with rigs.hosts(3, delay_seconds=0.02, rate_mbit=200) as hosts:
        there_and_back, seconds = measure(hosts, 1_000_000)
        assert 0.04 <= there_and_back < 0.4
        assert seconds > 0.04


@needs_network
def test_a_lossy_link():
    """One host sends numbered datagrams, and the other counts them."""
    count = (
        "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('0.0.0.0', 5001))\n"
        "s.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)  # SO_RCVBUFFORCE: whatever we are late for is kept\n"
        "print('listening', flush=True); n = len(s.recv(100)); s.settimeout(1)\n"
        "try:\n    while s.recv(100): n += 1\nexcept TimeoutError: print(n)"
    )
    send = (
        "import socket, sys; s = socket.socket(type=socket.SOCK_DGRAM)\n"
        "for _ in range(4000): s.sendto(b'x', (sys.argv[1], 5001))"
    )
    with rigs.hosts(2, loss=0.2) as hosts:
        counter = hosts.start(1, [PYTHON, "-c", count], stdout=subprocess.PIPE, text=True)
        assert counter.stdout is not None
        with counter.stdout:
            assert counter.stdout.readline() == "listening\n"
            hosts.run(0, [PYTHON, "-c", send, hosts.address(1)], check=True)
            received = int(counter.stdout.readline())
    assert 0.15 < 1 - received / 4000 < 0.25


TALK = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000), 10)
peer.settimeout(0.3)
while True:
    try:
        peer.sendall(b"x")
        peer.recv(1)
        print("heard", flush=True)
    except (TimeoutError, OSError) as error:
        print("silence", flush=True)
    time.sleep(0.05)
"""


@needs_network
@pytest.mark.parametrize("how", ["partition", "unplug"])
def test_a_cut_host_hears_nothing_until_it_is_healed(how):
    with rigs.hosts(3) as hosts:
        measure(hosts, 0)
        talker = hosts.start(0, [PYTHON, "-c", TALK, hosts.address(1)], stdout=subprocess.PIPE, text=True)
        assert talker.stdout is not None
        with talker.stdout:
            words = iter(talker.stdout.readline, "")
            assert next(words) == "heard\n"
            for _ in range(2):
                getattr(hosts, how)(1)
                getattr(hosts, how)(1)  # twice is as good as once
                assert "silence\n" in words
                hosts.heal(1)
                assert "heard\n" in words


@needs_mounts
def test_a_small_disk_fills_up_and_is_freed():
    with rigs.small_disk(1) as disk:
        disk.fill(0.5)
        (disk.path / "fits").write_bytes(bytes(400_000))
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            (disk.path / "more").write_bytes(bytes(10_000))
        disk.free()
        (disk.path / "more").write_bytes(bytes(10_000))
        assert (disk.path / "fits").stat().st_size == 400_000


@needs_mounts
def test_a_disk_that_is_read_only_for_a_while():
    with rigs.small_disk(1) as disk:
        disk.read_only()
        with pytest.raises(OSError, match="Read-only"):
            (disk.path / "a").write_bytes(b"x")
        disk.writable()
        with open(disk.path / "a", "wb"), pytest.raises(UserError, match="cannot be made read-only now"):
            disk.read_only()


@needs_ext4
def test_power_loss_shows_what_was_synced_and_no_more():
    with rigs.power_loss_disk(16) as disk:
        (disk.path / "cached").write_text("in memory")
        with open(disk.path / "synced", "w") as file:
            file.write("on disk")
            file.flush()
            os.fsync(file.fileno())
        with disk.snapshot() as left:
            assert (left / "synced").read_text() == "on disk"
            assert not (left / "cached").exists() or (left / "cached").read_text() == ""
        os.sync()
        with disk.snapshot() as left:
            assert (left / "cached").read_text() == "in memory"


@needs_ext4
def test_the_image_of_a_busy_disk_is_whole():
    """A writer appends numbers and syncs each; every image has them without a hole, up to the last reported."""
    code = (
        "import os, sys\n"
        "file = open(sys.argv[1], 'w')\n"
        "for number in range(10**9):\n"
        "    print(number, file=file, flush=True); os.fsync(file.fileno()); print(number, flush=True)"
    )
    with rigs.power_loss_disk(16) as disk:
        log = disk.path / "numbers"
        with subprocess.Popen([PYTHON, "-c", code, str(log)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            try:
                for _ in range(5):
                    reported = [int(writer.stdout.readline()) for _ in range(20)][-1]
                    with disk.snapshot([writer.pid]) as left:
                        numbers = (left / "numbers").read_text().split()
                    assert numbers == [str(number) for number in range(len(numbers))]
                    assert len(numbers) > reported
            finally:
                writer.kill()


@needs_ext4
def test_a_disk_that_dies():
    with rigs.power_loss_disk(16) as disk, open(disk.path / "a", "wb", buffering=0) as file:
        file.write(b"x")
        disk.fail()
        with pytest.raises(OSError, match="Input/output error"):
            file.write(b"x")
        with pytest.raises(OSError, match="Input/output error"):
            (disk.path / "b").write_bytes(b"x")


@rigs.needs("strace")
def test_system_calls_that_fail(tmp_path):
    path = str(tmp_path / "file")
    code = f"f = open({path!r}, 'wb', buffering=0)\nfor n in range(5): f.write(b'x')"
    began = time.time()
    with rigs.failing_syscalls([PYTHON, "-c", code], "write:error=ENOSPC:when=3+", paths=[path]) as calls:
        done = subprocess.run(calls.command, capture_output=True, text=True, check=False)
        (failed_at,) = calls.times()
    assert began < failed_at < time.time()
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert Path(path).read_bytes() == b"xx"
    with rigs.failing_syscalls([PYTHON, "-c", code], "write:signal=KILL:when=4", paths=[path]) as calls:
        assert subprocess.run(calls.command, check=False).returncode == -signal.SIGKILL
    assert Path(path).read_bytes() in (b"xxx", b"xxxx")


WRITER = """
import os, sys, threading, time
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
def write():
    while True:
        try:
            os.write(file, b"x")
        except OSError as error:
            print(error.errno, flush=True)
        time.sleep(0.01)
threading.Thread(target=write).start()
"""


@rigs.needs("strace")
def test_system_calls_of_a_running_process_fail_for_a_while(tmp_path):
    path = tmp_path / "file"
    with subprocess.Popen([PYTHON, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        try:
            wait_until(lambda: path.exists() and path.stat().st_size > 0)
            with rigs.failing_syscalls(writer.pid, "write:error=EDQUOT", paths=[str(path)]) as calls:
                assert writer.stdout.readline() == f"{errno.EDQUOT}\n"
                wait_until(calls.times)
            size = path.stat().st_size
            wait_until(lambda: path.stat().st_size > size + 3)
            assert writer.poll() is None
        finally:
            writer.kill()


@rigs.needs("strace")
def test_a_process_that_is_gone_has_no_calls_that_could_fail():
    with subprocess.Popen([PYTHON, "-c", "pass"]) as gone:
        gone.wait()
    with pytest.raises(rigs.RigMissing) as caught:
        rigs.failing_syscalls(gone.pid, "write:error=EIO").__enter__()
    assert caught.value.why


@rigs.needs("memory cgroups")
def test_little_memory():
    with rigs.memory_limit(48 << 20) as group:
        assert group.run([PYTHON, "-c", "bytearray(8 << 20)"]).returncode == 0
        assert group.run([PYTHON, "-c", "bytearray(200 << 20)"]).returncode == -signal.SIGKILL


@rigs.needs("cpu cgroups")
def test_few_cores():
    code = (
        "import time\nstarted, used = time.perf_counter(), time.process_time()\n"
        "while time.perf_counter() - started < 0.6: pass\n"
        "print((time.process_time() - used) / (time.perf_counter() - started))"
    )
    with rigs.cpu_limit(0.25) as group:
        done = group.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    assert 0.02 < float(done.stdout) < 0.35


TICK = "import time\nwhile True: print('tick', flush=True); time.sleep(0.01)"


def is_silent(process: "subprocess.Popen[bytes]") -> bool:
    """Whether nothing comes any more, once what is in the pipe was read."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    process.stdout.read()
    time.sleep(0.2)
    return process.stdout.read() is None


@rigs.needs("freezer cgroups")
def test_a_frozen_group():
    command = [PYTHON, "-c", TICK]
    with rigs.freezer() as group, subprocess.Popen(group.command(command), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"tick\n"
        group.freeze()
        time.sleep(0.05)
        assert is_silent(process)
        group.thaw()
        assert not is_silent(process)
        group.freeze()
        leftovers.remove_group(group.path)  # frozen ones are ended too
        assert process.wait(10) == -signal.SIGKILL


def test_a_frozen_process():
    with subprocess.Popen([PYTHON, "-c", TICK], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"tick\n"
            with rigs.freeze(process.pid):
                assert is_silent(process)
            assert not is_silent(process)
            with rigs.freeze(process.pid):
                process.kill()
        finally:
            process.kill()


@rigs.needs("libfaketime")
def test_a_clock_that_jumps():
    code = "import time\nfor _ in range(3): print(time.time(), time.monotonic(), flush=True); input()"
    with rigs.clock_jump(-3600) as clock:
        env = {**os.environ, **clock.env}
        command = [PYTHON, "-c", code]
        with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdin is not None
            offsets, monotonic = [], []
            for seconds in (86400, 0, 0):
                wall, steady = map(float, process.stdout.readline().split())
                offsets.append(round(wall - time.time(), -1))
                monotonic.append(steady)
                clock.jump(seconds)
                process.stdin.write("\n")
                process.stdin.flush()
    assert offsets == [-3600, 86400, 0]
    assert monotonic[-1] - monotonic[0] < 10


HAND_OVER = """
import queue, threading, time
orders = queue.Queue()
threading.Thread(target=lambda: [orders.get().set() for _ in range(200)], daemon=True).start()
late = 0
for _ in range(200):
    done, began = threading.Event(), time.perf_counter()
    orders.put(done)
    done.wait()
    late += time.perf_counter() - began > 0.02
    time.sleep(0.002)
print(late)
"""


@rigs.needs("libfaketime")
def test_threads_under_a_clock_that_is_off_wait_no_longer_than_they_must():
    with rigs.clock_jump(45.0, is_cheap=True) as clock:
        env = {**os.environ, **clock.env}
        done = subprocess.run([PYTHON, "-c", HAND_OVER], env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20


MAKE = """
import sys, time
from shoal.testing import rigs
with rigs.hosts(2) as hosts, rigs.small_disk(1) as disk, rigs.freezer() as group:
    hosts.start(0, ["sleep", "1000"])
    (disk.path / "file").write_text("x")
    print("made", flush=True)
    {act}
"""


@contextmanager
def maker(act: str) -> "Iterator[subprocess.Popen[str]]":
    """A process that has made rigs and then does something."""
    command = [PYTHON, "-c", MAKE.format(act=act)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "made\n"
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)


def names_of(pid: int) -> set[str]:
    """The namespaces and mounts that a process made."""
    mounted = re.findall(r"shoal-rig-[\w-]+", Path("/proc/self/mountinfo").read_text())
    found = [*mounted, *os.listdir(leftovers.NAMESPACES)]
    return {name for name in found if name.startswith(f"shoal-rig-{pid}-")}


everything = rigs.needs("root", "ip", "tc", "network namespaces", "mounting", "freezer cgroups")


@everything
@pytest.mark.parametrize("ending", ["time.sleep(100)", "raise ValueError", "sys.exit(3)"])
def test_everything_goes_with_the_block_however_it_is_left(ending):
    with maker(ending) as process:
        if "sleep" in ending:
            process.send_signal(signal.SIGINT)
        assert process.wait(20) != 0
        assert names_of(process.pid) == set()


@everything
def test_leftovers_of_a_killed_process_go_when_the_next_rig_is_made():
    with maker("time.sleep(100)") as alive, maker("time.sleep(100)") as victim:
        victim.kill()
        victim.wait()
        left = names_of(victim.pid)
        assert len(left) == 4
        hosts = [name for name in left if (leftovers.NAMESPACES / name).exists()]
        deadline, found = time.monotonic() + 20, []
        while not found and time.monotonic() < deadline:  # it may still be on its way into the namespace
            pids = [subprocess.check_output(["ip", "netns", "pids", name], text=True) for name in hosts]
            found = "".join(pids).split()
        (sleeping,) = found
        with rigs.small_disk(1):
            assert names_of(victim.pid) == set()
            assert len(names_of(alive.pid)) == 4  # what others still use stays
        stat = Path("/proc", sleeping, "stat")
        assert not stat.exists() or ") Z " in stat.read_text()

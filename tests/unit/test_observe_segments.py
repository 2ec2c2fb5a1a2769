"""Bounded files: nothing is lost while they are sealed and folded, by whoever, and whoever is killed in between."""

import fcntl
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.observe.lines import Tail
from shoal.observe.segments import (
    Bound,
    BoundedAppender,
    SegmentReader,
    fold_oldest,
    newest_lines,
    read_past,
    sealed_numbers,
)


def join(past: bytes, segment: bytes) -> bytes:
    """A past that forgets nothing."""
    return past + segment


def keep_few(past: bytes, segment: bytes) -> bytes:
    return b"".join((past + segment).splitlines(keepends=True)[-50:])


SMALL = Bound(segment_bytes=300, num_sealed=2, fold=join)


def line(number: int) -> bytes:
    return b"%06d\n" % number


def numbers_in(path: str) -> list[int]:
    return [int(each) for block in SegmentReader(path).read_new() for each in block.lines.split()]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "x.jsonl")


def test_a_short_file_is_a_plain_file(path):
    file = BoundedAppender(path, SMALL)
    assert file.append(line(1)) == 7
    file.close()
    assert Path(path).read_bytes() == line(1)
    assert os.listdir(os.path.dirname(path)) == ["x.jsonl"]


def test_full_parts_are_sealed_and_old_ones_folded(path):
    file = BoundedAppender(path, SMALL)
    for number in range(1000):
        file.append(line(number))
    file.close()
    assert len(sealed_numbers(path)) == 2
    assert read_past(path)[0] == sealed_numbers(path)[0] - 1 > 3
    assert numbers_in(path) == list(range(1000))
    assert newest_lines(path, 3) == line(997) + line(998) + line(999)


def test_the_bound_holds(path):
    file = BoundedAppender(path, Bound(segment_bytes=300, num_sealed=2, fold=keep_few))
    for number in range(3000):
        file.append(line(number))
        if number % 100 == 0:
            total = sum(entry.stat().st_size for entry in os.scandir(os.path.dirname(path)))
            assert total <= 3 * 307 + 50 * 7 + 20
    file.close()
    found = numbers_in(path)
    assert found == list(range(3000 - len(found), 3000))


@pytest.mark.parametrize("stride", [1, 7, 50, 400])
def test_a_reader_gets_every_line_once_while_parts_are_sealed(path, stride):
    """One that looks seldom is told the past again, all of it."""
    file, reader = BoundedAppender(path, SMALL), SegmentReader(path)
    found: list[int] = []
    for number in range(2000):
        file.append(line(number))
        if number % stride == 0:
            for block in reader.read_new():
                found = [] if block.is_past else found
                found += map(int, block.lines.split())
            assert found == list(range(number + 1))
    file.close()


def test_a_reader_from_the_middle_of_a_part_on(path):
    file, reader = BoundedAppender(path, SMALL), SegmentReader(path)
    file.append(line(0))
    assert [block.lines for block in reader.read_new()] == [line(0)]
    for number in range(1, 60):
        file.append(line(number))
    file.close()
    assert b"".join(block.lines for block in reader.read_new()) == b"".join(map(line, range(1, 60)))
    assert list(reader.read_new()) == []


def test_an_unfinished_line_is_kept_back_and_a_cut_one_given(path):
    reader = SegmentReader(path)
    Path(path).write_bytes(b"a\nb")
    assert [block.lines for block in reader.read_new()] == [b"a\n"]
    assert reader.rest == b"b"
    os.rename(path, path + ".1")
    Path(path).write_bytes(b"c\n")
    assert [block.lines for block in reader.read_new()] == [b"b\n", b"c\n"]


def test_a_file_that_became_shorter_is_read_again(path):
    reader = SegmentReader(path)
    Path(path).write_bytes(b"aaaa\nbbbb\n")
    assert list(reader.read_new())
    Path(path).write_bytes(b"c\n")
    assert [block.lines for block in reader.read_new()] == [b"c\n"]


@pytest.mark.parametrize("content", [b"", b"\xff\n", b"[]\n", b'{"until": "x"}\n', b'{"other": 1}\nx\n'])
def test_a_past_that_nobody_can_read_is_none(path, content):
    Path(path + ".past").write_bytes(content)
    Path(path).write_bytes(line(5))
    assert numbers_in(path) == [5]


def test_a_disk_that_refuses_the_past_loses_nothing(path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    file = BoundedAppender(path, SMALL)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", refuse)
        for number in range(500):
            assert file.append(line(number)) == 7
    assert numbers_in(path) == list(range(500))
    for number in range(500, 1000):
        file.append(line(number))
    file.close()
    assert numbers_in(path) == list(range(1000))
    assert len(sealed_numbers(path)) == 2


def test_nobody_waits_for_one_who_was_stopped_with_the_lock(path):
    file = BoundedAppender(path, SMALL)
    file.append(line(0))
    with open(path, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for number in range(1, 60):
            assert file.append(line(number)) == 7
        assert sealed_numbers(path) == []
    for number in range(60, 100):
        file.append(line(number))
    file.close()
    assert len(sealed_numbers(path)) == 1
    assert numbers_in(path) == list(range(100))


def write_many(path: str, writer: int, count: int) -> None:
    file = BoundedAppender(path, Bound(segment_bytes=4000, num_sealed=2, fold=join))
    for number in range(count):
        file.append(line(writer * 100_000 + number))
    file.close()


def test_several_processes_lose_nothing(path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(path, writer, 2000)) for writer in range(4)]
    for each in writers:
        each.start()
    reader, found = SegmentReader(path), []
    while any(each.is_alive() for each in writers):
        for block in reader.read_new():
            found = [] if block.is_past else found
            found += map(int, block.lines.split())
    for each in writers:
        each.join()
        assert each.exitcode == 0
    for block in reader.read_new():
        found = [] if block.is_past else found
        found += map(int, block.lines.split())
    expected = [writer * 100_000 + number for writer in range(4) for number in range(2000)]
    assert sorted(numbers_in(path)) == expected
    assert sorted(found) == expected
    assert read_past(path)[0] > 3


WRITER = """
import sys
sys.path[:0] = [{folder!r}]
from test_observe_segments import SMALL, line
from shoal.observe.segments import BoundedAppender
file = BoundedAppender({path!r}, SMALL)
for number in range({first}, {first} + 100_000):
    file.append(line(number))
    sys.stdout.write(f"{{number}}\\n")
    sys.stdout.flush()
"""


def start_writer(path: str, first: int) -> subprocess.Popen[bytes]:
    code = WRITER.format(path=path, first=first, folder=os.path.dirname(__file__))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


def test_killed_at_any_moment(path):
    """What was said to be written is there, in order, and at most one line more: whenever it was killed."""
    dice, expected = random.Random(3), []
    for round_number in range(6):
        first = 100_000 * (round_number % 9)
        with start_writer(path, first) as writer:
            assert writer.stdout is not None
            told = []
            for _ in range(dice.randrange(1, 400)):
                told.append(int(writer.stdout.readline()))
            writer.send_signal(signal.SIGKILL)
            told += map(int, writer.stdout.read().split())
        expected += told
        found = numbers_in(path)
        if found[-1] == (expected[-1] + 1):
            expected.append(found[-1])
        assert found == expected
    assert read_past(path)[0] > 0


ACTS = """
import os, sys
sys.path[:0] = [{folder!r}]
count = 0
def counted(act):
    def do(*args, **kwargs):
        global count
        count += 1
        if count == {stop}:
            os._exit(9)
        result = act(*args, **kwargs)
        count += 1
        if count == {stop}:
            os._exit(9)
        return result
    return do
for name in ("rename", "replace", "unlink", "fsync", "open", "write", "close"):
    setattr(os, name, counted(getattr(os, name)))
from test_observe_segments import SMALL, line
from shoal.observe import segments
file = segments.BoundedAppender({path!r}, SMALL)
for number in range(4):
    file.append(line({first} + number))
file.close()
os._exit(0)
"""


def test_killed_between_any_two_acts(tmp_path):
    """Before and after each call to the system while parts are sealed and folded, from a file that is about to."""
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    file = BoundedAppender(str(prepared / "x.jsonl"), SMALL)
    for number in range(128):
        file.append(line(number))
    file.close()
    stop = 1
    while True:
        folder = tmp_path / str(stop)
        folder.mkdir()
        for name in os.listdir(prepared):
            (folder / name).write_bytes((prepared / name).read_bytes())
        path = str(folder / "x.jsonl")
        pid = os.fork()
        if pid == 0:
            acts = ACTS.format(path=path, first=128, folder=os.path.dirname(__file__), stop=stop)
            try:
                exec(compile(acts, "acts", "exec"), {"__name__": "acts"})
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        found = numbers_in(path)
        assert found == list(range(len(found))), (stop, os.listdir(folder))
        assert len(found) >= 128
        if code == 0:
            assert len(found) == 128 + 4
            break
        assert code == 9
        # Whoever comes next goes on as if nothing had happened.
        later = BoundedAppender(path, SMALL)
        for number in range(len(found), len(found) + 100):
            later.append(line(number))
        later.close()
        assert numbers_in(path) == list(range(len(found) + 100)), stop
        assert len(sealed_numbers(path)) <= 2
        stop += 1
    assert stop > 30


def test_folding_is_done_by_one_at_a_time(path):
    for number in range(1, 5):
        Path(f"{path}.{number}").write_bytes(line(number))
    with open(f"{path}.1", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        fold_oldest(path, SMALL)
        assert sealed_numbers(path) == [1, 2, 3, 4]
    fold_oldest(path, SMALL)
    assert sealed_numbers(path) == [3, 4]
    assert json.loads(Path(path + ".past").read_bytes().splitlines()[0]) == {"until": 2}
    assert numbers_in(path) == [1, 2, 3, 4]


def test_whoever_follows_only_the_newest_part_still_can(path):
    file, tail, found = BoundedAppender(path, SMALL), Tail(path), b""
    for number in range(200):
        file.append(line(number))
        found += tail.read_lines() or b""
    file.close()
    assert set(map(int, found.split())) <= set(range(200))

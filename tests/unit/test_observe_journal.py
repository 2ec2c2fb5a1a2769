"""The journal and the files beneath it: whole lines, whatever the disk and the data do."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observing import event

from shoal.observe import journal
from shoal.observe.journal import MAX_LINE_BYTES, Journal
from shoal.observe.lines import Appender, Tail, last_lines


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "journal.jsonl")


def write(path, *events):
    with Journal(path) as log:
        for one in events:
            assert log.write(one)


def test_ctrl_c_while_it_is_imported_is_an_error_like_any_other():
    """It comes with the one import that msgspec does not look after."""
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'datetime':\n"
        "            sys.meta_path.remove(self)\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "try:\n"
        "    import shoal.observe.journal\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr


def test_what_is_written_is_read_in_order(path):
    written = [event("start", rank=None), event("checkpoint", rank=0, step=10, path="x", shares=[1, 2])]
    write(path, *written)
    assert list(journal.read(path)) == written


def test_a_missing_journal_has_no_events(path):
    assert list(journal.read(path)) == []


def test_a_torn_last_line_and_garbage_are_passed_over_and_counted(path):
    write(path, event("a"), event("b"))
    whole = Path(path).read_bytes()
    with open(path, "wb") as file:
        file.write(b"\x00\xff garbage\n" + whole + b'{"no": "kind"}\n\n[1,2]\n' + whole[: len(whole) // 2 - 3])
    damaged = []
    assert [one.kind for one in journal.read(path, damaged.append)] == ["a", "b"]
    assert len(damaged) == 4


def test_numbers_that_json_does_not_have_become_words(path):
    write(path, event("nan", loss=float("nan"), rates=[float("inf"), float("-inf")]))
    (found,) = journal.read(path)
    assert found.data == {"loss": "nan", "rates": ["inf", "-inf"]}


class Unspeakable:
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    [
        10**30,
        "\ud800",
        "line\nline",
        {1: {2: (3,)}},
        {"a"},
        object(),
        Unspeakable(),
        b"bytes",
        "🐟" * 9000,
        ["x"] * 9000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value_makes_one_line_that_can_be_read(path, value):
    write(path, event("odd", value=value))
    raw = Path(path).read_bytes()
    assert raw.count(b"\n") == 1
    assert len(raw) <= MAX_LINE_BYTES
    assert len(list(journal.read(path))) == 1


def test_values_nested_without_end_are_cut(path):
    endless: list = []
    endless.append(endless)
    write(path, event("odd", value=endless))
    assert len(list(journal.read(path))) == 1


def test_a_long_line_keeps_the_ends_of_its_texts(path):
    write(path, event("error", traceback="first" + "x" * 10_000 + "last", where="train.py:3"))
    (found,) = journal.read(path)
    assert found.data["traceback"].startswith("first")
    assert found.data["traceback"].endswith("last")
    assert found.data["where"] == "train.py:3"
    assert found.data["truncated"] is True


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=10), json_like, max_size=6), st.text(max_size=80))
def test_every_event_survives_as_at_most_one_short_line(data, kind):
    line = journal.encode(event("x").__class__(kind=kind, time=1.0, data=data), MAX_LINE_BYTES)
    assert b"\n" not in line
    assert len(line) < MAX_LINE_BYTES
    assert journal.decode(line) is not None


def test_threads_never_mix_their_lines(path):
    log = Journal(path)
    threads = [
        threading.Thread(target=lambda rank=rank: [log.write(event("x", rank=rank, n=i)) for i in range(200)])
        for rank in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    damaged: list[bytes] = []
    found = list(journal.read(path, damaged.append))
    assert not damaged
    for rank in range(4):
        assert [one.data["n"] for one in found if one.rank == rank] == list(range(200))


def test_a_full_disk_is_reported_once_and_does_not_raise():
    said: list[str] = []
    with Journal("/dev/full", said.append) as log:
        assert [log.write(event("a")), log.write(event("b"))] == [False, False]
    assert len(said) == 1
    assert "/dev/full" in said[0]
    assert "No space" in said[0]


def test_writing_resumes_when_the_disk_works_again(tmp_path):
    said: list[str] = []
    log = Journal(str(tmp_path / "later" / "journal.jsonl"), said.append)
    assert not log.write(event("lost"))
    (tmp_path / "later").mkdir()
    assert log.write(event("kept"))
    log.close()
    assert [one.kind for one in journal.read(str(tmp_path / "later" / "journal.jsonl"))] == ["kept"]
    assert len(said) == 2
    assert "works again" in said[1]


def test_a_line_cut_by_a_kill_damages_only_itself(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntw")
    lines = Appender(str(path))
    lines.append(b"three\n")
    lines.append(b"four\n")
    lines.close()
    assert path.read_bytes() == b"one\ntw\nthree\nfour\n"


def test_a_line_cut_by_a_full_disk_damages_only_itself(tmp_path, monkeypatch):
    path = str(tmp_path / "file")
    file = Appender(path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) // 2]))
    assert file.append(b"one\ntwo\nthree\nfour\n") == len(b"one\ntwo\n")
    monkeypatch.undo()
    assert file.append(b"three\nfour\n") == len(b"three\nfour\n")
    file.close()
    assert Path(path).read_bytes() == b"one\ntwo\nt\nthree\nfour\n"


class TestTail:
    def test_lines_arrive_when_they_are_complete(self, tmp_path):
        path = tmp_path / "log"
        tail = Tail(str(path))
        assert tail.read_lines() is None
        path.write_bytes(b"one\ntw")
        assert tail.read_lines() == b"one\n"
        path.write_bytes(b"one\ntwo\n")
        assert tail.read_lines() == b"two\n"
        assert tail.read_lines() is None

    def test_a_file_that_became_shorter_is_read_from_its_start(self, tmp_path):
        path = tmp_path / "log"
        path.write_bytes(b"a long first text\n")
        tail = Tail(str(path))
        tail.read()
        path.write_bytes(b"new\n")
        assert tail.read() == b"new\n"

    def test_a_file_that_was_replaced_is_read_from_its_start(self, tmp_path):
        path = tmp_path / "log"
        path.write_bytes(b"one\n")
        tail = Tail(str(path))
        tail.read()
        (tmp_path / "next").write_bytes(b"two and more\n")
        os.replace(tmp_path / "next", path)
        assert tail.read() == b"two and more\n"

    def test_a_folder_in_place_of_a_file_has_nothing_new(self, tmp_path):
        assert Tail(str(tmp_path)).read_lines() is None


@given(
    st.lists(st.binary(max_size=12).filter(lambda line: b"\n" not in line), max_size=12),
    st.booleans(),
    st.integers(0, 15),
    st.integers(1, 8),
)
def test_last_lines_are_those_at_the_end(tmp_path_factory, lines, is_finished, num_lines, block_bytes):
    data = b"\n".join(lines) + (b"\n" if is_finished and lines else b"")
    path = tmp_path_factory.mktemp("tail") / "log"
    path.write_bytes(data)
    whole = data.split(b"\n")
    if whole[-1] == b"":
        whole.pop()
    found, end = last_lines(str(path), num_lines, block_bytes)
    wanted = whole[max(0, len(whole) - num_lines) :]
    assert found == b"\n".join(wanted) + (b"\n" if data.endswith(b"\n") and wanted else b"")
    assert end == len(data)

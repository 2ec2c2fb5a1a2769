"""Which frame of a dump people are shown."""

import faulthandler
import os
import tempfile
import threading

from shoal.engine.frames import Frame, brief, parse, pick, place, tell
from shoal.spec.where import OURS

LIBRARY = "/opt/venv/lib/python3.11/site-packages"


def dump(*threads: list[tuple[str, int, str]]) -> str:
    """What faulthandler would write; the main thread is the last, and the innermost frame the first."""
    texts = []
    for number, frames in enumerate(threads):
        lines = [f'  File "{file}", line {line} in {function}' for file, line, function in frames]
        texts.append("\n".join([f"Thread 0x{number:016x} (most recent call first):", *lines]))
    return "\n\n".join(texts) + "\n"


MAIN = [("/home/a/train.py", 9, "loss"), (f"{OURS}train/loop.py", 5, "step"), ("/home/a/train.py", 30, "<module>")]
BESIDE = [("/usr/lib/python3.11/threading.py", 331, "wait"), (f"{OURS}observe/metrics.py", 77, "_run")]
WAITS = [
    ("/usr/lib/python3.11/threading.py", 331, "wait"),
    (f"{OURS}data/loading.py", 90, "next"),
    (f"{OURS}train/loop.py", 5, "fit"),
    ("/home/a/train.py", 30, "<module>"),
]
READS = [("/home/a/data.py", 12, "__getitem__"), (f"{OURS}data/samples.py", 80, "_read_one")]


def test_a_real_dump() -> None:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file=file)
        file.seek(0)
        threads = parse(file.read().decode())
    assert len(threads) >= threading.active_count()
    assert any(frame.file == os.path.abspath(__file__) for frame in threads[-1])


def test_the_main_thread_and_the_users_line() -> None:
    threads = parse(dump(BESIDE, MAIN))
    thread = pick([threads])
    assert tell(thread, "/home/a") == "train.py:9 in loss, called from train.py:30 in <module>"
    assert place(thread, "/home/a") == "train.py:9"
    assert brief(thread, "/home/a")[1] == "train/loop.py:5 in step"


def test_who_waits_for_data_is_held_up_by_the_thread_that_reads_it() -> None:
    assert place(pick([parse(dump(READS, BESIDE, WAITS))]), "/home/a") == "data.py:12"
    assert place(pick([parse(dump(BESIDE, WAITS))]), "/home/a") == "train.py:30"


def test_or_by_a_process_of_its_own() -> None:
    idle = [
        (f"{LIBRARY}/torch/utils/data/_utils/worker.py", 334, "_worker_loop"),
        ("/home/a/train.py", 30, "<module>"),
    ]
    waits = [(f"{LIBRARY}/torch/utils/data/dataloader.py", 1291, "_get_data"), ("/home/a/train.py", 30, "<module>")]
    thread = pick([parse(dump(BESIDE, waits)), parse(dump(idle)), parse(dump([*READS, *idle]))])
    assert tell(thread, "/home/a").startswith("data.py:12 in __getitem__, called from train.py:30")


def test_where_the_innermost_is_of_a_library_both_are_told() -> None:
    frames = [(f"{LIBRARY}/torch/distributed/c10d.py", 4800, "barrier"), ("/home/a/train.py", 30, "<module>")]
    told = tell(pick([parse(dump(frames))]), "/home/a")
    assert told == "distributed/c10d.py:4800 in barrier, called from train.py:30 in <module>"


def test_nothing_is_nothing() -> None:
    assert parse("") == []
    assert parse("Fatal Python error: \n  File cut o") == []
    assert pick([]) == ()
    assert (tell(()), place(()), brief(())) == ("", "", [])


def test_a_folder_called_data_is_the_users() -> None:
    assert Frame("/data/train.py", "3", "f").is_users
    thread = parse(dump([("/data/train.py", 3, "f")]))
    assert place(pick([thread])) == "/data/train.py:3"

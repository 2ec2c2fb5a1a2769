"""What workers print is kept in parts, of which the first and the newest stay, and read as one."""

import io
import os
from pathlib import Path

import pytest
from observing import Home

from shoal.dash import logs as page_logs
from shoal.engine.log import LEAST_BYTES, NUM_PARTS, Log, limit_of
from shoal.observe import log_parts
from shoal.observe.logs import print_logs
from shoal.observe.runs import list_logs
from shoal.spec.errors import UserError

LIMIT = 8 * 1000


def line(number: int) -> bytes:
    return f"line {number:06} {'x' * 37}\n".encode()  # 50 bytes


def write(path: str, first: int, last: int, limit: int = LIMIT) -> None:
    """Lines in pieces that end anywhere, as a pipe gives them."""
    data = b"".join(line(number) for number in range(first, last))
    log = Log(path, pytest.fail, limit)
    for start in range(0, len(data), 333):
        log.write(data[start : start + 333])
    log.close()


def numbers(data: bytes) -> list[int]:
    return [int(each.split()[1]) for each in data.split(b"\n") if each.startswith(b"line")]


def test_a_short_log_is_one_file(tmp_path: Path) -> None:
    path = str(tmp_path / "0.log")
    write(path, 0, 10)
    assert [each.name for each in tmp_path.iterdir()] == ["0.log"]
    assert log_parts.read_after(path, 0, 10_000).data == b"".join(map(line, range(10)))


def test_a_long_log_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    path = str(tmp_path / "0.log")
    write(path, 0, 1000)
    kept = sum(each.stat().st_size for each in tmp_path.iterdir())
    assert 0.5 * LIMIT < kept <= LIMIT + 2 * 333
    assert len([*tmp_path.iterdir()]) == NUM_PARTS
    first = log_parts.read_after(path, 0, 10**6)
    assert first.start == 0
    assert numbers(first.data) == [*range(len(first.data) // 50)], "whole lines"
    rest = log_parts.read_after(path, first.end, 10**6)
    assert rest.end == rest.log_end == 50 * 1000, "places count all that was printed"
    assert numbers(rest.data) == [*range(rest.start // 50, 1000)]
    assert log_parts.read_after(path, rest.end, 10**6).data == b""


def test_a_log_is_read_back_from_its_end(tmp_path: Path) -> None:
    path = str(tmp_path / "0.log")
    write(path, 0, 1000)
    end, found = None, b""
    while (piece := log_parts.read_before(path, end, 700)).data:
        assert end is None or piece.end <= end
        end, found = piece.start, piece.data + found
    assert end == 0
    kept = numbers(found)
    assert kept == sorted(set(kept))
    assert (kept[0], kept[-1]) == (0, 999)
    assert numbers(log_parts.last_log_lines(path, 30)[0]) == [*range(970, 1000)], "more than the newest part has"


def test_who_follows_a_log_misses_nothing_and_is_told_of_gaps(tmp_path: Path) -> None:
    path = str(tmp_path / "0.log")
    write(path, 0, 5)
    tail, seen = log_parts.LogTail(path), b""
    for first in range(5, 505, 10):
        write(path, first, first + 10)
        seen += tail.read(10_000)
    assert numbers(seen) == [*range(505)]
    write(path, 505, 2000)
    late = tail.read(10**6)
    assert late.startswith(b"[... ")
    assert numbers(late)[-1] == 1999


def test_a_log_without_lines_is_cut_all_the_same(tmp_path: Path) -> None:
    log = Log(str(tmp_path / "0.log"), pytest.fail, LIMIT)
    for _ in range(1000):
        log.write(b"\r50 %" * 20)
    log.close()
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) <= 2 * LIMIT + 1000


def test_what_is_no_file_is_never_renamed(tmp_path: Path) -> None:
    (tmp_path / "0.log").symlink_to(os.devnull)
    write(str(tmp_path / "0.log"), 0, 1000)
    assert [each.name for each in tmp_path.iterdir()] == ["0.log"]


def test_a_log_is_gone_on_with(tmp_path: Path) -> None:
    path = str(tmp_path / "0.log")
    for first in range(0, 1000, 50):
        write(path, first, first + 50)
    assert log_parts.read_before(path, None, 50).log_end == 50 * 1000
    assert len([*tmp_path.iterdir()]) == NUM_PARTS


def test_shoal_logs_and_the_page_read_across_parts(tmp_path: Path) -> None:
    with Home(str(tmp_path)).add("train.py", num_workers=1) as run:
        write(log_parts.log_path(run.path, 0), 0, 1000)
        run.update(status="finished", ended=1050.0, exit_code=0)
    assert list_logs(run.path) == {0: sum(each.stat().st_size for each in Path(run.path, "logs").iterdir())}
    out = io.StringIO()
    print_logs(str(tmp_path), "last", out)
    shown = out.getvalue().encode()
    assert numbers(shown)[0] == 0
    assert numbers(shown)[-1] == 999
    assert shown.count(b"are not kept ...]") == 1
    out = io.StringIO()
    print_logs(str(tmp_path), "last", out, num_lines=40)
    assert numbers(out.getvalue().encode()) == [*range(960, 1000)]
    found = page_logs.search(run.path, [0], "line 000999")["found"]
    assert [one["offset"] for one in found] == [999 * 50]
    assert page_logs.search(run.path, [0], "line 000001")["found"][0]["offset"] == 50
    page = page_logs.read_before(run.path, 0, None, 700)
    assert page["lines"][-1] == line(999).decode().strip()
    end = log_parts.read_after(log_parts.log_path(run.path, 0), 1000, 10**6)
    gap = log_parts.read_after(log_parts.log_path(run.path, 0), end.end, 10**6)
    before = page_logs.read_before(run.path, 0, gap.start, 700)
    assert "are not kept" in before["lines"][-1]


def test_the_limit_can_be_set() -> None:
    assert limit_of({"engine.log_limit": "64MB"}) == 64 << 20
    assert limit_of({}) >= LEAST_BYTES
    for text in ("1k", "much"):
        with pytest.raises(UserError) as caught:
            limit_of({"engine.log_limit": text})
        assert "MB" in caught.value.hint

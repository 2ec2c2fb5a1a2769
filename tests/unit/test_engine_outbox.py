"""Lines to a worker: in order, whole, and never waited for."""

import os
from collections.abc import Iterator

import pytest

from shoal.engine.outbox import MAX_BYTES, Outbox


@pytest.fixture
def pipe() -> Iterator[tuple[int, Outbox]]:
    reader, writer = os.pipe()
    outbox = Outbox(writer)
    yield reader, outbox
    outbox.close()
    os.close(reader)


def read_all(reader: int) -> bytes:
    os.set_blocking(reader, False)
    data = b""
    try:
        while part := os.read(reader, 1 << 20):
            data += part
    except BlockingIOError:
        pass
    return data


def test_lines_arrive_in_order(pipe: tuple[int, Outbox]) -> None:
    reader, outbox = pipe
    assert outbox.put(b"one\n")
    assert outbox.put(b"two\n")
    assert not outbox.flush(), "nothing is left"
    assert read_all(reader) == b"one\ntwo\n"


def test_what_does_not_fit_is_sent_later(pipe: tuple[int, Outbox]) -> None:
    reader, outbox = pipe
    lines = [bytes([65 + number]) * 50_000 + b"\n" for number in range(8)]
    assert all(outbox.put(line) for line in lines)
    data = b""
    while outbox.flush():
        data += read_all(reader)
    assert data + read_all(reader) == b"".join(lines)


def test_memory_is_bounded_and_half_a_conversation_is_none(pipe: tuple[int, Outbox]) -> None:
    _, outbox = pipe
    count = 0
    while outbox.put(b"x" * 100_000):
        outbox.flush()
        count += 1
    assert count * 100_000 < 2 * MAX_BYTES
    assert not outbox.put(b"small")
    assert not outbox.flush()


def test_a_reader_that_is_gone() -> None:
    reader, writer = os.pipe()
    outbox = Outbox(writer)
    os.close(reader)
    assert outbox.put(b"hello\n")
    assert not outbox.flush()
    assert not outbox.put(b"again\n")
    outbox.close()
    outbox.close()

"""The parts of a map that need no second process: packing, messages, the cell, progress, faults at items."""

import os
import pickle
import socket
import threading

import numpy as np
import pytest

from shoal.observe.status import progress_text
from shoal.spec.errors import UserError, WorkerError
from shoal.tasks.cell import Cell, make_cell
from shoal.tasks.errors import ItemError, ending_of, from_worker
from shoal.tasks.packing import LARGE_BYTES, Packed, pack, unpack
from shoal.tasks.progress import Progress
from shoal.tasks.wire import Inbox, Outbox, frame, receive
from shoal.testing import Faults
from shoal.train.faulty import FaultError, FaultPlan


def test_small_values_are_bytes_and_large_arrays_lie_beside_them():
    small = pack({"a": [1, 2.5, "x"], "b": np.arange(10)})
    assert small.fd < 0
    assert unpack(small)["a"] == [1, 2.5, "x"]
    large = pack([np.ones(LARGE_BYTES, dtype=np.uint8), np.zeros(LARGE_BYTES, dtype=np.float32)])
    assert len(large.data) < 1000
    assert large.num_bytes > 5 * LARGE_BYTES
    ones, zeros = unpack(large)
    large.close()
    assert ones.all()
    assert not zeros.any()
    ones[0] = 3  # it is ours


def test_a_later_change_of_what_was_packed_does_not_travel():
    array = np.ones(LARGE_BYTES)
    packed = pack(array)
    array[:] = 2
    assert unpack(packed)[0] == 1
    packed.close()


def test_what_the_program_defines_travels_by_value():
    assert unpack(pack(lambda value: value + 1))(1) == 2


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int64", "complex64"])
def test_tensors_of_all_kinds(shape, dtype):
    import torch

    tensor = torch.ones(shape, dtype=getattr(torch, dtype))
    back = unpack(pack([tensor, tensor.unsqueeze(0).expand(2, *shape)]))
    assert torch.equal(back[0], tensor)
    assert back[0].dtype == tensor.dtype
    assert back[1].shape == (2, *shape)
    needy = unpack(pack(torch.ones(2, requires_grad=True)))
    assert needy.requires_grad


def test_messages_arrive_whole_in_order_and_with_their_descriptors():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        outbox, inbox, found = Outbox(ours), Inbox(), []
        packed = pack(np.ones(LARGE_BYTES, dtype=np.uint8))
        sent = ["x" * 3_000_000, "with", "last"]
        for text in sent:
            outbox.put(frame(text, has_fd=text == "with"), packed.fd if text == "with" else -1)
        packed.close()

        def read() -> None:
            while len(found) < len(sent):
                found.extend(inbox.feed(*receive(theirs)))

        reader = threading.Thread(target=read)
        reader.start()
        while outbox.flush():
            pass
        reader.join(10)
    assert [text for text, _ in found] == sent
    assert [fd >= 0 for _, fd in found] == [False, True, False]
    assert os.fstat(found[1][1]).st_size == LARGE_BYTES
    os.close(found[1][1])


def test_a_reader_that_is_gone_gets_nothing_and_nothing_stays_open():
    before = os.listdir("/proc/self/fd")
    ours, theirs = socket.socketpair()
    theirs.close()
    outbox = Outbox(ours)
    packed = pack(np.ones(LARGE_BYTES))
    outbox.put(frame("a"))
    outbox.put(frame("b", has_fd=True), packed.fd)
    assert not outbox.flush()
    packed.close()
    ours.close()
    assert os.listdir("/proc/self/fd") == before


def test_a_cell_says_which_item_and_since_when():
    fd = make_cell()
    mine, theirs = Cell(fd), Cell(fd)
    os.close(fd)
    assert theirs.read()[0] is None
    mine.enter(0, 1.5)
    assert theirs.read() == (0, 1.5)
    mine.leave()
    assert theirs.read() == (None, 1.5)
    mine.close()
    theirs.close()


def test_progress_is_shown_ten_times_a_second_and_noted_every_two():
    shown, noted, now = [], [], [0.0]
    progress = Progress(shown.append, noted.append, clock=lambda: now[0])
    for tick in range(1, 65):
        now[0] = tick / 16
        progress.told(3 * tick, 400, 4, 1)
    assert len(shown) == 32
    assert len(noted) == 2
    text = progress_text({0: {"step": shown[-1].step, **shown[-1].data}})
    assert text == "items 192/400  48 items/s  4 workers  eta 0:04"
    progress.ended(400, 400, 4, 1)
    assert noted[-1].data == {"done": 400, "total": 400, "per_second": 100.0, "retries": 1}


def test_an_error_keeps_its_item_and_its_cause():
    facts = {"type": "KeyError", "message": "'a'", "where": "x.py:3", "traceback": "...", "pickle": None}
    error = from_worker(7, {**facts, "pickle": pickle.dumps(KeyError("a"))}, worker=1)
    assert error.message == "Item 7: KeyError: 'a'"
    assert (error.item, error.rank, error.where) == (7, 1, "x.py:3")
    assert isinstance(error.__cause__, KeyError)
    error.results = {1: 2}
    again = pickle.loads(pickle.dumps(error))
    assert (again.item, again.results) == (7, {1: 2})
    assert from_worker(7, {**facts, "pickle": b"broken"}, worker=1).__cause__ is None


def test_how_a_map_ends():
    assert ending_of(None) == ("finished", 0)
    assert ending_of(GeneratorExit()) == ("stopped", 0)
    assert ending_of(KeyboardInterrupt()) == ("stopped", 130)
    assert ending_of(ItemError("x")) == ("failed", WorkerError.exit_code)
    assert ending_of(UserError("x")) == ("failed", 2)


def test_a_fault_at_an_item_strikes_whoever_has_it_once_each(tmp_path):
    faults = Faults().fail(item=5).fail(item=5).kill(rank=1, step=3)
    assert Faults.parse(faults.to_json()) == faults
    assert str(faults.faults[0]) == "fail of whoever has item 5 at forward"
    plan = {number: fault for number, fault in enumerate(faults) if fault.rank is None}
    first = FaultPlan(plan, rank=0, run_dir=str(tmp_path))
    second = FaultPlan(plan, rank=1, run_dir=str(tmp_path))
    first.reach("forward", 4)
    with pytest.raises(FaultError):
        first.reach("forward", 5)
    with pytest.raises(FaultError):
        second.reach("forward", 5)
    second.reach("forward", 5)
    second.reach("forward", 6)


@pytest.mark.parametrize("make", [lambda: Faults().kill(), lambda: Faults().hang(step=3)])
def test_a_fault_says_whom_it_strikes(make):
    with pytest.raises(UserError, match="does not say whom"):
        make()


def test_packed_values_without_memory_need_no_closing():
    Packed(b"").close()

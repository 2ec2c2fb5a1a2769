"""Schedules of a pipeline: everything is done once, nobody waits for ever, and the bubble is what theory says."""

import pytest

from shoal.train.split.schedule import CHUNKS, Op, count_kept, ideal_bubble, list_messages, plan_order

SCHEDULES = ("gpipe", "1f1b", "interleaved")
CASES = [(name, size, m) for name in SCHEDULES for size in (2, 3, 4) for m in (1, 2, 3, 5, 8, 12)]


def orders_of(schedule, size, num_microbatches):
    return [plan_order(schedule, size, worker, num_microbatches) for worker in range(size)]


def simulate(orders, num_chunks, forward=1.0, backward=2.0):
    """When each op ends, if every worker takes its ops in order, each as soon as what it needs is there."""
    ends, at, clocks = {}, [0] * len(orders), [0.0] * len(orders)
    while any(position < len(order) for position, order in zip(at, orders, strict=True)):
        moved = False
        for worker, order in enumerate(orders):
            while at[worker] < len(order):
                op = order[at[worker]]
                needed = [Op(True, op.chunk - 1, op.microbatch)] if op.is_forward and op.chunk else []
                if not op.is_forward:
                    needed = [Op(True, op.chunk, op.microbatch)]
                    needed += [Op(False, op.chunk + 1, op.microbatch)] if op.chunk + 1 < num_chunks else []
                if any(each not in ends for each in needed):
                    break
                clocks[worker] = max([clocks[worker], *(ends[each] for each in needed)])
                clocks[worker] += forward if op.is_forward else backward
                ends[op], at[worker], moved = clocks[worker], at[worker] + 1, True
        assert moved, "everybody waits for somebody"
    return ends


@pytest.mark.parametrize(("schedule", "size", "num_microbatches"), CASES)
def test_everything_is_done_once_and_nobody_waits_for_ever(schedule, size, num_microbatches):
    orders = orders_of(schedule, size, num_microbatches)
    num_chunks = CHUNKS[schedule] * size
    done = [op for order in orders for op in order]
    wanted = {Op(way, c, m) for way in (True, False) for c in range(num_chunks) for m in range(num_microbatches)}
    assert len(done) == len(set(done)) == len(wanted)
    assert set(done) == wanted
    assert all(op.chunk % size == worker for worker, order in enumerate(orders) for op in order)
    simulate(orders, num_chunks)


@pytest.mark.parametrize(("schedule", "size", "num_microbatches"), CASES)
def test_backwards_of_a_chunk_come_in_the_order_of_micro_batches(schedule, size, num_microbatches):
    """So gradients are added up in the order of shards, as in one process."""
    for order in orders_of(schedule, size, num_microbatches):
        for chunk in {op.chunk for op in order}:
            numbers = [op.microbatch for op in order if op.chunk == chunk and not op.is_forward]
            assert numbers == list(range(num_microbatches))


@pytest.mark.parametrize(("schedule", "size", "num_microbatches"), [c for c in CASES if c[2] % c[1] == 0])
def test_the_bubble_is_that_of_theory(schedule, size, num_microbatches):
    chunks = CHUNKS[schedule]
    ends = simulate(orders_of(schedule, size, num_microbatches), chunks * size)
    busy = num_microbatches * chunks * 3.0
    assert 1 - busy / max(ends.values()) == pytest.approx(ideal_bubble(schedule, size, num_microbatches))


def test_the_textbook_order_of_two_stages():
    first, last = orders_of("1f1b", 2, 3)
    assert [(op.is_forward, op.microbatch) for op in first] == [
        (True, 0), (True, 1), (False, 0), (True, 2), (False, 1), (False, 2),
    ]  # fmt: skip
    assert [(op.is_forward, op.microbatch) for op in last] == [
        (True, 0), (False, 0), (True, 1), (False, 1), (True, 2), (False, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("num_microbatches", [8, 32])
def test_1f1b_keeps_no_more_than_there_are_stages(num_microbatches):
    for worker, order in enumerate(orders_of("1f1b", 4, num_microbatches)):
        under_way = most = 0
        for op in order:
            under_way += 1 if op.is_forward else -1
            most = max(most, under_way)
        assert most == 4 - worker


@pytest.mark.parametrize(("schedule", "size", "num_microbatches"), CASES)
def test_every_message_is_expected_by_whoever_gets_it(schedule, size, num_microbatches):
    orders = orders_of(schedule, size, num_microbatches)
    sent = [m for order in orders for to in range(size) for m in list_messages(order, size, to)]
    wanted = 2 * (CHUNKS[schedule] * size - 1) * num_microbatches
    assert len(sent) == len(set(sent)) == wanted


def test_early_stages_keep_more_microbatches_than_late_ones():
    assert count_kept("1f1b", 4, 8) == [4, 3, 2, 1]
    assert count_kept("1f1b", 4, 2) == [2, 2, 2, 1]
    assert count_kept("gpipe", 3, 8) == [8, 8, 8]
    assert len(count_kept("interleaved", 2, 8)) == 4

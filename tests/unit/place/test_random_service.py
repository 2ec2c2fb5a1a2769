"""Whatever happens to a queue: nothing twice, no cap or budget passed, no loops, nobody beside free room.

`SHOAL_TEST_EVENTS` sets how many events are driven in all: a million, a millisecond each on one core, and all
cores are used.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context

import pytest
from driving_service import drive_service

from shoal.place.policies import POLICIES

EVENTS_A_SEED = 400
NUM_EVENTS = int(os.environ.get("SHOAL_TEST_EVENTS", "1000000"))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_promises_hold_from_the_queue_to_the_keepers(name):
    drive_service(name, seed=1, num_events=40)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_promises_hold_for_as_many_events_as_are_asked_for(name):
    num_seeds = -(-NUM_EVENTS // (EVENTS_A_SEED * len(POLICIES)))
    seeds = range(100, 100 + num_seeds)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        for counts in pool.map(drive_service, repeat(name), seeds, repeat(EVENTS_A_SEED)):
            assert counts["events"] == EVENTS_A_SEED

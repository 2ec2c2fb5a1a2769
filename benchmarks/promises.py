"""Whether the service keeps its promises: random events against policy, deciding, reclaim and jobs together.

Every policy is driven on many small clusters: jobs come, end, fail and are lost, nodes go and come back, people hold,
cancel, resize and requeue, caps and lending change, keepers take their time. After every event all is checked that
`tests/unit/place/driving_service.py` lists: nothing is given out twice, no cap or budget is passed, nobody waits
beside room that it may use, nobody is stopped again and again, everything comes to rest. The first event that breaks
one of them ends the run with its seed. `SHOAL_TEST_EVENTS` is how many events there are, a million if it is not set;
`SHOAL_TEST_SECONDS` ends the run after so many seconds, and the result says how many there were.
"""

import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

from benchmarks.harness import say
from shoal.place.policies import POLICIES

EVENTS_A_SEED = 400
QUICK_EVENTS = 20
NUM_SEEDS = 8
"""So many clusters of each policy are given to the processes at once, so that none waits for the slowest of few."""


def main(rounds: int, is_quick: bool = False) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "place"))
    from driving_service import drive_service

    wanted = len(POLICIES) * QUICK_EVENTS if is_quick else int(os.environ.get("SHOAL_TEST_EVENTS", "1000000"))
    each = QUICK_EVENTS if is_quick else EVENTS_A_SEED
    first = seed = int(os.environ.get("SHOAL_TEST_FIRST_SEED", "1000"))
    until = time.monotonic() + float(os.environ.get("SHOAL_TEST_SECONDS", "inf"))
    found: dict[str, Counter[str]] = {name: Counter() for name in sorted(POLICIES)}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        while (left := wanted - sum(counts["events"] for counts in found.values())) > 0 and time.monotonic() < until:
            seeds = range(seed, seed + min(-(-left // (each * len(found))), NUM_SEEDS))
            tasks = [(name, number) for number in seeds for name in found]
            names, numbers = zip(*tasks, strict=True)
            for name, counts in zip(names, pool.map(drive_service, names, numbers, repeat(each)), strict=True):
                found[name].update(counts)
                found[name]["clusters"] += 1
            seed = seeds.stop
            say(f"promises: {sum(counts['events'] for counts in found.values())} events, none broke a promise")
    columns = (
        "events",
        "clusters",
        "starts",
        "stops",
        "moves",
        "resizes",
        "reclaims",
        "finished",
        "failed",
        "cancelled",
    )
    rows = [{"policy": policy, **{name: counts[name] for name in columns}} for policy, counts in found.items()]
    total = sum(row["events"] for row in rows)
    notes = [f"{total} events of {wanted} asked for, seeds {first} to {seed - 1}; no promise was broken"]
    return {"rows": rows, "num_events": total, "num_broken": 0, "notes": notes}

"""The service is killed five hundred times while eight clients submit ten thousand jobs: none lost, none double.

Five hundred of the jobs run, each once. One of them runs throughout and is taken up again after every kill.
`SERVICE_KILLS=50 SERVICE_JOBS=1000 python -m pytest -m slow tests/chaos/test_service_kills.py` is a short one.
With `SERVICE_KILLS_RESULT=FILE` what came of it is written there as JSON, with date, commit and machine.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks import harness

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))

from served import serving
from storm import RUNS_EVERY, check_account, storm

NUM_KILLS = int(os.environ.get("SERVICE_KILLS", "500"))
NUM_JOBS = int(os.environ.get("SERVICE_JOBS", "10000"))
NUM_CLIENTS = 8


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_job_is_lost_or_double_however_often_the_service_is_killed(home: Path) -> None:
    began = time.monotonic()
    with serving(home) as daemon:
        account = storm(daemon, num_jobs=NUM_JOBS, num_clients=NUM_CLIENTS, num_kills=NUM_KILLS, seed=7)
        assert daemon.stop() == 0, daemon.log
    check_account(daemon, account, NUM_JOBS)
    assert max(account.adopted_seconds) < 60, "a bound on a machine that is very busy"
    if path := os.environ.get("SERVICE_KILLS_RESULT"):
        told = {
            "num_jobs": NUM_JOBS,
            "num_clients": NUM_CLIENTS,
            "num_kills": NUM_KILLS,
            "num_lost": 0,
            "num_double": 0,
            "num_that_ran": len(range(0, NUM_JOBS, RUNS_EVERY)),
            "num_that_ran_twice": 0,
            "seconds": time.monotonic() - began,
            "checks": [
                harness.check(
                    "seconds from a start of the service until it answers and has taken up the job that runs",
                    harness.summarize(account.adopted_seconds),
                    "≤ 5",
                )
            ],
        }
        Path(path).write_text(json.dumps({"benchmark": "service_kills", **harness.origin(), **told}, indent=1) + "\n")

"""One rank on a host of its own: `host_rank.py RANK SIZE ADDRESS PORT TIMEOUT`. It says what it sees, as JSON."""

import json
import sys
import time
from datetime import timedelta

import torch

from shoal.comm.connect import connect
from shoal.comm.rendezvous import open_store
from shoal.spec.errors import ShoalError

torch.set_num_threads(1)


def say(**facts: object) -> None:
    print(json.dumps({"at": time.monotonic(), **facts}), flush=True)


def main(rank: int, size: int, address: str, port: int, timeout: float) -> None:
    store = open_store(address, port, rank, size)
    # Importing torch takes as long as it takes; only what comes after has to be fast.
    store.set(f"here/{rank}", "yes")
    store.wait([f"here/{peer}" for peer in range(size)], timedelta(seconds=60))
    group = connect(rank, size, store, transport="tcp", timeout_seconds=timeout)
    values = torch.ones(250_000)
    group.all_reduce(values).wait()
    started = time.monotonic()
    group.all_reduce(values).wait()
    say(seen="sum", seconds=time.monotonic() - started, value=values[0].item())
    number = torch.zeros(1)
    try:
        while True:
            group.all_reduce(number).wait()
            say(seen="step")
            time.sleep(1.0)  # whoever is cut off now is missed in a call that no other is late for
    except ShoalError as error:
        say(seen=type(error).__name__, ranks=list(getattr(error, "ranks", ())), message=error.message, why=error.why)
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))

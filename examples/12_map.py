"""One function, many items, worker processes that may die: `shoal.map(function, items, workers=4)`.

    python examples/12_map.py

Start it with plain `python`: the workers are started from inside, and need no torch. Whoever is free gets the next
item, and results come in the order of the items. An item whose worker dies is given to another.
"""

import shoal
from shoal.testing import Faults


def count_primes(limit):
    """Work of very different sizes: balanced by handing out one item after the other."""
    sieve = bytearray([1]) * limit
    sieve[:2] = b"\0\0"
    for number in range(2, int(limit**0.5) + 1):
        if sieve[number]:
            sieve[number * number :: number] = bytes(len(range(number * number, limit, number)))
    return sum(sieve)


def careful(number):
    if number == 13:
        raise ValueError("unlucky")
    return number * number


# A list comes back.
print(shoal.map(count_primes, [10**power for power in range(1, 7)], workers=2, is_quiet=True))

# Workers are killed in the middle of items 3 and 40: nobody notices, but in time.
faults = Faults().kill(item=3).kill(item=40)
squares = shoal.map(lambda number: number * number, range(1000), workers=2, env=faults.env(), is_quiet=True)
print("all of them, each once:", squares == [number * number for number in range(1000)])

# An iterator takes from an endless source as it goes.
naturals = iter(range(10**12))
with_primes = shoal.map(count_primes, naturals, workers=2, is_lazy=True, is_quiet=True)
first = next(number for number, primes in enumerate(with_primes) if primes == 100)
with_primes.close()
print("the hundredth prime is below", first)

# An error of the function says which item it was, and keeps what was done.
try:
    shoal.map(careful, range(20), workers=2, is_quiet=True)
except shoal.WorkerError as error:
    print(f"{error.message} (item {error.item}); what was done is kept: {sorted(error.results)[:3]} ...")

# Or errors stand in place of results.
results = shoal.map(careful, range(12, 15), workers=2, on_error="return", is_quiet=True)
print([type(result).__name__ for result in results])

"""Whatever happens, promises are kept: nothing twice, no gang in parts, no loops, nobody beside free room."""

import pytest
from driving import drive

from shoal.place.policies import POLICIES


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(4))
def test_promises_hold_whatever_happens(name, seed):
    drive(POLICIES[name], seed=seed, num_events=150, is_mild=seed % 2 == 0)

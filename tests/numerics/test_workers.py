"""The same result for any number of workers: to the last bit in exact mode, to rounding without it."""

import pytest
import torch

import shoal
from tests.numerics import models

SHARES = {1: (1.0,), 2: (3.0, 1.0), 3: (1.0, 1.0, 1.0), 4: (1.0, 2.0, 1.0, 4.0), 5: (1.0, 1.0, 3.0, 1.0, 1.0)}
"""Uneven on purpose: who computes which shard must not matter."""

EXACT = {"exact": True}
EXACT_TCP = {"exact": True, "transport": "tcp"}
SGD = {"optimizer": torch.optim.SGD}
SGD_TCP = {"optimizer": torch.optim.SGD, "transport": "tcp"}


def run(num_workers, folder, *configs):
    """Train under each configuration, in one set of workers; returns the results of rank 0."""
    values = shoal.launch(
        models.train_all,
        num_workers,
        args=([{"shares": SHARES[num_workers], **config} for config in configs],),
        run_dir=str(folder / "run"),
        is_quiet=True,
    )
    assert all(value == values[0] for value in values[1:]), "the workers do not agree among themselves"
    return values[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(1, tmp_path_factory.mktemp("alone"), EXACT, SGD)


@pytest.mark.parametrize("num_workers", [3, *(pytest.param(number, marks=pytest.mark.slow) for number in (4, 5))])
def test_exact_mode_gives_the_same_bits(num_workers, alone, tmp_path):
    (found,) = run(num_workers, tmp_path, EXACT)
    assert found == alone[0]


def test_two_workers_in_every_way(alone, tmp_path):
    """Exact: the same bits, through shared memory and through sockets. Else: to rounding.

    Sums are then taken in another order, so each step differs in the last bits of a float32, 6e-8 of its size.
    Twelve steps let that grow; 1e-5 is what it may come to, far below what a wrong weighting of samples would cause.
    """
    exact, exact_tcp, sgd, sgd_tcp = run(2, tmp_path, EXACT, EXACT_TCP, SGD, SGD_TCP)
    assert exact == alone[0]
    assert exact_tcp == alone[0]
    for found in (sgd, sgd_tcp):
        for kind, (_, losses, parameters) in found.items():
            assert losses == pytest.approx(alone[1][kind][1], rel=1e-5), kind
            assert parameters == pytest.approx(alone[1][kind][2], rel=1e-5, abs=1e-5), kind

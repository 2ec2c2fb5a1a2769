"""The gradient noise that training measures is what it must be, where that is known; and nothing else changes."""

import json

import numpy as np
import pytest

import shoal
from shoal.observe.explain import explain
from shoal.observe.metrics import read
from shoal.observe.noise import find_noise
from shoal.train.noise import estimate
from tests.numerics import noisy

KNOWN = {"every": 1, "steps": noisy.STEPS, "lr": 0.0}
MOVING = {"steps": 20, "lr": 0.05}


def run(num_workers, folder, configs):
    return shoal.launch(noisy.train_all, num_workers, args=(configs,), run_dir=str(folder / "run"), is_quiet=True)[0]


def check_known(rows):
    """Means over the steps of one config are within four standard errors, which are small."""
    assert len(rows) == noisy.STEPS
    for name, expected in (("grad_signal", 1.0), ("grad_variance", noisy.VARIANCE)):
        values = np.array([getattr(row, name) for row in rows])
        error = values.std() / len(values) ** 0.5
        assert error < 0.12 * expected
        assert abs(values.mean() - expected) < 4 * error, name


def test_unequal_workers_measure_the_known_noise(tmp_path):
    """Through shared memory and sockets, and in exact mode, whose parts are subtrees; parameters stay the same."""
    ways = [{"transport": "auto"}, {"transport": "tcp"}, {"exact": True}]
    shares = {"shares": (3.0, 1.0)}
    with_it = [{**MOVING, **way, **shares, "every": 1} for way in ways]
    without = [{**MOVING, **way, **shares, "every": 10**9} for way in ways]
    found = run(2, tmp_path, [*({**KNOWN, **way, **shares} for way in ways), *with_it, *without])
    assert found[3:6] == found[6:9]
    rows = read(str(tmp_path / "run"))[0]
    shared, sockets, exact = (rows[place * noisy.STEPS :][: noisy.STEPS] for place in range(3))
    for known in (shared, sockets, exact):
        check_known(known)
    # They had the same gradients, but for the order of sums.
    assert [row.grad_variance for row in shared] == pytest.approx([row.grad_variance for row in sockets], rel=1e-3)
    last = rows[-MOVING["steps"] :]
    assert [row.grad_signal is not None for row in last] == [True] + [False] * (len(last) - 1)


def test_one_worker_measures_it_from_micro_batches(tmp_path):
    found = run(
        1,
        tmp_path,
        [
            {**KNOWN, "microbatch_size": 16},
            {**MOVING, "microbatch_size": 16, "every": 1},
            {**MOVING, "microbatch_size": 16, "every": 10**9},
            {**MOVING, "every": 1},
        ],
    )
    assert found[1] == found[2]
    rows = read(str(tmp_path / "run"))[0]
    check_known(rows[: noisy.STEPS])
    assert all(row.grad_signal is None for row in rows[-20:])  # there is nothing to compare one piece with
    told = explain(str(tmp_path / "run"))
    assert json.loads(told.json())["noise_scale"] == told.noise_scale
    assert "gradient noise scale" in told.text()
    frame = shoal.open_run(str(tmp_path / "run")).frame(names=["noise_scale", "grad_signal", "grad_variance"])
    smooth = find_noise(rows[: noisy.STEPS]).samples
    assert frame["noise_scale"][noisy.STEPS - 1] == smooth == pytest.approx(noisy.VARIANCE, rel=0.6)


def test_parts_of_any_sizes_give_no_bias():
    random = np.random.default_rng(0)
    sizes, mean, spread = np.array([1, 5, 26]), np.array([0.6, -0.8]), np.array([2.0, 1.0])
    signals, variances = [], []
    for _ in range(4000):
        samples = mean + spread * random.standard_normal((sizes.sum(), 2))
        sums = np.add.reduceat(samples, np.cumsum(sizes) - sizes)
        ratio, square = (np.sum(sums**2, 1) / sizes).sum(), np.sum(samples.mean(0) ** 2)
        noise = estimate(ratio, 3, None, square=square, weight=32.0, num_samples=32.0)
        signals.append(noise.signal)
        variances.append(noise.variance)
    assert np.mean(signals) == pytest.approx(1.0, abs=0.03)
    assert np.mean(variances) == pytest.approx(5.0, rel=0.05)


def test_what_tells_nothing_is_absent():
    assert estimate(1.0, 1, None, square=1.0, weight=8.0, num_samples=8.0) is None
    assert estimate(1.0, 1, (1.0, 8.0), square=1.0, weight=8.0, num_samples=8.0) is None
    assert estimate(float("inf"), 2, None, square=1.0, weight=8.0, num_samples=8.0) is None

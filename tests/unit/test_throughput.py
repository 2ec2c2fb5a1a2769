"""What is learned of a job's speed: slopes that are true, terms that come back, and certainty that grows."""

import numpy as np
import pytest

from shoal.place.batching import Batching, LearnedRate, best_batch
from shoal.place.prior import PastJob, Traits, learn
from shoal.place.throughput import NOISE, Design, Observation, fit, predict, slopes_of
from shoal.spec.prediction import Prediction

SIZES = ((1, 1, 8.0), (1, 2, 16.0), (1, 4, 4.0), (2, 4, 8.0), (2, 8, 8.0), (3, 12, 16.0), (4, 16, 4.0))


def job(speed: float, kind: str = "", sizes=SIZES) -> tuple[Observation, ...]:
    """A job whose steps follow the model exactly, `speed` times as fast as the usual one."""
    seen = []
    for nodes, workers, micro in sizes:
        grad = (0.05 + 0.01 * micro) / speed
        base, growth = (0.03, 0.01) if nodes == 1 else (0.1, 0.04)
        sync = 0.0 if workers == 1 else base + growth * np.log2(workers / 2)
        step = float((grad**2 + sync**2) ** 0.5)
        seen.append(
            Observation(
                nodes=nodes,
                workers=workers,
                micro_batch=micro,
                step_seconds=step,
                sync_seconds=step - grad,
                kind=kind,
            )
        )
    return tuple(seen)


def test_slopes_are_those_of_differences():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(3, 14))
    design = Design(
        np.array([0, 1, 2, 0, 1, 2]),
        np.array([1.0, 1, 2, 2, 3, 4]),
        np.array([1.0, 4, 2, 8, 3, 9]),
        rng.uniform(1, 9, 6),
        np.array([0.0, 2, 0, 1, 0, 3]),
    )
    grad, step = slopes_of(predict(z, design), design, 14)
    for i in range(14):
        shift = np.eye(14)[i] * 1e-6
        high, low = predict(z + shift, design), predict(z - shift, design)
        assert (high.grad - low.grad) / 2e-6 == pytest.approx(grad[..., i], abs=1e-6)
        assert (high.step - low.step) / 2e-6 == pytest.approx(step[..., i], abs=1e-6)


def test_a_job_that_follows_the_model_is_predicted_where_it_was_not_seen():
    fitted = fit(job(1.0))
    grad, sync = 0.05 + 0.01 * 12, 0.1 + 0.04 * 4
    assert fitted.seconds(8, 32, 12.0) == pytest.approx((grad**2 + sync**2) ** 0.5, rel=0.05)
    assert fitted.seconds(8, 32, 12.0, 1) == pytest.approx(grad + (grad**2 + sync**2) ** 0.5, rel=0.05)
    assert fitted.spread(8, 32, 12.0) < 0.2


def test_what_was_not_observed_is_thought_to_cost_nothing_and_is_uncertain():
    fitted = fit(job(1.0, sizes=((1, 1, 8.0), (1, 1, 16.0))))
    assert fitted.seconds(4, 16, 8.0) == pytest.approx(float(fitted.seconds(1, 1, 8.0)), rel=0.01)
    assert fitted.largest_workers == 1


def test_measured_steps_are_within_their_spread_as_often_as_it_says():
    """Jobs drawn from the prior, four noisy configurations of each seen: 68 % of errors are within a spread."""
    random, prior = np.random.default_rng(1), learn([]).expect(Traits(micro_batch=32, sizes={}))
    nodes, workers, micro = (np.array(each, float) for each in zip(*SIZES, (6, 24, 32.0), (8, 8, 24.0), strict=True))
    design = Design(np.zeros(len(nodes), int), nodes, workers, micro, np.zeros(len(nodes)))
    within = []
    for _ in range(80):
        true = predict(random.multivariate_normal(prior.mean, prior.covariance), design)
        step, grad = (np.exp(each + random.normal(0, NOISE, len(nodes))) for each in (true.step, true.grad))
        seen = [
            Observation(
                nodes=int(nodes[i]),
                workers=int(workers[i]),
                micro_batch=micro[i],
                step_seconds=step[i],
                sync_seconds=max(step[i] - grad[i], 0.0),
            )
            for i in range(len(nodes))
        ]
        chosen = random.permutation(len(seen))
        fitted = fit([seen[i] for i in chosen[:4]], prior)
        rest = chosen[4:]
        off = np.log(step[rest] / fitted.seconds(nodes[rest], workers[rest], micro[rest]))
        within.append(np.abs(off) < fitted.spread(nodes[rest], workers[rest], micro[rest]))
    assert 0.6 < np.mean(within) < 0.8


def test_what_the_model_cannot_say_is_learned_near_where_it_was_seen():
    """A job that is slow in one configuration, whatever the terms say, is so near it, and hardly so far from it."""
    seen = job(1.0, sizes=[(1, workers, micro) for workers in (1, 2, 4) for micro in (4.0, 8.0, 32.0, 64.0)])
    slow = Observation(nodes=1, workers=4, micro_batch=16.0, step_seconds=0.35, sync_seconds=None)
    plain, fitted = fit(seen), fit([*seen, slow])
    asked = np.array([(1, 4, 16.0), (1, 4, 20.0), (1, 1, 64.0)]).T
    same, beside, far = fitted.seconds(*asked) / plain.seconds(*asked)
    assert same > beside > 1.1
    assert far == pytest.approx(1, abs=0.05)
    assert fitted.spread(1, 4, 16.0) < fitted.spread(1, 4, 1000.0)


def test_past_jobs_tell_of_sizes_and_kinds_that_a_new_job_has_not_seen():
    history = [
        PastJob(
            traits=Traits(micro_batch=16, sizes={"parameter_bytes": 1e6 * speed}),
            observations=job(speed, "slow") + job(4 * speed, "fast"),
        )
        for speed in (0.5, 0.8, 1.0, 1.25, 2.0)
    ]
    prior = learn(history, rounds=3)
    seen = job(1.1, "slow", sizes=((1, 1, 8.0), (1, 2, 16.0)))
    fitted = prior.fit(Traits(micro_batch=16, sizes={}), seen)
    (expected,) = job(1.1, "slow", sizes=((4, 16, 4.0),))
    assert fitted.seconds(4, 16, 4.0, kind="slow") == pytest.approx(expected.step_seconds, rel=0.25)
    (expected,) = job(4.4, "fast", sizes=((1, 1, 8.0),))
    assert fitted.seconds(1, 1, 8.0, kind="fast") == pytest.approx(expected.step_seconds, rel=0.25)
    before = prior.fit(Traits(micro_batch=16, sizes={}))
    assert fitted.spread(1, 4, 8.0, kind="slow") < before.spread(1, 4, 8.0, kind="slow")
    assert fitted.seconds(1, 4, 8.0, kind="slow", optimism=1.0) < fitted.seconds(1, 4, 8.0, kind="slow")


def test_the_best_batch_keeps_to_its_limits_and_grows_only_where_noise_allows():
    fitted = fit(job(1.0))
    fixed = best_batch(fitted, Batching(initial=32, largest=32, largest_micro=8), 1, [1, 2, 4, 64])
    assert fixed.micro_batch.tolist()[:3] == [8, 8, 8]
    assert fixed.accumulation.tolist()[:3] == [3, 1, 0]
    assert fixed.goodput[3] == 0  # 64 workers have no 32 samples
    free = Batching(initial=32, largest=1024, largest_micro=64)
    quiet, noisy = (
        best_batch(fitted, b, 4, 16)
        for b in (free, LearnedRate(throughput=fitted, batching=free).with_noise(1e5).batching)
    )
    assert quiet.batch == pytest.approx(32)
    assert noisy.batch == pytest.approx(1024)


def test_a_rate_is_a_lookup_and_can_be_careful():
    fitted = fit(job(1.0, sizes=SIZES[:3]))
    rate = LearnedRate(throughput=fitted, batching=Batching(initial=64, largest=64, largest_micro=16))
    assert rate("", 4, 1) > rate("", 1, 1) > 0 == rate("", 0, 0)
    assert rate("", 100, 9) == 0  # fewer samples than workers
    careful = LearnedRate(throughput=fitted, batching=rate.batching, is_careful=True)
    assert careful("", 8, 2) == rate("", 8, 2)
    assert careful("", 16, 2) == 0


def test_a_prediction_knows_its_error():
    made = Prediction(job="a", time=0.0, expected_seconds=1.1, spread=0.1, measured_seconds=1.0)
    assert made.error == pytest.approx(0.1)

"""How fast a job steps on any number of workers and nodes, learned from the steps that it has taken so far.

A step computes gradients, then agrees on their sum, and part of the agreeing hides behind the computing:

    T_grad = a + b * micro_batch ** e                on the first kind of node; other kinds by a learned factor
    T_sync = 0 for one worker, else c + d * log2(workers / 2), with other c and d on one node, on two and on more
    T_step = accumulation * T_grad + (T_grad ** g + T_sync ** g) ** (1 / g)         1 <= g <= 10

That is Pollux's model (OSDI'21) with log2 of the workers in place of their number: it fits the same measurements as
well and does not run away where a job that was seen on 4 workers is thought of on 64. Two nodes have terms of
their own, as factors of those on more nodes: Pollux's profiles are slow there. The exponent is near 1: it is for
memory that fills up, and for processors that few samples do not fill.

All are kept as logarithms (g: its logit between 1 and 10; e as it is), and what is known of them before a step was
taken is a `Gaussian`. The fit is the most probable point given it and the observations: a least-squares problem in
logarithms, solved by Levenberg and Marquardt's method with the analytic Jacobian, in milliseconds and without scipy.
The same Jacobian tells how certain the fit is. Terms that no observation touches stay where the prior has them.

No job follows the form exactly. How far its steps are off is alike where configurations are: predictions near what
was observed are corrected by what is left there (`Near`, a Gaussian process), and more certain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shoal.place.gaussian import Floats, Gaussian, inverse

Ints = NDArray[np.int64]

TERMS = (
    "grad",
    "grad_per_sample",
    "node_sync",
    "node_growth",
    "link_sync",
    "link_growth",
    "overlap",
    "pair",
    "pair_growth",
    "exponent",
)
"""The terms of the model, as logarithms of seconds; `overlap` is the logit of (g - 1) / 9, and the pairs are
logarithms of factors: what `link_sync` and `link_growth` are multiplied by on exactly two nodes. `exponent` is as it
is."""

NUM_TERMS = len(TERMS)
LOCAL, REST = 0.06, 0.06
"""How far a measured step is from the best terms of its job, as a logarithm: the part that configurations near it
have in common, and the part that is its own."""
NOISE = float(np.hypot(LOCAL, REST))
"""Both together: what Pollux's profiles show."""

KIND_SPREAD = 1.0
"""How much kinds of nodes of which nothing is known may differ in speed, as a logarithm."""

NOTHING = -60.0
STARTS = (-2.0, 0.0, 2.0)
MAX_ROUNDS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """How long steps took in one configuration: medians over the steps seen there.

    `sync_seconds` is the part of a step in which workers waited for each other's gradients with nothing to compute;
    None where that was not measured. `micro_batch` is the samples of one worker at once, `accumulation` how many more
    times it computes before it agrees with the others.
    """

    nodes: int
    workers: int
    micro_batch: float
    step_seconds: float
    sync_seconds: float | None = None
    accumulation: int = 0
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Design:
    """Configurations as arrays of one length, as the model reads them."""

    kind: Ints
    nodes: Floats
    workers: Floats
    micro_batch: Floats
    accumulation: Floats


def names_of(kinds: Sequence[str]) -> tuple[str, ...]:
    """The terms of a job on these kinds of nodes: ten for the first kind, then two factors for each other one."""
    return TERMS + tuple(f"{part}@{kind}" for kind in kinds[1:] for part in ("grad", "sync"))


def unknown(kinds: Sequence[str]) -> Gaussian:
    """What is thought of a job that nothing is known of: any speed, workers that agree at no cost, kinds alike.

    Optimistic on purpose: a job is tried on more workers before it is believed that they slow it down.
    """
    mean = np.array([-2.0, -5.0, -16.0, -16.0, -16.0, -16.0, -1.0, 0.0, 0.0, 1.0] + [0.0, 0.0] * (len(kinds) - 1))
    spread = np.array(
        [4.0, 4.0, 8.0, 8.0, 8.0, 8.0, 1.5, 0.5, 0.5, 0.15] + [KIND_SPREAD, KIND_SPREAD] * (len(kinds) - 1)
    )
    return Gaussian(names=names_of(kinds), mean=mean, covariance=np.diag(spread**2))


class Times(NamedTuple):
    """Logarithms of seconds, for each configuration, and the shares of the parts that make them up."""

    grad: Floats
    step: Floats
    sync: Floats
    last: Floats
    power: Floats
    share_fixed: Floats
    share_base: Floats
    is_kind: NDArray[np.bool_]


def predict(z: Floats, design: Design) -> Times:
    """How long everything takes, over any leading axes of `z`, whose last axis are the terms."""
    term = [z[..., i, None] for i in range(NUM_TERMS)]
    is_kind = design.kind[:, None] == np.arange(1, (z.shape[-1] - NUM_TERMS) // 2 + 1)
    grad = np.logaddexp(term[0], term[1] + term[9] * np.log(design.micro_batch))
    share_fixed = np.exp(term[0] - grad)

    is_one_node, is_pair = design.nodes <= 1, design.nodes == 2
    growth = np.log(np.maximum(np.log2(np.maximum(design.workers, 2) / 2), 1e-12))
    base, slope = (np.where(is_one_node, term[i], term[i + 2] + term[i + 5] * is_pair) for i in (2, 3))
    sync = np.logaddexp(base, slope + growth)
    share_base = np.exp(base - sync)
    if is_kind.shape[1]:
        grad = grad + z[..., NUM_TERMS::2] @ is_kind.T
        sync = sync + z[..., NUM_TERMS + 1 :: 2] @ is_kind.T
    sync = np.where(design.workers <= 1, NOTHING, sync)

    power = 1 + 9 / (1 + np.exp(-term[6]))
    last = np.logaddexp(power * grad, power * sync) / power
    repeats = np.log(np.maximum(design.accumulation, 1e-30))
    return Times(grad, np.logaddexp(repeats + grad, last), sync, last, power, share_fixed, share_base, is_kind)


def slopes_of(times: Times, design: Design, num_terms: int) -> tuple[Floats, Floats]:
    """Derivatives of `times.grad` and `times.step` by the terms, which become the last axis."""
    share_last = np.exp(times.last - times.step)
    share_grad = np.exp(times.power * (times.grad - times.last))
    by_grad = 1 - share_last + share_last * share_grad
    by_sync = np.where(design.workers <= 1, 0.0, share_last * (1 - share_grad))
    mixed = share_grad * times.grad + (1 - share_grad) * times.sync - times.last
    is_one_node, is_pair = design.nodes <= 1, design.nodes == 2

    grad = np.zeros((*times.grad.shape, num_terms))
    grad[..., 0], grad[..., 1] = times.share_fixed, 1 - times.share_fixed
    grad[..., 9] = grad[..., 1] * np.log(design.micro_batch)
    grad[..., NUM_TERMS::2] = times.is_kind
    step = grad * by_grad[..., None]
    step[..., 2] = by_sync * times.share_base * is_one_node
    step[..., 3] = by_sync * (1 - times.share_base) * is_one_node
    step[..., 4] = by_sync * times.share_base * ~is_one_node
    step[..., 5] = by_sync * (1 - times.share_base) * ~is_one_node
    step[..., 6] = share_last * mixed * (times.power - 1) * (10 - times.power) / (9 * times.power)
    step[..., 7] = step[..., 4] * is_pair
    step[..., 8] = step[..., 5] * is_pair
    step[..., NUM_TERMS + 1 :: 2] = by_sync[..., None] * times.is_kind
    return grad, step


def places_of(design: Design) -> Floats:
    """Configurations as points; how far apart two are says how alike: a doubling of workers or samples is 1 away.

    Three nodes are as good as more. One node has nothing to do with several, nor a kind of nodes with others.
    """
    nodes = np.where(design.nodes <= 1, 0.0, 10 + np.log2(np.clip(design.nodes, 2, 3)))
    return np.stack((np.log2(design.micro_batch), np.log2(design.workers), nodes, 10.0 * design.kind), -1)


def alike(some: Floats, others: Floats) -> Floats:
    """How much of what is left over at some places is so at others, as a covariance."""
    squares = (some**2).sum(-1)[:, None] + (others**2).sum(-1) - 2 * some @ others.T
    result: Floats = LOCAL**2 * np.exp(-0.5 * np.maximum(squares, 0.0))
    return result


@dataclass(frozen=True, slots=True)
class Near:
    """What the best terms leave over where steps were observed, and what follows for configurations near there."""

    places: Floats
    inverse: Floats
    weights: Floats

    @staticmethod
    def of(places: Floats, left: Floats) -> "Near":
        matrix = inverse(alike(places, places) + REST**2 * np.eye(len(places)))
        return Near(places, matrix, matrix @ left)

    def shift(self, places: Floats) -> Floats:
        return alike(places, self.places) @ self.weights

    def spread(self, places: Floats) -> Floats:
        """How far steps there may be off the terms."""
        both = alike(places, self.places)
        known = np.einsum("ij,jk,ik->i", both, self.inverse, both)
        result: Floats = np.sqrt(np.maximum(LOCAL**2 - known, 0.0) + REST**2)
        return result


NOWHERE = Near(np.zeros((0, 4)), np.zeros((0, 0)), np.zeros(0))


@dataclass(frozen=True, eq=False)
class Throughput:
    """A fitted model of one job. `belief` is what is known of its terms now; `num_observations` it was fitted to.

    It costs some microseconds for each configuration asked; ask for many at once (arrays, broadcast).
    """

    kinds: tuple[str, ...]
    belief: Gaussian
    num_observations: int = 0
    largest_workers: int = 1
    near: Near = NOWHERE

    def _design(
        self, kind: str, nodes: ArrayLike, workers: ArrayLike, micro_batch: ArrayLike, accumulation: ArrayLike
    ) -> tuple[Design, tuple[int, ...]]:
        arrays = np.broadcast_arrays(*(np.asarray(a, float) for a in (nodes, workers, micro_batch, accumulation)))
        number = self.kinds.index(kind) if kind in self.kinds else 0
        shape = arrays[0].shape
        flat = [np.ravel(array) for array in arrays]
        return Design(np.full(flat[0].size, number), *flat), shape

    def seconds(
        self,
        nodes: ArrayLike,
        workers: ArrayLike,
        micro_batch: ArrayLike,
        accumulation: ArrayLike = 0,
        *,
        kind: str = "",
        optimism: float = 0.0,
    ) -> Floats:
        """Seconds of a step, in the shape of the arguments broadcast.

        With `optimism`, as short as they could be: so many standard deviations of its terms below what is expected.
        """
        design, shape = self._design(kind, nodes, workers, micro_batch, accumulation)
        times = predict(self.belief.mean, design)
        log_step = times.step
        if self.num_observations:
            log_step = log_step + self.near.shift(places_of(design))
        if optimism:
            log_step = log_step - optimism * self._spread(times, design, kind)
        result: Floats = np.exp(log_step).reshape(shape)
        return result

    def spread(
        self,
        nodes: ArrayLike,
        workers: ArrayLike,
        micro_batch: ArrayLike,
        accumulation: ArrayLike = 0,
        *,
        kind: str = "",
    ) -> Floats:
        """How far a measured step may be from `seconds`: one standard deviation of its logarithm (0.1: about 10 %).

        More observations make the terms certain; how far steps are off the best terms is known only near them.
        """
        design, shape = self._design(kind, nodes, workers, micro_batch, accumulation)
        terms = self._spread(predict(self.belief.mean, design), design, kind)
        return np.hypot(terms, self.near.spread(places_of(design))).reshape(shape)

    def _spread(self, times: Times, design: Design, kind: str) -> Floats:
        spread = self.belief.spread_along(slopes_of(times, design, self.belief.mean.size)[1])
        return np.hypot(spread, 0.0 if not kind or kind in self.kinds else KIND_SPREAD)

    @cached_property
    def terms(self) -> dict[str, float]:
        """The terms as people read them: seconds, and the exponent of the overlap."""
        mean = dict(zip(self.belief.names, self.belief.mean, strict=True))
        overlap = 1 + 9 / (1 + float(np.exp(-mean.pop("overlap"))))
        exponent = float(mean.pop("exponent"))
        seconds = {name: float(np.exp(value)) for name, value in mean.items()}
        return seconds | {"overlap": overlap, "exponent": exponent}


def fit(
    observations: Sequence[Observation], prior: Gaussian | None = None, *, kinds: Sequence[str] = ()
) -> Throughput:
    """The model of a job that is most probable after these observations.

    `kinds` are the kinds of nodes that `prior` speaks of, in its order; kinds that were observed besides are added as
    ones of which nothing is known. Without observations it is the prior's own model. Pure; 3 to 4 ms.
    """
    seen = dict.fromkeys(o.kind for o in observations)
    all_kinds = tuple(dict.fromkeys([*kinds, *seen])) or ("",)
    known = unknown(all_kinds) if prior is None else prior.extended(unknown(all_kinds))
    if not observations:
        return Throughput(all_kinds, known)
    design, log_seen, is_grad = read(observations, all_kinds)
    mean, information = solve(known, design, log_seen, is_grad)
    belief = Gaussian(names=known.names, mean=mean, covariance=inverse(known.precision + information))
    count = len(observations)
    near = Near.of(places_of(design)[:count], (log_seen - predict(mean, design).step)[:count])
    return Throughput(all_kinds, belief, count, max(o.workers for o in observations), near)


def read(observations: Sequence[Observation], kinds: Sequence[str]) -> tuple[Design, Floats, NDArray[np.bool_]]:
    """What the fit compares: the observed steps, then the computing part of those where syncing was measured."""
    split = [o for o in observations if o.sync_seconds is not None and o.sync_seconds < 0.95 * o.step_seconds]
    rows = [*observations, *split]
    seconds = [o.step_seconds for o in observations]
    seconds += [(o.step_seconds - (o.sync_seconds or 0.0)) / (o.accumulation + 1) for o in split]
    design = Design(
        np.array([kinds.index(o.kind) for o in rows]),
        *(
            np.array([getattr(o, name) for o in rows], float)
            for name in ("nodes", "workers", "micro_batch", "accumulation")
        ),
    )
    return design, np.log(seconds), np.arange(len(rows)) >= len(observations)


def solve(prior: Gaussian, design: Design, log_seen: Floats, is_grad: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """The most probable terms, and the information that the observations hold about them there.

    From several overlaps at once, as the problem has more than one valley; the deepest wins.
    """
    z = start_points(prior, design, log_seen)
    damping, is_done = np.full(len(z), 1e-2), np.zeros(len(z), bool)
    cost, slope, information = evaluate(z, prior, design, log_seen, is_grad)
    for _ in range(MAX_ROUNDS):
        matrix = information + prior.precision
        diagonal = np.einsum("sii->si", matrix)
        damped = matrix + damping[:, None, None] * diagonal[:, :, None] * np.eye(z.shape[1])
        step = np.linalg.solve(damped, slope[..., None])[..., 0]
        step = np.clip(step, -3.0, 3.0)
        new = evaluate(z - step, prior, design, log_seen, is_grad)
        is_better = new[0] < cost
        gained = np.where(is_better, cost - new[0], 0.0)
        z = np.where(is_better[:, None], z - step, z)
        cost = np.where(is_better, new[0], cost)
        slope = np.where(is_better[:, None], new[1], slope)
        information = np.where(is_better[:, None, None], new[2], information)
        damping = np.where(is_better, damping / 5, damping * 4)
        is_done |= (is_better & (gained < 1e-3)) | (damping > 1e6)
        if np.all(is_done):
            break
    best = int(np.argmin(cost))
    return z[best], information[best]


def evaluate(
    z: Floats, prior: Gaussian, design: Design, log_seen: Floats, is_grad: NDArray[np.bool_]
) -> tuple[Floats, Floats, Floats]:
    """Cost, its gradient and the Gauss-Newton matrix of the observations, for each row of `z`."""
    times = predict(z, design)
    d_grad, d_step = slopes_of(times, design, z.shape[1])
    residual = (np.where(is_grad, times.grad, times.step) - log_seen) / NOISE
    jacobian = np.where(is_grad[:, None], d_grad, d_step) / NOISE
    away = z - prior.mean
    pull = away @ prior.precision
    cost = 0.5 * (np.sum(residual**2, -1) + np.sum(away * pull, -1))
    turned = np.swapaxes(jacobian, 1, 2)
    return cost, (turned @ residual[..., None])[..., 0] + pull, turned @ jacobian


def start_points(prior: Gaussian, design: Design, log_seen: Floats) -> Floats:
    """Where the search starts: the prior, but with each term that was observed at a size which observations move.

    A logarithm far below what matters has no slope, so the search would never leave it.
    """
    z = np.repeat(prior.mean[None], len(STARTS), 0)
    z[:, 6] = STARTS
    typical = float(np.median(log_seen))
    z[:, 0] = np.maximum(z[:, 0], typical - 2)
    z[:, 1] = np.maximum(z[:, 1], typical - 1 - z[:, 9] * float(np.median(np.log(design.micro_batch))))
    for is_here, first in ((design.nodes <= 1, 2), (design.nodes > 1, 4)):
        workers = design.workers[is_here]
        if np.any(workers > 1):
            z[:, first] = np.maximum(z[:, first], typical - 1)
        if np.any(workers > 2):
            z[:, first + 1] = np.maximum(z[:, first + 1], typical - 3)
    return z

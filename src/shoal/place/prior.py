"""What to expect of a job before its first step, learned from jobs that ran before it.

Every past job has terms of its own (`throughput.TERMS`), known as well as its observations tell. How they vary from
job to job is learned from all of them: an expected value that depends on what is known at submission (the size of the
model, the batch that fits a worker, ...), and how far jobs are from it, term by term and together. So a job that is
known on one node says something about several, and one that is known on one kind of node something about the others.

Terms are learned as `RATIOS`: what takes after what (links after the bus inside a node, growth after its base) is
much the same for all jobs of a cluster, whatever their size. Few jobs move it little from `FIRST_THOUGHTS`, many
replace them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shoal.place.gaussian import Floats, Gaussian, inverse
from shoal.place.throughput import KIND_SPREAD, Observation, Throughput, fit, names_of

RATIOS: tuple[tuple[str, str], ...] = (
    ("grad", "grad_per_sample"),
    ("node_growth", "node_sync"),
    ("link_sync", "node_sync"),
    ("link_growth", "link_sync"),
)
"""Terms that are learned as multiples of another."""

FIRST_THOUGHTS: Mapping[str, tuple[float, float]] = {
    "grad": (-1.0, 1.0),
    "grad_per_sample": (-1.0, 2.5),
    "node_sync": (-2.5, 2.0),
    "node_growth": (-0.7, 0.7),
    "link_sync": (1.4, 0.7),
    "link_growth": (-1.0, 0.7),
    "overlap": (-1.5, 1.0),
    "pair": (0.0, 0.3),
    "pair_growth": (0.0, 0.5),
    "exponent": (1.0, 0.15),
}
"""Mean and standard deviation of each term or ratio where no job was seen yet. Samples are counted in batches that
fit a worker, so `grad_per_sample` is the logarithm of the seconds of one such batch."""

FIRST_WEIGHT = 2.0
"""How many jobs the first thoughts weigh."""

RIDGE = 1.0
ROUNDS = 5

LIKE_SPREAD = 0.3
"""How far two jobs that are alike may be from each other, as a logarithm of each term."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What is known of a job when it is submitted. `micro_batch`: the most samples that a worker computes at once.

    `sizes` are positive numbers that may tell jobs apart ("parameter_bytes", ...); some may be missing.
    """

    micro_batch: float
    sizes: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PastJob:
    """What a job that is over has taught.

    `like` is what was known of it at submission, the coarsest first, and `name` tells it from others. `work_seconds`
    is how long it would have taken on one worker, `pause_seconds` what it took to stop and start it, `noise` the
    gradient noise scale in samples; None where that is not known. `batches` are the smallest and the largest it had.
    """

    traits: Traits
    observations: tuple[Observation, ...]
    name: str = ""
    like: tuple[str, ...] = ()
    work_seconds: float | None = None
    pause_seconds: float | None = None
    noise: float | None = None
    batches: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Prior:
    """What was learned: expected terms by trait (`weights`), and how jobs vary around them (`between`).

    `certainty` is the inverse of the (ridge) moments of the traits: it says where in their space jobs were seen.
    """

    kinds: tuple[str, ...]
    sizes: tuple[str, ...]
    centre: Floats
    weights: Floats
    between: Floats
    certainty: Floats
    num_jobs: int

    def expect(self, traits: Traits) -> Gaussian:
        """The terms of a job with these traits, before its first step."""
        row = features_of([traits], self.sizes, self.centre)[0]
        mean = row @ self.weights
        covariance = self.between * (1 + float(row @ self.certainty @ row))
        back = np.linalg.inv(ratios_of(self.kinds, traits.micro_batch))
        return Gaussian(names=names_of(self.kinds), mean=back @ mean, covariance=back @ covariance @ back.T)

    def fit(self, traits: Traits, observations: Sequence[Observation] = ()) -> Throughput:
        """The model of a job with these traits after these observations."""
        return fit(observations, self.expect(traits), kinds=self.kinds)


@dataclass(frozen=True, eq=False)
class Likeness:
    """What to expect of a job when one like it, such as the same script, has run: that it is the same, or nearly."""

    prior: Prior
    past: PastJob

    @cached_property
    def known(self) -> Throughput:
        return self.prior.fit(self.past.traits, self.past.observations)

    def fit(self, traits: Traits, observations: Sequence[Observation] = ()) -> Throughput:
        """The model after these observations. What was expected of its traits is in that of the other already."""
        belief = self.known.belief
        wider = replace(belief, covariance=belief.covariance + np.eye(len(belief.mean)) * LIKE_SPREAD**2)
        return fit(observations, wider, kinds=self.known.kinds)


def ratios_of(kinds: Sequence[str], micro_batch: float) -> Floats:
    """The matrix that turns terms into what is learned of a job whose workers compute so many samples at once."""
    names = names_of(kinds)
    matrix, scale = np.eye(len(names)), np.eye(len(names))
    for name, base in RATIOS:
        matrix[names.index(name), names.index(base)] = -1.0
    scale[names.index("grad_per_sample"), names.index("exponent")] = np.log(micro_batch)
    turn: Floats = matrix @ scale
    return turn


def features_of(traits: Sequence[Traits], sizes: Sequence[str], centre: Floats) -> Floats:
    """A row for each job: one, then the logarithm of each size around what is usual; unknown ones are usual."""
    rows = np.ones((len(traits), 1 + len(sizes)))
    for i, trait in enumerate(traits):
        for j, name in enumerate(sizes):
            value = trait.sizes.get(name)
            rows[i, j + 1] = 0.0 if not value else np.log(value) - centre[j]
    return rows


def first_prior(kinds: Sequence[str]) -> Prior:
    """What is thought before any job ran."""
    pairs = [*FIRST_THOUGHTS.values(), *[(0.0, KIND_SPREAD), (0.0, KIND_SPREAD)] * (len(kinds) - 1)]
    mean, spread = np.array(pairs).T
    return Prior(
        kinds=tuple(kinds),
        sizes=(),
        centre=np.zeros(0),
        weights=mean[None],
        between=np.diag(spread**2),
        certainty=np.zeros((1, 1)),
        num_jobs=0,
    )


def learn(history: Sequence[PastJob], *, rounds: int = ROUNDS) -> Prior:
    """The prior that explains these jobs best, by expectation and maximisation.

    Each round fits every job under the prior of the round before, then the prior to all jobs.
    Costs some milliseconds for each job and round. Pure; the order of jobs does not matter but for rounding.
    """
    kinds = kinds_of(history)
    first = first_prior(kinds)
    sizes = tuple(sorted({name for job in history for name in job.traits.sizes}))
    logs = [[np.log(value) for job in history if (value := job.traits.sizes.get(name))] for name in sizes]
    centre = np.array([float(np.mean(values)) for values in logs])
    rows = features_of([job.traits for job in history], sizes, centre)
    prior = first
    for _ in range(rounds if history else 0):
        means, spreads = [], []
        for job in history:
            belief = prior.fit(job.traits, job.observations).belief
            turn = ratios_of(kinds, job.traits.micro_batch)
            means.append(turn @ belief.mean)
            spreads.append(turn @ belief.covariance @ turn.T)
        prior = explain(first, rows, np.array(means), np.array(spreads), sizes=sizes, centre=centre)
    return prior


def explain(
    first: Prior, rows: Floats, means: Floats, spreads: Floats, *, sizes: tuple[str, ...], centre: Floats
) -> Prior:
    """The prior given what is known of each job: ridge regression for the mean, shrunk moments for the rest."""
    penalty = np.diag([FIRST_WEIGHT / 4] + [RIDGE] * len(sizes))
    certainty = inverse(rows.T @ rows + penalty)
    origin = np.zeros((rows.shape[1], means.shape[1]))
    origin[0] = first.weights[0]
    weights = certainty @ (rows.T @ means + penalty @ origin)
    away = means - rows @ weights
    moments = FIRST_WEIGHT * first.between + away.T @ away + spreads.sum(0)
    return Prior(
        kinds=first.kinds,
        sizes=sizes,
        centre=centre,
        weights=weights,
        between=moments / (FIRST_WEIGHT + len(rows)),
        certainty=certainty,
        num_jobs=len(rows),
    )


def kinds_of(history: Sequence[PastJob]) -> tuple[str, ...]:
    """All kinds of nodes seen, the most usual first, which the others are compared with."""
    counts: dict[str, int] = {}
    for job in history:
        for kind in {observation.kind for observation in job.observations}:
            counts[kind] = counts.get(kind, 0) + 1
    return tuple(sorted(counts, key=lambda kind: (-counts[kind], kind))) or ("",)

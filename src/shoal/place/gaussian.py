"""What is known of some numbers: their expected values and how they vary together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Gaussian:
    """A normal distribution over named numbers."""

    names: tuple[str, ...]
    mean: Floats
    covariance: Floats

    @cached_property
    def precision(self) -> Floats:
        return inverse(self.covariance)

    @cached_property
    def spreads(self) -> dict[str, float]:
        """One standard deviation of each."""
        return dict(zip(self.names, np.sqrt(np.diag(self.covariance)).tolist(), strict=True))

    def spread_along(self, directions: Floats) -> Floats:
        """The standard deviation of weighted sums; `directions` holds weights in its last axis."""
        variance = np.einsum("...i,ij,...j->...", directions, self.covariance, directions)
        spread: Floats = np.sqrt(np.maximum(variance, 0.0))
        return spread

    def extended(self, wider: "Gaussian") -> "Gaussian":
        """This, in the order of `wider`'s names, which it has all of; names it lacks as in `wider`, independent."""
        if self.names == wider.names:
            return self
        places = [wider.names.index(name) for name in self.names]
        mean, covariance = wider.mean.copy(), wider.covariance.copy()
        covariance[places, :] = covariance[:, places] = 0.0
        mean[places] = self.mean
        covariance[np.ix_(places, places)] = self.covariance
        return Gaussian(names=wider.names, mean=mean, covariance=covariance)

    def moved(self, name_shifts: Sequence[tuple[str, float]]) -> "Gaussian":
        """The same with some expected values shifted."""
        mean = self.mean.copy()
        for name, shift in name_shifts:
            mean[self.names.index(name)] += shift
        return Gaussian(names=self.names, mean=mean, covariance=self.covariance)


def inverse(matrix: Floats) -> Floats:
    """Of a symmetric matrix, and symmetric to the last bit."""
    result = np.linalg.inv(matrix).astype(np.float64)
    return (result + result.T) / 2

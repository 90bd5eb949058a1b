"""Samples of a RandomDistribution, with the meaning that recsys-examples' class of that name has."""

from __future__ import annotations

import math

import numpy as np

from genrec.configs.schema import RandomDistribution

DEFAULT_ZIPF_ALPHA = 1.5


def sample(distribution: RandomDistribution, size: int, *, rng: np.random.Generator) -> np.ndarray:
    """``size`` natural numbers, int64.

    "uniform": from [low, high). The others are rounded where needed and clamped to [low, high] (no upper clamp without
    high). "normal": mean and std of the distribution. "lognormal": mean and std of the values themselves, not of their
    logarithm; std defaults to mean / 2. "zipf": P(k) proportional to k^-alpha for k >= 1, shifted so that k = 1 is low.
    """
    low, high = distribution.low, distribution.high
    if distribution.dist_type == "uniform":
        assert high is not None and high > low, distribution
        return rng.integers(low, high, size=size)
    if distribution.dist_type == "zipf":
        return _zipf(distribution, size, rng)
    assert distribution.mean is not None, distribution
    if distribution.dist_type == "normal":
        assert distribution.std is not None, distribution
        drawn = rng.normal(distribution.mean, distribution.std, size=size)
    else:
        mu, sigma = lognormal_parameters(distribution.mean, distribution.std)
        drawn = rng.lognormal(mu, sigma, size=size)
    return np.rint(np.clip(drawn, low, high)).astype(np.int64)


def lognormal_parameters(mean: float, std: float | None) -> tuple[float, float]:
    """mu and sigma of the logarithm, from the mean and standard deviation (default: mean / 2) of the values.

    sigma^2 = ln(1 + (std / mean)^2), mu = ln(mean) - sigma^2 / 2.
    """
    variance = math.log1p(((mean / 2 if std is None else std) / mean) ** 2)
    return math.log(mean) - variance / 2, math.sqrt(variance)


def _zipf(distribution: RandomDistribution, size: int, rng: np.random.Generator) -> np.ndarray:
    low, high = distribution.low, distribution.high
    alpha = DEFAULT_ZIPF_ALPHA if distribution.alpha is None else distribution.alpha
    shift = low - 1
    # Clamped before the shift: the heavy tail of a small alpha reaches the largest int64.
    largest_rank = min(np.iinfo(np.int64).max, (np.iinfo(np.int64).max if high is None else high) - shift)
    return np.asarray(np.minimum(rng.zipf(alpha, size=size), largest_rank) + shift, dtype=np.int64)

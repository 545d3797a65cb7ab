"""Means and ratios of a few repeats, with the interval that holds the true one 95 times in 100."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from scipy import stats

CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure from repeated runs.

    Attributes:
      mean: The mean, of ratios the geometric one.
      low: Where the 95 % interval begins; ``None`` for a single run, which has none.
      high: Where it ends.
      repeats: How many runs it is from.
    """

    mean: float
    low: float | None
    high: float | None
    repeats: int

    def map(self, function: Callable[[float], float]) -> Estimate:
        """A quantity that falls or grows with this one all the way, such as its reciprocal."""
        if self.low is None or self.high is None:
            return Estimate(function(self.mean), None, None, self.repeats)
        low, high = sorted((function(self.low), function(self.high)))
        return Estimate(function(self.mean), low, high, self.repeats)


def mean(values: Sequence[float]) -> Estimate:
    """The mean of equally good runs and its interval by Student's t."""
    middle = statistics.fmean(values)
    if len(values) < 2:  # noqa: PLR2004 - a single run has no spread
        return Estimate(middle, None, None, len(values))
    error = statistics.stdev(values) / math.sqrt(len(values))
    reach = error * float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return Estimate(middle, middle - reach, middle + reach, len(values))


def ratio(values: Sequence[float], over: Sequence[float]) -> Estimate:
    """How many times as large the first values are; each is over its neighbour in time.

    Raises:
      ValueError: There are not as many of both.
    """
    logarithms = [math.log(a / b) for a, b in zip(values, over, strict=True)]
    return mean(logarithms).map(math.exp)

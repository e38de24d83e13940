"""The bound of a trust region from the fraction of tokens that it is to mask."""

import numpy as np


def quantile_threshold(score: np.ndarray, where: np.ndarray, fraction: float) -> float:
  """The smallest of the scores that at most a `fraction` of them exceeds.

  With n finite scores exactly floor(fraction n) of them exceed it; fewer where scores are equal, since a mask
  score <= bound keeps or drops equals together.

  Args:
    score: any shape; what is not finite has no score, and does not count.
    where: bool, the tokens that count.
    fraction: in (0, 1).

  Raises:
    ValueError: a fraction outside (0, 1), or no finite score.
  """
  if not 0 < fraction < 1:
    raise ValueError(f"the fraction of tokens to mask is in (0, 1), not {fraction}")
  score = np.asarray(score)[np.asarray(where)]
  score = np.sort(score[np.isfinite(score)])
  if not score.size:
    raise ValueError("no token has a finite score, so there is no quantile of them")
  # The next float up before rounding down: 0.29 x 100 is a little less than 29.
  masked = int(np.nextafter(fraction * score.size, np.inf))
  return float(score[score.size - 1 - min(masked, score.size - 1)])

"""Float64 NumPy references of the objective, written from the formulas of the papers and not from the JAX code.

One plain function a quantity. A loss reference takes (tokens, live policy, frozen policy) and the loss's
hyper-parameters: what the method differentiates reads the live policy, what it detaches the frozen one, so that
`gradients` can take differences of any of them.
"""

from typing import NamedTuple

import numpy as np


def log_softmax(logits_V, temperature):
  """log softmax(logits / temperature), [..., V]."""
  scaled_V = np.asarray(logits_V, np.float64) / temperature
  shifted_V = scaled_V - scaled_V.max(axis=-1, keepdims=True)
  return shifted_V - np.log(np.exp(shifted_V).sum(axis=-1, keepdims=True))


def score_logits(logits_V, targets, temperature):
  """(log-prob of the targets, entropy in nats over the whole vocabulary), [...]."""
  logprob_V = log_softmax(logits_V, temperature)
  probability_V = np.exp(logprob_V)
  entropy = -np.where(probability_V > 0, probability_V * np.where(probability_V > 0, logprob_V, 0.0), 0.0).sum(axis=-1)
  return np.take_along_axis(logprob_V, np.asarray(targets)[..., None], axis=-1)[..., 0], entropy


def score_logits_gradient(logits_V, targets, temperature):
  """d log p(target) / d logits = (onehot - p) / temperature, [..., V]."""
  logprob_V = log_softmax(logits_V, temperature)
  onehot_V = np.arange(logprob_V.shape[-1]) == np.asarray(targets)[..., None]
  return (onehot_V - np.exp(logprob_V)) / temperature


def probability_change(log_p, log_q):
  """p - q, by a product: the difference of near equals has no right digits in float64 either."""
  log_p, log_q = np.asarray(log_p, np.float64), np.asarray(log_q, np.float64)
  with np.errstate(invalid="ignore"):
    return np.sign(log_p - log_q) * np.exp(np.maximum(log_p, log_q)) * -np.expm1(-np.abs(log_p - log_q))


def bernoulli_kl(log_p, log_q):
  """KL(p || q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)), with 0 log 0 = 0 and x log(x / 0) = inf."""
  log_p, log_q = np.asarray(log_p, np.float64), np.asarray(log_q, np.float64)
  p, not_p, not_q = np.exp(log_p), -np.expm1(log_p), -np.expm1(log_q)
  with np.errstate(divide="ignore", invalid="ignore"):
    this = np.where(p == 0, 0.0, p * (log_p - log_q))
    other = np.where(not_p == 0, 0.0, not_p * (np.log(not_p) - np.log(not_q)))
  return this + other


class Loss(NamedTuple):
  """What a loss must return for each token, [B, T]; with leading axes where the live policy has them."""

  value: np.ndarray
  keep: np.ndarray
  clipped: np.ndarray


class Policy(NamedTuple):
  """float64 scores of a policy for N tokens. The live one may have leading axes before N, one for each disturbance."""

  logprob: np.ndarray  # [..., N]
  entropy: np.ndarray
  gini: np.ndarray
  vocabulary: np.ndarray  # [..., N, V]


class Tokens:
  """A batch in float64, its tokens in one row of N, with who belongs to whom as matrices.

  `sequence` and `group` [N, N]: 1 where two POLICY tokens belong together, so that `x @ sequence` is a sum over the
  sequence. They know nothing of rows, scans or segment sums.
  """

  def __init__(self, batch):
    def flat(array):
      array = np.asarray(array)
      return array.reshape(-1, *array.shape[2:])

    def wide(array):
      return flat(array).astype(np.float64)

    self.shape = np.shape(batch.mask)
    self.mask = flat(batch.mask)
    self.log_mu, self.log_q, self.vocabulary = wide(batch.logprob), wide(batch.proximal), wide(batch.vocabulary)
    self.entropy, self.gini, self.staleness = wide(batch.entropy), wide(batch.gini), wide(batch.staleness)
    # What lies outside the mask is rubbish; the formulas speak of policy tokens.
    self.advantage = np.where(self.mask, wide(batch.advantage), 0.0)
    self.reward = np.where(self.mask, wide(batch.reward), 0.0)
    row, segment, group = np.indices(self.shape)[0].ravel(), flat(batch.segment), flat(batch.group)
    both = self.mask[:, None] & self.mask
    self.sequence = (both & (row[:, None] == row) & (segment[:, None] == segment)).astype(np.float64)
    self.group = (both & (group[:, None] == group)).astype(np.float64)

  def on(self, policy: Policy, edge: str) -> np.ndarray:
    """log of one ratio of the policy triangle: direct E = pi / mu, proximal U = pi / q, behaviour B = q / mu."""
    return {
      "direct": lambda: policy.logprob - self.log_mu,
      "proximal": lambda: policy.logprob - self.log_q,
      "behaviour": lambda: self.log_q - self.log_mu,
    }[edge]()

  def there(self, *values: np.ndarray) -> np.ndarray:
    """Policy tokens with a finite stored log-prob and finite values: only these have a ratio."""
    return self.mask & np.isfinite(self.log_mu) & np.all([np.isfinite(value) for value in values], axis=0)

  def sum(self, value, where):
    """At each token the sum over the tokens `where` of its sequence."""
    return np.where(where, value, 0.0) @ self.sequence

  def mean(self, value, where):
    return self.sum(value, where) / np.maximum(self.sum(np.ones(where.shape), where), 1)


LARGEST_LOG_RATIO = 20.0  # the ratios of every loss are those of log-ratios cut at +-20


def ratio_of(log_ratio):
  return np.exp(np.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def surrogate(t, live, frozen, keep, *, clip_low=np.inf, clip_high=np.inf, weight=1.0, dual=np.inf):
  """-weight x max(min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), dual x A where A < 0), r = exp(log-ratio).

  `clipped` is where, judged by the frozen log-ratio, the derivative of that in r is 0 though A is not.
  """
  ratio, A = ratio_of(np.where(keep, live, 0.0)), t.advantage
  objective = np.minimum(ratio * A, np.clip(ratio, 1 - clip_low, 1 + clip_high) * A)
  if dual < np.inf:
    objective = np.where(A < 0, np.maximum(objective, dual * A), objective)
  r = ratio_of(np.where(keep, frozen, 0.0))
  flat = ((A > 0) & (r > 1 + clip_high)) | ((A < 0) & ((r < 1 - clip_low) | (r > dual)))
  flat |= (A != 0) & (np.abs(np.where(keep, frozen, 0.0)) > LARGEST_LOG_RATIO)
  return Loss(np.where(keep, -weight * objective, 0.0), keep, keep & flat)


def score_function(t, live, keep, weight, cut):
  """-weight A log pi."""
  return Loss(np.where(keep, -weight * t.advantage * np.where(keep, live.logprob, 0.0), 0.0), keep, keep & cut)


def largest(value, among, number):
  """The `number` largest values, at least one, of the tokens `among`."""
  chosen = np.zeros(value.shape, bool)
  for index in sorted(np.flatnonzero(among), key=lambda i: -value[i])[: max(int(number), 1)]:
    chosen[index] = True
  return chosen


def scaled(t, live, frozen, edge, S, tau, clip_low, clip_high):
  """1[S <= tau] x clipped surrogate, S on the direct edge."""
  inside = np.less_equal(S, tau)
  keep = t.there(t.on(frozen, "direct"), t.on(frozen, edge)) & inside
  return surrogate(t, t.on(live, edge), t.on(frozen, edge), keep, clip_low=clip_low, clip_high=clip_high)


def square(t, frozen):
  return t.on(frozen, "direct") ** 2


def estr(t, live, frozen, *, edge, tau, eps, clip_low, clip_high):
  return scaled(t, live, frozen, edge, square(t, frozen) / (t.entropy + eps), tau, clip_low, clip_high)


def estr_learner_entropy(t, live, frozen, *, edge, tau, eps, clip_low, clip_high):
  return scaled(t, live, frozen, edge, square(t, frozen) / (frozen.entropy + eps), tau, clip_low, clip_high)


def estr_gini(t, live, frozen, *, edge, tau, eps, clip_low, clip_high):
  return scaled(t, live, frozen, edge, square(t, frozen) / (t.gini + eps), tau, clip_low, clip_high)


def estr_power(t, live, frozen, *, edge, tau, eps, power, clip_low, clip_high):
  S = square(t, frozen) / (t.entropy + eps) ** power
  return scaled(t, live, frozen, edge, S, tau, clip_low, clip_high)


def estr_one_sided(t, live, frozen, *, edge, tau, eps, clip_low, clip_high):
  S = square(t, frozen) / (t.entropy + eps)
  outward = t.advantage * t.on(frozen, "direct") > 0
  return scaled(t, live, frozen, edge, np.where(outward, S, 0.0), tau, clip_low, clip_high)


def estr_soft(t, live, frozen, *, edge, tau, eps, clip_low, clip_high):
  keep = t.there(t.on(frozen, "direct"), t.on(frozen, edge))
  S = np.where(keep, square(t, frozen), 0.0) / np.where(keep, t.entropy + eps, 1.0)
  bounds = {"clip_low": clip_low, "clip_high": clip_high}
  return surrogate(t, t.on(live, edge), t.on(frozen, edge), keep, weight=np.exp(-S / (2 * tau)), **bounds)


def fixed_width(t, live, frozen, *, edge, width, clip_low, clip_high):
  return scaled(t, live, frozen, edge, square(t, frozen), width**2, clip_low, clip_high)


def ppo(t, live, frozen, *, edge, clip_low, clip_high):
  return dual_clip(t, live, frozen, edge=edge, clip_low=clip_low, clip_high=clip_high, dual=np.inf)


def dual_clip(t, live, frozen, *, edge, clip_low, clip_high, dual):
  now = t.on(frozen, edge)
  return surrogate(t, t.on(live, edge), now, t.there(now), clip_low=clip_low, clip_high=clip_high, dual=dual)


def gspo(t, live, frozen, *, edge, clip_low, clip_high):
  now = t.on(frozen, edge)
  keep = t.there(now)
  means = t.mean(t.on(live, edge), keep), t.mean(now, keep)
  return surrogate(t, *means, keep, clip_low=clip_low, clip_high=clip_high)


def gmpo(t, live, frozen, *, edge, band):
  now, A = t.on(frozen, edge), t.advantage
  keep = t.there(now)

  def cut(log_ratio):
    return np.where(A > 0, np.minimum(log_ratio, band), np.where(A < 0, np.maximum(log_ratio, -band), log_ratio))

  is_cut = keep & (A != 0) & (cut(now) != now)
  plain = surrogate(t, t.mean(cut(t.on(live, edge)), keep), t.mean(cut(now), keep), keep)
  return plain._replace(clipped=plain.clipped | is_cut)


def sapo(t, live, frozen, *, edge, positive, negative):
  now, A = t.on(frozen, edge), t.advantage
  keep = t.there(now)
  temperature = np.where(A > 0, positive, negative)
  ratio = ratio_of(np.where(keep, t.on(live, edge), 0.0))
  gate = 4 / temperature / (1 + np.exp(-temperature * (ratio - 1)))
  beyond = (A != 0) & (np.abs(np.where(keep, now, 0.0)) > LARGEST_LOG_RATIO)
  return Loss(np.where(keep, -A * gate, 0.0), keep, keep & beyond)


def stable_reinforce(t, live, frozen, *, edge, clip_low, clip_high, ratio_low, ratio_high, sigmas):
  now = t.on(frozen, edge)
  there = t.there(now)
  A = t.advantage[there] if there.any() else np.zeros(1)
  # Equal advantages have no outliers, however their mean is rounded.
  keep = there & (np.abs(t.advantage - A.mean()) <= sigmas * A.std() + 1e-12)
  bounds = np.log(ratio_low), np.log(ratio_high)
  live_cut, now_cut = (np.clip(np.where(keep, x, 0.0), *bounds) for x in (t.on(live, edge), now))
  plain = surrogate(t, live_cut, now_cut, keep, clip_low=clip_low, clip_high=clip_high)
  is_cut = keep & (t.advantage != 0) & (now_cut != np.where(keep, now, 0.0))
  return plain._replace(clipped=plain.clipped | is_cut)


def sat(t, live, frozen, *, edge, clip_low, clip_high, quantile):
  now, delta = t.on(frozen, edge), t.on(frozen, "direct")
  keep = t.there(now, delta)
  size = np.abs(np.where(keep, delta, 0.0))
  q = np.quantile(size[keep], quantile) if keep.any() else 0.0
  stale = keep & (size > q) & (q > 0)
  c = np.where(stale, 1 / (1 + (size / (q or 1.0)) ** 2), 1.0)
  high = clip_high * np.where(size == delta, c, 1.0)
  low = clip_low * np.where(size == delta, 1.0, c)
  return surrogate(t, t.on(live, edge), now, keep, clip_low=low, clip_high=high)


def ball(log_p, divergence, radius):
  """(lowest, highest) ratio in the ball; highest at most 1 / p and 100. For KL by bisection in log r of its D."""
  p, other = np.exp(log_p), -np.expm1(log_p)
  if divergence != "kl":
    reach = radius / p if divergence == "tv" else np.sqrt(radius * other / p)
    return np.maximum(1 - reach, 0.0), np.minimum(np.minimum(1 + reach, 1 / p), 100.0)

  def halve(outside):
    inside = np.zeros(log_p.shape)
    for _ in range(50):
      log_r = (inside + outside) / 2
      D = -p * log_r - other * np.log(np.maximum(1 - p * np.exp(log_r), 0.0) / other)
      inside, outside = np.where(radius >= D, log_r, inside), np.where(radius >= D, outside, log_r)
    return np.exp(inside)

  return halve(np.full(log_p.shape, -50.0)), halve(np.minimum(-log_p, np.log(100.0)))


def bandpo(t, live, frozen, *, edge, divergence, radius, clip_low, clip_high):
  now = t.on(frozen, edge)
  keep = t.there(now)
  log_anchor = np.where(keep, t.log_mu if edge == "direct" else t.log_q, -1.0)
  low, high = ball(log_anchor, divergence, radius)
  low, high = np.minimum(low, 1 - clip_low), np.maximum(high, 1 + clip_high)
  return surrogate(t, t.on(live, edge), now, keep, clip_low=1 - low, clip_high=high - 1)


def gapo(t, live, frozen, *, edge, clip_low, clip_high):
  now = t.on(frozen, edge)
  once = t.mask & (np.tril(t.sequence).sum(-1) == 1)  # the first policy token of each sequence
  k = np.where(once, 1.0, 0.0) @ t.group
  c = np.where(once & (t.reward > 0), 1.0, 0.0) @ t.group
  hard = np.clip((k - c) / np.maximum(k - 1, 1), 0.0, 1.0)
  high = np.where(t.advantage > 0, clip_low + (clip_high - clip_low) * hard, clip_low)
  return surrogate(t, t.on(live, edge), now, t.there(now), clip_low=clip_low, clip_high=high)


def covariance(t, policy, where):
  if not where.any():
    return np.zeros(where.shape)
  A, log_p = np.where(where, t.advantage, 0.0), np.where(where, policy.logprob, 0.0)
  return (A - A[where].mean()) * (log_p - log_p[where].mean())


def clip_cov(t, live, frozen, *, edge, clip_low, clip_high, share, low, high):
  now = t.on(frozen, edge)
  there = t.there(now)
  cov = covariance(t, frozen, there)
  plain = ppo(t, live, frozen, edge=edge, clip_low=clip_low, clip_high=clip_high)
  among = there & (low < cov) & (cov < high) & ~plain.clipped
  keep = there & ~largest(cov, among, np.floor(share * there.sum()))
  return Loss(np.where(keep, plain.value, 0.0), keep, keep & plain.clipped)


def kl_cov(t, live, frozen, *, edge, share, coefficient):
  now = t.on(frozen, edge)
  keep = t.there(now)
  chosen = largest(covariance(t, frozen, keep), keep, np.floor(share * keep.sum()))
  plain = surrogate(t, t.on(live, edge), now, keep)
  penalty = coefficient * np.abs(np.where(keep, t.on(live, edge), 0.0))
  return plain._replace(value=plain.value + np.where(chosen, penalty, 0.0))


def icepop(t, live, frozen, *, edge, low, high, clip_low, clip_high):
  now, band = t.on(frozen, edge), t.on(frozen, "direct" if edge == "direct" else "behaviour")
  keep = t.there(now, band) & (np.exp(band) >= low) & (np.exp(band) <= high)
  weight = 1.0 if edge == "direct" else ratio_of(np.where(keep, band, 0.0))
  return surrogate(t, t.on(live, edge), now, keep, clip_low=clip_low, clip_high=clip_high, weight=weight)


def kpop(t, live, frozen, *, edge, phi, clip_low, clip_high):
  now = t.on(frozen, edge)
  keep = t.there(now, t.on(frozen, "direct"))
  for log_a, log_b in ((frozen.logprob, t.log_mu), (t.log_mu, frozen.logprob)):
    keep = keep & (bernoulli_kl(log_a, log_b) <= phi)
  return surrogate(t, t.on(live, edge), now, keep, clip_low=clip_low, clip_high=clip_high)


def ipo(t, live, frozen, *, bound):
  now = t.on(frozen, "direct")
  keep = t.there(now) & (np.abs(probability_change(frozen.logprob, t.log_mu)) <= bound)
  return surrogate(t, t.on(live, "direct"), now, keep)


def dppo(t, live, frozen, keep, cap):
  now = np.where(keep, t.on(frozen, "direct"), 0.0)
  return score_function(t, live, keep, np.minimum(ratio_of(now), cap), np.exp(now) > cap)


def dppo_tv(t, live, frozen, *, bound, cap):
  change = probability_change(frozen.logprob, t.log_mu)
  far = np.where(t.advantage > 0, change > bound, change < -bound)
  return dppo(t, live, frozen, t.there(t.on(frozen, "direct")) & ~far, cap)


def dppo_kl(t, live, frozen, *, bound, cap):
  delta = t.on(frozen, "direct")
  far = (bernoulli_kl(t.log_mu, frozen.logprob) > bound) & np.where(t.advantage > 0, delta > 0, delta < 0)
  return dppo(t, live, frozen, t.there(delta) & ~far, cap)


def m2po(t, live, frozen, *, bound):
  now = t.on(frozen, "direct")
  there = t.there(now)
  outward = there & (t.advantage * now > 0)
  rest = sorted(np.flatnonzero(outward), key=lambda i: now[i] ** 2)
  while rest and np.mean([now[i] ** 2 for i in rest]) > bound:
    rest.pop()
  keep = there & (~outward | np.isin(np.arange(there.size), rest))
  return surrogate(t, t.on(live, "direct"), now, keep)


def trm(t, live, frozen, *, divergence, bound):
  now = t.on(frozen, "direct")
  there = t.there(now)
  if divergence == "k3":
    of_token = np.expm1(np.where(there, now, 0.0)) - np.where(there, now, 0.0)
  else:
    mu = np.exp(np.where(there[:, None], t.vocabulary, -np.inf))
    terms = np.where(mu > 0, mu * np.where(mu > 0, t.vocabulary - frozen.vocabulary, 0.0), 0.0)
    of_token = terms.sum(-1)
  of_token = np.where(there, of_token, np.inf)
  worst = np.max(np.where(t.sequence > 0, of_token, -np.inf), axis=-1, initial=-np.inf)
  return surrogate(t, t.on(live, "direct"), now, there & (worst <= bound))


def opsm(t, live, frozen, *, edge, bound, clip_low, clip_high):
  now = t.on(frozen, edge)
  there = t.there(now)
  far = (t.advantage < 0) & (t.mean(-np.where(there, now, 0.0), there) > bound)
  return surrogate(t, t.on(live, edge), now, there & ~far, clip_low=clip_low, clip_high=clip_high)


def importance(t, frozen, edge, scope):
  """(log rho, where a token has one)."""
  log_ratio = t.on(frozen, "direct" if edge == "direct" else "behaviour")
  there = t.there(log_ratio, t.on(frozen, edge))
  log_ratio = np.where(there, log_ratio, 0.0)
  return {"token": log_ratio, "sequence": t.sum(log_ratio, there), "geometric": t.mean(log_ratio, there)}[scope], there


def weighted(t, live, frozen, edge, keep, weight, cut, clip_low, clip_high):
  if edge == "direct":
    return score_function(t, live, keep, weight, cut)
  bounds = {"clip_low": clip_low, "clip_high": clip_high}
  plain = surrogate(t, t.on(live, edge), t.on(frozen, edge), keep, weight=weight, **bounds)
  return plain._replace(clipped=plain.clipped | (keep & cut))


def tis(t, live, frozen, *, edge, scope, cap, clip_low, clip_high):
  log_rho, there = importance(t, frozen, edge, scope)
  cut = np.clip(log_rho, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO) > np.log(cap)
  return weighted(t, live, frozen, edge, there, np.minimum(ratio_of(log_rho), cap), cut, clip_low, clip_high)


def mis(t, live, frozen, *, edge, scope, low, high, clip_low, clip_high):
  log_rho, there = importance(t, frozen, edge, scope)
  keep = there & (np.exp(log_rho) >= low) & (np.exp(log_rho) <= high)
  if scope == "geometric":
    bounds = {"clip_low": clip_low, "clip_high": clip_high}
    return surrogate(t, t.on(live, edge), t.on(frozen, edge), keep, **bounds)
  return weighted(t, live, frozen, edge, keep, ratio_of(log_rho), np.zeros(keep.shape, bool), clip_low, clip_high)


def decoupled(t, live, frozen, *, clip_low, clip_high):
  now, behaviour = t.on(frozen, "proximal"), t.on(frozen, "behaviour")
  keep = t.there(now, behaviour)
  weight = ratio_of(np.where(keep, behaviour, 0.0))
  return surrogate(t, t.on(live, "proximal"), now, keep, clip_low=clip_low, clip_high=clip_high, weight=weight)


def a3po(t, live, frozen, *, clip_low, clip_high):
  now = t.on(frozen, "direct")
  keep = t.there(now)
  d = np.maximum(t.staleness, 1)
  a = (d - 1) / d
  log_q = np.where(keep, t.log_mu + a * np.where(keep, now, 0.0), 0.0)
  weight = ratio_of(np.where(keep, log_q - np.where(keep, t.log_mu, 0.0), 0.0))
  bounds = {"clip_low": clip_low, "clip_high": clip_high}
  return surrogate(t, live.logprob - log_q, frozen.logprob - log_q, keep, weight=weight, **bounds)


def cispo(t, live, frozen, *, edge, clip_low, clip_high):
  now = t.on(frozen, edge)
  keep = t.there(now)
  ratio = ratio_of(np.where(keep, now, 0.0))
  cut = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
  return score_function(t, live, keep, np.clip(ratio, 1 - clip_low, 1 + clip_high), cut)


def gipo(t, live, frozen, *, edge, width):
  now = t.on(frozen, edge)
  keep = t.there(now)
  weight = np.exp(-0.5 * (np.where(keep, now, 0.0) / width) ** 2)
  return surrogate(t, t.on(live, edge), now, keep, weight=weight)


def vespo(t, live, frozen, *, edge, positive_power, positive_decay, negative_power, negative_decay):
  now = t.on(frozen, edge)
  keep = t.there(now)
  W = ratio_of(t.sum(np.where(keep, now, 0.0), keep))
  k = np.where(t.advantage >= 0, positive_power, negative_power)
  decay = np.where(t.advantage >= 0, positive_decay, negative_decay)
  return score_function(t, live, keep, np.exp(decay + k * np.log(W) - decay * W), np.zeros(keep.shape, bool))


def vcpo(t, live, frozen, *, cap):
  now = t.on(frozen, "direct")
  keep = t.there(now)
  w = ratio_of(t.sum(np.where(keep, now, 0.0), keep))
  # || onehot - p ||^2 = 1 - 2 p_t + sum_v p_v^2, which is never below (1 - p_t)^2.
  others = 1 - np.exp(np.where(keep, frozen.logprob, 0.0))
  n = t.sum(np.maximum(2 * others - frozen.gini, others**2), keep)
  once = keep & (np.tril(t.sequence * keep).sum(-1) == 1)
  W = np.where(once, w**2 * n, 0.0)
  total = W @ t.group
  b = np.where(total > 0, (W * t.reward) @ t.group / np.where(total > 0, total, 1.0), 0.0)
  value = -np.minimum(w, cap) * (t.reward - b) * np.where(keep, live.logprob, 0.0)
  return Loss(np.where(keep, value, 0.0), keep, keep & (w > cap))


def asympo(t, live, frozen):
  keep = t.mask & np.isfinite(frozen.logprob)
  nll = t.mean(-np.where(keep, frozen.logprob, 0.0), keep)
  weight = 1 / np.maximum(nll, 1e-6)
  return score_function(t, live, keep, weight, np.zeros(keep.shape, bool))


def stare(t, live, frozen, *, edge, clip_low, clip_high, dual, boost, share, target):
  now = t.on(frozen, edge)
  keep = t.there(now)
  low = t.mask.any() and frozen.entropy[t.mask].mean() < target
  good = keep & (t.advantage > 0)
  chosen = largest(-frozen.logprob, good, np.ceil(share * good.sum())) & low
  bounds = {"clip_low": clip_low, "clip_high": clip_high, "dual": dual}
  return surrogate(t, t.on(live, edge), now, keep, weight=np.where(chosen, boost, 1.0), **bounds)


def score_centering(t, live, frozen, *, weight, low, high):
  now = t.on(frozen, "direct")
  keep = t.there(now)

  def weigh(log_ratio):
    ratio = ratio_of(log_ratio)
    if weight == "one":
      return np.ones(ratio.shape)
    return np.minimum(ratio, high) if weight == "tis" else np.where((low <= ratio) & (ratio <= high), ratio, 0.0)

  log_m = np.where(keep[:, None], t.vocabulary, -np.inf)
  seen = np.isfinite(log_m)
  log_ratio = np.where(seen, frozen.vocabulary, 0.0) - np.where(seen, log_m, 0.0)
  expected = np.where(seen, np.exp(log_m) * weigh(log_ratio), 0.0)
  centre = (expected * np.where(seen, live.vocabulary, 0.0)).sum(-1)
  now = np.where(keep, now, 0.0)
  value = -t.advantage * (weigh(now) * np.where(keep, live.logprob, 0.0) - centre)
  cut = {"one": np.zeros(keep.shape, bool), "tis": ratio_of(now) > high, "mis": weigh(now) == 0}[weight]
  return Loss(np.where(keep, value, 0.0), keep, keep & cut)


LOSSES = {
  function.__name__: function
  for function in (
    *(estr, estr_learner_entropy, estr_gini, estr_power, estr_one_sided, estr_soft, fixed_width),
    *(ppo, dual_clip, gspo, gmpo, sapo, stable_reinforce, sat, bandpo, gapo, clip_cov, kl_cov),
    *(icepop, kpop, ipo, dppo_tv, dppo_kl, m2po, trm, opsm),
    *(tis, mis, decoupled, a3po, cispo, gipo, vespo, vcpo, asympo, stare, score_centering),
  )
}

# What a loss cannot do: drop a token that has a ratio, or act on a ratio within its bounds; some in one form only.
NOTHING_DROPPED = {
  *("estr_soft", "ppo", "dual_clip", "gspo", "gmpo", "sapo", "sat", "bandpo", "gapo", "kl_cov", "tis", "decoupled"),
  *("a3po", "cispo", "gipo", "vespo", "vcpo", "asympo", "stare", "score_centering"),
}
NOTHING_CLIPPED = {"ipo", "trm-k3", "asympo", "vespo", "mis-direct-token", "mis-direct-sequence", "score_centering-one"}


# NaN and -inf are part of the batches; what they reach is dropped by `there`.
QUIET = {"over": "ignore", "invalid": "ignore", "divide": "ignore"}


@np.errstate(**QUIET)
def evaluate(name, policy, batch, hyper):
  """The Loss of a reference, [B, T]."""
  t, frozen = Tokens(batch), _policy(policy)
  return Loss(*(np.broadcast_to(x, t.mask.shape).reshape(t.shape) for x in LOSSES[name](t, frozen, frozen, **hyper)))


STEP = 1e-6


@np.errstate(**QUIET)
def gradients(name, policy, batch, hyper):
  """d sum(value) / d log pi [B, T] and / d the vocabulary's log pi [B, T, V], by central differences.

  The values of a token are subtracted before they are summed, so that a huge one does not drown the others. Only
  the live policy moves: what a method detaches reads the frozen one.
  """
  t, frozen = Tokens(batch), _policy(policy)
  N, V = frozen.vocabulary.shape

  def difference(disturbed):
    ahead, behind = (LOSSES[name](t, live, frozen, **hyper).value for live in disturbed)
    return ((ahead - behind) / (2 * STEP)).sum(-1)

  token = STEP * np.eye(N)
  by_logprob = difference([frozen._replace(logprob=frozen.logprob + sign * token) for sign in (1, -1)])
  if name != "score_centering":  # the only one that differentiates the vocabulary
    return by_logprob.reshape(t.shape), np.zeros((*t.shape, V))
  entry = STEP * np.eye(N * V).reshape(N * V, N, V)
  by_entry = difference([frozen._replace(vocabulary=frozen.vocabulary + sign * entry) for sign in (1, -1)])
  return by_logprob.reshape(t.shape), by_entry.reshape(*t.shape, V)


def _policy(policy):
  arrays = (np.asarray(x, np.float64) for x in policy)
  return Policy(*(x.reshape(-1, *x.shape[2:]) for x in arrays))

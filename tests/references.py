"""Float64 NumPy references of the objective, written from the formulas of the papers and not from the JAX code.

One plain function a quantity. A loss reference has the signature of its loss and adds the analytic gradient of every
token's value with respect to that token's log pi. The arrays keep the shapes and names of `estr_jax.structs`.
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


def grpo_advantage(reward_GN, eps):
  """A = (R - mean) / (std + eps) within each group."""
  reward_GN = np.asarray(reward_GN, np.float64)
  return np.stack(
    [(group - np.mean(group)) / (np.sqrt(np.mean((group - np.mean(group)) ** 2)) + eps) for group in reward_GN]
  )


def dr_grpo_advantage(reward_GN):
  """A = R - mean within each group."""
  return np.stack([group - np.mean(group) for group in np.asarray(reward_GN, np.float64)])


def log_edge(logprob_BT, batch, edge):
  """log of one ratio of the policy triangle: direct E = pi / mu, proximal U = pi / q, behaviour B = q / mu."""
  log_mu = np.asarray(batch.logprob, np.float64)
  log_pi = np.asarray(logprob_BT, np.float64)
  with np.errstate(invalid="ignore"):
    if edge == "direct":
      return log_pi - log_mu
    log_q = np.asarray(batch.proximal, np.float64)
    return {"proximal": log_pi - log_q, "behaviour": log_q - log_mu}[edge]


def estr_score(logprob_BT, batch, eps):
  """S = delta^2 / (H + eps), delta = log pi - log mu."""
  with np.errstate(invalid="ignore"):
    return log_edge(logprob_BT, batch, "direct") ** 2 / (np.asarray(batch.entropy, np.float64) + eps)


def bernoulli_kl(log_p, log_q):
  """KL(p || q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)), with 0 log 0 = 0 and x log(x / 0) = inf."""
  p, q = np.exp(np.asarray(log_p, np.float64)), np.exp(np.asarray(log_q, np.float64))
  not_p, not_q = -np.expm1(np.asarray(log_p, np.float64)), -np.expm1(np.asarray(log_q, np.float64))
  with np.errstate(divide="ignore", invalid="ignore"):
    this = np.where(p == 0, 0.0, p * (np.log(p) - np.log(q)))
    other = np.where(not_p == 0, 0.0, not_p * (np.log(not_p) - np.log(not_q)))
  return this + other


class Loss(NamedTuple):
  """What a loss must return for each token, [B, T], and d value / d log pi."""

  value: np.ndarray
  keep: np.ndarray
  clipped: np.ndarray
  gradient: np.ndarray


def ppo(logprob_BT, batch, *, edge, clip_low, clip_high):
  """-min(r A, clip(r) A) on every policy token."""
  return _times_surrogate(logprob_BT, batch, edge, np.ones(batch.mask.shape, bool), 1.0, clip_low, clip_high)


def estr(logprob_BT, batch, *, edge, tau, eps, clip_low, clip_high):
  """1[S <= tau] times the surrogate."""
  keep = estr_score(logprob_BT, batch, eps) <= tau
  return _times_surrogate(logprob_BT, batch, edge, keep, 1.0, clip_low, clip_high)


def icepop(logprob_BT, batch, *, edge, low, high, clip_low, clip_high):
  """Original (edge proximal): B 1[low <= B <= high] PPO(U); direct: 1[low <= E <= high] PPO(E)."""
  with np.errstate(over="ignore"):
    band = np.exp(log_edge(logprob_BT, batch, "behaviour" if edge == "proximal" else "direct"))
  weight = band if edge == "proximal" else 1.0
  return _times_surrogate(logprob_BT, batch, edge, (low <= band) & (band <= high), weight, clip_low, clip_high)


def kpop(logprob_BT, batch, *, edge, phi, clip_low, clip_high):
  """1[KL(pi || mu) <= phi and KL(mu || pi) <= phi] of the sampled token's Bernoulli, times the surrogate."""
  keep = (bernoulli_kl(logprob_BT, batch.logprob) <= phi) & (bernoulli_kl(batch.logprob, logprob_BT) <= phi)
  return _times_surrogate(logprob_BT, batch, edge, keep, 1.0, clip_low, clip_high)


LOSSES = {"estr": estr, "ppo": ppo, "icepop": icepop, "kpop": kpop}


def _times_surrogate(logprob_BT, batch, edge, keep, weight, clip_low, clip_high):
  log_ratio = log_edge(logprob_BT, batch, edge)
  keep = keep & np.asarray(batch.mask) & np.isfinite(np.asarray(batch.logprob)) & np.isfinite(log_ratio)
  ratio = np.exp(np.where(keep, log_ratio, 0.0))
  advantage = np.where(keep, np.asarray(batch.advantage, np.float64), 0.0)
  weight = np.where(keep, weight, 0.0)
  too_high = (advantage > 0) & (ratio > 1 + clip_high)
  too_low = (advantage < 0) & (ratio < 1 - clip_low)
  effective = np.where(too_high, 1 + clip_high, np.where(too_low, 1 - clip_low, ratio))
  clipped = too_high | too_low
  gradient = np.where(clipped, 0.0, -weight * ratio * advantage)
  return Loss(-weight * effective * advantage, keep, clipped, gradient)


def diagnostics(logprob_BT, entropy_BT, batch, token_loss, edges):
  """name -> (total, count) of every metric of a batch, token by token.

  Bin i holds edges[i] <= H < edges[i + 1]; the first and the last bin also hold what lies beyond them.
  """
  bins = len(edges) - 1
  over_policy = ("loss/mask_fraction", "loss/clip_fraction", "policy/entropy", "policy/learner_entropy")
  over_finite = ("policy/rollout_kl", "policy/abs_delta", "policy/ratio", "policy/ratio_square")
  totals = dict.fromkeys(over_policy + over_finite, 0.0)
  in_bin, abs_in_bin = np.zeros(bins), np.zeros(bins)
  policy = finite = 0
  for index in np.ndindex(*batch.mask.shape):
    if not batch.mask[index]:
      continue
    policy += 1
    totals["loss/mask_fraction"] += 0.0 if token_loss.keep[index] else 1.0
    totals["loss/clip_fraction"] += 1.0 if token_loss.clipped[index] else 0.0
    totals["policy/entropy"] += float(batch.entropy[index])
    totals["policy/learner_entropy"] += float(entropy_BT[index])
    delta = float(logprob_BT[index]) - float(batch.logprob[index])
    if not np.isfinite(delta):
      continue
    finite += 1
    totals["policy/rollout_kl"] += np.expm1(delta) - delta
    totals["policy/abs_delta"] += abs(delta)
    totals["policy/ratio"] += np.exp(delta)
    totals["policy/ratio_square"] += np.exp(2 * delta)
    home = sum(float(batch.entropy[index]) >= float(edge) for edge in edges[1:-1])
    in_bin[home] += 1
    abs_in_bin[home] += abs(delta)
  result = {name: (total, policy if name in over_policy else finite) for name, total in totals.items()}
  result["policy/abs_delta_by_entropy"] = (abs_in_bin, in_bin)
  result["policy/token_share_by_entropy"] = (in_bin, np.full(bins, finite))
  return result

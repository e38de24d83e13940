"""The diagnostics counted token by token in float64, from the glossary's formulas and not from the JAX code."""

import math

import numpy as np

from estr_jax.structs import Batch, Scores, TokenLoss

KINDS = ("policy", "policy", "policy", "certain", "flat", "unsampled", "broken", "lost", "tool")


def case(seed: int, shape=(3, 9), kinds=KINDS) -> tuple[Scores, Batch, TokenLoss]:
  """(policy, batch, token loss) with every kind of token; what a loss keeps and clips is drawn at random.

  certain: H = 0. flat: advantage 0. unsampled: a stored log-prob of -inf. broken: of NaN. lost: an entropy of NaN.
  tool: not of the policy, and everything stored about it is rubbish. padding: the end of a row, segment 0.
  """
  random = np.random.default_rng(seed)
  used = random.integers(max(1, shape[1] - 3), shape[1] + 1, (shape[0], 1))
  kind = np.where(np.arange(shape[1]) < used, random.choice(kinds, size=shape), "padding")
  mask = ~np.isin(kind, ("tool", "padding"))
  f32 = np.float32
  stored = (-(10.0 ** random.uniform(-5, 1, shape))).astype(f32)
  logprob = np.minimum(stored + random.normal(size=shape) * random.choice([1e-3, 0.1, 2.0], size=shape), 0).astype(f32)
  entropy = np.where(kind == "certain", 0, 10.0 ** random.uniform(-3.5, 0.8, shape)).astype(f32)
  learner_entropy = (10.0 ** random.uniform(-3, 0.8, shape)).astype(f32)
  advantage = np.where(kind == "flat", 0, random.normal(size=shape)).astype(f32)
  stored = np.select([kind == "unsampled", kind == "broken"], [-np.inf, np.nan], stored).astype(f32)
  entropy[kind == "lost"] = np.nan
  for array in (stored, entropy, learner_entropy, advantage, logprob):
    array[kind == "tool"] = np.nan
  # Two sequences a row, versions that only grow within each.
  border = random.integers(1, shape[1] + 1, (shape[0], 1))
  segment = np.where(np.arange(shape[1]) < border, 1, 2) * (kind != "padding")
  staleness = 40 - np.cumsum(random.choice([0, 0, 1, 2, 9], size=shape), axis=1)
  batch = Batch(
    tokens=np.ones(shape, np.int32),
    mask=mask,
    logprob=stored,
    entropy=entropy,
    gini=np.zeros(shape, f32),
    staleness=np.where(mask, np.maximum(staleness, 0), 0).astype(np.int32),
    segment=segment.astype(np.int32),
    group=segment.astype(np.int32),
    reward=np.zeros(shape, f32),
    advantage=advantage,
  )
  with np.errstate(invalid="ignore"):
    keep = mask & np.isfinite(logprob - stored) & (random.random(shape) < 0.7)
  clipped = keep & (random.random(shape) < 0.4)
  return Scores(logprob, learner_entropy, None), batch, TokenLoss(np.zeros(shape, f32), keep, clipped)


def switches(batch: Batch) -> np.ndarray:
  """bool [B, T]: walks along each row and remembers the policy token before, while the sequence lasts."""
  result = np.zeros(batch.mask.shape, bool)
  for row in range(batch.mask.shape[0]):
    before = None  # (segment, staleness)
    for t in range(batch.mask.shape[1]):
      if not batch.mask[row, t]:
        continue
      now = int(batch.segment[row, t]), int(batch.staleness[row, t])
      result[row, t] = before is not None and before[0] == now[0] and before[1] != now[1]
      before = now
  return result


def score(policy: Scores, batch: Batch, eps: float) -> np.ndarray:
  """S of every policy token that has one, in reading order."""
  found = []
  for index in np.ndindex(*batch.mask.shape):
    delta, entropy = float(policy.logprob[index]) - float(batch.logprob[index]), float(batch.entropy[index])
    if batch.mask[index] and math.isfinite(delta) and math.isfinite(entropy):
      found.append(delta**2 / (entropy + eps))
  return np.array(found)


def diagnostics(
  policy: Scores, batch: Batch, token_loss: TokenLoss, *, entropy_edges, staleness_edges, score_edges, eps
):
  """name -> (total, count) of every metric of a batch.

  Entropy bin i holds edges[i] <= H < edges[i + 1]; the first and the last also hold what lies beyond them. Staleness
  bin i holds edges[i] <= v - version < edges[i + 1], the last one all from its edge on. The bins of S lie below the
  first edge, between two edges, and from the last edge on.
  """
  entropy_bins, staleness_bins, score_bins = len(entropy_edges) - 1, len(staleness_edges), len(score_edges) + 1
  scalars = (
    "loss/mask_fraction loss/mask_fraction_at_switch loss/mask_fraction_off_switch loss/clip_fraction "
    "loss/clip_fraction_high loss/clip_fraction_low policy/switch_share policy/learner_entropy policy/entropy "
    "policy/entropy_at_switch policy/entropy_off_switch policy/rollout_kl policy/rollout_kl_k1 policy/chi_square "
    "policy/abs_delta policy/abs_delta_at_switch policy/abs_delta_off_switch policy/ratio policy/ratio_square "
    "policy/ratio_deviation_kept policy/ratio_deviation_masked"
  )
  vectors = {
    "loss/mask_fraction_by_entropy": entropy_bins,
    "loss/mask_fraction_by_advantage": 3,
    "loss/mask_fraction_by_staleness": staleness_bins,
    "policy/abs_delta_by_entropy": entropy_bins,
    "policy/delta_square_by_entropy": entropy_bins,
  }
  totals = {name: np.zeros(size) for name, size in vectors.items()} | {name: np.zeros(()) for name in scalars.split()}
  numbers = {name: np.zeros_like(total) for name, total in totals.items()}

  def count(name, value, bin=()):
    totals[name][bin] += value
    numbers[name][bin] += 1

  share_entropy, share_staleness, histogram = np.zeros(entropy_bins), np.zeros(staleness_bins), np.zeros(score_bins)
  at = switches(batch)
  log_weight = {}
  for index in np.ndindex(*batch.mask.shape):
    if not batch.mask[index]:
      continue
    out, clipped = float(not token_loss.keep[index]), float(token_loss.clipped[index])
    advantage, entropy = float(batch.advantage[index]), float(batch.entropy[index])
    side = "at" if at[index] else "off"
    age = sum(int(batch.staleness[index]) >= edge for edge in staleness_edges[1:])
    count("loss/mask_fraction", out)
    count("loss/mask_fraction_by_advantage", out, (advantage > 0) - (advantage < 0) + 1)
    count("loss/mask_fraction_by_staleness", out, age)
    count(f"loss/mask_fraction_{side}_switch", out)
    count("loss/clip_fraction", clipped)
    count("loss/clip_fraction_high", clipped if advantage > 0 else 0.0)
    count("loss/clip_fraction_low", clipped if advantage < 0 else 0.0)
    count("policy/switch_share", float(at[index]))
    count("policy/learner_entropy", float(policy.entropy[index]))
    share_staleness[age] += 1
    home = sum(entropy >= float(edge) for edge in entropy_edges[1:-1]) if math.isfinite(entropy) else None
    if home is not None:
      count("loss/mask_fraction_by_entropy", out, home)
      count("policy/entropy", entropy)
      count(f"policy/entropy_{side}_switch", entropy)
    delta = float(policy.logprob[index]) - float(batch.logprob[index])
    if not math.isfinite(delta):
      continue
    ratio = math.exp(delta)
    count("policy/rollout_kl", math.expm1(delta) - delta)
    count("policy/rollout_kl_k1", -delta)
    count("policy/chi_square", math.expm1(delta) ** 2)
    count("policy/abs_delta", abs(delta))
    count(f"policy/abs_delta_{side}_switch", abs(delta))
    count("policy/ratio", ratio)
    count("policy/ratio_square", ratio**2)
    count("policy/ratio_deviation_masked" if out else "policy/ratio_deviation_kept", abs(math.expm1(delta)))
    where = index[0], int(batch.segment[index])
    log_weight[where] = log_weight.get(where, 0.0) + delta
    if home is not None:
      count("policy/abs_delta_by_entropy", abs(delta), home)
      count("policy/delta_square_by_entropy", delta**2, home)
      share_entropy[home] += 1
      histogram[sum(delta**2 / (entropy + eps) >= edge for edge in score_edges)] += 1
  weights = [math.exp(value) for value in log_weight.values()]
  result = {name: (total, numbers[name]) for name, total in totals.items()}
  return result | {
    "policy/sequence_weight": (sum(weights), len(weights)),
    "policy/sequence_weight_square": (sum(weight**2 for weight in weights), len(weights)),
    "policy/token_share_by_entropy": (share_entropy, np.full(entropy_bins, share_entropy.sum())),
    "policy/token_share_by_staleness": (share_staleness, np.full(staleness_bins, share_staleness.sum())),
    "policy/score_histogram": (histogram, np.full(score_bins, histogram.sum())),
  }

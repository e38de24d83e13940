"""One definition per metric: its formula, its unit, and what a healthy run shows.

A row of `metrics.jsonl` may hold these names and no other, so that a curve never has two meanings. All
means over tokens are over policy tokens (`mask`), never over padding, tools or kept tokens only.

Notation: mu = the behaviour policy as recorded by the sampler, pi = the learner's policy at the update,
delta = log pi - log mu of a sampled token, H = entropy of mu (nats), v = the version before the update.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Metric:
  """What a number in a row means."""

  formula: str
  unit: str
  healthy: str


_FRACTION = "fraction"
_SECONDS = "seconds"
_VERSIONS = "versions"

GLOSSARY: dict[str, Metric] = {
  "rollout/reward": Metric("mean reward of the batch's trajectories", "reward", "rises, then levels off"),
  "rollout/length": Metric("policy tokens per trajectory, mean", "tokens", "steady; a jump often precedes a collapse"),
  "rollout/turns": Metric("times the policy was given the word, mean", "turns", "what the task needs"),
  "rollout/seconds": Metric("from admission to a slot until the end of a trajectory, mean", _SECONDS, "steady"),
  "rollout/truncated": Metric("trajectories that ended for lack of room / trajectories", _FRACTION, "below 0.05"),
  "loss/objective": Metric(
    "sum of token losses / all policy tokens of the batch",
    "reward (normalised)",
    "near 0; its level has no meaning",
  ),
  "loss/mask_fraction": Metric(
    "1 - kept tokens / policy tokens (trust region)", _FRACTION, "0.001 to 0.05; 0 means the region never acts"
  ),
  "loss/clip_fraction": Metric("kept tokens whose gradient the clip removed / policy tokens", _FRACTION, "below 0.2"),
  "policy/tokens": Metric("policy tokens of the batch", "tokens", "steady"),
  "policy/entropy": Metric("mean H", "nats", "falls slowly; a plunge to 0 or a climb is a collapse"),
  "policy/learner_entropy": Metric("mean entropy of pi", "nats", "near policy/entropy"),
  "policy/rollout_kl": Metric(
    "mean of exp(delta) - 1 - delta, an estimate of KL(mu || pi)", "nats", "below 0.05 and not climbing"
  ),
  "policy/abs_delta": Metric("mean |delta|", "nats", "below 0.2; exactly 0 only when nothing is stale"),
  "policy/max_abs_delta": Metric("max |delta|", "nats", "finite; 0 while staleness > 0 means the ratio is off"),
  "policy/ratio": Metric("mean of exp(delta)", "1", "0.95 to 1.05"),
  "policy/ratio_square": Metric("mean of exp(2 delta)", "1", "near 1; a few huge ratios drive it up"),
  "policy/ess": Metric(
    "(sum r)^2 / (n sum r^2), r = exp(delta) over n policy tokens", _FRACTION, "above 0.8; 1 is on-policy"
  ),
  "policy/abs_delta_by_entropy": Metric("mean |delta| of the tokens in each bin of H", "nats", "grows as sqrt(H)"),
  "policy/token_share_by_entropy": Metric("policy tokens in each bin of H / all of them", _FRACTION, "most at low H"),
  "optimizer/gradient_norm": Metric("global L2 norm of the gradient before clipping", "norm", "steady, without spikes"),
  "optimizer/learning_rate": Metric("learning rate of this update", "1", "follows its schedule"),
  "staleness/intra": Metric("last - first version in a trajectory, mean", _VERSIONS, "0 in sync; else as planned"),
  "staleness/inter": Metric("v - last version in a trajectory, mean", _VERSIONS, "0 in sync; else as planned"),
  "staleness/token": Metric("v - version of a policy token, mean", _VERSIONS, "0 in sync; at most intra + inter"),
  "staleness/intra_histogram": Metric(
    "trajectories by intra staleness; the last bin is 'or more'", "trajectories", "last bin nearly empty"
  ),
  "staleness/inter_histogram": Metric(
    "trajectories by inter staleness; the last bin is 'or more'", "trajectories", "last bin nearly empty"
  ),
  "staleness/token_histogram": Metric(
    "policy tokens by age; the last bin is 'or more'", "tokens", "last bin nearly empty"
  ),
  "queue/queued": Metric("groups that wait for the learner", "groups", "above 0 and below the bound"),
  "queue/leased": Metric("groups that samplers hold now", "groups", "slots of all samplers / group size, or more"),
  "queue/dropped": Metric("groups dropped as too stale, since this learner process began", "groups", "0, or few"),
  "queue/accepted_length": Metric(
    "policy tokens of the trajectories that the learner took since the last row, mean", "tokens", "as generated_length"
  ),
  "queue/generated_length": Metric(
    "policy tokens of the trajectories that arrived since the last row, mean",
    "tokens",
    "as accepted_length, a few rows ahead of it; above it for long, long rollouts are lost",
  ),
  "time/step_s": Metric("from one update's end to the next one's", _SECONDS, "steady"),
  "time/train_s": Metric("the update itself", _SECONDS, "most of step_s when the learner is the bottleneck"),
  "time/wait_rollouts_s": Metric("the learner waited for the queue", _SECONDS, "near 0 when samplers keep up"),
  "time/publish_s": Metric("the learner handed its weights over", _SECONDS, "well below train_s"),
  "time/sampler_wait_s": Metric(
    "samplers waited for prompts or weights since the last row", _SECONDS, "near 0 when the learner keeps up"
  ),
  "throughput/tokens_per_s": Metric("policy tokens trained / step_s", "tokens/s", "steady"),
  "throughput/sampled_tokens_per_s": Metric("policy tokens sampled / second", "tokens/s", "a little above trained"),
  "eval/sampled_accuracy": Metric("held-out prompts solved, sampled / prompts", _FRACTION, "rises"),
  "eval/greedy_accuracy": Metric("held-out prompts solved, greedy / prompts", _FRACTION, "rises"),
}

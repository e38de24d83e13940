"""One definition per metric: its formula, its unit, and what a healthy run shows.

A row of `metrics.jsonl` may hold these names and no other, so that a curve never has two meanings. All
means over tokens are over policy tokens (`mask`), never over padding, tools or kept tokens only.

Notation: mu = the behaviour policy as recorded by the sampler, pi = the learner's policy at the update,
delta = log pi - log mu of a sampled token, r = exp(delta), H = entropy of mu (nats), v = the version before the update,
S = delta^2 / (H + 0.01): ESTR's score with the paper's eps, whatever the loss, so that runs of all losses compare. A
switch is a policy token of another version than the policy token before it in its sequence. Tokens without a finite
stored log-prob are in the fractions and in no mean of delta, r or S. The bins of H, of staleness and of S are those of
objective.diagnostics: ENTROPY_EDGES, STALENESS_EDGES and SCORE_EDGES.
"""

import dataclasses

from estr_jax.objective.diagnostics import SCORE_BINS_PER_DECADE, SCORE_EDGES, SCORE_QUANTILES


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
  "loss/penalty": Metric(
    "entropy bonus, KL penalty and loss.router_balance x router/balance, added to loss/objective",
    "reward (normalised)",
    "small against the rewards",
  ),
  "loss/entropy_coefficient": Metric(
    "what multiplied the entropy bonus in this update", "reward / nat", "0 without one; level once the entropy is"
  ),
  "loss/mask_fraction": Metric(
    "1 - kept tokens / policy tokens (trust region)", _FRACTION, "0.001 to 0.05; 0 means the region never acts"
  ),
  "loss/mask_fraction_by_entropy": Metric(
    "loss/mask_fraction of the tokens in each bin of H", _FRACTION, "ESTR: level; a fixed band: steep in H"
  ),
  "loss/mask_fraction_by_advantage": Metric(
    "loss/mask_fraction of the tokens with A < 0, A = 0, A > 0", _FRACTION, "alike, else the mask tilts the gradient"
  ),
  "loss/mask_fraction_by_staleness": Metric(
    "loss/mask_fraction of the tokens that are 0, 1, 2, 3, 4, 5-8, 9-16, 17-32, 33 or more versions old",
    _FRACTION,
    "rises slowly; near 1 means that old rollouts are wasted",
  ),
  "loss/mask_fraction_at_switch": Metric(
    "loss/mask_fraction of the tokens at a switch", _FRACTION, "as off_switch; far above it, exploration is thrown away"
  ),
  "loss/mask_fraction_off_switch": Metric("loss/mask_fraction of the other tokens", _FRACTION, "as loss/mask_fraction"),
  "loss/tau": Metric(
    "the bound tau of the loss in force; absent where it has none, or none yet", "1", "constant once it is there"
  ),
  "loss/clip_fraction": Metric("kept tokens whose gradient the clip removed / policy tokens", _FRACTION, "below 0.2"),
  "loss/clip_fraction_high": Metric(
    "those of loss/clip_fraction with A > 0, where PPO's clip acts above / policy tokens", _FRACTION, "below 0.1"
  ),
  "loss/clip_fraction_low": Metric(
    "those of loss/clip_fraction with A < 0, where PPO's clip acts below / policy tokens", _FRACTION, "below 0.1"
  ),
  "policy/tokens": Metric("policy tokens of the batch", "tokens", "steady"),
  "policy/entropy": Metric("mean H", "nats", "falls slowly; a plunge to 0 or a climb is a collapse"),
  "policy/entropy_at_switch": Metric("mean H of the tokens at a switch", "nats", "above off_switch"),
  "policy/entropy_off_switch": Metric("mean H of the other tokens", "nats", "near policy/entropy"),
  "policy/learner_entropy": Metric("mean entropy of pi", "nats", "near policy/entropy"),
  "policy/rollout_kl": Metric(
    "mean of exp(delta) - 1 - delta (k3), an estimate of KL(mu || pi)", "nats", "below 0.05 and not climbing"
  ),
  "policy/rollout_kl_k1": Metric(
    "mean of -delta (k1), another estimate of KL(mu || pi)", "nats", "as rollout_kl; noisier, and may fall below 0"
  ),
  "policy/chi_square": Metric(
    "mean of (r - 1)^2, an estimate of chi^2(pi || mu)", "1", "below 0.2; a few huge ratios drive it up"
  ),
  "policy/kl_per_entropy": Metric(
    "policy/rollout_kl / policy/entropy", "1", "below 0.1 and level: drift in proportion to the entropy"
  ),
  "policy/abs_delta": Metric("mean |delta|", "nats", "below 0.2; exactly 0 only when nothing is stale"),
  "policy/abs_delta_at_switch": Metric("mean |delta| of the tokens at a switch", "nats", "above off_switch"),
  "policy/abs_delta_off_switch": Metric("mean |delta| of the other tokens", "nats", "near policy/abs_delta"),
  "policy/switch_share": Metric("tokens at a switch / policy tokens", _FRACTION, "0 without in-flight updates"),
  "policy/max_abs_delta": Metric("max |delta|", "nats", "finite; 0 while staleness > 0 means the ratio is off"),
  "policy/ratio": Metric("mean of exp(delta)", "1", "0.95 to 1.05"),
  "policy/ratio_square": Metric("mean of exp(2 delta)", "1", "near 1; a few huge ratios drive it up"),
  "policy/ratio_deviation_kept": Metric("mean |r - 1| of kept tokens", "1", "below 0.2 and level"),
  "policy/ratio_deviation_masked": Metric("mean |r - 1| of masked tokens", "1", "well above that of the kept"),
  "policy/ess": Metric(
    "(sum r)^2 / (n sum r^2), r = exp(delta) over n policy tokens", _FRACTION, "above 0.8; 1 is on-policy"
  ),
  "policy/sequence_weight": Metric(
    "mean over sequences of w = the product of r over a sequence, within exp(+-20)", "1", "0.5 to 2"
  ),
  "policy/sequence_weight_square": Metric("mean over sequences of w^2", "1", "near 1; explodes with length and age"),
  "policy/sequence_ess": Metric(
    "(sum w)^2 / (n sum w^2) over n sequences", _FRACTION, "above 0.3; 1 is on-policy; 1 / n is a single sequence"
  ),
  **{
    f"policy/score_{name}": Metric(
      f"{level:g} quantile of S, off policy/score_histogram: right within a factor of 10^(1/{SCORE_BINS_PER_DECADE})"
      f"; {SCORE_EDGES[0]:g} or less and {SCORE_EDGES[-1]:g} or more are shown as that",
      "1",
      healthy,
    )
    for (name, level), healthy in zip(
      SCORE_QUANTILES.items(), ("far below tau", "below tau", "near tau or below", "above tau: what the mask is for")
    )
  },
  "policy/score_histogram": Metric(
    f"tokens by S: below {SCORE_EDGES[0]:g}, {SCORE_BINS_PER_DECADE} bins a decade up to {SCORE_EDGES[-1]:g}, above",
    "tokens",
    "one hump, well below tau; a tail that grows is drift",
  ),
  "policy/abs_delta_by_entropy": Metric("mean |delta| of the tokens in each bin of H", "nats", "grows as sqrt(H)"),
  "policy/exact_kl": Metric(
    "mean of sum_v mu (log mu - log pi), KL(mu || pi) over the whole vocabulary; with sampling.record_vocabulary",
    "nats",
    "as policy/rollout_kl, without its noise",
  ),
  "policy/exact_square_by_entropy": Metric(
    "mean of sum_v mu (log pi - log mu)^2 of the tokens in each bin of H; with sampling.record_vocabulary",
    "nats^2",
    "grows about as H",
  ),
  "policy/delta_square_by_entropy": Metric(
    "mean delta^2 of the tokens in each bin of H, of sampled tokens",
    "nats^2",
    "grows as H; at H near 0, sampling noise",
  ),
  "policy/token_share_by_entropy": Metric("policy tokens in each bin of H / all of them", _FRACTION, "most at low H"),
  "policy/token_share_by_staleness": Metric(
    "policy tokens in each bin of loss/mask_fraction_by_staleness / all of them", _FRACTION, "no tail of old ones"
  ),
  "router/balance": Metric(
    "experts x sum over them of (share in all choices) x (mean probability), mean over layers; router/* are of the "
    "learner's routers, over all tokens of the batch, prompts included; its choices are those recorded, if any are",
    "1",
    "1 to 2: 1 is even, the number of experts is all on one",
  ),
  "router/balance_max": Metric("router/balance of the layer where it is largest", "1", "level; a climb is a collapse"),
  "router/largest_share": Metric(
    "largest share of an expert in the choices of its layer, over all layers", _FRACTION, "a few times 1 / experts"
  ),
  "router/entropy": Metric("mean entropy of a router's probabilities, over tokens and layers", "nats", "level"),
  "router/dead_experts": Metric("experts that no token chose / experts, over all layers", _FRACTION, "0, or level"),
  "router/agreement": Metric(
    "recorded choices that the learner's router would take too, the layers before being replayed / recorded choices",
    _FRACTION,
    "above 0.9; 1 without staleness and rounding; with sampling.record_routing",
  ),
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

"""Published methods that are more than a loss: the quickstart under a named recipe.

    python -m experiments.train --config=configs/recipes.py:dapo --workdir=DIR

RECIPES says which keys each one sets; the edge stays what `loss.edge` says. `:NAME,smoke` is cut down to seconds, for
tests. What a recipe leaves out: its source's KL term, if it has one, and DAPO's dynamic sampling and overlong shaping.
No result is claimed here for any of them.
"""

from configs import quickstart

_SYMMETRIC = {"loss.clip_low": 0.2, "loss.clip_high": 0.2}
_PPO = {"loss.name": "ppo"}

RECIPES = {
  "grpo": _PPO | _SYMMETRIC | {"loss.aggregation": "sequence_mean"},
  "dapo": _PPO | {"loss.clip_low": 0.2, "loss.clip_high": 0.28},
  "dr_grpo": _PPO | _SYMMETRIC | {"advantage.name": "dr_grpo", "loss.aggregation": "sequence_sum"},
  "rloo": _PPO | _SYMMETRIC | {"advantage.name": "rloo", "loss.aggregation": "sequence_sum"},
  "reinforce_pp": _PPO | _SYMMETRIC | {"advantage.name": "reinforce_pp"},
  "gspo": {"loss.name": "gspo", "loss.aggregation": "sequence_mean"},
  "luspo": {"loss.name": "gspo", "loss.aggregation": "sequence_sum"},
  "gmpo": {"loss.name": "gmpo", "loss.aggregation": "sequence_mean"},
  "sapo": {"loss.name": "sapo", "loss.aggregation": "sequence_mean"},
  "asympo": {"loss.name": "asympo", "loss.aggregation": "sequence_mean"},
  "vcpo": {"loss.name": "vcpo", "loss.aggregation": "sequence_mean", "optimizer.ess_step": True},
  "adaptive_entropy": _PPO | _SYMMETRIC | {"loss.entropy.target": 0.2},
  "kl_to_reference": _PPO | _SYMMETRIC | {"loss.kl.coefficient": 1e-3},
  "score_centering": {
    "loss.name": "score_centering",
    "advantage.name": "dr_grpo",
    "sampling.record_vocabulary": True,
  },
}


def get_config(arg: str = ""):
  name, _, rest = arg.partition(",")
  if name not in RECIPES or rest not in ("", "smoke"):
    raise ValueError(
      f"configs/recipes.py:{arg} is unknown; its argument is one of {', '.join(RECIPES)}, with ,smoke for tests"
    )
  c = quickstart.get_config(rest)
  c.update_from_flattened_dict(RECIPES[name])
  return c

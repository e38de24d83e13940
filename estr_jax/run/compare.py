"""What losses decide on the same tokens of a policy."""

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from estr_jax.errors import UserError
from estr_jax.learner.batching import assemble
from estr_jax.learner.step import score_tokens
from estr_jax.objective.losses import Loss
from estr_jax.objective.triangle import MissingInput
from estr_jax.run.loaded import Loaded
from estr_jax.structs import Batch, Scores, TokenLoss, Trajectory


@dataclasses.dataclass(frozen=True)
class Decisions:
  """What some losses make of the same tokens, at the same weights. Host; every array is [B, T] NumPy.

  A row is a trajectory, in the order of prompt ids, which is that of `sample`; T is the run's sampling.context.
  """

  version: int  # of the weights pi
  batch: Batch  # what the sampler recorded of mu, and the advantages
  delta: np.ndarray  # f32; log pi - log mu, nats; 0 where not batch.mask
  losses: dict[str, TokenLoss]  # by the names that were given


def compare_losses(loaded: Loaded, groups: Sequence[Sequence[Trajectory]], losses: Mapping[str, Loss]) -> Decisions:
  """What each loss would do with each token, were the policy to be updated on these trajectories now.

  It tells what is kept, masked and clipped, not which loss trains better.

  Args:
    loaded: the policy pi.
    groups: the trajectories of each prompt, as `sample` returns them; mu is whatever sampled them, so take an older
      checkpoint for a stale batch. Advantages are those of the run's config, on one device and in one microbatch.
    losses: functions of `estr_jax.objective.losses.LOSSES` or of one's own, by any name. `functools.partial` sets
      hyper-parameters; those that stay unset have the function's defaults, and the run's where it has none (edge,
      clip_low, clip_high).

  Raises:
    UserError: a trajectory has no reward, comes twice, is too long, or was sampled by newer weights than the policy's;
      a loss asks for what neither the run nor the record has.
  """
  c = loaded.settings.config
  batch = _one_batch(loaded, groups)
  score = functools.partial(
    score_tokens,
    loaded.model,
    temperature=c.sampling.temperature,
    chunk=c.learner.score_chunk,
    entropy=True,
    vocabulary=batch.vocabulary is not None,
  )
  policy = jax.jit(score)(loaded.params, batch.tokens, batch.segment, experts=batch.experts)
  batch = dataclasses.replace(batch, proximal=policy.logprob)  # q, as it is before an update of this policy
  # One by one: of a dict, device_get would sort the names.
  decided = {name: jax.device_get(_decide(name, loss, policy, batch, c.loss)) for name, loss in losses.items()}
  batch, logprob_BT = jax.device_get((batch, policy.logprob))
  delta_BT = np.where(batch.mask, logprob_BT - batch.logprob, np.float32(0))
  return Decisions(loaded.version, batch, delta_BT, decided)


def _one_batch(loaded: Loaded, groups: Sequence[Sequence[Trajectory]]) -> Batch:
  """The trajectories as the learner would lay them out, one a row."""
  c = loaded.settings.config
  trajectories = [trajectory for group in groups for trajectory in group]
  if not trajectories:
    raise UserError("no trajectories; give the groups that `sample` returns")
  if any(np.isnan(trajectory.reward) for trajectory in trajectories):
    raise UserError(
      'a trajectory without a reward has no advantage; sample from {"question": ..., "answer": ...} rather than from '
      "a question alone"
    )
  newest = max(int(trajectory.version.max(initial=0)) for trajectory in trajectories)
  if newest > loaded.version:
    raise UserError(
      f"a trajectory was sampled by version {newest}, newer than the policy's {loaded.version}; load a newer checkpoint"
    )
  try:
    batch = assemble(
      groups,
      loaded.version,
      rows=len(trajectories),
      length=c.sampling.context,
      advantage=c.advantage.name,
      advantage_eps=c.advantage.eps,
      pack=False,
    )
  except ValueError as error:
    raise UserError(f"these trajectories make no batch: {error}") from error
  return jax.tree.map(jax.numpy.asarray, batch)


def _decide(name: str, loss: Loss, policy: Scores, batch: Batch, keys: ConfigDict) -> TokenLoss:
  """A loss on the batch; `keys` are the loss keys of a config."""
  unset = [
    p.name for p in inspect.signature(loss).parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty
  ]
  unknown = [key for key in unset if key not in keys]
  if unknown:
    raise UserError(f"loss {name} needs {unknown[0]}, which no config has; set it with functools.partial")
  try:
    return loss(policy, batch, **{key: keys[key] for key in unset})
  except MissingInput as error:
    raise UserError(f"loss {name}: {error}") from error

"""A batch of prompts rolled out to the end under a schedule of weights: the seam where staleness is set."""

from collections.abc import Callable, Sequence

from estr_jax.sampler import decode
from estr_jax.sampler.engine import Engine
from estr_jax.structs import Prompt, Trajectory, Weights


def rollout(
  engine: Engine,
  prompts: Sequence[Prompt],
  weights_for: Callable[[int], Weights],
  *,
  segments: int,
  segment_tokens: int,
) -> list[Trajectory]:
  """Finishes every prompt, in waves of at most the engine's slots.

  A trajectory is cut into segments of `segment_tokens` policy tokens, the last one open-ended; segment k of every
  trajectory is sampled under weights_for(k). The cut is exact: a sequence that reaches the end of its segment waits for
  the others of its wave.

  Args:
    engine: with no unfinished sequences.
    prompts: what to roll out.
    weights_for: segment -> weights.
    segments: at least 1.
    segment_tokens: at least 1; without effect when segments is 1.

  Returns:
    The trajectories, by prompt id.
  """
  finished = []
  for first in range(0, len(prompts), engine.free):
    wave = prompts[first : first + engine.free]
    engine.admit(list(wave))
    for segment in range(segments):
      limit = decode.NO_LIMIT if segment == segments - 1 else (segment + 1) * segment_tokens
      engine.set_weights(weights_for(segment))
      while engine.can_move(limit):
        finished += engine.advance(limit)
  return sorted(finished, key=lambda trajectory: trajectory.prompt_id)

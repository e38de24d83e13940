"""The one definition of a token's log-prob and of a policy's entropy, shared by sampler and learner."""

import jax
import jax.numpy as jnp

from estr_jax.structs import Scores


def score_logits(logits_V: jax.Array, targets: jax.Array, *, temperature: float) -> Scores:
  """Log-prob of the targets, full-vocabulary entropy and Gini impurity of softmax(logits / temperature).

  All are taken after the temperature, of the whole vocabulary and in float32: a top-k entropy or one of the
  unscaled logits would silently rescale the trust region.

  Args:
    logits_V: [..., V], any float dtype.
    targets: i32 [...].
    temperature: of the sampling distribution, above 0.

  Returns:
    float32 [...] each; log-probs and entropies in nats. The Gini impurity carries no gradient.
  """
  logprob_V = jax.nn.log_softmax(logits_V.astype(jnp.float32) / temperature, axis=-1)
  # A masked sum instead of a gather: its gradient is no scatter, and a vocabulary that is sharded stays where it is.
  hit_V = targets[..., None] == jnp.arange(logits_V.shape[-1])
  logprob = jnp.sum(jnp.where(hit_V, logprob_V, 0.0), axis=-1)
  probability_V = jnp.exp(logprob_V)
  entropy = -jnp.sum(probability_V * jnp.where(probability_V > 0, logprob_V, 0.0), axis=-1)
  gini = 1 - jnp.sum(jnp.square(jax.lax.stop_gradient(probability_V)), axis=-1)
  return Scores(jnp.minimum(logprob, 0.0), entropy, gini)


def logits(hidden_BTD: jax.Array, head_DV: jax.Array) -> jax.Array:
  """Logits [..., V] in float32."""
  return jnp.einsum("...D,DV->...V", hidden_BTD, head_DV.astype(hidden_BTD.dtype), preferred_element_type=jnp.float32)


def score(
  hidden_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array, *, temperature: float, chunk: int
) -> Scores:
  """`score_logits` from hidden states, `chunk` tokens of every sequence at a time.

  At most [B, chunk, V] logits live at once, forward and backward: each chunk is recomputed in the backward pass.

  Args:
    hidden_BTD: hidden_BTD[:, t] is the state that predicts targets_BT[:, t].
    head_DV: output projection.
    targets_BT: i32.
    temperature: above 0.
    chunk: tokens along T; T is padded to a multiple of it.

  Returns:
    float32 [B, T] each.
  """
  B, T, D = hidden_BTD.shape
  if chunk >= T:  # nothing to save
    return score_logits(logits(hidden_BTD, head_DV), targets_BT, temperature=temperature)
  pad = -T % chunk
  hidden_BTD = jnp.pad(hidden_BTD, ((0, 0), (0, pad), (0, 0)))
  targets_BT = jnp.pad(targets_BT, ((0, 0), (0, pad)))
  chunks = (T + pad) // chunk
  hidden = hidden_BTD.reshape(B, chunks, chunk, D).swapaxes(0, 1)
  targets = targets_BT.reshape(B, chunks, chunk).swapaxes(0, 1)

  @jax.checkpoint
  def one(args):
    hidden_BCD, targets_BC = args
    return score_logits(logits(hidden_BCD, head_DV), targets_BC, temperature=temperature)

  scores = jax.lax.map(one, (hidden, targets))
  return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(B, T + pad)[:, :T], scores)

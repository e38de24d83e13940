"""The one definition of a token's log-prob and of a policy's entropy, shared by sampler and learner.

Both are made of a few sums over the vocabulary, `Moments`, which can be taken part by part and merged. The sampler
takes them of its logits; the learner takes them of hidden states and a head, and never holds all logits of a batch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from estr_jax.structs import Scores

# Below it exp is 0 in every dtype, and it is finite where a difference of logits may not be: 0 x inf cannot arise.
_FLOOR = -1e4
_SMALLEST = -1e30  # stands for the largest logit of nothing


class Moments(NamedTuple):
  """Sums over a part of the vocabulary, f32 [...]. With z the logits and w = exp((z - largest) / temperature)."""

  largest: jax.Array  # max z
  target: jax.Array  # z of the target; 0 where another part holds it
  total: jax.Array  # sum w
  weighted: jax.Array | None  # sum w (z - largest) / temperature, at most 0; None where no entropy is asked for
  squared: jax.Array | None  # sum w^2, without a gradient; likewise


def moments(logits_V: jax.Array, targets: jax.Array, *, temperature: float | jax.Array, entropy: bool) -> Moments:
  """Of logits [..., V] in any float dtype, and of targets i32 [...] counted from the first of them."""
  logits_V = logits_V.astype(jnp.float32)
  # The scores do not depend on the shift, so neither does their gradient.
  largest = jax.lax.stop_gradient(jnp.maximum(jnp.max(logits_V, axis=-1), _SMALLEST))
  # Divided after the subtraction: the difference of two near logits is exact, and it is never above 0.
  scaled_V = jnp.maximum((logits_V - largest[..., None]) / temperature, _FLOOR)
  weight_V = jnp.exp(scaled_V)
  # A masked sum instead of a gather: its gradient is no scatter, and a vocabulary that is sharded stays where it is.
  target = jnp.sum(jnp.where(_hit(targets, logits_V), logits_V, 0.0), axis=-1)
  total = jnp.sum(weight_V, axis=-1)
  if not entropy:
    return Moments(largest, target, total, None, None)
  squared = jnp.sum(jnp.square(jax.lax.stop_gradient(weight_V)), axis=-1)
  return Moments(largest, target, total, jnp.sum(weight_V * scaled_V, axis=-1), squared)


def merge(a: Moments, b: Moments, *, temperature: float | jax.Array) -> Moments:
  """Of two parts of one vocabulary."""
  largest = jnp.maximum(a.largest, b.largest)
  a, b = (_shift(part, largest, temperature) for part in (a, b))
  return Moments(largest, *jax.tree.map(lambda x, y: x + y, a[1:], b[1:]))


def _shift(part: Moments, largest: jax.Array, temperature: float | jax.Array) -> Moments:
  """The same sums with w taken relative to another, not smaller logit."""
  delta = jnp.maximum((part.largest - largest) / temperature, _FLOOR)
  factor = jnp.exp(delta)
  weighted = None if part.weighted is None else factor * (part.weighted + part.total * delta)
  squared = None if part.squared is None else jnp.square(factor) * part.squared
  return Moments(largest, part.target, factor * part.total, weighted, squared)


def finish(whole: Moments, *, temperature: float | jax.Array) -> Scores:
  """The scores of the whole vocabulary's moments.

  log p = (z - largest) / temperature - log sum w, and H = log sum w - (sum w (z - largest) / temperature) / sum w.
  Since sum w >= 1, nothing cancels: log p <= 0 and H >= 0 also for a distribution that is nearly deterministic.
  """
  logprob = (whole.target - whole.largest) / temperature - jnp.log(whole.total)
  if whole.weighted is None or whole.squared is None:
    return Scores(logprob, None, None)
  entropy = jnp.log(whole.total) - whole.weighted / whole.total
  gini = jnp.maximum(1 - whole.squared / jnp.square(jax.lax.stop_gradient(whole.total)), 0.0)
  return Scores(logprob, entropy, gini)


def score_logits(logits_V: jax.Array, targets: jax.Array, *, temperature: float | jax.Array) -> Scores:
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
  return finish(moments(logits_V, targets, temperature=temperature, entropy=True), temperature=temperature)


def score_vocabulary(logits_V: jax.Array, *, temperature: float | jax.Array) -> jax.Array:
  """Log-prob f32 [..., V] of every entry, as `score_logits` gives that of a target; for small vocabularies."""
  none = jnp.zeros(logits_V.shape[:-1], jnp.int32)
  whole = moments(logits_V, none, temperature=temperature, entropy=False)
  return (logits_V.astype(jnp.float32) - whole.largest[..., None]) / temperature - jnp.log(whole.total)[..., None]


def logits(hidden_BTD: jax.Array, head_DV: jax.Array) -> jax.Array:
  """Logits [..., V] in float32: operands in the dtype of the hidden states, sums in float32."""
  return jnp.einsum("...D,DV->...V", hidden_BTD, head_DV.astype(hidden_BTD.dtype), preferred_element_type=jnp.float32)


def score(
  hidden_BTD: jax.Array,
  head: jax.Array,
  targets_BT: jax.Array,
  *,
  temperature: float | jax.Array,
  chunk: int,
  entropy: bool,
  vocabulary_axis: int = 1,
  head_place: NamedSharding | None = None,
) -> Scores:
  """`score_logits` from hidden states, `chunk` entries of the vocabulary at a time.

  At most [B, T, chunk] logits live at once, forward and backward. The backward pass computes them anew, but for those
  of the last chunk, which it begins with; so a vocabulary of one chunk costs nothing more than its logits.

  Where the head is sharded it stays so. Each device scores its own rows against the part of the vocabulary that its
  place along the vocabulary's mesh axes holds, gathering the width of one chunk at a time; what the parts say about a
  token is merged, and the gradient of each chunk is scattered back.

  Args:
    hidden_BTD: hidden_BTD[:, t] is the state that predicts targets_BT[:, t]; its dtype is that of the matrix products.
    head: output projection [D, V], or [V, D] as tied embeddings are stored; in the dtype of the parameters.
    targets_BT: i32.
    temperature: above 0; no gradient.
    chunk: entries of the vocabulary, of each device's part; a multiple of 128 on a TPU.
    entropy: whether entropy and Gini impurity are computed; None otherwise.
    vocabulary_axis: which axis of the head V is.
    head_place: of the head. Rows are split over all axes of its mesh that do not split the vocabulary.

  Returns:
    float32 [B, T] each. Log-prob and entropy are differentiable in hidden states and head; sums are float32.
  """
  plan = _Plan(chunk, entropy, vocabulary_axis, head_place)
  return _score(plan, hidden_BTD, head, targets_BT, jnp.asarray(temperature, jnp.float32))


@dataclasses.dataclass(frozen=True)
class _Plan:
  """What is static of a score; and, inside of a device's program, where it stands in the mesh."""

  chunk: int
  entropy: bool
  vocabulary_axis: int
  place: NamedSharding | None

  def axes(self, axis: int) -> tuple[str, ...]:
    """The mesh axes that split an axis of the head."""
    names = (*self.place.spec, None, None)[axis] if self.place else None
    return (names,) if isinstance(names, str) else tuple(names or ())

  @property
  def vocabulary(self) -> tuple[str, ...]:
    return self.axes(self.vocabulary_axis)

  @property
  def width(self) -> tuple[str, ...]:
    return self.axes(1 - self.vocabulary_axis)

  @property
  def rows(self) -> tuple[str, ...]:
    return tuple(axis for axis in self.place.mesh.axis_names if axis not in self.vocabulary) if self.place else ()

  def map(self, local: Callable, ins: str, outs: str) -> Callable:
    """`local` on every device's part. One letter an argument: r rows, v rows of a part's logits, h head, . scalar."""
    if self.place is None:
      return local
    specs = {"r": P(self.rows), "v": P(self.rows, None, self.vocabulary), "h": self.place.spec, ".": P()}
    in_specs, out_specs = (tuple(specs[letter] for letter in letters) for letters in (ins, outs))
    return jax.shard_map(local, mesh=self.place.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

  def take(self, head: jax.Array, start: jax.Array | int, size: int, dtype: jnp.dtype) -> jax.Array:
    """A chunk of the head in full width, laid out as the head is."""
    part = jax.lax.dynamic_slice_in_dim(head, start, size, axis=self.vocabulary_axis)
    if part.dtype != dtype:
      # The TPU compiler would convert the whole head before the loop, and hold that copy; it lets integers alone.
      bits = jax.lax.bitcast_convert_type(part, jnp.dtype(f"uint{8 * part.dtype.itemsize}"))
      part = jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(bits), part.dtype).astype(dtype)
    return jax.lax.all_gather(part, self.width, axis=1 - self.vocabulary_axis, tiled=True) if self.width else part

  def put(self, head: jax.Array, part: jax.Array, start: jax.Array | int) -> jax.Array:
    """Writes a chunk of the head's gradient, summed over the devices that share its width."""
    if self.width:
      part = jax.lax.psum_scatter(part, self.width, scatter_dimension=1 - self.vocabulary_axis, tiled=True)
    return jax.lax.dynamic_update_slice_in_dim(head, part.astype(head.dtype), start, axis=self.vocabulary_axis)

  def last(self, size: int) -> tuple[int, int]:
    """(whole chunks before the last, size of the last), of a part of the vocabulary."""
    whole = (size - 1) // self.chunk
    return whole, size - whole * self.chunk

  def first_entry(self, size: int) -> jax.Array | int:
    """The number of this device's first entry of the vocabulary."""
    return jax.lax.axis_index(self.vocabulary) * size if self.vocabulary else 0

  def logits(self, hidden_BTD: jax.Array, part: jax.Array) -> jax.Array:
    formula = ("BTD,VD->BTV", "BTD,DV->BTV")[self.vocabulary_axis]
    return jnp.einsum(formula, hidden_BTD, part, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score(
  plan: _Plan, hidden_BTD: jax.Array, head: jax.Array, targets_BT: jax.Array, temperature: jax.Array
) -> Scores:
  return _forward(plan, hidden_BTD, head, targets_BT, temperature)[0]


def _forward(
  plan: _Plan, hidden_BTD: jax.Array, head: jax.Array, targets_BT: jax.Array, temperature: jax.Array
) -> tuple[Scores, tuple]:
  whole, kept_BTV = plan.map(functools.partial(_local_forward, plan), "rhr.", "rv")(
    hidden_BTD, head, targets_BT, temperature
  )
  scores = finish(whole, temperature=temperature)
  return scores, (hidden_BTD, head, targets_BT, temperature, whole, scores.entropy, kept_BTV)


def _local_forward(
  plan: _Plan, hidden_BTD: jax.Array, head: jax.Array, targets_BT: jax.Array, temperature: jax.Array
) -> tuple[Moments, jax.Array]:
  """(moments of the whole vocabulary, logits of the last chunk of this device's part)."""
  size = head.shape[plan.vocabulary_axis]
  whole, rest = plan.last(size)
  targets_BT = targets_BT - plan.first_entry(size)

  def one(start, size):
    logits_BTV = plan.logits(hidden_BTD, plan.take(head, start, size, hidden_BTD.dtype))
    return logits_BTV, moments(logits_BTV, targets_BT - start, temperature=temperature, entropy=plan.entropy)

  def body(i, sums):
    return merge(sums, one(i * plan.chunk, plan.chunk)[1], temperature=temperature)

  kept_BTV, sums = one(whole * plan.chunk, rest)
  if whole:
    sums = jax.lax.fori_loop(0, whole, body, sums)
  if plan.vocabulary:
    sums = _shift(sums, jax.lax.pmax(sums.largest, plan.vocabulary), temperature)
    sums = Moments(sums.largest, *jax.lax.psum(sums[1:], plan.vocabulary))
  return sums, kept_BTV


def _backward(plan: _Plan, residual: tuple, gradient: Scores) -> tuple[jax.Array, jax.Array, None, None]:
  hidden_BTD, head, targets_BT, temperature, whole, entropy_BT, kept_BTV = residual
  of_scores = (whole.largest, jnp.log(whole.total), entropy_BT, gradient.logprob, gradient.entropy)
  to_hidden, to_head = plan.map(functools.partial(_local_backward, plan), "rhr.rv", "rh")(
    hidden_BTD, head, targets_BT, temperature, of_scores, kept_BTV
  )
  return to_hidden, to_head, None, None


def _local_backward(
  plan: _Plan,
  hidden_BTD: jax.Array,
  head: jax.Array,
  targets_BT: jax.Array,
  temperature: jax.Array,
  of_scores: tuple[jax.Array | None, ...],
  kept_BTV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """d logits = (g_logprob (onehot - p) - g_entropy p (log p + H)) / temperature, chunk by chunk."""
  size = head.shape[plan.vocabulary_axis]
  whole, rest = plan.last(size)
  targets_BT = targets_BT - plan.first_entry(size)
  largest, log_total, entropy, of_logprob, of_entropy = jax.tree.map(lambda x_BT: x_BT[..., None], of_scores)

  def one(carry, start, part, logits_BTV):
    to_hidden, to_head = carry
    logprob_BTV = jnp.maximum((logits_BTV - largest) / temperature - log_total, _FLOOR)
    slope_BTV = of_logprob + of_entropy * (logprob_BTV + entropy) if plan.entropy else of_logprob
    hit_BTV = _hit(targets_BT - start, logits_BTV)
    to_logits = (jnp.where(hit_BTV, of_logprob, 0.0) - jnp.exp(logprob_BTV) * slope_BTV) / temperature
    to_logits = to_logits.astype(hidden_BTD.dtype)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    to_hidden += product(("BTV,VD->BTD", "BTV,DV->BTD")[plan.vocabulary_axis], to_logits, part)
    to_part = product(("BTV,BTD->VD", "BTD,BTV->DV")[plan.vocabulary_axis], *_ordered(plan, to_logits, hidden_BTD))
    return to_hidden, plan.put(to_head, to_part, start)

  def body(i, carry):
    part = plan.take(head, i * plan.chunk, plan.chunk, hidden_BTD.dtype)
    return one(carry, i * plan.chunk, part, plan.logits(hidden_BTD, part))

  carry = jnp.zeros(hidden_BTD.shape, jnp.float32), jnp.zeros_like(head)
  start = whole * plan.chunk
  carry = one(carry, start, plan.take(head, start, rest, hidden_BTD.dtype), kept_BTV)
  to_hidden, to_head = jax.lax.fori_loop(0, whole, body, carry) if whole else carry
  if plan.place is not None:
    to_hidden = jax.lax.psum(to_hidden, plan.vocabulary)
    to_head = jax.lax.psum(to_head, tuple(axis for axis in plan.rows if axis not in plan.width))
  return to_hidden.astype(hidden_BTD.dtype), to_head


_score.defvjp(_forward, _backward)


def _ordered(plan: _Plan, to_logits: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
  return (hidden, to_logits) if plan.vocabulary_axis else (to_logits, hidden)


def _hit(targets: jax.Array, logits_V: jax.Array) -> jax.Array:
  return targets[..., None] == jnp.arange(logits_V.shape[-1])

"""The supervised warm start: cross-entropy on demonstrations, and a cache of what it made."""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from estr_jax import hosts
from estr_jax.errors import UserError
from estr_jax.learner import checkpoint, optimizer
from estr_jax.learner.step import score_tokens
from estr_jax.model.config import DecoderConfig
from estr_jax.model.sharding import shardings
from estr_jax.model.tokenizers import Tokenizer
from estr_jax.structs import Params
from estr_jax.tasks.task import Example, Task

_VOCABULARY_CHUNK = 2048  # of `scoring.score`
STEPS_PER_CALL = 10  # updates inside one jitted call

Tokens = tuple[np.ndarray, np.ndarray]  # tokens i32 [N, T], mask bool [N, T]


def encode_demonstrations(
  task: Task, tokenizer: Tokenizer, examples: Iterable[Example], rng: np.random.Generator, *, length: int
) -> Tokens:
  """One demonstration of each example, prompt included and padded at the end to `length` tokens.

  The mask is True where the policy is the writer.

  Raises:
    UserError: the task brings no demonstrations, or one is longer than `length`.
  """
  if task.demonstrate is None:
    raise UserError(f"task {task.name} brings no demonstrations to warm up on; set warm_start.steps=0")
  rows, masks = [], []
  for example in examples:
    pieces = task.demonstrate(rng, example["question"], example["answer"])
    row = list(task.encode(tokenizer, example["question"]))
    mask = [False] * len(row)
    for text, sampled in pieces:
      ids = tokenizer.encode(text)
      row += ids
      mask += [sampled] * len(ids)
    if len(row) > length:
      raise UserError(
        f"a demonstration of {task.name} for {example['question']!r} has {len(row)} tokens, more than the {length} "
        "of the context; raise sampling.context"
      )
    rows.append(row)
    masks.append(mask)
  tokens_NT = np.full((len(rows), length), tokenizer.pad_id, np.int32)
  mask_NT = np.zeros((len(rows), length), bool)
  for index, (row, mask) in enumerate(zip(rows, masks)):
    tokens_NT[index, : len(row)] = row
    mask_NT[index, : len(row)] = mask
  return tokens_NT, mask_NT


def sample_batches(pool: Tokens, *, batch: int, rng: np.random.Generator) -> Iterator[Tokens]:
  """Batches of `batch` rows drawn from a pool with replacement, for ever."""
  tokens_NT, mask_NT = pool
  while True:
    rows = rng.integers(len(tokens_NT), size=batch)
    yield tokens_NT[rows], mask_NT[rows]


def supervised(
  model: DecoderConfig,
  params: Params,
  batches: Iterator[Tokens],
  *,
  mesh: Mesh | None,
  steps: int,
  learning_rate: float,
  on_progress: Callable[[int, float], None],
) -> Params:
  """Minimises the mean cross-entropy of the masked tokens, with Adam, a short warm-up and a cosine decay to 0.

  Args:
    model: the decoder.
    params: where to start; left as they are.
    batches: (tokens_BT, mask_BT) of one shape, rows padded at the end; `steps` of them are taken.
    mesh: where the parameters lie by the sharding rules; None on one device. Rows divide over its `batch_shards`.
    steps: updates.
    learning_rate: its peak.
    on_progress: called with (steps done, newest loss in nats per token) every STEPS_PER_CALL updates.
  """
  rule = optimizer.make(
    optimizer="adamw",
    learning_rate=learning_rate,
    warmup_steps=steps // 20,
    decay="cosine",
    total_steps=steps,
    b1=0.9,
    b2=0.99,
    eps=1e-8,
    weight_decay=0.0,
    clip_norm=1.0,
  )

  def loss(params, tokens_BT, mask_BT):
    # Padding stands behind what it could disturb, so one segment a row is enough. Computed from the tokens, so that the
    # compiler does not spend seconds on folding a constant.
    segment_BT = (tokens_BT >= 0).astype(jnp.int32)
    how = dict(temperature=1.0, chunk=_VOCABULARY_CHUNK, entropy=False, mesh=mesh)
    policy = score_tokens(model, params, tokens_BT, segment_BT, **how)
    return -jnp.sum(policy.logprob * mask_BT) / jnp.maximum(mask_BT.sum(), 1)

  def update(carry, batch):
    params, opt_state = carry
    value, gradient = jax.value_and_grad(loss)(params, *batch)
    updates, opt_state = rule.update(gradient, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  def create(params):
    return jax.tree.map(jnp.copy, params), rule.init(params)

  places = None if mesh is None else shardings(jax.eval_shape(create, params), mesh)
  start = jax.jit(create, out_shardings=places)

  @functools.partial(jax.jit, donate_argnums=0)
  def advance(carry, tokens_KBT, mask_KBT):
    return jax.lax.scan(update, carry, (tokens_KBT, mask_KBT))

  carry = start(params)
  done = 0
  while done < steps:
    taken = list(islice(batches, min(STEPS_PER_CALL, steps - done)))
    if not taken:
      raise ValueError(f"the demonstrations ended after {done} of {steps} steps")
    carry, losses = advance(carry, *(np.stack(arrays) for arrays in zip(*taken)))
    done += len(taken)
    on_progress(done, float(losses[-1]))
  return carry[0]


def digest(pool: Tokens) -> str:
  """Names the content of a pool of demonstrations, for the recipe of `cached`."""
  whole = hashlib.sha256()
  for array in pool:
    whole.update(repr((array.shape, array.dtype.str)).encode())
    whole.update(np.ascontiguousarray(array).tobytes())
  return whole.hexdigest()[:16]


def cached(folder: Path, recipe: Mapping[str, Any], abstract: Params, make: Callable[[], Params]) -> Params:
  """What `make` makes, made once for each recipe and read back from `folder` after that.

  Args:
    folder: of the cache; safe to share between processes, and shared by those of a group.
    recipe: JSON: everything that the result depends on (model, seed, steps, `digest` of the demonstrations).
    abstract: shapes, dtypes and shardings of the result.
    make: called only where the recipe is new.

  Raises:
    UserError: the folder cannot be written, or its disk is full.
  """
  key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
  entry = Path(folder) / key
  if not hosts.lead(entry.is_dir):
    checkpoint.save_params(entry, make())
  return checkpoint.load_params(entry, abstract)

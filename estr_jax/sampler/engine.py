"""The host side of sampling: continuous batching of multi-turn episodes over the slots of `decode`."""

import dataclasses
import time
from collections.abc import Container

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from estr_jax.errors import UserError
from estr_jax.model.config import DecoderConfig
from estr_jax.model.sharding import batch_shards
from estr_jax.model.tokenizers import Tokenizer
from estr_jax.sampler import decode
from estr_jax.structs import Prompt, Trajectory, Weights
from estr_jax.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are drawn.

  Truncated sampling is refused: it renormalises over the surviving support, which shifts every log-ratio by the log of
  the removed mass and shrinks the entropy that scales the trust region.
  """

  slots: int  # sequences that grow side by side
  context: int  # tokens of a sequence, prompt included
  chunk: int  # decode steps between two looks of the host; new weights are taken there
  temperature: float
  rebuild_cache: bool  # recompute the keys of unfinished sequences when the weights change, or keep the old ones
  record_vocabulary: bool  # every token's whole distribution, for small vocabularies
  record_routing: bool  # the experts of every token, of a mixture of experts


@dataclasses.dataclass
class _Episode:
  """What the host knows of an occupied slot."""

  prompt: Prompt
  question: str
  turns: list[str]
  turn_start: int
  started: float


class Engine:
  """Prompts in, trajectories out. Between two calls of `advance` the weights may change.

  Usage: `set_weights`, `admit` up to `free` prompts, then `advance` until the trajectories come.
  """

  def __init__(
    self,
    model: DecoderConfig,
    task: Task,
    tokenizer: Tokenizer,
    sampling: Sampling,
    key: jax.Array,
    *,
    greedy: Container[int] = (),
    mesh: Mesh | None = None,
  ):
    """Without a sequence.

    Args:
      key: the run's sampling key.
      greedy: the ids of prompts to be decoded greedily, in evaluations.
      mesh: where the weights lie, by the sharding rules, if on more than one device; `sampling.slots` is a multiple of
        its `batch_shards`. Where it spans several processes, each has an engine and makes the same calls.
    """
    self._model, self._task, self._tokenizer, self._sampling, self._mesh = model, task, tokenizer, sampling, mesh
    if mesh is not None:  # device_put moves no typed key onto devices of other processes
      place = jax.jit(jax.random.wrap_key_data, out_shardings=NamedSharding(mesh, P()))
      key = place(np.asarray(jax.random.key_data(key)))
    self._key = key
    stop = [tokenizer.token_id(text) for text in task.stop]
    single = [token for token in stop if token is not None]
    if len(single) < len(stop):
      raise UserError(f"task {task.name}: the stop strings {task.stop} must be single tokens of the tokenizer")
    self._stop_ids = np.array(sorted({tokenizer.eos_id, *single}), np.int32)
    self._greedy = greedy
    self._slots = decode.empty(
      model,
      sampling.slots,
      sampling.context,
      record_vocabulary=sampling.record_vocabulary,
      record_routing=sampling.record_routing,
      mesh=mesh,
    )
    self._episodes: dict[int, _Episode] = {}
    self._feeds: dict[int, tuple[np.ndarray, bool]] = {}  # slot -> tokens to feed, and whether they start a sequence
    shards = 1 if mesh is None else batch_shards(mesh)
    self._few = max(1, sampling.slots // 8 // shards) * shards  # rows of a small feed or read; compiled once
    self._live = np.zeros(sampling.slots, bool)
    self._sampled = np.zeros(sampling.slots, np.int32)
    self._weights: Weights | None = None
    self.sampled_tokens = 0  # policy tokens, since the start

  @property
  def slots(self) -> int:
    return self._sampling.slots

  @property
  def free(self) -> int:
    """Slots without a sequence."""
    return self._sampling.slots - len(self._episodes)

  @property
  def version(self) -> int | None:
    return None if self._weights is None else self._weights.version

  def set_weights(self, weights: Weights) -> None:
    """Takes new weights for the tokens to come; a set of the same version is taken as it is."""
    changed = self._weights is not None and weights.version != self._weights.version
    self._weights = weights
    if changed and self._episodes and self._sampling.rebuild_cache:
      self._slots = decode.rebuild(self._model, weights.params, self._slots, mesh=self._mesh)

  def admit(self, prompts: list[Prompt]) -> None:
    """Gives each prompt a free slot; they are fed at the next `advance`."""
    slots = [slot for slot in range(self._sampling.slots) if slot not in self._episodes]
    if len(prompts) > len(slots):
      raise ValueError(f"{len(prompts)} prompts for {len(slots)} free slots")
    for slot, prompt in zip(slots, prompts):
      if len(prompt.tokens) >= self._sampling.context:
        raise UserError(
          f"prompt {prompt.id} of task {prompt.task} has {len(prompt.tokens)} tokens and sampling.context is "
          f"{self._sampling.context}; raise it or drop the prompt"
        )
      question = self._tokenizer.decode(prompt.tokens)
      self._sampled[slot] = 0  # the device forgets the slot's last sequence when it is fed
      self._episodes[slot] = _Episode(prompt, question, [], len(prompt.tokens), time.monotonic())
      self._feeds[slot] = (np.asarray(prompt.tokens, np.int32), True)

  def drop_all(self) -> None:
    """Forgets every unfinished sequence."""
    self._episodes.clear()
    self._feeds.clear()
    self._live[:] = False
    self._slots = dataclasses.replace(self._slots, live=jnp.zeros_like(self._slots.live))

  def can_move(self, limit: int = decode.NO_LIMIT) -> bool:
    """Whether `advance(limit)` would do anything."""
    return bool(self._feeds) or bool(np.any(self._live & (self._sampled < limit)))

  def advance(self, limit: int = decode.NO_LIMIT) -> list[Trajectory]:
    """Feeds what waits, decodes one chunk, lets the environment answer, and returns the finished trajectories.

    Args:
      limit: policy tokens at which a sequence is held (it goes on under a later, higher limit).
    """
    sampling, weights = self._sampling, self._weights
    if weights is None:
      raise ValueError("nothing can be sampled before `set_weights`")
    self._feed(weights)
    occupied = sorted(self._episodes)
    before = self._sampled[occupied].sum()
    self._slots = decode.decode(
      self._model,
      weights.params,
      np.int32(weights.version),
      self._slots,
      self._key,
      self._stop_ids,
      np.int32(limit),
      temperature=sampling.temperature,
      steps=sampling.chunk,
      mesh=self._mesh,
    )
    host = jax.device_get((self._slots.live, self._slots.length, self._slots.sampled))
    self._live, length, self._sampled = (np.array(a) for a in host)
    self.sampled_tokens += int(self._sampled[occupied].sum() - before)
    ended = [slot for slot in sorted(self._episodes) if not self._live[slot]]
    finished = []
    for rows_R in self._batches(ended):
      arrays = jax.device_get(decode.read(self._slots, rows_R, mesh=self._mesh))
      for row, slot in self._occupied(rows_R, ended):
        trajectory = self._end_turn(
          slot, {name: np.array(array[row, : length[slot]]) for name, array in arrays.items()}
        )
        if trajectory is not None:
          finished.append(trajectory)
          del self._episodes[slot]
    return finished

  def _end_turn(self, slot: int, record: dict[str, np.ndarray]) -> Trajectory | None:
    """The environment's word after a turn of the policy: an observation to feed, or the finished trajectory."""
    tokens = record["tokens"]
    episode = self._episodes[slot]
    turn = tokens[episode.turn_start :]
    episode.turns.append(self._tokenizer.decode(turn))
    if turn[-1] == self._tokenizer.eos_id:
      finish = "stop"
    elif turn[-1] not in self._stop_ids:
      finish = "length"
    else:
      text = self._task.respond(episode.question, episode.turns)
      if text is None:
        finish = "environment"
      else:
        observation = np.array(self._tokenizer.encode(text), np.int32)
        if len(tokens) + len(observation) < self._sampling.context:
          self._feeds[slot] = (observation, False)
          episode.turn_start = len(tokens) + len(observation)
          return None
        finish = "length"
    return Trajectory(
      **record,
      reward=float(self._task.reward(episode.prompt.answer, episode.turns)),
      prompt_id=episode.prompt.id,
      group=episode.prompt.group,
      task=episode.prompt.task,
      finish=finish,
      turns=len(episode.turns),
      seconds=time.monotonic() - episode.started,
    )

  def _feed(self, weights: Weights) -> None:
    if not self._feeds:
      return
    source: dict[bytes, int] = {}  # a fresh prompt -> the slot that is fed with it
    copies: dict[int, int] = {}  # slot -> the slot that it is a copy of
    for slot in sorted(self._feeds):
      tokens, fresh = self._feeds[slot]
      if fresh and source.setdefault(tokens.tobytes(), slot) != slot:
        copies[slot] = source[tokens.tobytes()]
    fed = {slot: feed for slot, feed in sorted(self._feeds.items()) if slot not in copies}
    for rows_R in self._batches(list(fed)):
      R = len(rows_R)
      width = _bucket(max(len(fed[slot][0]) for _, slot in self._occupied(rows_R, fed)), self._sampling.context)
      tokens_RC = np.zeros((R, width), np.int32)
      count_R, fresh_R = np.zeros(R, np.int32), np.zeros(R, bool)
      for row, slot in self._occupied(rows_R, fed):
        tokens, fresh = fed[slot]
        tokens_RC[row, : len(tokens)] = tokens
        count_R[row], fresh_R[row] = len(tokens), fresh
      self._slots = decode.feed(
        self._model,
        weights.params,
        self._slots,
        self._only(rows_R, fed),
        tokens_RC,
        count_R,
        fresh_R,
        *self._identity(rows_R, fed),
        mesh=self._mesh,
      )
    for rows_R in self._batches(list(copies)):
      source_R = np.array([copies.get(slot, 0) for slot in rows_R.tolist()], np.int32)
      rows = (source_R, self._only(rows_R, copies), *self._identity(rows_R, copies))
      self._slots = decode.share(self._slots, *rows, mesh=self._mesh)
    self._feeds.clear()

  def _only(self, rows_R: np.ndarray, slots: Container[int]) -> np.ndarray:
    """The rows of a batch that are meant; the others out of range."""
    return np.array([slot if slot in slots else self._sampling.slots for slot in rows_R.tolist()], np.int32)

  def _identity(self, rows_R: np.ndarray, slots: Container[int]) -> tuple[np.ndarray, np.ndarray]:
    """(seed_R, greedy_R): what tells the sequences of one prompt apart."""
    ids = [self._episodes[slot].prompt.id if slot in slots else 0 for slot in rows_R.tolist()]
    return np.array(ids, np.int32), np.array([id in self._greedy for id in ids])

  def _batches(self, slots: list[int]) -> list[np.ndarray]:
    """Rows for the device: few slots in small batches, many in one full one, so that two compiled shapes serve all.

    A small batch is filled up with rows that are out of range; a full one holds every slot in order.
    """
    S = self._sampling.slots
    if len(slots) > S // 2 or self._few == S:  # S rows have to be all slots in order
      return [np.arange(S, dtype=np.int32)]
    padded = slots + [S] * (-len(slots) % self._few)
    return list(np.array(padded, np.int32).reshape(-1, self._few))

  @staticmethod
  def _occupied(rows_R: np.ndarray, slots: Container[int]) -> list[tuple[int, int]]:
    """(row, slot) of the rows of a batch that are meant."""
    return [(row, slot) for row, slot in enumerate(rows_R.tolist()) if slot in slots]


def _bucket(length: int, context: int) -> int:
  """Widths of a feed: powers of 2 from 8 on, up to the context, so that few shapes are compiled."""
  width = 8
  while width < length:
    width *= 2
  return min(width, context)

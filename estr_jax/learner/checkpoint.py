"""Checkpoints of the train state, and of bare parameters. Orbax is known here only."""

import contextlib
import dataclasses
import errno
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint import checkpoint_utils

from estr_jax import hosts
from estr_jax.errors import UserError
from estr_jax.model.sharding import path_name
from estr_jax.structs import Params, TrainState

KEPT = 2  # the newest checkpoint, and the one before in case the newest is damaged

_STATE, _HOST = "state", "host"

# Storage faults that a user can mend, and how each reads in the text of a tensorstore error.
_FULL = ({errno.ENOSPC, errno.EDQUOT}, ("No space left on device", "Disk quota exceeded"))
_DENIED = ({errno.EACCES, errno.EPERM, errno.EROFS}, ("Permission denied", "Read-only file system"))


class Checkpoints:
  """The checkpoints of one run in one folder, written in the background. One writer a folder, or one group of
  processes, each of which writes what its devices hold into the folder that they share and makes the same calls.

  A save that fails in the background surfaces once, at the next `check`, `save` or `wait`; the checkpoints
  before it stay usable. Every method raises UserError for a full or unwritable disk.
  """

  def __init__(self, folder: str | os.PathLike):
    self.folder = Path(folder).absolute()
    with _storage_faults(self.folder):
      self._manager = ocp.CheckpointManager(
        self.folder,
        item_handlers={_STATE: ocp.StandardCheckpointHandler(), _HOST: ocp.JsonCheckpointHandler()},
        # Half-written folders are what a killed run leaves behind.
        options=ocp.CheckpointManagerOptions(max_to_keep=KEPT, cleanup_tmp_directories=True),
      )

  def latest(self) -> int | None:
    """The newest complete checkpoint's step, or None."""
    return self._manager.latest_step()

  def save(self, step: int, state: TrainState, host: Mapping[str, Any]) -> None:
    """Copies the state off the device and returns; writing goes on in the background.

    A step that is not newer than the newest checkpoint is there already, and is not written again.

    Args:
      step: names the checkpoint; the state's own step.
      state: may be donated as soon as this returns.
      host: JSON: whatever else a resumed run needs (prompt cursor, seed, random key data).
    """
    with _storage_faults(self.folder):
      items = {_STATE: ocp.args.StandardSave(_as_dict(state)), _HOST: ocp.args.JsonSave(dict(host))}
      self._manager.save(step, args=ocp.args.Composite(**items))

  def check(self) -> None:
    """Raises what a background save has died of; does not wait for one that is at work."""
    if not self._manager.is_saving_in_progress():
      self.wait()

  def wait(self) -> None:
    """Returns when the newest save is complete on disk."""
    with _storage_faults(self.folder):
      self._manager.wait_until_finished()

  def restore(self, abstract: TrainState, step: int) -> tuple[TrainState, dict[str, Any]]:
    """The state and the host record of a checkpoint.

    Args:
      abstract: `step.abstract_state`: the tree and the shardings that the state is to have, whatever
        mesh wrote it.
      step: one that exists; see `latest`.

    Raises:
      UserError: the checkpoint is of another model or optimizer.
    """
    target = _as_dict(abstract)
    with _storage_faults(self.folder):
      _check_tree(self._manager.item_metadata(step)[_STATE].tree, target, self.folder / str(step))
      items = {_STATE: ocp.args.StandardRestore(target), _HOST: ocp.args.JsonRestore()}
      restored = self._manager.restore(step, args=ocp.args.Composite(**items))
    return TrainState(**restored[_STATE]), restored[_HOST]

  def close(self) -> None:
    """Waits for the newest save and ends the background threads."""
    with _storage_faults(self.folder):
      self._manager.close()


def restore_params(folder: str | os.PathLike, abstract: Params, *, step: int | None = None) -> tuple[int, Params]:
  """A checkpoint's version and parameters without the optimizer, for evaluation; writes nothing.

  Args:
    folder: of a run's `Checkpoints`, which may be at work.
    abstract: shapes, dtypes and shardings.
    step: of the checkpoint, which is also its version; the newest where None.

  Raises:
    UserError: no checkpoint there, none of that step, or one of another model.
  """
  folder = Path(folder).absolute()
  steps = ocp.utils.checkpoint_steps(folder) if folder.is_dir() else []
  if not steps:
    raise UserError(f"no checkpoint in {folder}; train first, or name the folder of a run that has saved one")
  if step is None:
    step = max(steps)
  elif step not in steps:
    kept = ", ".join(map(str, sorted(steps)))
    raise UserError(
      f"no checkpoint of version {step} in {folder}; the versions that are kept there, the newest {KEPT} that were "
      f"saved, are: {kept}"
    )
  return step, _restore_tree(folder / str(step) / _STATE, {"params": abstract})["params"]


def save_params(folder: str | os.PathLike, params: Params) -> None:
  """Writes parameters to a folder that appears complete or not at all.

  Where another process was faster, its folder stays.
  """
  folder = Path(folder).absolute()
  partial = folder.with_name(f"{folder.name}.partial-{hosts.broadcast(uuid.uuid4().hex)}")
  try:
    with _storage_faults(folder), ocp.PyTreeCheckpointer() as checkpointer:
      folder.parent.mkdir(parents=True, exist_ok=True)
      checkpointer.save(partial, {"params": params})
      hosts.lead(lambda: _rename(partial, folder))
  finally:
    if hosts.leads():
      shutil.rmtree(partial, ignore_errors=True)


def _rename(partial: Path, folder: Path) -> None:
  try:
    partial.rename(folder)
  except OSError as error:
    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
      raise


def load_params(folder: str | os.PathLike, abstract: Params) -> Params:
  """Reads what `save_params` wrote, onto the shardings of `abstract`.

  Raises:
    UserError: the folder is missing, or holds another model.
  """
  folder = Path(folder).absolute()
  if not folder.is_dir():
    raise UserError(f"no parameters in {folder}; name a folder that save_params wrote")
  return _restore_tree(folder, {"params": abstract})["params"]


def _as_dict(state: TrainState) -> dict[str, Any]:
  return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def _restore_tree(folder: Path, abstract: dict[str, Any]) -> dict[str, Any]:
  """The named subtrees of a stored tree."""
  with _storage_faults(folder), ocp.PyTreeCheckpointer() as checkpointer:
    stored = checkpointer.metadata(folder).item_metadata.tree
    _check_tree({name: stored[name] for name in abstract}, abstract, folder)
    restore_args = checkpoint_utils.construct_restore_args(abstract)
    return checkpointer.restore(folder, ocp.args.PyTreeRestore(abstract, restore_args, partial_restore=True))


def _check_tree(stored: Any, wanted: Any, folder: Path) -> None:
  """Raises UserError at the first leaf in which two trees differ."""

  def table(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): (tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves}

  there, here = table(stored), table(wanted)
  for name in sorted(there.keys() | here.keys()):
    if there.get(name) != here.get(name):
      # Absence is a difference like any other, and is worth the same line.
      a, b = (f"{t[name][0]} {t[name][1]}" if name in t else "absent" for t in (there, here))
      raise UserError(
        f"checkpoint {folder} is of another model or optimizer: {name} is {a} there and {b} here; "
        "restore the config that wrote it, or choose another folder"
      )


@contextlib.contextmanager
def _storage_faults(folder: Path) -> Iterator[None]:
  """Turns a full or unwritable disk, however deep in the chain of causes, into one line."""
  logging.set_verbosity(logging.FATAL)  # Orbax also logs, with a traceback a thread, what it raises
  try:
    yield
  except UserError:
    raise
  except Exception as error:
    if _is(error, *_FULL):
      raise UserError(
        f"the disk is full: cannot write to {folder}; free some space and run the same command again, "
        "it resumes from the checkpoint before"
      ) from error
    if _is(error, *_DENIED):
      raise UserError(f"cannot write to {folder}: permission denied; choose another folder or its owner") from error
    raise


def _is(error: BaseException | None, numbers: set[int], texts: tuple[str, ...]) -> bool:
  seen = set()
  while error is not None and id(error) not in seen:
    seen.add(id(error))
    if isinstance(error, OSError) and error.errno in numbers:
      return True
    if any(text in str(error) for text in texts):
      return True
    error = error.__cause__ or error.__context__
  return False

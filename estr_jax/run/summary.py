"""What came out of a run, from its rows."""

from pathlib import Path
from typing import Any

import numpy as np

from estr_jax.observe.writers import read
from estr_jax.run.options import Settings
from estr_jax.runtime.learner_loop import before_and_after


def summarise(settings: Settings, metrics_path: Path) -> dict[str, Any]:
  """Of the whole run, resumptions included."""
  c, rows = settings.config, read(metrics_path)
  trained = [row for row in rows if "rollout/reward" in row]

  def mean(name: str) -> float | None:
    values = [row[name] for row in trained if row.get(name) is not None]
    return float(np.mean(values)) if values else None

  with_tau = [row for row in trained if "loss/tau" in row]
  calibrated = bool(with_tau) and settings.calibrated_fraction is not None
  steps_s = sum(row["time/step_s"] for row in trained)
  ages = np.sum([row["staleness/token_histogram"] for row in trained], axis=0)
  return {
    "mode": c.mode,
    "loss": c.loss.name,
    "edge": settings.edge,
    "tau": with_tau[-1]["loss/tau"] if with_tau else None,
    "tau_calibrated_at": with_tau[0]["step"] - 1 if calibrated else None,  # the version that the update started from
    "task": settings.task.name,
    "steps": rows[-1]["step"],
    "prompts": c.eval.prompts,
    "accuracy": before_and_after(rows),
    "staleness": {
      **{name: mean(f"staleness/{name}") for name in ("intra", "inter", "token")},
      "max_token": int(np.flatnonzero(ages).max()),
    },
    "tokens_per_s": {
      "trained": sum(row["policy/tokens"] for row in trained) / steps_s,
      "sampled": mean("throughput/sampled_tokens_per_s"),
    },
    "steps_s": steps_s,
  }


def in_words(summary: dict[str, Any], settings: Settings, report: Path) -> list[str]:
  """What a person is told at the end."""
  changes = [f"{kind} {a['before']:.3f} -> {a['after']:.3f}" for kind, a in summary["accuracy"].items()]
  lines = [f"held-out accuracy on {summary['prompts']} prompts: {', '.join(changes)}"]
  if settings.calibrated_fraction is not None and summary["tau"] is None:
    lines.append(
      f"loss.{settings.config.loss.name}.tau was never found, so nothing was masked: no batch was stale enough"
    )
  return [*lines, f"report: {report}"]

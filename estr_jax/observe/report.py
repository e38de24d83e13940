"""report.html: what a run was, what came out of it, and how it went, in one file that needs nothing else."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from estr_jax.errors import UserError
from estr_jax.objective import losses
from estr_jax.observe import figures, writers
from estr_jax.observe.glossary import GLOSSARY
from estr_jax.observe.writers import Row


class _Plot(NamedTuple):
  title: str
  caption: str  # what to look for
  svg: str | None  # None where the run recorded no such data


def write_report(workdir: str | Path) -> Path:
  """Writes `workdir`/report.html from metrics.jsonl, config.json and, where the run has ended, summary.json.

  Raises:
    UserError: a file is missing or damaged, or the disk is full.
  """
  workdir = Path(workdir)
  rows = writers.read(workdir / writers.METRICS)
  config = _read_json(workdir / writers.CONFIG)
  summary = _read_json(workdir / writers.SUMMARY) if (workdir / writers.SUMMARY).exists() else None
  path = workdir / writers.REPORT
  writers.write_text(path, _page(rows, config, summary))
  return path


def _read_json(path: Path) -> dict[str, Any]:
  if not path.is_file():
    raise UserError(f"there is no {path}: give the folder of a run")
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except ValueError:
    raise UserError(f"{path} is not JSON: run the same command again to rewrite it") from None


def _page(rows: Sequence[Row], config: Mapping[str, Any], summary: Mapping[str, Any] | None) -> str:
  title = summary["config_name"] if summary else "unfinished run"
  plots = _plots(rows, _loss_in_force(rows, config["loss"]))
  absent = [plot.title for plot in plots if plot.svg is None]
  shown = "".join(
    f'<figure><h3>{escape(plot.title)}</h3><div role="img" aria-label="{escape(plot.title)}">{plot.svg}</div>'
    f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
    for plot in plots
    if plot.svg is not None
  )
  note = f"<p class=note>Not drawn, because the run recorded no such data: {escape(', '.join(absent))}.</p>"
  return (
    f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}: ESTR report</title>'
    f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body><main>'
    f"{_headline(rows, config, summary)}<section class=plots>{shown}</section>{note if absent else ''}"
    f"{_final_table(rows)}<details><summary>The whole config</summary><pre>{escape(json.dumps(config, indent=2))}</pre>"
    "</details></main></body></html>\n"
  )


def _loss_in_force(rows: Sequence[Row], loss: Mapping[str, Any]) -> Mapping[str, Any]:
  """The loss settings, with the tau that the run found where it was to be calibrated."""
  _, taus = figures.series(rows, "loss/tau")
  return {**loss, loss["name"]: {**losses.own_values(loss["name"], loss), "tau": taus[-1]}} if len(taus) else loss


def _objective(loss: Mapping[str, Any]) -> str:
  """The loss in words, with the hyper-parameters that it takes."""
  name, function = loss["name"], losses.LOSSES.get(loss["name"])
  # Of a loss that was passed to the run only its own keys are known here.
  values = dict(losses.own_values(name, loss)) if function is None else losses.arguments(name, function, loss)
  edge = f" on the {values.pop('edge')} edge" if "edge" in values else ""
  hyper = ", ".join(f"{name} {_number(value)}" for name, value in values.items())
  return f"{loss['name']}{edge}: {hyper or 'no hyper-parameters'}"


def _headline(rows: Sequence[Row], config: Mapping[str, Any], summary: Mapping[str, Any] | None) -> str:
  loss = config["loss"]
  if summary is None:
    last = rows[-1]["step"] if rows else 0
    return (
      f"<header><h1>Unfinished run</h1><p>{escape(_objective(loss))}. "
      f"It has reached step {last}; there is no summary.json yet.</p></header>"
    )
  accuracy, stale, speed = summary["accuracy"], summary["staleness"], summary["tokens_per_s"]
  tiles = [
    (f"{_percent(accuracy[how]['before'])} <i>→</i> {_percent(accuracy[how]['after'])}", f"{how} accuracy")
    for how in ("sampled", "greedy")
  ] + [
    (_number(stale["token"]), f"versions of staleness per token, at most {_number(stale['max_token'])}"),
    (_number(speed["trained"]), f"tokens/s trained ({_number(speed['sampled'])} sampled)"),
    (_clock(summary["steps_s"]), f"in {_number(summary['steps'])} steps, evaluations included"),
  ]
  facts = {
    "Held-out prompts": _number(summary["prompts"]),
    "Staleness, versions": f"{_number(stale['intra'])} in flight, {_number(stale['inter'])} in the queue",
    "Processes": ", ".join(f"{name} {_ids(pid)}" for name, pid in summary["process_ids"].items()),
    "Versions acknowledged": "; ".join(
      f"{name}: {_spans(versions)}" for name, versions in summary["acknowledged_versions"].items()
    )
    or "none: one process, no weight channel",
    "Compilations of the train step": _number(summary["compilations"]),
    "Loss": _objective(loss),
  }
  if summary["tau_calibrated_at"] is not None:
    facts["Calibrated tau"] = f"{_number(summary['tau'])}, on the batch of version {summary['tau_calibrated_at']}"
  return (
    f"<header><p class=kind>{escape(summary['mode'])} reinforcement learning</p>"
    f"<h1>{escape(summary['config_name'])}</h1>"
    f"<p>Task <b>{escape(summary['task'])}</b>, loss <b>{escape(summary['loss'])}</b>.</p></header>"
    "<section class=tiles>"
    + "".join(f"<div><b>{value}</b><span>{escape(label)}</span></div>" for value, label in tiles)
    + "</section><dl>"
    + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    + "</dl>"
  )


def _plots(rows: Sequence[Row], loss: Mapping[str, Any]) -> list[_Plot]:
  return [
    _Plot(
      "Reward and held-out accuracy",
      "Both rise together; a reward that rises alone is a reward being gamed.",
      figures.reward(rows),
    ),
    _Plot(
      "Policy entropy",
      "A slow fall is learning; a plunge towards 0 or a climb is the start of a collapse.",
      figures.lines(rows, "nats", {"policy/entropy": "behaviour policy mu", "policy/learner_entropy": "learner pi"}),
    ),
    _Plot(
      "Rollout-target KL",
      "How far the learner stands from the policy that sampled: level is healthy, a steady climb is drift.",
      figures.lines(rows, "KL(mu || pi), nats", {"policy/rollout_kl": "KL(mu || pi)"}, log=True),
    ),
    _Plot(
      "Masked and clipped tokens",
      "A few percent at most: a mask that grows throws the data away, one at 0 never acts.",
      figures.lines(
        rows,
        "fraction of policy tokens",
        {"loss/mask_fraction": "outside the trust region", "loss/clip_fraction": "clipped"},
      ),
    ),
    _Plot(
      "Who is masked",
      "ESTR's mask is level in H and rises gently with age; a fixed band masks where the entropy is high.",
      figures.masked(rows),
    ),
    _Plot(
      "Scaled squares S",
      "One hump with a thin tail beyond tau; a hump that reaches tau means that tau cuts into ordinary tokens.",
      figures.scores(rows, loss),
    ),
    _Plot(
      "At version switches",
      "Tokens sampled just after new weights arrived in flight move further, and are often uncertain ones.",
      figures.lines(
        rows,
        "mean |delta|, nats",
        {"policy/abs_delta_at_switch": "at a switch", "policy/abs_delta_off_switch": "elsewhere"},
      ),
    ),
    _Plot(
      "Effective sample size",
      "1 is on-policy; that of sequences falls first, since ratios multiply.",
      figures.lines(rows, "fraction", {"policy/ess": "of tokens", "policy/sequence_ess": "of sequences"}),
    ),
    _Plot(
      "Realised staleness",
      "Mass at 0 is on-policy data; the tail should end where the plan or the admission limit says.",
      figures.staleness(rows),
    ),
    _Plot(
      "Mean |delta| against entropy",
      "The ratio's natural scale grows with sqrt(H): a fixed boundary is loose at low H and tight at high H.",
      figures.delta_by_entropy(rows, loss),
    ),
    _Plot(
      "Rollout length",
      "Accepted follows generated; staying below it means that long rollouts are lost, which biases training.",
      figures.lines(
        rows,
        "policy tokens per trajectory",
        {"rollout/length": "trained", "queue/accepted_length": "accepted", "queue/generated_length": "generated"},
      ),
    ),
    _Plot(
      "Who waits",
      "The side that waits more is the faster one; tall bars on either mean that the split of hardware is off.",
      figures.waits(rows),
    ),
    _Plot(
      "Gradient norm",
      "Steady is healthy; spikes that grow come before a collapse.",
      figures.lines(rows, "norm before clipping", {"optimizer/gradient_norm": "gradient norm"}, log=True),
    ),
    _Plot(
      "Throughput",
      "The two curves lie close together; sampled far above trained means that rollouts are dropped.",
      figures.lines(
        rows,
        "policy tokens per second",
        {"throughput/tokens_per_s": "trained", "throughput/sampled_tokens_per_s": "sampled"},
      ),
    ),
  ]


def _final_table(rows: Sequence[Row]) -> str:
  """The latest value of each metric that the run recorded, with its definition."""
  latest = {name: (value, row["step"]) for row in rows for name, value in row.items() if name != "step"}
  body = "".join(
    f"<tr><th scope=row>{escape(name)}</th><td class=value>{escape(_value(latest[name][0]))}</td>"
    f"<td>{latest[name][1]}</td><td>{escape(metric.unit)}</td><td>{escape(metric.formula)}</td>"
    f"<td>{escape(metric.healthy)}</td></tr>"
    for name, metric in GLOSSARY.items()
    if name in latest
  )
  return (
    "<h2>Final metrics</h2><div class=scroll><table><thead><tr><th>metric</th><th>last</th><th>step</th>"
    f"<th>unit</th><th>what it is</th><th>healthy</th></tr></thead><tbody>{body}</tbody></table></div>"
  )


def _value(value: float | list[float | None] | None) -> str:
  if not isinstance(value, list):
    return _number(value)
  trailing = next((n for n, item in enumerate(reversed(value)) if item), len(value))
  shown = [_number(item) for item in value[: len(value) - trailing]]
  return " ".join(shown) or "all 0"


def _number(value: Any) -> str:
  if value is None:
    return "n/a"
  if isinstance(value, bool) or not isinstance(value, (int, float)):
    return str(value)
  return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.3g}"


def _percent(value: float | None) -> str:
  return "n/a" if value is None else f"{value:.1%}"


def _clock(seconds: float) -> str:
  minutes, second = divmod(round(seconds), 60)
  hours, minute = divmod(minutes, 60)
  return f"{hours} h {minute} min" if hours else f"{minute} min {second} s"


def _ids(value: int | Sequence[int] | None) -> str:
  return ", ".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)


def _spans(versions: Sequence[int]) -> str:
  """1, 2, 3, 7 as "1-3, 7"."""
  spans: list[list[int]] = []
  for version in sorted(set(versions)):
    if spans and version == spans[-1][1] + 1:
      spans[-1][1] = version
    else:
      spans.append([version, version])
  return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans) or "none"


_STYLE = """
:root { color-scheme: light dark; --ink: #33373d; --soft: #6b7280; --page: #fbfaf8; --card: #fff; --grid: #e6e4df;
  --c1: #2f6fbd; --c2: #d9772b; --c3: #2a9d74; }
@media (prefers-color-scheme: dark) { :root { --ink: #d6d8dc; --soft: #9aa1ab; --page: #15171a; --card: #1d2024;
  --grid: #343941; --c1: #6ba6ee; --c2: #f0a060; --c3: #55c79c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { font-size: 2.1rem; line-height: 1.15; margin: 0; letter-spacing: -.02em; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; } h3 { font-size: 1rem; margin: 0 0 .4rem; }
header { margin-bottom: 1.6rem; } header p { margin: .35rem 0 0; color: var(--soft); } header b { color: var(--ink); }
.kind { text-transform: uppercase; letter-spacing: .08em; font-size: .75rem; margin: 0 0 .3rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(195px, 1fr)); gap: .9rem;
  margin: 1.6rem 0 1.2rem; }
.tiles div, figure { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; }
.tiles div { padding: .9rem 1rem; } .tiles b { display: block; font-size: 1.3rem;
  letter-spacing: -.02em; white-space: nowrap; }
.tiles i { font-style: normal; color: var(--c3); } .tiles span { color: var(--soft); font-size: .85rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; margin: 0 0 2rem; font-size: .92rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1rem; }
figure { margin: 0; padding: 1rem 1.1rem; }
figcaption, .note { color: var(--soft); font-size: .88rem; margin-top: .4rem; }
svg { width: 100%; height: auto; display: block; } svg text { font-family: system-ui, sans-serif !important; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .85rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--grid); }
thead th { color: var(--soft); font-weight: 600; }
tbody th { font: .82rem ui-monospace, monospace; white-space: nowrap; }
.value { font-variant-numeric: tabular-nums; font-weight: 600; max-width: 16rem; overflow-wrap: anywhere; }
details { margin-top: 2rem; } pre { overflow-x: auto; font-size: .82rem; }
"""

"""The plots of a report: each is a function from rows to inline SVG, or None where the run has no such data.

Colours are written as CSS variables, so that one SVG is readable on a light and on a dark page.
"""

import io
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from estr_jax.objective.diagnostics import ENTROPY_EDGES, SCORE_EDGES, SCORE_EPS, STALENESS_EDGES
from estr_jax.observe.writers import Row

# Placeholder colours that matplotlib draws with; `_svg` turns each into the page's variable of that name.
_COLOURS = {"--ink": "#010101", "--grid": "#020202", "--c1": "#030303", "--c2": "#040404", "--c3": "#050505"}
_INK, _GRID, *_SERIES = _COLOURS.values()
_MAX_BARS = 160  # more steps than this share bars, by their mean
_MARKED = 40  # up to so many points a line shows each of them


def reward(rows: Sequence[Row]) -> str | None:
  """Training reward, its running mean, and the held-out accuracies."""
  steps, values = series(rows, "rollout/reward")
  evals = {name: series(rows, f"eval/{name}_accuracy") for name in ("sampled", "greedy")}
  if not len(steps) and not any(len(x) for x, _ in evals.values()):
    return None
  figure, axes = _axes("reward, accuracy")
  if len(steps):
    axes.plot(steps, values, color=_SERIES[0], alpha=0.35, linewidth=1, **_marker(values))
    axes.plot(steps, _running_mean(values), color=_SERIES[0], linewidth=2, label="training reward")
  for (name, (x, y)), colour, mark in zip(evals.items(), _SERIES[1:], "os"):
    if len(x):
      axes.plot(x, y, color=colour, marker=mark, markersize=5, linewidth=1.2, label=f"held-out {name}")
  return _svg(figure, axes, "reward")


def lines(rows: Sequence[Row], ylabel: str, names: Mapping[str, str], *, log: bool = False) -> str | None:
  """One line per metric of `names` (metric -> label) that the rows hold, against the step."""
  known = {label: data for name, label in names.items() if len((data := series(rows, name))[0])}
  if not known:
    return None
  figure, axes = _axes(ylabel)
  for (label, (x, y)), colour in zip(known.items(), _SERIES):
    axes.plot(x, y, color=colour, linewidth=1.5, label=label, **_marker(y))
  least = min(np.nanmin(y) for _, y in known.values())
  if log and 0 < 10 * least < max(np.nanmax(y) for _, y in known.values()):
    _logarithmic(axes)
  else:
    axes.set_ylim(bottom=min(0, least))
  return _svg(figure, axes, "-".join(names), legend=len(known) > 1)


def staleness(rows: Sequence[Row]) -> str | None:
  """Histograms of the whole run: in flight, in the queue, and of each token."""
  panels = {
    "in flight (intra)": ("staleness/intra_histogram", "trajectories"),
    "in the queue (inter)": ("staleness/inter_histogram", "trajectories"),
    "of each token": ("staleness/token_histogram", "policy tokens"),
  }
  known = {title: (total, unit) for title, (name, unit) in panels.items() if (total := pooled(rows, name)) is not None}
  if not known:
    return None
  figure, all_axes = _axes("share", columns=len(known), sharey=True)
  for axes, (title, (total, unit)), colour in zip(np.atleast_1d(all_axes), known.items(), _SERIES):
    shown = min(len(total), max(4, np.flatnonzero(total)[-1] + 1))
    axes.bar(range(shown), total[:shown] / total.sum(), color=colour, width=0.8)
    ticks = range(0, shown, math.ceil(shown / 6))
    axes.set_xticks(ticks, [f"{tick}+" if tick == len(total) - 1 else str(tick) for tick in ticks])
    axes.set_title(title, fontsize=9, color=_INK)
    axes.set_xlabel(f"versions ({unit})")
  return _svg(figure, np.atleast_1d(all_axes)[0], "staleness", legend=False)


def delta_by_entropy(rows: Sequence[Row], loss: Mapping[str, Any]) -> str | None:
  """Mean |delta| in each bin of H over the whole run, the tokens' share of each bin, and the loss's boundaries."""
  name, weight = "policy/abs_delta_by_entropy", "policy/token_share_by_entropy"
  pairs = [(row[name], row[weight]) for row in rows if name in row and weight in row]
  deltas, shares = (np.array(column, np.float64) for column in zip(*pairs)) if pairs else (np.zeros((1, 1)),) * 2
  shares = np.where(np.isfinite(deltas) & np.isfinite(shares), shares, 0)  # a null is a NaN here
  share = shares.sum(0)
  if not share.any():
    return None
  used = np.flatnonzero(share)[-1] + 1
  mean = np.divide((np.nan_to_num(deltas) * shares).sum(0), share, out=np.full(share.shape, np.nan), where=share > 0)

  figure, axes = _axes("|delta|, nats")
  # Every bin is drawn equally wide: the edges are fine near 0, where the boundaries differ most.
  behind = axes.twinx()
  behind.bar(np.arange(used) + 0.5, share[:used] / share.sum(), width=0.94, color=_GRID, linewidth=0)
  behind.set_ylim(0, 3)  # the bars stay in the lowest third
  behind.set_axis_off()
  behind.set_zorder(0)
  axes.set_zorder(1)
  axes.plot(np.arange(used) + 0.5, mean[:used], color=_SERIES[0], marker="o", markersize=4, lw=2, label="mean |delta|")
  position = np.linspace(0, used, 40 * used + 1)
  entropy = np.interp(position, np.arange(len(ENTROPY_EDGES)), ENTROPY_EDGES)
  for boundary in boundaries(loss):
    for index, bound in enumerate(boundary.bounds):
      style = "-" if len(boundary.bounds) == 1 else ("--", ":")[index]
      label = "_" * (index > 0) + boundary.label  # matplotlib's legend leaves out what begins with _
      axes.plot(position, bound(entropy), lw=1.5, color=boundary.colour, ls=style, label=label)
  axes.set_xticks(range(used + 1), [f"{edge:g}" for edge in ENTROPY_EDGES[: used + 1]])
  axes.set_xlabel("entropy H of the behaviour policy, nats (bars: share of the tokens)")
  if np.nanmax(mean) > 0:
    _logarithmic(axes)
  return _svg(figure, axes, "delta-by-entropy", columns=2)


def masked(rows: Sequence[Row]) -> str | None:
  """The masked fraction in each bin of H and of staleness over the whole run; behind it the tokens' share of each."""
  panels = {
    "entropy H, nats": ("entropy", [f"{edge:g}" for edge in ENTROPY_EDGES[:-1]]),
    "staleness, versions": ("staleness", _ranges(STALENESS_EDGES)),
  }
  known = {}
  for title, (of, labels) in panels.items():
    fraction, share = _pooled_mean(rows, f"loss/mask_fraction_by_{of}", f"policy/token_share_by_{of}")
    if share.any():
      known[title] = fraction, share, labels
  if not known:
    return None
  figure, every = _axes("masked / tokens of the bin", columns=len(known), sharey=True)
  for axes, (title, (fraction, share, labels)), colour in zip(np.atleast_1d(every), known.items(), _SERIES):
    used = np.flatnonzero(share)[-1] + 1
    behind = axes.twinx()
    behind.bar(range(used), share[:used] / share.sum(), width=0.94, color=_GRID, linewidth=0)
    behind.set_ylim(0, 3)  # the bars stay in the lowest third
    behind.set_axis_off()
    behind.set_zorder(0)
    axes.set_zorder(1)
    axes.plot(range(used), fraction[:used], color=colour, marker="o", markersize=4, lw=1.5)
    axes.set_xticks(range(used), labels[:used], rotation=45, fontsize=8)
    axes.set_xlabel(f"{title} (bars: share of tokens)")
  highest = max(np.nanmax(fraction) for fraction, *_ in known.values())
  np.atleast_1d(every)[0].set_ylim(0, 1.08 * highest or 1)  # shared by the panels
  return _svg(figure, np.atleast_1d(every)[0], "masked", legend=False)


def scores(rows: Sequence[Row], loss: Mapping[str, Any]) -> str | None:
  """The histogram of S over the whole run, with ESTR's tau where that is a bound of this S."""
  counts = pooled(rows, "policy/score_histogram")
  if counts is None:
    return None
  figure, axes = _axes("share of tokens")
  ratio = SCORE_EDGES[1] / SCORE_EDGES[0]
  left = np.concatenate([SCORE_EDGES[:1] / ratio, SCORE_EDGES])
  used = slice(max(np.flatnonzero(counts)[0] - 1, 0), np.flatnonzero(counts)[-1] + 2)
  axes.bar(left[used], counts[used] / counts.sum(), width=left[used] * (ratio - 1), align="edge", color=_SERIES[0])
  axes.set_xscale("log")
  axes.set_xlabel(f"S = delta^2 / (H + {SCORE_EPS:g})")
  bound = loss["name"] in ("estr", "estr_one_sided") and loss[loss["name"]]["eps"] == SCORE_EPS
  _, taus = series(rows, "loss/tau")
  if bound and len(taus):
    axes.axvline(taus[-1], color=_SERIES[1], lw=1.5, label=f"tau = {taus[-1]:.3g}: masked beyond")
  return _svg(figure, axes, "scores", legend=bound and len(taus) > 0)


def _ranges(edges: np.ndarray) -> list[str]:
  """The whole numbers from each edge to before the next one, as text."""
  inner = [f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in itertools.pairwise(edges)]
  return [*inner, f"{edges[-1]}+"]


def _pooled_mean(rows: Sequence[Row], name: str, share: str) -> tuple[np.ndarray, np.ndarray]:
  """(mean of a metric by bin over the whole run, tokens by bin): weighted by tokens, a null counts nothing."""
  found = [(row[name], row[share], row["policy/tokens"]) for row in rows if name in row and share in row]
  if not found:
    return np.zeros(1), np.zeros(1)
  values, shares, tokens = (np.array(column, np.float64) for column in zip(*found))
  weights = np.where(np.isfinite(values) & np.isfinite(shares), shares * tokens[:, None], 0)
  total = weights.sum(0)
  sums = (np.nan_to_num(values) * weights).sum(0)
  return np.divide(sums, total, out=np.full(total.shape, np.nan), where=total > 0), total


class Boundary(NamedTuple):
  """Where a trust region or a clip ends: |delta| (nats) as functions of H (nats), one for each side."""

  label: str
  bounds: tuple[Callable[[np.ndarray], np.ndarray], ...]
  colour: str


def boundaries(loss: Mapping[str, Any]) -> list[Boundary]:
  """The boundaries on |log pi - log mu| that a run's `loss` settings speak of: ESTR's, IcePop's fixed band, the clip.

  Both bands are drawn whichever is in force, since their difference is the point. On the edge "proximal" the band and
  the clip act on other ratios, so only ESTR's is one on delta.
  """

  def label(name: str, text: str) -> str:
    return f"{text}, in force" if loss["name"] == name else f"{text}, for comparison"

  found, estr, icepop = [], loss["estr"], loss["icepop"]
  if _positive(estr, "tau", "eps"):
    tau, eps = estr["tau"], estr["eps"]
    text = label("estr", f"ESTR: sqrt({tau:.3g} (H + {eps:g}))")
    found.append(Boundary(text, (lambda entropy: np.sqrt(tau * (entropy + eps)),), _SERIES[2]))
  if loss["edge"] == "direct" and _positive(icepop, "low", "high"):
    low, high = math.log(icepop["low"]), math.log(icepop["high"])
    found.append(_fixed(label("icepop", f"fixed band: {low:.3g} to {high:.3g}"), low, high, _SERIES[1]))
  if loss["edge"] == "direct" and _positive(loss, "clip_low", "clip_high") and loss["clip_low"] < 1:
    low, high = math.log1p(-loss["clip_low"]), math.log1p(loss["clip_high"])
    found.append(_fixed(f"clip: {low:.3g} to {high:.3g}", low, high, _INK))
  return found


def _fixed(label: str, low: float, high: float, colour: str) -> Boundary:
  """A band low <= delta <= high that knows nothing of the entropy; its two sides."""
  bounds = tuple(lambda entropy, side=side: np.full_like(entropy, abs(side)) for side in (high, low))
  return Boundary(label, bounds, colour)


def waits(rows: Sequence[Row]) -> str | None:
  """Stacked seconds per step: the learner's waits and the samplers'; a null counts as 0."""
  names = {
    "time/wait_rollouts_s": "learner, for rollouts",
    "time/publish_s": "learner, publishing",
    "time/sampler_wait_s": "samplers",
  }
  known = {label: name for name, label in names.items() if len(series(rows, name)[0])}
  timed = [row for row in rows if all(name in row for name in known.values())]
  if not known or not timed:
    return None
  figure, axes = _axes("seconds per step")
  chunks = np.array_split(np.arange(len(timed)), min(len(timed), _MAX_BARS))
  at = np.array([timed[chunk[0]]["step"] for chunk in chunks], np.float64)
  width = np.diff(at, append=at[-1] + len(chunks[-1]))
  base = np.zeros(len(chunks))
  for (label, name), colour in zip(known.items(), _SERIES):
    seconds = np.nan_to_num(np.array([row[name] for row in timed], np.float64))
    height = np.array([seconds[chunk].mean() for chunk in chunks])
    axes.bar(at - 0.5, height, width=width, bottom=base, align="edge", color=colour, linewidth=0, label=label)
    base += height
  return _svg(figure, axes, "waits")


def series(rows: Sequence[Row], name: str) -> tuple[np.ndarray, np.ndarray]:
  """(steps, values) of the rows that hold `name`; a null is NaN. Empty where no value is a number."""
  found = [(row["step"], row[name]) for row in rows if name in row]
  steps, values = np.array([step for step, _ in found]), np.array([value for _, value in found], np.float64)
  return (steps, values) if np.isfinite(values).any() else (steps[:0], values[:0])


def pooled(rows: Sequence[Row], name: str) -> np.ndarray | None:
  """The sum of a histogram over the rows; None where no row counted anything."""
  found = [np.nan_to_num(np.array(row[name], np.float64)) for row in rows if name in row]
  total = np.sum(found, axis=0) if found else np.zeros(1)
  return total if total.any() else None


def _positive(hyper: Mapping[str, Any], *names: str) -> bool:
  return all(name in hyper and isinstance(hyper[name], (int, float)) and 0 < hyper[name] < math.inf for name in names)


def _running_mean(values: np.ndarray) -> np.ndarray:
  """The mean of the latest values (a twentieth of the run, at least 5); a NaN is left out."""
  window = max(5, len(values) // 20)
  known = np.isfinite(values)
  total, count = np.cumsum(np.where(known, values, 0)), np.cumsum(known)
  total[window:], count[window:] = total[window:] - total[:-window], count[window:] - count[:-window]
  return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def _marker(values: np.ndarray) -> dict[str, Any]:
  return {"marker": "o", "markersize": 3} if len(values) <= _MARKED else {}


def _logarithmic(axes: Any) -> None:
  axes.set_yscale("log")
  axes.yaxis.set_major_formatter("{x:g}")
  axes.yaxis.set_minor_formatter("")


def _axes(ylabel: str, columns: int = 1, sharey: bool = False) -> tuple[Any, Any]:
  from matplotlib.figure import Figure
  from matplotlib.ticker import MaxNLocator

  figure = Figure(figsize=(6.4, 3.1), layout="constrained")
  figure.patch.set_visible(False)
  every = figure.subplots(1, columns, sharey=sharey)
  for axes in np.atleast_1d(every):
    axes.patch.set_visible(False)
    axes.grid(True, axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=_INK, labelsize=9, length=0)
    axes.spines[:].set_visible(False)
    axes.spines["bottom"].set(visible=True, color=_INK, linewidth=0.8)
    axes.set_xlabel("step (version after the update)", color=_INK, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
  np.atleast_1d(every)[0].set_ylabel(ylabel, color=_INK, fontsize=9)
  return figure, every


def _svg(figure: Any, axes: Any, salt: str, legend: bool = True, columns: int = 3) -> str:
  """The figure as an <svg> element for an HTML page: text as text, no metadata, the page's colours."""
  import matplotlib

  if legend:
    figure.legend(
      *axes.get_legend_handles_labels(),
      loc="outside upper left",
      ncols=columns,
      frameon=False,
      fontsize=9,
      labelcolor=_INK,
    )
  buffer = io.StringIO()
  # The salt keeps the ids of one figure apart from those of the others on the page, and the file reproducible.
  with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
    figure.savefig(buffer, format="svg")
  text = buffer.getvalue()
  text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
  text = re.sub(r' (?:width|height)="[0-9.]+pt"', "", text, count=2)  # the page decides the size
  for variable, placeholder in _COLOURS.items():
    text = text.replace(placeholder, f"var({variable})")
  return text

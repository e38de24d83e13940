"""The report: one file, drawn from whatever a run recorded, true to its numbers."""

import html
import re
import xml.etree.ElementTree

import numpy as np
import pytest

from estr_jax.errors import UserError
from estr_jax.objective.diagnostics import ENTROPY_EDGES, SCORE_EDGES, STALENESS_EDGES
from estr_jax.observe import figures, report, writers
from estr_jax.run import command_line
from experiments import report as program

BINS = len(ENTROPY_EDGES) - 1
ESTR = {
  "name": "estr",
  "edge": "direct",
  "clip_low": 0.2,
  "clip_high": 0.28,
  "estr": {"tau": 1.0, "eps": 0.01},
  "icepop": {"low": 0.5, "high": 5.0},
}
SUMMARY = {
  "config_name": "quick<start>",
  "mode": "async",
  "loss": "estr",
  "task": "calculator",
  "steps": 3,
  "accuracy": {"sampled": {"before": 0.41, "after": 0.934}, "greedy": {"before": 0.47, "after": None}},
  "prompts": 512,
  "process_ids": {"learner": 4121, "sampler": 4150},
  "staleness": {"intra": 0.61, "inter": 1.52, "token": 1.83, "max_token": 5},
  "tokens_per_s": {"trained": 3611.2, "sampled": 3904.0},
  "acknowledged_versions": {"sampler-0": [0, 1, 2, 3, 7]},
  "steps_s": 61.0,
  "wall_s": 183.2,
  "compilations": 1,
  "tau": 0.37,
  "tau_calibrated_at": 3,
}


def _row(step):
  return {
    "step": step,
    "rollout/reward": 0.1 * step,
    "policy/entropy": None if step == 2 else 0.5,
    "policy/rollout_kl": 0.01,
    "loss/mask_fraction": 0.01,
    "loss/clip_fraction": 0.0,
    "policy/abs_delta_by_entropy": [0.01, None] + [0.1] * (BINS - 2),
    "policy/token_share_by_entropy": [0.5, 0.0, 0.5] + [0.0] * (BINS - 3),
    "loss/mask_fraction_by_entropy": [0.1, None] + [0.2] * (BINS - 2),
    "loss/mask_fraction_by_staleness": [0.0, 0.5] + [None] * (len(STALENESS_EDGES) - 2),
    "policy/token_share_by_staleness": [0.75, 0.25] + [0.0] * (len(STALENESS_EDGES) - 2),
    "policy/tokens": 8.0,
    "policy/score_histogram": [0, 3, 4, 1] + [0] * (len(SCORE_EDGES) - 3),
    "loss/tau": 0.37,
    "staleness/intra_histogram": [3, 1, 0, 0],
    "staleness/inter_histogram": [0, 4, 0, 0],
    "staleness/token_histogram": [9, 1, 0, 0],
    "time/wait_rollouts_s": 0.1,
    "time/publish_s": 0.1,
    "time/sampler_wait_s": None,
    "optimizer/gradient_norm": 0.4,
    "throughput/tokens_per_s": 100.0,
  }


def _report(folder, rows, summary, loss=ESTR):
  with writers.MetricsFile(folder / "metrics.jsonl") as metrics:
    for row in rows:
      metrics.append(row)
  writers.write_json(folder / "config.json", {"mode": "async", "loss": loss})
  if summary:
    writers.write_json(folder / "summary.json", summary)
  path = report.write_report(folder)
  assert path == folder / "report.html"
  return path.read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
  """The report of a run that has ended."""
  evaluation = {"step": 0, "eval/sampled_accuracy": 0.41, "eval/greedy_accuracy": 0.47}
  return _report(tmp_path_factory.mktemp("run"), [evaluation] + [_row(step) for step in (1, 2, 3)], SUMMARY)


def test_the_whole_report_is_one_file_that_loads_nothing(page):
  """Fails if a plot is lost, a link, script or image creeps in, or a name is not escaped."""
  titles = re.findall(r"<figure><h3>(.*?)</h3>", page)
  assert titles == [
    "Reward and held-out accuracy",
    "Policy entropy",
    "Rollout-target KL",
    "Masked and clipped tokens",
    "Who is masked",
    "Scaled squares S",
    "Realised staleness",
    "Mean |delta| against entropy",
    "Who waits",
    "Gradient norm",
    "Throughput",
  ]
  absent = "At version switches, Effective sample size, Rollout length"
  assert f"Not drawn, because the run recorded no such data: {absent}." in page
  assert len(re.findall("<figcaption>[^<]+</figcaption>", page)) == len(titles)
  assert not re.search(
    r"<script|<link|<img|<iframe|@import|\bsrc=|url\((?!#)|href=\"(?!#)|<metadata|<!DOCTYPE svg", page
  )
  assert "<start>" not in page and "quick&lt;start&gt;" in page
  for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
    xml.etree.ElementTree.fromstring(svg)
    assert "var(--ink)" in svg and not re.search(r"#0[1-5]0[1-5]0[1-5]", svg)


@pytest.mark.parametrize(
  ("name", "own", "words"),
  [
    ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}, "gspo on the direct edge: clip_low 0.0003, clip_high 0.0004"),
    ("ipo", {"bound": 0.3}, "ipo: bound 0.3"),
    ("asympo", {}, "asympo: no hyper-parameters"),
  ],
)
def test_the_loss_is_named_with_what_it_takes(tmp_path, name, own, words):
  """Fails if a loss is said to be on an edge that it does not take, or with bounds that are not its own."""
  writers.write_json(tmp_path / "config.json", {"loss": ESTR | {"name": name, name: own}})
  (tmp_path / "metrics.jsonl").write_text("")
  assert f"<p>{words}. It has" in report.write_report(tmp_path).read_text()


def test_the_headline_says_what_came_out(page):
  """Fails if before and after, learner and sampler, or trained and sampled are exchanged, or a null breaks it."""
  text = html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page[page.index("<main>") : page.index("<svg")])))
  for part in (
    "41.0% → 93.4% sampled accuracy",
    "47.0% → n/a greedy accuracy",
    "1.83 versions of staleness per token, at most 5",
    "3,611 tokens/s trained (3,904 sampled)",
    "1 min 1 s in 3 steps, evaluations included",
    "learner 4121, sampler 4150",
    "sampler-0: 0-3, 7",
    "0.61 in flight, 1.52 in the queue",
    "estr on the direct edge: tau 1, eps 0.01",
    "Calibrated tau 0.37, on the batch of version 3",
  ):
    assert part in text


@pytest.mark.parametrize(
  "rows", [[], [{"step": 0, "eval/greedy_accuracy": 0.5}], [{"step": 1, "rollout/reward": None}], [_row(1)]]
)
def test_few_rows_and_no_summary_are_reported(tmp_path, rows):
  """Fails if a young or killed run, or one without a queue, has no report."""
  page = _report(tmp_path, rows, None)
  assert f"reached step {rows[-1]['step'] if rows else 0};" in page and "there is no summary.json yet" in page


def test_a_figure_is_the_same_when_it_is_drawn_again():
  """Fails if dates or random ids enter the file."""
  rows = [_row(1), _row(2)]
  assert figures.waits(rows) == figures.waits(rows) is not None


def test_missing_files_are_named(tmp_path):
  """Fails if a wrong --workdir ends in a traceback."""
  with pytest.raises(UserError, match=r"metrics\.jsonl"):
    report.write_report(tmp_path)
  writers.write_text(tmp_path / "metrics.jsonl", "")
  with pytest.raises(UserError, match=r"config\.json"):
    report.write_report(tmp_path)
  writers.write_text(tmp_path / "config.json", "{")
  with pytest.raises(UserError, match="not JSON"):
    report.write_report(tmp_path)


def test_the_program_prints_one_line_for_a_wrong_folder(tmp_path, monkeypatch, capsys):
  """Fails if the program shows a traceback or exits with 0."""
  monkeypatch.setattr("sys.argv", ["report", f"--workdir={tmp_path / 'none'}"])
  with pytest.raises(SystemExit) as end:
    command_line.main(program.program)
  assert end.value.code == 2
  out, error = capsys.readouterr()
  assert out == "" and error.startswith("error: ") and len(error.splitlines()) == 1


def _sides(loss):
  return {b.label: [float(side(np.array([0.29]))[0]) for side in b.bounds] for b in figures.boundaries(loss)}


def test_the_boundaries_of_both_bands_and_the_clip():
  """Fails if tau multiplies outside the root, eps is lost, one side of a band is missing, or a side is its ratio."""
  estr, band, clip = _sides(ESTR | {"estr": {"tau": 3.0, "eps": 0.01}}).values()
  np.testing.assert_allclose(estr, [np.sqrt(3.0 * 0.3)])
  np.testing.assert_allclose(band, [np.log(5.0), np.log(2.0)])
  np.testing.assert_allclose(clip, [np.log(1.28), -np.log(0.8)])


def test_the_band_in_force_is_named():
  """Fails if a reader takes the band that is drawn for comparison for the run's own."""
  for name in ("estr", "icepop"):
    in_force = [label for label in _sides(ESTR | {"name": name}) if "in force" in label]
    assert len(in_force) == 1 and in_force[0].startswith({"estr": "ESTR", "icepop": "fixed band"}[name])


def test_the_proximal_edge_has_no_fixed_boundary_on_delta():
  """Fails if the clip of pi / q is drawn as a boundary of pi / mu; an infinite tau (null) is no boundary either."""
  loss = ESTR | {"edge": "proximal"}
  assert list(_sides(loss)) == ["ESTR: sqrt(1 (H + 0.01)), in force"]
  assert _sides(loss | {"estr": {"tau": None, "eps": 0.01}}) == {}


def test_masked_fractions_are_pooled_by_tokens():
  """Fails if steps of few tokens count as much as those of many, a null is a 0, or an empty bin has a fraction."""
  rows = [
    {"step": 0},
    {"step": 1, "f": [0.5, None, None], "s": [1.0, 0.0, 0.0], "policy/tokens": 30},
    {"step": 2, "f": [0.1, 1.0, None], "s": [0.5, 0.5, 0.0], "policy/tokens": 20},
  ]
  mean, tokens = figures._pooled_mean(rows, "f", "s")
  np.testing.assert_allclose(mean, [(0.5 * 30 + 0.1 * 10) / 40, 1.0, np.nan])
  np.testing.assert_array_equal(tokens, [40, 10, 0])
  assert not figures._pooled_mean(rows[:1], "f", "s")[1].any()


def test_the_bins_of_staleness_are_named():
  """Fails if a label is off by one version."""
  assert figures._ranges(STALENESS_EDGES) == ["0", "1", "2", "3", "4", "5-8", "9-16", "17-32", "33+"]


def test_tau_is_marked_where_it_bounds_this_score():
  """Fails if the tau of another score, or of another eps, is drawn in the histogram of S; or a found tau is not."""
  rows = [_row(1)]
  assert "tau = 0.37" in figures.scores(rows, ESTR)
  for other in (ESTR | {"estr": {"tau": 1.0, "eps": 0.1}}, ESTR | {"name": "estr_gini", "estr_gini": ESTR["estr"]}):
    assert "tau" not in figures.scores(rows, other)
  found = report._loss_in_force(rows, ESTR | {"estr": {"tau": "calibrate:0.01", "eps": 0.01}})
  assert found["estr"]["tau"] == 0.37 and "sqrt(0.37 (H + 0.01))" in figures.boundaries(found)[0].label


def test_pooling_adds_histograms_over_rows_that_have_them():
  """Fails if only the last row is shown, or if a row without the histogram breaks it."""
  rows = [{"step": 0}, {"step": 1, "h": [1, 2]}, {"step": 2, "h": [3, None]}]
  np.testing.assert_array_equal(figures.pooled(rows, "h"), [4, 2])
  assert figures.pooled([{"step": 1, "h": [0, 0]}], "h") is None


def test_series_keeps_nulls_as_gaps_and_is_empty_without_a_number():
  """Fails if a null is drawn as 0, or shifts the later values to other steps."""
  rows = [{"step": 1, "x": 5}, {"step": 2}, {"step": 3, "x": None}, {"step": 4, "x": 7}]
  steps, values = figures.series(rows, "x")
  np.testing.assert_array_equal(steps, [1, 3, 4])
  np.testing.assert_array_equal(values, [5, np.nan, 7])
  assert len(figures.series(rows[1:3], "x")[0]) == 0


def test_running_mean_equals_the_mean_of_its_window():
  """Fails if the window is off by one, or if a NaN spoils or dilutes it."""
  values = np.random.default_rng(0).normal(size=30)
  values[7] = np.nan
  expected = [np.nanmean(values[max(0, n - 4) : n + 1]) for n in range(30)]
  np.testing.assert_allclose(figures._running_mean(values), expected)

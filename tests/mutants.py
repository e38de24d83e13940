"""Does a test notice? Hand-made faults in the objective room, each of which some test has to kill.

    python tests/mutants.py [NAME ...]

Copies the repository to a scratch folder, applies one fault at a time, runs the tests that should notice, and prints
who was killed. Exit status 1 where one survives, or where a fault no longer fits the code. Some minutes on two cores.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutant(NamedTuple):
  """`old` in `file` becomes `new`; `tests` are the arguments of pytest that have to fail."""

  file: str
  old: str
  new: str
  tests: str


def _loss(file: str, name: str, old: str, new: str) -> Mutant:
  return Mutant(f"losses/{file}.py", old, new, f"tests/test_objective_losses.py -k {name}")


_IDENTITIES = "tests/test_objective_identities.py"
_LOSSES = "tests/test_objective_losses.py"

MUTANTS = {
  # Shapers.
  "optimistic clip": Mutant(
    "surrogates.py", "jnp.minimum(ratio * advantage_BT", "jnp.maximum(ratio * advantage_BT", f"{_LOSSES} -k ppo"
  ),
  "clip sides swapped": Mutant(
    "surrogates.py",
    "jnp.clip(ratio, 1 - clip_low, 1 + clip_high)",
    "jnp.clip(ratio, 1 - clip_high, 1 + clip_low)",
    f"{_LOSSES} -k ppo",
  ),
  "a ratio without a bound": Mutant(
    "surrogates.py", "MAX_LOG_RATIO = 20.0", "MAX_LOG_RATIO = 60.0", f"{_LOSSES} -k ppo"
  ),
  "dual clip on the wrong side": Mutant(
    "surrogates.py", "negative & (ratio > dual)", "~negative & (ratio > dual)", f"{_LOSSES} -k dual_clip"
  ),
  # Composition.
  "loss maximised": Mutant(
    "losses/composition.py",
    "jnp.where(keep_BT, -objective_BT, 0.0)",
    "jnp.where(keep_BT, objective_BT, 0.0)",
    f"{_LOSSES} -k estr",
  ),
  "tool tokens train": Mutant(
    "losses/composition.py",
    "batch.mask & jnp.isfinite(batch.logprob)",
    "jnp.isfinite(batch.logprob)",
    f"{_LOSSES} -k ppo",
  ),
  "shaped weight not detached": Mutant(
    "losses/composition.py",
    "jax.lax.stop_gradient(weight_BT) * objective",
    "weight_BT * objective",
    f"{_LOSSES} -k gipo",
  ),
  "score-function weight not detached": Mutant(
    "losses/composition.py",
    "jax.lax.stop_gradient(weight_BT) * batch.advantage",
    "weight_BT * batch.advantage",
    f"{_LOSSES} -k cispo",
  ),
  # Regions.
  "eps left out of S": Mutant(
    "trust_regions.py", "jnp.power(scale_BT + eps, power)", "jnp.power(scale_BT, power)", f"{_LOSSES} -k estr"
  ),
  "entropy in bits": Mutant(
    "trust_regions.py",
    "jnp.power(scale_BT + eps, power)",
    "jnp.power(scale_BT / jnp.log(2.0) + eps, power)",
    f"{_LOSSES} -k estr",
  ),
  "region inside out": Mutant("trust_regions.py", "(score_BT <= bound)", "(score_BT >= bound)", f"{_LOSSES} -k estr"),
  "one KL is enough": Mutant(
    "trust_regions.py", "<= phi) & (bernoulli_kl(log_q", "<= phi) | (bernoulli_kl(log_q", f"{_LOSSES} -k kpop"
  ),
  "change of probability reversed": Mutant(
    "trust_regions.py", "jnp.sign(log_p_BT - log_q_BT)", "jnp.sign(log_q_BT - log_p_BT)", f"{_LOSSES} -k dppo_tv"
  ),
  "smallest for largest": Mutant(
    "trust_regions.py",
    "jnp.where(where_BT, -value_BT, jnp.inf)",
    "jnp.where(where_BT, value_BT, jnp.inf)",
    f"{_LOSSES} -k stare",
  ),
  # Edges.
  "edges swapped": Mutant(
    "triangle.py",
    'batch.logprob if edge == "direct" else',
    'batch.logprob if edge != "direct" else',
    f"{_LOSSES} -k ppo",
  ),
  "behaviour ratio upside down": Mutant(
    "triangle.py",
    "return _proximal(batch) - batch.logprob",
    "return batch.logprob - _proximal(batch)",
    f"{_LOSSES} -k decoupled",
  ),
  "ESTR's mask on the clip's edge": Mutant(
    "losses/entropy_scaled.py",
    'log_ratio(policy.logprob, batch, "direct")',
    'log_ratio(policy.logprob, batch, "proximal")',
    f"{_LOSSES} -k estr",
  ),
  # ESTR and its ablations.
  "Gini for entropy": _loss(
    "entropy_scaled", "estr", "batch.entropy, eps=eps, power=1.0", "batch.gini, eps=eps, power=1.0"
  ),
  "one-sided inside out": _loss(
    "entropy_scaled", "estr_one_sided", "_delta(policy, batch) <= 0", "_delta(policy, batch) >= 0"
  ),
  "soft mask of half the width": _loss("entropy_scaled", "estr_soft", "/ (2 * tau)", "/ tau"),
  "width squared": _loss(
    "entropy_scaled", "fixed_width", "jnp.abs(_delta(policy, batch)), width", "jnp.square(_delta(policy, batch)), width"
  ),
  # Sequences.
  "a sequence's sum up to the token": Mutant(
    "scopes.py",
    "return _last(_scan(jnp.add, value_BT, segment_BT), segment_BT)",
    "return _scan(jnp.add, value_BT, segment_BT)",
    "tests/test_objective_scopes.py",
  ),
  "sequences of a row run together": Mutant(
    "scopes.py", "segment_BT[:, 1:] != segment_BT[:, :-1]", "segment_BT[:, 1:] > 99", "tests/test_objective_scopes.py"
  ),
  "sum for mean in GSPO": _loss(
    "clips", "gspo", "log_s = sequence_mean(delta, there_BT,", "log_s = 2 * sequence_mean(delta, there_BT,"
  ),
  "GMPO cuts the inward side": _loss("clips", "gmpo", "frozen > band, frozen < -band", "frozen < -band, frozen > band"),
  "worst token is the best": _loss("bands", "trm", "sequence_max(worst_BT", "-sequence_max(-worst_BT"),
  "OPSM drops good sequences": _loss("bands", "opsm", "(batch.advantage < 0) & (mean", "(batch.advantage > 0) & (mean"),
  # Others of the field.
  "SAPO's temperatures swapped": _loss("clips", "sapo", "> 0, positive, negative", "> 0, negative, positive"),
  "SAT shrinks the other end": _loss(
    "clips", "sat", "jnp.where(delta < 0, shrink_BT", "jnp.where(delta > 0, shrink_BT"
  ),
  "GAPO widens for easy prompts": _loss("clips", "gapo", "(size_BT - right_BT)", "(right_BT - 1)"),
  "band of the other policy": _loss("clips", "bandpo", "log_anchor(batch, edge), -1.0", "policy.logprob, -1.0"),
  "IPO without the absolute value": _loss(
    "bands", "ipo", "at_most(jnp.abs(change_BT), bound)", "at_most(change_BT, bound)"
  ),
  "DPPO's KL reversed": _loss(
    "bands", "dppo_kl", "bernoulli_kl(batch.logprob, log_pi)", "bernoulli_kl(log_pi, batch.logprob)"
  ),
  "M2PO drops inward moves": _loss(
    "bands", "m2po", "jax.lax.stop_gradient(delta) > 0)", "jax.lax.stop_gradient(delta) < 0)"
  ),
  "truncation from below": _loss(
    "weights", "tis", "there_BT, jnp.minimum(rho, cap)", "there_BT, jnp.maximum(rho, cap)"
  ),
  "A-3PO off by one version": _loss("weights", "a3po", "(age_BT - 1) / age_BT", "age_BT / (age_BT + 1)"),
  "VESPO's exponents swapped": _loss("weights", "vespo", "decay + k * log_w - decay *", "k + decay * log_w - k *"),
  "VCPO's baseline by w, not its square": _loss("weights", "vcpo", "jnp.square(rho) * norm_BT", "rho * norm_BT"),
  "ASymPO's mean not detached": _loss(
    "weights", "asympo", "sequence_mean(jax.lax.stop_gradient(nll_BT)", "sequence_mean(nll_BT"
  ),
  "STARE at high entropy": _loss("weights", "stare", "policy_tokens < target", "policy_tokens > target"),
  "centering by pi": _loss("centering", "score_centering", "jnp.exp(log_m) *", "jnp.exp(frozen) *"),
  # Advantages, aggregation, penalties.
  "sample standard deviation": Mutant(
    "advantages.py",
    ".std(axis=1, keepdims=True)",
    ".std(axis=1, keepdims=True, ddof=1)",
    "tests/test_objective_advantages.py",
  ),
  "leave-one-out without its factor": Mutant(
    "advantages.py", "_centred(reward_GN) * N / (N - 1)", "_centred(reward_GN)", "tests/test_objective_advantages.py"
  ),
  "padding in the denominator": Mutant(
    "aggregation.py", "jnp.maximum(jnp.sum(batch.mask), 1)", "batch.mask.size", "tests/test_objective_aggregation.py"
  ),
  "empty sequences counted": Mutant(
    "aggregation.py",
    "first_of_sequence(batch.mask, batch.segment)",
    "first_of_sequence(batch.segment > 0, batch.segment)",
    "tests/test_objective_aggregation.py",
  ),
  "k3 of the inverse": Mutant(
    "penalties.py",
    "jnp.expm1(-log_ratio_BT) + log_ratio_BT",
    "jnp.expm1(log_ratio_BT) - log_ratio_BT",
    "tests/test_objective_penalties.py",
  ),
  "coefficient away from the target": Mutant(
    "penalties.py",
    "jnp.where(below, step, -step)",
    "jnp.where(below, -step, step)",
    "tests/test_objective_penalties.py",
  ),
  # Scoring and the step.
  "the hidden state of the token itself": Mutant(
    "../learner/step.py",
    "target_BT = jnp.roll(tokens_BT, -1, axis=1)",
    "target_BT = tokens_BT",
    "tests/test_learner_step.py -k aligned",
  ),
}


def survives(mutant: Mutant, copy: Path) -> bool:
  """Applies a fault, runs its tests, and takes it back.

  Raises:
    ValueError: the code no longer holds `old`, exactly once.
  """
  path = (copy / "estr_jax/objective" / mutant.file).resolve()
  sound = path.read_text()
  if sound.count(mutant.old) < 1:
    raise ValueError(f"{mutant.file} does not hold {mutant.old!r}")
  path.write_text(sound.replace(mutant.old, mutant.new))
  command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests.split()]
  environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
  try:
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=900)
  finally:
    path.write_text(sound)
  if done.returncode not in (0, 1):
    raise ValueError(f"pytest ran no test: {(done.stdout + done.stderr).strip().splitlines()[-1]}")
  return done.returncode == 0


def main(names: list[str]) -> int:
  if unknown := set(names) - MUTANTS.keys():
    print(f"error: unknown mutants {sorted(unknown)}; the names stand in tests/mutants.py", file=sys.stderr)
    return 2
  failed = []
  with tempfile.TemporaryDirectory() as scratch:
    copy = Path(scratch) / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "*.egg-info", "__pycache__"))
    for number, name in enumerate(chosen := names or list(MUTANTS), start=1):
      try:
        verdict = "SURVIVED" if survives(MUTANTS[name], copy) else "killed"
      except ValueError as error:
        verdict = f"DOES NOT APPLY: {error}"
      if verdict != "killed":
        failed.append(name)
      print(f"{number}/{len(chosen)} {name}: {verdict}", flush=True)
  print(f"{len(chosen) - len(failed)} of {len(chosen)} killed" + (f"; not: {', '.join(failed)}" if failed else ""))
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

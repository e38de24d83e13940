"""The launcher, with children of a few lines: nobody is left behind, and what failed is one line."""

import os
import pathlib
import signal
import sys
import time

import pytest

from estr_jax.errors import Killed, UserError
from estr_jax.runtime import launch

READS = "from estr_jax.runtime import launch; job = launch.receive_job()"
SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


def child(body: str, *, first: str = "") -> list[str]:
  """Without `first` it leaves its job unread, and is quick."""
  return [sys.executable, "-c", f"{first}\n{body}"]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
  monkeypatch.setenv("PYTHONPATH", os.fspath(pathlib.Path(__file__).parent.parent))


def run(learner, sampler, folder, job=b"a job", say=lambda line: None) -> None:
  launch.launch({"learner": learner, "sampler": sampler}, job, folder, say)


def descriptors() -> int:
  return len(os.listdir("/proc/self/fd"))


def children() -> list[str]:
  return pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_both_get_the_job_and_nothing_is_left(tmp_path):
  """Fails if a job is cut, larger than a pipe or not, a descriptor leaks, or a process outlives the run."""
  before, job = (descriptors(), children()), os.urandom(300_000)
  body = f"open({os.fspath(tmp_path)!r} + '/' + {{}}, 'wb').write(job)"
  run(child(body.format("'learner'"), first=READS), child(body.format("'other'"), first=READS), tmp_path, job)
  assert (tmp_path / "learner").read_bytes() == (tmp_path / "other").read_bytes() == job
  assert (descriptors(), children()) == before


def test_the_line_of_the_learner_is_the_error(tmp_path, capfd):
  """Fails if a user's mistake in the learner's process is lost, said twice, or is no UserError here."""
  with pytest.raises(UserError, match=r"^what went wrong$") as caught:
    run(child("launch.report_fault('what went wrong'); raise SystemExit(2)", first=READS), SLEEPS, tmp_path)
  assert caught.value.status == 2 and "what went wrong" not in capfd.readouterr().err


def test_a_learner_that_says_nothing_is_no_riddle(tmp_path):
  """Fails if a fault of ours, which leaves a traceback, hangs the launcher or ends it in silence."""
  with pytest.raises(UserError, match="the learner ended with status 3; what it said stands above"):
    run(child("raise SystemExit(3)"), SLEEPS, tmp_path)


@pytest.mark.parametrize("body", ["import os; os.kill(os.getpid(), 9)", "import os; os._exit(130)"])
def test_a_killed_learner_ends_the_run_with_its_signal(tmp_path, body):
  """Fails if a kill, also by the SIGTERM that unwinds a process to status 130, is taken for a mistake."""
  with pytest.raises(Killed, match=r"the learner was killed by signal .*run the same command again") as caught:
    run(child(body), SLEEPS, tmp_path)
  assert caught.value.status == 128 + (signal.SIGTERM if "130" in body else signal.SIGKILL)


@pytest.mark.parametrize("body", ["os.kill(os.getpid(), 9)", "os._exit(130)"])
def test_a_killed_sampler_is_started_again(tmp_path, body):
  """Fails if one death of a sampler ends the run, or is not told."""
  mark = tmp_path / "was here"
  sampler = f"import os, pathlib, time; mark = pathlib.Path({os.fspath(mark)!r})\nif not mark.exists():\n"
  sampler += f"  mark.touch(); {body}\n(mark.parent / 'again').touch()"
  learner = f"import pathlib, time; again = pathlib.Path({os.fspath(tmp_path / 'again')!r})\n"
  learner += "while not again.exists(): time.sleep(0.05)"
  said = []
  run(child(learner), child(sampler), tmp_path, say=said.append)
  (line,) = said
  assert line.startswith("sampler was killed by signal ") and line.endswith("; started again")


def test_a_sampler_that_fails_ends_the_run_with_its_last_line(tmp_path):
  """Fails if the learner goes on waiting for a sampler that refuses to start."""
  with pytest.raises(
    UserError, match=r"sampler ended with status 2: error: no such model \(all of it: .*sampler\.log\)"
  ):
    run(SLEEPS, child("import sys; print('error: no such model', file=sys.stderr); raise SystemExit(2)"), tmp_path)
  assert children() == []


@pytest.mark.parametrize("folder", ["ok", "gone"])
def test_what_cannot_be_started_leaves_nobody_behind(tmp_path, folder):
  """Fails if a learner goes on training, holding the folder, after its sampler could not be started."""
  (tmp_path / "ok").mkdir()
  before = descriptors()
  command = ["/nowhere/at/all"] if folder == "ok" else SLEEPS
  with pytest.raises(UserError, match="the sampler cannot be started: No such file or directory"):
    run(SLEEPS, command, tmp_path / folder)
  assert children() == [] and descriptors() == before


def test_ctrl_c_unwinds_and_gives_the_signals_back(tmp_path):
  """Fails if Ctrl-C is swallowed, a child survives it, or the caller's handlers are gone."""
  before = [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)]
  learner = child(f"import os, signal, time; time.sleep(0.2); os.kill({os.getpid()}, signal.SIGINT); time.sleep(600)")
  with pytest.raises(KeyboardInterrupt):
    run(learner, SLEEPS, tmp_path)
  assert [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)] == before
  assert children() == []


def test_a_sampler_knows_its_own_learner(tmp_path, monkeypatch):
  """Fails if the address that a learner of an earlier start wrote counts, whose process id may be this one's."""
  monkeypatch.setenv(launch.LAUNCH, "earlier")
  launch.announce_learner(tmp_path, "127.0.0.1:1")
  monkeypatch.setenv(launch.LAUNCH, "now")
  looks = iter([None, launch.announce_learner])

  def sleep(seconds):
    if (announce := next(looks)) is not None:
      announce(tmp_path, "127.0.0.1:2")

  monkeypatch.setattr(time, "sleep", sleep)
  assert launch.find_learner(tmp_path, "127.0.0.1:0") == "127.0.0.1:2"

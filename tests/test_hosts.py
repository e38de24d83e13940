"""What the processes of a group tell each other, with two real ones."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from estr_jax import hosts
from estr_jax.errors import UserError

_TWO = """
import json, sys
import jax, numpy as np
from estr_jax import hosts
from estr_jax.errors import UserError

hosts.join(sys.argv[1], 2, int(sys.argv[2]))
me = jax.process_index()
long = "x" * 20_000_000
found = [hosts.leads(), hosts.alone(), hosts.broadcast({"from": me}), hosts.broadcast(None if me else long) == long]
found += [[hosts.broadcast("x" * size if me == 0 else None) == "x" * size for size in range(4060, 4100)]]
found += [hosts.gather("y" * (1 + 5000 * me)) == ["y", "y" * 5001], hosts.lead(lambda: me)]

def fail():
  raise UserError(f"raised by {me}")

class Stays(Exception):
  def __init__(self, one, two):
    super().__init__(one)

def fail_oddly():
  raise Stays("cannot travel", 2)

for call in (lambda: hosts.lead(fail), lambda: hosts.leader_first(fail), lambda: hosts.lead(fail_oddly)):
  try:
    call()
  except Exception as fault:
    found.append(str(fault))
path = sys.argv[3]

def look():
  if me == 0:
    open(path, "w").close()
  return open(path).read()

found.append(hosts.leader_first(look))
rows = jax.NamedSharding(jax.make_mesh((2,), ("rows",)), jax.P("rows"))
array = jax.make_array_from_process_local_data(rows, np.arange(6.0), (6,))
found.append(hosts.whole({"a": array})["a"].tolist())
print("found", json.dumps(found))
"""


def test_two_processes(tmp_path):
  """Fails if a message is cut at a frame's edge, comes from the wrong process, or a fault stays where it was raised."""
  with socket.socket() as place:
    # Held until the end, so that nobody else is given the port; the coordinator may share it, as gRPC asks for that.
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    place.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{place.getsockname()[1]}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1]), "XLA_FLAGS": ""}
    both = [
      subprocess.Popen(
        [sys.executable, "-c", _TWO, address, str(i), str(tmp_path / "left")],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
      for i in range(2)
    ]
    for i, process in enumerate(both):
      out, err = process.communicate(timeout=120)
      assert process.returncode == 0, err
      found = json.loads(out.split("found ", 1)[1])
      leads, alone, source, long, frames, gathered, led, *faults, left, whole = found
      assert (leads, alone, source, long, gathered, led) == (i == 0, False, {"from": 0}, True, True, 0)
      assert len(frames) == 40 and all(frames)
      assert faults == ["raised by 0", "raised by 0", "Stays: cannot travel"] and left == ""
      assert whole == [0, 1, 2, 3, 4, 5]


def test_one_process_talks_to_itself():
  """Fails if a group of one waits for anybody, or swallows a fault."""
  assert hosts.leads() and hosts.alone()
  assert hosts.broadcast(3) == 3 and hosts.gather(3) == [3] and hosts.lead(lambda: 3) == hosts.leader_first(lambda: 3)
  np.testing.assert_array_equal(hosts.whole(np.arange(3)), np.arange(3))

  def fail():
    raise UserError("no")

  with pytest.raises(UserError, match="no"):
    hosts.lead(fail)

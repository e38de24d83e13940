"""Programs that a test runs in a process of their own, which has eight devices."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def on_eight_devices(program: str, *arguments, timeout: float = 280) -> str:
  """What the program prints; it finds the tests' own modules, and `arguments` in sys.argv[1:]."""
  flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
  path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
  command = [sys.executable, "-c", program, *(str(argument) for argument in arguments)]
  env = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)
  assert done.returncode == 0, done.stderr
  return done.stdout

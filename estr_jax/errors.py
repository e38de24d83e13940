"""The one exception for mistakes that a user can mend.

A program prints it as a single line and exits with a non-zero status; every other exception is a fault
of the code and keeps its traceback.
"""


class UserError(Exception):
  """Says in one line what is wrong, where, and what to do about it."""

  status = 2  # with which a program exits


class Killed(UserError):
  """A process of the run was ended by a signal; the status is then as a shell reports it, 128 + signal."""

  def __init__(self, line: str, signal: int):
    super().__init__(line, signal)
    self.status = 128 + signal

  def __str__(self) -> str:
    return self.args[0]

"""The one exception for mistakes that a user can mend.

A program prints it as a single line and exits with a non-zero status; every other exception is a fault
of the code and keeps its traceback.
"""


class UserError(Exception):
  """Says in one line what is wrong, where, and what to do about it."""

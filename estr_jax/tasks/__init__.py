"""Prompts, multi-turn environments and rewards. Add a task by one module and one entry here."""

from estr_jax.tasks import arithmetic, calculator, sums
from estr_jax.tasks.task import Task

TASKS: dict[str, Task] = {
  "arithmetic": arithmetic.TASK,
  "calculator": calculator.TASK,
  "sums": sums.TASK,
}

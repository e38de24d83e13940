"""What a compiled program moves: read from its optimised HLO text, with loops multiplied out."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

_BITS = {"pred": 8, "token": 0, "u1": 1, "s1": 1}
_ARRAY = re.compile(r"\b(\w+)\[([\d,<=]*)\](\{[^{}]*\})?")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.-]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{\s*$")
_CALLED = re.compile(r"\b(calls|to_apply|condition|body|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")

_OUTPUT = re.compile(r"maybe-live-out|output shape")

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
# Names for what is elsewhere, or nothing at all.
_FREE = {"parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "optimization-barrier", "after-all"}
_FREE |= {"while", "conditional", "call", "partition-id", "replica-id"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # of operand 0, in place, by the operand of this number


@dataclasses.dataclass(frozen=True)
class Instruction:
  name: str
  opcode: str
  type: str
  operands: tuple[str, ...]
  rest: str  # attributes; of a constant or a parameter, what stands in its parentheses comes first

  def called(self) -> dict[str, str]:
    return dict(_CALLED.findall(self.rest))


@dataclasses.dataclass(frozen=True)
class Computation:
  instructions: dict[str, Instruction]
  root: str

  @functools.cached_property
  def users(self) -> dict[str, list[Instruction]]:
    found = collections.defaultdict(list)
    for instruction in self.instructions.values():
      for operand in set(instruction.operands):
        found[operand].append(instruction)
    return found

  @functools.cached_property
  def parameters(self) -> dict[int, str]:
    return {int(i.rest.split(")")[0]): i.name for i in self.instructions.values() if i.opcode == "parameter"}


@dataclasses.dataclass(frozen=True)
class Collective:
  """One kind of communication along one set of mesh axes, summed over the program."""

  kind: str
  axes: tuple[str, ...]  # of the mesh, along which a group's devices differ
  bytes: float  # that a device takes in


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of HBM a device, by what they hold."""

  arguments: float
  outputs: float  # that are not written over an argument
  temporaries: float
  beside: float = 0  # other versions of the weights, which the program does not know

  @property
  def total(self) -> float:
    return self.arguments + self.outputs + self.temporaries + self.beside


@dataclasses.dataclass(frozen=True)
class Traffic:
  """Of one device, for one run of the program."""

  hbm_bytes: float  # read or written
  collectives: tuple[Collective, ...]
  unknown_loops: int  # loops whose length depends on data, which count once


def size(type_text: str, *, hbm_only: bool = False) -> float:
  """Bytes of an HLO type, tuples summed; `hbm_only` leaves out what lives in another memory, such as S(1), VMEM."""
  total = 0.0
  for dtype, dims, layout in _ARRAY.findall(type_text):
    if hbm_only and re.search(r"S\([1-9]\)", layout):
      continue
    bits = _BITS.get(dtype) or (int(found[0]) if (found := re.findall(r"\d+", dtype)) else 0)
    total += bits / 8 * math.prod(int(d) for d in re.findall(r"\d+", dims))
  return total


def parse(text: str) -> tuple[dict[str, Computation], str]:
  """Every computation by name, and the name of the entry."""
  computations: dict[str, Computation] = {}
  instructions: dict[str, Instruction] = {}
  entry, name, root = "", None, ""
  for line in text.splitlines():
    if name is None:
      if (found := _COMPUTATION.match(line)) and not line.startswith("HloModule"):
        name, instructions, root = found[2], {}, ""
        entry = name if found[1] else entry
    elif re.match(r"\}(,|\s*$)", line):  # not }}, with which a kernel's metadata of several lines ends
      computations[name], name = Computation(instructions, root), None
    elif found := _INSTRUCTION.match(line):
      one = _instruction(found[2], line[found.end() :])
      instructions[one.name] = one
      root = one.name if found[1] else root
  if not entry:
    raise ValueError("the text holds no ENTRY computation, so it is no HLO module")
  return computations, entry


def _instruction(name: str, text: str) -> Instruction:
  end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
  opening = text.index("(", end)
  closing = _closing(text, opening)
  opcode, inside = text[end:opening].strip(), text[opening + 1 : closing]
  operands = () if opcode in ("constant", "parameter") else tuple(re.findall(r"%([\w.-]+)", inside))
  rest = text[closing + 1 :]
  return Instruction(name, opcode, text[:end], operands, rest if operands else inside + ")" + rest)


def _closing(text: str, opening: int) -> int:
  depth = 0
  for i in range(opening, len(text)):
    depth += (text[i] == "(") - (text[i] == ")")
    if depth == 0:
      return i
  raise ValueError(f"unbalanced parentheses in the HLO line {text[:80]!r}")


def traffic(text: str, mesh_shape: dict[str, int]) -> Traffic:
  """Adds up what a device moves.

  Memory: every instruction reads its operands and writes its result, but for what is elsewhere than in HBM, what only
  names other values, and of an operand that is only sliced what is taken. A kernel that reads an operand repeatedly
  counts as if it did so once.
  """
  computations, entry = parse(text)
  walk = _Walk(computations, mesh_shape)
  walk.visit(entry, 1.0)
  collectives = tuple(Collective(kind, axes, count) for (kind, axes), count in sorted(walk.collectives.items()))
  return Traffic(walk.hbm, collectives, walk.unknown)


class _Walk:
  def __init__(self, computations: dict[str, Computation], mesh_shape: dict[str, int]):
    self.computations, self.mesh_shape = computations, mesh_shape
    self.hbm, self.unknown = 0.0, 0
    self.collectives: dict[tuple[str, tuple[str, ...]], float] = collections.defaultdict(float)

  def visit(self, name: str, times: float, *, memory: bool = True) -> None:
    here = self.computations[name]
    for one in here.instructions.values():
      kind = one.opcode.removesuffix("-start")
      if kind in COLLECTIVES:
        self._communicate(here, one, kind, times)
      if memory and one.opcode not in _FREE and not one.opcode.endswith("-done"):
        self.hbm += times * self._moved(here, one)
      called = one.called()
      if one.opcode == "while":
        trips = trip_count(self.computations, here, one)
        self.unknown += trips is None
        self.visit(called["body"], times * (1 if trips is None else trips), memory=memory)
      elif one.opcode == "conditional":
        branches = re.findall(r"%?([\w.-]+)", found[1]) if (found := _BRANCHES.search(one.rest)) else called.values()
        for branch in branches:  # at most one runs, and which is not known: all of them are an upper bound
          self.visit(branch, times, memory=memory)
      elif one.opcode == "call":
        self.visit(called["to_apply"], times, memory=memory)
      elif one.opcode in ("fusion", "async-start") and "calls" in called:
        self.visit(called["calls"], times, memory=memory and one.opcode == "async-start")

  def _moved(self, here: Computation, one: Instruction) -> float:
    if one.opcode == "fusion":
      inner = self.computations[one.called()["calls"]]
      reads = sum(
        self._read(inner, inner.parameters[i], here.instructions[operand].type)
        for i, operand in enumerate(one.operands)
      )
      return reads + self._written(inner, one.type)
    types = [here.instructions[operand].type for operand in one.operands if operand in here.instructions]
    if one.opcode in _SLICES:
      return size(types[0], hbm_only=True) and 2 * size(one.type)
    if one.opcode in _UPDATES:
      return size(types[0], hbm_only=True) and 2 * size(types[_UPDATES[one.opcode]])
    if one.opcode in ("copy-start", "slice-start"):  # their result names source and destination
      return sum(size(match[0], hbm_only=True) for match in _first_two(one.type))
    result = 0.0 if one.opcode.endswith("-start") else size(one.type, hbm_only=True)
    return result + sum(size(type_text, hbm_only=True) for type_text in types)

  def _read(self, inner: Computation, parameter: str, type_text: str) -> float:
    """Bytes that a fusion reads of an operand."""
    whole, users = size(type_text, hbm_only=True), inner.users[parameter]
    if not whole:
      return 0.0
    if inner.root == parameter:
      return whole  # handed on to whoever called this computation
    if users and all(user.opcode in _UPDATES and user.operands[0] == parameter for user in users):
      return 0.0  # updated in place
    taken = 0.0
    for user in users:
      if user.opcode in _SLICES and user.operands[0] == parameter:
        taken += size(user.type)
      elif user.opcode == "fusion":
        nested = self.computations[user.called()["calls"]]
        taken += sum(
          self._read(nested, nested.parameters[i], type_text) for i, o in enumerate(user.operands) if o == parameter
        )
      elif user.opcode == "bitcast":
        taken += self._read(inner, user.name, type_text)
      else:
        return whole
    return min(whole, taken)

  def _written(self, inner: Computation, type_text: str) -> float:
    """Bytes that a fusion writes; what is updated in place costs its update."""
    root = inner.instructions[inner.root]
    if root.opcode != "tuple":
      return self._result(inner, root.name, type_text)
    parts = [match.group(0) for match in _ARRAY.finditer(type_text)]
    if len(parts) != len(root.operands):
      return size(type_text, hbm_only=True)
    return sum(self._result(inner, name, part) for name, part in zip(root.operands, parts))

  def _result(self, inner: Computation, name: str, type_text: str) -> float:
    whole = size(type_text, hbm_only=True)
    one = inner.instructions[name]
    while one.opcode in ("bitcast", "convert", "copy") and one.operands[0] in inner.instructions:
      one = inner.instructions[one.operands[0]]
    if whole and one.opcode in _UPDATES:
      return size(inner.instructions[one.operands[_UPDATES[one.opcode]]].type)
    return whole

  def _communicate(self, here: Computation, one: Instruction, kind: str, times: float) -> None:
    groups = device_groups(one.rest)
    everyone = list(range(math.prod(self.mesh_shape.values())))
    # A permutation may leave some devices where they are.
    members = next((group for group in groups if len(set(group)) > 1), [0]) if groups else everyone
    peers, given = len(members), sum(size(here.instructions[name].type) for name in one.operands)
    if peers < 2:
      return
    # What a ring has to bring to each device.
    taken = {
      "all-gather": given * (peers - 1),
      "all-reduce": 2 * given * (peers - 1) / peers,
      "collective-permute": given,
    }.get(kind, given * (peers - 1) / peers)
    self.collectives[kind, axes_of(members, self.mesh_shape)] += times * taken


def _first_two(type_text: str) -> list[tuple[str]]:
  return [(match.group(0),) for match in _ARRAY.finditer(type_text)][:2]


def device_groups(attributes: str) -> list[list[int]]:
  """The groups of devices that talk to each other, by their place in the mesh; none said means all."""
  if found := re.search(r"source_target_pairs=\{(\{[\d,{} ]*\})\}", attributes):
    return [[int(a), int(b)] for a, b in re.findall(r"\{(\d+), ?(\d+)\}", found[1])]
  if found := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
    shape = _numbers(found[1])
    return _order(found[2], math.prod(shape)).reshape(shape).tolist()
  if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? ?\{([^}]*)\}", attributes):
    sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
    chosen = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found[3])
    return _groups_of_axes(sizes, chosen, _order(found[2], math.prod(sizes.values())))
  if found := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", attributes):
    return [list(map(int, group.split(","))) for group in re.findall(r"\{([\d, ]+)\}", found[1])]
  return []


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(map(int, re.findall(r"\d+", text)))


def _order(text: str | None, count: int) -> np.ndarray:
  """Devices in the order of `[2,4]T(1,0)` (count in that shape, then transpose), of a list, or of nothing."""
  if not text:
    return np.arange(count)
  if not text.startswith("["):
    return np.asarray(_numbers(text))
  shape, _, transposition = text.partition("T")
  devices = np.arange(count).reshape(_numbers(shape))
  return devices.transpose(_numbers(transposition) or None).reshape(-1)


def _groups_of_axes(
  sizes: dict[str, int], chosen: Sequence[tuple[str, str, str]], devices: np.ndarray
) -> list[list[int]]:
  """Groups along axes of a mesh, or along a part of one: (axis, size of what is more major in it, size of the part)."""
  shape: list[int] = []
  moving = []
  parts = {axis: (int(before or 1), int(size or sizes[axis])) for axis, before, size in chosen}
  for axis, whole in sizes.items():
    before, size = parts.get(axis, (whole, 1))
    moving.append(len(shape) + 1)
    shape += [before, size, whole // (before * size)]
  devices = np.moveaxis(devices.reshape(shape), moving, range(-len(moving), 0))
  return devices.reshape(-1, math.prod(size for _, size in parts.values())).tolist()


def axes_of(devices: Sequence[int], mesh_shape: dict[str, int]) -> tuple[str, ...]:
  """The axes of the mesh along which some devices differ."""
  places = np.stack(np.unravel_index(np.asarray(devices), tuple(mesh_shape.values())))
  return tuple(axis for axis, row in zip(mesh_shape, places) if (row != row[0]).any())


def trip_count(computations: dict[str, Computation], here: Computation, loop: Instruction) -> int | None:
  """How often a while loop runs: what the compiler noted, or `counter < constant` as the condition has it."""
  if found := re.search(r'known_trip_count[^}]*?"?n"?:"?(\d+)', loop.rest):
    return int(found[1])
  condition = computations[loop.called()["condition"]]
  root = condition.instructions[condition.root]
  where = condition
  bound: dict[str, Instruction] = {}
  if root.opcode == "fusion":
    where = computations[root.called()["calls"]]
    bound = {name: condition.instructions[root.operands[i]] for i, name in where.parameters.items()}
    root = where.instructions[where.root]
  if root.opcode != "compare" or "direction=LT" not in root.rest:
    return None
  counter, limit = (bound.get(name) or where.instructions[name] for name in root.operands)
  ends = _constant(limit, here, loop)
  starts = _constant(counter, here, loop)
  if ends is None or counter.opcode != "get-tuple-element":
    return None
  return max(0, -(-(ends - (starts or 0)) // _step(computations, loop, counter)))


def _constant(one: Instruction, here: Computation, loop: Instruction) -> int | None:
  """The value of a constant, or of an element of the loop's state that starts as one."""
  if one.opcode == "get-tuple-element":
    state = here.instructions.get(loop.operands[0])
    if state is None or state.opcode != "tuple":
      return None
    one = here.instructions[state.operands[_index(one)]]
    while one.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
      one = here.instructions[one.operands[0]]
  found = re.match(r"(-?\d+)\)", one.rest) if one.opcode == "constant" else None
  return int(found[1]) if found else None


def _index(element: Instruction) -> int:
  found = re.search(r"index=(\d+)", element.rest)
  if found is None:
    raise ValueError(f"{element.name} takes an element of a tuple and does not say which: {element.rest[:80]!r}")
  return int(found[1])


def _step(computations: dict[str, Computation], loop: Instruction, counter: Instruction) -> int:
  """By how much the body moves the counter up; 1 where that cannot be read."""
  body = computations[loop.called()["body"]]
  root = body.instructions[body.root]
  if root.opcode != "tuple":
    return 1
  moved = body.instructions[root.operands[_index(counter)]]
  steps = (
    [s for name in moved.operands if (s := _constant_here(body, name)) is not None] if moved.opcode == "add" else []
  )
  return steps[0] if steps and steps[0] > 0 else 1


def _constant_here(body: Computation, name: str) -> int | None:
  one = body.instructions.get(name)
  found = re.match(r"(-?\d+)\)", one.rest) if one is not None and one.opcode == "constant" else None
  return int(found[1]) if found else None


def memory(text: str) -> Memory:
  """The HBM of a TPU, from the buffer assignment that its compiler writes down.

  Kept apart from `memory_analysis()` of a compiled program, which counts arguments a second time as temporaries.
  """
  sizes: collections.Counter[str] = collections.Counter()
  for size_text, what in re.findall(r"^allocation \d+: size (\d+), (.*)$", text, re.MULTILINE):
    if not re.match(r"color [1-9]", what):  # of another memory
      kind = "arguments" if what.startswith("parameter") else "outputs" if _OUTPUT.match(what) else "temporaries"
      sizes[kind] += int(size_text)
  if not sizes:
    raise ValueError("the text holds no allocation, so it is no buffer assignment")
  return Memory(**{kind: sizes[kind] for kind in ("arguments", "outputs", "temporaries")})


def loops(text: str) -> Iterator[tuple[str, int | None]]:
  """(name, trips) of every while loop, for a look at what was understood."""
  computations, _ = parse(text)
  for here in computations.values():
    for one in here.instructions.values():
      if one.opcode == "while":
        yield one.name, trip_count(computations, here, one)

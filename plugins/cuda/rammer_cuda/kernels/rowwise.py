"""The ``rows`` family: softmax, normalisations and the like, where a few warps hold a whole row in registers.

It suits operators whose anchor is a row of values along the last axis, and whose Computes are maps over the row, reductions
along it, and scalars of it. ``lanes`` threads share a row, each keeping every ``lanes``-th value of each Compute in a
register; reductions go through warp shuffles, and through shared memory where a row has several warps. So nothing is
read twice, and the generic kernel's barriers and scratch memory are not needed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace

from rammer.codegen import operations as ops
from rammer.codegen.bounds import tidy
from rammer.codegen.dialects import CUDA
from rammer.codegen.operations import Val
from rammer.codegen.scalar import Block
from rammer.codegen.task import Argument, Unsuited
from rammer.codegen.text import Text, digits
from rammer.codegen.unit import Place, Unit
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.device import VDevice
from rammer.ir.expr import Expr, Load, Ref, integer
from rammer.ir.operator import ROperator

from rammer_cuda.kernels.task import TaskKernel

#: Threads that may share a row, values that one of them may keep, and threads of a block.
LANES = (32, 64, 128, 256)
MOST_VALUES = 24
THREADS = 256
#: Cycles of a launch with its first round of loads, of one value of one Compute, and of a reduction among the threads of
#: a warp and of several, and of starting one more block on an SM.
START, VALUE, SHUFFLE, EXCHANGE, BLOCK = 2800, 8.0, 200, 120, 60


def row_candidates(operator: ROperator, binding: Binding, device: VDevice) -> list[tuple[float, ROperator]]:
    """(predicted seconds with the launch, tiled copy), best first; [] where the family does not suit."""
    try:
        _check(operator, binding)
    except Unsuited:
        return []
    shape, found = operator.anchor.shape, []
    for lanes in LANES:
        if not _values(shape[-1], lanes) <= MOST_VALUES or lanes > 32 * max(1, shape[-1] // 64):
            continue
        for rows in {1, THREADS // lanes // 2, THREADS // lanes}:
            if rows >= 1 and (rows == 1 or (len(shape) > 1 and rows <= shape[-2])):
                tile = (*[1] * (len(shape) - 2), *([rows] if len(shape) > 1 else []), shape[-1])
                tiled = replace(operator, tile=tile, family="rows", config=(("lanes", lanes),))
                found.append((row_seconds(tiled, device) + device.launch, tiled))
    return sorted(found, key=lambda f: (f[0], f[1].tile))


def row_seconds(operator: ROperator, device: VDevice) -> float:
    """Predicted seconds of all tasks, without the launch."""
    lanes, width = dict(operator.config)["lanes"], operator.anchor.shape[-1]
    values = _values(width, lanes)
    warps = -(-math.prod(operator.tile[:-1]) * lanes // 32)
    per_sm = -(-operator.task_count // device.veus)
    reductions = sum(bool(c.reduce) for c in operator.computes)
    work = VALUE * values * sum(1 + ex.flops(c.body) for c in operator.computes if c.reduce or c.shape == operator.anchor.shape)
    cycles = START + reductions * (SHUFFLE + (EXCHANGE if lanes > 32 else 0)) + work * max(1.0, per_sm * warps / 4 / 4)
    return (cycles + BLOCK * per_sm) / (device.flops / 256.0)


def rows(operator: ROperator, binding: Binding) -> TaskKernel:
    """The kernel of a tiled operator. Unsuited where it is no chain over whole rows."""
    _check(operator, binding)
    if operator.tile[-1] != operator.anchor.shape[-1] or any(t > 1 for t in operator.tile[:-2]):
        raise Unsuited("a task is some whole rows, neighbours along the last axis but one")
    return _Rows(operator, binding).kernel()


def _values(width: int, lanes: int) -> int:
    return -(-width // lanes)


def _check(operator: ROperator, binding: Binding) -> None:
    """Raise Unsuited unless every Compute is a map over rows, a reduction along them or a value a row."""
    shape = operator.anchor.shape
    if operator.anchor.reduce or not shape or 0 in shape or not any(c.reduce for c in operator.computes):
        raise Unsuited("no reduction along rows that a map over them follows")
    full: dict[str, bool] = {}
    for c in operator.computes:
        along = c.shape == shape and not c.reduce
        kept = c.shape == shape[:-1] and [r.extent for r in c.reduce] in ([], [shape[-1]])
        if not (along or kept) or ops.compute_type(c.dtype) not in ("float32", "float64", "int32", "int64"):
            raise Unsuited(f"{c.name} is neither a row nor a value of one")
        names = [a.name for a in (*c.axes, *c.reduce)]
        for load in c.loads:
            if load.tensor in full:
                want = tuple(map(Ref, names if full[load.tensor] else names[: len(shape) - 1]))
                if load.fill is not None or load.indices != want:
                    raise Unsuited(f"{c.name} does not read {load} at its own place")
        full[c.name] = along
    if any(n in full and not full[n] for n in operator.outputs):
        raise Unsuited("a value a row is written")


class _Rows:
    def __init__(self, operator: ROperator, binding: Binding) -> None:
        self.operator, self.binding = operator, binding
        self.shape = operator.anchor.shape
        self.lanes = dict(operator.config)["lanes"]
        self.count = math.prod(operator.tile[:-1])
        self.values = _values(self.shape[-1], self.lanes)
        self.arguments = [*(Argument(t, False) for t in operator.inputs), *(Argument(t, True) for t in operator.outputs)]
        self.text = Text()
        ranges = {f"x{d}": (0, n - 1) for d, n in enumerate(self.shape[:-1])}
        ranges |= {f"e{i}": (0, self.shape[-1] - 1) for i in range(self.values)}
        self.unit = Unit(CUDA, binding.types, {}, {a.tensor: self._place(k, a) for k, a in enumerate(self.arguments)}, ranges)
        self.block = Block(self.unit)
        self.kept = tuple(Ref(f"x{d}") for d in range(len(self.shape) - 1))

    def _place(self, number: int, argument: Argument) -> Place:
        kind = self.binding.types[argument.tensor]
        strides = self.binding.storages[argument.tensor].strides
        return Place(f"p{number}", kind.dtype, strides, (integer(0),) * len(kind.shape), kind.shape)

    def kernel(self) -> TaskKernel:
        """The finished kernel."""
        self._origins()
        for number, c in enumerate(self.operator.computes):
            if c.reduce:
                self._reduce(number, c)
            elif c.shape == self.shape:
                for i in range(self.values):
                    self._define(c, (*self.kept, Ref(f"e{i}")), {c.axes[-1].name: Ref(f"e{i}")})
            else:
                self._define(c, self.kept, {})
        self._store()
        self.text.all(self.block.lines)
        threads = self.count * self.lanes
        names = ", ".join(
            f"{'' if a.written else 'const '}{CUDA.types[self.binding.types[a.tensor].dtype]} *__restrict__ p{k}"
            for k, a in enumerate(self.arguments)
        )
        head = f'extern "C" __global__ void __launch_bounds__({threads}) @NAME@({names}, const int *order, int first)'
        text = "".join(self.unit.tables.values()) + f"{head} {{\n{self.text}}}\n"
        name = "r_" + hashlib.sha256(text.encode()).hexdigest()[:20]
        shared = self._parts() * 8 * sum(bool(c.reduce) for c in self.operator.computes)
        return TaskKernel(name, text.replace("@NAME@", name), tuple(self.arguments), threads, shared)

    def _parts(self) -> int:
        """Warps of the block whose sums are exchanged through shared memory."""
        return self.count * self.lanes // 32 if self.lanes > 32 else 0

    def _origins(self) -> None:
        text, operator = self.text, self.operator
        text.line("const int tid = (int)threadIdx.x;")
        text.line("const int task = order ? order[blockIdx.x] : first + (int)blockIdx.x;")
        text.line(f"const int lane = tid % {self.lanes}, row = tid / {self.lanes};")
        places = digits("task", operator.grid)
        rows = len(self.shape) - 2
        for d, place in enumerate(places[:-1]):
            last = self.shape[d] - 1
            inside = f"min({place} * {operator.tile[d]} + row, {last})" if d == rows and self.count > 1 else place
            text.line(f"const int x{d} = {inside if operator.grid[d] > 1 or (self.count > 1 and d == rows) else '0'};")
        for i in range(self.values):
            at = f"lane + {i * self.lanes}" if i else "lane"
            tail = (i + 1) * self.lanes > self.shape[-1]
            text.line(f"const int e{i} = {f'min({at}, {self.shape[-1] - 1})' if tail else at};")
        valid = f"lane + {(self.values - 1) * self.lanes} < {self.shape[-1]}"
        text.line(f"const bool whole = {valid if self.shape[-1] % self.lanes else 'true'};")
        if rows >= 0 and self.shape[rows] % self.count:
            text.line(f"const bool mine = {places[rows]} * {self.count} + row < {self.shape[rows]};")
        else:
            text.line("const bool mine = true;")
        text.line("rm_after();")

    def _axes(self, c: Compute) -> dict[str, Expr]:
        return {a.name: Ref(f"x{d}") for d, a in enumerate(c.axes[: len(self.shape) - 1])}

    def _define(self, c: Compute, point: tuple[Expr, ...], last: Mapping[str, Expr]) -> None:
        """One value of a map, in a register."""
        value = self.block.value(ex.substitute(c.body, {**self._axes(c), **last}))
        self._keep(c, point, ops.convert(CUDA, value, c.dtype))

    def _keep(self, c: Compute, point: tuple[Expr, ...], value: Val) -> None:
        self.block.memo[Load(c.name, tuple(map(tidy, point)))] = self.block.let(value)

    def _reduce(self, number: int, c: Compute) -> None:
        """A reduction along the row: each thread's own values, then shuffles, then the row's other warps."""
        block, axes = self.block, self._axes(c)
        total = block.accumulator(c, axes)
        for i in range(self.values):
            value = block.value(ex.substitute(c.body, {**axes, c.reduce[0].name: Ref(f"e{i}")}))
            tail = (i + 1) * self.lanes > self.shape[-1]
            statement = block.combine(c, total.text, value)
            block.line(f"if (whole) {{ {statement} }}" if tail else statement)
        kind = ops.ctype(CUDA, ops.compute_type(c.dtype))
        block.line("#pragma unroll")
        other = Val("other", c.dtype, atom=True)
        block.line(f"for (int s = 16; s > 0; s /= 2) {{ const {kind} other = __shfl_xor_sync(0xffffffffu, {total.text}, s); "
                   f"{block.combine(c, total.text, other)} }}")  # fmt: skip
        if self.lanes > 32:
            self._exchange(number, c, total, kind)
        block.memo[Load(c.name, self.kept)] = total

    def _exchange(self, number: int, c: Compute, total: Val, kind: str) -> None:
        """Combine the warps of a row, in the same order in each thread."""
        block, warps = self.block, self.lanes // 32
        block.line(f"__shared__ {kind} part{number}[{self._parts()}];")
        block.line(f"if (tid % 32 == 0) part{number}[tid / 32] = {total.text};")
        block.line("__syncthreads();")
        block.line(f"{total.text} = part{number}[row * {warps}];")
        for w in range(1, warps):
            block.line(block.combine(c, total.text, Val(f"part{number}[row * {warps} + {w}]", c.dtype)))

    def _store(self) -> None:
        block = self.block
        for name in self.operator.outputs:
            place = self.unit.places[name]
            for i in range(self.values):
                point = (*self.kept, Ref(f"e{i}"))
                value = ops.convert(CUDA, block.load(Load(name, point)), place.dtype)
                tail = (i + 1) * self.lanes > self.shape[-1]
                put = ops.put(CUDA, place.pointer, block.address(place, point), place.dtype, value.text)
                block.line(f"if (mine{' && whole' if tail else ''}) {put}")

"""The ``cell`` family: products of a few rows with weights, and maps over their results. A recurrent cell is one.

A task has so few rows that its time is that of fetching weights. Every thread therefore keeps its share of them in
registers (``hold``), which depends on nothing computed and so may come before the task's waits; where one block runs the
same task again and again, as a persistent kernel does for the steps of a layer, they are fetched once. ``step`` then
stages the rows' vectors in shared memory, multiplies, adds up over the lanes of each warp in a fixed order, leaves the
sums in shared memory and evaluates the maps, by the core's emitter, one result a thread.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rammer.codegen.contraction import address
from rammer.codegen.dialects import CUDA
from rammer.codegen.scalar import Block
from rammer.codegen.task import Argument, Array, Packing, Unsuited, packing_key, padded
from rammer.codegen.text import Text, digits, total
from rammer.codegen.unit import Place, Unit
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.compute import Compute, contraction_operands
from rammer.ir.device import VDevice
from rammer.ir.evaluate import evaluate
from rammer.ir.expr import Expr, Interval, Load, Ref, integer
from rammer.ir.operator import ROperator

from rammer_cuda.kernels.task import TaskKernel

#: Threads of a block: with 512 a thread may have 128 registers (65,536 an SM; CUDA C++ programming guide).
THREADS, WARPS = 512, 16
#: Weights that a thread can hold beside what it computes with, in registers.
MOST_HELD = 88
#: Rows that share the weights.
MOST_ROWS = 8

#: ``rm_fold`` adds up N values over LANES lanes: lanes trade halves until each has one value, whose number it returns, or
#: -1 where another lane has it. N + log2(LANES) exchanges instead of N * log2(LANES), always in the same order.
PREAMBLE = """
#ifndef RM_CELL
#define RM_CELL
template <int N, int OFFSET> struct rm_folder {
  static __device__ __forceinline__ int fold(float *v, int lane, int first, int limit) {
    constexpr int H = (N + 1) / 2;
    const bool upper = lane & OFFSET;
#pragma unroll
    for (int i = 0; i < H; ++i) {
      const float high = i + H < N ? v[i + H] : 0.0f;
      const float give = N == 1 ? v[0] : upper ? v[i] : high;
      const float mine = N == 1 ? v[0] : upper ? high : v[i];
      v[i] = mine + __shfl_xor_sync(0xffffffff, give, OFFSET);
    }
    if (N > 1) { first += upper ? H : 0; limit = upper ? limit - H : min(limit, H); }
    else if (upper) limit = 0;
    return rm_folder<H, OFFSET / 2>::fold(v, lane, first, limit);
  }
};
template <int N> struct rm_folder<N, 0> {
  static __device__ __forceinline__ int fold(float *v, int lane, int first, int limit) {
    static_assert(N == 1, "more values than lanes");
    return limit > 0 ? first : -1;
  }
};
template <int N, int LANES> __device__ __forceinline__ int rm_fold(float *v, int lane) {
  return rm_folder<N, LANES / 2>::fold(v, lane, 0, N);
}
#endif
"""


@dataclass(frozen=True, slots=True)
class CellKernel(TaskKernel):
    """A kernel in two parts: ``{name}_hold`` fetches a task's weights, ``held`` floats a thread, into registers;
    ``{name}_step`` computes the task with them. ``weights`` are the positions of the arguments that ``hold`` reads."""

    name: str = ""
    held: int = 0
    weights: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """One product: ``weights`` over ``depth`` positions of axis ``along`` times a vector a row, whose element address is
    ``constant + sum(steps[axis] * axis)``."""

    compute: Compute
    weights: Load
    vector: Load
    along: str
    depth: int
    steps: dict[str, int]
    constant: int


def parts_of(operator: ROperator, binding: Binding) -> tuple[Part, ...]:
    """The products of a cell; Unsuited says why the operator is none."""
    if 0 in operator.anchor.shape or any(binding.types[n].dtype != "float32" for n in operator.inputs):
        raise Unsuited("not float32, or empty")
    products = [c for c in operator.computes if c.reduce]
    parts = tuple(_part(c, binding) for c in products)
    if not parts or any(c.dtype != "float32" for c in operator.computes):
        raise Unsuited("no product in float32")
    if any(p.compute.axes != parts[0].compute.axes or p.depth != parts[0].depth for p in parts):
        raise Unsuited("products of different shapes")
    lanes = 32 // len(parts)
    if len(parts) not in (1, 2, 4) or parts[0].depth % (4 * lanes):
        raise Unsuited(f"{len(parts)} products of depth {parts[0].depth}")
    return parts


def _part(c: Compute, binding: Binding) -> Part:
    operands = contraction_operands(c)
    if operands is None or len(c.reduce) != 1:
        raise Unsuited(f"{c.name} is no product of two tensors along one axis")
    along, axes = c.reduce[0], {a.name: a.extent for a in c.axes}
    for weights, vector in (operands, operands[::-1]):
        rows = math.prod(n for a, n in axes.items() if a not in ex.axes_of(weights))
        columns = {a for a in axes if a in ex.axes_of(weights)}
        if weights.tensor not in binding.constants or rows > MOST_ROWS or columns & ex.axes_of(vector):
            continue
        steps, constant = address(vector, binding.storages[vector.tensor].strides)
        if weights.fill is None and vector.fill is None and steps.get(along.name) == 1:
            return Part(c, weights, vector, along.name, along.extent, steps, constant)
    raise Unsuited(f"{c.name} has no constant weights for at most {MOST_ROWS} rows")


def cell(operator: ROperator, binding: Binding) -> CellKernel:
    """The kernel of a tiled cell. Unsuited where the operator is none or a thread could not hold its weights."""
    return _Cell(operator, binding).kernel()


class _Cell:
    def __init__(self, operator: ROperator, binding: Binding) -> None:
        self.operator, self.binding = operator, binding
        self.parts = parts_of(operator, binding)
        first = self.parts[0]
        self.box = self._box(first.compute)
        columns = [d for d, a in enumerate(first.compute.axes) if a.name in ex.axes_of(first.weights)]
        self.row_axes = [d for d in range(len(self.box)) if d not in columns]
        self.column_axes = columns
        self.rows = math.prod(self.box[d][1] for d in self.row_axes)
        self.columns = math.prod(self.box[d][1] for d in columns)
        self.lanes = 32 // len(self.parts)
        self.each = -(-self.columns // WARPS)
        self.share = first.depth // self.lanes
        if self.each * self.share > MOST_HELD:
            raise Unsuited(f"{self.each * self.share} weights a thread")
        if any(d in columns and d != columns[-1] and n < first.compute.axes[d].extent for d, (_, n) in enumerate(self.box)):
            raise Unsuited("tiles cut more than the last axis of the weights")
        self.arguments = self._arguments()
        self.staged = len(self.parts) * self.rows * first.depth
        self.shared = 4 * (self.staged + len(self.parts) * self.rows * self.columns)

    def _box(self, c: Compute) -> list[tuple[Expr, int]]:
        """(first index, extent) of each axis of the products' part of a task: all of it, or an axis of the tile."""
        operator, result = self.operator, list[tuple[Expr, int]]()
        tasks = (0, operator.task_count - 1)
        own = [operator.task_box(t) for t in tasks]
        boxes = [operator.boxes(b, self.binding.types)[c.name] for b in own]
        for d, axis in enumerate(c.axes):
            if all(b[d] == (0, axis.extent) for b in boxes):
                result.append((integer(0), axis.extent))
                continue
            same = [k for k in range(len(own[0])) if all(o[k] == b[d] for o, b in zip(own, boxes, strict=True))]
            if not same:
                raise Unsuited(f"axis {axis.name} of {c.name} follows no axis of the tile")
            result.append((Ref(f"o{same[0]}"), operator.tile[same[0]]))
        return result

    def _arguments(self) -> list[Argument]:
        """Packed weights, then every tensor read, then outputs."""
        inside = {c.name for c in self.operator.computes}
        maps = [c for c in self.operator.computes if not c.reduce]
        read = dict.fromkeys([p.vector.tensor for p in self.parts] + [t for c in maps for t in c.reads if t not in inside])
        return [
            *(Argument(p.weights.tensor, False, self._packing(p)) for p in self.parts),
            *(Argument(t, False) for t in read), *(Argument(t, True) for t in self.operator.outputs),
        ]  # fmt: skip

    def _packing(self, part: Part) -> Packing:
        """Weights as ``[task, warp, column of the warp, 4 * step, lane, 4]``: what a lane loads together is together."""
        axes = [part.compute.axes[d] for d in self.column_axes]
        tile = self.box[self.column_axes[-1]][1]
        tiles = -(-axes[-1].extent // tile)
        along = part.compute.reduce[0]
        size = tiles * WARPS * self.each * part.depth

        def make(values: Array) -> Array:
            full = evaluate(Compute("packed", "float32", (*axes, along), part.weights), {part.weights.tensor: values})
            full = padded(full.reshape(-1, axes[-1].extent, along.extent), 1, tiles * tile)
            tasks = np.moveaxis(full.reshape(-1, tiles, tile, along.extent), 1, 0).reshape(tiles, -1, along.extent)
            tasks = padded(tasks, 1, WARPS * self.each)
            lanes = tasks.reshape(tiles, WARPS, self.each, self.share // 4, self.lanes, 4)
            return np.ascontiguousarray(lanes, dtype=np.float32)

        return Packing(packing_key("cell", str(part.weights), axes, along, tile, self.each, self.lanes), size, make)

    def kernel(self) -> CellKernel:
        """The finished kernel."""
        hold, (tables, step) = self._hold(), self._step()
        count = len(self.parts)
        pointers = [f"p{k}" for k in range(len(self.arguments))]
        kinds = ["" if a.written else "const " for a in self.arguments]
        parameters = ", ".join(f"{kind}float *{p}" for kind, p in zip(kinds, pointers, strict=True))
        held = f"float (&w)[{self.each * self.share}]"
        body = (
            f"__device__ __forceinline__ void @NAME@_hold({', '.join(f'const float *p{k}' for k in range(count))}, "
            f"int task, {held}) {{\n{hold}}}\n"
            f"__device__ __forceinline__ void @NAME@_step({parameters}, const {held}, float *scratch, int task) {{\n{step}}}\n"
            f'extern "C" __global__ void __launch_bounds__({THREADS}) k_@NAME@({parameters}, const int *order, int first) {{\n'
            f"  extern __shared__ __align__(16) float scratch[];\n"
            f"  const int task = order ? order[blockIdx.x] : first + (int)blockIdx.x;\n"
            f"  float w[{self.each * self.share}];\n  @NAME@_hold({', '.join(pointers[:count])}, task, w);\n"
            f"  rm_after();\n  @NAME@_step({', '.join(pointers)}, w, scratch, task);\n}}\n"
        )
        name = "c_" + hashlib.sha256((tables + PREAMBLE + body).encode()).hexdigest()[:20]
        return CellKernel(f"k_{name}", PREAMBLE + tables + body.replace("@NAME@", name), tuple(self.arguments), THREADS,
                          self.shared, self.shared, 1, name, self.each * self.share, tuple(range(count)))  # fmt: skip

    def _hold(self) -> Text:
        text = Text()
        text.line("const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;")
        grid = self.operator.grid
        tiled = [k for k, n in enumerate(grid) if n > 1 and self.box[self.column_axes[-1]][0] == Ref(f"o{k}")]
        tile = digits("task", grid)[tiled[0]] if tiled else "0"
        parts = " : ".join(f"lane / {self.lanes} == {k} ? p{k}" for k in range(len(self.parts) - 1))
        base = f"({parts} : p{len(self.parts) - 1})" if parts else "p0"
        per_column = self.share // 4 * self.lanes * 4
        first = f"({tile} * {WARPS} + warp) * {self.each * per_column} + lane % {self.lanes} * 4"
        text.line(f"const float *const from = {base} + {first};")
        text.all(["#pragma unroll", f"for (int i = 0; i < {self.each * self.share // 4}; ++i)"])
        text.line(f"  *(float4 *)(w + 4 * i) = __ldg((const float4 *)(from + i * {self.lanes * 4}));")
        return text

    def _step(self) -> tuple[str, Text]:
        text, grid = Text(), self.operator.grid
        text.line("const int tid = (int)threadIdx.x, lane = tid % 32, warp = tid / 32;")
        for d, (place, tile, count) in enumerate(zip(digits("task", grid), self.operator.tile, grid, strict=True)):
            origin = place if tile == 1 else f"{place} * {tile}"
            text.line(f"const int o{d} = {origin if count > 1 else '0'};")
        text.line(f"float *const vectors = scratch; float *const sums = scratch + {self.staged};")
        self._stage(text)
        self._multiply(text)
        return self._maps(text), text

    @cached_property
    def _row_digits(self) -> list[str]:
        return digits("r", [self.box[d][1] for d in self.row_axes])

    def _stage(self, text: Text) -> None:
        """Vectors of all rows and products to shared memory, past the first-level cache: other SMs wrote them."""
        depth = self.parts[0].depth
        for number, part in enumerate(self.parts):
            wide = self._wide(part)
            unit, kind = (4, "float4") if wide else (1, "float")
            pointer = self._pointer(part.vector.tensor)
            count = self.rows * depth // unit
            first = number * count % THREADS  # another warp for another product
            text.line(f"for (int e = (tid + {THREADS - first}) % {THREADS}; e < {count}; e += {THREADS}) {{")
            text.line(f"const int r = e / {depth // unit}, k = e % {depth // unit} * {unit};")
            axes = self.parts[number].compute.axes
            terms = [("k", 1)]
            for d, place in zip(self.row_axes, self._row_digits, strict=True):
                terms.append((f"({self.box[d][0]} + {place})", part.steps.get(axes[d].name, 0)))
            from_ = f"(const {kind} *)({pointer} + {total(terms, part.constant)})"
            text.line(f"*({kind} *)(vectors + {number * self.rows * depth} + e * {unit}) = __ldcg({from_});")
            text.line("}")
        text.line("__syncthreads();")

    def _wide(self, part: Part) -> bool:
        """Whether every row's vector starts at a multiple of 16 bytes."""
        steps = [s for a, s in part.steps.items() if a != part.along]
        offset = self.binding.storages[part.vector.tensor].offset + part.constant
        return all(n % 4 == 0 for n in (offset, *steps))

    def _multiply(self, text: Text) -> None:
        """This warp's columns times every row; the sums to shared memory as ``[product, row, column]``."""
        depth, values = self.parts[0].depth, self.each * self.rows
        text.line(f"float sum[{values}] = {{}};")
        text.line(f"const float *const mine = vectors + lane / {self.lanes} * {self.rows * depth} + lane % {self.lanes} * 4;")
        text.all(["#pragma unroll", f"for (int r = 0; r < {self.rows}; ++r)", "#pragma unroll",
                  f"for (int i = 0; i < {self.share // 4}; ++i) {{",
                  f"const float4 x = *(const float4 *)(mine + r * {depth} + i * {self.lanes * 4});",
                  "#pragma unroll", f"for (int c = 0; c < {self.each}; ++c) {{",
                  f"const float *const y = w + (c * {self.share // 4} + i) * 4;",
                  f"float &s = sum[r * {self.each} + c];",
                  "s = fmaf(x.x, y[0], s); s = fmaf(x.y, y[1], s); s = fmaf(x.z, y[2], s); s = fmaf(x.w, y[3], s);",
                  "}", "}"])  # fmt: skip
        # More values than lanes are folded some at a time.
        for first in range(0, values, self.lanes):
            count = min(self.lanes, values - first)
            text.line("{")
            text.line(f"const int at = rm_fold<{count}, {self.lanes}>(sum + {first}, lane);")
            text.line(f"const int r = (at + {first}) / {self.each}, c = warp * {self.each} + (at + {first}) % {self.each};")
            text.line(f"if (at >= 0 && c < {self.columns}) "
                      f"sums[(lane / {self.lanes} * {self.rows} + r) * {self.columns} + c] = sum[{first}];")  # fmt: skip
            text.line("}")
        text.line("__syncthreads();")

    def _pointer(self, tensor: str) -> str:
        """The parameter of an unpacked tensor."""
        return next(f"p{k}" for k, a in enumerate(self.arguments) if a.tensor == tensor and a.packing is None)

    def _maps(self, text: Text) -> str:
        """Every output element by one thread; returns the tables that the maps need."""
        operator, count = self.operator, math.prod(self.operator.tile)
        text.line(f"for (int e = tid; e < {count}; e += {THREADS}) {{")
        tests = []
        for d, (place, axis) in enumerate(zip(digits("e", operator.tile), operator.anchor.axes, strict=True)):
            text.line(f"const int x{d} = o{d} + {place};")
            tests += [f"x{d} < {axis.extent}"] if axis.extent % operator.tile[d] else []
        text.line(f"if ({' && '.join(tests) or 'true'}) {{")
        places = {t: self._global(t) for t in (*(a.tensor for a in self.arguments if a.packing is None),)}
        for number, part in enumerate(self.parts):
            places[part.compute.name] = self._tile(number, part)
        ranges: dict[str, Interval] = {f"x{d}": (0, a.extent - 1) for d, a in enumerate(operator.anchor.axes)}
        ranges |= {f"o{d}": (0, a.extent - 1) for d, a in enumerate(operator.anchor.axes)}
        inlined = {c.name: c for c in operator.computes if not c.reduce}
        unit = Unit(CUDA, self.binding.types, inlined, places, ranges)
        block, point = Block(unit), tuple(Ref(f"x{d}") for d in range(len(operator.anchor.axes)))
        for name in operator.outputs:
            block.store(places[name], point, block.load(Load(name, point)), ())
        text.all(block.lines)
        text.all(["}", "}"])
        return "".join(unit.tables.values())

    def _global(self, tensor: str) -> Place:
        kind = self.binding.types[tensor]
        return Place(self._pointer(tensor), kind.dtype, self.binding.storages[tensor].strides,
                     (integer(0),) * len(kind.shape), kind.shape)  # fmt: skip

    def _tile(self, number: int, part: Part) -> Place:
        """A product's sums as the maps see them: a tile in shared memory."""
        strides, below = [0] * len(self.box), 1
        for d in (*reversed(self.column_axes), *reversed(self.row_axes)):
            strides[d] = below
            below *= self.box[d][1]
        return Place(f"(sums + {number * self.rows * self.columns})", "float32", tuple(strides),
                     tuple(low for low, _ in self.box), tuple(n for _, n in self.box))  # fmt: skip


#: Seconds of a task besides its arithmetic: staging, two barriers and the maps, about 1,500 cycles (measured on an H200).
FIXED = 0.8e-6


def cell_seconds(operator: ROperator, binding: Binding, device: VDevice) -> float:
    """Predicted seconds of one task that holds its weights already."""
    c = _Cell(operator, binding)
    clock = device.flops / 256.0
    multiplies = c.each * c.share * c.rows * WARPS / 4  # issue slots of one of an SM's four schedulers
    exchanges = (c.each * c.rows + 5) * WARPS  # one warp's exchange a cycle
    return FIXED + (multiplies + exchanges) / clock


def cell_candidates(operator: ROperator, binding: Binding, device: VDevice) -> list[ROperator]:
    """Tiled copies whose weights a thread can hold, by even parts of the last axis: the fastest with the device to
    itself, the one that takes the least vEU time, then the others."""
    try:
        parts_of(operator, binding)
    except Unsuited:
        return []
    shape, found = operator.anchor.shape, list[tuple[float, float, ROperator]]()
    for width in sorted({-(-shape[-1] // n) for n in range(1, shape[-1] + 1)}):
        tiled = replace(operator, tile=(*shape[:-1], width), family="cell", config=())
        try:
            seconds = cell_seconds(tiled, binding, device)
        except Unsuited:
            continue
        tasks = tiled.task_count
        found.append((seconds * -(-tasks // device.veus), seconds * tasks, tiled))
    found.sort(key=lambda f: (f[0], f[1]))
    lean = sorted(found[1:], key=lambda f: f[1])[:1]
    return [o for _, _, o in [*found[:1], *lean, *(f for f in found[1:] if f not in lean)]]

"""The text of ``cell`` kernels: load weights into registers (``hold``), then run a task with them (``step``).

``step`` stages the rows' vectors in shared memory, multiplies, and adds over the lanes of each warp in a fixed order. It stores
the sums in shared memory and evaluates the maps with the core's emitter, one result a thread. Constants that the maps read are
held with the weights. Their other operands are fetched before the wait for the vectors.

In a persistent kernel vectors may be sent as *words*, values that are also flags: one read returns a value or reports that it has
not arrived, without a counter. A kernel with words uses the run-time functions of ``persistent.text``.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from rammer.codegen import (
    Argument,
    Block,
    FunctionContext,
    Place,
    Text,
    Val,
    convert_value,
    format_sum,
    hash_of,
    split_digits,
)
from rammer.device.manifest import Binding
from rammer.ir.expr import Const, Expr, Interval, Load, Ref
from rammer.ir.operator import ROperator
from rammer.ir.program import Storage

from rammer_cuda.cell.recognise import THREADS, WARPS, Cell, Part, cell_candidates, cell_of, cell_seconds, vectors_of
from rammer_cuda.device import device_source
from rammer_cuda.dialect import CUDA
from rammer_cuda.family import Family, Held
from rammer_cuda.gpu import Gpu
from rammer_cuda.kernels.task import HeldKernel, origin_lines, place_of
from rammer_cuda.rows.gemv import GEMV

PREAMBLE = device_source("halves", "cell")


def word_span(storage: Storage) -> int:
    """Return the words of one run's set for a tensor: its storage's span, in whole 16 bytes.

    Odd and even runs use separate sets."""
    low, high = storage.span()
    return -(-(high - low) // 4) * 4


def cell_kernel(
    operator: ROperator, binding: Binding, words: Collection[str] = (), plain: Collection[str] | None = None
) -> HeldKernel:
    """Return the kernel of a tiled cell.

    Raise Unsuited if the operator has another form or its weights exceed a thread's registers. Vectors and outputs in ``words``
    are sent as words. Outputs are also stored if they are in ``plain`` (None: all)."""
    return _CellText(cell_of(operator, binding), binding, frozenset(words), plain).kernel()


class _Early(Block):
    """A block that defers reads of stored tensors at known addresses, so that they are fetched early."""

    def element(self, tensor: str, indices: tuple[Expr, ...], clamp: bool = False) -> str:
        """Return the name of an early-fetched value if its address depends on axes only."""
        text = super().element(tensor, indices, clamp)
        unit = self.unit
        if not clamp or not isinstance(unit, _EarlyContext) or tensor in unit.tiles:
            return text
        if not all(unit.is_index(i) or isinstance(i, Const) for i in indices):
            return text
        group = unit.constant if tensor in unit.constants else unit.other
        group.setdefault(text, len(group))
        return f"w[{unit.first} + {group[text]}]" if group is unit.constant else f"early{group[text]}"


@dataclass
class _EarlyContext(FunctionContext):
    """A context that collects early reads by their text: of ``constants``, held from index ``first`` on, and others."""

    constants: frozenset[str] = frozenset()
    tiles: frozenset[str] = frozenset()
    first: int = 0
    constant: dict[str, int] = field(default_factory=dict)
    other: dict[str, int] = field(default_factory=dict)


class _CellText:
    def __init__(self, cell: Cell, binding: Binding, words: frozenset[str], plain: Collection[str] | None) -> None:
        self.cell, self.operator, self.binding = cell, cell.operator, binding
        self.read = tuple(p.vector.tensor in words for p in cell.parts)
        self.sent = [t for t in self.operator.outputs if t in words]
        received = dict.fromkeys(p.vector.tensor for p, word in zip(cell.parts, self.read, strict=True) if word)
        self.words = (*received, *self.sent)
        self.stored = [t for t in self.operator.outputs if plain is None or t in plain]
        self.arguments = self._kernel_arguments()
        self.staged = len(cell.parts) * cell.rows * cell.depth
        self.shared = 4 * (self.staged + len(cell.parts) * cell.rows * cell.columns)
        # Each of the first threads has one result of the maps, if the threads suffice.
        self.results = math.prod(self.operator.tile)
        self.early = self.results <= THREADS

    def _kernel_arguments(self) -> list[Argument]:
        """Return packed weights, then every tensor that is read, then stored outputs."""
        inside = {c.name for c in self.operator.computes}
        maps = [c for c in self.operator.computes if not c.reduce]
        vectors = [p.vector.tensor for p, word in zip(self.cell.parts, self.read, strict=True) if not word]
        read = dict.fromkeys([*vectors, *(t for c in maps for t in c.reads if t not in inside)])
        packed = [Argument(p.weights.tensor, False, self.cell.packing(p)) for p in self.cell.parts]
        return [*packed, *(Argument(t, False) for t in read), *(Argument(t, True) for t in self.stored)]

    def kernel(self) -> HeldKernel:
        """Return the finished kernel."""
        maps, unit = self._emit_maps()
        held = self.cell.each * self.cell.share + len(unit.constant)
        hold, step = self._hold_text(unit), self._step(unit, maps)
        types = self.binding.types
        parameters = tuple(
            f"{'' if a.written else 'const '}{CUDA.types[types[a.tensor].dtype]} *p{k}" for k, a in enumerate(self.arguments)
        )
        plain, extra = ", ".join(parameters), "".join(f", unsigned *q{k}" for k in range(len(self.words)))
        walk = ", const rm_walk &walk, int order" if self.words else ""

        def device(name: str) -> str:
            return (
                f"{PREAMBLE}{''.join(unit.tables.values())}"
                f"__device__ __forceinline__ void {name}_hold({plain}, float (&w)[{held}], int task) {{\n{hold}}}\n"
                f"__device__ __forceinline__ bool {name}_step({plain}{extra}{walk}, const float (&w)[{held}], float *scratch, "
                f"int task) {{\n{step}}}\n"
            )

        name = "c_" + hash_of(device(""))
        return HeldKernel(
            f"k_{name}",
            device(name),
            parameters,
            "" if self.words else str(self._task_body(name, held)),
            tuple(self.arguments),
            THREADS,
            self.shared,
            self.shared,
            name=name,
            held=held,
            words=self.words,
        )

    def _task_body(self, name: str, held: int) -> Text:
        """Return one task: constants, the wait for earlier kernels, and the step."""
        text, pointers = Text(), ", ".join(f"p{k}" for k in range(len(self.arguments)))
        text.line("extern __shared__ __align__(16) float scratch[];")
        text.line("const int task = order ? order[blockIdx.x] : first + (int)blockIdx.x;")
        text.all([f"float w[{held}];", f"{name}_hold({pointers}, w, task);"])
        text.all(["rm_after();", f"{name}_step({pointers}, w, scratch, task);"])
        return text

    # --- places -----------------------------------------------------------------------------------

    def _define_point(self, text: Text, index: str) -> str:
        """Define the task's result number ``index`` as ``x0, x1, ...``; return the test that it exists."""
        tests = [f"{index} < {self.results}"] if self.early else []
        for d, (place, axis) in enumerate(zip(split_digits(index, self.operator.tile), self.operator.anchor.axes, strict=True)):
            text.line(f"const int x{d} = o{d} + {place};")
            tests += [f"x{d} < {axis.extent}"] if axis.extent % self.operator.tile[d] else []
        return " && ".join(tests) or "true"

    def _tensor_parameter(self, tensor: str) -> str:
        """Return the parameter of an unpacked tensor, or "" without a parameter."""
        found = (f"p{k}" for k, a in enumerate(self.arguments) if a.tensor == tensor and a.packing is None)
        return next(found, "")

    def _word_parameter(self, tensor: str) -> str:
        return f"q{self.words.index(tensor)}"

    # --- parts of the kernel ----------------------------------------------------------------------

    def _hold_text(self, unit: _EarlyContext) -> Text:
        """Return the loads of the weights and of constants that the maps read."""
        cell, text = self.cell, Text()
        text.line("// Weights of this lane, and what the maps read of constants.")
        text.line("const int tid = (int)threadIdx.x, lane = tid % 32, warp = tid / 32;")
        low = cell.box[cell.column_axes[-1]][0]
        tiled = [k for k, n in enumerate(self.operator.grid) if n > 1 and low == Ref(f"o{k}")]
        tile = split_digits("task", self.operator.grid)[tiled[0]] if tiled else "0"
        parts = "".join(f"lane / {cell.lanes} == {k} ? p{k} : " for k in range(len(cell.parts) - 1))
        first = f"({tile} * {WARPS} + warp) * {cell.each * cell.share * cell.lanes} + lane % {cell.lanes} * 4"
        text.line(f"const {CUDA.types[cell.dtype]} *const from = ({parts}p{len(cell.parts) - 1}) + {first};")
        text.all(["#pragma unroll", f"for (int i = 0; i < {cell.each * cell.share // 4}; ++i)"])
        text.line(f"  *(float4 *)(w + 4 * i) = rm_fetch4(from + i * {cell.lanes * 4});")
        if unit.constant:
            text.all(origin_lines(self.operator))
            test = self._define_point(text, "tid")
            text.all(f"w[{unit.first} + {k}] = {test} ? {source} : 0.0f;" for source, k in unit.constant.items())
        return text

    def _step(self, unit: _EarlyContext, maps: list[str]) -> Text:
        text = Text()
        text.line("const int tid = (int)threadIdx.x, lane = tid % 32, warp = tid / 32;")
        text.all(origin_lines(self.operator))
        text.line(f"float *const vectors = scratch; float *const sums = scratch + {self.staged};")
        if self.early:
            test = self._define_point(text, "tid")
            text.line(f"const bool mine = {test};")
            text.all(f"const float early{k} = mine ? {source} : 0.0f;" for source, k in unit.other.items())
        self._stage_vectors(text)
        self._write_products(text)
        self._write_maps(text, maps)
        text.line("return true;")
        return text

    def _stage_vectors(self, text: Text) -> None:
        """Write the copies of all rows' vectors to shared memory, with as many threads for each product. Reads bypass the
        first-level cache, because other SMs may have written the vectors."""
        cell = self.cell
        group, count = THREADS // len(cell.parts), cell.rows * cell.depth
        text.line("// Vectors to shared memory.")
        text.line("bool alive = true;") if self.words else None
        for number, part in enumerate(cell.parts):
            wide = 4 if count % (4 * group) == 0 and self._is_aligned(part) else 1
            each = -(-count // (wide * group))
            ragged, tensor = bool(count % (wide * group)), part.vector.tensor
            own = f"tid % {group} + n * {group}"
            with text.block(f"if (tid / {group} == {number})"):
                text.all([f"int at[{each}]; rm_vector<{wide}> value[{each}];", "#pragma unroll"])
                with text.block(f"for (int n = 0; n < {each}; ++n)"):
                    text.line(f"const int e = {f'min(({own}) * {wide}, {count - 1})' if ragged else f'({own}) * {wide}'};")
                    place = f"min(e % {cell.depth}, {part.depth - wide})" if part.depth < cell.depth else f"e % {cell.depth}"
                    text.line(f"const int r = e / {cell.depth}, k = {place};")
                    text.line(f"at[n] = {format_sum(self._address_terms(part), part.constant)};")
                if self.read[number]:
                    span = word_span(self.binding.storages[tensor])
                    text.line(f"alive = rm_receive(walk, {self._word_parameter(tensor)}, {span}, at, value, order);")
                else:
                    text.line(f"rm_read({self._tensor_parameter(tensor)}, at, value);")
                test = f"if ({own} < {count}) " if ragged else ""
                value = f"({own}) * {wide} % {cell.depth} < {part.depth} ? value[n] : rm_vector<{wide}>{{}}"
                text.all(["#pragma unroll", f"for (int n = 0; n < {each}; ++n)"])
                text.line(
                    f"  {test}*(rm_vector<{wide}> *)(vectors + {number * count} + ({own}) * {wide}) = "
                    f"{value if part.depth < cell.depth else 'value[n]'};"
                )
        text.line("if (!__syncthreads_and(alive)) return false;" if self.words else "__syncthreads();")

    def _address_terms(self, part: Part) -> list[tuple[str, int]]:
        """Return the terms of the address of position ``k`` of row ``r``."""
        rows = split_digits("r", [self.cell.box[d][1] for d in self.cell.row_axes])
        terms = [("k", 1)]
        for d, place in zip(self.cell.row_axes, rows, strict=True):
            terms.append((f"({self.cell.box[d][0]} + {place})", part.steps.get(part.compute.axes[d].name, 0)))
        return terms

    def _is_aligned(self, part: Part) -> bool:
        """Return True if every row's vector starts at a multiple of 16 bytes."""
        steps = [s for a, s in part.steps.items() if a != part.along]
        offset = self.binding.storages[part.vector.tensor].offset
        return all(n % 4 == 0 for n in (offset, part.constant, *steps))

    def _write_products(self, text: Text) -> None:
        """Write the products of this warp's columns and every row; sums go to shared memory as ``[product, row, column]``."""
        cell = self.cell
        values = cell.each * cell.rows
        text.all(["// Products of this lane's weights.", f"float sum[{values}] = {{}};"])
        text.line(f"const float *const own = vectors + lane / {cell.lanes} * {cell.rows * cell.depth} + lane % {cell.lanes} * 4;")
        text.line(f"rm_multiply_held<{cell.rows}, {cell.each}, {cell.share}, {cell.depth}, {cell.lanes}>(own, w, sum);")
        text.line("// Sums over lanes; more values than lanes some at a time.")
        for first in range(0, values, cell.lanes):
            with text.block(""):
                text.line(f"const int at = rm_fold<{min(cell.lanes, values - first)}, {cell.lanes}>(sum + {first}, lane);")
                text.line(f"const int r = (at + {first}) / {cell.each}, c = warp * {cell.each} + (at + {first}) % {cell.each};")
                place = f"(lane / {cell.lanes} * {cell.rows} + r) * {cell.columns} + c"
                total = Val(f"sum[{first}]", "float32", atom=True)
                total = convert_value(CUDA, total, cell.parts[0].compute.dtype)
                text.line(f"if (at >= 0 && c < {cell.columns}) sums[{place}] = {total.text};")
        text.line("rm_fetched();") if self.words else None
        text.line("__syncthreads();")

    # --- the maps ---------------------------------------------------------------------------------

    def _emit_maps(self) -> tuple[list[str], _EarlyContext]:
        """Return the statements that compute one result, and the context with its early reads."""
        operator, unit = self.operator, self._make_context()
        block = (_Early if self.early else Block)(unit)
        point = tuple(Ref(f"x{d}") for d in range(len(operator.anchor.axes)))
        for name in operator.outputs:
            value = block.load(Load(name, point)) if name in self.sent else block.unrounded(Load(name, point))
            if name in self.sent:  # first, because another task waits for it
                span, at = word_span(self.binding.storages[name]), block.address(self._global_place(name), point)
                block.line(f"rm_send(walk, {self._word_parameter(name)}, {span}, {at}, {value.text});")
            if name in self.stored:  # includes a product's result, which the maps read from shared memory
                block.store(self._global_place(name), point, value, ())
        return block.lines, unit

    def _write_maps(self, text: Text, maps: list[str]) -> None:
        """Write the maps, one result a thread, or a loop if results exceed threads."""
        text.line("// Maps and stores.")
        if self.early:
            with text.block("if (mine)"):
                text.all(maps)
            return
        with text.block(f"for (int e = tid; e < {self.results}; e += {THREADS})"):
            test = self._define_point(text, "e")
            with text.block(f"if ({test})"):
                text.all(maps)

    def _make_context(self) -> _EarlyContext:
        operator, axes = self.operator, self.operator.anchor.axes
        places = {t: self._global_place(t) for t in (*(a.tensor for a in self.arguments if a.packing is None), *self.sent)}
        tiles = {p.compute.name: self._product_place(number) for number, p in enumerate(self.cell.parts)}
        ranges: dict[str, Interval] = {f"{letter}{d}": (0, a.extent - 1) for d, a in enumerate(axes) for letter in "xo"}
        inlined = {c.name: c for c in operator.computes if not c.reduce}
        return _EarlyContext(
            CUDA,
            self.binding.types,
            inlined,
            {**places, **tiles},
            ranges,
            constants=self.binding.constants,
            tiles=frozenset(tiles),
            first=self.cell.each * self.cell.share,
        )

    def _global_place(self, tensor: str) -> Place:
        return place_of(tensor, self._tensor_parameter(tensor), self.binding)

    def _product_place(self, number: int) -> Place:
        """Return the sums of a product as a tile in shared memory, for the maps."""
        cell = self.cell
        strides, below = [0] * len(cell.box), 1
        for d in (*reversed(cell.column_axes), *reversed(cell.row_axes)):
            strides[d] = below
            below *= cell.box[d][1]
        return Place(
            f"(sums + {number * cell.rows * cell.columns})",
            "float32",
            tuple(strides),
            tuple(low for low, _ in cell.box),
            tuple(n for _, n in cell.box),
        )


def is_profitable(operator: ROperator, binding: Binding, gpu: Gpu) -> bool:
    """Return True if holding weights pays: they are reused, or the ``gemv`` family has no candidate."""
    return bool(binding.reused & {*operator.inputs}) or not GEMV.candidates(operator, binding, gpu)


CELL: Final = Family(
    "cell",
    {},
    cell_candidates,
    cell_seconds,
    cell_kernel,
    max_candidates=1 << 10,
    exclusive=is_profitable,
    persistent=Held(THREADS, cell_kernel, vectors_of),
    fused_forms=frozenset({"trailing maps", "further sums"}),
)

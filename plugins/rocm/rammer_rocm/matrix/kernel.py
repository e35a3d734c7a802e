"""Implicit matrix products by matrix instructions: a group of waves for each task, or several groups that share a sum.

A group walks the sum in blocks of ``bk`` products through two buffers in local memory. While its waves multiply one block, the
next one is on its way to registers, from where it is stored to the other buffer. A step therefore has one barrier, and no wave
waits for memory before it has multiplied. The sums go through local memory to the maps, one band of rows at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Final

from rammer.codegen import Product, Text, Unsuited
from rammer.codegen.products import Staged, Staging, depth_of
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_rocm.dialect import GPU_DIALECT
from rammer_rocm.kernels.task import TaskFunction
from rammer_rocm.matrix.arrangement import LOT, Swizzled
from rammer_rocm.matrix.matrix_instruction import DEPTH, THREADS, MatrixInstruction
from rammer_rocm.matrix.shape import MatrixShape, shape_of
from rammer_rocm.ring.kernel import UNROLL, RingKernel

#: A call would cost the registers that the calling convention reserves, and the sums would go through memory.
DIALECT: Final = replace(GPU_DIALECT, function="__attribute__((always_inline))")
#: Registers of a copy besides its data, for each row to which it stores: addresses and a test.
ADDRESS: Final = 3
#: Most copies of a work-item in a step. The test of each one takes two scalar registers from its load to its store.
MOST_COPIES: Final = 24
#: Both operands have the same form in local memory.
SWIZZLED: Final = Swizzled()
STAGINGS: Final = {
    "float16": Staging("float16", SWIZZLED, SWIZZLED, SWIZZLED, LOT),
    "float32": Staging("float32", SWIZZLED, SWIZZLED, SWIZZLED, LOT // 2),
}
#: Copies of 16, 8 and 2 bytes in two parts: from global memory to a register ``held``, and from there to local memory, with zeros
#: where ``valid`` is false. An invalid load reads ``base`` instead, so no lane branches. ``rm_turn16`` stores the elements of
#: one product, each to its row. Names with ``b`` round float32 to bfloat16.
COPIES: Final = """
#define rm_load16(held, base, to, from, valid) held = *(__global const uint4 *)((valid) ? (from) : (base))
#define rm_load8(held, base, to, from, valid) held.xy = *(__global const uint2 *)((valid) ? (from) : (base))
#define rm_load2(held, base, to, from, valid) held.x = *((valid) ? (from) : (base))
#define rm_store16(held, base, to, from, valid) *(__local uint4 *)(to) = (valid) ? held : (uint4)(0)
#define rm_store8(held, base, to, from, valid) *(__local uint2 *)(to) = (valid) ? held.xy : (uint2)(0)
#define rm_store2(held, base, to, from, valid) *(to) = (valid) ? (ushort)held.x : (ushort)0
#define rm_load4(held, base, to, from, valid) held.x = as_uint(*((valid) ? (from) : (base)))
#define rm_store16b(held, base, to, from, valid) *(__local ushort4 *)(to) = (valid) ? rm_brains(held) : (ushort4)(0)
#define rm_store4b(held, base, to, from, valid) *(to) = (valid) ? rm_brains(held).x : (ushort)0
#define rm_turn16b(block, held, base, to, from, valid) \\
  rm_turn(block, shared, (int)((to) - shared), (valid) ? rm_brains(held) : (ushort4)(0))
// Round float32 to bfloat16: to nearest, ties to even. A NaN stays one.
inline static ushort4 rm_brains(uint4 v) {
  const uint4 rounded = v + 0x7fff + (v >> 16 & 1);
  return convert_ushort4(select(rounded, v | 0x400000, (v & 0x7fffffff) > 0x7f800000) >> 16);
}
#define rm_turn16(block, held, base, to, from, valid) do { \\
  const ushort8 v_ = as_ushort8((valid) ? held : (uint4)(0)); \\
  const int at_ = (int)((to) - shared); \\
  rm_turn(block, shared, at_, v_.lo); \\
  rm_turn(block, shared, (at_ ^ 4 / max(1, 64 / block) % (block / 8) * 8) + 4 * block, v_.hi); \\
} while (0)
inline static void rm_turn(const int block, __local ushort *shared, int to, ushort4 v) {
  const int rows = max(1, 64 / block), lots = block / 8;
  shared[to] = v.s0;
  shared[(to ^ 1 / rows % lots * 8) + block] = v.s1;
  shared[(to ^ 2 / rows % lots * 8) + 2 * block] = v.s2;
  shared[(to ^ 3 / rows % lots * 8) + 3 * block] = v.s3;
}
"""


def matrix_kernel(operator: ROperator, binding: Binding, instruction: MatrixInstruction, shared: int) -> TaskFunction:
    """Return the function of a tiled product for units with ``shared`` bytes of local memory. Raises Unsuited for another form,
    or an impossible shape."""
    p = instruction.product(operator, binding)
    shape = shape_of(instruction, p.row_count, p.width, dict(operator.config))
    shape.check(shared)
    return MatrixKernel(p, binding, shape, shape.room(shared)).function(instruction.name)


class MatrixKernel(RingKernel):
    """A writer of the function of one product, whose lanes have ``room`` registers."""

    target = DIALECT

    def __init__(self, p: Product, binding: Binding, shape: MatrixShape, room: int) -> None:
        if p.operator.reduce_bounds or p.a.fill or p.b.fill:
            raise Unsuited("a sum that ends at a length, or padding with a value other than 0")
        self.p, self.binding, self.shape, self.text = p, binding, shape, Text()
        self.depth = depth_of(p.main.reduce, shape.bk)
        self.split = min(shape.split_k, self.depth.blocks)
        staging = STAGINGS[shape.instruction.dtype]
        self.a = Staged("a", p, p.a, p.rows, shape.bm, self.depth, THREADS, staging, GPU_DIALECT)
        self.b = Staged("b", p, p.b, p.columns, shape.bn, self.depth, THREADS, staging, GPU_DIALECT)
        self.prologue = None
        self.scratch = shape.local + shape.instruction.mailbox
        counts = [(len(self._copies(o, "load")[1]), 8 if self._is_turned(o) else 1) for o in (self.a, self.b)]
        registers, copies = shape.registers + sum(ADDRESS * n * rows for n, rows in counts), sum(n for n, _ in counts)
        if registers > room or copies > MOST_COPIES:
            raise Unsuited(f"{registers} of {room} registers, {copies} copies of a work-item")
        self.threads, self.helpers = THREADS, shape.instruction.device + COPIES
        self.arguments = self.function_arguments()

    def copy_macros(self) -> dict[str, str]:
        """Return no macros: both parts of a copy are written where they are used."""
        return {}

    def write_declarations(self) -> None:
        """Write the variables of a work-item: its place in the tile, and the operands' buffers and addresses."""
        s, i, text = self.shape, self.shape.instruction, self.text
        self.write_origins()
        text.line("__local ushort *const shared = (__local ushort *)scratch, *const ashared = shared;")
        text.line(f"__local ushort *const bshared = shared + {2 * self.a.size};")
        kind = f"__global const {self.a.staging.ctype} *"
        text.line(f"{kind}const ag = ({kind})p0, *const bg = ({kind})p1;")
        text.line(f"const int lane = tid % {i.lanes}, wave = min(tid / {i.lanes}, {s.waves - 1});")
        text.line(f"const int ty = wave / {s.wide} * {i.side * s.tm}, tx = wave % {s.wide} * {i.side * s.tn};")
        for n, own in (("a", "ty"), ("b", "tx")):
            row = f"{own} + lane % {i.side}"
            text.line(
                f"const int {n}row = ({row}) * {s.bk}, {n}lot = lane / {i.side} % {i.groups} ^ {SWIZZLED.swizzle(row, s.bk)};"
            )
        self.a.setup(text)
        self.b.setup(text)

    def write_sums(self) -> None:
        """Write the sums of this group's share of the products."""
        s, text = self.shape, self.text
        self.write_share()
        text.all(f"rm_sums acc{i}_{j} = 0.0f;" for i in range(s.tm) for j in range(s.tn))
        held = {stage.name: len(self._copies(stage, "load")[1]) for stage in (self.a, self.b)}
        text.line(f"uint4 {', '.join(f'{n}held{k}' for n, count in held.items() for k in range(count))};")
        with text.block(""):
            text.line("const int kb = begin, slot = 0;")
            self._copy("load")
            self._copy("store")
        text.all([GPU_DIALECT.barrier, "int use = 0;"])
        with text.block("for (int at = begin; at + 1 < end; ++at)"):
            text.line("const int kb = at + 1, slot = 1 - use;")
            self._multiply_block(further=True)
            text.all([GPU_DIALECT.barrier, "use = slot;"])
        self._multiply_block(further=False)

    @staticmethod
    def _is_turned(stage: Staged) -> bool:
        """Return True if a copy has several elements of one product."""
        return stage.packing is None and not stage.deep and stage.vector > 1

    def _copies(self, stage: Staged, verb: str) -> tuple[str, list[str]]:
        """Return the ``verb`` part of this work-item's copies of block ``kb``, and the names of their registers."""
        text, n, names = Text(), stage.name, list[str]()
        text.line(f"__local ushort *const {n}s = {n}shared + slot * {stage.size};")
        text.all(stage.block_start())
        stage.fetch(text)

        def part(match: re.Match[str]) -> str:
            names.append(f"{n}held{len(names)}")
            if verb == "load":
                return f"rm_load{match[1]}({names[-1]}, {n}g, "
            kind = f"{match[1]}{self.shape.instruction.suffix}("
            return f"{f'rm_turn{kind}{self.shape.bk}, ' if self._is_turned(stage) else f'rm_store{kind}'}{names[-1]}, {n}g, "

        found = "\n".join(text.lines).replace("__local float *", "__local ushort *")
        return re.sub(r"rm_copy(\d+)\(", part, found), names

    def _copy(self, verb: str) -> None:
        for stage in (self.a, self.b):
            with self.text.block(""):
                self.text.all(self._copies(stage, verb)[0].split("\n"))

    def _multiply_block(self, further: bool) -> None:
        """Write the products of buffer ``use``, 16 at a time. Fragments are read one step ahead. The loads of a ``further`` block
        are issued during the first step, and its stores during the last one."""
        steps = self.shape.bk // DEPTH
        with self.text.block(""):
            self._read_fragments(0)
            for k in range(steps):
                if k + 1 < steps:
                    self._read_fragments(k + 1)
                self.text.line("rm_in_order();")
                if further and k == 0:
                    self._copy("load")
                self._multiply_fragments(k)
                if further and k + 1 == steps:
                    self._copy("store")

    def _read_fragments(self, k: int) -> None:
        """Write the reads of the fragments of step ``k``."""
        s, side = self.shape, self.shape.instruction.side
        for n, stage, count in (("a", self.a, s.tm), ("b", self.b, s.tn)):
            for f in range(count):
                begin = f"{n}shared + use * {stage.size} + {n}row + {f * side * s.bk}"
                # Rows of a fragment 16 further on have the other half of the swizzle's second part.
                places = [2 * k + o ^ f * side // LOT % 4 % (s.bk // LOT) for o in (0, 1)]
                one, other = (f"({n}lot ^ {place}) * {LOT}" for place in places)
                self.text.line(f"const rm_fragment {n}{k}_{f} = rm_fragment_of({begin}, {one}, {other});")

    def _multiply_fragments(self, k: int) -> None:
        """Write the products of step ``k``. Consecutive instructions have different sums."""
        s = self.shape
        for step, x, y in product(range(s.instruction.steps), range(s.tm), range(s.tn)):
            self.text.line(f"rm_products{step}{s.instruction.suffix}(a{k}_{x}, b{k}_{y}, acc{x}_{y}, scratch + {s.local});")

    def write_results(self) -> str:
        """Write the sums to local memory, band by band, their exchange between groups, the maps and the stores."""
        s, i, text, tables = self.shape, self.shape.instruction, self.text, ""
        text.line("__local float *const totals = (__local float *)scratch;")
        if self.split > 1:
            self.declare_partials()
        value = f"totals[r * {s.bn} + j]"
        with text.block(f"for (int band = 0; band < {s.tm}; ++band)"):
            text.line(GPU_DIALECT.barrier)
            for x in range(s.tm):
                with text.block(f"if (band == {x}{f' && tid < {s.waves * i.lanes}' if s.waves < i.waves else ''})"):
                    for y, e in product(range(s.tn), range(i.sums)):
                        row = f"wave / {s.wide} * {i.side} + {i.row.format(e=e)}"
                        text.line(f"totals[({row}) * {s.bn} + tx + {y * i.side} + lane % {i.side}] = acc{x}_{y}.s{e:x};")
            text.line(GPU_DIALECT.barrier)
            if self.split > 1:
                with self._band():
                    self.store_partial(value)
            else:
                tables = self.write_maps(value, self._band())
        return self.write_maps(self.add_partials(), self.cell_loop()) if self.split > 1 else tables

    @contextmanager
    def _band(self) -> Iterator[None]:
        """Write a loop over the cells of a band, in its row ``r``: cell ``e`` in row ``i`` and column ``j`` of the tile."""
        s, p, side = self.shape, self.p, self.shape.instruction.side
        self.text.line(f"#pragma unroll {UNROLL}")
        with self.text.block(f"for (int n = tid; n < {s.band * p.width}; n += {THREADS})"):
            self.text.line(f"const int r = n / {p.width}, j = n % {p.width};")
            self.text.line(f"const int i = r / {side} * {side * s.tm} + band * {side} + r % {side}, e = i * {p.width} + j;")
            with self.text.block(f"if (i < {p.row_count})"):
                yield

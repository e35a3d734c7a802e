"""The epilogue of a matrix product's kernel: maps on a tile of sums in shared memory, and the stores.

Every thread walks down columns of the tile. It loads the results of other kernels, such as a residual, for several rows before it
stores the first. Their pointers are not ``const __restrict__`` (``kernels.task.declare_parameter``), so the compiler assumes that
every store may change later loads. Rows would otherwise wait for memory one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rammer.codegen import (
    Argument,
    Block,
    FunctionContext,
    Place,
    Product,
    Text,
    Val,
    is_length,
    spell_type,
    split_digits,
    stored_loads,
)
from rammer.device.manifest import Binding
from rammer.ir.expr import Interval, Load, Ref

from rammer_cuda.dialect import CUDA
from rammer_cuda.kernels.task import place_of

#: Maximum values that a thread loads before its stores.
HELD = 32


class Tile(Protocol):
    """The relevant part of a block's shape: rows and columns of its tile, threads, and slices of every sum."""

    @property
    def bm(self) -> int: ...
    @property
    def bn(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def slice_k(self) -> int: ...


def write_epilogue(
    block: Block, places: Mapping[str, Place], product: Load, value: str, dtype: str, outputs: Iterable[str]
) -> None:
    """Write the end of every product kernel: the maps after ``product`` at one point, and the stores of ``outputs``. The product
    is ``value`` of ``dtype`` at that point. The core's emitter writes the maps."""
    block.memo[product] = Val(value, dtype, atom=True)
    for name in outputs:
        block.store(places[name], product.indices, block.unrounded(Load(name, product.indices)), ())


@dataclass
class Epilogue:
    """A writer of the epilogue of ``p`` to ``text``, which reads or writes the arguments from ``arguments[2]`` on.

    ``totals`` points to the tile in shared memory, whose rows have ``line`` elements of the C type ``number``. ``split_k`` blocks
    share its rows. A thread has ``unroll`` rows in flight."""

    p: Product
    s: Tile
    binding: Binding
    arguments: Sequence[Argument]
    text: Text
    split_k: int
    line: int
    unroll: int
    number: str = "float"
    totals: str = "shared"

    def __post_init__(self) -> None:
        places = {a.tensor: place_of(a.tensor, f"p{k}", self.binding) for k, a in enumerate(self.arguments) if k >= 2}
        axes = self.p.main.axes
        ranges: dict[str, Interval] = {f"x{d}": (0, a.extent - 1) for d, a in enumerate(axes)}
        self.unit = FunctionContext(CUDA, self.binding.types, {c.name: c for c in self.p.after}, places, ranges)
        self.point = tuple(Ref(f"x{d}") for d in range(len(axes)))
        self.across = min(self.s.bn, self.s.threads)
        self.rows = self.s.threads // self.across

    def write(self) -> str:
        """Write the epilogue; return the tables that the maps need."""
        s, p, text, across, rows = self.s, self.p, self.text, self.across, self.rows
        text.line("// Maps behind the sums, and stores.")
        with text.block(f"for (int g = 0; g < {-(-s.bn // across)}; ++g)"):
            text.line(f"const int j = tid % {across} + g * {across}, i0 = tid / {across};")
            tests = [f"j < {p.width}"] + ([f"i0 < {rows}"] if across * rows < s.threads else [])
            tests += self.coordinates(p.columns, "j")
            text.all(f"const int x{d} = o{d};" for d in range(len(p.main.axes)) if d not in (*p.rows, *p.columns))
            with text.block(f"if ({' && '.join(tests)})"):
                ahead = self._ahead()
                if ahead:
                    self._rows_together(ahead)
                else:
                    text.line(f"#pragma unroll {self.unroll}")
                    with text.block(f"for (int i = low + i0; i < high; i += {rows})"):
                        self._write_row(Block(self.unit), [])
        if self.split_k > 1:
            text.line("rm_cluster_wait();")
        return "".join(self.unit.tables.values())

    def coordinates(self, axes: Sequence[int], index: str) -> list[str]:
        """Define the coordinates of the tile's ``index`` along ``axes``; return the tests that they are inside."""
        p, tests = self.p, list[str]()
        for d, place in zip(axes, split_digits(index, [p.operator.tile[d] for d in axes]), strict=True):
            self.text.line(f"const int x{d} = o{d} + {place};")
            tests += [f"x{d} < {p.axis(d).extent}"] if p.axis(d).extent % p.operator.tile[d] else []
        return tests

    def _ahead(self) -> list[Load]:
        """Return the maps' loads of other kernels' results, except lengths, which arrive quickly."""
        loads = (ld for n in self.p.operator.outputs for ld in stored_loads(Load(n, self.point), self.unit.inlined))
        read = [ld for ld in dict.fromkeys(loads) if ld.tensor in self.unit.places and ld.tensor not in self.binding.constants]
        return [ld for ld in read if not is_length(ld.tensor, self.binding)]

    def _rows_together(self, ahead: Sequence[Load]) -> None:
        """Write the rows in groups: the loads ``ahead`` of a whole group, then its maps and stores."""
        text, rows = self.text, self.rows
        group, whole = self.in_groups(max(1, min(self.unroll, HELD // len(ahead))))
        each, place = f"for (int u = 0; u < {group}; ++u)", f"row + u * {rows}"
        loads, maps = Block(self.unit), Block(self.unit)
        found = [loads.load(ld) for ld in ahead]
        maps.memo |= {ld: Val(f"held{k}[u]", v.dtype, v.small, True) for k, (ld, v) in enumerate(zip(ahead, found, strict=True))}
        text.line("#pragma unroll 1")
        with text.block(f"for (int row = low + i0; row < high; row += {rows * group})"):
            text.all(f"{spell_type(CUDA, v.cdtype)} held{k}[{group}];" for k, v in enumerate(found))
            text.line("#pragma unroll")
            with text.block(each):
                # Missing rows load the last row's values: with so many tests predicates would run out.
                text.line(f"const int i = {place if whole else f'min({place}, high - 1)'};")
                with text.block(f"if ({' && '.join(self.coordinates(self.p.rows, 'i')) or 'true'})"):
                    text.all([*loads.lines, *(f"held{k}[u] = {v.text};" for k, v in enumerate(found))])
            text.line("#pragma unroll")
            with text.block(each):
                text.line(f"const int i = {place};")
                self._write_row(maps, [] if whole else ["i < high"])

    def in_groups(self, most: int) -> tuple[int, bool]:
        """Return the number of rows, at most ``most``, that a thread loads together, and True if they divide its rows."""
        own, rest = divmod(self.p.row_count, self.split_k * self.rows)
        if not rest:
            largest = next(n for n in range(min(own, most), 0, -1) if own % n == 0)
            if 2 * largest >= min(own, most):
                return largest, True
        own += rest > 0
        return -(-own // -(-own // most)), False

    def _write_row(self, block: Block, tests: Sequence[str]) -> None:
        """Write the maps and the stores of row ``i`` at the point ``x0, x1, ...``, by the core's emitter."""
        s, p, text = self.s, self.p, self.text
        with text.block(f"if ({' && '.join([*tests, *self.coordinates(p.rows, 'i')]) or 'true'})"):
            parts = (f"{self.totals}[(i + {q * s.bm}) * {self.line} + j]" for q in range(s.slice_k if self.split_k == 1 else 1))
            text.line(f"const {self.number} sum = {' + '.join(parts)};")
            write_epilogue(block, self.unit.places, Load(p.main.name, self.point), "sum", p.main.dtype, p.operator.outputs)
            text.all(block.lines)

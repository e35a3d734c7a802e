"""The prologue of a staged operand: maps applied once to every element, in shared memory, by the thread that copied it.

An asynchronous copy cannot compute. A thread changes elements once its copies have arrived, before the barrier that publishes
them. Every block of products needs other constants of the maps (a scale and a shift for each channel). All of them are in shared
memory from the start. Like packed constants, they are copied before the wait for earlier kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rammer.codegen.c_target import CTarget, join_words
from rammer.codegen.c_text import Text, format_sum, weighted_terms
from rammer.codegen.context import FunctionContext, Place
from rammer.codegen.contraction_form import Operand, Prologue
from rammer.codegen.operations import Val
from rammer.codegen.products.operand import Piece
from rammer.codegen.scalar import Block
from rammer.codegen.task_parameters import Unsuited
from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.expr import Load, Ref, integer
from rammer.ir.types import row_major

#: Maximum elements of the maps' constants: 32 KiB of shared memory.
MOST = 8192
#: Copies whose elements are loaded, computed and stored together, to overlap their latency.
TOGETHER = 4


class OperandMaps:
    """A writer of the maps' tables, and of the maps on pieces of the operand. ``name`` prefixes its variables.

    A language defines ``{name}maps`` from ``body``. ``zeros`` are four zeros in it, and ``call`` applies the maps."""

    zeros: str

    def __init__(self, name: str, operand: Operand, prologue: Prologue, binding: Binding, target: CTarget) -> None:
        self.name, self.operand, self.prologue, self.binding, self.target = name, operand, prologue, binding, target
        self.sizes = {t: math.prod(binding.types[t].shape) for t in prologue.constants}
        if sum(self.sizes.values()) > MOST:
            raise Unsuited(f"{sum(self.sizes.values())} constants of the maps before the contraction")
        if any(binding.storages[t].strides != row_major(binding.types[t].shape) for t in self.sizes):
            raise Unsuited("constants that are not dense")
        self.at, self.bytes = dict[str, int](), 0
        for tensor, size in self.sizes.items():
            self.at[tensor] = self.bytes // 4
            self.bytes += -(-size // 4) * 16

    def call(self, value: str, places: str) -> str:
        """Return a statement that applies the maps to the variable ``value`` at ``places``: nothing, or ", " and positions."""
        raise NotImplementedError

    @property
    def places(self) -> list[str]:
        """The parameters of the maps: positions along the dimensions that they use."""
        return [f"z{d}" for d in self.prologue.dimensions]

    def place_tables(self, text: Text, offset: int) -> None:
        """Declare the tables, ``offset`` bytes (a multiple of 16) from the start of shared memory."""
        text.line(f"{join_words(self.target.local, 'float')} *const {self.name}tables = shared + {offset // 4};")

    def copy(self, text: Text, pointers: Mapping[str, str], thread: str, threads: int) -> None:
        """Start copying the tables with ``threads`` threads, numbered ``thread``. The copies must have arrived and the threads
        must have met a barrier before the maps run."""
        for tensor, size in self.sizes.items():
            wide = 4 if size % 4 == 0 and self.binding.storages[tensor].offset % 4 == 0 else 1
            copy = f"rm_copy{4 * wide}({self.name}tables + {self.at[tensor]} + e, {pointers[tensor]} + e, true);"
            text.line(f"for (int e = ({thread}) * {wide}; e < {size}; e += {threads * wide}) {copy}")
        text.line("rm_commit();")

    def body(self) -> tuple[list[str], str]:
        """Return the statements of the maps of one element ``staged`` at ``places``, and their value."""
        p, types = self.prologue, self.binding.types
        tables, zero = dict[str, Place](), integer(0)
        for tensor, at in self.at.items():
            shape = types[tensor].shape
            tables[tensor] = Place(f"({self.name}tables + {at})", "float32", row_major(shape), (zero,) * len(shape), shape)
        shape = types[p.source].shape
        ranges = {f"z{d}": (0, n - 1) for d, n in enumerate(shape)}
        unit = FunctionContext(self.target, types, {c.name: c for c in p.maps}, tables, ranges)
        point = tuple(Ref(f"z{d}") for d in range(len(shape)))
        block = Block(unit)
        block.memo[Load(p.source, point)] = Val("staged", "float32", atom=True)
        value = block.load(Load(p.maps[-1].name, point))
        if unit.tables:
            raise Unsuited("tables in the maps before the contraction")
        return block.lines, value.text

    def apply(self, text: Text, pieces: Iterator[Piece]) -> None:
        """Apply the maps to all ``pieces``. Invalid elements keep their copied value 0."""
        waiting = list[Piece]()
        for piece in pieces:
            waiting.append(piece)
            if len(waiting) == TOGETHER:
                self._write_batched_maps(text, waiting)
                waiting = []
        if waiting:
            self._write_batched_maps(text, waiting)

    def _write_batched_maps(self, text: Text, pieces: Sequence[Piece]) -> None:
        """Write all loads before all stores, since the compiler cannot know that the pieces are disjoint."""
        local = self.target.local
        with text.block(""):
            for i, piece in enumerate(pieces):
                text.line(f"{join_words(local, 'float')} *const to{i} = {piece.target};")
                text.line(f"const bool ok{i} = {' && '.join(piece.valid) or 'true'};")
                kind, none = ("float4", self.zeros) if piece.width == 4 else ("float", "0.0f")
                text.line(f"{kind} w{i} = ok{i} ? *({join_words(local, 'const', kind)} *)to{i} : {none};")
                for d in self.prologue.dimensions:
                    text.line(f"const int q{i}_{d} = ok{i} ? {self._index_position(d, piece.names)} : 0;")
            for i, piece in enumerate(pieces):
                places = "".join(f", q{i}_{d}" for d in self.prologue.dimensions)
                parts = [f".{c}" for c in "xyzw"] if piece.width == 4 else [""]
                text.all(self.call(f"w{i}{c}", places) for c in parts)
            for i, piece in enumerate(pieces):
                text.line(f"if (ok{i}) *({join_words(local, 'float4' if piece.width == 4 else 'float')} *)to{i} = w{i};")

    def _index_position(self, d: int, names: Mapping[str, str]) -> str:
        form = ex.affine_form(self.prologue.load.indices[d])
        if form is None:
            raise Unsuited(f"{self.prologue.load} is not affine")
        return format_sum(weighted_terms(form[0], names), form[1])

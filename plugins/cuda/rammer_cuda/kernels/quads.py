"""The epilogue of products of bytes and of float16, four neighbouring columns per thread, which are stored as one word.

With one byte per thread, a warp's stores would be 32 bytes. Every byte would need separate instructions for address, test and
store, and so would every float16. It applies if four columns form aligned words in the results and in other kernels' outputs.
Otherwise ``Epilogue`` writes column by column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from rammer.codegen import Block, Val, canonicalise_sum, convert_value, preload_elements, spell_type, stored_loads
from rammer.ir import expr as ex
from rammer.ir.expr import Load, Ref, integer

from rammer_cuda.dialect import CUDA
from rammer_cuda.kernels.epilogue import HELD, Epilogue

#: Columns per thread.
WIDE: Final = 4
#: Reads and writes of four elements at once: the word's type, its elements, and a word from four elements.
_BYTES: Final = "{0} & 255u | ({1} & 255u) << 8 | ({2} & 255u) << 16 | (unsigned){3} << 24"
_WORDS: Final = {
    "uint8": ("unsigned", [f"(unsigned char)({{0}} >> {8 * e})" for e in range(WIDE)], _BYTES),
    "int8": ("unsigned", [f"(signed char)({{0}} >> {8 * e})" for e in range(WIDE)], _BYTES),
    "int32": ("int4", [f"{{0}}.{c}" for c in "xyzw"], "make_int4({0}, {1}, {2}, {3})"),
    "float32": ("float4", [f"{{0}}.{c}" for c in "xyzw"], "make_float4({0}, {1}, {2}, {3})"),
    "float16": (
        "uint2",
        [f"rm_half({{0}}.{c}{shift})" for c in "xy" for shift in ("", " >> 16")],
        "make_uint2(rm_two_halves({0}, {1}), rm_two_halves({2}, {3}))",
    ),
}


@dataclass
class Quads(Epilogue):
    """An epilogue of four columns per thread."""

    def __post_init__(self) -> None:
        Epilogue.__post_init__(self)
        self.across = min(-(-self.s.bn // WIDE), self.s.threads)
        self.rows = self.s.threads // self.across

    @cached_property
    def column(self) -> int:
        """The innermost axis of the columns."""
        return self.p.columns[-1]

    @cached_property
    def points(self) -> list[tuple[ex.Expr, ...]]:
        """The four elements of a thread."""
        shifted = [canonicalise_sum(ex.make_add(Ref(f"x{self.column}"), integer(e))) for e in range(WIDE)]
        return [(*self.point[: self.column], x, *self.point[self.column + 1 :]) for x in shifted]

    @cached_property
    def loads(self) -> list[list[Load]]:
        """The distinct loads of the maps for each element, in equal order."""
        return [
            list(dict.fromkeys(ld for n in self.p.operator.outputs for ld in self._placed_loads(n, point)))
            for point in self.points
        ]

    def _placed_loads(self, name: str, point: tuple[ex.Expr, ...]) -> list[Load]:
        return [ld for ld in stored_loads(Load(name, point), self.unit.inlined) if ld.tensor in self.unit.places]

    @property
    def possible(self) -> bool:
        """True if four columns form whole words in all stores and in the reads of other kernels' results. A read of one element
        for all four columns is supported, too."""
        p, tile = self.p, self.p.operator.tile
        whole = bool(p.columns) and tile[self.column] % WIDE == 0 and p.axis(self.column).extent % WIDE == 0
        if not whole or len({len(found) for found in self.loads}) != 1 or not all(map(self._is_word_column, p.operator.outputs)):
            return False
        return all(self._is_same_element(k) or self._in_words(self.loads[0][k]) for k in self.late)

    def _in_words(self, load: Load) -> bool:
        """Return True if the load reads the four columns, or those a number of words further on."""
        shift = integer(0)
        if len(load.indices) > self.column and (form := ex.affine_form(load.indices[self.column])) is not None:
            shift = integer(form[1] - form[1] % WIDE)
        own = canonicalise_sum(ex.make_add(self.points[0][self.column], shift))
        wanted = (*self.points[0][: self.column], own, *self.points[0][self.column + 1 :])
        return load.fill is None and load.indices == wanted and self._is_word_column(load.tensor)

    def _is_word_column(self, tensor: str) -> bool:
        """Return True if four neighbouring columns of ``tensor`` are one aligned word."""
        storage = self.binding.storages[tensor]
        others = (s for d, s in enumerate(storage.strides) if d != self.column)
        known = self.binding.types[tensor].dtype in _WORDS and len(storage.strides) == len(self.p.main.axes)
        return known and storage.strides[self.column] == 1 and all(s % WIDE == 0 for s in (*others, storage.offset))

    @cached_property
    def late(self) -> list[int]:
        """Indices in ``loads`` of other kernels' results."""
        return [k for k, ld in enumerate(self.loads[0]) if ld.tensor not in self.binding.constants]

    def _is_same_element(self, k: int) -> bool:
        """Return True if all four columns read one element."""
        return len({found[k] for found in self.loads}) == 1

    def write(self) -> str:
        s, p, text, across, rows = self.s, self.p, self.text, self.across, self.rows
        text.line("// Maps behind the sums, and stores, four columns at a time.")
        with text.block(f"for (int g = 0; g < {-(-s.bn // (WIDE * across))}; ++g)"):
            text.line(f"const int j = (tid % {across} + g * {across}) * {WIDE}, i0 = tid / {across};")
            tests = [f"j < {p.width}"] + ([f"i0 < {rows}"] if across * rows < s.threads else [])
            tests += self.coordinates(p.columns, "j")
            text.all(f"const int x{d} = o{d};" for d in range(len(p.main.axes)) if d not in (*p.rows, *p.columns))
            with text.block(f"if ({' && '.join(tests)})"):
                fixed = self._load_column_constants()
                if self.late:
                    self._write_row_groups(fixed)
                else:
                    text.line(f"#pragma unroll {self.unroll}")
                    with text.block(f"for (int i = low + i0; i < high; i += {rows})"):
                        self._write_quad(Block(self.unit, fixed), [])
        if self.split_k > 1:
            text.line("rm_cluster_wait();")
        return "".join(self.unit.tables.values())

    def _load_column_constants(self) -> Block:
        """Load the constants that depend only on the column, once for all rows."""
        moving = {f"x{d}" for d in self.p.rows}
        block = Block(self.unit)
        found = [
            ld for loads in self.loads for ld in loads if ld.tensor in self.binding.constants and not ex.axes_of(ld) & moving
        ]
        preload_elements(block, dict.fromkeys(found))
        self.text.all(block.lines)
        return Block(self.unit, block)

    def _write_row_groups(self, fixed: Block) -> None:
        """Write the rows in groups: the loads of other kernels' results for a whole group, then its maps and stores."""
        text, rows = self.text, self.rows
        group, whole = self.in_groups(max(1, min(self.unroll, HELD // (2 * len(self.late)))))
        each, place = f"for (int u = 0; u < {group}; ++u)", f"row + u * {rows}"
        read, maps = Block(self.unit, fixed), Block(self.unit, fixed)
        words = [self._read_load(read, maps, k) for k in self.late]
        text.line("#pragma unroll 1")
        with text.block(f"for (int row = low + i0; row < high; row += {rows * group})"):
            text.all(f"{kind} held{k}[{group}];" for k, (kind, _) in zip(self.late, words, strict=True))
            text.line("#pragma unroll")
            with text.block(each):
                text.line(f"const int i = {place if whole else f'min({place}, high - 1)'};")
                with text.block(f"if ({' && '.join(self.coordinates(self.p.rows, 'i')) or 'true'})"):
                    text.all([*read.lines, *(f"held{k}[u] = {value};" for k, (_, value) in zip(self.late, words, strict=True))])
            text.line("#pragma unroll")
            with text.block(each):
                text.line(f"const int i = {place};")
                self._write_quad(maps, [] if whole else ["i < high"])

    def _read_load(self, read: Block, maps: Block, k: int) -> tuple[str, str]:
        """Return C type and text of load number ``k``, of all four columns or one for all; the maps get its elements."""
        ld = self.loads[0][k]
        dtype = self.binding.types[ld.tensor].dtype
        if self._is_same_element(k):
            value = read.load(ld)
            maps.memo[ld] = Val(f"held{k}[u]", value.dtype, value.small, True, half=value.half)
            return spell_type(CUDA, value.cdtype), value.text
        kind, elements, _ = _WORDS[dtype]
        for found, element in zip(self.loads, elements, strict=True):
            maps.memo[found[k]] = Val(f"({element.format(f'held{k}[u]')})", dtype, atom=True, half=dtype == "float16")
        place = self.unit.places[ld.tensor]
        return kind, f"*(const {kind} *)({place.pointer} + {read.address(place, ld.indices)})"

    def _write_quad(self, block: Block, tests: Sequence[str]) -> None:
        """Write the maps and stores of row ``i`` at the four points."""
        s, p, text = self.s, self.p, self.text
        with text.block(f"if ({' && '.join([*tests, *self.coordinates(p.rows, 'i')]) or 'true'})"):
            slices, kind = s.slice_k if self.split_k == 1 else 1, f"{self.number}4"
            parts = [f"*(const {kind} *)({self.totals} + (i + {q * s.bm}) * {self.line} + j)" for q in range(slices)]
            text.line(f"{kind} sum = {parts[0]};")
            text.all(f"{{ const {kind} v = {v}; {' '.join(f'sum.{c} += v.{c};' for c in 'xyzw')} }}" for v in parts[1:])
            own = Block(self.unit, block)
            for point, c in zip(self.points, "xyzw", strict=True):
                own.memo[Load(p.main.name, point)] = Val(f"sum.{c}", p.main.dtype, atom=True)
            for name in p.operator.outputs:
                self._store_word(own, name)
            text.all(own.lines)

    def _store_word(self, block: Block, name: str) -> None:
        """Store the four elements of a result as one word."""
        place = self.unit.places[name]
        values = [block.let(convert_value(CUDA, block.unrounded(Load(name, point)), place.dtype)).text for point in self.points]
        kind, _, word = _WORDS[place.dtype]
        block.line(f"*({kind} *)({place.pointer} + {block.address(place, self.points[0])}) = {word.format(*values)};")

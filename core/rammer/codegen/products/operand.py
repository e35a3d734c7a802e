"""Copies of one operand's block of ``BK x unit`` elements into shared memory, by ``rm_copy4``, ``rm_copy16`` and so on.

Three ways. *Packed*: a constant arranged at load time, 16 bytes a copy. *Along*: neighbouring threads read neighbouring rows (or
columns), 16 bytes a copy with proven contiguity and alignment, else one element. *Deep*: neighbouring threads read along the
reduction axis, for operands that are contiguous there. The instruction (``Staging``) determines the layout in shared memory, and
the products of a deep copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rammer.codegen.c_target import CTarget, join_words
from rammer.codegen.c_text import Text, combine_digits, format_sum, split_digits, weighted_terms
from rammer.codegen.contraction_form import QUOTIENT, Operand, PaddedAxis, Product, is_consecutive
from rammer.codegen.products.depth import Depth
from rammer.codegen.products.packing import Arrangement, Blocks, Common, Rows, common_order, pack_common, pack_operand
from rammer.codegen.task_parameters import Packing, Unsuited


@dataclass(frozen=True, slots=True)
class Staging:
    """The shared-memory form of an operand for an instruction.

    Elements are of ``kind`` ("float32", "tf32": constants are rounded when packed, "float16", "int8": bytes of either sign).
    ``constant``, ``deep`` and ``along`` arrange constants, deep and other copies. A deep copy has at most ``products`` products.

    ``down`` neighbouring threads copy neighbouring products before the next threads copy the next elements. With ``whole``, only
    copies of 16 bytes are supported. Without ``across``, products of one element are always adjacent, so copies of several
    elements are unsupported.
    """

    kind: str
    constant: Arrangement
    deep: Arrangement
    along: Arrangement
    products: int = 1
    down: int = 1
    whole: bool = False
    across: bool = True

    @property
    def ctype(self) -> str:
        """The C type of an element."""
        return {"float16": "unsigned short", "int8": "unsigned char"}.get(self.kind, "float")

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return {"float16": 2, "int8": 1}.get(self.kind, 4)

    @property
    def lot(self) -> int:
        """The number of elements in 16 bytes."""
        return 16 // self.item


#: For products of single threads.
PLAIN = Staging("float32", Rows(), Rows(least=4), Rows())


@dataclass(frozen=True, slots=True)
class Piece:
    """A copy to shared memory: ``target`` is a pointer to ``width`` elements. ``valid`` tests that the copy belongs to this
    thread and is inside the tensor. ``names`` spells the reduction axes."""

    target: str
    valid: Sequence[str]
    names: Mapping[str, str]
    width: int


class Maps(Protocol):
    """A writer of the maps before a contraction."""

    def apply(self, text: Text, pieces: Iterator[Piece]) -> None:
        """Write the maps on staged pieces."""
        ...


@dataclass
class Addresses:
    """Named addresses of a text. An address at a constant offset from a named one needs only an immediate operand. A separate
    address for each copy would need an addition or a register."""

    text: Text
    names: set[str] = field(default_factory=set)

    def after(self, kind: str, name: str, address: str, elements: int) -> str:
        """Return the address ``elements`` after ``address`` of the C type; define ``name`` on first use."""
        if name not in self.names:
            self.names.add(name)
            self.text.line(f"{kind}const {name} = {address};")
        return f"{name} + {elements}" if elements else name


@dataclass
class Staged:
    """A writer of the set-up and the copies of one operand. ``name`` prefixes its variables (``a`` or ``b``). ``axes`` are the
    positions that index its ``unit`` elements (``unit`` is their tile rounded up)."""

    name: str
    p: Product
    operand: Operand
    axes: tuple[int, ...]
    unit: int
    depth: Depth
    threads: int
    staging: Staging
    target: CTarget

    def __post_init__(self) -> None:
        tile, s = self.p.operator.tile, self.staging
        self.tiles = [tile[d] for d in self.axes]
        self.count = math.prod(self.tiles)
        self.packing: Packing | None = None
        self.coordinates: list[int] = []
        self.common: Common | None = None
        if self.operand.packable and len(self.axes) <= 1:
            blocks = Blocks(self.unit, self.depth, s.constant, s.kind)
            if self.p.operator.lengths:  # length variants of this product have other tiles on the device
                self.common = common_order(self.p, self.operand, self.along, blocks)
            if self.common is not None and self.along is not None:
                self.packing, self.coordinates = pack_common(self.p, self.operand, self.along, blocks, self.common)
            else:
                self.packing, self.coordinates = pack_operand(self.p, self.operand, self.along, blocks)
        narrow = {"int8": (16, 8, 4), "float16": (8, 4)}.get(s.kind, ()) if not s.whole else ()
        lots = narrow or (s.products,)
        deep = next((n for n in lots if self._is_deep(n)), 0) if self.packing is None else 0
        #: Products of a deep copy, and elements of any.
        self.products = deep or s.products
        self.deep = deep > 0
        self.down = s.down if s.whole or not self.deep else 1
        self.vector = deep or (s.lot if s.across and self.packing is None and self._has_vector_copies() else 1)
        if s.whole and self.packing is None and self.vector != s.lot:
            raise Unsuited(f"{self.operand.load} cannot be copied by 16 bytes")

    @property
    def _source(self) -> str:
        """The C type of an element in memory, with its address space."""
        return join_words(self.target.global_, "const", self.staging.ctype)

    @property
    def along(self) -> int | None:
        """The axis of the unit, or None."""
        return self.axes[0] if self.axes else None

    @property
    def arrangement(self) -> Arrangement:
        """The order in shared memory."""
        s = self.staging
        return s.constant if self.packing is not None else s.deep if self.deep else s.along

    @property
    def pitch(self) -> int:
        """The elements from one row in shared memory to the next."""
        return self.arrangement.pitch(self.unit, self.depth.block)

    @property
    def size(self) -> int:
        """The elements of one buffer of the ring."""
        return self.arrangement.size(self.unit, self.depth.block)

    def block_start(self) -> list[str]:
        """Return the declarations of the tap and the inner product at which block ``kb`` starts; [] if packed."""
        d = self.depth
        if self.packing is not None:
            return []
        if d.flat or not d.outer:
            return [f"const int tap = 0, c0 = kb * {d.block};"]
        return [f"const int tap = kb / {d.per}, c0 = (kb - tap * {d.per}) * {d.block};"]

    def place(self, row: str, element: str) -> str:
        """Return the offset of product ``row`` of element ``element`` in shared memory."""
        return self.arrangement.place(row, element, self.unit, self.depth.block)

    def _is_deep(self, lot: int) -> bool:
        """Return True if ``lot`` neighbours along the inner reduction axis are contiguous, aligned and valid together."""
        o, inner = self.operand, self.depth.inner
        if o.steps.get(inner.name, 0) != 1:
            return False
        if lot == 1:
            sides = [abs(o.steps.get(self.p.axis(d).name, 0)) for d in self.axes]
            return 1 not in sides and self.threads % self.depth.block == 0
        whole = all(s % lot == 0 for a, s in o.steps.items() if a != inner.name) and o.constant % lot == 0
        inside = inner.extent % lot == 0 and not any(inner.name in g.steps for g in o.guards)
        return whole and inside and o.aligned

    def _has_vector_copies(self) -> bool:
        """Return True if neighbours of the unit always form 16 aligned bytes that are valid together."""
        o, tile, grid, wide = self.operand, self.p.operator.tile, self.p.operator.grid, self.staging.lot
        if o.guards or not o.aligned or o.constant % wide or self.count % wide or not self.axes:
            return False
        axes = [self.p.axis(d) for d in self.axes]
        if not is_consecutive(o.steps, axes, {a.name: tile[d] for a, d in zip(axes, self.axes, strict=True)}):
            return False
        first = self.axes[0]
        below = self.count // tile[first]
        names = {self.p.axis(d).name for d in self.axes}
        rest = all(s % wide == 0 for a, s in o.steps.items() if a not in names)
        ends = tile[first] * below % wide == 0 and self.p.axis(first).extent * below % wide == 0
        return rest and (ends if grid[first] > 1 else self.count % wide == 0)

    # --- once a task ----------------------------------------------------------------------------

    def setup(self, text: Text) -> None:
        """Write per-thread offsets, validity and padding coordinates."""
        if self.common is not None:
            self._setup_common(text, self.common)
        elif self.packing is not None:
            self._setup_packed(text)
        elif self.deep:
            self._setup_deep(text)
        else:
            self._setup_along(text)

    def _setup_packed(self, text: Text) -> None:
        places = [(f"o{d}", self.p.axis(d).extent) for d in self.coordinates]
        if self.along is not None:
            places.append((f"o{self.along} / {self.p.operator.tile[self.along]}", self.p.operator.grid[self.along]))
        size = self.depth.blocks * self.size
        base = f"{self.name}g + ({self.target.types['int64']})({combine_digits(places)}) * {size} + tid * {self.staging.lot}"
        text.line(f"{self._source} *const {self.name}p = {base};")

    def _setup_common(self, text: Text, common: Common) -> None:
        """Write the start of the task's tile, and each copy's offsets in a block of rows and in shared memory."""
        n, lot, per = self.name, self.staging.lot, self._per_row(common)
        fixed = combine_digits([(f"o{d}", self.p.axis(d).extent) for d in self.coordinates]) if self.coordinates else "0"
        wide = self.target.types["int64"]
        tile = f"({wide})({fixed}) * {common.size} + ({wide})o{self.along} * {common.wide}"
        text.line(f"{self._source} *const {n}p = {n}g + {tile};")
        for i in range(self._common_copies(common)):
            at = f"(tid + {i * self.threads})" if i else "tid"
            row, place = f"{at} / {per}", f"{at} % {per} * {lot}"
            text.line(f"const int {n}r{i} = {row} * {common.row} + {place};")
            text.line(f"const int {n}t{i} = {row} * {self.pitch * common.wide} + {place};")

    def _fetch_common(self, text: Text, common: Common) -> None:
        n, depth, rows = self.name, self.depth, self.depth.block // common.wide
        block, whole = depth.stored("kb"), rows * self._per_row(common)
        first = f"{block} * {rows}"
        if common.tap not in (0, depth.per_tap * rows):
            first = f"({block} / {depth.per_tap} * {common.tap} + {block} % {depth.per_tap} * {rows})"
        text.line(f"{self._source} *const {n}f = {n}p + (size_t)({first}) * {common.row};")
        for i in range(self._common_copies(common)):
            guard = f"if (tid + {i * self.threads} < {whole}) " if (i + 1) * self.threads > whole else ""
            text.line(f"{guard}rm_copy16({n}s + {n}t{i}, {n}f + {n}r{i}, true);")

    def _per_row(self, common: Common) -> int:
        """Return the copies of a row of a block."""
        return self.unit * common.wide // self.staging.lot

    def _common_copies(self, common: Common) -> int:
        """Return the copies of a thread for a block."""
        return -(-self.depth.block // common.wide * self._per_row(common) // self.threads)

    def _lanes(self) -> tuple[int, int, int]:
        """Return (copies in a row of the block, rows a pass, groups of copies of a thread in a row)."""
        across, threads = self.unit // self.vector, self.threads // self.down
        if across <= threads:
            return across, threads // across * self.down, 1
        return across, self.down, -(-across // threads)

    def _setup_along(self, text: Text) -> None:
        across, rows, groups = self._lanes()
        n, down, lanes = self.name, self.down, self.threads // self.down
        thread, below = ("tid", "") if down == 1 else (f"(tid / {down})", f" * {down} + tid % {down}")
        text.line(f"const int {n}k = {f'{thread} / {across}' if groups == 1 else '0'}{below};")
        for g in range(groups):
            lane = f"{thread} % {across}" if groups == 1 else f"{thread} + {g * lanes}"
            text.line(f"const int {n}j{g} = ({lane}){f' * {self.vector}' if self.vector > 1 else ''};")
            inside = [f"{n}k < {rows}"] if groups == 1 and across * rows < self.threads else []
            self._define_element(text, f"{n}j{g}", str(g), inside)

    def _words(self) -> int:
        """Return the copies along the reduction that neighbouring threads make of a *deep* operand's block."""
        return self.depth.block // self.products

    def _step(self) -> int:
        """Return the elements of the unit that all threads copy at a time, for a *deep* operand."""
        return self.threads // self._words()

    def _setup_deep(self, text: Text) -> None:
        n, down, words, lot = self.name, self.down, self._words(), self.products
        thread, below = ("tid", "") if down == 1 else (f"tid / {down}", f" * {down} + tid % {down}")
        text.line(f"const int {n}k = {thread} % {words}{f' * {lot}' if lot > 1 else ''};")
        for i in range(-(-self.unit // self._step())):
            text.line(f"const int {n}j{i} = {thread} / {words}{below} + {i * self._step()};")
            self._define_element(text, f"{n}j{i}", str(i), [])

    def _define_element(self, text: Text, place: str, suffix: str, inside: list[str]) -> None:
        """Write offset ``{n}o``, validity ``{n}v`` and padding coordinates ``{n}g`` of the unit's element ``place``."""
        n, p = self.name, self.p
        local = {p.axis(d).name: t for d, t in zip(self.axes, split_digits(place, self.tiles), strict=True)}
        names = {a: f"(o{d} + {local[a]})" if a in local else f"o{d}" for d, a in enumerate(x.name for x in p.main.axes)}
        text.line(f"const int {n}o{suffix} = {format_sum(weighted_terms(self.operand.steps, names), self.operand.constant)};")
        tests = list(inside)
        if self.count < self.unit or not self.axes:
            tests.append(f"{place} < {self.count}")
        for d in self.axes:
            axis = p.axis(d)
            if axis.extent % p.operator.tile[d]:
                tests.append(f"{names[axis.name]} < {axis.extent}")
        text.line(f"const bool {n}v{suffix} = {' && '.join(tests) or 'true'};")
        for number, guard in enumerate(self.operand.guards):
            text.line(f"const int {n}g{suffix}_{number} = {format_sum(weighted_terms(guard.steps, names), guard.constant)};")

    # --- once a block of products -----------------------------------------------------------------

    def fetch(self, text: Text) -> None:
        """Write the copies of block ``kb`` into ``{n}s``, the block's shared memory."""
        if self.common is not None:
            self._fetch_common(text, self.common)
            return
        if self.packing is not None:
            self._fetch_packed(text)
            return
        taps, known = self._define_tap(text) if not self.depth.flat else {}, Addresses(text)
        for further, element, tests in self._pieces():
            self._copy(known, further, element, tests, taps)

    def apply(self, text: Text, prologue: Maps) -> None:
        """Write the prologue on this thread's copies of block ``kb``, in ``{n}s``. Call it after its copies have arrived."""
        taps = self._define_tap(text) if not self.depth.flat else {}
        prologue.apply(text, self._mapped_pieces(text, taps))

    def _mapped_pieces(self, text: Text, taps: Mapping[str, str]) -> Iterator[Piece]:
        known = Addresses(text)
        for further, element, tests in self._pieces():
            names, _, valid = self._element_at(self._block_row(further), element, taps)
            yield Piece(self._destination_address(known, further, element), [*tests, *valid], names, self.vector)

    def _block_row(self, further: int) -> str:
        """Return the row of the block at offset ``further`` from this thread's first one."""
        return f"({self.name}k + {further})" if further else f"{self.name}k"

    def _pieces(self) -> Iterator[tuple[int, int, list[str]]]:
        """Yield this thread's copies of a block: row offset from its first row, element number, and ownership tests."""
        n = self.name
        if self.deep:
            step = self._step()
            for i in range(-(-self.unit // step)):
                yield 0, i, [f"{n}j{i} < {self.unit}"] if (i + 1) * step > self.unit else []
            return
        _, rows, groups = self._lanes()
        across, lanes = self.unit // self.vector, self.threads // self.down
        for i in range(-(-self.depth.block // rows)):
            for g in range(groups):
                tests = [f"{self._block_row(i * rows)} < {self.depth.block}"] if (i + 1) * rows > self.depth.block else []
                tests += [f"{n}k < {rows}"] if groups == 1 and across * rows < self.threads else []
                tests += [f"{n}j{g} < {self.unit}"] if (g + 1) * lanes > across > lanes else []
                yield i * rows, g, tests

    def _fetch_packed(self, text: Text) -> None:
        n, whole, wide, block = self.name, self.size, self.staging.lot, self.depth.stored("kb")
        for i in range(-(-whole // (wide * self.threads))):
            at = i * wide * self.threads
            guard = f"if (tid * {wide} + {at} < {whole}) " if at + wide * self.threads > whole else ""
            text.line(f"{guard}rm_copy16({n}s + tid * {wide} + {at}, {n}p + (size_t){block} * {whole} + {at}, true);")

    def _define_tap(self, text: Text) -> dict[str, str]:
        """Write the block's tap: ``{n}q`` (offset) and the padding tests of each element."""
        n, d = self.name, self.depth
        names = {a.name: t for a, t in zip(d.outer, split_digits("tap", [a.extent for a in d.outer]), strict=True)}
        text.line(f"const int {n}q = {format_sum(weighted_terms(self.operand.steps, names))};")
        text.all(f"const int {n}q_{k} = {format_sum(weighted_terms(g.steps, names))};" for k, g in enumerate(self.operand.guards))
        return names

    def _copy(self, known: Addresses, further: int, element: int, tests: Sequence[str], taps: Mapping[str, str]) -> None:
        to, at = self._destination_address(known, further, element), self._at(known, further, element, taps)
        guard = f"if ({' && '.join(tests)}) " if tests else ""
        valid = " && ".join(self._element_at(self._block_row(further), element, taps)[2])
        fill = f", {self.operand.fill % 256 * 0x01010101}u" if self.operand.fill else ""
        known.text.line(f"{guard}rm_copy{self.vector * self.staging.item}({to}, {at}, {valid}{fill});")

    def _destination_address(self, known: Addresses, further: int, element: int) -> str:
        """Return the destination of a copy, relative to the thread's first one."""
        ahead = self.arrangement.ahead(further, self._element_gap(element), self.unit, self.depth.block)
        row, first, on = (0, 0, ahead) if ahead is not None else (further, element, 0)
        place = self.place(self._block_row(row), f"{self.name}j{first}")
        return known.after(
            f"{join_words(self.target.local, self.staging.ctype)} *", f"{self.name}to{first}_{row}", f"{self.name}s + {place}", on
        )

    def _at(self, known: Addresses, further: int, element: int, taps: Mapping[str, str]) -> str:
        """Return the source of a copy, relative to the thread's first one. In flat order each row has a separate address."""
        distance, steps = self._tensor_distance(self._element_gap(element)), self.operand.steps
        row, on = (further, 0) if self.depth.flat else (0, further * steps.get(self.depth.inner.name, 0))
        first, on = (element, on) if distance is None else (0, on + distance)
        address = f"{self.name}g + ({self._element_at(self._block_row(row), first, taps)[1]})"
        return known.after(f"{self._source} *", f"{self.name}at{first}_{row}", address, on)

    def _element_gap(self, element: int) -> int:
        """Return the elements of the unit between a thread's first one and number ``element``."""
        return element * (self._step() if self.deep else self.threads // self.down * self.vector)

    def _tensor_distance(self, gap: int) -> int | None:
        """Return the distance in the tensor of unit elements with this gap, or None if it varies."""
        names, steps = [self.p.axis(d).name for d in self.axes], self.operand.steps
        if gap == 0:
            return 0
        if (
            not names
            or gap % (below := math.prod(self.tiles[1:]))
            or any(s.partition(QUOTIENT)[0] == names[0] for s in steps if QUOTIENT in s)
        ):
            return None
        return steps.get(names[0], 0) * (gap // below)

    def _element_at(self, row: str, element: int, taps: Mapping[str, str]) -> tuple[dict[str, str], str, list[str]]:
        """Return the reduction axes in row ``row`` of the block, as C text, the element's offset, and its bounds tests."""
        n, d, o = self.name, self.depth, self.operand
        inner = f"(c0 + {row})"
        tests = [f"{n}v{element}"]
        if d.flat:
            names = {a.name: t for a, t in zip(d.axes, split_digits(inner, [a.extent for a in d.axes]), strict=True)}
            offset = format_sum([(f"{n}o{element}", 1), *weighted_terms(o.steps, names)])
            tests += [f"{inner} < {d.deep}"] if d.ragged else []
            tests += [self._inside_test(g, f"{n}g{element}_{k}", weighted_terms(g.steps, names)) for k, g in enumerate(o.guards)]
            return names, offset, tests
        names = {d.inner.name: inner}
        offset = format_sum([(f"{n}o{element}", 1), (f"{n}q", 1), *weighted_terms(o.steps, names)])
        tests += [f"{inner} < {d.deep}"] if d.ragged else []
        tests += [
            self._inside_test(g, f"{n}g{element}_{k}", [(f"{n}q_{k}", 1), *weighted_terms(g.steps, names)])
            for k, g in enumerate(o.guards)
        ]
        return {**taps, **names}, offset, tests

    @staticmethod
    def _inside_test(guard: PaddedAxis, base: str, terms: Sequence[tuple[str, int]]) -> str:
        return f"(unsigned)({format_sum([(base, 1), *terms])}) < {guard.extent}u"

"""Copying one operand's block of ``BK x unit`` elements into shared memory, by cp.async.

Three ways. *Packed*: a constant arranged at load time, 16 bytes a copy. *Along*: neighbouring threads read
neighbouring rows (or columns), 16 bytes a copy where contiguity and alignment are proved, else 4. *Deep*: neighbouring
threads read along the reduction axis, for operands that are contiguous there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rammer.codegen.contraction import Guard, Operand, Product
from rammer.codegen.task import Packing
from rammer.codegen.text import Text, digits, total, weighted

from rammer_cuda.contraction.change import Change, Piece
from rammer_cuda.contraction.depth import Depth
from rammer_cuda.contraction.packing import pack


@dataclass
class Stage:
    """Writes the set-up and the copies of one operand. ``name`` prefixes its variables (``a`` or ``b``), ``axes`` are
    the positions that run through its ``unit`` elements (``unit`` is their tile rounded up)."""

    name: str
    p: Product
    operand: Operand
    axes: tuple[int, ...]
    unit: int
    depth: Depth
    threads: int
    pad: int = 0
    form: str = "float32"
    #: The C type of an element, and how many make 16 bytes; neighbouring threads that take neighbouring rows of a block
    #: before others take their next columns.
    ctype: ClassVar[str] = "float"
    wide: ClassVar[int] = 4
    down: ClassVar[int] = 1

    def __post_init__(self) -> None:
        tile = self.p.operator.tile
        self.tiles = [tile[d] for d in self.axes]
        self.count = 1
        for t in self.tiles:
            self.count *= t
        self.origins = {a.name: f"o{d}" for d, a in enumerate(self.p.main.axes)}
        self.packing: Packing | None = None
        self.coordinates: list[int] = []
        if self.operand.packable and len(self.axes) <= 1:
            self._pack()
        self.deep = self.packing is None and self._deep()
        self.vector = self.wide if self.packing is None and not self.deep and self._vector() else 1

    def _pack(self) -> None:
        self.unit, self.pad = self.unit + self.pad, 0
        self.packing, self.coordinates = pack(self.p, self.operand, self.along, self.unit, self.depth, self.form)

    @property
    def along(self) -> int | None:
        """The axis that runs through the unit, if one does."""
        return self.axes[0] if self.axes else None

    @property
    def pitch(self) -> int:
        """Elements from one row of the block to the next; padded where threads write down the columns."""
        return self.unit + (self.pad or (4 if self.deep else 0))

    @property
    def size(self) -> int:
        """Elements of one buffer of the ring."""
        return self.depth.block * self.pitch

    def _deep(self) -> bool:
        inner = self.operand.steps.get(self.depth.inner.name, 0)
        sides = [abs(self.operand.steps.get(self.p.axis(d).name, 0)) for d in self.axes]
        return inner == 1 and 1 not in sides and self.threads % self.depth.block == 0

    def _vector(self) -> bool:
        """Whether ``wide`` neighbours of the unit are always 16 aligned bytes, valid or not together."""
        o, tile, grid, wide = self.operand, self.p.operator.tile, self.p.operator.grid, self.wide
        if o.guards or not o.aligned or o.constant % wide or self.count % wide or not self.axes:
            return False
        expected = 1
        for d in reversed(self.axes):
            axis = self.p.axis(d)
            if o.steps.get(axis.name, 0) != expected:
                return False
            if d != self.axes[0] and tile[d] != axis.extent:
                return False
            expected *= axis.extent
        first = self.axes[0]
        below = self.count // tile[first]
        names = {self.p.axis(d).name for d in self.axes}
        rest = all(s % wide == 0 for a, s in o.steps.items() if a not in names)
        ends = tile[first] * below % wide == 0 and self.p.axis(first).extent * below % wide == 0
        return rest and (ends if grid[first] > 1 else self.count % wide == 0)

    # --- once a task ----------------------------------------------------------------------------

    def setup(self, text: Text) -> None:
        """Per-thread offsets, validity and padding coordinates."""
        if self.packing is not None:
            self._setup_packed(text)
        elif self.deep:
            self._setup_deep(text)
        else:
            self._setup_along(text)

    def _setup_packed(self, text: Text) -> None:
        place = ""
        for d in self.coordinates:
            axis = self.p.axis(d)
            place = f"({place}) * {axis.extent} + o{d}" if place else f"o{d}"
        if self.along is not None:
            grid, tile = self.p.operator.grid[self.along], self.p.operator.tile[self.along]
            index = f"o{self.along} / {tile}"
            place = f"({place}) * {grid} + {index}" if place else index
        size = self.depth.blocks * self.size
        base = f"{self.name}g + (long long)({place or '0'}) * {size} + tid * {self.wide}"
        text.line(f"const {self.ctype} *const {self.name}p = {base};")

    def _lanes(self) -> tuple[int, int, int]:
        """(copies in a row of the block, rows a pass, groups of copies a thread has in a row)."""
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
            self._element(text, f"{n}j{g}", str(g), inside)

    def _words(self) -> int:
        """Copies along the reduction that neighbouring threads make of a *deep* operand's block."""
        return self.depth.block

    def _step(self) -> int:
        """Elements of the unit that all threads copy at a time where the operand is *deep*."""
        return self.threads // self._words()

    def _setup_deep(self, text: Text) -> None:
        n, step = self.name, self._step()
        text.line(f"const int {n}k = tid % {self.depth.block};")
        for i in range(-(-self.unit // step)):
            text.line(f"const int {n}j{i} = tid / {self.depth.block} + {i * step};")
            self._element(text, f"{n}j{i}", str(i), [])

    def _element(self, text: Text, place: str, suffix: str, inside: list[str]) -> None:
        """Offset ``{n}o``, validity ``{n}v`` and padding coordinates ``{n}g`` of the element ``place`` of the unit."""
        n, p = self.name, self.p
        local = {p.axis(d).name: t for d, t in zip(self.axes, digits(place, self.tiles), strict=True)}
        names = {a: f"(o{d} + {local[a]})" if a in local else f"o{d}" for d, a in
                 enumerate(x.name for x in p.main.axes)}  # fmt: skip
        text.line(f"const int {n}o{suffix} = {total(weighted(self.operand.steps, names), self.operand.constant)};")
        tests = list(inside)
        if self.count < self.unit or not self.axes:
            tests.append(f"{place} < {self.count}")
        for d in self.axes:
            axis = p.axis(d)
            if axis.extent % p.operator.tile[d]:
                tests.append(f"{names[axis.name]} < {axis.extent}")
        text.line(f"const bool {n}v{suffix} = {' && '.join(tests) or 'true'};")
        for number, guard in enumerate(self.operand.guards):
            text.line(f"const int {n}g{suffix}_{number} = {total(weighted(guard.steps, names), guard.constant)};")

    # --- once a block of products -----------------------------------------------------------------

    def fetch(self, text: Text) -> None:
        """The copies of block ``kb`` into ``{n}s``, the block's shared memory."""
        if self.packing is not None:
            self._fetch_packed(text)
            return
        taps = self._tap(text) if not self.depth.flat else {}
        for row, element, tests in self._pieces():
            self._copy(text, row, element, self._target(row, element), tests, taps)

    def change(self, text: Text, change: Change) -> None:
        """The prologue on what this thread copied of block ``kb``, in ``{n}s``: call it where its copies have arrived."""
        taps = self._tap(text) if not self.depth.flat else {}
        change.apply(text, self._changed(taps))

    def _changed(self, taps: Mapping[str, str]) -> Iterator[Piece]:
        for row, element, tests in self._pieces():
            names, _, valid = self._element_at(row, element, taps)
            yield Piece(self._target(row, element), [*tests, *valid], names, self.vector)

    def _target(self, row: str, element: str) -> str:
        return f"{self.name}s + {self.place(row, f'{self.name}j{element}')}"

    def _pieces(self) -> Iterator[tuple[str, str, list[str]]]:
        """This thread's copies of a block: row of the block, number of the element, and tests that the copy is its own."""
        n = self.name
        if self.deep:
            step = self._step()
            for i in range(-(-self.unit // step)):
                yield f"{n}k", str(i), [f"{n}j{i} < {self.unit}"] if (i + 1) * step > self.unit else []
            return
        _, rows, groups = self._lanes()
        across, lanes = self.unit // self.vector, self.threads // self.down
        for i in range(-(-self.depth.block // rows)):
            for g in range(groups):
                row = f"({n}k + {i * rows})" if i else f"{n}k"
                tests = [f"{row} < {self.depth.block}"] if (i + 1) * rows > self.depth.block else []
                tests += [f"{n}k < {rows}"] if groups == 1 and across * rows < self.threads else []
                tests += [f"{n}j{g} < {self.unit}"] if (g + 1) * lanes > across > lanes else []
                yield row, str(g), tests

    def place(self, row: str, element: str) -> str:
        """Where element ``element`` of row ``row`` of a block lies in shared memory."""
        return f"{row} * {self.pitch} + {element}"

    def _fetch_packed(self, text: Text) -> None:
        n, whole = self.name, self.size
        wide = self.wide
        for i in range(-(-whole // (wide * self.threads))):
            at = i * wide * self.threads
            guard = f"if (tid * {wide} + {at} < {whole}) " if at + wide * self.threads > whole else ""
            text.line(f"{guard}rm_copy16({n}s + tid * {wide} + {at}, {n}p + (size_t)kb * {whole} + {at}, true);")

    def _tap(self, text: Text) -> dict[str, str]:
        """Work out the block's tap: ``{n}q`` (offset) and the padding tests of each element."""
        n, d = self.name, self.depth
        names = {a.name: t for a, t in zip(d.outer, digits("tap", [a.extent for a in d.outer]), strict=True)}
        text.line(f"const int {n}q = {total(weighted(self.operand.steps, names))};")
        text.all(f"const int {n}q_{k} = {total(weighted(g.steps, names))};" for k, g in enumerate(self.operand.guards))
        return names

    def _copy(self, text: Text, row: str, element: str, target: str, tests: Sequence[str], taps: Mapping[str, str]) -> None:
        _, offset, valid = self._element_at(row, element, taps)
        guard = f"if ({' && '.join(tests)}) " if tests else ""
        call = "rm_copy16" if self.vector == self.wide else f"rm_copy{16 // self.wide}"
        text.line(f"{guard}{call}({target}, {self.name}g + ({offset}), {' && '.join(valid)});")

    def _element_at(self, row: str, element: str, taps: Mapping[str, str]) -> tuple[dict[str, str], str, list[str]]:
        """Spelling of the reduction axes in row ``row`` of the block, the element's offset, and tests that it is inside."""
        n, d, o = self.name, self.depth, self.operand
        inner = f"(c0 + {row})"
        tests = [f"{n}v{element}"]
        if d.flat:
            names = {a.name: t for a, t in zip(d.axes, digits(inner, [a.extent for a in d.axes]), strict=True)}
            offset = total([(f"{n}o{element}", 1), *weighted(o.steps, names)])
            tests += [f"{inner} < {d.total}"] if d.total % d.block else []
            tests += [self._inside(g, f"{n}g{element}_{k}", weighted(g.steps, names)) for k, g in enumerate(o.guards)]
            return names, offset, tests
        names = {d.inner.name: inner}
        offset = total([(f"{n}o{element}", 1), (f"{n}q", 1), *weighted(o.steps, names)])
        tests += [f"{inner} < {d.inner.extent}"] if d.inner.extent % d.block else []
        tests += [
            self._inside(g, f"{n}g{element}_{k}", [(f"{n}q_{k}", 1), *weighted(g.steps, names)])
            for k, g in enumerate(o.guards)
        ]
        return {**taps, **names}, offset, tests

    @staticmethod
    def _inside(guard: Guard, base: str, terms: Sequence[tuple[str, int]]) -> str:
        return f"(unsigned)({total([(base, 1), *terms])}) < {guard.extent}u"

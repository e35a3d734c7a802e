"""Anti-unification: one tensor program for a range of extents, from the programs of several lengths.

A model bound at several lengths gives tensor programs of equal form, which differ only in integers. In their least general
generalisation (Plotkin, "A note on inductive generalization", Machine Intelligence 5, 1970; anti-unification), each differing
integer becomes the affine function of the lengths that fits all programs. If no function fits, the range is unsupported.

A length is data: a scalar input of the program. Tensors keep the extents of the longest program, so memory, tiles and the table
are static. Elements past the length are computed but meaningless. Results do not depend on them: reductions stop at the length,
and padding begins there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from rammer.frontend.lower.affine_gather import placed_rows
from rammer.frontend.ranges.length_fit import LengthFit
from rammer.frontend.ranges.range_bounds import RangeBounds, ended_at
from rammer.frontend.ranges.range_padding import SkipMarker
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, ComputeGraph, verify_compute_graph
from rammer.ir.evaluate import evaluate_positions
from rammer.ir.expr import Cast, Const, Expr, Load, Number, Op, Ref, Table
from rammer.ir.extent import AffineExtent, Dim, NoRange, Point, Ranged, format_point
from rammer.ir.names import Names, make_identifier
from rammer.ir.types import TensorType, is_float

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


#: Largest number of entries at each end of a table that may differ from the others.
MOST_EDGES: Final = 8
#: Most elements at which two forms of index arithmetic are compared.
MOST_COMPARED: Final = 1 << 20


class Generalised(NamedTuple):
    """A program for a range, its mapping to every length, and the tensors that end at the length."""

    graph: ComputeGraph
    ranged: Ranged
    ended: RangeBounds


def generalise_programs(fit: LengthFit, graphs: Sequence[ComputeGraph], promised: Collection[str] | None = None) -> Generalised:
    """Return the program of which all ``graphs``, lowered at the points of ``fit``, are instances.

    For each dimension a point other than the first differs in that dimension alone. Raises NoRange if a value is not a function
    of lengths that ``fit`` finds. Inputs in ``promised`` (None: all) hold zeros past the lengths. The scalar inputs are those of
    ``fit``; no graph has them."""
    fit.name_inputs(Names([*(n for g in graphs for n in g.types), *filter(None, fit.lengths.values())]))
    promised = graphs[0].inputs if promised is None else promised
    return _Generalisation(fit, graphs, promised).result()


def begins_alike(values: Sequence[Array | None]) -> bool:
    """Return True if a constant is a prefix of the first one at each length; None marks a tensor that is not constant."""
    whole = values[0]
    if whole is None:
        return all(p is None for p in values)
    nan = is_float(str(whole.dtype))
    return all(p is whole or (p is not None and np.array_equal(_take_prefix(whole, p), p, equal_nan=nan)) for p in values)


@dataclass
class _Generalisation:
    fit: LengthFit
    graphs: Sequence[ComputeGraph]
    promised: Collection[str]
    deep: dict[str, dict[str, Dim]] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)  #: Constants that are now computed -> names of the longest constants.
    extents: dict[str, Dim] = field(default_factory=dict)  #: Extents of the current Compute's axes.
    hints: Sequence[Dim] = ()  #: Sums of extents of the current Compute's operands.

    @property
    def points(self) -> Sequence[Point]:
        """The lengths of the graphs."""
        return self.fit.points

    def result(self) -> Generalised:
        """Return the program for the range."""
        first = self.graphs[0]
        self._require_equal("operators of the program", [tuple(c.name for c in g.computes) for g in self.graphs])
        self._require_equal("inputs", [(g.inputs, g.outputs) for g in self.graphs])
        self.shapes = {n: self._shape(n) for n in (*first.inputs, *first.constants)}
        for c in first.computes:
            self.shapes[c.name] = self._shape(c.name, self._operand_sums(c))
        counted = [self._make_growing_constant(n) for n in first.constants if not self._is_prefix_constant(n)]
        found = counted + [self._generalise_compute(c.name, number) for number, c in enumerate(first.computes)]
        found = placed_rows(found, self._tensor_types(found), (*first.constants, *self.named.values()), first.outputs)
        names = self.fit.taken
        constants = {self.named.get(n, n): a for n, a in first.constants.items()}
        ends = SkipMarker(found, self.shapes, self.deep, self.value, self._tensor_dtypes, self.promised, constants, names)
        computes = tuple(ends.result())
        types = self._tensor_types(computes)
        graph = replace(
            first, computes=computes, inputs=(*first.inputs, *self.fit.lengths.values()), types=types, constants=constants
        )
        graph = replace(graph, aliases={**first.aliases, **{t: f"length of {n}" for n, t in self.fit.lengths.items()}})
        verify_compute_graph(graph)
        shapes = {n: self.shapes[n] for n in (*first.inputs, *first.outputs)}
        ranged = Ranged(dict(self.fit.lengths), shapes, formulas=dict(self.fit.formulas))
        return Generalised(graph, ranged, ended_at(graph, self.shapes, ends, self.fit.lengths))

    # --- integers -----------------------------------------------------------------------------

    def dim(self, values: Sequence[int], where: str) -> Dim:
        """Return the function of lengths through ``values``, one per point."""
        return self.fit.dim(values, where, self.hints)

    def _require_equal(self, what: str, values: Sequence[object]) -> None:
        other = next((p for p, v in zip(self.points, values, strict=True) if v != values[0]), None)
        if other is not None:
            what = f"{what} differ between {format_point(other)} and {format_point(self.points[0])}"
            raise NoRange(what)

    def value(self, dim: Dim) -> Expr:
        """Return ``dim`` as an expression (int64)."""
        if isinstance(dim, int):
            return ex.integer(dim)
        total: Expr = ex.integer(dim.offset)
        for name, factor in dim.terms:
            total = ex.make_add(ex.make_mul(Load(self.fit.lengths[name], ()), factor), total)
        return total

    # --- tensors ------------------------------------------------------------------------------

    def _operand_sums(self, c: Compute) -> list[Dim]:
        """Return sums of extents of the first tensors that ``c`` reads, as a concatenation has, along each axis."""
        found = list[Dim]()
        shapes = [self.shapes[n] for n in c.reads if len(self.shapes.get(n, ())) == len(c.axes)]
        for dims in zip(*shapes, strict=True):
            found += accumulate(dims, add_dims)
        return found

    def _shape(self, name: str, hints: Sequence[Dim] = ()) -> tuple[Dim, ...]:
        shapes = [g.types[name].shape for g in self.graphs if name in g.types]
        self._require_equal(f"dimensions of {name}", [len(g.types[name].shape) if name in g.types else -1 for g in self.graphs])
        return tuple(self.fit.extent(extents, f"the shape of {name}", hints) for extents in zip(*shapes, strict=True))

    def _is_prefix_constant(self, name: str) -> bool:
        """Return True if a constant of every shorter program is a prefix of the longest one."""
        return begins_alike([g.constants.get(name) for g in self.graphs])

    def _make_growing_constant(self, name: str) -> Compute:
        """Return an expression for an integer constant whose elements all grow alike with the lengths, like positions after a
        past."""
        whole = self.graphs[0].constants[name]
        if not np.issubdtype(whole.dtype, np.integer):
            raise self._make_prefix_error(name, self.points[-1])
        first = [g.constants[name].flat[0] - whole.flat[0] if name in g.constants and whole.size else 0 for g in self.graphs]
        grown = self.dim([int(n) for n in first], f"constant {name}")
        for point, graph, growth in zip(self.points, self.graphs, self.fit.values(grown), strict=True):
            part = graph.constants.get(name)
            if part is None or not np.array_equal(_take_prefix(whole, part) + growth, part):
                raise self._make_prefix_error(name, point)
        kept = make_identifier(f"{name}_longest", self.fit.taken)
        self.named[name] = kept
        self.shapes[kept] = self.shapes[name]
        axes = tuple(Axis(f"i{d}", n) for d, n in enumerate(whole.shape))
        at = Load(kept, tuple(Ref(a.name) for a in axes))
        return Compute(name, str(whole.dtype), axes, Op("add", (at, _cast_from_index(str(whole.dtype), self.value(grown)))))

    def _make_prefix_error(self, name: str, point: Point) -> NoRange:
        what = f"constant {name} at {format_point(point)} is not a prefix of its value at {format_point(self.points[0])}"
        return NoRange(what)

    # --- expressions --------------------------------------------------------------------------

    def _generalise_compute(self, name: str, number: int) -> Compute:
        same = [g.computes[number] for g in self.graphs]
        hints = self.hints = self._operand_sums(same[0])
        first, where = same[0], f"{same[0].origin or name}"
        self._require_equal(
            f"axes of {where}",
            [(c.dtype, c.combiner, tuple(a.name for a in c.axes), tuple(a.name for a in c.reduce)) for c in same],
        )
        self.deep[name] = {
            r.name: self.fit.extent([c.reduce[i].extent for c in same], where, hints) for i, r in enumerate(first.reduce)
        }
        self.extents = {**dict(zip((a.name for a in first.axes), self.shapes[name], strict=True)), **self.deep[name]}
        return replace(first, body=self._generalise_expr([c.body for c in same], where))

    def _tensor_types(self, computes: Iterable[Compute]) -> dict[str, TensorType]:
        """Return the types of all tensors at the greatest lengths, for a program with these ``computes``."""
        first = self.graphs[0].types
        return {
            **first,
            **{kept: first[n] for n, kept in self.named.items()},
            **dict.fromkeys(self.fit.lengths.values(), TensorType("int64", ())),
            **{c.name: c.type for c in computes},
        }

    @property
    def _tensor_dtypes(self) -> dict[str, str]:
        kinds = {n: t.dtype for n, t in self.graphs[0].types.items()}
        kinds |= {kept: kinds[n] for n, kept in self.named.items()}
        return {**kinds, **dict.fromkeys(self.fit.lengths.values(), "int64")}

    def _generalise_expr(self, same: Sequence[Expr], where: str) -> Expr:
        """Return the common form of the expressions."""
        first = same[0]
        if isinstance(first, Const) and not all(e == first for e in same):
            return self._generalise_literal([e for e in same if isinstance(e, Const) and e.dtype == first.dtype], where)
        if any(_expr_head(e) != _expr_head(first) for e in same) and not any(map(ex.has_loads, same)):
            made = self._generalise_positions(same, where)
            if made is not None:
                return made
        if (base := _base_without_offset(same)) is not None:
            offsets = [form[1] for e in same if (form := ex.affine_form(e)) is not None]
            return ex.make_add(base, self.value(self.dim(offsets, where)))
        self._require_equal(f"expressions of {where}", [_expr_head(e) for e in same])
        parts = tuple(self._generalise_expr(kids, where) for kids in zip(*(ex.children(e) for e in same), strict=True))
        made = ex.rebuild_expr(first, parts) if parts else first
        if isinstance(made, Load):
            fills = {e.fill for e in same if isinstance(e, Load)} - {None}
            if len(fills) > 1:
                raise NoRange(f"padding of {where} differs between lengths")
            made = replace(made, fill=next(iter(fills), None))
        if not isinstance(made, Load):
            return made
        if made.fill is None and any(_is_divided_by_length(i) for i in made.indices):
            zero: Number = 0.0 if is_float(self._tensor_dtypes[made.tensor]) else 0
            return replace(made, fill=zero)  # past the length of a flattened tensor, such an index exceeds the memory
        if made.fill is None:
            self._check_unpadded(made, where)
            return made
        return self._padded(made, where)

    def _generalise_literal(self, same: Sequence[Const], where: str) -> Expr:
        """Return an affine form of differing numbers: integers, and floats that are counts or their reciprocals."""
        if len(same) != len(self.graphs):
            raise NoRange(f"expressions of {where} change form between lengths")
        dtype, values = same[0].dtype, [c.value for c in same]
        if all(float(v).is_integer() for v in values):
            return _cast_from_index(dtype, self.value(self.dim([int(v) for v in values], where)))
        counts = [round(1 / v) if v else 0 for v in values]
        kind = np.dtype(dtype).type
        if any(not n or kind(1) / kind(n) != kind(v) for n, v in zip(counts, values, strict=True)):
            raise NoRange(f"a number of {where} is not a known function of lengths ({values[:4]})")
        return Op("div", (Const(1.0, dtype), _cast_from_index(dtype, self.value(self.dim(counts, where)))))

    def _generalise_positions(self, same: Sequence[Expr], where: str) -> Expr | None:
        """Return a common form of different arithmetic over axes: the first form if it has the values of the others within their
        extents, perhaps with the last few values as functions of lengths. Return None if others differ elsewhere."""
        first, names = same[0], sorted({name for e in same for name in ex.axes_of(e)})
        sizes = [self.fit.values(self.extents[name]) for name in names]
        boxes = [tuple(Axis(name, size[i]) for name, size in zip(names, sizes, strict=True)) for i in range(len(same))]
        if any(math.prod(a.extent for a in box) > MOST_COMPARED for box in boxes):
            return None
        found = [evaluate_positions(e, box) for e, box in zip(same, boxes, strict=True)]
        differ = [f != _take_prefix(found[0], f) for f in found]
        if not any(d.any() for d in differ):
            return first
        index: Expr = Ref(names[0])
        if all(isinstance(e, Table) and isinstance(first, Table) and e.index == first.index for e in same):
            tables, index = [np.array(e.values) for e in same if isinstance(e, Table)], ex.children(first)[0]
        elif len(names) == 1:
            tables = found
        else:
            return None
        depth = max(len(t) - int(np.argmax(t != tables[0][: len(t)])) for t in tables if (t != tables[0][: len(t)]).any())
        if depth > min(MOST_EDGES, *map(len, tables)):
            return None
        dtype = first.dtype if isinstance(first, Table) else "int64"
        ends = [self._generalise_literal([Const(t[-k].item(), dtype) for t in tables], where) for k in range(1, depth + 1)]
        if dtype == "int64" and all(np.array_equal(np.minimum(tables[0][: len(t)], t[-1]), t) for t in tables):
            return Op("min", (first, ends[0]))
        size, made = self.dim([len(t) for t in tables], where), ends[0]
        for k, value in enumerate([*ends[1:], first], 1):
            made = Op("where", (Op("lt", (index, self.value(add_dims(size, -k)))), value, made))
        return made

    def _outside(self, index: Expr, end: AffineExtent) -> Array | None:
        """Return where ``index`` reaches ``end``, over the lengths of the range. Return None if ``index`` is no sum of axes."""
        known = ex.affine_form(index)
        if known is None or not known[0].keys() <= self.extents.keys():
            return None
        greatest = np.asarray(known[1])
        for axis, factor in known[0].items():
            greatest = greatest + max(factor, 0) * (self.fit.over_range(self.extents[axis]) - 1)
        return greatest >= self.fit.over_range(end)

    def _is_within(self, index: Expr, end: AffineExtent) -> bool:
        """Return True if ``index`` is below ``end`` at every length. Return False if that does not follow from a sum of axes."""
        outside = self._outside(index, end)
        return outside is not None and not outside.any()

    def _check_unpadded(self, load: Load, where: str) -> None:
        """Request lengths at which ``load`` needs padding, which is absent at the known ones."""
        for index, end in zip(load.indices, self.shapes.get(load.tensor, ()), strict=False):
            outside = self._outside(index, end) if isinstance(end, AffineExtent) else None
            if outside is not None:
                self.fit.require(outside, f"the padding of {where}")

    def _padded(self, load: Load, where: str) -> Expr:
        """Return a load guarded at the tensor's current extent, which is within its memory. An index that is always inside, for
        example of a batch axis, needs no test."""
        ends = [
            (i, d) for i, d in zip(load.indices, self.shapes.get(load.tensor, ()), strict=False) if isinstance(d, AffineExtent)
        ]
        tests = [Op("lt", (i, self.value(d))) for i, d in ends if not self._is_within(i, d)]
        if not tests:
            return load
        inside = reduce(lambda a, b: Op("and_", (a, b)), tests)
        fill: Number = load.fill if load.fill is not None else 0
        return Op("where", (inside, load, Const(fill, self._tensor_dtypes[load.tensor])))


def add_dims(a: Dim, b: Dim) -> Dim:
    """Return the sum of two extents."""
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    terms, offset = dict[str, int](), 0
    for dim in (a, b):
        offset += dim if isinstance(dim, int) else dim.offset
        for name, factor in () if isinstance(dim, int) else dim.terms:
            terms[name] = terms.get(name, 0) + factor
    kept = tuple((n, f) for n, f in terms.items() if f)
    return AffineExtent(kept, offset) if kept else offset


def _base_without_offset(same: Sequence[Expr]) -> Expr | None:
    """Return the first of ``same`` without a constant term, if the others are this sum of axes with another constant. Return None
    otherwise, or if all are equal."""
    forms = [ex.affine_form(e) for e in same]
    base = next((e for e, form in zip(same, forms, strict=True) if form is not None and not form[1]), None)
    known = {None if form is None else tuple(sorted(form[0].items())) for form in forms}
    return base if len(known) == 1 and any(e != base for e in same) else None


def _is_divided_by_length(index: Expr) -> bool:
    """Return True if a length is a divisor in ``index``."""
    return any(isinstance(e, Op) and e.fn in ("floordiv", "mod") and ex.has_loads(e.args[1]) for e in ex.walk(index))


def _cast_from_index(dtype: str, value: Expr) -> Expr:
    return value if dtype == "int64" else Cast(dtype, value)


def _take_prefix(whole: Array, part: Array) -> Array:
    """Return the prefix of ``whole`` with the shape of ``part``."""
    return whole[tuple(map(slice, part.shape))]


def _expr_head(e: Expr) -> object:
    """Return an expression's head, without its operands."""
    if isinstance(e, Load):
        return "load", e.tensor, len(e.indices)  # a fill value is absent at lengths where no index leaves the tensor
    if isinstance(e, Op):
        return "op", e.fn
    if isinstance(e, Cast):
        return "cast", e.dtype
    return ("table", e.values, e.dtype) if isinstance(e, Table) else e

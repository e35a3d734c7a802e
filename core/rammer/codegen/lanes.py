"""Vector code: one statement computes a whole row of consecutive output elements.

A ``LaneBlock`` is a scope in which one axis, the *lane*, represents ``width`` consecutive indices. Expressions of float32, and of
float16, which computes as float32, become vectors if they depend on it; loads and stores convert (``STORED``). Everything else
stays scalar. Expressions without a vector form (gathers, tables, integer arithmetic on lanes) are computed lane by lane into a
small array.

Padding tests on the lane axis are assumed to hold unless the scope is ``padded``. The caller computes the interior without and
the edges with padding (see ``rammer.codegen.vector_rows``). In a ``whole`` scope the caller has also tested that vectors reaching
into padding stay inside the tensor's memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from rammer.codegen import operations as ops
from rammer.codegen.context import INT32, Place
from rammer.codegen.operations import Val
from rammer.codegen.partial_sums import block_sizes
from rammer.codegen.scalar import Block, Reducing, Sum
from rammer.codegen.symbolic_bounds import canonicalise_sum
from rammer.codegen.vector_text import CODES, MATH, STORED
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Cast, Const, Expr, Load, Op, Ref

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARE = {"eq": "==", "lt": "<", "le": "<="}
_LOGIC = {"and_": "&", "or_": "|", "xor": "^"}
_CALLS = frozenset((*MATH, "max", "min"))
#: Operations on integer vectors, and the operations that narrow them to bytes.
_WHOLE = {
    **{n: f"rm_wrap{{w}}({{}}, {sign}, {{}})" for n, sign in (("add", "+"), ("sub", "-"), ("mul", "*"))},
    **{"max": "rm_isel{w}({0} > {1}, {0}, {1})", "min": "rm_isel{w}({0} < {1}, {0}, {1})"},
}
_CUT = {"uint8": "({} & 255)", "int8": "(({} << 24) >> 24)"}
#: Functions that copy a scalar to every lane, and that load an array of 32-bit values, by the kind of value.
_SPREAD, _ARRAYS = {"bool": "every", **dict.fromkeys(STORED, "splat")}, {"bool": "mask", "int32": "iload"}


@dataclass
class LaneBlock(Block):
    """A scope whose axis ``lane`` is ``width`` consecutive indices starting at the variable of that name."""

    lane: str = ""
    width: int = 0
    padded: bool = False
    whole: bool = False
    kinds: dict[Expr, str] = field(default_factory=dict)

    def child(self) -> Self:
        """Return an inner scope with the same lanes."""
        return type(self)(
            self.unit, self, lane=self.lane, width=self.width, padded=self.padded, whole=self.whole, kinds=self.kinds
        )

    def _is_lane_dependent(self, e: Expr) -> bool:
        return self.lane in ex.axes_of(e)

    def _vector_kind(self, e: Expr) -> str:
        if e not in self.kinds:
            kind = ops.compute_type(ex.dtype_of(e, self.unit.dtypes))
            self.kinds[e] = "int32" if kind in CODES and kind in self.unit.lanes else kind
        return self.kinds[e]

    def let(self, value: Val) -> Val:
        """Bind a value, also a vector, to a name."""
        if value.atom or not value.lanes:
            return super().let(value)
        name = self.unit.fresh("v")
        self.line(f"const rm_{'f' if value.dtype == 'float32' else 'i'}{self.width} {name} = {value.text};")
        return Val(name, value.dtype, atom=True, lanes=self.width, half=value.half)

    def value(self, e: Expr) -> Val:
        """Return the value of an expression: a vector if it depends on the lane, else a scalar."""
        if not self._is_lane_dependent(e):
            return super().value(e)
        kind = self._vector_kind(e)
        if kind == "int32" and "int32" in self.unit.lanes:
            return self._emit_integer(e)
        if kind not in ("float32", "bool"):
            return self._each(Cast("float32", e))
        if isinstance(e, Load) and kind == "float32":
            return self.load(e)
        if isinstance(e, Cast) and kind == self._vector_kind(e.arg) == "float32":
            return ops.round_to_half(self.unit.target, self.value(e.arg)) if e.dtype == "float16" else self.value(e.arg)
        if isinstance(e, Cast) and (kind, self._vector_kind(e.arg)) == ("float32", "int32") and "int32" in self.unit.lanes:
            value = Val(f"rm_float{self.width}({self.vector(e.arg)})", "float32", lanes=self.width)
            return ops.round_to_half(self.unit.target, value) if e.dtype == "float16" else value
        if not isinstance(e, Op) or any(self._vector_kind(a) not in ("float32", "bool") for a in _typed_arguments(e)):
            return self._emit_length_mask(e) or self._each(e)
        return self._emit_operation(e)

    def _emit_length_mask(self, e: Expr) -> Val | None:
        """Return the lanes whose index is below a scalar, such as the length of a run, or None for other expressions."""
        if not isinstance(e, Op) or e.fn != "lt" or self._is_lane_dependent(e.args[1]):
            return None
        index, length = e.args
        form, span = ex.affine_form(index), ex.interval(index, self.unit.ranges)
        step = form[0].get(self.lane, 0) if form is not None else 0
        if step <= 0 or span is None or span[0] < 0 or span[1] + self.width * step > INT32:
            return None
        bound = Op("min", (Op("max", (length, Const(0, "int64"))), Const(INT32, "int64")))
        text = f"{self.unit.index(index).text}, {step}, {self.let(self.value(bound)).text}"
        return self.let(Val(f"rm_within{self.width}({text})", "bool", lanes=self.width))

    def vector(self, e: Expr) -> str:
        """Return a vector; a scalar is copied to every lane."""
        return self.spread(self.value(e))

    def spread(self, value: Val) -> str:
        """Return ``value`` as a vector."""
        if value.lanes:
            return value.text
        return f"rm_{_SPREAD.get(value.dtype, 'isplat')}{self.width}({value.text})"

    def _emit_integer(self, e: Expr) -> Val:
        """Return an integer expression as a vector of 32-bit lanes."""
        w = self.width
        if isinstance(e, Load):
            return self.load(e)
        if isinstance(e, Cast) and e.dtype in CODES and self._vector_kind(e.arg) in ("int32", "float32"):
            text = self.vector(e.arg)
            text = f"rm_int{w}({text})" if self._vector_kind(e.arg) == "float32" else text
            return Val(_CUT.get(e.dtype, "{}").format(text), "int32", lanes=w)
        if isinstance(e, Op) and e.fn in _WHOLE and all(self._vector_kind(a) == "int32" for a in _typed_arguments(e)):
            left, right = (self.let(Val(self.vector(_cast_literal(a, "int32")), "int32", lanes=w)).text for a in e.args)
            return Val(_WHOLE[e.fn].format(left, right, w=w), "int32", lanes=w)
        return self._each(e)

    def _emit_operation(self, e: Op) -> Val:
        w, fn = self.width, e.fn
        args = [_cast_literal(a, self._vector_kind(e)) if fn not in _COMPARE else _cast_literal(a, "float32") for a in e.args]
        if fn == "where":
            if self._vector_kind(e) != "float32":
                return self._each(e)
            mask, (yes, no) = self.vector(e.args[0]), (self.value(a) for a in args[1:])
            text = f"rm_vsel{w}({mask}, {self.spread(yes)}, {self.spread(no)})"
            return Val(text, "float32", lanes=w, half=yes.half and no.half)
        logical = fn in _LOGIC or fn == "not_"
        if logical != (self._vector_kind(e.args[0]) == "bool"):
            return self._each(e)
        if logical:
            texts = [self.vector(a) for a in e.args]
            return Val(f"(~{texts[0]})" if fn == "not_" else f"({texts[0]} {_LOGIC[fn]} {texts[1]})", "bool", lanes=w)
        if fn in _INFIX or fn in _COMPARE:
            # A scalar operand next to a vector applies to every lane, in OpenCL C and in GNU C. Two scalars stay scalar: an
            # inlined map need not vary, though its load does.
            left, right = (self.value(a) for a in args)
            dtype = "bool" if fn in _COMPARE else "float32"
            return Val(f"({left.text} {_INFIX.get(fn) or _COMPARE[fn]} {right.text})", dtype, lanes=left.lanes or right.lanes)
        if fn in _CALLS:
            values = [self.value(a) for a in args]
            text = f"rm_v{fn}{w}({', '.join(map(self.spread, values))})"
            return Val(text, "float32", lanes=w, half=ops.keeps_half(fn, values))
        if fn == "neg":
            value = self.value(args[0])
            return Val(f"(-{value.text})", "float32", lanes=value.lanes, half=value.half)
        if fn == "isnan":
            value = self.let(self.value(args[0]))
            return Val(f"({value.text} != {value.text})", "bool", lanes=value.lanes)
        return self._each(e)

    def _each(self, e: Expr) -> Val:
        """Compute ``e`` lane by lane, through a small array."""
        kind = self._vector_kind(e)
        mask = kind == "bool"
        name, lane, k = self.unit.fresh("t"), self.unit.fresh("y"), self.unit.fresh("k")
        self.line(f"{self.unit.target.types['int32' if kind in ('bool', 'int32') else 'float32']} {name}[{self.width}];")
        self.unit.ranges[lane] = self.unit.ranges[self.lane]
        inner = Block(self.unit, self)
        inner.line(f"const {self.unit.axis_type(self.unit.ranges[lane][1])} {lane} = {self.lane} + {k};")
        value = inner.value(ex.substitute(e, {self.lane: Ref(lane)}))
        inner.line(f"{name}[{k}] = {'-' if mask else ''}{value.text};")
        self.lines += [f"for (int {k} = 0; {k} < {self.width}; ++{k}) {{", *(f"  {t}" for t in inner.lines), "}"]
        text = f"rm_{_ARRAYS.get(kind, 'vload')}{self.width}({name})"
        return self.let(Val(text, kind, lanes=self.width, half=value.half))

    # --- loads --------------------------------------------------------------------------------

    def turn(self, e: Load, near: str) -> None:
        """Read ``e`` for all lanes and as many indices along ``near``, which is contiguous in memory, and transpose. Later loads
        find their vectors."""
        name, lane, k, w = self.unit.fresh("t"), self.unit.fresh("y"), self.unit.fresh("k"), self.width
        place, kind = self.unit.places[e.tensor], self.unit.axis_type(self.unit.ranges[self.lane][1])
        self.unit.ranges[lane] = self.unit.ranges[self.lane]
        inner = Block(self.unit, self)
        inner.line(f"const {kind} {lane} = {self.lane} + {k};")
        address = inner.address(place, tuple(ex.substitute(i, {self.lane: Ref(lane)}) for i in e.indices))
        inner.line(f"{name}[{k}] = {self._row_load_text(place, address, 1)};")
        self.line(f"rm_f{w} {name}[{w}];")
        self.lines += [f"for (int {k} = 0; {k} < {w}; ++{k}) {{", *(f"  {t}" for t in inner.lines), "}"]
        self.line(f"rm_turn{w}({name});")
        half = place.dtype == "float16"
        for j in range(w):
            indices = (ex.substitute(i, {near: ex.make_add(near, j)}) for i in e.indices)
            self.memo[Load(e.tensor, tuple(canonicalise_sum(i) for i in indices))] = Val(
                f"{name}[{j}]", "float32", atom=True, lanes=w, half=half
            )

    def unrounded(self, e: Load) -> Val:
        """Return a load: one vector if the lanes are at stride 1 or 2."""
        if not self._is_lane_dependent(e):
            return super().unrounded(e)
        e = Load(e.tensor, tuple(canonicalise_sum(i) for i in e.indices), e.fill)
        seen = self.known(e)
        if seen is not None:
            return seen
        producer = self.unit.inlined.get(e.tensor)
        found = (
            self._each(e)
            if not self.sums(e)
            else self._load_stored(e)
            if producer is None
            else self._inline_producer(e, producer)
        )
        value = self.memo[e] = self.let(found)
        return value

    def sums(self, e: Load) -> bool:
        """Return True if the operand of ``e`` is computed in vectors, False if lane by lane. Vectors need a supported type."""
        straight = all(not self._is_lane_dependent(i) or self._is_increasing(i) for i in e.indices)
        return not self._is_lane_dependent(e) or (straight and self.unit.dtypes[e.tensor] in self.unit.lanes)

    def _is_increasing(self, index: Expr) -> bool:
        form = ex.affine_form(index)
        return form is not None and form[0].get(self.lane, 0) > 0

    def guard(self, e: Load) -> str:
        """Return only the tests that do not depend on the lane."""
        if e.fill is None:
            return ""
        pairs = zip(e.indices, self.unit.shapes[e.tensor], strict=True)
        tests = [self.inside(i, n) for i, n in pairs if not self._is_lane_dependent(i)]
        return " && ".join(t for t in tests if t)

    def _lane_tests(self, e: Load) -> list[tuple[Expr, int]]:
        """Return the indices along the lane, with their extents, of a load that meets padding."""
        if e.fill is None or not self.padded:
            return []
        pairs = zip(e.indices, self.unit.shapes[e.tensor], strict=True)
        return [(i, n) for i, n in pairs if self._is_lane_dependent(i) and any(self.leaves(i, n))]

    def _load_stored(self, e: Load) -> Val:
        place, guard = self.unit.places[e.tensor], self.guard(e)
        step = self.stride(e.tensor, e.indices)
        if step not in (1, 2):
            return self._each(e)
        tests = self._lane_tests(e)
        if tests:
            return self._load_masked(e, guard, step, tests)
        text = self._row_load_text(place, self.address(place, e.indices, None if guard else self.unit.shapes[e.tensor]), step)
        half = place.dtype == "float16" and ops.is_half(e.fill or 0)
        return Val(
            f"({guard} ? {text} : {self._fill_text(e)})" if guard else text, self._vector_kind(e), lanes=self.width, half=half
        )

    def _row_load_text(self, place: Place, address: str, step: int) -> str:
        return f"rm_{self.unit.lanes[place.dtype]}{'load' if step == 1 else 'even'}{self.width}({place.pointer} + {address})"

    def _fill_text(self, e: Load) -> str:
        kind = self._vector_kind(e)
        return f"rm_{_SPREAD.get(kind, 'isplat')}{self.width}({ops.spell_literal(self.unit.target, e.fill or 0, kind)})"

    def _load_masked(self, e: Load, guard: str, step: int, tests: list[tuple[Expr, int]]) -> Val:
        """Load a row that may reach into padding: read whole if the tensor's memory allows, then masked."""
        place, w = self.unit.places[e.tensor], self.width
        reach = place.reach
        if reach is None:
            return self._each(e)
        masks = []
        for index, extent in tests:
            lane_step = (ex.affine_form(index) or ({}, 0))[0].get(self.lane, 0)
            masks.append(f"rm_within{w}({self.unit.index(index).text}, {lane_step}, {extent})")
        mask, fill, kind = " & ".join(masks), self._fill_text(e), self._vector_kind(e)
        half = place.dtype == "float16" and ops.is_half(e.fill or 0)
        letter, select = ("f", "vsel") if kind == "float32" else ("i", "isel")
        if self.whole:
            text = f"rm_{select}{w}({mask}, {self._row_load_text(place, self.address(place, e.indices), step)}, {fill})"
            return Val(f"({guard} ? {text} : {fill})" if guard else text, kind, lanes=w, half=half)
        name = self.unit.fresh("v")
        self.line(f"rm_{letter}{w} {name} = {fill};")
        with self.nest(f"if ({guard})" if guard else "") as inner:
            at = inner.let(Val(self.address(place, e.indices), "int64", small=reach <= INT32 // 2)).text
            with inner.nest(f"if ({at} >= 0 && {at} + {(w - 1) * step} < {reach})") as inside:
                inside.line(f"{name} = rm_{select}{w}({mask}, {self._row_load_text(place, at, step)}, {name});")
            with inner.nest("else") as lanes:
                lanes.line(f"{name} = {lanes._each(e).text};")
        return Val(name, kind, atom=True, lanes=w, half=half)

    def stride(self, tensor: str, indices: tuple[Expr, ...]) -> int:
        """Return the elements between the addresses of two neighbouring lanes."""
        place = self.unit.places[tensor]
        forms = [ex.affine_form(i) for i in indices]
        return sum(s * f[0].get(self.lane, 0) for s, f in zip(place.strides, forms, strict=True) if f is not None)

    def _inline_producer(self, e: Load, producer: Compute) -> Val:
        guard = self.guard(e)
        if self._lane_tests(e):
            return self._each(e)
        if not guard:
            return self.inline(producer, e.indices)
        name, kind = self.unit.fresh("v"), self._vector_kind(e)
        self.line(f"rm_{'f' if kind == 'float32' else 'i'}{self.width} {name} = {self._fill_text(e)};")
        with self.nest(f"if ({guard})") as inner:
            inner.line(f"{name} = {inner.spread(inner.inline(producer, e.indices))};")
        return Val(name, kind, atom=True, lanes=self.width)

    def store(self, place: Place, point: tuple[Expr, ...], value: Val, tests: Sequence[tuple[Expr, str]]) -> None:
        """Write a row: one vector if the lanes are neighbours in memory, else lane by lane."""
        shared = " && ".join(f"{self.unit.index(x).text} {test}" for x, test in tests if not self._is_lane_dependent(x))
        single = " && ".join(f"{self.unit.index(x).text} + k {test}" for x, test in tests if self._is_lane_dependent(x))
        prefix, address = f"if ({shared}) " if shared else "", self.address(place, point)
        step = next(s for s, x in zip(place.strides, point, strict=True) if self._is_lane_dependent(x))
        if step == 1 and not single:
            store = f"rm_{self.unit.lanes[place.dtype]}store{self.width}"
            self.line(f"{prefix}{store}({place.pointer} + {address}, {self.spread(value)});")
            return
        name = self.unit.fresh("t")
        floats = place.dtype in STORED
        self.line(f"{'float' if floats else self.unit.target.types['int32']} {name}[{self.width}];")
        self.line(f"rm_{'v' if floats else 'i'}store{self.width}({name}, {self.spread(value)});")
        body = ops.format_store(self.unit.target, place.pointer, f"{address} + k * {step}", place.dtype, f"{name}[k]")
        self.line(f"{prefix}for (int k = 0; k < {self.width}; ++k) {f'if ({single}) ' if single else ''}{body}")

    # --- producers computed in place ----------------------------------------------------------

    def inline(self, producer: Compute, indices: tuple[Expr, ...]) -> Val:
        """Return the row of ``producer`` at ``indices``."""
        if not any(self._is_lane_dependent(i) for i in indices):
            return super().inline(producer, indices)
        axes = dict(zip((a.name for a in producer.axes), (self.bound_index(i) for i in indices), strict=True))
        if producer.reduce:
            return self.reduction(producer, axes)
        return self.let(self.value(ex.substitute(producer.body, axes)))

    def accumulator(self, c: Compute, axes: Mapping[str, Expr]) -> Val:
        """Declare an accumulator, a vector if ``c`` at ``axes`` depends on the lane."""
        if not any(self._is_lane_dependent(i) for i in axes.values()):
            return super().accumulator(c, axes)
        total, floats = self.unit.fresh("a"), c.dtype in STORED
        kind, splat = ("rm_f", "splat") if floats else ("rm_i", "isplat")
        self.line(f"{kind}{self.width} {total} = rm_{splat}{self.width}({ops.initial_value(self.unit.target, c)});")
        self.unit.wide[total] = self.width
        return Val(total, "float32" if floats else "int32", atom=True, lanes=self.width)

    def factors(self, c: Compute, total: str, product: Op) -> list[str]:
        """Return the factors, as vectors if the accumulator is a vector."""
        if total not in self.unit.wide:
            return super().factors(c, total, product)
        if any(self._vector_kind(e) != "float32" for e in (product, *_typed_arguments(product))):
            return []
        return [self.vector(_cast_literal(a, "float32")) for a in product.args]

    def combine(self, c: Compute, total: str, value: Val) -> str:
        """Return the statement that combines a row into the accumulator."""
        if total not in self.unit.wide:
            return super().combine(c, total, value)
        whole = c.dtype in CODES
        if c.combiner in ("sum", "prod") and not whole:
            # A value that is the same in every lane is spread by the operator itself.
            return f"{total} {'+' if c.combiner == 'sum' else '*'}= {value.text};"
        text = self.spread(value)
        if whole:
            fn = {"sum": "add", "prod": "mul"}.get(str(c.combiner), str(c.combiner))
            return f"{total} = {_WHOLE[fn].format(total, f'({text})', w=self.width)};"
        return f"{total} = rm_v{c.combiner}{self.width}({total}, {text});"


@dataclass
class ColumnBlock(Block):
    """A scalar scope whose reductions in ``unit.columns`` walk one of their axes in vectors."""

    def accumulate(self, items: Sequence[Reducing]) -> None:
        columns = [self.unit.columns.get(c.name) for c, _ in items]
        column = columns[0]
        if column is None:
            super().accumulate(items)
            return
        lead = items[0][0].reduce
        names = [self.unit.fresh("r") for _ in lead]
        at = next(k for k, r in enumerate(lead) if r.name == column.axis)
        lane, width, extent = names[at], column.width, lead[at].extent
        stops = [self.unit.end(items[0][0], r) for r in lead]
        rest = [(n, r.extent, e) for k, (n, r, e) in enumerate(zip(names, lead, stops, strict=True)) if k != at]
        self.unit.ranges[lane] = (0, extent - 1)
        vectors, ends = list[Reducing](), list[tuple[Compute, str, str]]()
        for c, sums in items:
            wide = [self._declare_accumulator(c, width) for _ in sums]
            vectors.append(self.along(c, [(w, axes) for w, (_, axes) in zip(wide, sums, strict=True)], names))
            ends += [(c, w, total) for w, (total, _) in zip(wide, sums, strict=True)]
        remain = extent % width or not stops[at].isdigit()
        both = [*vectors, *(self.along(c, sums, names) for c, sums in items if remain)]
        self._emit_column_loops(rest, (lane, stops[at], width), both)
        for c, name, total in ends:
            folded = Val(f"rm_fold_{c.combiner}{width}({name})", "float32")
            self.line(self.combine(c, total, folded))

    def _declare_accumulator(self, c: Compute, width: int) -> str:
        """Declare a vector accumulator and return its name."""
        name = self.unit.fresh("a")
        self.line(f"rm_f{width} {name} = rm_splat{width}({ops.initial_value(self.unit.target, c)});")
        self.unit.wide[name] = width
        return name

    def partial(self, c: Compute, of: Sum) -> str:
        """Declare an accumulator of a partial sum: a vector if the sum is a vector."""
        return self._declare_accumulator(c, self.unit.wide[of[0]]) if of[0] in self.unit.wide else super().partial(c, of)

    def _emit_column_loops(self, rest: list[tuple[str, int, str]], along: tuple[str, str, int], both: Sequence[Reducing]) -> None:
        """Write loops over the other axes, with vectors ``along`` a variable to its bound, then its remainder. ``both`` has the
        vector sums and the scalar sums."""
        lane, last, width = along
        if rest:
            name, extent, stop = rest[0]
            self.unit.ranges[name] = (0, max(extent - 1, 0))

            def loop(scope: Block, items: Sequence[Reducing], first: str, end: str) -> None:
                with scope.nest(scope.loop(name, first, end, extent)) as inner:
                    assert isinstance(inner, ColumnBlock)
                    inner._emit_column_loops(rest[1:], along, items)

            inside = math.prod(n for _, n, _ in rest[1:]) * -(-(self.unit.ranges[lane][1] + 1) // width)
            self.in_blocks(both, (extent, "0", stop), block_sizes(extent, inside), loop)
            return
        extent, wide = self.unit.ranges[lane][1] + 1, self.unit.wide
        end = str(extent - extent % width) if last.isdigit() else f"{last} - {last} % {width}"

        def vectors(scope: Block, items: Sequence[Reducing], first: str, end: str) -> None:
            with scope.nest(scope.loop(lane, first, end, extent, width)) as body:
                block = LaneBlock(self.unit, body, lane=lane, width=width, padded=True)
                block.walk(items, [])
                body.lines += block.lines

        own = [(c, sums) for c, sums in both if sums[0][0] in wide]
        self.in_blocks(own, (extent, "0", end), block_sizes(extent // width), vectors, width)
        if end != last:
            with self.nest(self.loop(lane, end, last, extent)) as tail:
                tail.walk([(c, sums) for c, sums in both if sums[0][0] not in wide], [])


def _typed_arguments(e: Op) -> list[Expr]:
    """Return the arguments whose type matters: literals take the type of the others."""
    return [a for a in e.args if not isinstance(a, Const)]


def _cast_literal(e: Expr, dtype: str) -> Expr:
    return Const(e.value, dtype) if isinstance(e, Const) else e

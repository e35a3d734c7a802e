"""Scalar expressions to C text. A ``Block`` is a C scope under construction. ``value`` returns the text of an expression and
appends the statements that it needs to the block first. They are the reductions and guarded producers computed in place.

A kernel preloads the stored elements of an expression before it computes anything. Loads that are issued together wait for memory
together. Constants may even be loaded before a kernel may read the results of other kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self, TypeAlias

from rammer.codegen import operations as ops
from rammer.codegen.context import INT32, FunctionContext, Place
from rammer.codegen.operations import Val
from rammer.codegen.partial_sums import block_sizes
from rammer.codegen.symbolic_bounds import canonicalise_sum
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Cast, Const, Expr, Load, Op, Ref, Table, integer
from rammer.ir.types import is_float

#: An accumulator with the axes of its reduction; and a reduction with all of its accumulators.
Sum: TypeAlias = "tuple[str, Mapping[str, Expr]]"
Reducing: TypeAlias = "tuple[Compute, Sequence[Sum]]"
#: Writes a loop in a scope, for some accumulators, from a first bound to before a second.
Walk: TypeAlias = "Callable[[Block, Sequence[Reducing], str, str], None]"


@dataclass
class Block:
    """Statements of one C scope; values already computed in it are shared."""

    unit: FunctionContext
    parent: Block | None = None
    lines: list[str] = field(default_factory=list)
    memo: dict[Expr, Val] = field(default_factory=dict)

    def line(self, text: str) -> None:
        """Append one statement to the scope."""
        self.lines.append(text)

    def child(self) -> Self:
        """Return an inner scope of the same kind, not yet closed."""
        return type(self)(self.unit, self)

    @contextmanager
    def nest(self, head: str) -> Iterator[Self]:
        """Open a child scope ``head { ... }``."""
        child = self.child()
        yield child
        self.lines += [f"{head} {{".lstrip(), *(f"  {text}" for text in child.lines), "}"]

    def loop(self, name: str, low: str, high: str, extent: int, step: int = 1) -> str:
        """Return the head of a counting loop over a new variable already in ``unit.ranges``."""
        kind = self.unit.axis_type(extent)
        advance = f"{name} += {step}" if step > 1 else f"++{name}"
        return f"for ({kind} {name} = {low}; {name} < {high}; {advance})"

    def let(self, value: Val) -> Val:
        """Bind a value to a constant of this scope, unless it is a name or literal already."""
        if value.atom:
            return value
        name = self.unit.fresh("v")
        self.line(f"const {ops.spell_type(self.unit.target, value.cdtype)} {name} = {value.text};")
        return Val(name, value.dtype, value.small, True, half=value.half)

    def known(self, e: Expr) -> Val | None:
        """Return the value of ``e`` if this scope or an outer one has it, else None."""
        scope: Block | None = self
        while scope is not None:
            if (value := scope.memo.get(e)) is not None:
                return value
            scope = scope.parent
        return None

    # --- values -------------------------------------------------------------------------------

    def value(self, e: Expr) -> Val:
        """Return the C value of an expression whose axes are variables in scope."""
        if isinstance(e, Const):
            return Val(ops.spell_literal(self.unit.target, e.value, e.dtype), e.dtype, atom=True, half=ops.is_half(e.value))
        if self.unit.is_index(e):
            return self.unit.index(e)
        if isinstance(e, Load):
            return self.load(e)
        if isinstance(e, Cast):
            value = ops.convert_value(self.unit.target, self.value(e.arg), e.dtype)
            return ops.round_to_half(self.unit.target, value) if e.dtype == "float16" else value
        if isinstance(e, Table):
            return Val(f"{self.unit.table(e.values, e.dtype)}[{self.value(e.index).text}]", e.dtype, atom=True)
        if isinstance(e, Op) and e.fn == "where":
            return self._emit_where(e)
        if isinstance(e, Op):
            return ops.apply_function(self.unit.target, e.fn, self._promote_arguments(e.args))
        raise TypeError(f"not a scalar expression: {e!r}")

    def _promote_arguments(self, args: tuple[Expr, ...]) -> list[Val]:
        """Return arguments in their common type: that of the first non-literal argument."""
        values = [None if isinstance(a, Const) else self.value(a) for a in args]
        first = next((v for v in values if v is not None), None)
        if first is None:
            kind = next(a.dtype for a in args if isinstance(a, Const))
            return [
                Val(ops.spell_literal(self.unit.target, a.value, kind), kind, atom=True) for a in args if isinstance(a, Const)
            ]
        small = all(v.small for v in values if v is not None) and all(
            abs(int(a.value)) <= INT32 for a in args if isinstance(a, Const) and not isinstance(a.value, float)
        )
        target, kind = self.unit.target, first.dtype
        result = []
        for a, v in zip(args, values, strict=True):
            if isinstance(a, Const):
                text = ops.spell_literal(target, a.value, "int32" if small else kind)
                result.append(Val(text, kind, small, True, half=ops.is_half(a.value)))
            elif v is not None:
                result.append(v if small and v.dtype == kind else ops.convert_value(target, v, kind))
        return result

    def _emit_where(self, e: Op) -> Val:
        """Write ``c ? a : b``, after the loads that both branches need. Branches that need statements become an if, so that only
        one is computed."""
        test = self.value(e.args[0])
        for load in self.unit.needs.both(*e.args[1:]):
            self.load(load)
        arms = [self.child(), self.child()]
        typed = [arm.value(a) for arm, a in zip(arms, e.args[1:], strict=True)]
        open_ = [v for v, a in zip(typed, e.args[1:], strict=True) if not isinstance(a, Const)]
        kind = (open_ or typed)[0].dtype
        target = self.unit.target
        parts = [
            Val(ops.spell_literal(target, a.value, kind), kind, atom=True, half=ops.is_half(a.value))
            if isinstance(a, Const)
            else ops.convert_value(target, v, kind)
            for v, a in zip(typed, e.args[1:], strict=True)
        ]
        half = all(p.half for p in parts)
        if not arms[0].lines and not arms[1].lines:
            return Val(f"({test.text} ? {parts[0].text} : {parts[1].text})", kind, half=half)
        name = self.unit.fresh("v")
        self.line(f"{ops.spell_type(target, ops.compute_type(kind))} {name};")
        for head, arm, part in zip((f"if ({test.text})", "else"), arms, parts, strict=True):
            self.lines += [f"{head} {{", *(f"  {text}" for text in arm.lines), f"  {name} = {part.text};", "}"]
        return Val(name, kind, atom=True, half=half)

    # --- loads --------------------------------------------------------------------------------

    def sums(self, e: Load) -> bool:
        """Return True if a reduction that ``e`` reads may share its loop with others here."""
        return True

    def load(self, e: Load) -> Val:
        """Return a load of a stored tensor, or of a producer computed in place, rounded as it would be stored."""
        e = Load(e.tensor, tuple(canonicalise_sum(i) for i in e.indices), e.fill)
        value = self.unrounded(e)
        if value.half or self.unit.dtypes[e.tensor] != "float16":
            return value
        key = Cast("float16", e)
        found = self.known(key)
        if found is None:
            found = self.memo[key] = self.let(ops.round_to_half(self.unit.target, value))
        return found

    def unrounded(self, e: Load) -> Val:
        """Return a load as registers hold it: computed in place, float16 is still float32."""
        seen = self.known(e)
        if seen is not None:
            return seen
        guard = self.guard(e)
        producer = self.unit.inlined.get(e.tensor)
        if producer is None:
            text, dtype = self.element(e.tensor, e.indices, clamp=not guard), self.unit.places[e.tensor].dtype
            fill = ops.spell_literal(self.unit.target, e.fill, dtype) if e.fill is not None else ""
            value = Val(
                f"({guard} ? {text} : {fill})" if guard else text, dtype, half=dtype == "float16" and ops.is_half(e.fill or 0)
            )
        elif not guard:
            value = self.inline(producer, e.indices)
        else:
            value = self._inline_guarded(e, producer, guard)
        value = self.let(value)
        self.memo[e] = value
        return value

    def _inline_guarded(self, e: Load, producer: Compute, guard: str) -> Val:
        name, target = self.unit.fresh("v"), self.unit.target
        fill = ops.spell_literal(target, e.fill if e.fill is not None else 0, producer.dtype)
        self.line(f"{ops.spell_type(target, ops.compute_type(producer.dtype))} {name} = {fill};")
        with self.nest(f"if ({guard})") as inner:
            value = inner.inline(producer, e.indices)
            inner.line(f"{name} = {value.text};")
        return Val(name, producer.dtype, atom=True, half=value.half and ops.is_half(e.fill or 0))

    def guard(self, e: Load) -> str:
        """Return the condition that the padded load ``e`` is inside its tensor, "" if it always is."""
        if e.fill is None:
            return ""
        tests = [self.inside(i, n) for i, n in zip(e.indices, self.unit.shapes[e.tensor], strict=True)]
        return " && ".join(t for t in tests if t)

    def leaves(self, index: Expr, extent: int) -> tuple[bool, bool]:
        """Return two flags: ``index`` can be below 0, and ``index`` can reach ``extent``."""
        reach = ex.interval(index, self.unit.ranges)
        return reach is None or reach[0] < 0, reach is None or reach[1] >= extent

    def inside(self, index: Expr, extent: int) -> str:
        """Return the condition that ``index`` is in ``[0, extent)``, "" if it always is."""
        low, high = self.leaves(index, extent)
        if not low and not high:
            return ""
        value = self.value(index)
        if low and high and value.small:
            # One unsigned comparison checks both bounds.
            return f"({self.unit.target.types['uint32']}){_add_parentheses(value)} < {extent}u"
        tests = ([f"{value.text} >= 0"] if low else []) + ([f"{value.text} < {extent}"] if high else [])
        return " && ".join(tests)

    def element(self, tensor: str, indices: tuple[Expr, ...], clamp: bool = False) -> str:
        """Return the text that reads one element of a stored tensor."""
        place = self.unit.places[tensor]
        shape = self.unit.shapes[tensor] if clamp else None
        return ops.format_load(self.unit.target, place.pointer, self.address(place, indices, shape), place.dtype)

    def address(self, place: Place, indices: tuple[Expr, ...], clamp: tuple[int, ...] | None = None) -> str:
        """Return an element address. With ``clamp`` (the tensor's shape) data-dependent indices are clamped. A bad index must not
        read foreign memory."""
        total: Expr = integer(0)
        extra: list[str] = []
        for d, (i, stride, origin) in enumerate(zip(indices, place.strides, place.origin, strict=True)):
            if stride == 0:
                continue
            if self.unit.is_index(i) or isinstance(i, Const):
                total = ex.make_add(total, ex.make_mul(Op("sub", (i, origin)), stride))
                continue
            text = ops.convert_value(self.unit.target, self.value(i), "int64").text
            if clamp is not None:
                text = f"rm_min_i64(rm_max_i64({text}, 0), {max(clamp[d] - 1, 0)})"
            total = ex.make_add(total, ex.make_mul(ex.make_mul(origin, -1), stride))
            extra.append(f"{text} * {stride}" if stride != 1 else text)
        whole = self.unit.index(total)
        if extra and whole.text != "0":
            extra.insert(0, whole.text)
        return " + ".join(extra) if extra else whole.text

    def store(self, place: Place, point: tuple[Expr, ...], value: Val, tests: Sequence[tuple[Expr, str]]) -> None:
        """Write ``value`` at ``point`` if all ``tests`` (axis, condition on it) hold."""
        text = ops.convert_value(self.unit.target, value, place.dtype).text
        statement = ops.format_store(self.unit.target, place.pointer, self.address(place, point), place.dtype, text)
        condition = " && ".join(f"{self.unit.index(x).text} {test}" for x, test in tests)
        self.line(f"if ({condition}) {statement}" if tests else statement)

    # --- producers computed in place ----------------------------------------------------------

    def inline(self, producer: Compute, indices: tuple[Expr, ...]) -> Val:
        """Compute the element of ``producer`` at ``indices`` here."""
        axes = dict(zip((a.name for a in producer.axes), (self.bound_index(i) for i in indices), strict=True))
        if producer.reduce:
            return self.reduction(producer, axes)
        value = ops.convert_value(self.unit.target, self.value(ex.substitute(producer.body, axes)), producer.dtype)
        return self.let(value)

    def bound_index(self, index: Expr) -> Expr:
        """Bind an index other than a sum of axes to a name, since the producer's body repeats it."""
        if ex.affine_form(index) is not None:
            return index
        name = self.unit.fresh("i")
        reach = ex.interval(index, self.unit.ranges)
        value = self.value(index)
        small = value.small or (reach is not None and reach[0] >= -INT32 and reach[1] <= INT32)
        self.line(f"const {self.unit.target.types['int32' if small else 'int64']} {name} = {value.text};")
        self.unit.ranges[name] = reach if reach is not None else (-(2**62), 2**62)
        return Ref(name)

    def reduction(self, c: Compute, axes: Mapping[str, Expr]) -> Val:
        """Compute ``c`` at ``axes``: an accumulator and its loops, in order."""
        total = self.accumulator(c, axes)
        self.accumulate([(c, [(total.text, axes)])])
        return total

    def reduce_at(self, wanted: Sequence[tuple[Compute, Sequence[tuple[Expr, ...]]]]) -> None:
        """Compute reductions over equal axes, each at several points, in the same loops. Later loads find the results."""
        items, totals = list[Reducing](), list[tuple[Compute, tuple[Expr, ...], Val]]()
        for c, points in wanted:
            axes = [dict(zip((a.name for a in c.axes), p, strict=True)) for p in points]
            values = [self.accumulator(c, a) for a in axes]
            items.append((c, [(t.text, a) for t, a in zip(values, axes, strict=True)]))
            totals += [(c, p, t) for p, t in zip(points, values, strict=True)]
        self.accumulate(items)
        for c, point, total in totals:
            self.memo[Load(c.name, tuple(canonicalise_sum(i) for i in point))] = total

    def accumulator(self, c: Compute, axes: Mapping[str, Expr]) -> Val:
        """Declare an accumulator for ``c`` at ``axes``."""
        target, total = self.unit.target, self.unit.fresh("a")
        self.line(f"{ops.spell_type(target, ops.compute_type(c.dtype))} {total} = {ops.initial_value(target, c)};")
        return Val(total, c.dtype, atom=True)

    def accumulate(self, items: Sequence[Reducing]) -> None:
        """Combine the bodies of some reductions in order into each of their accumulators. Their axes are equal and have equal
        bounds."""
        lead = items[0][0]
        names = [(self.unit.fresh("r"), r.extent, self.unit.end(lead, r)) for r in lead.reduce]
        self.walk([self.along(c, sums, [n for n, _, _ in names]) for c, sums in items], names)

    def along(self, c: Compute, sums: Sequence[Sum], names: Sequence[str]) -> Reducing:
        """Return a reduction with its axes as the variables ``names``."""
        inner: dict[str, Expr] = {r.name: Ref(n) for r, n in zip(c.reduce, names, strict=True)}
        return c, [(total, {**axes, **inner}) for total, axes in sums]

    def walk(self, items: Sequence[Reducing], over: Sequence[tuple[str, int, str]]) -> None:
        """Write loops over the axes ``over``, each with its extent and bound, around the combining statements."""
        if not over:
            for c, sums in items:
                for total, axes in sums:
                    self.line(self.add(c, total, ex.substitute(c.body, axes)))
            return
        name, extent, end = over[0]
        if items[0][0].name in self.unit.unrolled:
            for k in range(extent):
                self.walk([(c, [(t, _fix_axis(axes, name, k)) for t, axes in sums]) for c, sums in items], over[1:])
            return
        self.unit.ranges[name] = (0, max(extent - 1, 0))
        if extent == 1:
            self.line(f"const int {name} = 0;")
            self.walk(items, over[1:])
            return

        def inner(scope: Block, items: Sequence[Reducing], first: str, end: str) -> None:
            with scope.nest(scope.loop(name, first, end, extent)) as body:
                body.walk(items, over[1:])

        sizes = block_sizes(extent, math.prod(n for _, n, _ in over[1:]))
        self.in_blocks(items, (extent, "0", end), sizes, inner)

    def in_blocks(
        self, items: Sequence[Reducing], along: tuple[int, str, str], sizes: Sequence[int], inner: Walk, step: int = 1
    ) -> None:
        """Write loops over the blocks of a sum, each with separate accumulators, around the text that ``inner`` writes.

        Args:
            items: Reductions with their accumulators; reductions other than sums of floats keep theirs.
            along: The extent of the axis that is cut, and the bounds of its loop.
            sizes: Block sizes in iterations of ``step`` elements, as ``block_sizes`` returns them.
            inner: Writes the innermost loop in a scope, for some accumulators, from a first bound to before a second.
        """
        extent, low, high = along
        if not sizes or not any(_is_float_sum(c) for c, _ in items):
            inner(self, items, low, high)
            return
        first, size = self.unit.fresh("r"), sizes[0] * step
        with self.nest(self.loop(first, low, high, extent, size)) as outer:
            parts = [(c, [(outer.partial(c, s) if _is_float_sum(c) else s[0], s) for s in sums]) for c, sums in items]
            least = "rm_min_i32" if extent <= INT32 else "rm_min_i64"
            whole = extent % size == 0 and low == "0" and high.isdigit()
            end = outer.let(Val(f"{first} + {size}" if whole else f"{least}({first} + {size}, {high})", "int64", extent <= INT32))
            own = [(c, [(part, axes) for part, (_, axes) in sums]) for c, sums in parts]
            outer.in_blocks(own, (extent, first, end.text), sizes[1:], inner, step)
            outer.lines += [f"{total} += {part};" for _, sums in parts for part, (total, _) in sums if part != total]

    def partial(self, c: Compute, of: Sum) -> str:
        """Declare an accumulator of a partial sum and return its name."""
        return self.accumulator(c, of[1]).text

    def add(self, c: Compute, total: str, body: Expr) -> str:
        """Return the statement that combines the value of ``body`` into the accumulator. A product and its addition are one
        operation if the dialect has it."""
        fused = self.unit.target.functions.get("fma")
        product = body if fused and _is_float_sum(c) and isinstance(body, Op) and body.fn == "mul" else None
        if product is not None and (factors := self.factors(c, total, product)):
            return f"{total} = {fused}({', '.join(factors)}, {total});"
        return self.combine(c, total, self.value(body))

    def factors(self, c: Compute, total: str, product: Op) -> list[str]:
        """Return the factors of a product in the type of the accumulator, or [] if their type differs."""
        if ops.compute_type(ex.dtype_of(product, self.unit.dtypes)) != ops.compute_type(c.dtype):
            return []
        return [v.text for v in self._promote_arguments(product.args)]

    def combine(self, c: Compute, total: str, value: Val) -> str:
        """Return the statement that combines one value into the accumulator."""
        return ops.combine_value(self.unit.target, c, total, value)


def _is_float_sum(c: Compute) -> bool:
    return c.combiner == "sum" and is_float(c.dtype)


def _fix_axis(axes: Mapping[str, Expr], name: str, value: int) -> dict[str, Expr]:
    return {a: canonicalise_sum(ex.substitute(e, {name: integer(value)})) for a, e in axes.items()}


def _add_parentheses(value: Val) -> str:
    return value.text if value.atom or value.text.startswith("(") else f"({value.text})"


def stored_loads(e: Expr, inlined: Mapping[str, Compute]) -> list[Load]:
    """Return the distinct loads of stored tensors that evaluating ``e`` makes, including those of in-place producers. Loads of a
    reduction, loads that only a padded producer needs, and data-dependent addresses are left out."""
    found: dict[Load, None] = {}
    _collect_loads(e, inlined, found, set())
    return list(found)


def _collect_loads(e: Expr, inlined: Mapping[str, Compute], found: dict[Load, None], seen: set[Load]) -> None:
    for load in ex.loads(e):
        if load in seen or any(map(ex.has_loads, load.indices)):
            continue
        seen.add(load)
        producer = inlined.get(load.tensor)
        if producer is None:
            found[Load(load.tensor, tuple(canonicalise_sum(i) for i in load.indices), load.fill)] = None
        elif not producer.reduce and load.fill is None:
            axes = dict(zip((a.name for a in producer.axes), load.indices, strict=True))
            _collect_loads(ex.substitute(producer.body, axes), inlined, found, seen)


def preload_elements(block: Block, loads: Iterable[Load]) -> None:
    """Load each element into a variable of ``block``; later uses of the same load find it."""
    for load in loads:
        block.load(load)

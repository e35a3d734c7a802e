"""Masked tasks of a program for a range: tasks of tensors that are never read past the length.

Elements past the length are meaningless, unless a fill value was stored there (``held``): then a task of that part stores the
value and computes nothing. Values that decide indices or integer divisors are always computed: stale memory could lead to reads
out of bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rammer.frontend.ranges.range_padding import SkipMarker
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, ComputeGraph, identity_load
from rammer.ir.expr import Expr, Load, Number, Op, Ref
from rammer.ir.extent import AffineExtent, Dim, ReduceBound, RowWindow, SkipTasks
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram
from rammer.ir.types import is_float


@dataclass(frozen=True)
class EndedTensor:
    """A tensor's dynamic extents and fill values, per axis. ``extents`` are the extents past which the tensor is never read, by
    scalar inputs, or None. ``fills`` are the values stored past them."""

    shape: tuple[int, ...]
    extents: tuple[AffineExtent | None, ...]
    fills: tuple[float | None, ...]
    starts: tuple[AffineExtent | None, ...] = ()  #: Extents before which an output stored over an input equals the input.
    rows: tuple[int, AffineExtent, int, RowWindow] | None = None  #: Likewise outside these rows (``written_rows``).


@dataclass(frozen=True)
class RangeBounds:
    """The parts of a program that end at a length: ``tensors``, and the bounds of reductions in ``stops``. Each bound has its
    reduction axis at the greatest length."""

    tensors: Mapping[str, EndedTensor]
    stops: tuple[tuple[ReduceBound, Axis], ...]


def ended_at(
    graph: ComputeGraph, shapes: Mapping[str, tuple[Dim, ...]], ends: SkipMarker, lengths: Mapping[str, str]
) -> RangeBounds:
    """Return the tensors and reductions of ``graph`` that end at a length. ``shapes`` are those of its tensors, ``ends`` holds
    the values stored past the length. ``lengths`` maps dimensions to scalar inputs."""
    reduced = {(c.name, r.name): r for c in graph.computes for r in c.reduce}
    stops = ((ReduceBound(*place, _rename_lengths(extent, lengths)), reduced[place]) for place, extent in ends.stops.items())
    return RangeBounds(_find_ended_tensors(graph, shapes, ends.held, lengths), tuple(stops))


def _find_ended_tensors(
    graph: ComputeGraph, shapes: Mapping[str, tuple[Dim, ...]], held: Mapping[tuple[str, int], Number], lengths: Mapping[str, str]
) -> dict[str, EndedTensor]:
    found, everywhere = dict[str, EndedTensor](), _index_dependencies(graph)
    for c in graph.computes:
        dims = shapes.get(c.name, ())
        if c.name in everywhere or not any(isinstance(d, AffineExtent) for d in dims):
            continue
        fills = tuple(_to_float(held.get((c.name, d))) for d in range(len(dims)))
        if is_float(c.dtype) or fills == (None,) * len(dims):
            extents = tuple(None if isinstance(d, int) else _rename_lengths(d, lengths) for d in dims)
            found[c.name] = EndedTensor(c.shape, extents, fills)
    return found


def _to_float(held: Number | None) -> float | None:
    return None if held is None else float(held)


def _rename_lengths(extent: AffineExtent, lengths: Mapping[str, str]) -> AffineExtent:
    return replace(extent, terms=tuple((lengths[name], f) for name, f in extent.terms))


def _index_dependencies(graph: ComputeGraph) -> set[str]:
    """Return the tensors that any index or integer divisor depends on."""
    found = {n for c in graph.computes for n in _index_tensors(c.body, graph, within=False)}
    for c in reversed(graph.computes):
        if c.name in found:
            found.update(c.reads)
    return found


def _index_tensors(e: Expr, graph: ComputeGraph, within: bool) -> Iterator[str]:
    """Yield the tensors that are read ``within`` an index or a divisor."""
    if isinstance(e, Load):
        if within:
            yield e.tensor
        within = True
    elif isinstance(e, Op) and e.fn in ("div", "floordiv", "mod"):
        dtypes = {n: t.dtype for n, t in graph.types.items()} if not within else {}
        within = within or not is_float(ex.dtype_of(e, dtypes))
    for part in ex.children(e):
        yield from _index_tensors(part, graph, within)


def with_batches(ended: RangeBounds, graph: ComputeGraph) -> RangeBounds:
    """Return ``ended`` extended to the batched products of ``graph``. A batched product ends if all its slices end. A slice that
    only a bias map reads ends with that map."""
    slices = dict[str, list[tuple[Load, EndedTensor | None, Compute]]]()
    ended = replace(ended, tensors={**ended.tensors, **_before_biases(ended, graph)})
    for c in graph.computes:
        if isinstance(c.body, Load) and c.body.tensor in graph.producers and c.body.tensor not in ended.tensors:
            slices.setdefault(c.body.tensor, []).append((c.body, ended.tensors.get(c.name), c))
    return replace(
        ended,
        tensors={**ended.tensors, **{n: t for n, found in slices.items() if (t := _join_slices(found, graph.types[n].shape))}},
    )


def _before_biases(ended: RangeBounds, graph: ComputeGraph) -> dict[str, EndedTensor]:
    """Return slices of batches without an end that a single map reads element by element: they end with the map."""
    readers, found = graph.consumers(), dict[str, EndedTensor]()
    for c in graph.computes:
        known = [r for r in readers[c.name] if r.name in ended.tensors]
        if c.name in ended.tensors or not isinstance(c.body, Load) or len(known) != len(readers[c.name]) or len(known) != 1:
            continue
        end, reader = ended.tensors[known[0].name], known[0]
        if reader.combiner is None and all(identity_load(ld, reader) for ld in reader.loads if ld.tensor == c.name):
            found[c.name] = EndedTensor(end.shape, end.extents, (None,) * len(end.fills))
    return found


def _join_slices(slices: Sequence[tuple[Load, EndedTensor | None, Compute]], shape: tuple[int, ...]) -> EndedTensor | None:
    """Return the tensor of this ``shape`` that consists of these slices, with the ends common to all of them."""
    parts = list[list[tuple[AffineExtent | None, float | None]]]()
    for load, known, c in slices:
        if known is None:
            return None
        axes = {a.name: d for d, a in enumerate(c.axes)}
        at = [axes.get(i.axis) if isinstance(i, Ref) else None for i in load.indices]
        parts.append([(None, None) if d is None else (known.extents[d], known.fills[d]) for d in at])
    same = [p[0] if len({*p}) == 1 else (None, None) for p in zip(*parts, strict=True)]
    return EndedTensor(shape, tuple(e for e, _ in same), tuple(f for _, f in same))


def ended_operators(operators: Sequence[ROperator], ended: RangeBounds) -> tuple[ROperator, ...]:
    """Return ``operators`` with their skipped tasks and reduction bounds."""
    stops = {(s.compute, axis): s for s, axis in ended.stops}
    return tuple(replace(o, skips=_skip_ranges(o, ended.tensors), reduce_bounds=_reduce_bounds(o, stops)) for o in operators)


def _reduce_bounds(operator: ROperator, known: Mapping[tuple[str, Axis], ReduceBound]) -> tuple[ReduceBound, ...]:
    """Return the bounds of the operator's reductions; a reduction that was split has other axes and no bound."""
    found = (known.get((c.name, r)) for c in operator.computes for r in c.reduce)
    return tuple(s for s in found if s is not None)


def interleave_tasks(program: RProgram) -> RProgram:
    """Return ``program`` with the tasks of every masked operator interleaved over the rows.

    With consecutive tasks per row, the last rows would idle at a shorter length. A task inherits the position and waits of
    another task of its operator, so the order stays legal."""
    rows = [list(row) for row in program.rows]
    places: dict[str, list[tuple[int, int, int]]] = {}
    for veu, row in enumerate(rows):
        passed: dict[str, int] = {}
        for order, task in enumerate(row):
            number = passed[task.operator] = passed.get(task.operator, -1) + 1
            places.setdefault(task.operator, []).append((number, veu, order))
    for operator in program.operators:
        counters = [c for c in program.counters if c.operator == operator.name]
        if operator.skips and all(c.total == operator.task_count for c in counters):
            for index, (_, veu, order) in enumerate(sorted(places.get(operator.name, ()))):
                rows[veu][order] = replace(rows[veu][order], index=index)
    return replace(program, rows=tuple(map(tuple, rows)))


def _skip_ranges(operator: ROperator, tensors: Mapping[str, EndedTensor]) -> tuple[SkipTasks, ...]:
    """Return the skipped tasks of an operator: along each axis on which all outputs have equal ends."""
    known = [tensors.get(name) for name in operator.outputs]
    outputs = [k for k in known if k is not None and k.shape == operator.anchor.shape]
    if len(outputs) != len(known):
        return ()
    made = list[SkipTasks]()
    for d, axis in enumerate(operator.anchor.axes):
        extents = {k.extents[d] for k in outputs}
        extent = extents.pop()
        if extent is not None and not extents:
            made.append(SkipTasks(axis.name, extent, tuple(k.fills[d] for k in outputs)))
        begins = {k.starts[d] if k.starts else None for k in outputs}
        begin = begins.pop()
        if begin is not None and not begins:
            made.append(SkipTasks(axis.name, begin, (None,) * len(outputs), before=True))
    rows = {k.rows for k in outputs}
    found = rows.pop()
    if found is not None and not rows:
        axes = [a.name for a in operator.anchor.axes]
        window = replace(found[3], by=axes[found[2]])
        made.append(SkipTasks(axes[found[0]], found[1], (None,) * len(outputs), True, window))
    return tuple(sorted(made, key=lambda e: e.writes))

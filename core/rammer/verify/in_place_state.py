"""State ports: an input and an output of a program in one buffer, such as a cache that grows in place.

Each element of the output equals that of the input, or does not depend on the input. Other Computes do not read the input. So an
element may be written at any time, and repeatedly. A reader of the input finds the old value or an equal one. A reader of the
output waits for it as usual. ``check_states`` proves this property from the text; it holds at every length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Const, Expr, Load, Op, Ref
from rammer.ir.extent import AffineExtent, RowWindow, SkipTasks
from rammer.verify.expressions import VerifyError

if TYPE_CHECKING:
    from rammer.ir.operator import ROperator
    from rammer.ir.program import RProgram


def is_continuation(compute: Compute, past: str) -> bool:
    """Return True if each element of ``compute`` equals that of ``past`` or does not depend on it."""
    own = tuple(Ref(a.name) for a in compute.axes)
    return compute.combiner is None and _is_past_preserved(compute.body, past, own)


def _is_past_preserved(e: Expr, past: str, own: tuple[Ref, ...]) -> bool:
    if past not in {load.tensor for load in ex.loads(e)}:
        return True
    if isinstance(e, Load):
        return e.tensor == past and e.indices == own
    if not isinstance(e, Op) or e.fn != "where":
        return False
    condition, *parts = e.args
    return past not in {load.tensor for load in ex.loads(condition)} and all(_is_past_preserved(p, past, own) for p in parts)


def extent_of(e: Expr) -> AffineExtent | None:
    """Return ``e`` as an affine function of one-element tensors, or None if it is not affine."""
    terms, offset = dict[str, int](), 0
    for part, factor in _split_sum(e, 1):
        if isinstance(part, Const) and isinstance(part.value, int):
            offset += factor * part.value
        elif isinstance(part, Load) and all(isinstance(i, Const) for i in part.indices):
            terms[part.tensor] = terms.get(part.tensor, 0) + factor
        else:
            return None
    return AffineExtent(tuple((n, f) for n, f in terms.items() if f), offset)


def _split_sum(e: Expr, factor: int) -> list[tuple[Expr, int]]:
    """Return the parts of a sum with their factors."""
    if isinstance(e, Op) and e.fn in ("add", "sub"):
        a, b = e.args
        return [*_split_sum(a, factor), *_split_sum(b, factor if e.fn == "add" else -factor)]
    if isinstance(e, Op) and e.fn == "mul":
        for number, other in (e.args, e.args[::-1]):
            if isinstance(number, Const) and isinstance(number.value, int):
                return _split_sum(other, factor * number.value)
    return [(e, factor)]


def same_extent(a: AffineExtent, b: AffineExtent) -> bool:
    """Return True if two extents are the same function."""
    return dict(a.terms) == dict(b.terms) and a.offset == b.offset


def state_pairs(program: RProgram) -> Mapping[str, str]:
    """Map each state output tensor to the input tensor that it continues."""
    homes = {program.storage[p.tensor].buffer: p.tensor for p in program.inputs}
    found = ((p.tensor, homes.get(program.storage[p.tensor].buffer)) for p in program.outputs)
    return {output: past for output, past in found if past is not None}


def state_ports(program: RProgram) -> dict[str, str]:
    """Map the ONNX name of each state output to that of the input that it continues. For a device the two are one array, which a
    run does not copy in or out."""
    names = {p.tensor: p.external for p in (*program.inputs, *program.outputs)}
    return {names[output]: names[past] for output, past in state_pairs(program).items()}


def check_states(program: RProgram) -> None:
    """Raise VerifyError unless every buffer of kind ``state`` holds an input and the output that continues it."""
    pairs, makers = state_pairs(program), {c.name: (o, c) for o in program.operators for c in o.computes}
    held = {program.storage[n].buffer for n in pairs}
    for buffer in program.buffers:
        if (buffer.kind == "state") != (buffer.name in held):
            raise VerifyError(f"buffer {buffer.name} of kind {buffer.kind} does not match its states", program.name)
    for output, past in pairs.items():
        operator, compute = makers.get(output, (None, None))
        if operator is None or compute is None or output not in operator.outputs or not is_continuation(compute, past):
            raise VerifyError(f"{output} does not continue {past}, whose buffer it shares", program.name)
        for other in program.operators:
            if any(past in c.reads for c in other.computes if c is not compute):
                raise VerifyError(f"{other.name} reads {past}, which {operator.name} overwrites with {output}", other.name)
            home = program.storage[output].buffer
            if any(program.storage[n].buffer == home and n != output for n in other.outputs if n in program.storage):
                raise VerifyError(f"{other.name} writes into the buffer of state {output}", other.name)
    for operator in program.operators:
        for ending in operator.skips:
            if ending.before and not all(_is_past_where_skipped(operator, n, ending, pairs) for n in operator.outputs):
                raise VerifyError(f"'skip {ending}', but {operator.name} has new elements to write there", operator.name)


def _is_past_where_skipped(operator: ROperator, output: str, ending: SkipTasks, pairs: Mapping[str, str]) -> bool:
    """Return True if ``output`` equals its past in all skipped tasks."""
    if ending.window is None:
        return _is_past_below(operator, output, ending.axis, ending.extent, pairs)
    compute = next(c for c in operator.computes if c.name == output)
    found = written_rows(compute, pairs[output]) if output in pairs else None
    if found is None:
        return False
    axis, extent, by, rows = found
    names = [a.name for a in operator.anchor.axes]
    return (names[axis], extent, replace(rows, by=names[by])) == (ending.axis, ending.extent, ending.window)


def _is_past_below(operator: ROperator, output: str, axis: str, extent: AffineExtent, pairs: Mapping[str, str]) -> bool:
    """Return True if ``output`` equals its past where ``axis`` is below ``extent``."""
    compute = next(c for c in operator.computes if c.name == output)
    e = compute.body
    if output not in pairs or not isinstance(e, Op) or e.fn != "where":
        return False
    test, old, _ = e.args
    own = tuple(Ref(a.name) for a in compute.axes)
    names = {a.name: b.name for a, b in zip(operator.anchor.axes, compute.axes, strict=True)}
    if not isinstance(test, Op) or test.fn != "lt" or test.args[0] != Ref(names[axis]) or old != Load(pairs[output], own):
        return False
    found = extent_of(test.args[1])
    return found is not None and same_extent(found, extent)


def written_rows(compute: Compute, past: str) -> tuple[int, AffineExtent, int, RowWindow] | None:
    """Return the row window in which ``compute`` differs from ``past``, or None for another form.

    The window has a constant number of positions along an axis. Its start is an element of a tensor, which another axis selects.
    The result is the axis, the tensor, the other axis, and the window by names of axes."""
    own, of = [Ref(a.name) for a in compute.axes], 0
    match compute.body:
        case Op("where", (Op("and_", (Op("le", (zero, step)), Op("lt", (same, Const(int(count)))))), _, old)):
            if zero != ex.integer(0) or step != same or old != Load(past, tuple(own)):
                return None
        case _:
            return None
    match step:
        case Op("mod", (inner, Const(int(of)))):
            step = inner
    match step:
        case Op("sub", (Ref() as place, Load(tensor, (Ref() as chosen,), None))) if place in own and chosen in own:
            return own.index(place), AffineExtent(((tensor, 1),), 0), own.index(chosen), RowWindow(chosen.axis, count, of)
    return None

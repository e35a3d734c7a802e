"""States: an input and an output of a program in one buffer, such as a cache that grows where it lies.

Each element of the output is either that of the input, or does not depend on the input at all, and nobody else reads the input.
So an element may be written at any time, and as often as tasks like: whoever reads it as the input's finds the old value or the
same one, and whoever reads the output's waits for it as for any other. That is a property of the text, which ``check_states``
proves; it holds at every length.
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
    """Whether each element of ``compute`` is that of ``past``, or does not depend on it."""
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
    """``e`` as a function of tensors of one element; None where it is none."""
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
    """The parts of a sum with their factors."""
    if isinstance(e, Op) and e.fn in ("add", "sub"):
        a, b = e.args
        return [*_split_sum(a, factor), *_split_sum(b, factor if e.fn == "add" else -factor)]
    if isinstance(e, Op) and e.fn == "mul":
        for number, other in (e.args, e.args[::-1]):
            if isinstance(number, Const) and isinstance(number.value, int):
                return _split_sum(other, factor * number.value)
    return [(e, factor)]


def same_extent(a: AffineExtent, b: AffineExtent) -> bool:
    """Whether two extents are the same function."""
    return dict(a.terms) == dict(b.terms) and a.offset == b.offset


def state_pairs(program: RProgram) -> Mapping[str, str]:
    """Tensor of an output -> tensor of the input that it continues."""
    homes = {program.storage[p.tensor].buffer: p.tensor for p in program.inputs}
    found = ((p.tensor, homes.get(program.storage[p.tensor].buffer)) for p in program.outputs)
    return {output: past for output, past in found if past is not None}


def state_ports(program: RProgram) -> dict[str, str]:
    """ONNX name of an output -> that of the input that it continues: for a device one array, which a run neither copies in
    nor out."""
    names = {p.tensor: p.external for p in (*program.inputs, *program.outputs)}
    return {names[output]: names[past] for output, past in state_pairs(program).items()}


def check_states(program: RProgram) -> None:
    """VerifyError unless every buffer of kind ``state`` holds an input and the output that continues it."""
    pairs, makers = state_pairs(program), {c.name: (o, c) for o in program.operators for c in o.computes}
    held = {program.storage[n].buffer for n in pairs}
    for buffer in program.buffers:
        if (buffer.kind == "state") != (buffer.name in held):
            raise VerifyError(f"buffer {buffer.name} of kind {buffer.kind} is no state, or one of another kind", program.name)
    for output, past in pairs.items():
        operator, compute = makers.get(output, (None, None))
        if operator is None or compute is None or output not in operator.outputs or not is_continuation(compute, past):
            raise VerifyError(f"{output} does not continue {past}, in whose buffer it is", program.name)
        for other in program.operators:
            if any(past in c.reads for c in other.computes if c is not compute):
                raise VerifyError(f"{other.name} reads {past}, over which {operator.name} writes {output}", other.name)
            home = program.storage[output].buffer
            if any(program.storage[n].buffer == home and n != output for n in other.outputs if n in program.storage):
                raise VerifyError(f"{other.name} writes into the buffer of state {output}", other.name)
    for operator in program.operators:
        for ending in operator.endings:
            if ending.below and not all(_is_past_where_skipped(operator, n, ending, pairs) for n in operator.outputs):
                raise VerifyError(f"'ends {ending}', but {operator.name} has something to write there", operator.name)


def _is_past_where_skipped(operator: ROperator, output: str, ending: SkipTasks, pairs: Mapping[str, str]) -> bool:
    """Whether ``output`` is its past wherever a task ends."""
    if ending.beside is None:
        return _is_past_below(operator, output, ending.axis, ending.extent, pairs)
    compute = next(c for c in operator.computes if c.name == output)
    found = written_rows(compute, pairs[output]) if output in pairs else None
    if found is None:
        return False
    axis, extent, by, rows = found
    names = [a.name for a in operator.anchor.axes]
    return (names[axis], extent, replace(rows, by=names[by])) == (ending.axis, ending.extent, ending.beside)


def _is_past_below(operator: ROperator, output: str, axis: str, extent: AffineExtent, pairs: Mapping[str, str]) -> bool:
    """Whether ``output`` is its past wherever ``axis`` lies below ``extent``."""
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
    """Where ``compute`` is anything but ``past``, if that is so many places along an axis from an element of a tensor on, which
    another axis chooses: the axis, the tensor, the other axis, and the places by names of axes; None elsewhere."""
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

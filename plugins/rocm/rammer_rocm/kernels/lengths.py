"""Bounds of a panel product's rows, columns and sums in a ranged program, as C texts."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rammer.codegen import Unsuited, format_sum
from rammer.ir.extent import AffineExtent

from rammer_rocm.kernels.contraction import PanelProduct, ended_axes
from rammer_rocm.kernels.vector import vector_type


def extent_text(extent: AffineExtent, pointer: Callable[[str], str]) -> str:
    """Return the C text of a dynamic extent; ``pointer`` maps a length to its parameter name."""
    return f"({format_sum([(f'{pointer(n)}[0]', f) for n, f in extent.terms], extent.offset)})"


def ends_of(p: PanelProduct, pointer: Callable[[str], str]) -> dict[str, str]:
    """Return the ends of rows and columns, by axis."""
    return {axis: extent_text(extent, pointer) for axis, extent in ended_axes(p.operator).items()}


def stops_of(p: PanelProduct, known: Collection[str], pointer: Callable[[str], str]) -> dict[str, str]:
    """Return the ends of the sum by axis, except for axes in ``known``. Products of bytes have no dynamic ends: they sum up to
    the bound."""
    stops = [s for s in p.operator.reduce_bounds if s.compute == p.main.name and p.quads is None and p.extent[s.axis] > 1]
    ends = {s.axis: extent_text(s.extent, pointer) for s in stops if s.axis not in known}
    return {axis: f"(int)min(max({text}, 0l), {p.extent[axis]}l)" for axis, text in ends.items()}


def lanes_before(p: PanelProduct, lanes: int, axis: str, limit: str, origin: Callable[[str], str]) -> str:
    """Return a mask of the lanes of a column vector at which ``axis`` is less than ``limit``. The vector starts at ``col`` in row
    ``row``. ``origin`` maps an axis to its first value in the task."""
    kind = vector_type(lanes, "int")
    if axis not in p.columns or p.tile[axis] == 1:
        return f"({kind})({origin(axis)}{' + row' if axis == p.row else ''} < {limit} ? -1 : 0)"
    if len(p.columns) > 1:
        raise Unsuited("an end among several axes of columns")
    if lanes == 1:
        return f"({origin(axis)} + col < {limit} ? -1 : 0)"
    return f"rm_within{lanes}({origin(axis)} + col, 1, max({limit}, 0l))"

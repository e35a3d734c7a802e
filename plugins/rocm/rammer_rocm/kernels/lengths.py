"""Where the rows, columns and sums of a panel's product end in a program for a range of lengths, as C texts."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rammer.codegen.text import total
from rammer.ir.extent import AffineExtent
from rammer.ir.operator import ROperator

from rammer_rocm.kernels.contraction import PanelProduct


def extent_text(extent: AffineExtent, pointer: Callable[[str], str]) -> str:
    """An extent of the run; ``pointer`` names the parameter of a length."""
    return f"({total([(f'{pointer(n)}[0]', f) for n, f in extent.terms], extent.offset)})"


def ended_axes(operator: ROperator) -> dict[str, AffineExtent]:
    """Where the axes of an operator's contraction end that do."""
    names = dict(zip((a.name for a in operator.anchor.axes), (a.name for a in operator.main.axes), strict=True))
    return {names[e.axis]: e.extent for e in operator.endings if not e.below}


def ends_of(p: PanelProduct, pointer: Callable[[str], str]) -> dict[str, str]:
    """Where rows and columns end, by axis."""
    return {axis: extent_text(extent, pointer) for axis, extent in ended_axes(p.operator).items()}


def stops_of(p: PanelProduct, known: Collection[str], pointer: Callable[[str], str]) -> dict[str, str]:
    """Where the sum stops, by axis but for those ``known`` to be walked otherwise. Bytes stop at the bound."""
    stops = [s for s in p.operator.stops if s.compute == p.main.name and p.quads is None and p.extent[s.axis] > 1]
    ends = {s.axis: extent_text(s.extent, pointer) for s in stops if s.axis not in known}
    return {axis: f"(int)min(max({text}, 0l), {p.extent[axis]}l)" for axis, text in ends.items()}

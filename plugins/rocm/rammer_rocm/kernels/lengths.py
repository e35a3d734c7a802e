"""Where the rows, columns and sums of a panel's product end in a program for a range of lengths, as C texts."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rammer.codegen.text import total
from rammer.ir.extent import AffineExtent

from rammer_rocm.kernels.contraction import PanelProduct


def extent_text(extent: AffineExtent, pointer: Callable[[str], str]) -> str:
    """An extent of the run; ``pointer`` names the parameter of a length."""
    return f"({total([(f'{pointer(n)}[0]', f) for n, f in extent.terms], extent.offset)})"


def ends_of(p: PanelProduct, pointer: Callable[[str], str]) -> dict[str, str]:
    """Where rows and columns end, by axis."""
    names = dict(zip((a.name for a in p.operator.anchor.axes), (a.name for a in p.main.axes), strict=True))
    return {names[e.axis]: extent_text(e.extent, pointer) for e in p.operator.endings if not e.below}


def stops_of(p: PanelProduct, known: Collection[str], pointer: Callable[[str], str]) -> dict[str, str]:
    """Where the sum stops, by axis but for those ``known`` to be walked otherwise. Bytes stop at the bound."""
    stops = [s for s in p.operator.stops if s.compute == p.main.name and p.quads is None and p.extent[s.axis] > 1]
    ends = {s.axis: extent_text(s.extent, pointer) for s in stops if s.axis not in known}
    return {axis: f"(int)min(max({text}, 0l), {p.extent[axis]}l)" for axis, text in ends.items()}

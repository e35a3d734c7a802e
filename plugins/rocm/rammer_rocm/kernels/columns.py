"""Where columns of a task lie that are no consecutive elements: C text for one of them, and for a walk over neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from rammer_rocm.kernels.contraction import Access, PanelProduct


def scattered(p: PanelProduct, steps: Access, column: str) -> str:
    """Address of ``column`` relative to column 0."""
    parts, below = [], ""
    for axis in reversed(p.columns):
        if steps.step(axis) and p.tile[axis] > 1:
            index = f"({column}) / ({below})" if below else f"({column})"
            wrapped = index if axis == p.columns[0] else f"({index} % e_{axis})"
            parts.append(f"{wrapped} * {steps.step(axis)}")
        below = f"{below} * e_{axis}" if below else f"e_{axis}"
    return " + ".join(parts) or "0"


def walk(p: PanelProduct, steps: Access) -> Iterator[str]:
    """Open a block with the address ``at`` of column ``col``, relative to column 0, and where in its runs it is: a division
    for a vector instead of one for each of its lanes."""
    yield f"{{ int at = {scattered(p, steps, 'col')};"
    below = ""
    for axis in reversed(p.columns[1:]):
        index = f"col / ({below})" if below else "col"
        yield f"int i_{axis} = {index} % e_{axis};"
        below = f"{below} * e_{axis}" if below else f"e_{axis}"


def advance(p: PanelProduct, steps: Access) -> str:
    """Step ``at`` to the next column."""
    inner = [a for a in reversed(p.columns)]
    text = f"at += {steps.step(inner[0])};"
    for axis, outer in pairwise(inner):
        back = f"{steps.step(outer)} - e_{axis} * {steps.step(axis)}"
        text += f" if (++i_{axis} == e_{axis}) {{ i_{axis} = 0; at += {back};"
    return text + " }" * (len(inner) - 1)

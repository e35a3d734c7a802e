"""What programs are found by: input shapes, ranges and what they are for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from rammer.ir.extent import AffineExtent
from rammer.runtime.lengths import Shapes, Span

#: Shapes by input at the greatest lengths; and by number, since inputs may have any name: ranges by dimension, how dimensions
#: follow from others, which outputs of a bound call stay in which inputs, and which call has its program alone.
ShapeKey: TypeAlias = "tuple[tuple[str | int, Any], ...]"
SPANS, FOLLOWS, BOUND, MEMORY = range(4)


def key_for(shapes: Shapes, spans: Mapping[str, Span], derived: Mapping[str, AffineExtent]) -> ShapeKey:
    """Of the program for these shapes, and in ``spans`` for all of those lengths."""
    follows = ((FOLLOWS, tuple(sorted((n, str(e)) for n, e in derived.items()))),) if derived else ()
    return (*sorted(shapes.items()), *(((SPANS, tuple(sorted(spans.items()))), *follows) if spans else ()))

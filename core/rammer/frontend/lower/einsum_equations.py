"""The equation of an Einsum: the axes of every operand and of the result, and their extents."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rammer.errors import BadInput


@dataclass(frozen=True)
class Equation:
    """The axis names of each operand and of the result, and their extents in the order of appearance."""

    operands: tuple[tuple[str, ...], ...]
    result: tuple[str, ...]
    extents: dict[str, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return tuple(self.extents[n] for n in self.result)


def parse_equation(text: str, shapes: Sequence[tuple[int, ...]]) -> Equation:
    """Return the equation over operands of ``shapes``. Raise BadInput if they do not match: terms and operands, letters and axes,
    or extents of one letter (1 matches any)."""
    terms, arrow, target = text.replace(" ", "").partition("->")
    if len(terms.split(",")) != len(shapes):
        raise BadInput(f"Einsum of {len(shapes)} operands has the equation {text!r}", hint="one term for each operand")
    operands = tuple(_term_labels(term, len(shape)) for term, shape in zip(terms.split(","), shapes, strict=True))
    extents = dict[str, int]()
    for term, names, shape in zip(terms.split(","), operands, shapes, strict=True):
        if len(names) != len(shape):
            raise BadInput(f"Einsum takes an operand of {len(shape)} axes by the term {term!r}", hint="one letter for each axis")
        for name, extent in zip(names, shape, strict=True):
            known = extents.get(name, 1)
            if 1 not in (known, extent) and known != extent:
                raise BadInput(
                    f"{name!r} in the equation {text!r} of Einsum is an axis of {known} and of {extent} elements",
                    hint="axes of one letter have one extent",
                )
            extents[name] = extent if name not in extents or extent != 1 else known
    hidden = sorted({n for names in operands for n in names if len(n) > 1}, key=lambda n: -int(n[1:]))
    result = (
        tuple(_term_labels(target, len(target.replace("...", "")) + len(hidden))) if arrow else _implicit_output(operands, hidden)
    )
    if not set(result) <= set(extents) or len(set(result)) < len(result):
        raise BadInput(
            f"the result of Einsum's equation {text!r} has a letter that no operand has, or a letter twice",
            hint="the result names letters of the operands, each once",
        )
    return Equation(operands, result, extents)


def _term_labels(term: str, rank: int) -> tuple[str, ...]:
    """Return the axis names of one term; the dimensions of an ellipsis are numbered from the right: ``e1, e0``."""
    before, dots, after = term.partition("...")
    count = rank - len(re.sub(r"\W", "", term)) if dots else 0
    return (*before, *(f"e{d}" for d in reversed(range(count))), *after)


def _implicit_output(operands: Sequence[tuple[str, ...]], hidden: Sequence[str]) -> tuple[str, ...]:
    """Return NumPy's implicit output: the ellipsis, then the labels that occur once, sorted."""
    flat = [label for names in operands for label in names]
    return (*hidden, *sorted(n for n in set(flat) if len(n) == 1 and flat.count(n) == 1))

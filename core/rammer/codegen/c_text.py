"""Integer arithmetic as C text, and lines with indentation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rammer.codegen.contraction_form import QUOTIENT


@dataclass
class Text:
    """Lines of C text: an opening brace at a line's end indents the lines after it, a leading closing brace ends that."""

    lines: list[str] = field(default_factory=list)
    depth: int = 1

    def line(self, text: str) -> None:
        """Append one line of text."""
        self.depth -= text.startswith("}")
        self.lines.append("  " * self.depth + text)
        self.depth += text.endswith("{")

    def all(self, texts: Iterable[str]) -> None:
        """Append several lines of text."""
        for text in texts:
            self.line(text)

    @contextmanager
    def block(self, head: str, end: str = "}") -> Iterator[None]:
        """Write a block between ``head`` (empty for a bare block) with an opening brace, and ``end``."""
        self.line(f"{head} {{".lstrip())
        yield
        self.line(end)

    def __str__(self) -> str:
        return "\n".join(self.lines) + "\n"


def format_sum(terms: Iterable[tuple[str, int]], constant: int = 0) -> str:
    """Format ``constant + sum(name * factor)``; terms without a name or factor vanish."""
    parts = [n if f == 1 else f"{n} * {f}" for n, f in terms if f and n and n != "0"]
    if constant or not parts:
        parts.append(str(constant))
    return " + ".join(parts)


def split_digits(value: str, extents: Sequence[int]) -> list[str]:
    """Return the mixed-radix digits of ``value``, outermost first; the first digit is not reduced."""
    result, below = list[str](), 1
    for n, extent in reversed(list(enumerate(extents))):
        text = value if below == 1 else f"{value} / {below}"
        result.append(text if n == 0 else f"({text}) % {extent}" if below > 1 else f"{text} % {extent}")
        below *= extent
    return [f"({t})" for t in reversed(result)]


def combine_digits(places: Iterable[tuple[str, int | str]]) -> str:
    """Return the number with these mixed-radix digits (each with its extent, outermost first), 0 without digits."""
    text = ""
    for name, extent in places:
        text = f"({text}) * {extent} + {name}" if text else name
    return text or "0"


def weighted_terms(steps: Mapping[str, int], names: Mapping[str, str]) -> list[tuple[str, int]]:
    """Return the terms of the axes that ``names`` spells; ``axis // d`` is spelled from its axis."""
    result = []
    for axis, step in steps.items():
        base, _, divisor = axis.partition(QUOTIENT)
        if base in names:
            result.append((f"({names[base]} / {divisor})" if divisor else names[base], step))
    return result

"""Automatic ranges: a dimension that runs use at two lengths gets programs for ranges that double from the first length.

If no program serves all lengths of a range, for example because the model only accepts multiples of 32, the range gets a step
that the lengths of the runs have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeVar

from rammer.errors import BadInput, DeviceFailure, print_warning
from rammer.ir.extent import LEAST, AffineExtent, NoRange, Point
from rammer.ir.port import ModelPort
from rammer.runtime.shape_buckets import FIXED, Lengths, Shapes, Span, format_spans

T = TypeVar("T")

#: Minimum upper bound of a range: shorter lengths are too few for separate programs.
FEWEST = 8
#: Maximum step of a range.
MOST_STEP = 32
#: Number of steps that are tried if none of them serves any range.
TRIALS = 2


def doubling_range(first: int, value: int, step: int = 1) -> Span:
    """Return the least and greatest length of the program for ``value``, in ``step`` from ``first``. The greatest length is about
    ``first`` or FEWEST, times a power of two. Length 0 is excluded unless it was the first."""
    high = max(first, FEWEST)
    while high < value:
        high *= 2
    while high // 2 >= max(value, FEWEST):
        high //= 2
    low = high // 2 + 1 if value > high // 2 and high // 2 >= FEWEST else min(first, 1)
    return _least(low, first, step), high + (first - high) % step


def _least(low: int, other: int, step: int) -> int:
    """Return the least length from ``low`` at a multiple of ``step`` from ``other``."""
    return low + (other - low) % step


@dataclass
class LengthHistory:
    """The lengths of an executable's runs. Any thread may read and update it. If ``eager``, all dimensions have ranges from the
    first run."""

    on: bool = False
    eager: bool = False
    first: Mapping[str, int] | None = None
    changed: set[str] = field(default_factory=set)
    independent: set[str] = field(default_factory=set)  #: Dimensions that once did not follow from another.
    refused: list[Mapping[str, int]] = field(default_factory=list)  #: Steps of ranges without a program.
    binds: bool = True  #: False once a bound call's range had no program.
    serves: bool = False  #: True once a range has a program.
    _lock: Any = field(default_factory=Lock, repr=False)

    def learned(self, ports: tuple[ModelPort, ...], shapes: Shapes) -> Lengths:
        """Record these shapes, and return the range that serves them, or FIXED if all dimensions have their first lengths."""
        point = {d: n for p in ports for d, n in zip(p.shape, shapes.get(p.name, ()), strict=False) if isinstance(d, str)}
        if not self.on or not point:
            return FIXED
        with self._lock:
            return self._infer_lengths(point)

    def until(self, ports: tuple[ModelPort, ...], shapes: Shapes) -> Lengths:
        """Return the range up to these lengths, for dimensions whose lengths changed between runs; FIXED if all are constant.
        Bound shapes are not recorded, since bound arrays have one shape, with the greatest lengths."""
        point = {d: n for p in ports for d, n in zip(p.shape, shapes.get(p.name, ()), strict=False) if isinstance(d, str)}
        with self._lock:
            first = self.first
            if not self.on or not self.binds or first is None:
                return FIXED
            open_ones = [d for d in sorted(point, key=lambda d: (first.get(d, 0), d)) if d in self.changed and d in first]
            roots, derived = [d for d in open_ones if d in self.independent and point[d] > LEAST], dict[str, AffineExtent]()
            for name in open_ones:
                root = next((r for r in roots if point[r] - first[r] == point[name] - first[name]), None)
                if name not in self.independent and root is not None:
                    derived[name] = AffineExtent(((root, 1),), first[name] - first[root])
            steps = self._choose_steps(roots, point, first)
            if not roots or steps is None:
                return FIXED
            spans = {d: (_least(min(first[d], 1), point[d], steps.get(d, 1)), point[d]) for d in roots}
            return Lengths(spans, derived, buckets=1, steps=steps)

    def serve(self, ports: tuple[ModelPort, ...], shapes: Shapes, make: Callable[[Lengths, Mapping[str, Span]], T]) -> T | None:
        """Return the result of ``make`` for the range that serves these shapes. Return None if they have none, or none has a
        program; then print a warning once."""
        problems = list[str]()
        while spans := (lengths := self.learned(ports, shapes)).spans_of(ports, shapes):
            try:
                found = make(lengths, spans)
            except NoRange as problem:
                problems.append(str(problem))
            except (BadInput, DeviceFailure) as problem:  # a range may need more memory
                served = format_spans(spans, lengths.steps)
                problems.append(f"no program for {served}, so each shape is compiled on its own: {problem.what}")
            else:
                self.serves = True
                return found
            self.refuse(lengths)
        if problems:
            print_warning(problems[0])
        return None

    def refuse(self, lengths: Lengths) -> None:
        """Record that no program serves these ranges. Other runs get greater steps, or none if all of them fail."""
        with self._lock:
            self.refused.append({d: lengths.steps.get(d, 1) for d in lengths.spans})
            self.on = self.on and (self.serves or len(self.refused) < TRIALS)

    def _choose_steps(self, roots: Sequence[str], point: Point, first: Point) -> dict[str, int] | None:
        """Return the steps of ranges from the lengths ``first`` to ``point``: none or, if a range without steps has no program,
        the greatest powers of two that these lengths have. Return None if those have no program either."""
        common = {d: math.gcd(MOST_STEP, first[d], point[d]) for d in roots}
        for steps in (dict.fromkeys(roots, 1), common):
            known = (r for r in self.refused if r.keys() <= steps.keys())
            if not any(all(step % steps[d] == 0 for d, step in r.items()) for r in known):
                return {d: step for d, step in steps.items() if step > 1}
        return None

    def _infer_lengths(self, point: Point) -> Lengths:
        if self.first is None:
            self.first = point
            if self.eager:
                self.changed |= {*point}
        first = self.first
        self.changed |= {d for d in point if point[d] != first.get(d)}
        grown = {d: point[d] - first[d] for d in point if d in self.changed}
        roots, derived = list[str](), dict[str, AffineExtent]()
        for name in sorted(grown, key=lambda d: (first[d], d)):
            root = next((r for r in roots if name not in self.independent and grown[r] == grown[name]), None)
            if root is not None:
                derived[name] = AffineExtent(((root, 1),), first[name] - first[root])
            else:
                roots.append(name)
                self.independent.add(name)
        steps = self._choose_steps(roots, point, first)
        if steps is None or not roots:
            return FIXED
        spans = {d: doubling_range(first[d], point[d], steps.get(d, 1)) for d in roots}
        return Lengths(spans, derived, buckets=1, steps=steps)

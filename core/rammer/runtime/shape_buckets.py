"""Buckets of a range of lengths: the choice of a run's bucket, the padding of inputs and the cropping of outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.errors import BadInput
from rammer.ir.extent import LEAST, NO_STEPS, AffineExtent, Dim, Formula, GivenLength, Point, Ranged
from rammer.ir.graph import Value
from rammer.ir.port import ModelPort
from rammer.ir.untrusted_json import whole_number

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Span: TypeAlias = "tuple[int, int]"
#: Extents by input name.
Shapes: TypeAlias = "Mapping[str, tuple[int, ...]]"

#: The maximum number of buckets of a range. Buckets are added until the longest length of each takes at most ``WASTE`` times the
#: average of its lengths, up to this maximum.
BUCKETS: Final = 5
WASTE: Final = 1.1
#: A length with a separate program if the number of buckets allows it: most batches have one element, and its kernels differ. On
#: an H200, ResNet-50 took 0.88 ms for one image with the program for 1 to 7, and 0.40 ms with a separate one.
LONE: Final = 1
#: The number of elements that take as long as the part of a run that is independent of the length: a fraction of the longest
#: length, with a minimum. On an H200 a layer of BERT took 43 + 0.38 n us, one of two products with a sum 31 + 0.20 n (n up to
#: 512): a fifth, and a third.
FIXED_PART, FIXED_LEAST = 0.25, 32


@lru_cache(1024)
def bucket_bounds(span: Span, buckets: int = BUCKETS, lone: bool = True, distance: int = 1) -> tuple[int, ...]:
    """Return the longest length of each bucket of a range, descending. Predicted times of successive buckets have a constant
    ratio. With ``lone``, the last bucket may hold ``LONE`` only. Lengths have this ``distance``."""
    low, high = span
    fixed = max(high * FIXED_PART, FIXED_LEAST)
    least, most = max(low - 1, 0) + fixed, high + fixed
    # Between two bounds with a time ratio f, padding costs a factor of sqrt(f) on average.
    count = min(buckets, math.ceil(math.log(most / least) / (2 * math.log(WASTE))))
    found = [high]
    for k in range(1, count):
        length = most * (least / most) ** (k / count) - fixed
        step = next(n for n, from_ in ((16, 128), (4, 24), (1, 0)) if length >= from_)  # rows of whole vectors
        length = math.ceil(length / step) * step
        length = high - (high - length) // distance * distance
        if max(low - 1, LEAST) < length < found[-1]:
            found.append(length)
    if lone and low == LONE and len(found) < buckets:
        found.append(LONE)
    return tuple(found)


def find_bucket(span: Span, value: int, buckets: int = BUCKETS, lone: bool = True, distance: int = 1) -> Span:
    """Return the least and greatest length of the bucket of ``value``, which is in ``span``. The other arguments are those of
    ``bucket_bounds``."""
    found = bucket_bounds(span, buckets, lone, distance)
    last = min(b for b in found if b >= value)
    return max((b + distance for b in found if b < value), default=span[0]), last


@dataclass(frozen=True)
class Lengths:
    """The ranges of open dimensions that the user specified. ``spans`` has the least and greatest lengths, ``derived`` the
    lengths that follow from them. A range has at most ``buckets`` programs. ``steps`` are the distances of lengths, if not 1;
    ``formulas`` are terms of ``derived``."""

    spans: Mapping[str, Span] = field(default_factory=dict)
    derived: Mapping[str, AffineExtent] = field(default_factory=dict)
    buckets: int = BUCKETS
    steps: Mapping[str, int] = field(default_factory=dict)
    formulas: Mapping[str, Formula] = field(default_factory=dict)

    @property
    def each(self) -> int:
        """Return the maximum number of buckets of one dimension. All combinations are at most ``buckets`` programs."""
        return int(math.pow(self.buckets, 1 / max(len(self.spans), 1)) + 1e-9)

    @property
    def lone(self) -> bool:
        """Return True if one length may have a separate program, which requires a single ranged dimension."""
        return len(self.spans) == 1

    @staticmethod
    def of(ports: tuple[ModelPort, ...], given: Mapping[str, GivenLength]) -> Lengths:
        """Parse lengths of the form ``{"past": (0, 63), "total": "past + 1"}`` for a model with these inputs, or with a step,
        ``{"width": (32, 960, 32)}``. Raise BadInput for an unknown dimension, an invalid range, or an expression that is not a
        sum of lengths."""
        names = list(dict.fromkeys(d for p in ports for d in p.shape if isinstance(d, str)))
        for name in given:
            if name not in names:
                known = f"its open dimensions are {', '.join(names)}" if names else "it has no open dimensions"
                if any(p.name == name for p in ports):
                    known += f"; the shape of its input {name} is given as {name}:EXTENTxEXTENT..."
                raise BadInput(f"the model has no open dimension {name!r}", f"shapes of {name}", known)
        stepped = {name: _check_span(name, said) for name, said in given.items() if not isinstance(said, str)}
        spans = {name: span for name, (span, _) in stepped.items()}
        steps = {name: step for name, (_, step) in stepped.items() if step > 1}
        derived = {name: _parse_extent(name, said, spans) for name, said in given.items() if isinstance(said, str)}
        return Lengths(spans, derived, steps=steps)

    def greatest(self, ports: tuple[ModelPort, ...], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return ``shapes``, plus the shapes of other inputs with ranged dimensions, at the greatest lengths."""
        high = self.whole({name: span[1] for name, span in self.spans.items()})
        found = {p.name: tuple(high.get(d, d) if isinstance(d, str) else d for d in p.shape) for p in ports if p.ranked}
        known = {n: tuple(d for d in s if isinstance(d, int)) for n, s in found.items() if all(isinstance(d, int) for d in s)}
        return {**known, **shapes} if high else dict(shapes)

    def whole(self, point: Point) -> dict[str, int]:
        """Return the lengths of ``point`` and the lengths derived from them."""
        terms = Ranged({}, {}, formulas=self.formulas).complete(point)
        return {**point, **{name: extent.at(terms) for name, extent in self.derived.items()}}

    @staticmethod
    def of_file(ranged: Ranged, inputs: tuple[Value, ...]) -> Lengths:
        """Return the lengths of a compiled file, which has one program. A derived dimension is named by its expression."""
        shapes = [ranged.shapes[v.name] for v in inputs if v.name not in ranged.lengths.values()]
        derived = {str(d): d for s in shapes for d in s if isinstance(d, AffineExtent) and str(d) not in ranged.lengths}
        return Lengths(ranged.spans, derived, 1, ranged.steps, ranged.formulas)

    def spans_of(self, ports: tuple[ModelPort, ...], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Span]:
        """Return the bucket of each dimension for inputs of these ``shapes``. Return {} if a length is outside its range or has a
        separate program."""
        if not self.spans:
            return {}  # fast path, because every run calls this method
        found = {d: n for p in ports for d, n in zip(p.shape, shapes.get(p.name, ()), strict=False) if isinstance(d, str)}
        lengths = {name: found.get(name, -1) for name in self.spans}
        if any(not is_within(span, lengths[name], self.steps.get(name, 1)) for name, span in self.spans.items()):
            return {}
        if any(found.get(name, -1) != extent for name, extent in self.whole(lengths).items()):
            return {}
        within = {
            name: find_bucket(self.spans[name], n, self.each, self.lone, self.steps.get(name, 1)) for name, n in lengths.items()
        }
        return within if any(low < high for low, high in within.values()) else {}

    def longest(
        self, ports: tuple[ModelPort, ...], shapes: Mapping[str, tuple[int, ...]], spans: Mapping[str, Span]
    ) -> dict[str, tuple[int, ...]]:
        """Return the shape of each input with the open dimensions at the greatest length of ``spans``."""
        if not spans:
            return dict(shapes)
        high = self.whole({name: span[1] for name, span in spans.items()})
        by_name = {p.name: p for p in ports}
        return {n: tuple(high.get(str(d), e) for d, e in zip(by_name[n].dims(len(s)), s, strict=True)) for n, s in shapes.items()}


def ports_of(values: Sequence[Value], ranged: Ranged | None) -> tuple[ModelPort, ...]:
    """Return the inputs or outputs of a compiled model as ports, with lengths of a range by name."""
    hidden, shapes = (ranged.lengths.values(), ranged.shapes) if ranged is not None else ((), {})
    shown = (v for v in values if v.name not in hidden)
    return tuple(
        ModelPort(v.external or v.name, v.port.dtype, tuple(map(_dim_name, shapes.get(v.name, v.type.shape)))) for v in shown
    )


def describe_lengths(lengths: Lengths, spans: Mapping[str, Span], programs: int) -> str:
    """Describe the lengths of the current program, its model's range and its ``programs`` on the device, for the user."""
    if not lengths.spans:
        return f"{format_spans(spans)}, a range observed in earlier runs; {programs} programs so far"
    return f"{describe_scope(lengths, spans)}; {programs} so far"


def describe_scope(lengths: Lengths, spans: Mapping[str, Span]) -> str:
    """Describe the lengths of a program and the range of its model."""
    bounds = (bucket_bounds(s, lengths.each, lengths.lone, lengths.steps.get(n, 1)) for n, s in lengths.spans.items())
    parts = math.prod(map(len, bounds))
    whole = (
        f" of {format_spans(lengths.spans, lengths.steps)}, which takes {parts} programs" if parts > 1 else ", all by one program"
    )
    return f"{format_spans(spans, lengths.steps)}{whole}"


def format_spans(spans: Mapping[str, Span], steps: Mapping[str, int] = NO_STEPS) -> str:
    """Format ranges as ``seq=9..16, width=32..960/32``."""
    return ", ".join(f"{n}={low}..{high}{f'/{steps[n]}' if n in steps else ''}" for n, (low, high) in spans.items())


def is_within(span: Span, length: int, step: int) -> bool:
    """Return True if a range with this ``step`` contains ``length``."""
    low, high = span
    return low <= length <= high and (high - length) % step == 0


def _dim_name(dim: Dim) -> int | str:
    return dim if isinstance(dim, int) else str(dim)


#: The lengths of a model without ranges.
FIXED: Final = Lengths()


def _check_span(name: str, said: tuple[int, ...]) -> tuple[Span, int]:
    """Return a range, whose ends are a multiple of the step apart, and the step."""
    low, high, step = said if len(said) == 3 else (*said, 1)
    if not 0 <= low < high or high <= LEAST:
        raise BadInput(f"{low}..{high} is not a range of lengths", f"shapes of {name}", "for example (1, 512)")
    if not 1 <= step <= high - low:
        raise BadInput(f"{step} is not a step of lengths from {low} to {high}", f"shapes of {name}", "for example (32, 960, 32)")
    return (low, high - (high - low) % step), step


def _parse_extent(name: str, said: str, spans: Mapping[str, Span]) -> AffineExtent:
    """Parse ``past + 1`` into an extent."""
    terms = dict[str, int]()
    offset = 0
    for part in said.split("+"):
        factor, _, symbol = part.rpartition("*")
        number, count = whole_number(part.strip()), whole_number(factor.strip() or "1")
        if number is not None:
            offset += number
        elif symbol.strip() in spans and count is not None:
            terms[symbol.strip()] = terms.get(symbol.strip(), 0) + count
        else:
            hint = f"for example {next(iter(spans), 'past')} + 1, where each length has a range"
            raise BadInput(f"{said!r} is not a sum of lengths and numbers", f"shapes of {name}", hint)
    return AffineExtent(tuple(terms.items()), offset)


def point_of(ranged: Ranged, ports: Sequence[Value], inputs: Mapping[str, Array]) -> Point:
    """Return the lengths of ``inputs``."""
    point, tensors = dict[str, int](), {v.external or v.name: v for v in ports}
    for name, array in inputs.items():
        for dim, extent in zip(ranged.shapes[tensors[name].name], array.shape, strict=True):
            if not isinstance(dim, int) and [f for _, f in dim.terms] == [1] and not dim.offset:
                point[dim.terms[0][0]] = extent  # other lengths are derived from these
    return point


#: Maximum shapes of inputs with cached lengths.
MOST_SEEN: Final = 4096


def pad_inputs(ranged: Ranged, ports: Sequence[Value], inputs: Mapping[str, Array]) -> tuple[dict[str, Array], Point]:
    """Return ``inputs`` padded with zeros to the longest lengths, with the lengths as inputs; and all lengths."""
    key = tuple([(name, array.shape) for name, array in inputs.items()])
    if (known := ranged.seen.get(key)) is None:
        point = ranged.complete(point_of(ranged, ports, inputs))
        scalars = ranged.scalars(point)
        lengths = {v.external or v.name: np.array(scalars[v.name], np.int64) for v in ports if v.name in scalars}
        if len(ranged.seen) >= MOST_SEEN:
            ranged.seen.clear()
        known = ranged.seen[key] = point, lengths, {v.external or v.name: v.type.shape for v in ports}
    point, lengths, shapes = known
    return {name: pad_array(array, shapes[name]) for name, array in inputs.items()} | lengths, point


def crop_outputs(ranged: Ranged, ports: Sequence[Value], outputs: Mapping[str, Array], point: Point) -> dict[str, Array]:
    """Return copies of ``outputs`` cropped to their sizes at ``point``."""
    names = {v.external or v.name: v.name for v in ports}
    shapes = {n: ranged.shape(names[n], point) for n in outputs}
    return {n: np.ascontiguousarray(a[tuple(map(slice, shapes[n]))]).reshape(shapes[n]) for n, a in outputs.items()}


def pad_array(array: Array, shape: tuple[int, ...]) -> Array:
    """Return ``array`` padded with zeros to this shape, or ``array`` itself if it does not fit."""
    if array.shape == shape or array.ndim != len(shape) or any(a > b for a, b in zip(array.shape, shape, strict=True)):
        return array
    wide = np.zeros(shape, array.dtype)
    wide[tuple(map(slice, array.shape))] = array
    return wide


#: A program's key: the greatest shapes by input name, and further entries by number, since inputs may have any name. These
#: entries are the ranges by dimension, the derived dimensions, the aliased outputs of a bound call, the call that has its program
#: alone, and the steps.
ShapeKey: TypeAlias = "tuple[tuple[str | int, Any], ...]"
SPANS, FOLLOWS, BOUND, MEMORY, STEPS = range(5)


def key_for(shapes: Shapes, spans: Mapping[str, Span], lengths: Lengths) -> ShapeKey:
    """Return the key of the program for these shapes and, for the dimensions in ``spans``, for all lengths in them, with the
    derived dimensions and steps of ``lengths``."""
    if not spans:
        return tuple(sorted(shapes.items()))
    follows = ((FOLLOWS, tuple(sorted((n, str(e)) for n, e in lengths.derived.items()))),) if lengths.derived else ()
    stepped = ((STEPS, tuple(sorted(lengths.steps.items()))),) if lengths.steps else ()
    return (*sorted(shapes.items()), (SPANS, tuple(sorted(spans.items()))), *follows, *stepped)

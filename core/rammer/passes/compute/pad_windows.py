"""Merging of products of one image with different windows into the smallest window that covers all (IOS, MLSys'21, section 3).

Weights are padded with zeros to that window, so results do not change and the products become siblings of one window. An infinity
or NaN at an element that only the larger window reads becomes NaN, so the rewrite is optional."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rammer.ir import expr as ex
from rammer.ir.compute import Axis
from rammer.ir.expr import Expr, Load, Op, Ref
from rammer.ir.types import TensorType
from rammer.passes.compute.batch_candidates import Sibling

#: Maximum ratio of multiplications after and before merging.
MOST_WORK: Final = 3


@dataclass(frozen=True, slots=True)
class DataWalk:
    """The walk of a product along one dimension of its data. It begins at ``start`` and has ``extent`` steps of ``step``, along
    dimension ``at`` of the weights (-1: fixed index). ``terms`` are the output axes that shift it."""

    terms: tuple[tuple[str, int], ...]
    start: int
    extent: int
    step: int
    at: int

    def index(self, tap: str) -> Expr:
        """Return the data index at ``tap``."""
        made: Expr = ex.integer(0)
        for axis, factor in self.terms:
            made = ex.make_add(made, ex.make_mul(axis, factor))
        return ex.make_add(ex.make_add(made, ex.make_mul(tap, self.step)) if self.at >= 0 else made, self.start)


@dataclass(frozen=True, slots=True)
class Windowed:
    """A product of data and constant weights whose sum walks through both with constant steps. ``places`` holds the axis, if any,
    and the first index along each dimension of the weights. ``first`` is True if the data are the first operand."""

    form: Sibling
    data: Load
    weights: Load
    sides: tuple[DataWalk, ...]
    places: tuple[tuple[str, int], ...]
    first: bool

    @property
    def likeness(self) -> object:
        """Key that is equal for products that one window can serve: everything but the length of each walk."""
        kept = tuple(axis if axis.startswith("i") else "" for axis, _ in self.places)
        return self.data.tensor, self.form.compute.dtype, tuple(s.terms for s in self.sides), kept, self.first


def match_windowed(form: Sibling, constants: Mapping[str, np.ndarray]) -> Windowed | None:
    """Return ``form`` as a windowed product, or None if it does not match."""
    c, body = form.compute, form.body
    if c.combiner != "sum" or not isinstance(body, Op) or body.fn != "mul" or body.args != form.loads:
        return None
    data, weights = form.loads
    first = data.tensor not in constants
    data, weights = (data, weights) if first else (weights, data)
    if weights.tensor not in constants or data.tensor in constants or weights.fill is not None or data.fill not in (None, 0.0):
        return None
    extents = {f"r{d}": a.extent for d, a in enumerate(c.reduce)}
    places = tuple(p for i in weights.indices if (p := _index_start(i)) is not None)
    along = {axis: d for d, (axis, _) in enumerate(places) if axis}
    named = sum(bool(axis) for axis, _ in places)
    if len(places) < len(weights.indices) or len(along) < named or not extents.keys() <= along.keys():
        return None
    sides = tuple(s for i in data.indices if (s := _match_data_walk(i, extents, along)) is not None)
    if len(sides) < len(data.indices) or sorted(s.at for s in sides if s.at >= 0) != sorted(along[r] for r in extents):
        return None
    return Windowed(form, data, weights, sides, places, first)


def _index_start(index: Expr) -> tuple[str, int] | None:
    """Return the axis, if any, that an index follows, and its start."""
    found = ex.affine_form(index)
    if found is None or len(found[0]) > 1 or any(f != 1 for f in found[0].values()) or found[1] < 0:
        return None
    return next(iter(found[0]), ""), found[1]


def _match_data_walk(index: Expr, extents: Mapping[str, int], places: Mapping[str, int]) -> DataWalk | None:
    found = ex.affine_form(index)
    if found is None:
        return None
    taps = [a for a in found[0] if a in extents]
    terms = tuple(sorted((a, f) for a, f in found[0].items() if a not in extents))
    if len(taps) > 1 or any(found[0][t] <= 0 for t in taps):
        return None
    tap = taps[0] if taps else ""
    return DataWalk(terms, found[1], extents.get(tap, 1), found[0].get(tap, 1), places.get(tap, -1))


@dataclass(frozen=True, slots=True)
class Padding:
    """Zero padding of weights to ``shape``; the part ``read`` of the old weights is stored from ``starts``."""

    tensor: str
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    read: tuple[tuple[int, int], ...]

    def of(self, constants: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the padded weights as a read-only array."""
        known = constants[self.tensor][tuple(slice(*r) for r in self.read)]
        made = np.zeros(self.shape, known.dtype)
        made[tuple(slice(s, s + n) for s, n in zip(self.starts, known.shape, strict=True))] = known
        made.flags.writeable = False
        return made


def widen_windows(
    found: Sequence[Windowed], constants: Mapping[str, np.ndarray], types: Mapping[str, TensorType]
) -> list[tuple[Sibling, Padding]] | None:
    """Return products of equal likeness with one common window, as siblings that read their old weights, and the padding of
    these. Returns None if no product would change, no window covers all, or the work exceeds ``MOST_WORK``."""
    sides = list[DataWalk]()
    for walked in zip(*(w.sides for w in found), strict=True):
        side = _union_walk(walked)
        if side is None:
            return None
        sides.append(side)
    shapes = [[n for (a, _), n in zip(w.places, constants[w.weights.tensor].shape, strict=True) if a[:1] != "i"] for w in found]
    same = all((w.sides, w.places, s) == (tuple(sides), found[0].places, shapes[0]) for w, s in zip(found, shapes, strict=True))
    if same or not _has_free_dims(found, sides):
        return None
    made = [_pad_to_window(w, sides, constants, types) for w in found]
    work = sum(f.compute.points for f, _ in made)
    return made if work <= MOST_WORK * sum(w.form.compute.points for w in found) else None


def _union_walk(sides: Sequence[DataWalk]) -> DataWalk | None:
    """Return the shortest walk that covers all ``sides``."""
    places = {s.at for s in sides if s.at >= 0}
    steps = {s.step for s in sides if s.at >= 0 and s.extent > 1}
    if len({(s.start, s.extent) for s in sides}) == 1 and len({s.at for s in sides}) == 1 and len(steps) <= 1:
        return sides[0]
    if len(places) != 1 or len(steps) != 1:
        return None
    (step,), start = steps, min(s.start for s in sides)
    if any((s.start - start) % step for s in sides):
        return None
    last = max((s.start - start) // step + s.extent for s in sides)
    return DataWalk(sides[0].terms, start, last, step, places.pop())


def _has_free_dims(found: Sequence[Windowed], sides: Sequence[DataWalk]) -> bool:
    """Return True if every product has a distinct dimension of its weights for each side."""
    places = [s.at for s in sides if s.at >= 0]
    if len(set(places)) < len(places):
        return False
    for w in found:
        for own, side in zip(w.sides, sides, strict=True):
            if own.at != side.at and (own.at >= 0 or w.places[side.at][0]):
                return False
    return True


def _pad_to_window(
    w: Windowed, sides: Sequence[DataWalk], constants: Mapping[str, np.ndarray], types: Mapping[str, TensorType]
) -> tuple[Sibling, Padding]:
    """Return ``w`` with the window ``sides``, and the padding of its weights."""
    c = w.form.compute
    walked = sorted((s for s in sides if s.at >= 0), key=lambda s: s.at)
    taps = {s.at: f"r{d}" for d, s in enumerate(walked)}
    known = constants[w.weights.tensor].shape
    read, shape, starts = list[tuple[int, int]](), list[int](), [0] * len(known)
    for (axis, begin), n in zip(w.places, known, strict=True):
        read.append((0, n) if axis.startswith("i") else (begin, begin + 1))
        shape.append(n if axis.startswith("i") else 1)
    for own, side in zip(w.sides, sides, strict=True):
        if side.at >= 0:
            begin = w.places[side.at][1]
            read[side.at] = begin, begin + own.extent
            shape[side.at], starts[side.at] = side.extent, (own.start - side.start) // side.step
    indices = [Ref(taps[d]) if d in taps else Ref(axis) if axis else ex.integer(0) for d, (axis, _) in enumerate(w.places)]
    weights = Load(w.weights.tensor, tuple(indices))
    place = tuple(s.index(taps.get(s.at, "")) for s in sides)
    box = {f"i{d}": (0, a.extent - 1) for d, a in enumerate(c.axes)} | {taps[s.at]: (0, s.extent - 1) for s in walked}
    spans = [ex.interval(i, box) for i in place]
    inside = all(s is not None and s[0] >= 0 and s[1] < n for s, n in zip(spans, types[w.data.tensor].shape, strict=True))
    data = Load(w.data.tensor, place, None if inside and w.data.fill is None else 0.0)
    loads = (data, weights) if w.first else (weights, data)
    taken = {a.name for a in c.axes}
    names = [next(n for n in (f"tap{d}", f"tap{d}_") if n not in taken) for d in range(len(walked))]
    reduce = tuple(Axis(n, s.extent) for n, s in zip(names, walked, strict=True))
    axes: dict[str, Expr] = {f"i{d}": Ref(a.name) for d, a in enumerate(c.axes)}
    axes |= {f"r{d}": Ref(n) for d, n in enumerate(names)}
    body = Op("mul", loads)
    made = replace(c, body=ex.substitute(body, axes), reduce=reduce, used=None)
    return Sibling(made, body, loads, loads), Padding(w.weights.tensor, tuple(shape), tuple(starts), tuple(read))

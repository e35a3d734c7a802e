"""Data movement: views, slices, concatenations, padding, and operators that make constants from shapes."""

from __future__ import annotations

import numpy as np

from rammer_testing.operators.draw import MOST, NUMBERS, Draw, DrawnValue, Reject
from rammer_testing.operators.elementwise import code
from rammer_testing.operators.registry import describe


def anything(d: Draw, op: str, rank: tuple[int, int] = (0, 5)) -> DrawnValue:
    """Return a value of any type that the operator accepts."""
    return d.pick(d.types(op), rank, special=0.3)


def axis_of(d: Draw, rank: int) -> int:
    """Return an axis, counted from either end."""
    if not rank:
        raise Reject("no axes")
    return d.integer(-rank, rank - 1)


def some_axes(d: Draw, rank: int, least: int = 0) -> list[int]:
    """Return distinct axes in any order, counted from either end."""
    count = d.integer(min(least, rank), rank)
    return [int(a) - (rank if d.chance(0.3) else 0) for a in d.rng.permutation(rank)[:count]]


def factors(d: Draw, size: int, most: int = 4) -> list[int]:
    """Return a random shape of ``size`` elements."""
    shape = []
    for _ in range(d.integer(0, most - 1)):
        divisors = [n for n in range(1, size + 1) if size % n == 0] if 0 < size <= MOST else [1]
        shape.append(d.one(divisors))
        size //= max(shape[-1], 1)
    shape.insert(d.integer(0, len(shape)), size)
    return shape


@describe("Reshape", weight=2)
def reshape(d: Draw, op: str) -> DrawnValue:
    x = anything(d, op)
    if x.size == 0:
        shape = [n if n else 0 for n in x.shape] or [0]
        d.rng.shuffle(shape)
        if d.takes(op, "allowzero") and d.chance(0.7):
            return d.add(op, [x.name, d.static(shape)], allowzero=1)
        return d.add(op, [x.name, d.static([0 if n == m else m for n, m in zip(x.shape, x.shape, strict=True)])])
    shape = factors(d, x.size)
    if x.size == 1 and d.chance(0.3):
        shape = []
    if shape and d.chance(0.4):
        shape[d.integer(0, len(shape) - 1)] = -1
    for i, n in enumerate(x.shape[: len(shape)]):
        if shape[i] == n and d.chance(0.3):
            shape[i] = 0
    return d.add(op, [x.name, d.static(shape)])


@describe("Flatten")
def flatten(d: Draw, op: str) -> DrawnValue:
    x = anything(d, op, (1, 5) if d.since(op) < 11 else (0, 5))
    low = 0 if d.since(op) < 11 else -x.rank
    return d.add(op, [x.name], axis=d.integer(low, x.rank) if d.chance(0.8) else None)


@describe("Transpose", weight=2.5)
def transpose(d: Draw, op: str) -> DrawnValue:
    x = anything(d, op)
    return d.add(op, [x.name], perm=d.rng.permutation(x.rank).tolist() if x.rank and d.chance(0.85) else None)


@describe("Squeeze")
def squeeze(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), (1, 5), where=lambda v: 1 in v.shape, special=0.2)
    ones = [i for i, n in enumerate(x.shape) if n == 1]
    chosen = [i for i in ones if d.chance(0.7)] or ones[:1]
    axes = [i - (x.rank if d.since(op) >= 11 and d.chance(0.3) else 0) for i in chosen]
    if d.chance(0.2):
        return d.add(op, [x.name])
    return d.add(op, [x.name], axes=axes) if d.since(op) < 13 else d.add(op, [x.name, d.static(axes)])


@describe("Unsqueeze", weight=1.5)
def unsqueeze(d: Draw, op: str) -> DrawnValue:
    x = anything(d, op, (0, 4))
    rank = x.rank + d.integer(1, min(2, 5 - x.rank))
    axes = sorted(d.rng.permutation(rank)[: rank - x.rank].tolist())
    if d.since(op) >= 11:
        axes = [a - (rank if d.chance(0.3) else 0) for a in axes]
    return d.add(op, [x.name], axes=axes) if d.since(op) < 13 else d.add(op, [x.name, d.static(axes)])


@describe("Expand")
def expand(d: Draw, op: str) -> DrawnValue:
    x = anything(d, op, (0, 4))
    shape = [n if n != 1 or d.chance(0.4) else d.extent() for n in x.shape]
    shape = [1 if n == m and d.chance(0.2) else n for n, m in zip(shape, x.shape, strict=True)]
    if d.chance(0.3):
        shape = [d.integer(1, 3), *shape]
    return d.add(op, [x.name, d.static(shape)])


@describe("Tile")
def tile(d: Draw, op: str) -> DrawnValue:
    x = anything(d, op, (1, 4))
    return d.add(op, [x.name, d.static([0 if d.chance(d.empty) else d.integer(1, 3) for _ in x.shape])])


@describe("Concat", weight=3)
def concat(d: Draw, op: str) -> DrawnValue:
    x = anything(d, op, (1, 5))
    axis = axis_of(d, x.rank) if d.since(op) >= 11 else d.integer(0, x.rank - 1)
    at = axis % x.rank

    def alike(v: DrawnValue) -> bool:
        if v.dtype != x.dtype or v.rank != x.rank:
            return False
        return all(i == at or n == m for i, (n, m) in enumerate(zip(v.shape, x.shape, strict=True)))

    parts = [x]
    for _ in range(d.integer(0, 4)):
        others = [v for v in d.values if alike(v)]
        if others and d.chance(0.1 if d.alone else 0.7):
            parts.append(d.one(others[-8:]))
        else:
            shape = tuple(d.extent() if i == at else n for i, n in enumerate(x.shape))
            parts.append(d.fresh(x.dtype, shape, special=0.2))
    d.rng.shuffle(parts)
    return d.add(op, [p.name for p in parts], axis=axis)


@describe("Split", weight=2)
def split(d: Draw, op: str) -> DrawnValue:
    x = anything(d, op, (1, 5))
    axis = axis_of(d, x.rank) if d.since(op) >= 11 else d.integer(0, x.rank - 1)
    extent, parts = x.shape[axis], d.integer(1, 4)
    axis_given = None if axis in (0, -x.rank) and d.chance(0.5) else axis
    if d.chance(0.6) or extent < parts:
        cuts = sorted(d.integer(0, extent) for _ in range(parts - 1))
        sizes = np.diff([0, *cuts, extent]).tolist()
        if 0 in sizes and extent >= parts and not d.chance(0.3 if d.alone else d.empty):
            raise Reject("a part without elements")
        if d.since(op) < 13:
            return d.add(op, [x.name], [True] * parts, axis=axis_given, split=sizes)
        return d.add(op, [x.name, d.static(sizes)], [True] * parts, axis=axis_given)
    if d.since(op) >= 18:
        return d.add(op, [x.name], [True] * parts, axis=axis_given, num_outputs=parts)
    if extent % parts:
        raise Reject("unequal parts")
    return d.add(op, [x.name], [True] * parts, axis=axis_given)


@describe("Slice", weight=2.5)
def slice_(d: Draw, op: str) -> DrawnValue:
    x = anything(d, op, (1, 5))
    axes = some_axes(d, x.rank, 1)
    starts, ends, steps = [], [], []
    far = d.alone and d.chance(0.5)
    for a in axes:
        n, step = x.shape[a], d.one([1, 1, 1, 2, 3, -1, -2])
        if d.since(op) < 10:
            step = 1
        if far:
            # A backward slice from before the first element starts at the first; NumPy and the reference return an empty slice.
            starts.append(d.integer(-8 if step > 0 else -n, 8))
            ends.append(d.one([2**63 - 1 if step > 0 else -(2**63), d.integer(-8, 8)]))
            steps.append(step)
            continue
        first, last = sorted((d.integer(0, max(n - 1, 0)), d.integer(0, max(n - 1, 0))))
        if d.chance(d.empty) and d.since(op) >= 10:
            last = first - 1
        if step > 0:
            starts.append(first - (n if d.chance(0.3) else 0))
            ends.append(d.one([last + 1, 2**31 - 1 if last == n - 1 else last + 1, last + 1 - n if last + 1 < n else n + 5]))
        else:
            starts.append(d.one([last, last - n]))
            ends.append(d.one([first - 1 - n if first else -n - 1, -(2**31) if first == 0 else first - 1 - n]))
        steps.append(step)
    if d.since(op) < 10:
        return d.add(op, [x.name], starts=starts, ends=ends, axes=[a % x.rank for a in axes])
    kind = d.one(["int64", "int64", "int32"])
    ends = [min(max(e, int(np.iinfo(kind).min)), int(np.iinfo(kind).max)) for e in ends]
    step_name = d.static(steps, kind) if any(s != 1 for s in steps) or d.chance(0.4) else ""
    whole = [a % x.rank for a in axes] == list(range(x.rank)) and d.chance(0.5)
    names = [d.static(starts, kind), d.static(ends, kind), "" if whole else d.static(axes, kind), step_name]
    return d.add(op, [x.name, *names])


@describe("Pad", weight=1.5)
def pad(d: Draw, op: str) -> DrawnValue:
    x = anything(d, op, (1, 4))
    modes = ["constant", "constant", "edge", "reflect"] + (["wrap"] if d.since(op) >= 19 else [])
    mode = d.one(modes)
    axes = some_axes(d, x.rank, 1) if d.since(op) >= 18 and d.chance(0.4) else list(range(x.rank))

    def amount(n: int) -> int:
        if mode == "constant":
            return d.integer(0, 3) if d.chance(0.85) else -d.integer(0, min(n // 3, 2))
        if d.alone and mode == "edge" and n > 1 and d.chance(0.2):
            return d.one([0, -1])
        return d.integer(0, max(min(n - 1, 3), 0)) if n else 0

    pads = [amount(x.shape[a]) for _ in range(2) for a in axes]
    spelled = None if mode == "constant" and d.chance(0.5) else mode
    value = d.one([0, 1, 2]) if x.dtype != "bool" else 0
    if d.since(op) < 11:
        return d.add(op, [x.name], mode=spelled, pads=pads, value=d.one([None, 0.0, 1.5]))
    filler = d.fresh(x.dtype, (), value, value).name if mode == "constant" and d.chance(0.6) else ""
    given = d.static(axes, "int64") if len(axes) < x.rank or (d.since(op) >= 18 and d.chance(0.2)) else ""
    return d.add(op, [x.name, d.static(pads), filler, given], mode=spelled)


@describe("Trilu")
def trilu(d: Draw, op: str) -> DrawnValue:
    x = anything(d, op, (2, 4))
    shift = d.plain(np.asarray(d.integer(-7, 7), np.int64)) if d.chance(0.5) else ""
    return d.add(op, [x.name, shift], upper=d.one([None, 0, 1]))


@describe("EyeLike")
def eye_like(d: Draw, op: str) -> DrawnValue:
    x = anything(d, op, (2, 2))
    kind = code(d.dtype(("float32", "float64", "int32", "int64", "float16", "uint8"))) if d.chance(0.6) else None
    return d.add(op, [x.name], k=d.one([None, 0, 1, -1, 2]), dtype=kind)


@describe("Range", weight=0.3)
def range_(d: Draw, op: str) -> DrawnValue:
    kind = d.dtype(d.types(op))
    step: float = d.one([1, 2, -1, 3, -3])
    start, count = d.integer(-5, 5), d.extent()
    end = start + step * count
    if d.alone:
        step, end = d.one([step, 0.3 if kind[0] == "f" else step]), d.integer(-9, 9)
    return d.add(op, [d.plain(np.asarray(v, kind)) for v in (start, end, step)])


@describe("ConstantOfShape", weight=0.3)
def constant_of_shape(d: Draw, op: str) -> DrawnValue:
    value = None if d.chance(0.3) else np.asarray([d.integer(0, 3)], d.one([*NUMBERS, "bool"]))
    return d.add(op, [d.static(d.shape(0, 4))], value=value)


@describe("Shape", "Size", weight=0.3)
def shape_of(d: Draw, op: str) -> DrawnValue:
    x = anything(d, op)
    if op == "Shape" and d.since(op) >= 15 and d.chance(0.5):
        return d.add(op, [x.name], start=d.integer(-x.rank - 1, x.rank), end=d.one([None, d.integer(-x.rank, x.rank + 1)]))
    return d.add(op, [x.name])

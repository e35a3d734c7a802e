"""Matrix products and Einsum."""

from __future__ import annotations

from collections.abc import Sequence

from rammer_testing.operators.draw import Draw, DrawnValue
from rammer_testing.operators.elementwise import small
from rammer_testing.operators.registry import describe


def operand(d: Draw, dtype: str, shape: Sequence[int], share: float = 0.5) -> DrawnValue:
    """Return a value of exactly this type, from the graph or fresh (more often a constant, like weights)."""
    found = [v for v in d.values if v.dtype == dtype and v.shape == tuple(shape) and small(v)]
    if found and d.chance(share) and not d.alone:
        return d.one(found[-6:])
    return d.fresh(dtype, shape, -1.5, 1.5, constant=d.chance(0.6))


@describe("MatMul", weight=2.5)
def matmul(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), (1, 4), where=small)
    depth, columns = x.shape[-1], d.extent()
    roll = d.rng.random()
    shape: tuple[int, ...] = (depth,) if roll < 0.15 else (depth, columns)
    if roll > 0.6 and x.rank > 2:
        shape = (*(1 if d.chance(0.3) else n for n in x.shape[:-2]), depth, columns)
    y = operand(d, x.dtype, shape)
    if d.chance(0.15) and x.rank >= 2:
        left = operand(d, x.dtype, (x.shape[-2],) if d.chance(0.4) else (columns, x.shape[-2]))
        return d.add(op, [left.name, x.name])
    return d.add(op, [x.name, y.name])


@describe("Gemm", weight=2)
def gemm(d: Draw, op: str) -> DrawnValue:
    a = d.pick(d.types(op), (2, 2), where=small)
    ta, tb, n = d.one([None, 0, 1]), d.one([None, 0, 1]), d.extent()
    m, k = (a.shape[1], a.shape[0]) if ta else a.shape
    b = operand(d, a.dtype, (n, k) if tb else (k, n))
    names = [a.name, b.name]
    if d.since(op) < 11 or d.chance(0.6):
        shape = d.one([(m, n), (1, n), (n,), (m, 1), (1, 1), (), (1,)])
        names.append(operand(d, a.dtype, shape).name)
    scales = {
        k: d.one([0.5, 1.0, 2.0, 0.0, 3.0] if "float" in a.dtype else [0.0, 1.0, 2.0]) for k in ("alpha", "beta") if d.chance(0.4)
    }
    return d.add(op, names, transA=ta, transB=tb, **scales)


@describe("Einsum", weight=1.5)
def einsum(d: Draw, op: str) -> DrawnValue:
    x = d.pick(d.types(op), (0, 4), where=small)
    letters = "abcdefgh"[: x.rank]
    if x.rank >= 2 and len(set(x.shape)) < x.rank and d.chance(0.15):
        letters = _diagonal(d, letters, x.shape)
    sizes = dict(zip(letters, x.shape, strict=True))
    terms, names = [letters], [x.name]
    for _ in range(d.one([0, 1, 1, 1, 2])):
        shared = [c for c in sorted(sizes) if d.chance(0.5)][:3]
        new = [c for c in "mnpq" if c not in sizes and d.chance(0.25)][:1]
        sizes |= {c: d.extent() for c in new}
        term = [*shared, *new]
        d.rng.shuffle(term)
        terms.append("".join(term))
        names.append(operand(d, x.dtype, [sizes[c] for c in term]).name)
    if d.alone and d.chance(0.2):  # the axes of an ellipsis: one more in front
        names = [d.fresh(x.dtype, (2, *d.value(n).shape)).name for n in names]
        result = "".join(c for c in sorted(sizes) if d.chance(0.5))
        return d.add(op, names, equation=f"{','.join(f'...{term}' for term in terms)}->...{result}")
    inputs = ",".join(terms)
    if d.chance(0.15):
        return d.add(op, names, equation=inputs)
    kept = [c for c in sorted(sizes) if d.chance(0.55)][:4]
    d.rng.shuffle(kept)
    spaced = d.chance(0.2)
    return d.add(op, names, equation=f"{inputs}{' -> ' if spaced else '->'}{''.join(kept)}")


def _diagonal(d: Draw, letters: str, shape: Sequence[int]) -> str:
    """Return a subscript that repeats one letter for two axes of equal extent."""
    pairs = [(i, j) for i in range(len(shape)) for j in range(i + 1, len(shape)) if shape[i] == shape[j]]
    i, j = d.one(pairs)
    return letters[:j] + letters[i] + letters[j + 1 :]

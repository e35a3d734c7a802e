"""Siblings: Computes that differ only in their constants or in slices of one tensor, merged into one Compute.

All siblings read the same non-constant tensor. They are thus independent of each other, and the merged Compute adds no
dependence. In the *stacked* layout, siblings of equal shapes are stacked along a new axis. In the *joined* layout, they are
joined along an axis that only weights use: a matrix product's columns, a convolution's channels. Joined extents may differ. In
both layouts a sibling's result is a slice, and constants are joined at compile time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.expr import Expr, Load, Ref
from rammer.ir.types import TensorType

#: The axis of stacked siblings, while axes are named by position.
SIDE: Final = "side"

#: A callback that joins constants into one: names, dimension, and True for a new dimension.
Joiner: TypeAlias = Callable[[tuple[str, ...], int, bool], str]


@dataclass(frozen=True, slots=True)
class Sibling:
    """A Compute with axes named by position: its body, and its loads in order. ``loads`` are the loads as written, ``roots``
    those through views."""

    compute: Compute
    body: Expr
    loads: tuple[Load, ...]
    roots: tuple[Load, ...]

    @property
    def pattern(self) -> str:
        """The body without its loads."""
        return str(replace_loads(self.body, [Load("t", ())] * len(self.loads)))

    def column(self, constants: Mapping[str, np.ndarray]) -> int | None:
        """Return the first output axis that only constants use, each over the whole dimension: the weights' columns."""
        data = set[str]().union(*(ex.axes_of(r) for r in self.roots if r.tensor not in constants))
        for d, axis in enumerate(self.compute.axes):
            name = f"i{d}"
            weights = [r for r in self.roots if r.tensor in constants and name in ex.axes_of(r)]
            if name not in data and weights and all(_is_whole_axis(r, name, axis.extent, constants) for r in weights):
                return d
        return None


def form_of(compute: Compute, through: Callable[[Load], Load]) -> Sibling | None:
    """Return the form of ``compute``, or None if an index is itself loaded; ``through`` resolves views in a load."""
    names: dict[str, Expr] = {a.name: Ref(f"i{d}") for d, a in enumerate(compute.axes)}
    names |= {a.name: Ref(f"r{d}") for d, a in enumerate(compute.reduce)}
    body = ex.substitute(compute.body, names)
    loads = tuple(ex.loads(body))
    if any(ex.has_loads(i) for ld in loads for i in ld.indices):
        return None
    return Sibling(compute, body, loads, tuple(map(through, loads)))


def looked_through(load: Load, producers: Mapping[str, Compute]) -> Load:
    """Return the source of ``load`` through Computes that only rearrange, as far as indices stay affine."""
    while load.fill is None and (view := producers.get(load.tensor)) is not None and is_rearrangement(view):
        inner = view.body
        assert isinstance(inner, Load)
        places = dict(zip((a.name for a in view.axes), load.indices, strict=True))
        composed = [ex.substitute(i, places) for i in inner.indices]
        affine = [normalise_index(i) for i in composed]
        if any(i is None for i in affine):
            break
        load = Load(inner.tensor, tuple(i for i in affine if i is not None))
    return load


def is_rearrangement(compute: Compute) -> bool:
    """Return True if ``compute`` only rearranges one tensor."""
    return compute.combiner is None and isinstance(compute.body, Load) and compute.body.fill is None


def normalise_index(index: Expr) -> Expr | None:
    """Return an affine index with its terms in sorted order; None for other indices."""
    found = ex.affine_form(index)
    if found is None:
        return None
    made: Expr = ex.integer(0)
    for axis, factor in sorted(found[0].items()):
        made = ex.make_add(made, ex.make_mul(axis, factor))
    return ex.make_add(made, found[1]) if found[0] else ex.integer(found[1])


def _is_whole_axis(load: Load, axis: str, extent: int, constants: Mapping[str, np.ndarray]) -> bool:
    """Return True if ``axis`` is one index of ``load``, over the whole dimension, and occurs in no other index."""
    at = [d for d, i in enumerate(load.indices) if axis in ex.axes_of(i)]
    return len(at) == 1 and load.indices[at[0]] == Ref(axis) and constants[load.tensor].shape[at[0]] == extent


def replace_loads(body: Expr, loads: Sequence[Load]) -> Expr:
    """Return ``body`` with its loads replaced by ``loads`` in order."""
    rest = iter(loads)
    return ex.transform(body, lambda e: next(rest) if isinstance(e, Load) else None)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """The layout of siblings at output axis ``at``: stacked (a new axis) or joined; sibling i starts at ``starts[i]``."""

    at: int
    stacked: bool
    starts: tuple[int, ...]
    extent: int

    def slice(self, own: Sequence[Expr], number: int) -> tuple[Expr, ...]:
        """Return the indices in the merged Compute of sibling ``number``'s element ``own``."""
        if self.stacked:
            return (*own[: self.at], ex.integer(number), *own[self.at :])
        return (*own[: self.at], ex.make_add(own[self.at], self.starts[number]), *own[self.at + 1 :])

    def whole(self, own: Sequence[Expr]) -> tuple[Expr, ...]:
        """Return the merged indices of the element that each sibling reads at its indices ``own``."""
        return (*own[: self.at], Ref(SIDE), *own[self.at :]) if self.stacked else tuple(own)


def stack_siblings(at: int, count: int) -> SideBySide:
    """Return the layout of ``count`` siblings along a new axis ``at``."""
    return SideBySide(at, True, tuple(range(count)), count)


def join_siblings(at: int, extents: Sequence[int]) -> SideBySide:
    """Return the layout of siblings of these ``extents``, consecutive along axis ``at``."""
    starts = tuple(int(s) for s in np.cumsum([0, *extents]))
    return SideBySide(at, False, starts[:-1], starts[-1])


@dataclass(frozen=True, slots=True)
class Merged:
    """A Compute merged from ``members``, and their layout in it."""

    name: str
    members: tuple[str, ...]
    layout: SideBySide


@dataclass(frozen=True, slots=True)
class Union:
    """A builder that merges siblings into one Compute. It has the constants and types of tensors, and the slices of Computes that
    were merged before."""

    constants: Mapping[str, np.ndarray]
    types: Mapping[str, TensorType]
    join: Joiner
    slices: Mapping[str, tuple[Merged, int]]

    def of(self, forms: Sequence[Sibling], layout: SideBySide, name: str, column: str | None) -> Compute | None:
        """Return ``forms`` as one Compute of this ``layout``, or None if their operands cannot be merged. ``column`` is the axis
        (by position) at which constants are stacked."""
        read = list[Load]()
        for number in range(len(forms[0].loads)):
            found = self._load([f.loads[number] for f in forms], [f.roots[number] for f in forms], layout, column)
            if found is None:
                return None
            read.append(found)
        first = forms[0].compute
        axes = [(f"i{d}", a) for d, a in enumerate(first.axes)]
        if layout.stacked:
            taken = {a.name for a in (*first.axes, *first.reduce)}
            side = next(n for n in (SIDE, *(f"{SIDE}{i}" for i in range(99))) if n not in taken)
            axes.insert(layout.at, (SIDE, Axis(side, layout.extent)))
        else:
            axes[layout.at] = (axes[layout.at][0], Axis(first.axes[layout.at].name, layout.extent))
        names: dict[str, Expr] = {known: Ref(a.name) for known, a in axes}
        names |= {f"r{d}": Ref(a.name) for d, a in enumerate(first.reduce)}
        body = ex.substitute(replace_loads(forms[0].body, read), names)
        origin = " + ".join(dict.fromkeys(f.compute.origin for f in forms[:MOST_ORIGINS]))
        origin += f" and {len(forms) - MOST_ORIGINS} more" if len(forms) > MOST_ORIGINS else ""
        return Compute(name, first.dtype, tuple(a for _, a in axes), body, first.reduce, first.combiner, origin)

    def _load(self, loads: list[Load], roots: list[Load], layout: SideBySide, column: str | None) -> Load | None:
        own = f"i{layout.at}"
        if all(ld == loads[0] for ld in loads) and (layout.stacked or own not in ex.axes_of(loads[0])):
            return loads[0]
        if all(r == roots[0] for r in roots) and (layout.stacked or own not in ex.axes_of(roots[0])):
            return roots[0]
        if all(r.tensor in self.constants for r in roots):
            return self._merge_constants(roots, layout, column)
        whole = self._merge_slices(loads, layout)
        return whole or (_merge_strided_slices(roots) if layout.stacked else _joined_run(roots, layout))

    def _merge_slices(self, loads: list[Load], layout: SideBySide) -> Load | None:
        """Return a load of the siblings' slices of one Compute with the same layout, or None."""
        found = [self.slices.get(ld.tensor) for ld in loads]
        first = found[0]
        if (
            first is None
            or first[0].layout != layout
            or any(ld.indices != loads[0].indices or ld.fill is not None for ld in loads)
        ):
            return None
        if any(f is None or f[0] is not first[0] or f[1] != i for i, f in enumerate(found)):
            return None
        own = loads[0].indices
        if not layout.stacked and (own[layout.at] != Ref(f"i{layout.at}") or _is_used_elsewhere(own, layout.at)):
            return None
        return Load(first[0].name, layout.whole(own))

    def _merge_constants(self, loads: list[Load], layout: SideBySide, column: str | None) -> Load | None:
        """Return a load of the siblings' joined constants, or None if they do not fit."""
        first, names = loads[0], tuple(ld.tensor for ld in loads)
        kinds = [self.types[n] for n in names]
        if any(ld.indices != first.indices or ld.fill != first.fill for ld in loads) or len({k.dtype for k in kinds}) > 1:
            return None
        if layout.stacked:
            if any(k != kinds[0] for k in kinds):
                return None
            at = next((d for d, i in enumerate(first.indices) if column is not None and i == Ref(column)), 0)
            return Load(self.join(names, at, True), (*first.indices[:at], Ref(SIDE), *first.indices[at:]), first.fill)
        return self._joined_constant(loads, layout, kinds)

    def _joined_constant(self, loads: list[Load], layout: SideBySide, kinds: list[TensorType]) -> Load | None:
        first, own = loads[0], f"i{layout.at}"
        at = [d for d, i in enumerate(first.indices) if own in ex.axes_of(i)]
        stops = (*layout.starts[1:], layout.extent)
        if len(at) != 1 or first.indices[at[0]] != Ref(own):
            return None
        (d,) = at
        rest = {(*k.shape[:d], *k.shape[d + 1 :]) for k in kinds}
        if len(rest) > 1 or any(k.shape[d] != stop - start for k, start, stop in zip(kinds, layout.starts, stops, strict=True)):
            return None
        return Load(self.join(tuple(ld.tensor for ld in loads), d, False), first.indices, first.fill)


#: Maximum number of origins named in the origin of a merged Compute.
MOST_ORIGINS: Final = 4


def _is_used_elsewhere(indices: Sequence[Expr], at: int) -> bool:
    """Return True if the axis at position ``at`` occurs in an index at another position."""
    return any(f"i{at}" in ex.axes_of(i) for d, i in enumerate(indices) if d != at)


def constant_offsets(load: Load) -> tuple[int, ...] | None:
    """Return the constant parts of ``load``'s indices; None if an index is not affine."""
    found = [ex.affine_form(i) for i in load.indices]
    return None if any(f is None for f in found) else tuple(f[1] for f in found if f is not None)


def strip_offsets(load: Load) -> tuple[object, ...] | None:
    """Return ``load`` without the constant parts of its indices: equal for slices of one tensor. Returns None for padded loads
    and indices that are not affine."""
    found = [ex.affine_form(i) for i in load.indices]
    if load.fill is not None or any(f is None for f in found):
        return None
    return (load.tensor, *(tuple(sorted(f[0].items())) for f in found if f is not None))


def _merge_strided_slices(roots: list[Load]) -> Load | None:
    """Return a load of slices of one tensor at equal distances, or None."""
    spots = [constant_offsets(r) for r in roots]
    kind = strip_offsets(roots[0])
    known = [s for s in spots if s is not None]
    if kind is None or len(known) < len(spots) or any(strip_offsets(r) != kind for r in roots):
        return None
    first = known[0]
    steps = [b - a for a, b in zip(first, known[1], strict=True)]
    if any(s != tuple(f + n * step for f, step in zip(first, steps, strict=True)) for n, s in enumerate(known)):
        return None
    moved = [
        normalise_index(ex.make_add(i, ex.make_mul(SIDE, step))) if step else i
        for i, step in zip(roots[0].indices, steps, strict=True)
    ]
    return Load(roots[0].tensor, tuple(m for m in moved if m is not None))


def _joined_run(roots: list[Load], layout: SideBySide) -> Load | None:
    """Return a load of consecutive slices of one tensor, each as long as its sibling, or None."""
    own, kind = f"i{layout.at}", strip_offsets(roots[0])
    spots = [constant_offsets(r) for r in roots]
    known = [s for s in spots if s is not None]
    if kind is None or len(known) < len(spots) or any(strip_offsets(r) != kind for r in roots):
        return None
    at = [d for d, i in enumerate(roots[0].indices) if own in ex.axes_of(i)]
    if len(at) != 1 or (form := ex.affine_form(roots[0].indices[at[0]])) is None or form[0] != {own: 1}:
        return None
    wanted = [tuple(p + (start if d == at[0] else 0) for d, p in enumerate(known[0])) for start in layout.starts]
    return roots[0] if known == wanted else None

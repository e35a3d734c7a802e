"""Siblings: Computes that differ in their constants, or in which slices of one tensor they read, as one Compute.

Everything that they read besides constants is one tensor for all of them, so that none can depend on another, and what
they become depends on no more than each of them did. Two ways to lie side by side: *stacked* along an axis of its own
(equal shapes), or *joined* along an axis that only weights run through (a matrix product's columns, a convolution's
channels), whose extents may differ. Either way a sibling's own result is a slice, and constants are put together when
the model is compiled.
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

#: The axis along which siblings are stacked, while axes are known by their positions.
SIDE: Final = "side"

#: Makes one constant of several, given how: along which dimension, and whether that is a new one.
Joiner: TypeAlias = Callable[[tuple[str, ...], int, bool], str]


@dataclass(frozen=True, slots=True)
class Sibling:
    """A Compute with axes known by position: its body's pattern, and what the body reads in order, as written (``loads``) and
    through views (``roots``)."""

    compute: Compute
    body: Expr
    loads: tuple[Load, ...]
    roots: tuple[Load, ...]

    @property
    def pattern(self) -> str:
        """The body, without what it reads."""
        return str(replace_loads(self.body, [Load("t", ())] * len(self.loads)))

    def column(self, constants: Mapping[str, np.ndarray]) -> int | None:
        """The first output axis that runs through constants alone, and through each whole: the weights' columns."""
        data = set[str]().union(*(ex.axes_of(r) for r in self.roots if r.tensor not in constants))
        for d, axis in enumerate(self.compute.axes):
            name = f"i{d}"
            weights = [r for r in self.roots if r.tensor in constants and name in ex.axes_of(r)]
            if name not in data and weights and all(_is_whole_axis(r, name, axis.extent, constants) for r in weights):
                return d
        return None


def form_of(compute: Compute, through: Callable[[Load], Load]) -> Sibling | None:
    """The form of ``compute``, ``through`` being what a load reads in the end; None where an index is itself loaded."""
    names: dict[str, Expr] = {a.name: Ref(f"i{d}") for d, a in enumerate(compute.axes)}
    names |= {a.name: Ref(f"r{d}") for d, a in enumerate(compute.reduce)}
    body = ex.substitute(compute.body, names)
    loads = tuple(ex.loads(body))
    if any(ex.has_loads(i) for ld in loads for i in ld.indices):
        return None
    return Sibling(compute, body, loads, tuple(map(through, loads)))


def looked_through(load: Load, producers: Mapping[str, Compute]) -> Load:
    """What ``load`` reads in the end, looking through Computes that only rearrange, as far as indices stay affine."""
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
    """Whether ``compute`` only rearranges one tensor."""
    return compute.combiner is None and isinstance(compute.body, Load) and compute.body.fill is None


def normalise_index(index: Expr) -> Expr | None:
    """An affine index in one order of terms; None for others."""
    found = ex.affine_form(index)
    if found is None:
        return None
    made: Expr = ex.integer(0)
    for axis, factor in sorted(found[0].items()):
        made = ex.make_add(made, ex.make_mul(axis, factor))
    return ex.make_add(made, found[1]) if found[0] else ex.integer(found[1])


def _is_whole_axis(load: Load, axis: str, extent: int, constants: Mapping[str, np.ndarray]) -> bool:
    """Whether ``axis`` is one index of ``load``, of the whole dimension, and in no other."""
    at = [d for d, i in enumerate(load.indices) if axis in ex.axes_of(i)]
    return len(at) == 1 and load.indices[at[0]] == Ref(axis) and constants[load.tensor].shape[at[0]] == extent


def replace_loads(body: Expr, loads: Sequence[Load]) -> Expr:
    """``body`` with other loads, in order."""
    rest = iter(loads)
    return ex.transform(body, lambda e: next(rest) if isinstance(e, Load) else None)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """How siblings lie: at output axis ``at``, stacked (a new axis there) or joined, the i-th from ``starts[i]`` on."""

    at: int
    stacked: bool
    starts: tuple[int, ...]
    extent: int

    def slice(self, own: Sequence[Expr], number: int) -> tuple[Expr, ...]:
        """The indices of sibling ``number``'s element ``own`` in the whole."""
        if self.stacked:
            return (*own[: self.at], ex.integer(number), *own[self.at :])
        return (*own[: self.at], ex.make_add(own[self.at], self.starts[number]), *own[self.at + 1 :])

    def whole(self, own: Sequence[Expr]) -> tuple[Expr, ...]:
        """The indices in the whole of what all siblings read at ``own`` of their own."""
        return (*own[: self.at], Ref(SIDE), *own[self.at :]) if self.stacked else tuple(own)


def stack_siblings(at: int, count: int) -> SideBySide:
    """``count`` siblings along a new axis ``at``."""
    return SideBySide(at, True, tuple(range(count)), count)


def join_siblings(at: int, extents: Sequence[int]) -> SideBySide:
    """Siblings of these ``extents`` along axis ``at``, one behind the other."""
    starts = tuple(int(s) for s in np.cumsum([0, *extents]))
    return SideBySide(at, False, starts[:-1], starts[-1])


@dataclass(frozen=True, slots=True)
class Merged:
    """A Compute that was made of ``members``, and how they lie in it."""

    name: str
    members: tuple[str, ...]
    layout: SideBySide


@dataclass(frozen=True, slots=True)
class Union:
    """Makes one Compute of siblings: what it may know of tensors, and which are slices of something made before."""

    constants: Mapping[str, np.ndarray]
    types: Mapping[str, TensorType]
    join: Joiner
    slices: Mapping[str, tuple[Merged, int]]

    def of(self, forms: Sequence[Sibling], layout: SideBySide, name: str, column: str | None) -> Compute | None:
        """``forms`` as one Compute laid out as ``layout``, None where what they read cannot lie side by side. ``column`` is the
        axis (by position) that constants keep beside the new one."""
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
        """A load of what the siblings read as slices of one Compute that lies as they do."""
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
        """A load of their constants put together."""
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


#: Origins that the name of a Compute's own tells.
MOST_ORIGINS: Final = 4


def _is_used_elsewhere(indices: Sequence[Expr], at: int) -> bool:
    """Whether the axis at position ``at`` is in an index other than its own."""
    return any(f"i{at}" in ex.axes_of(i) for d, i in enumerate(indices) if d != at)


def constant_offsets(load: Load) -> tuple[int, ...] | None:
    """The constant parts of ``load``'s indices; None where one is not affine."""
    found = [ex.affine_form(i) for i in load.indices]
    return None if any(f is None for f in found) else tuple(f[1] for f in found if f is not None)


def strip_offsets(load: Load) -> tuple[object, ...] | None:
    """``load`` without the constant parts of its indices: equal for slices of one tensor. None where none can be left out."""
    found = [ex.affine_form(i) for i in load.indices]
    if load.fill is not None or any(f is None for f in found):
        return None
    return (load.tensor, *(tuple(sorted(f[0].items())) for f in found if f is not None))


def _merge_strided_slices(roots: list[Load]) -> Load | None:
    """A load of slices of one tensor that follow one another at equal distances."""
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
    """A load of slices of one tensor, each as long as its sibling, one behind the other."""
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

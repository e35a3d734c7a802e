"""Tensor parallelism: contractions partitioned over devices by output columns or by reduction, each with its weights.

A tensor is either replicated (every device has it, or recomputes it) or partitioned along one dimension. A product of large
weights writes a partitioned tensor, and elementwise expressions of partitioned tensors are partitioned. A reduction over the
partitioned dimension writes partial sums, which devices exchange and add. Any other reader gathers the parts first. So two dense
layers in sequence, or an attention by heads followed by a product, need one exchange.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from rammer.distributed.partition.cut_graph import Spot
from rammer.distributed.partition.manual import assign_stages
from rammer.distributed.partition.operator_cost import Costs
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Combiner, Compute, ComputeGraph
from rammer.ir.expr import Expr, Load, Op, Ref
from rammer.ir.names import Names, make_identifier
from rammer.ir.piecewise import concat_body
from rammer.ir.types import TensorType
from rammer.plan.load_addresses import index_values

__all__ = ["shared_out"]

#: Maximum number of points at which an index is evaluated; an index with more points is not split.
MOST_POINTS: Final = 1 << 20
#: Operations that combine partial results.
_JOINS: Final[Mapping[Combiner, str]] = {"sum": "add", "max": "max", "min": "min", "prod": "mul"}


def shared_out(graph: ComputeGraph, costs: Costs, devices: int, least: float) -> tuple[ComputeGraph, dict[str, Spot]] | None:
    """Return ``graph`` with products partitioned if that saves more than ``least`` seconds, and a spot for every Compute. Returns
    None if all products stay whole."""
    made = _Sharing(graph, costs, devices, least)
    for c in graph.computes:
        made.add(c)
    if not made.parts:
        return None
    whole = made.graph_of_shares()
    return whole, assign_stages(whole, made.device)


@dataclass(frozen=True)
class _Way:
    """The split of a Compute along an axis (``step`` elements for each device), and the slice sizes of its constants."""

    axis: Axis
    step: int
    constants: Mapping[str, tuple[int, ...]]


@dataclass
class _Sharing:
    """The new graph under construction. ``parts`` maps partitioned tensors to their partitioned dimension. ``names`` maps
    (tensor, device d) to the name of device d's copy or part."""

    graph: ComputeGraph
    costs: Costs
    devices: int
    least: float
    parts: dict[str, int] = field(default_factory=dict)
    names: dict[tuple[str, int], str] = field(default_factory=dict)
    device: dict[str, int] = field(default_factory=dict)
    computes: list[Compute] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    wholes: dict[tuple[str, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.taken = Names(self.graph.types)
        self.outputs, self.known = set(self.graph.outputs), self.graph.producers

    def add(self, c: Compute) -> None:
        """Add ``c`` on all devices: partitioned, as combined partial results, or replicated."""
        split = [n for n in c.reads if n in self.parts]
        if split or self._is_large(c):
            for dim, axis in enumerate(c.axes):
                way = self._find_split(c, axis)
                if way is not None and (split or way.constants):
                    self.parts[c.name] = dim
                    for d in range(self.devices):
                        self._add_copy(c, d, self._slice_compute(c, way, d))
                    return
            for axis in c.reduce if split and c.combiner in _JOINS else ():
                way = self._find_split(c, axis)
                if way is not None:
                    self._partial(c, way)
                    return
        for d in range(self.devices):
            names = {n: self._whole(n, d) for n in c.reads}
            self._add_copy(c, d, replace(c, body=ex.rename_tensors(c.body, names)))

    def graph_of_shares(self) -> ComputeGraph:
        """Return the computes that outputs need; outputs are whole on device 0."""
        ends = {self._whole(n, 0): n for n in self.graph.outputs}
        used, kept = set(ends), list[Compute]()
        for c in reversed(self.computes):
            if c.name in used:
                kept.append(c)
                used |= set(c.reads)
        known = {**self.graph.constants, **self.constants}
        constants = {n: v for n, v in known.items() if n in used}
        types = {n: t for n, t in self.graph.types.items() if n in self.graph.inputs}
        types |= {n: TensorType(str(v.dtype), v.shape) for n, v in constants.items()} | {c.name: c.type for c in kept}
        return replace(self.graph, computes=tuple(reversed(kept)), types=types, constants=constants)

    def _is_large(self, c: Compute) -> bool:
        """Return True if a partition of the weights saves enough time."""
        weights = any(n in self.graph.constants for n in c.reads)
        saved = self.costs.seconds.get(c.name, 0.0) * (1 - 1 / self.devices)
        return c.kind == "contraction" and weights and saved > self.least

    def _add_copy(self, c: Compute, device: int, made: Compute) -> None:
        """Add one device's copy or part of ``c``. Replicated copies on device 0 retain the tensor's name."""
        plain = device == 0 and c.name not in self.parts
        name = c.name if plain else make_identifier(f"{c.name}_on_{device}", self.taken)
        self.names[c.name, device] = name
        self._add_compute(replace(made, name=name), device)

    def _add_compute(self, c: Compute, device: int) -> None:
        self.device[c.name] = device
        self.computes.append(c)

    def _partial(self, c: Compute, way: _Way) -> None:
        """Add partial results, exchanged and combined on every device."""
        partial = list[str]()
        for d in range(self.devices):
            partial.append(make_identifier(f"{c.name}_of_{d}", self.taken))
            self._add_compute(replace(self._slice_compute(c, way, d), name=partial[-1]), d)
        at = tuple(Ref(a.name) for a in c.axes)
        assert c.combiner is not None
        body: Expr = Load(partial[0], at)
        for name in partial[1:]:
            body = Op(_JOINS[c.combiner], (body, Load(name, at)))
        for d in range(self.devices):
            self._add_copy(c, d, Compute(c.name, c.dtype, c.axes, body, origin=c.origin))

    def _whole(self, tensor: str, device: int) -> str:
        """Return the name of the whole ``tensor`` on a device, gathered there if it is partitioned."""
        if tensor not in self.parts:
            return self.names.get((tensor, device), tensor)
        if (tensor, device) not in self.wholes:
            one = self.known[tensor]
            dim = self.parts[tensor]
            pieces = [(self.names[tensor, d], one.shape[dim] // self.devices) for d in range(self.devices)]
            name = tensor if device == 0 else make_identifier(f"{tensor}_all_{device}", self.taken)
            self._add_compute(Compute(name, one.dtype, one.axes, concat_body(pieces, one.axes, dim), origin=one.origin), device)
            self.wholes[tensor, device] = name
        return self.wholes[tensor, device]

    def _find_split(self, c: Compute, axis: Axis) -> _Way | None:
        """Return the split of ``c`` along ``axis``, or None if it would read a partitioned tensor across parts."""
        step, rest = divmod(axis.extent, self.devices)
        if rest or not step:
            return None
        cut: dict[str, tuple[int, ...]] = {}
        for load in c.loads:
            shape = self.graph.types[load.tensor].shape
            if load.tensor in self.parts:
                dim = self.parts[load.tensor]
                wanted = tuple(shape[dim] // self.devices if d == dim else 0 for d in range(len(shape)))
                if self._device_shift(c, load, axis, step) != wanted:
                    return None
            elif load.tensor in self.graph.constants:
                moved = self._device_shift(c, load, axis, step)
                if moved is None or cut.setdefault(load.tensor, moved) != moved:
                    cut[load.tensor] = ()  # also read whole
        return _Way(axis, step, {n: m for n, m in cut.items() if any(m)})

    def _device_shift(self, c: Compute, load: Load, axis: Axis, step: int) -> tuple[int, ...] | None:
        """Return the offset in each dimension to the next device's elements, or None unless each device reads only its part."""
        extents = {a.name: a.extent for a in (*c.axes, *c.reduce)}
        result = list[int]()
        for index, extent in zip(load.indices, self.graph.types[load.tensor].shape, strict=True):
            span = {n: extents[n] for n in sorted(ex.axes_of(index))}
            if axis.name not in span:
                result.append(0)
                continue
            if math.prod(span.values()) > MOST_POINTS:
                return None
            grid = {n: np.arange(k).reshape([-1 if m == n else 1 for m in span]) for n, k in span.items()}
            values = index_values(index, grid)
            if values is None:
                return None
            shares = np.stack(np.split(np.broadcast_to(values, list(span.values())), self.devices, [*span].index(axis.name)))
            by = int(shares[1].flat[0] - shares[0].flat[0])
            relative = shares - by * np.arange(self.devices).reshape(-1, *[1] * (shares.ndim - 1))
            inside = not by or (by * self.devices == extent and relative.min() >= 0 and relative.max() < by)
            if not (relative == relative[:1]).all() or not inside:
                return None
            result.append(by)
        return tuple(result)

    def _slice_compute(self, c: Compute, way: _Way, device: int) -> Compute:
        """Return device ``device``'s part of ``c``. Indices into parts and sliced constants stay
        unchanged, others are shifted."""
        further = ex.make_add(way.axis.name, device * way.step)

        def rule(e: Expr) -> Expr | None:
            if isinstance(e, Ref):
                return further if e.axis == way.axis.name else None
            if not isinstance(e, Load):
                return None
            if e.tensor in self.parts:
                return Load(self.names[e.tensor, device], e.indices, e.fill)
            if e.tensor in way.constants:
                return Load(self._slice(e.tensor, way.constants[e.tensor], device), e.indices, e.fill)
            return Load(self._whole(e.tensor, device), tuple(ex.transform(i, rule) for i in e.indices), e.fill)

        def shorter(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
            return tuple(Axis(a.name, way.step) if a == way.axis else a for a in axes)

        return replace(c, axes=shorter(c.axes), reduce=shorter(c.reduce), body=ex.transform(c.body, rule))

    def _slice(self, constant: str, moved: tuple[int, ...], device: int) -> str:
        """Return a device's slice of a constant."""
        name = self.names.get((f"{constant} {moved}", device))
        if name is None:
            value = self.graph.constants[constant]
            place = tuple(slice(by * device, by * (device + 1)) if by else slice(None) for by in moved)
            name = self.names[f"{constant} {moved}", device] = make_identifier(f"{constant}_on_{device}", self.taken)
            self.constants[name] = np.ascontiguousarray(value[place])
            self.constants[name].flags.writeable = False
        return name

"""Channels-last layout of image tensors inside a program.

Storage (``plan.storage``) keeps the model's axis order, NCHW in ONNX. This pass moves whole buffers to NHWC. These hold the
tensors that a convolution reads or writes, and others in the same memory, such as parts of a concatenation. It adds no
transposition: operators read and write both layouts through strides. Inputs, outputs and constants keep their order; kernels pack
constants as needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Final, TypeAlias

from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.operator import ROperator
from rammer.ir.parts import Storage
from rammer.ir.types import row_major
from rammer.plan.storage import StoragePlan

#: Seconds of an untiled operator on the device with its tensors in these storages; infinite if no kernel supports it.
Price: TypeAlias = Callable[[ROperator, Mapping[str, Storage]], float]

#: Minimum relative saving: of the affected operators' time per moved buffer, and finally of the whole program's time.
#: Measurements are not more repeatable. Without it, two tunings of MobileNetV2 on a CPU moved three buffers each, not the same
#: ones, and the model took 0.4 and 3% longer.
LEAST_GAIN = 0.05
#: Types whose multiply instructions need two or more adjacent elements of the sum, i.e. channels: 8-bit codes and float16.
NARROW: Final = ("uint8", "int8", "float16")


def assign_layouts(
    plan: StoragePlan, operators: Sequence[ROperator], price: Price | None = None, narrow: bool = False
) -> StoragePlan:
    """Return ``plan`` with image buffers in NHWC, chosen to minimise ``price``. Without ``price``, all possible buffers move;
    with ``narrow``, only those of types in ``NARROW``."""
    moves = _Moves(plan, operators, narrow)
    return replace(plan, storages=moves.storages(moves.buffers if price is None else moves.cheapest(price)))


def channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the element strides of a dense tensor (N, C, ...) that is stored as (N, ..., C)."""
    n, *space, c = row_major((shape[0], *shape[2:], shape[1]))
    return (n, c, *space)


@dataclass
class _Moves:
    """The buffers that can move, and the cost of moving a subset."""

    plan: StoragePlan
    operators: Sequence[ROperator]
    narrow: bool = False
    prices: dict[tuple[str, frozenset[str]], float] = field(default_factory=dict)

    @cached_property
    def last(self) -> dict[str, dict[str, Storage]]:
        """Map from each movable buffer to its tensors' channels-last storages."""
        tenants: dict[str, list[Storage]] = {}
        for storage in self.plan.storages.values():
            tenants.setdefault(storage.buffer, []).append(storage)
        images = {self.plan.storages[t].buffer for o in self.operators for t in _image_tensors(o, self.narrow)}
        graph = self.plan.graph
        fixed = {self.plan.storages[t].buffer for t in (*graph.inputs, *graph.outputs, *graph.constants)}
        found = {}
        for buffer in (b for b in tenants if b in images - fixed and not (self.narrow and self._has_wide_tensor(tenants[b]))):
            moved = [_to_channels_last(s, self.plan.storages[buffer].shape) for s in tenants[buffer]]
            known = [m for m in moved if m is not None]
            if len(known) == len(moved):
                found[buffer] = {m.tensor: m for m in known}
        return found

    def _has_wide_tensor(self, storages: Sequence[Storage]) -> bool:
        """Return True if a tensor there is of no type in ``NARROW``."""
        return any(self.plan.graph.types[s.tensor].dtype not in NARROW for s in storages)

    @property
    def buffers(self) -> frozenset[str]:
        """The names of the movable buffers."""
        return frozenset(self.last)

    def storages(self, moved: Collection[str]) -> dict[str, Storage]:
        """Return all storages with the buffers ``moved`` in channels-last order."""
        return {t: self.last[s.buffer][t] if s.buffer in moved else s for t, s in self.plan.storages.items()}

    def cost(self, operators: Sequence[ROperator], moved: frozenset[str], price: Price) -> float:
        """Return the seconds of ``operators`` with the buffers ``moved``."""
        total = 0.0
        for operator in operators:
            key = operator.name, moved & self.touched[operator.name]
            if key not in self.prices:
                self.prices[key] = price(operator, self.storages(key[1]))
            total += self.prices[key]
        return total

    @cached_property
    def touched(self) -> dict[str, frozenset[str]]:
        """Map from each operator to the movable buffers that it reads or writes."""
        storages = self.plan.storages
        return {o.name: self.buffers & {storages[t].buffer for t in (*o.inputs, *o.outputs)} for o in self.operators}

    def cheapest(self, price: Price) -> frozenset[str]:
        """Return the buffers to move, by local search.

        The search starts from the cheaper of none or all buffers. It changes one buffer at a time while that saves enough. Every
        change reduces the cost, so the search ends; it may miss changes that pay only together."""
        best = min((frozenset[str](), self.buffers), key=lambda moved: self.cost(self.operators, moved, price))
        around = {b: [o for o in self.operators if b in self.touched[o.name]] for b in self.last}
        improved = True
        while improved:
            improved = False
            for buffer, operators in around.items():
                other = best ^ {buffer}
                if self.cost(operators, other, price) < self.cost(operators, best, price) * (1 - LEAST_GAIN):
                    best, improved = other, True
        return best


def _image_tensors(operator: ROperator, windows: bool) -> tuple[str, ...]:
    """Return the tensors that an operator with a convolution reads and writes; () for other operators. With ``windows``, pooling
    and depthwise convolutions count, too."""
    found = any(_is_convolution(c) or (windows and _is_window(c)) for c in operator.computes)
    return (*operator.inputs, *operator.outputs) if found else ()


def _is_window(compute: Compute) -> bool:
    """Return True if ``compute`` combines neighbours in a tensor (N, C, ..., W)."""
    summed, kept = {a.name for a in compute.reduce}, {a.name for a in compute.axes}
    return any(
        len(ld.indices) >= 4 and any(ex.axes_of(i) & summed and ex.axes_of(i) & kept for i in ld.indices[2:])
        for ld in compute.loads
    )


def _is_convolution(compute: Compute) -> bool:
    """Return True if ``compute`` sums over axis 1, the channels, of a tensor (N, C, ..., W) and keeps its last axis."""
    if compute.kind != "contraction":
        return False
    summed, kept = {a.name for a in compute.reduce}, {a.name for a in compute.axes}
    return any(
        len(ld.indices) >= 4 and ex.axes_of(ld.indices[1]) & summed and ex.axes_of(ld.indices[-1]) & kept for ld in compute.loads
    )


def _to_channels_last(storage: Storage, shape: tuple[int, ...]) -> Storage | None:
    """Return ``storage``, a part of a dense row-major tensor of ``shape``, after that tensor is moved to channels last.

    Returns None if the storage would not change. The result is also None if an axis steps along several axes of the tensor, as in
    a flattening."""
    if len(shape) < 4 or 0 in shape or shape[1] == 1 or prod(shape[2:]) == 1:
        return None
    old, new = row_major(shape), channels_last(shape)
    low = [storage.offset // step % extent for step, extent in zip(old, shape, strict=True)]
    high = list(low)
    start = sum(i * s for i, s in zip(low, new, strict=True))
    strides = []
    for step, extent in zip(storage.strides, storage.shape, strict=True):
        if not step or extent == 1:
            strides.append(0)
            continue
        k = next((k for k, n in enumerate(shape) if n > 1 and step % old[k] == 0), None)
        if k is None:
            return None
        count = step // old[k]
        low[k] += min(0, count * (extent - 1))
        high[k] += max(0, count * (extent - 1))
        strides.append(count * new[k])
    inside = all(lo >= 0 and hi < n for lo, hi, n in zip(low, high, shape, strict=True))
    return replace(storage, offset=start, strides=tuple(strides)) if inside else None

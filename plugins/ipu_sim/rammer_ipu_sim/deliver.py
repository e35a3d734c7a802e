"""The exchange: boxes from buffers to tasks, and the tasks' tiles back into buffers."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from rammer.ir.program import Storage

from rammer_ipu_sim.batch import LocalBox, StagedOperand
from rammer_ipu_sim.memory import poison_value
from rammer_ipu_sim.spans import Numbers
from rammer_ipu_sim.supersteps import Batch

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


#: Limit for padding a tensor: at most this multiple of the elements that are read and produced.
PADDED = 8


def tensor_view(buffer: Array, storage: Storage) -> Array:
    """Return a view of the tensor inside its flat buffer."""
    if 0 in storage.shape:
        return np.empty(storage.shape, dtype=buffer.dtype)
    strides = tuple(s * buffer.itemsize for s in storage.strides)
    return as_strided(buffer[storage.offset :], shape=storage.shape, strides=strides)


def gather_boxes(stage: StagedOperand, tensor: Array) -> Array:
    """Return a copy of every task's box, ``[shared grid..., box...]``; outside the tensor ``fill`` or poison."""
    missing = poison_value(tensor.dtype.name) if stage.fill is None else stage.fill
    steps = [_grid_steps(s.low, stage.dims) for s in stage.spans]
    if 0 in tensor.shape or 0 in stage.extents or any(s is None for s in steps):
        return _gather_any(stage, tensor, missing)
    known = [s for s in steps if s is not None]
    lows = [int(s.low.min()) for s in stage.spans]
    highs = [int(s.low.max()) + n - 1 for s, n in zip(stage.spans, stage.extents, strict=True)]
    result = math.prod((*stage.dims, *stage.extents))
    padding = [(max(0, -lo), max(0, hi - n + 1)) for lo, hi, n in zip(lows, highs, tensor.shape, strict=True)]
    if math.prod(sum(p) + n for p, n in zip(padding, tensor.shape, strict=True)) > PADDED * (tensor.size + result):
        return _gather_any(stage, tensor, missing)
    if any(p != (0, 0) for p in padding):
        tensor = np.pad(tensor, padding, constant_values=missing)
    corner = [slice(int(s.low.flat[0]) + p[0], None) for s, p in zip(stage.spans, padding, strict=True)]
    strides = [sum(step[g] * w for step, w in zip(known, tensor.strides, strict=True)) for g in range(len(stage.dims))]
    view = as_strided(tensor[tuple(corner)], (*stage.dims, *stage.extents), (*strides, *tensor.strides))
    return np.array(view, copy=True, order="C")


def _grid_steps(low: Numbers, dims: tuple[int, ...]) -> list[int] | None:
    """Return the constant step along each grid axis, or None unless ``low`` rises evenly (never falls)."""
    result = []
    for d, n in enumerate(low.shape):
        step = 0
        if n > 1:
            gaps = np.diff(low, axis=d)
            step = int(gaps.flat[0])
            if step < 0 or np.any(gaps != step):
                return None
        result.append(step)
    return result


def _gather_any(stage: StagedOperand, tensor: Array, missing: float | int | bool) -> Array:
    """Gather boxes at arbitrary positions, by index arrays."""
    rank, boxes = len(stage.dims), len(stage.extents)
    shape = (*stage.dims, *stage.extents)
    if 0 in tensor.shape:
        return np.full(shape, missing, dtype=tensor.dtype)
    inside: Any = True
    places = []
    for d, (span, extent, n) in enumerate(zip(stage.spans, stage.extents, tensor.shape, strict=True)):
        along = np.arange(extent).reshape((1,) * (rank + d) + (extent,) + (1,) * (boxes - d - 1))
        index = span.low.reshape(*span.low.shape, *(1,) * boxes) + along
        inside = inside & (index >= 0) & (index < n)
        places.append(np.clip(index, 0, n - 1))
    found = np.where(inside, tensor[tuple(places)], np.asarray(missing, dtype=tensor.dtype))
    return np.array(np.broadcast_to(found, shape))


def fill_outside(held: LocalBox, values: Array, shape: tuple[int, ...], fill: float | int | bool) -> Array:
    """Return ``values`` of an interior tensor of ``shape`` with ``fill`` at positions outside that shape."""
    rank, boxes = len(held.dims), len(held.extents)
    inside: Any = True
    for d, (span, extent, n) in enumerate(zip(held.spans, held.extents, shape, strict=True)):
        along = np.arange(extent).reshape((1,) * (rank + d) + (extent,) + (1,) * (boxes - d - 1))
        index = span.low.reshape(*span.low.shape, *(1,) * boxes) + along
        inside = inside & (index >= 0) & (index < n)
    return np.where(inside, values, np.asarray(fill, dtype=values.dtype))


def scatter_tiles(batch: Batch, output: str, values: Array, tensor: Array) -> None:
    """Write every task's part of ``output``, ``values`` (``[grid or 1..., part...]``), into its ``tensor``, clipped to it."""
    own, rank = batch.operator.shared[output], len(batch.coordinates)
    values = np.broadcast_to(values, (*(len(c) for c in batch.coordinates), *values.shape[rank:]))
    values = values[tuple(slice(None) if d in own else 0 for d in range(rank))]  # one task computes all of it along other axes
    kept = [d for d in range(rank) if d in own]
    pairs, target = list[int](), list[Any]()
    for axis, (d, extent) in enumerate(zip(own, tensor.shape, strict=True)):
        part = values.shape[len(kept) + axis]
        pairs += [len(kept) + axis] if d is None else [kept.index(d), len(kept) + axis]
        places = (0,) if d is None else batch.coordinates[d]
        index = (np.asarray(places)[:, None] * part + np.arange(part)).reshape(-1)
        target.append(index[index < extent])
    counts = [1 if d is None else len(batch.coordinates[d]) for d in own]
    flat = values.transpose(pairs).reshape([n * t for n, t in zip(counts, values.shape[len(kept) :], strict=True)])
    # Only the last tile along an axis can exceed it, and coordinates rise: the valid part is a prefix.
    flat = flat[tuple(slice(0, len(i)) for i in target)]
    if all(len(i) and i[-1] - i[0] + 1 == len(i) for i in target):
        tensor[tuple(slice(int(i[0]), int(i[-1]) + 1) for i in target)] = flat
    else:
        tensor[np.ix_(*target)] = flat

"""Scatters that would take a device too many steps, on the host: NumPy of our own (``onnx.reference`` walks them in Python)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_STEPS: Final[Mapping[str, Any]] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def scatter_elements(attributes: Mapping[str, Any], operands: Sequence[Array | None]) -> Sequence[Array]:
    """ "output[indices[i][j]][j] = updates[i][j] if axis = 0"."""
    data, indices, updates = operands[:3]
    assert data is not None and indices is not None and updates is not None
    axis = int(attributes.get("axis", 0)) % data.ndim
    places: list[Array] = list(np.indices(indices.shape, sparse=True))
    places[axis] = np.where(indices < 0, indices + data.shape[axis], indices)
    return [_scattered(attributes, data, tuple(places), updates)]


def scatter_nd(attributes: Mapping[str, Any], operands: Sequence[Array | None]) -> Sequence[Array]:
    """ "output[indices[idx]] = updates[idx]"."""
    data, indices, updates = operands[:3]
    assert data is not None and indices is not None and updates is not None
    places = [np.where(i < 0, i + n, i) for i, n in zip(np.moveaxis(indices, -1, 0), data.shape, strict=False)]
    return [_scattered(attributes, data, tuple(places), updates)]


def _scattered(attributes: Mapping[str, Any], data: Array, places: tuple[Array, ...], updates: Array) -> Array:
    word, wide = attributes.get("reduction", "none"), data.dtype == np.float16
    result = data.astype(np.float32) if wide and word != "none" else data.copy()
    with np.errstate(all="ignore"):
        if word == "none":
            result[places] = updates  # of several to one place the last one stays
        else:
            # Over one axis NumPy has a fast way; slices are places of their elements.
            shape = result.shape
            lead = np.ravel_multi_index(places, shape[: len(places)]) if places else np.zeros((), np.int64)
            tail = math.prod(shape[len(places) :])
            flat = np.asarray(lead)[..., None] * tail + np.arange(tail)
            _STEPS[word].at(result.reshape(-1), flat.ravel(), updates.ravel())
    return result.astype(data.dtype)

"""Encoders of numbers: one-hot categories and label maps. Encoders of strings run on the host."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from rammer.frontend.lower.contrib.function import Array, Declined, FunctionBody, standard_function
from rammer.frontend.read.limits import MAX_TABLE

#: Largest number of keys; every element is compared with each of them.
MOST_KEYS: Final = 1024


@standard_function("OneHotEncoder")
def one_hot_encoder(b: FunctionBody) -> str:
    """Expand OneHotEncoder: a 1 at the index of the category that equals the truncated element; the last of duplicates."""
    categories = [int(c) for c in b.attr("cats_int64s")]
    if not categories or b.attr("cats_strings"):
        raise Declined("it has no numeric categories")
    if not b.use.attr("zeros", 1):
        raise Declined("an element outside all categories is an error, which only the host detects")
    _check_keys(len(categories))
    shape, last = b.shape(0), {c: place for place, c in enumerate(categories)}
    used = np.array([last[c] == place for place, c in enumerate(categories)])
    same = b.Equal(b.reshape(b.cast(b.input(0), "int64"), *shape, 1), b.constant(np.array(categories)))
    return b.cast(same if used.all() else b.And(same, b.constant(used)), "float32")


@standard_function("LabelEncoder")
def label_encoder(b: FunctionBody) -> str:
    """Expand LabelEncoder: the value of the first key that equals the element; NaN is an ordinary key."""
    keys, values, default = (_label_array(b, part) for part in ("keys", "values", "default"))
    if keys is None or values is None or default is None:
        raise Declined("it has string labels")
    if keys.shape != values.shape or keys.ndim != 1 or default.size != 1 or not keys.size:
        raise Declined(f"{keys.size} keys for {values.size} values and {default.size} defaults")
    if str(keys.dtype) != b.dtype() or default.dtype != values.dtype:
        raise Declined(f"X is {b.dtype()}, keys are {keys.dtype}, values {values.dtype}")
    _check_keys(keys.size)
    x = b.reshape(b.input(0), *b.shape(0), 1)
    same = b.Equal(x, b.constant(keys))
    if keys.dtype.kind == "f" and np.isnan(keys).any():
        same = b.Or(same, b.And(b.IsNaN(x), b.constant(np.isnan(keys))))
    # The index of the first matching key, or the number of keys if none matches.
    place = b.Where(same, b.constant(np.arange(keys.size)), b.constant(np.array(keys.size)))
    place = b.ReduceMin(place, b.constant([-1]), keepdims=0)
    return b.Gather(b.constant(np.concatenate([values, default.reshape(1)])), place)


def _check_keys(count: int) -> None:
    if count > min(MOST_KEYS, MAX_TABLE):
        raise Declined(f"{count} keys")


def _label_array(b: FunctionBody, part: str) -> Array | None:
    """Return keys, values or the default as numbers, or None if they are strings. An absent default is the default of the values'
    type."""
    whole = b.use.attr(f"{part}_tensor", None)
    if whole is not None:
        return np.asarray(whole) if np.asarray(whole).dtype.kind in "if" else None
    kinds: dict[str, Any] = {"int64": np.int64, "float": np.float32}
    if part != "default":
        given = [(b.attr(f"{part}_{name}s"), kind) for name, kind in kinds.items()]
        return next((np.array(v, kind) for v, kind in given if len(v)), None)
    values = _label_array(b, "values")
    if values is None:
        return None
    nothing = {"int64": -1, "float32": -0.0}.get(str(values.dtype))
    name = "default_int64" if values.dtype == np.int64 else "default_float"
    return None if nothing is None else np.array([b.use.attr(name, nothing)], values.dtype)

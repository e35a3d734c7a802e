"""Encoders of numbers: categories as ones among zeros, and labels as other labels. Those of words run on the host."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from rammer.frontend.lower.contrib.function import Array, Declined, FunctionBody
from rammer.frontend.lower.ml.table import standard_function
from rammer.frontend.read.limits import MAX_TABLE

#: Most keys that every element is compared with.
MOST_KEYS: Final = 1024


@standard_function("OneHotEncoder")
def one_hot_encoder(b: FunctionBody) -> str:
    """A 1 at the place of the category that an element is, cut to a whole number; the last place of several."""
    categories = [int(c) for c in b.attr("cats_int64s")]
    if not categories or b.attr("cats_strings"):
        raise Declined("it has no categories that are numbers")
    if not b.use.attr("zeros", 1):
        raise Declined("an element of no category is an error, which only the host can tell")
    _check_keys(len(categories))
    shape, last = b.shape(0), {c: place for place, c in enumerate(categories)}
    used = np.array([last[c] == place for place, c in enumerate(categories)])
    same = b.Equal(b.reshape(b.cast(b.input(0), "int64"), *shape, 1), b.constant(np.array(categories)))
    return b.cast(same if used.all() else b.And(same, b.constant(used)), "float32")


@standard_function("LabelEncoder")
def label_encoder(b: FunctionBody) -> str:
    """The value of the key that an element is, the first of several; NaN is a key like any other."""
    keys, values, default = (_label_array(b, part) for part in ("keys", "values", "default"))
    if keys is None or values is None or default is None:
        raise Declined("it has labels that are words")
    if keys.shape != values.shape or keys.ndim != 1 or default.size != 1 or not keys.size:
        raise Declined(f"{keys.size} keys for {values.size} values and {default.size} defaults")
    if str(keys.dtype) != b.dtype() or default.dtype != values.dtype:
        raise Declined(f"X is {b.dtype()}, keys are {keys.dtype}, values {values.dtype}")
    _check_keys(keys.size)
    x = b.reshape(b.input(0), *b.shape(0), 1)
    same = b.Equal(x, b.constant(keys))
    if keys.dtype.kind == "f" and np.isnan(keys).any():
        same = b.Or(same, b.And(b.IsNaN(x), b.constant(np.isnan(keys))))
    # The place of the first key that it is, and one behind the last for none.
    place = b.Where(same, b.constant(np.arange(keys.size)), b.constant(np.array(keys.size)))
    place = b.ReduceMin(place, b.constant([-1]), keepdims=0)
    return b.Gather(b.constant(np.concatenate([values, default.reshape(1)])), place)


def _check_keys(count: int) -> None:
    if count > min(MOST_KEYS, MAX_TABLE):
        raise Declined(f"{count} keys")


def _label_array(b: FunctionBody, part: str) -> Array | None:
    """Keys, values or the default, as numbers; None where they are words. What nothing says is the default of its kind."""
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

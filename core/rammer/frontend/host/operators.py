"""NumPy implementations of operators without a tensor expression, where ``onnx.reference`` is wrong or slow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from onnx import helper

from rammer.frontend.host import contrib_operators
from rammer.frontend.host.strings import cast_map, category_mapper, dict_vectorizer, one_hot, string_normalizer
from rammer.frontend.read.schemas import MICROSOFT

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_STEPS: Final[Mapping[str, Any]] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def scatter_elements(attributes: Mapping[str, Any], operands: Sequence[Array | None]) -> Sequence[Array]:
    """Compute ScatterElements: "output[indices[i][j]][j] = updates[i][j] if axis = 0"."""
    data, indices, updates = operands[:3]
    assert data is not None and indices is not None and updates is not None
    axis = int(attributes.get("axis", 0)) % data.ndim
    places: list[Array] = list(np.indices(indices.shape, sparse=True))
    places[axis] = np.where(indices < 0, indices + data.shape[axis], indices)
    return [_scatter_updates(attributes, data, tuple(places), updates)]


def scatter_nd(attributes: Mapping[str, Any], operands: Sequence[Array | None]) -> Sequence[Array]:
    """Compute ScatterND: "output[indices[idx]] = updates[idx]"."""
    data, indices, updates = operands[:3]
    assert data is not None and indices is not None and updates is not None
    places = [np.where(i < 0, i + n, i) for i, n in zip(np.moveaxis(indices, -1, 0), data.shape, strict=False)]
    return [_scatter_updates(attributes, data, tuple(places), updates)]


def _scatter_updates(attributes: Mapping[str, Any], data: Array, places: tuple[Array, ...], updates: Array) -> Array:
    word, wide = attributes.get("reduction", "none"), data.dtype == np.float16
    result = data.astype(np.float32) if wide and word != "none" else data.copy()
    with np.errstate(all="ignore"):
        if word == "none":
            result[places] = updates  # the last of several updates of an element wins
        else:
            # NumPy is fast over one axis; slices become indices of their elements.
            shape = result.shape
            lead = np.ravel_multi_index(places, shape[: len(places)]) if places else np.zeros((), np.int64)
            tail = math.prod(shape[len(places) :])
            flat = np.asarray(lead)[..., None] * tail + np.arange(tail)
            _STEPS[word].at(result.reshape(-1), flat.ravel(), updates.ravel())
    return result.astype(data.dtype)


#: A function from attributes and operands (None for an absent one) to all outputs; None for unsupported element types.
_Operator: TypeAlias = Callable[[Mapping[str, Any], Sequence["Array | None"]], "Sequence[Array] | None"]


def _compute_unique(attributes: Mapping[str, Any], operands: Sequence[Array | None]) -> Sequence[Array]:
    """Compute "the unique values or sliced unique subtensors", sorted or "in the same order in which they occur in 'X'".

    Also returns indices of first occurrences, inverse indices and counts. The reference drops axes of unsorted and of single
    subtensors."""
    x = operands[0]
    assert x is not None
    axis = attributes.get("axis")
    _, first, inverse, counts = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    order = np.arange(len(first)) if attributes.get("sorted", 1) else np.argsort(first, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    first = first[order]
    values = x.ravel()[first] if axis is None else np.take(x, first, axis=axis)
    return values, first, place[inverse.ravel()], counts[order]


#: Groups of elements are compared first from this number of elements, and this ratio of a row's elements to those in order.
_MANY: Final = 4096
_SPARSE: Final = 8
#: Most elements that are sorted by NumPy's stable order, without numbers that contain the index.
_SHORT: Final = 1024
#: Most boxes that are compared at once, and boxes that are ordered first of more.
_BLOCK: Final = 128
_FIRST: Final = 1024


def _compute_top_k(attributes: Mapping[str, Any], operands: Sequence[Array | None]) -> Sequence[Array] | None:
    """Return the largest (``largest=0``: smallest) elements along an axis in order, and their indices."""
    x, count = operands[0], _scalar_operand(operands, 1)
    if x is None or count is None or x.dtype.kind not in "iuf":
        return None
    axis = int(attributes.get("axis", -1))
    rows = x.swapaxes(axis, -1)
    index = order_elements(rows, int(count), bool(attributes.get("largest", 1)))
    if not rows.size:
        return [a.swapaxes(axis, -1) for a in (rows[..., : int(count)], index)]
    flat = rows.reshape(-1, rows.shape[-1])
    chosen = index.reshape(len(flat), -1)  # NumPy's function of axes takes longer than a small TopK
    values = flat[0][chosen] if len(flat) == 1 else flat[np.arange(len(flat))[:, None], chosen]
    return [a.swapaxes(axis, -1) for a in (values.reshape(index.shape), index)]


def order_elements(rows: Array, count: int, largest: bool = True) -> Array:
    """Return the indices of the first ``count`` elements of each row (int64): the largest in descending order, or the smallest in
    ascending order. Among equal elements the first one comes first; NaN is the largest number."""
    last = rows.shape[-1] - 1
    if rows.dtype.itemsize == 8 or rows.size <= _SHORT:
        order = np.argsort(rows[..., ::-1] if largest else rows, axis=-1, kind="stable")
        return last - order[..., ::-1][..., :count] if largest else order[..., :count]
    # Sorting is fastest over numbers that contain the index.
    if 0 < count * _SPARSE <= last and rows.size >= _MANY:
        packed = _pack_candidates(rows, count, largest)
    else:
        packed = _pack_index(rows, np.arange(last, -1, -1), largest)
    if 0 < 2 * count <= packed.shape[-1]:
        packed = np.partition(packed, packed.shape[-1] - count, axis=-1)[..., -count:]
    packed.sort(axis=-1)
    return np.asarray(last - (packed[..., ::-1][..., :count] & 0xFFFFFFFF)).reshape(*rows.shape[:-1], -1)


def _pack_index(values: Array, index: Array, largest: bool) -> Array:
    """Return numbers in the order of ``values`` in the upper half of int64, and ``index`` in the lower half; the greatest comes
    first."""
    if values.dtype.kind == "f":
        numbers = np.add(values, 0, dtype=np.float32)  # -0 becomes 0
        bits = numbers.view(np.int32)
        most = np.int32((1 << 31) - 1)
        keys: Array = bits ^ ((bits >> 31) & most)
        missing = np.isnan(numbers)
        if missing.any():
            keys[missing] = most
    else:
        keys = np.subtract(values, 1 << 31 if values.dtype == np.uint32 else 0, dtype=np.int64)
    packed = np.left_shift(keys if largest else ~keys, 32, dtype=np.int64)
    packed += index
    return packed


def _pack_candidates(rows: Array, count: int, largest: bool) -> Array:
    """Return the packed numbers of the elements that may be among the first ``count`` of their row, and small numbers after them.
    Of the best elements of several groups, the one at place ``count`` is a bound."""
    n, groups = rows.shape[-1], 4 * count
    flat = np.ascontiguousarray(rows).reshape(-1, n)
    parts = flat[:, : n // groups * groups].reshape(len(flat), -1, groups)
    best, place = (parts.max(1), groups - count) if largest else (parts.min(1), count - 1)
    bound = np.partition(best, place, axis=-1)[:, place, None]
    found = np.flatnonzero(~(flat < bound) if largest else ~(flat > bound))  # NaN is a candidate
    if 2 * len(found) > flat.size:
        return _pack_index(rows, np.arange(n - 1, -1, -1), largest)  # many elements are equal
    if len(flat) == 1:
        return _pack_index(flat[0][found], n - 1 - found, largest)[None]
    row, column = np.divmod(found, n)
    packed = _pack_index(flat.ravel()[found], n - 1 - column, largest)
    counts = np.bincount(row, minlength=len(flat))
    result = np.full((len(flat), counts.max()), np.iinfo(np.int64).min)
    result[row, np.arange(len(found)) - (np.cumsum(counts) - counts)[row]] = packed
    return result


def _non_max_suppression(attributes: Mapping[str, Any], operands: Sequence[Array | None]) -> Sequence[Array]:
    """Return rows of batch, class and box by descending score. Omits "boxes with IOU overlap with previously selected boxes"
    above the threshold. The reference rejects scalar limits."""
    boxes, scores = operands[0], operands[1]
    assert boxes is not None and scores is not None
    limit, overlap, least = (_scalar_operand(operands, i) for i in (2, 3, 4))
    corners = _box_corners(boxes, bool(attributes.get("center_point_box", 0)))
    areas, chosen = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1]), list[Array]()
    for batch, label in np.ndindex(*scores.shape[:2]) if limit is not None and limit > 0 else ():
        rated = scores[batch, label]
        kept = _select_boxes(corners[batch], areas[batch], rated, least, np.float32(overlap or 0), int(limit))
        row = np.empty((len(kept), 3), np.int64)
        row[:, 0], row[:, 1], row[:, 2] = batch, label, kept
        chosen.append(row)
    return (np.concatenate([np.empty((0, 3), np.int64), *chosen]),)


def _select_boxes(corners: Array, areas: Array, rated: Array, least: Any, overlap: Any, limit: int) -> list[int]:
    """Return at most ``limit`` boxes by descending score above ``least`` that overlap no selected box by more than ``overlap``.
    Boxes are ordered and compared in blocks, since few of many boxes are compared at all."""
    kept = list[int]()
    for block in _boxes_by_score(rated, least, min(_BLOCK, -(-limit * 9 // 64) * 8)):
        if kept:
            block = block[~_is_overlapping(corners, areas, np.array(kept), block, overlap).any(axis=0)]
        earlier = np.triu(_is_overlapping(corners, areas, block, block, overlap), 1)  # row: the box before that of the column
        hit = earlier.any(axis=0)
        doubtful = np.flatnonzero(hit).tolist()
        free = int.from_bytes(np.packbits(~hit, bitorder="little").tobytes(), "little")
        columns = np.packbits(earlier[:, hit], axis=0, bitorder="little").T
        for k, column in zip(doubtful, columns, strict=True):  # bit k: box k of the block is selected
            if not free & int.from_bytes(column.tobytes(), "little"):
                free |= 1 << k
        kept += [box for k, box in enumerate(block.tolist()) if free >> k & 1]
        if len(kept) >= limit:
            return kept[:limit]
    return kept


def _boxes_by_score(rated: Array, least: Any, size: int) -> Iterator[Array]:
    """Yield boxes with a score above ``least`` by descending score, in blocks of ``size``."""
    able = np.flatnonzero(~(rated <= least)) if least is not None else np.arange(rated.size)
    scores = rated[able]
    for count in dict.fromkeys((min(_FIRST, able.size), able.size)):
        order = able[order_elements(scores, count)]
        for start in range(0 if count <= _FIRST else _FIRST, count, size):
            yield order[start : min(start + size, count)]


def _non_zero(attributes: Mapping[str, Any], operands: Sequence[Array | None]) -> Sequence[Array] | None:
    """Return "the indices of the elements that are non-zero (in row-major order - by dimension)". Scalars are left to the
    reference."""
    x = operands[0]
    return (np.array(np.nonzero(x), np.int64),) if x is not None and x.ndim and x.dtype.kind in "fiub" else None


def _compute_dropout(attributes: Mapping[str, Any], operands: Sequence[Array | None]) -> Sequence[Array]:
    """Compute "output = scale * data * mask, where scale = 1. / (1. - ratio)" in training mode. The random numbers of a seed are
    those of ONNX's test data."""
    x, ratio, training = operands[0], _scalar_operand(operands, 1), _scalar_operand(operands, 2)
    assert x is not None
    share = 0.5 if ratio is None else float(ratio)
    if not training or share == 0:
        return x, np.ones(x.shape, bool)
    mask = np.asarray(np.random.RandomState(attributes.get("seed")).uniform(0, 1, x.shape)) >= share
    return np.where(mask, x * np.asarray(1 / (1 - share), x.dtype), np.asarray(0, x.dtype)), mask


def _bit_cast(attributes: Mapping[str, Any], operands: Sequence[Array | None]) -> Sequence[Array]:
    """Copy values so that the result "preserves the exact bit pattern", for bool and float16, which lowerings do not support."""
    x = operands[0]
    assert x is not None
    return (x.view(helper.tensor_dtype_to_np_dtype(attributes["to"])),)


def _scalar_operand(operands: Sequence[Array | None], index: int) -> Any:
    value = operands[index] if index < len(operands) else None
    return None if value is None or value.size == 0 else value.ravel()[0]


def _box_corners(boxes: Array, centred: bool) -> Array:
    """Return least and greatest coordinates of boxes, in four rows per batch. Boxes are given by any two opposite corners or by
    centre and size."""
    rows = np.ascontiguousarray(np.swapaxes(boxes, 1, 2))
    one, two = rows[:, :2], rows[:, 2:]
    if centred:
        one, two = one - two / 2, one + two / 2
    return np.concatenate([np.minimum(one, two), np.maximum(one, two)], axis=1)


def _is_overlapping(corners: Array, areas: Array, ones: Array, others: Array, limit: Any) -> Array:
    """Return True where the intersection over union of boxes ``ones`` and ``others`` exceeds ``limit``, in float32. ``corners``
    are coordinates by box, in four rows."""
    near, far = corners[:, ones, None], corners[:, None, others]
    shared, union = np.empty((2, len(ones), len(others)), corners.dtype)
    for low, high, overlap in ((0, 2, shared), (1, 3, union)):
        np.minimum(near[high], far[high], out=overlap)
        overlap -= np.maximum(near[low], far[low])
        np.maximum(overlap, 0, out=overlap)
    shared *= union
    np.add(areas[ones, None], areas[others], out=union)
    union -= shared
    with np.errstate(invalid="ignore"):
        shared /= union  # NaN, of two empty boxes, exceeds nothing
    return np.asarray(shared > limit)


def _make_optional(attributes: Mapping[str, Any], operands: Sequence[Any]) -> Sequence[Any]:
    """Return "an optional-type value containing either an empty optional of a certain type ... or a non-empty value containing
    the input element". The value is the element itself, or None. The reference makes a list of it."""
    return [operands[0] if operands else None]


def _zip_map(attributes: Mapping[str, Any], operands: Sequence[Array | None]) -> Sequence[Any]:
    """Compute ZipMap: "Creates a map from the input and the attributes", one for each row, with number or string keys. The
    reference does not implement it."""
    rows = operands[0]
    assert rows is not None
    keys = attributes.get("classlabels_strings") or attributes.get("classlabels_int64s") or ()
    rows = rows.reshape(-1, rows.shape[-1])
    if rows.shape[1] != len(keys):
        raise ValueError(f"{rows.shape[1]} columns for {len(keys)} keys")
    return [[dict(zip(keys, row.tolist(), strict=True)) for row in rows]]


def key_of(domain: str, op: str) -> str:
    """Return the name of an operator in ``OPERATORS``: ONNX's domains share their names."""
    return f"{domain}.{op}" if domain == MICROSOFT else op


#: Operator -> its implementation, by ``key_of``.
OPERATORS: Final[Mapping[str, _Operator]] = {
    "Optional": _make_optional,
    "StringNormalizer": string_normalizer,
    "ZipMap": _zip_map,
    "OneHotEncoder": one_hot,
    "CategoryMapper": category_mapper,
    "DictVectorizer": dict_vectorizer,
    "CastMap": cast_map,
    "Unique": _compute_unique,
    "NonZero": _non_zero,
    "TopK": _compute_top_k,
    "NonMaxSuppression": _non_max_suppression,
    "BitCast": _bit_cast,
    "Dropout": _compute_dropout,
    "ScatterElements": scatter_elements,
    "ScatterND": scatter_nd,
    f"{MICROSOFT}.BifurcationDetector": contrib_operators.detect_bifurcation,
    f"{MICROSOFT}.DynamicTimeWarping": contrib_operators.find_warp_path,
    f"{MICROSOFT}.ExpandDims": contrib_operators.expand_dims,
    f"{MICROSOFT}.GatherND": contrib_operators.gather_nd,
    f"{MICROSOFT}.Inverse": contrib_operators.invert_matrices,
    f"{MICROSOFT}.MurmurHash3": contrib_operators.hash_words,
    f"{MICROSOFT}.Tokenizer": contrib_operators.tokenize_strings,
    f"{MICROSOFT}.Unique": contrib_operators.find_unique,
}

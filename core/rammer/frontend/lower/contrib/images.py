"""Operators on images that ONNX has in another form or lacks."""

from __future__ import annotations

from typing import Any

import numpy as np

from rammer.frontend.lower.contrib.function import FUNCTIONS, Declined, FunctionBody, OperatorFunction, contrib_function
from rammer.frontend.lower.contrib.fused import given_attributes
from rammer.frontend.lower.window_extents import geometry_of
from rammer.frontend.read.limits import MAX_POSITIONS, check_shape

_MODES = {"bilinear": "linear", "bicubic": "cubic", "nearest": "nearest"}
_WINDOW: dict[str, Any] = {"auto_pad": "NOTSET", "kernel_shape": list[int], "strides": list[int]}


@contrib_function("GridSample", "X: T, Grid: T -> Y: T2", mode="bilinear", padding_mode="zeros", align_corners=0)
def grid_sample(b: FunctionBody) -> str:
    """Expand GridSample to ONNX's GridSample, for images."""
    if b.attr("mode") not in _MODES or len(b.shape(0)) != 4:
        raise Declined(f"the mode {b.attr('mode')!r} of a tensor of {list(b.shape(0))}")
    names = ("padding_mode", "align_corners")
    return b.GridSample(b.input(0), b.input(1), mode=_MODES[b.attr("mode")], **{n: b.attr(n) for n in names})


@contrib_function(
    "ConvTransposeWithDynamicPads", "X: T, W: T, Pads?: L, B?: T -> Y: T", deciding=(2,),
    group=1, dilations=list[int], output_padding=list[int], **_WINDOW,
)  # fmt: skip
def conv_transpose_with_dynamic_pads(b: FunctionBody) -> str:
    """Expand ConvTransposeWithDynamicPads to ONNX's ConvTranspose, with its pads as an operand."""
    pads: dict[str, Any] = {"pads": [int(p) for p in _known_input(b, 2).ravel()]} if b.has(2) else {}
    if pads and len(pads["pads"]) != 2 * (len(b.shape(0)) - 2):
        raise Declined(f"pads are {pads['pads'][:9]} of an input of {list(b.shape(0))}")
    names = ("group", "dilations", "output_padding", *_WINDOW)
    return b.op("ConvTranspose", b.input(0), b.input(1), b.input(3), **given_attributes(b, names), **pads)[0]


def _known_input(b: FunctionBody, index: int) -> np.ndarray[Any, Any]:
    value = b.known(index)
    assert value is not None  # one of the operands that decide shapes
    return value


@contrib_function("MaxpoolWithMask", "X: F, M: M -> Y: F", pads=list[int], storage_order=0, **_WINDOW)
def maxpool_with_mask(b: FunctionBody) -> str:
    """Expand MaxpoolWithMask: the maximum of a window's rows, each up to its first masked element. The first element of an image
    is never masked. A channel reads its mask at ONNX Runtime's offset, which is correct only for a mask of one channel."""
    shape, mask = b.shape(0), b.shape(1)
    source, rank = shape[2:], len(shape) - 2
    kernel = tuple(b.attr("kernel_shape"))
    if rank < 1 or len(kernel) != rank or len(mask) != len(shape) or mask[2:] != source or not mask[0] * mask[1]:
        raise Declined(f"a mask of {list(mask)} and windows of {list(kernel)} for an input of {list(shape)}")
    if len(b.attr("strides")) not in (0, rank) or len(b.attr("pads")) not in (0, 2 * rank):
        raise Declined(f"strides are {list(b.attr('strides'))} and pads {list(b.attr('pads'))} of {rank} axes")
    names = ("auto_pad", "kernel_shape", "strides", "pads")
    _, dims = geometry_of("MaxPool", {n: b.attr(n) for n in names if b.attr(n) != ()}, source, kernel)
    if any(size < 1 or d.out < 1 or size > n + d.begin + d.end for size, d, n in zip(kernel, dims, source, strict=True)):
        raise Declined(f"windows of {list(kernel)} do not fit into an input of {list(shape)}")
    count, cells = shape[0] * shape[1], int(np.prod(source))
    first = (np.arange(count) * cells % (mask[0] * mask[1]))[:, None] + np.arange(cells)
    is_open = b.Not(b.Equal(b.Gather(b.reshape(b.input(1), -1), b.constant(first)), b.constant(0, "int32")))
    if rank > 1:
        is_open = b.Or(is_open, b.constant(np.arange(cells)[None] == 0))
    places, inside = _window_elements(dims, kernel, source)
    wide = (count, *places.shape)
    x = b.reshape(b.Gather(b.reshape(b.input(0), count, cells), b.constant(places.ravel()), axis=1), *wide)
    kept = b.reshape(b.Gather(is_open, b.constant(places.ravel()), axis=1), *wide)
    kept = b.Or(kept, b.constant(~inside))
    closed = b.CumSum(b.cast(b.Not(kept), "int32"), b.constant(3))
    is_used = b.And(b.Equal(closed, b.constant(0, "int32")), b.constant(inside))
    least = b.number(float(np.finfo(np.float32).min))
    y = b.ReduceMax(b.Where(is_used, x, least), b.constant([2, 3]), keepdims=0)
    return b.reshape(y, *shape[:2], *(d.out for d in dims))


def _window_elements(
    dims: Any, kernel: tuple[int, ...], source: tuple[int, ...]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return ``[windows, rows, columns]``: the flat indices of each window's elements, and a mask of those inside the image."""
    rank = len(source)
    flat, inside = np.zeros((1,) * (2 * rank), np.int64), np.ones((1,) * (2 * rank), bool)
    for axis, (dim, size, extent) in enumerate(zip(dims, kernel, source, strict=True)):
        place = np.arange(dim.out)[:, None] * dim.stride - dim.begin + np.arange(size)
        place = place.reshape([n if i % rank == axis else 1 for i, n in enumerate((*(d.out for d in dims), *kernel))])
        inside = inside & (place >= 0) & (place < extent)
        flat = flat * extent + np.clip(place, 0, extent - 1)
    rows = int(np.prod(kernel[:-1]))
    return flat.reshape(-1, rows, kernel[-1]), np.broadcast_to(inside, flat.shape).reshape(-1, rows, kernel[-1])


@contrib_function(
    "CropAndResize", "X: T, rois: T, batch_indices: M, crop_size: M -> Y: T", deciding=(3,), mode="bilinear",
    extrapolation_value=0.0,
)  # fmt: skip
def crop_and_resize(b: FunctionBody) -> str:
    """Expand CropAndResize: boxes of images, each sampled on a grid that spans the box corner to corner."""
    (count, channels, height, width), (boxes, corners), mode = b.shape(0, 4), b.shape(1, 2), b.attr("mode")
    size = [int(n) for n in _known_input(b, 3).ravel()]
    if (
        len(size) != 2
        or not 1 <= min(size) <= max(size) <= MAX_POSITIONS
        or corners != 4
        or mode not in ("bilinear", "nearest")
        or b.shape(2) != (boxes,)
    ):
        raise Declined(f"crops of {size} of {boxes} boxes by mode {mode!r}")
    y, x = (
        _sample_coordinates(b, axis, extent, steps)
        for axis, (extent, steps) in enumerate(zip((height, width), size, strict=True))
    )
    rows = b.reshape(b.Transpose(b.input(0), perm=[0, 2, 3, 1]), count * height * width, channels)
    base = b.Mul(b.reshape(b.cast(b.input(2), "int64"), boxes, 1, 1), b.constant(height * width))

    def picked(down: str, along: str) -> str:
        whole = b.Add(b.Mul(b.reshape(_nearest_index(b, down, height), boxes, size[0], 1), b.constant(width)), base)
        return b.Gather(rows, b.Add(whole, b.reshape(_nearest_index(b, along, width), boxes, 1, size[1])))

    shapes = [(boxes, size[0], 1, 1), (boxes, 1, size[1], 1)]
    if mode == "nearest":
        half = b.number(0.5)
        result = picked(b.Floor(b.Add(y, half)), b.Floor(b.Add(x, half)))
    else:
        top, left, bottom, right = b.Floor(y), b.Floor(x), b.Ceil(y), b.Ceil(x)
        down, along = (b.reshape(b.Sub(v, low), *shape) for v, low, shape in zip((y, x), (top, left), shapes, strict=True))
        upper, lower = (_interpolate_linear(b, picked(v, left), picked(v, right), along) for v in (top, bottom))
        result = _interpolate_linear(b, upper, lower, down)
    inside = [
        b.reshape(b.And(b.GreaterOrEqual(v, b.number(0.0)), b.LessOrEqual(v, b.number(extent - 1))), *shape)
        for v, extent, shape in zip((y, x), (height, width), shapes, strict=True)
    ]
    result = b.Where(b.And(*inside), result, b.number(b.attr("extrapolation_value")))
    return b.Transpose(result, perm=[0, 3, 1, 2])


def _sample_coordinates(b: FunctionBody, axis: int, extent: int, steps: int) -> str:
    """Return the coordinates of samples along an axis of each box: ``[boxes, steps]``."""
    first, last = (b.slice(b.input(1), 1, place, place + 1) for place in (axis, axis + 2))
    most = b.number(extent - 1)
    if steps == 1:
        return b.Mul(b.Mul(b.number(0.5), b.Add(first, last)), most)
    scale = b.Div(b.Mul(b.Sub(last, first), most), b.number(steps - 1))
    begin, end = b.Mul(first, most), b.Mul(last, most)
    inner = b.Add(begin, b.Mul(b.cast(b.constant(np.arange(1.0, steps - 1)[None], "float32"), b.dtype()), scale))
    return b.Concat(begin, inner, end, axis=1) if steps > 2 else b.Concat(begin, end, axis=1)


def _nearest_index(b: FunctionBody, x: str, extent: int) -> str:
    """Return the index of the nearest pixel of a coordinate."""
    return b.cast(b.Clip(x, b.number(0.0), b.number(extent - 1)), "int64")


def _interpolate_linear(b: FunctionBody, one: str, two: str, share: str) -> str:
    return b.Add(one, b.Mul(b.Sub(two, one), share))


def affine_grid(b: FunctionBody) -> str:
    """Expand AffineGrid: ``theta [N, d, d + 1]`` applied to the positions of ``size``, as a sum of one scaled column per axis."""
    size = b.known(1)
    count = 0 if size is None else size.size - 2
    if size is None or count not in (2, 3):
        raise Declined(f"size has {count + 2} elements, where [N, C, H, W] and [N, C, D, H, W] are possible")
    batch, _, *extents = (int(n) for n in size.ravel())
    check_shape((batch, *extents, count), "AffineGrid")
    if b.shape(0) != (batch, count, count + 1):
        raise Declined(f"theta has the shape {list(b.shape(0))}, where size needs {[batch, count, count + 1]}")
    columns = b.split(b.input(0), 2, [1] * (count + 1))
    columns = [b.reshape(c, batch, *(1,) * count, count) for c in columns]
    result = columns[count]
    # The first column belongs to the last axis: coordinates are (x, y) or (x, y, z).
    for column, axis in zip(columns, reversed(range(count)), strict=False):
        shape = [1] * (count + 2)
        shape[axis + 1] = extents[axis]
        places = base_positions(b, extents[axis], align_corners=bool(b.attr("align_corners")))
        here = b.reshape(b.cast(places, b.dtype(0)), *shape)
        result = b.Add(b.Mul(column, here), result)
    whole = b.constant([batch, *extents, count])
    return b.Expand(result, whole)


def base_positions(b: FunctionBody, extent: int, *, align_corners: bool) -> str:
    """Return the float64 centers of pixels between -1 and 1, or from -1 to 1 if ``align_corners``. An aligned extent of 1 has the
    position 1, as in ONNX Runtime; ONNX's body divides by zero."""
    if align_corners and extent == 1:
        return b.constant([1.0], "float64")
    step, start = (2 / (extent - 1), -1.0) if align_corners else (2 / max(extent, 1), 1 / max(extent, 1) - 1)
    index = b.Range(*(b.constant(n) for n in (0, extent, 1)))
    return b.Add(b.Mul(b.cast(index, "float64"), b.constant(step, "float64")), b.constant(start, "float64"))


FUNCTIONS["", "AffineGrid"] = OperatorFunction(affine_grid)

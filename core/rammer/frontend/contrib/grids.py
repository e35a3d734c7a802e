"""AffineGrid as a function: the body that ONNX gives it fails for a batch of 1 and divides by zero for an extent of 1."""

from __future__ import annotations

from rammer.frontend.contrib.function import FUNCTIONS, Declined, FunctionBody, OperatorFunction
from rammer.frontend.limits import check_shape


def affine_grid(b: FunctionBody) -> str:
    """Return ``theta [N, d, d + 1]`` applied to the positions of ``size``: the sum of a scaled column for each axis."""
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
    """Return the float64 centers of pixels between -1 and 1, or from -1 to 1 if ``align_corners``.

    The only position of an aligned extent of 1 is 1, as ONNX Runtime computes it; ONNX's body divides by zero.
    """
    if align_corners and extent == 1:
        return b.constant([1.0], "float64")
    step, start = (2 / (extent - 1), -1.0) if align_corners else (2 / max(extent, 1), 1 / max(extent, 1) - 1)
    index = b.Range(*(b.constant(n) for n in (0, extent, 1)))
    return b.Add(b.Mul(b.cast(index, "float64"), b.constant(step, "float64")), b.constant(start, "float64"))


FUNCTIONS["", "AffineGrid"] = OperatorFunction(affine_grid)

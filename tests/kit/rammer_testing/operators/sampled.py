"""Operators that sample images between pixels."""

from __future__ import annotations

from rammer_testing.operators.draw import Draw, DrawnValue, Reject
from rammer_testing.operators.images import image
from rammer_testing.operators.registry import describe


@describe("GridSample")
def grid_sample(d: Draw, op: str) -> DrawnValue:
    new = d.since(op) >= 20
    x = image(d, op, (4, 5 if new else 4))
    if 0 in x.shape or not x.dtype.startswith("float"):
        raise Reject("no pixels to read between")
    modes = [None, "linear" if new else "bilinear", "nearest"]
    if x.rank == 4:
        modes.append("cubic" if new else "bicubic")
    outs = [d.integer(1, 4) for _ in x.shape[2:]]
    grid = d.fresh(x.dtype, (x.shape[0], *outs, x.rank - 2), -1.3, 1.3, constant=d.chance(0.3))
    padding = d.one([None, "zeros", "border", "reflection"])
    return d.add(op, [x.name, grid.name], mode=d.one(modes), padding_mode=padding, align_corners=d.one([None, 0, 1]))


@describe("DeformConv")
def deform_conv(d: Draw, op: str) -> DrawnValue:
    x = image(d, op, (4, 4))
    if 0 in x.shape:
        raise Reject("no pixels to read between")
    batch, channels, *extents = x.shape
    divisors = [g for g in range(1, channels + 1) if channels % g == 0]
    group, offsets = d.one(divisors), d.one(divisors)
    kernel, strides = [d.integer(1, 3) for _ in extents], [d.one([1, 2]) for _ in extents]
    dilations = [d.one([1, 1, 2]) for _ in extents]
    pads = [d.integer(0, 2) for _ in range(2 * len(extents))]
    outs = [
        (n + pads[i] + pads[2 + i] - (k - 1) * dilations[i] - 1) // strides[i] + 1
        for i, (n, k) in enumerate(zip(extents, kernel, strict=True))
    ]
    if min(outs) < 1:
        raise Reject("nothing fits")
    features, taps = group * d.integer(1, 3), kernel[0] * kernel[1]
    names = [x.name, d.fresh(x.dtype, (features, channels // group, *kernel), -1, 1).name]
    names.append(d.fresh(x.dtype, (batch, offsets * taps * 2, *outs), -2, 2, constant=False).name)
    masked = d.chance(0.4)
    if masked or d.chance(0.4):
        names.append(d.fresh(x.dtype, (features,), -1, 1).name if d.chance(0.7) else "")
    if masked:
        names.append(d.fresh(x.dtype, (batch, offsets * taps, *outs), 0, 1).name)
    given = {"strides": strides, "dilations": dilations, "pads": pads}
    return d.add(op, names, group=group, offset_group=offsets, **given)

"""Windows over images: convolutions, pooling, resizing, and moves between depth and space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rammer_testing.operators.draw import Draw, DrawnValue, Reject
from rammer_testing.operators.elementwise import small
from rammer_testing.operators.registry import describe
from rammer_testing.operators.shapes import some_axes


def image(d: Draw, op: str, rank: tuple[int, int] = (3, 5)) -> DrawnValue:
    """Return a batch of images: an existing value, or a fresh one slightly larger than other tensors."""
    found = [v for v in d.values if v.dtype in d.types(op) and rank[0] <= v.rank <= rank[1] and small(v)]
    if found and d.chance(0.6) and not d.alone:
        return d.one(found[-6:])
    spatial = d.integer(rank[0], min(rank[1], 4 if d.chance(0.85) else 5)) - 2
    empty = 0.0 if d.alone else d.empty  # ONNX Runtime crashes on some
    pixels = [0 if d.chance(empty) else d.integer(1, {1: 17, 2: 10, 3: 5}[spatial]) for _ in range(spatial)]
    batch = 0 if d.chance(empty) else d.one([1, 1, 2, 3])
    return d.fresh(d.dtype(d.types(op)), (batch, d.integer(1, 6), *pixels), constant=None if d.alone else False)


def kernel_of(d: Draw, rank: int) -> list[int]:
    """Return the extents of a window; that of a single operator may fit nowhere."""
    return [d.integer(1, 4 if d.alone else 3) for _ in range(rank)]


def window(d: Draw, op: str, extents: Sequence[int], kernel: Sequence[int], transposed: bool = False) -> dict[str, Any]:
    """Return random strides, dilations and padding."""
    rank, given = len(extents), dict[str, Any]()
    strides = [d.one([1, 1, 2, 3]) for _ in range(rank)]
    dilations = [d.one([1, 1, 1, 2, 3] if d.alone else [1, 1, 1, 2]) for _ in range(rank)]
    if any(s != 1 for s in strides) or d.chance(0.2):
        given["strides"] = strides
    if d.takes(op, "dilations") and (any(n != 1 for n in dilations) or d.chance(0.2)):
        given["dilations"] = dilations
    mode = d.one(["NOTSET", "NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])
    if mode == "NOTSET":
        # Pooling leaves a window of padding alone undefined, which a dilated window of a single operator may be.
        if d.chance(0.6) and not (d.alone and op == "MaxPool" and "dilations" in given):
            given["pads"] = [d.integer(0, max(k - 1, 0)) for _ in range(2) for k in kernel]
    else:
        given["auto_pad"] = mode
    if transposed and (mode == "NOTSET" or d.alone) and d.chance(0.3):
        steps = [max(pair) if d.alone else pair[0] for pair in zip(strides, dilations, strict=True)]
        given["output_padding"] = [d.integer(0, n - 1) for n in steps]
    return given


@describe("Conv", weight=3)
def conv(d: Draw, op: str) -> DrawnValue:
    x = image(d, op)
    channels, kernel = x.shape[1], kernel_of(d, x.rank - 2)
    group = d.one([g for g in range(1, channels + 1) if channels % g == 0] or [1])
    features = group * d.integer(1, 4)
    w = d.fresh(x.dtype, (features, channels // group, *kernel), -1, 1, constant=d.chance(0.7))
    names = [x.name, w.name]
    if d.chance(0.5):
        names.append(d.fresh(x.dtype, (features,), -1, 1, constant=d.chance(0.7)).name)
    given = window(d, op, x.shape[2:], kernel)
    if d.chance(0.5):
        given["kernel_shape"] = kernel
    return d.add(op, names, group=group if group > 1 or d.chance(0.2) else None, **given)


@describe("ConvTranspose", weight=1.5)
def conv_transpose(d: Draw, op: str) -> DrawnValue:
    x = image(d, op)
    channels, kernel = x.shape[1], kernel_of(d, x.rank - 2)
    group = d.one([g for g in range(1, channels + 1) if channels % g == 0] or [1])
    per_group = d.integer(1, 3)
    names = [x.name, d.fresh(x.dtype, (channels, per_group, *kernel), -1, 1, constant=d.chance(0.7)).name]
    if d.chance(0.5):
        names.append(d.fresh(x.dtype, (per_group * group,), -1, 1).name)
    given = window(d, op, x.shape[2:], kernel, transposed=True)
    if d.chance(0.2) and (d.alone or ("auto_pad" not in given and "output_padding" not in given)):
        strides = given.get("strides", [1] * len(kernel))
        given["output_shape"] = [n * s + (d.integer(0, 2) if d.alone else 0) for n, s in zip(x.shape[2:], strides, strict=True)]
        given.pop("pads", None)
    return d.add(
        op, names, group=group if group > 1 or d.chance(0.2) else None, kernel_shape=kernel if d.chance(0.5) else None, **given
    )


@describe("MaxPool", "AveragePool", "LpPool", weight=1.5)
def pool(d: Draw, op: str) -> DrawnValue:
    x = image(d, op)
    kernel = kernel_of(d, x.rank - 2)
    given = window(d, op, x.shape[2:], kernel)
    if d.takes(op, "ceil_mode") and d.chance(0.35):
        given["ceil_mode"] = 1
    if op == "AveragePool" and d.chance(0.4):
        given["count_include_pad"] = 1
    if op == "LpPool":
        given["p"] = d.one([None, 1, 2, 3])
    wanted = [True]
    if op == "MaxPool" and d.since(op) >= 8 and d.chance(0.2):
        wanted, given["storage_order"] = [True, True], d.one([None, 0, 1])
    return d.add(op, [x.name], wanted, kernel_shape=kernel, **given)


@describe("GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool")
def global_pool(d: Draw, op: str) -> DrawnValue:
    x = image(d, op)
    if 0 in x.shape[2:]:
        raise Reject("the mean of nothing")
    return d.add(op, [x.name], p=d.one([None, 1, 2, 3]) if op == "GlobalLpPool" else None)


@describe("LRN")
def lrn(d: Draw, op: str) -> DrawnValue:
    x = image(d, op)
    numbers = {"alpha": [0.01, 0.5, 1e-4], "beta": [0.75, 0.5, 1.0], "bias": [1.0, 2.0]}
    return d.add(op, [x.name], size=d.one([1, 2, 3, 4, 5, 9]), **{k: d.one(v) for k, v in numbers.items() if d.chance(0.5)})


@describe("DepthToSpace", "SpaceToDepth")
def depth_to_space(d: Draw, op: str) -> DrawnValue:
    block = d.one([1, 2, 2, 3])
    mode = d.one([None, "DCR", "CRD"]) if op == "DepthToSpace" and d.takes(op, "mode") else None

    def suits(v: DrawnValue) -> bool:
        return v.shape[1] % block**2 == 0 if op == "DepthToSpace" else v.shape[2] % block == 0 and v.shape[3] % block == 0

    found = [v for v in d.values if v.dtype in d.types(op) and v.rank == 4 and suits(v)]
    if found and d.chance(0.6):
        x = d.one(found)
    else:
        n, c, h, w = d.integer(1, 2), d.integer(1, 3), d.integer(1, 4), d.integer(1, 4)
        shape = (n, c * block**2, h, w) if op == "DepthToSpace" else (n, c, h * block, w * block)
        x = d.fresh(d.dtype(d.types(op)), shape, special=0.2)
    return d.add(op, [x.name], blocksize=block, mode=mode)


@describe("Upsample")
def upsample(d: Draw, op: str) -> DrawnValue:
    x = image(d, op, (2 if d.alone else 4, 4))
    # ONNX Runtime copies if the extent is unchanged, for any scale.
    scales = [1.0] * (x.rank - 2) + [d.one([1.0, 2.0, 3.0] if n == 1 else [1.0, 2.0, 3.0, 1.5]) for n in x.shape[-2:]]
    mode = d.one([None, "nearest", "linear"] if "float" in x.dtype else [None, "nearest"])
    if d.since(op) < 9:
        return d.add(op, [x.name], mode=mode, scales=scales)
    return d.add(op, [x.name, d.plain(np.asarray(scales, np.float32))], mode=mode)


@describe("Resize", weight=2)
def resize(d: Draw, op: str) -> DrawnValue:
    since = d.since(op)
    x = image(d, op) if d.chance(0.6) or since < 11 else d.pick(d.types(op), (1, 5))
    if 0 in x.shape:
        raise Reject("nothing to resize")
    modes = [None, "nearest"]
    if "float" in x.dtype:  # the rounding of interpolated integers is undefined
        modes += ["linear", "cubic"] if since >= 11 else ["linear"]
    mode = d.one(modes)
    axes = some_axes(d, x.rank, 1) if since >= 18 and d.chance(0.4) else list(range(x.rank))
    inner = 0 if d.chance(0.15) else 2  # batches and channels usually retain their extent
    scaled = [1.0 if a % x.rank < inner else d.one([1.0, 2.0, 0.5, 1.5, 3.0, 0.75, 0.3, 2.7]) for a in axes]
    if d.alone:  # ONNX Runtime copies if the extent is unchanged, for any factor
        inner = max(x.rank - 2, 0)
        scaled = [
            1.0 if a % x.rank < inner or int(x.shape[a] * f) in (0, x.shape[a]) else f for a, f in zip(axes, scaled, strict=True)
        ]
    if since < 11:
        shrink = d.chance(0.3)
        scaled = [1.0 if a < 2 else d.one([0.5, 1.0] if shrink else [1.0, 2.0, 3.0]) for a in axes]
        return d.add(op, [x.name, d.plain(np.asarray(scaled, np.float32))], mode=mode)
    given = _coordinates(d, op, mode)
    if axes != list(range(x.rank)):
        given["axes"] = axes
    roi = ""
    if given.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        low = [0.0 if s == 1 else d.one([0.0, 0.25, -0.25]) for s in scaled]
        high = [1.0 if s == 1 else d.one([1.0, 0.75, 1.25]) for s in scaled]
        roi = d.plain(np.asarray([*low, *high], np.float32))
    elif since < 13:
        roi = d.plain(np.zeros(0, np.float32))
    if d.chance(0.5):
        sizes = [x.shape[a] if s == 1 else max(1, int(x.shape[a] * s)) for a, s in zip(axes, scaled, strict=True)]
        if since >= 18 and d.chance(0.4):
            given["keep_aspect_ratio_policy"] = d.one(["not_larger", "not_smaller", "stretch"])
        empty = d.plain(np.zeros(0, np.float32)) if since < 13 else ""
        return d.add(op, [x.name, roi, empty, d.static(sizes)], mode=mode, **given)
    return d.add(op, [x.name, roi, d.plain(np.asarray(scaled, np.float32))], mode=mode, **given)


def _coordinates(d: Draw, op: str, mode: str | None) -> dict[str, Any]:
    places = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize"]
    if d.since(op) >= 19:
        places.append("half_pixel_symmetric")
    if d.since(op) == 11 and mode in (None, "nearest"):
        places.append("tf_half_pixel_for_nn")
    given: dict[str, Any] = {}
    if d.chance(0.7):
        given["coordinate_transformation_mode"] = d.one(places)
    if mode in (None, "nearest") and d.chance(0.6):
        given["nearest_mode"] = d.one(["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
    if mode == "cubic" and d.chance(0.6):
        given["cubic_coeff_a"] = d.one([-0.5, -0.75])
    if mode in ("cubic", "linear") and d.chance(0.3):
        given["exclude_outside"] = int(d.alone != "" or mode == "cubic")
    if d.since(op) >= 18 and mode in ("cubic", "linear") and d.chance(0.35):
        given["antialias"] = 1
    if given.get("coordinate_transformation_mode") == "tf_crop_and_resize" and d.chance(0.5):
        given["extrapolation_value"] = 1.5
    return given

"""Extents and paddings of sliding windows, by the formulas of ONNX's operators.

ONNX's shape inference and ``onnx.reference`` differ from them in three cases: windows that would start in the padding after the
image, dilated windows with ``auto_pad``, and quotients rounded towards zero if nothing fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

PADDING_MODES: Final = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")


@dataclass(frozen=True)
class Extent:
    """A spatial dimension of a window (elements): ``out`` positions, paddings ``begin`` and ``end``. Negative paddings crop.
    ``out`` is below 1 if no window fits."""

    out: int
    begin: int
    end: int
    stride: int
    dilation: int


def geometry_of(op: str, attributes: Mapping[str, Any], source: Sequence[int], kernel: Sequence[int]) -> tuple[str, list[Extent]]:
    """Return the padding mode of a convolution or pooling operator, and its extents over ``source``."""
    rank = len(source)
    mode = str(attributes.get("auto_pad") or "NOTSET")
    strides = tuple(attributes.get("strides") or (1,) * rank)
    dilations = tuple(attributes.get("dilations") or (1,) * rank)
    pads = tuple(attributes.get("pads") or (0,) * (2 * rank)) if mode == "NOTSET" else (0,) * (2 * rank)
    ceil = bool(attributes.get("ceil_mode", 0))
    dims = []
    for d in range(rank):
        n, s, span = int(source[d]), int(strides[d]), (int(kernel[d]) - 1) * int(dilations[d]) + 1
        if mode.startswith("SAME"):
            out, begin, end = _same_padding(n, s, span, mode == "SAME_UPPER", crops="Conv" not in op)
        else:
            begin, end = int(pads[d]), int(pads[rank + d])
            # With VALID, the ceil_mode formula ceil((input - span + 1) / stride) equals the one without it.
            out = _count_positions(n, s, span, begin, end, ceil and mode == "NOTSET")
        dims.append(Extent(out, begin, end, s, int(dilations[d])))
    return mode, dims


def _count_positions(n: int, stride: int, span: int, begin: int, end: int, ceil: bool) -> int:
    """Return ``floor((input + pads - span) / stride) + 1``, or with ``ceil``. For ``ceil``, "sliding windows that would start in
    the right padded region are ignored"."""
    room = n + begin + end - span
    if not ceil:
        return room // stride + 1
    out = -(-room // stride) + 1
    return out - 1 if (out - 1) * stride >= n + begin else out


def _same_padding(n: int, stride: int, span: int, upper: bool, crops: bool) -> tuple[int, int, int]:
    """Return ``ceil(input / stride)`` positions and the two paddings.

    ``pad_shape = (output - 1) * stride + span - input`` is split between both sides, the odd element "at the end for SAME_UPPER
    and at the beginning for SAME_LOWER". This is pooling's formula; it crops if a stride skips elements. A convolution only pads.
    """
    out = -(-n // stride)
    total = (out - 1) * stride + span - n
    total = total if crops else max(total, 0)
    half = int(total / 2)
    return (out, half, total - half) if upper else (out, total - half, half)


def transposed_of(attributes: Mapping[str, Any], source: Sequence[int], kernel: Sequence[int]) -> list[Extent]:
    """Return the extents of a transposed convolution; ``end`` is the amount cut off at the end of the full extent."""
    rank = len(source)
    mode = str(attributes.get("auto_pad") or "NOTSET")
    strides = tuple(attributes.get("strides") or (1,) * rank)
    dilations = tuple(attributes.get("dilations") or (1,) * rank)
    extra = tuple(attributes.get("output_padding") or (0,) * rank)
    pads = tuple(attributes.get("pads") or (0,) * (2 * rank)) if mode == "NOTSET" else (0,) * (2 * rank)
    wanted = attributes.get("output_shape")
    dims = []
    for d in range(rank):
        n, s, span = int(source[d]), int(strides[d]), (int(kernel[d]) - 1) * int(dilations[d]) + 1
        full = s * (n - 1) + int(extra[d]) + span
        if wanted:
            out = int(wanted[len(wanted) - rank + d])
        elif mode.startswith("SAME"):
            out = n * s
        else:
            out = full - int(pads[d]) - int(pads[rank + d])
        begin = int(pads[d])
        if wanted or mode.startswith("SAME"):
            total = max(full - out, 0)
            begin = total // 2 if mode == "SAME_UPPER" else total - total // 2
        dims.append(Extent(out, begin, full - out - begin, s, int(dilations[d])))
    return dims

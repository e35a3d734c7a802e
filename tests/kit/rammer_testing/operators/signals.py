"""Transforms, assembled blocks, determinants, and attention with a state."""

from __future__ import annotations

import numpy as np

from rammer_testing.operators.draw import Draw, DrawnValue, Reject
from rammer_testing.operators.registry import describe


@describe("DFT")
def dft(d: Draw, op: str) -> DrawnValue:
    inverse, parts = d.chance(0.3), d.one([1, 2])
    parts = 2 if inverse else parts
    x = d.fresh(d.dtype(("float32", "float64")), (*d.shape(1, 2), d.integer(1, 9), parts), constant=False)
    if 0 in x.shape:
        raise Reject("no signal")
    axis = d.integer(1, x.rank - 2) if x.rank > 2 and d.since(op) < 20 else x.rank - 2
    names = [x.name, d.plain(np.asarray(d.integer(1, 9))) if d.chance(0.4) else ""]
    one = 1 if parts == 1 and d.chance(0.5) else None
    if d.since(op) >= 20:
        names.append(d.plain(np.asarray(axis - d.one([0, x.rank]))) if axis != x.rank - 2 or d.chance(0.7) else "")
        return d.add(op, names, inverse=int(inverse), onesided=one)
    return d.add(op, [n for n in names if n], inverse=int(inverse), onesided=one, axis=axis)


@describe("Col2Im")
def col2im(d: Draw, op: str) -> DrawnValue:
    rank = d.one([1, 2, 2, 3])
    image, block = [d.integer(2, 5) for _ in range(rank)], [d.integer(1, 2) for _ in range(rank)]
    strides, dilations = [d.one([1, 1, 2]) for _ in range(rank)], [d.one([1, 1, 2]) for _ in range(rank)]
    pads = [d.integer(0, 1) for _ in range(2 * rank)]
    counts = [
        (n + pads[i] + pads[rank + i] - (k - 1) * dilations[i] - 1) // strides[i] + 1
        for i, (n, k) in enumerate(zip(image, block, strict=True))
    ]
    if min(counts) < 1:
        raise Reject("nothing fits")
    x = d.fresh(d.dtype(("float32", "float64")), (d.integer(1, 2), d.integer(1, 3) * int(np.prod(block)), int(np.prod(counts))))
    names = [x.name, d.static(image), d.static(block)]
    return d.add(op, names, strides=strides, dilations=dilations, pads=pads)


@describe("Det")
def det(d: Draw, op: str) -> DrawnValue:
    n = d.integer(1, 4)
    return d.add(op, [d.fresh(d.dtype(("float32", "float64")), (*d.shape(0, 2), n, n), -1, 1, constant=False).name])


@describe("LinearAttention")
def linear_attention(d: Draw, op: str) -> DrawnValue:
    batch, steps, heads, group = d.integer(1, 2), d.integer(1, 4), d.integer(1, 2), d.one([1, 1, 2])
    depth, width, rule = d.integer(1, 4), d.integer(1, 4), d.one(["linear", "gated", "delta", "gated_delta"])
    widths = (heads * group * depth, heads * depth, heads * width)
    names = [d.fresh("float32", (batch, steps, n), -1, 1, constant=False).name for n in widths]
    names.append(d.fresh("float32", (batch, heads, depth, width), -1, 1).name if d.chance(0.6) else "")
    gate = (batch, steps, d.one([heads, heads * depth]))
    names.append(d.fresh("float32", gate, -2, 0).name if rule.startswith("gated") else "")
    if rule.endswith("delta"):
        names.append(d.fresh("float32", (batch, steps, d.one([heads, 1])), 0, 1).name)
    given = {"scale": d.one([None, 0.5]), "update_rule": rule, "q_num_heads": heads * group, "kv_num_heads": heads}
    return d.add(op, names, [True, True], **given)

"""Equal results for all tile sizes, connection layers and dialects."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rammer.codegen.dialects import C99
from rammer_testing.host_c import THREADED, case, check

DIALECTS = (C99, replace(C99, name="c99_scalar", vectors=()), THREADED)
SETTINGS = settings(max_examples=12, suppress_health_check=list(HealthCheck))


def values(seed: int, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


@pytest.mark.slow
@SETTINGS
@given(st.data())
def test_windows(data: st.DataObject) -> None:
    """Check depthwise windows with a map before and after, any stride, padding and dilation."""
    stride, pad, kernel, dilation = (data.draw(st.integers(a, b)) for a, b in ((1, 3), (0, 3), (1, 4), (1, 2)))
    height, width = data.draw(st.integers(7, 12)), data.draw(st.integers(7, 40))
    span = (kernel - 1) * dilation + 1
    h, w = ((n + 2 * pad - span) // stride + 1 for n in (height, width))
    if h < 1 or w < 1:
        return
    body = f"pad(a[n, c, h * {stride} + r * {dilation} - {pad}, w * {stride} + s * {dilation} - {pad}], 0.0)"
    texts = [
        f"a: f32[n:2, c:3, y:{height}, x:{width}] = u[n, c, y, x] * 0.5 + 1.0",
        f"b: f32[n:2, c:3, h:{h}, w:{w}] = sum[r:{kernel}, s:{kernel}] {body} * k[c, r, s]",
        f"y: f32[n:2, c:3, h:{h}, w:{w}] = max(b[n, c, h, w] + z[c], 0.0)",
    ]
    if data.draw(st.booleans()):
        texts[1] = f"b: f32[n:2, c:3, h:{h}, w:{w}] = max[r:{kernel}, s:{kernel}] {body.replace('0.0', '-inf')}"
    tile = tuple(data.draw(st.integers(1, n)) for n in (2, 3, h, w))
    layers = {pair: data.draw(st.sampled_from(["thread", "veu"])) for pair in (("a", "b"), ("b", "y"))}
    outputs = data.draw(st.sampled_from([("y",), ("b", "y")]))
    arrays = values(data.draw(st.integers(0, 99)), u=(2, 3, height, width), k=(3, kernel, kernel), z=(3,))
    if not texts[1].count("k["):
        del arrays["k"]
    item = case(texts, arrays, tile, layers, outputs)
    check(item, data.draw(st.sampled_from(DIALECTS)), threads=data.draw(st.integers(1, 5)))


@pytest.mark.slow
@SETTINGS
@given(st.data())
def test_contractions(data: st.DataObject) -> None:
    """Check matrix products with either operand transposed and a row-wise normalisation after them."""
    m, n, k = (data.draw(st.integers(1, 40)) for _ in range(3))
    left, right = data.draw(st.sampled_from(["ik", "ki"])), data.draw(st.sampled_from(["kj", "jk"]))
    extent = {"i": m, "j": n, "k": k}
    texts = [
        f"c: f32[i:{m}, j:{n}] = sum[k:{k}] p[{', '.join(left)}] * q[{', '.join(right)}]",
        f"t: f32[i:{m}] = sum[j:{n}] c[i, j] * c[i, j]",
        f"y: f32[i:{m}, j:{n}] = c[i, j] / sqrt(t[i] + 1.0)",
    ]
    shapes = {"p": tuple(extent[a] for a in left), "q": tuple(extent[a] for a in right)}
    tile = tuple(data.draw(st.integers(1, s)) for s in (m, n))
    layers = {("c", "t"): "veu", ("c", "y"): "veu", ("t", "y"): data.draw(st.sampled_from(["thread", "veu"]))}
    item = case(texts, values(data.draw(st.integers(0, 99)), **shapes), tile, layers)
    check(item, data.draw(st.sampled_from(DIALECTS)), threads=data.draw(st.integers(1, 5)))


@pytest.mark.slow
@SETTINGS
@given(st.data())
def test_rearrangements(data: st.DataObject) -> None:
    """Check index arithmetic without sums: shuffles, shifts, reversals, nearest resizing, broadcasts."""
    c, h, w = data.draw(st.integers(1, 6)) * 2, data.draw(st.integers(2, 9)), data.draw(st.integers(2, 30))
    source = data.draw(
        st.sampled_from(
            [
                f"x[i % 2 * {c // 2} + i // 2, j, k]",
                f"x[i, {h - 1} - j, k]",
                f"x[i, j, {w - 1} - k]",
                "pad(x[i, j - 1, k + 1], 3.0)",
                f"pad(x[i, j, k - {w // 2}], 0.0)",
                "x[i, j // 2, k // 2]",
                "x[i, 0, k]",
                f"x[(i + 1) % {c}, (j - 3) % {h}, k]",
                "where(lt(k, j), x[i, j, k], 0.0)",
            ]
        )
    )
    texts = [
        f"x: f32[i:{c}, j:{h}, k:{w}] = v[i, j, k] + v[i, j, 0]",
        f"y: f32[i:{c}, j:{h}, k:{w}] = {source} * 2.0 + x[i, j, k]",
    ]
    tile = tuple(data.draw(st.integers(1, s)) for s in (c, h, w))
    item = case(
        texts,
        values(data.draw(st.integers(0, 99)), v=(c, h, w)),
        tile,
        data.draw(st.sampled_from(["thread", "veu"])),
    )
    check(item, data.draw(st.sampled_from(DIALECTS)), threads=data.draw(st.integers(1, 5)))

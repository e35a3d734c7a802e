"""Rounding of float16 results that a kernel reads in place: as if they were stored, in every family."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from rammer_testing.nonempty import some

pytest.importorskip("cuda.bindings")

from rammer.device.manifest import Binding
from rammer.errors import DeviceFailure
from rammer.ir.compute import Compute, ComputeGraph
from rammer.ir.evaluate import run_graph
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import dense
from rammer.ir.types import TensorType
from rammer.plan.image_layout import channels_last

from .cuda_on_host import MOST_THREADS, HostSearch, on_host
from .emulator.launch import COMPILER, HostKernel, run_on_host
from rammer_cuda.contraction.choose import PRODUCTS
from rammer_cuda.gpu import TARGETS
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.rows.gemv import GEMV
from rammer_cuda.source import task_kernel
from rammer_cuda.window.kernel import WINDOW, WORDS

NONE: Mapping[str, tuple[int, ...]] = {}

#: A product, and the squares of rows, whose results exceed 65504 before a map reduces some of them.
OPERATORS: Mapping[str, tuple[str, ...]] = {
    "product": (
        "p: f16[m:32, n:32] = sum[k:32] a[m, k] * b[k, n]",
        "s: f16[m:32, n:32] = p[m, n] * 0.0078125",
        "y: f16[m:32, n:32] = s[m, n] + r[m, n]",
    ),
    "rows": (
        "q: f16[m:32, n:32] = r[m, n] * r[m, n]",
        "t: f16[m:32] = max[n:32] q[m, n]",
        "u: f16[m:32, n:32] = q[m, n] - t[m]",
        "y: f16[m:32, n:32] = max(u[m, n], -7.0) + r[m, n]",
    ),
}


#: Matrices times a few vectors: (lines, shapes of the inputs). ``w`` is a constant, ``c`` is computed.
VECTORS: Mapping[str, tuple[tuple[str, ...], Mapping[str, tuple[int, ...]]]] = {
    "packed": (("y: f16[m:1, n:300] = sum[k:256] x[m, k] * w[k, n]",), {"x": (1, 256), "w": (256, 300)}),
    "residual": (
        ("p: f16[m:3, n:100] = sum[k:200] x[m, k] * w[n, k]", "y: f16[m:3, n:100] = max(p[m, n] + r[m, n], 0.0)"),
        {"x": (3, 200), "w": (100, 200), "r": (3, 100)},
    ),
    "odd": (("y: f16[m:2, n:37] = sum[k:77] x[m, k] * w[n, k]",), {"x": (2, 77), "w": (37, 77)}),
    "keys": (("y: f16[h:3, m:1, n:57] = sum[k:64] x[h, m, k] * c[h, n, k]",), {"x": (3, 1, 64), "c": (3, 57, 64)}),
    "values": (("y: f16[h:3, m:1, n:64] = sum[k:57] x[h, m, k] * c[h, k, n]",), {"x": (3, 1, 57), "c": (3, 57, 64)}),
    "float32": (("y: f32[m:8, n:40] = sum[k:512] x[m, k] * w[n, k]",), {"x": (8, 512), "w": (40, 512)}),
    "eight": (
        (
            "q: f32[m:8] = sum[k:512] cast(float32, x[m, k]) * cast(float32, x[m, k])",
            "v: f16[m:8, k:512] = cast(float16, cast(float32, x[m, k]) / sqrt(q[m] + 1.0))",
            "p: f16[m:8, n:100] = sum[k:512] v[m, k] * w[n, k]",
            "y: f16[m:8, n:100] = max(p[m, n] + r[m, n], 0.0)",
        ),
        {"x": (8, 512), "w": (100, 512), "r": (8, 100)},
    ),
    "normalised rows": (
        (
            "q: f32[m:3] = sum[k:200] cast(float32, x[m, k]) * cast(float32, x[m, k])",
            "v: f16[m:3, k:200] = cast(float16, cast(float32, x[m, k]) / sqrt(q[m] + 1.0)) * c[k]",
            "p: f16[m:3, n:100] = sum[k:200] v[m, k] * w[n, k]",
            "y: f16[m:3, n:100] = p[m, n] + r[m, n]",
        ),
        {"x": (3, 200), "c": (200,), "w": (100, 200), "r": (3, 100)},
    ),
    "softmax": (
        (
            "t: f32[h:3, m:1] = max[k:57] cast(float32, x[h, m, k])",
            "e: f32[h:3, m:1, k:57] = exp(cast(float32, x[h, m, k]) - t[h, m])",
            "u: f32[h:3, m:1] = sum[k:57] e[h, m, k]",
            "v: f16[h:3, m:1, k:57] = cast(float16, e[h, m, k] / u[h, m])",
            "y: f16[h:3, m:1, n:64] = sum[k:57] v[h, m, k] * c[h, k, n]",
        ),
        {"x": (3, 1, 57), "c": (3, 57, 64)},
    ),
    "attention": (
        (
            "s: f32[h:3, m:1, k:57] = sum[e:64] q[h, m, e] * d[h, k, e]",
            "z: f32[h:3, m:1, k:57] = s[h, m, k] * 0.125",
            "t: f32[h:3, m:1] = max[k:57] z[h, m, k]",
            "e: f32[h:3, m:1, k:57] = exp(z[h, m, k] - t[h, m])",
            "u: f32[h:3, m:1] = sum[k:57] e[h, m, k]",
            "v: f16[h:3, m:1, k:57] = cast(float16, e[h, m, k] / u[h, m])",
            "y: f16[h:3, m:1, n:64] = sum[k:57] v[h, m, k] * c[h, k, n]",
        ),
        {"q": (3, 1, 64), "d": (3, 57, 64), "c": (3, 57, 64)},
    ),
    "gate": (
        ("v: f16[m:1, k:256] = x[m, k] * x[m, k + 256]", "y: f32[m:1, n:40] = sum[k:256] v[m, k] * w[n, k]"),
        {"x": (1, 512), "w": (40, 256)},
    ),
}

#: Convolutions of channels-last images: the lines and the shapes of the inputs. ``w`` is a constant.
CONVOLUTIONS: Mapping[str, tuple[tuple[str, ...], Mapping[str, tuple[int, ...]]]] = {
    "residual": (
        (
            "p: f16[n:2, c:48, h:6, w:7] = sum[k:64, i:3, j:3] pad(x[n, k, h + i + -1, w + j + -1], 0.0) * w[c, k, i, j]",
            "y: f16[n:2, c:48, h:6, w:7] = max(p[n, c, h, w] + r[n, c, h, w], 0.0)",
        ),
        {"x": (2, 64, 6, 7), "w": (48, 64, 3, 3), "r": (2, 48, 6, 7)},
    ),
    "stride": (
        ("y: f16[n:2, c:40, h:5, w:6] = sum[k:128, i:3, j:3] pad(x[n, k, h * 2 + i + -1, w * 2 + j + -1], 0.0) * w[c, k, i, j]",),
        {"x": (2, 128, 10, 11), "w": (40, 128, 3, 3)},
    ),
    "rows": (
        ("y: f16[n:3, c:20, h:7, w:7] = sum[k:192, i:1, j:3] pad(x[n, k, h + i, w + j + -1], 0.0) * w[c, k, i, j]",),
        {"x": (3, 192, 7, 7), "w": (20, 192, 1, 3)},
    ),
    "few channels": (
        ("y: f16[n:2, c:24, h:9, w:11] = sum[i:5, j:5, k:4] pad(x[n, k, h * 2 + i, w * 2 + j], 0.0) * pad(w[c, k, i, j], 0.0)",),
        {"x": (2, 4, 22, 25), "w": (24, 3, 5, 5)},
    ),
}

#: A depthwise convolution and a pooling of channels-last images.
WINDOWS: Mapping[str, tuple[tuple[str, ...], Mapping[str, tuple[int, ...]]]] = {
    "depthwise": (
        (
            "p: f16[n:2, c:24, h:5, w:6] = sum[i:3, j:3] pad(x[n, c, h * 2 + i + -1, w * 2 + j + -1], 0.0) * w[c, 0, i, j]",
            "y: f16[n:2, c:24, h:5, w:6] = p[n, c, h, w] / (exp(neg(p[n, c, h, w])) + 1.0)",
        ),
        {"x": (2, 24, 9, 11), "w": (24, 1, 3, 3)},
    ),
    "pooling": (
        ("y: f16[n:2, c:16, h:5, w:5] = max[i:2, j:2] pad(x[n, c, h + i + -1, w + j], -inf)",),
        {"x": (2, 16, 5, 6)},
    ),
}


def written(binding: Binding, candidates: Iterable[ROperator]) -> Iterator[tuple[ROperator, TaskKernel]]:
    """Yield the candidates that have a kernel, with it."""
    for tiled in candidates:
        with suppress(DeviceFailure):
            yield tiled, task_kernel(tiled, binding)


def operator_of(lines: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]] = NONE) -> tuple[ROperator, Binding]:
    """Return the lines as one untiled operator of connected Computes; inputs without a shape are 32 x 32."""
    computes = [Compute.parse(line) for line in lines]
    names = {c.name for c in computes}
    links = tuple(Connection(n, c.name, "thread") for c in computes for n in c.reads if n in names)
    operator = ROperator("y", tuple(computes), links, ("y",))
    types = {n: TensorType("float16", shapes.get(n, (32, 32))) for n in operator.inputs} | {c.name: c.type for c in computes}
    storages = {n: dense(n, f"b_{n}", types[n].shape) for n in (*operator.inputs, "y")}
    return operator, Binding(types, storages, frozenset(("w",)) & {*operator.inputs})


def with_channels_last(operator: ROperator, binding: Binding) -> tuple[ROperator, Binding]:
    """Return the operator on channels-last images; ``w`` is a constant."""
    images = {n for n in (*operator.inputs, "y") if n != "w"}
    last = {n: replace(binding.storages[n], strides=channels_last(binding.types[n].shape)) for n in images}
    return operator, replace(binding, storages={**binding.storages, **last})


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not here")
@pytest.mark.parametrize("name", list(OPERATORS))
def test_results_read_in_place_are_rounded(name: str, rng: np.random.Generator) -> None:
    operator, binding = operator_of(OPERATORS[name])
    given = {
        "a": rng.integers(-200, 200, (32, 32)),
        "b": rng.integers(-200, 200, (32, 32)),
        "r": rng.standard_normal((32, 32)) * 200,
    }
    values = {n: given[n].astype(np.float16) for n in operator.inputs}
    graph = ComputeGraph("g", tuple(values), ("y",), operator.computes, binding.types)
    want = run_graph(graph, values, precise=False)["y"]
    assert np.isinf(run_graph(graph, values, precise=False)[operator.computes[0].name]).any()
    search, tried = HostSearch("sm_90a"), set[str]()
    for tiled in search.backend.all_candidates(operator, binding):
        kernel = task_kernel(tiled, binding)
        if tiled.family in tried or not search.backend.fits(tiled, binding) or kernel.blocks > 1 or kernel.threads > MOST_THREADS:
            continue
        tried.add(tiled.family)
        host = HostKernel.of(kernel, binding, values, on_host(kernel), tiled.task_count)
        np.testing.assert_array_equal(run_on_host(host, values)["y"], want, err_msg=f"family {tiled.family}")
    assert len(tried) >= 2, tried


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not here")
@pytest.mark.parametrize("name", list(VECTORS))
def test_matrices_times_vectors_agree_with_float64(name: str, rng: np.random.Generator) -> None:
    """Check kernels of ``gemv`` with tiles that do not divide the result, and a result rounded once."""
    operator, binding = operator_of(*VECTORS[name])
    values = {n: rng.standard_normal(binding.types[n].shape).astype(np.float16) for n in operator.inputs}
    want = run_graph(ComputeGraph("g", tuple(values), ("y",), operator.computes, binding.types), values, precise=True)["y"]
    found = [(o, k) for o, k in written(binding, (c.operator for c in GEMV.candidates(operator, binding, TARGETS["sm_90a"])))]
    found = [(o, k) for o, k in found if k.threads <= MOST_THREADS]
    for place in some(rng.choice(len(found), min(4, len(found)), replace=False)):
        tiled, kernel = found[int(place)]
        have = run_on_host(HostKernel.of(kernel, binding, values, on_host(kernel), tiled.task_count), values)["y"]
        rounding = 2.0**-11 if operator.anchor.dtype == "float16" else 1e-6
        steps = 2 * rounding * (len(operator.computes) - 1)  # an intermediate result is rounded, too
        steps += 2.0**-9 * (operator.computes[0].kind != "contraction" or len(operator.computes) > 4)  # and rows before it
        bound = rounding * np.abs(want) + (steps + 1e-5) * np.abs(want).max()
        assert (np.abs(have.astype(np.float64) - want) <= bound).all(), tiled.head()


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not here")
@pytest.mark.parametrize("halo", [0, 1])
@pytest.mark.parametrize("name", list(CONVOLUTIONS))
def test_channels_last_convolutions_agree_with_float64(name: str, halo: int, rng: np.random.Generator) -> None:
    """Check rings with and without a halo, with tiles that do not divide the result; results are stored four at a time."""
    operator, binding = with_channels_last(*operator_of(*CONVOLUTIONS[name]))
    values = {n: rng.standard_normal(binding.types[n].shape).astype(np.float16) for n in operator.inputs}
    want = run_graph(ComputeGraph("g", tuple(values), ("y",), operator.computes, binding.types), values, precise=True)["y"]
    tiled = (o for f in PRODUCTS for o in (c.operator for c in f.candidates(operator, binding, TARGETS["sm_90a"])))
    found = [(o, k) for o, k in written(binding, tiled) if dict(o.config).get("halo", 0) == halo]
    found = [(o, k) for o, k in found if k.threads <= MOST_THREADS and k.blocks == 1]
    assert bool(found) == (name != "few channels" or not halo)
    if not found:
        return
    for place in some(rng.choice(len(found), min(3, len(found)), replace=False)):
        chosen, kernel = found[int(place)]
        have = run_on_host(HostKernel.of(kernel, binding, values, on_host(kernel), chosen.task_count), values)["y"]
        assert np.abs(have.astype(np.float64) - want).max() <= 2.0**-10 * np.abs(want).max(), chosen.head()
        assert "four columns" in kernel.body or chosen.tile[1] % 4, chosen.head()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not here")
@pytest.mark.parametrize("deep", [2, 4, 8])
@pytest.mark.parametrize("name", list(WINDOWS))
def test_channels_of_windows_are_words(name: str, deep: int, rng: np.random.Generator) -> None:
    """Check windows whose threads load and store several channels at once, beside padding."""
    operator, binding = with_channels_last(*operator_of(*WINDOWS[name]))
    values = {n: rng.standard_normal(binding.types[n].shape).astype(np.float16) for n in operator.inputs}
    want = run_graph(ComputeGraph("g", tuple(values), ("y",), operator.computes, binding.types), values, precise=True)["y"]
    tiled = (c.operator for c in WINDOW.candidates(operator, binding, TARGETS["sm_90a"]))
    found = [(o, k) for o, k in written(binding, tiled) if dict(o.config).get("deep", 1) == deep]
    for place in some(rng.choice(len(found), min(3, len(found)), replace=False)):
        chosen, kernel = found[int(place)]
        have = run_on_host(HostKernel.of(kernel, binding, values, on_host(kernel), chosen.task_count), values)["y"]
        assert np.abs(have.astype(np.float64) - want).max() <= 2.0**-9 * np.abs(want).max(), chosen.head()
        assert kernel.body.count(f"*({WORDS[deep].kind} *)") == kernel.body.count("= rm_two_halves") + kernel.body.count(
            "= make_"
        )

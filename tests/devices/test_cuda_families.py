"""The cuda plugin's families beside the matrix products: forms, machine code; on a GPU also results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from rammer.codegen.rowform import joinable, map_form, row_form
from rammer.codegen.task import Unsuited
from rammer.device.manifest import Binding, OpenOptions
from rammer.ir.compute import Compute
from rammer.ir.evaluate import evaluate
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import dense
from rammer.ir.types import TensorType
from rammer.testing.host_cuda import COMPILER, HostArgument, run_on_host

pytest.importorskip("cuda.bindings")

from rammer_cuda.backend import CHOOSERS, CudaBackend, open_backend
from rammer_cuda.kernels.frame import VECTOR
from rammer_cuda.kernels.gemv import gemv_candidates, matvec_of
from rammer_cuda.kernels.rowwise import rowwise_candidates
from rammer_cuda.kernels.window import window_candidates, window_of
from rammer_cuda.source import task_kernel

Case = tuple[ROperator, Binding]


def operator(texts: list[str], shapes: Mapping[str, tuple[int, ...]], constants: str = "", layer: str = "veu",
             dtypes: Mapping[str, str] | None = None) -> Case:  # fmt: skip
    """An operator from the texts of its Computes; its result is the last one's."""
    computes = tuple(Compute.parse(t) for t in texts)
    names = {c.name for c in computes}
    links = tuple(Connection(r, c.name, layer) for c in computes for r in c.reads if r in names)  # type: ignore[arg-type]
    result = ROperator("op", computes, links, (computes[-1].name,))
    types = {n: TensorType((dtypes or {}).get(n, "float32"), s) for n, s in shapes.items()} | {c.name: c.type for c in computes}
    stored = (*result.inputs, *result.outputs)
    return result, Binding(types, {n: dense(n, f"b_{n}", types[n].shape) for n in stored}, frozenset(constants))


def softmax(rows: int, length: int, log: bool = False) -> Case:
    """Scaled scores and their softmax (or its logarithm) along the last axis."""
    last = "(s[i, j] - m[i]) - log(t[i])" if log else "e[i, j] / t[i]"
    i, j = f"i:{rows}", f"j:{length}"
    return operator([f"s: f32[{i}, {j}] = x[i, j] * 0.125", f"m: f32[{i}] = max[{j}] s[i, j]",
                     f"e: f32[{i}, {j}] = exp(s[i, j] - m[i])", f"t: f32[{i}] = sum[{j}] e[i, j]",
                     f"y: f32[{i}, {j}] = {last}"], {"x": (rows, length)})  # fmt: skip


def channel_softmax(channels: int, pixels: int, dtype: str = "f32") -> Case:
    """Softmax over an axis whose elements lie apart."""
    c, p = f"c:{channels}", f"p:{pixels}"
    full = {"f16": "float16", "f32": "float32"}[dtype]
    return operator([f"m: {dtype}[{p}] = max[{c}] x[c, p]", f"e: {dtype}[{c}, {p}] = exp(x[c, p] - m[p])",
                     f"t: {dtype}[{p}] = sum[{c}] e[c, p]", f"y: {dtype}[{c}, {p}] = e[c, p] / t[p]"],
                    {"x": (channels, pixels)}, dtypes={"x": full})  # fmt: skip


def layer_norm(rows: int, length: int) -> Case:
    """A residual added, then normalised over the last axis, scaled and shifted."""
    i, j = f"i:{rows}", f"j:{length}"
    return operator([f"a: f32[{i}, {j}] = x[i, j] + r[i, j]", f"u: f32[{i}] = sum[{j}] a[i, j]",
                     f"m: f32[{i}] = u[i] / {float(length)}",
                     f"v: f32[{i}] = sum[{j}] (a[i, j] - m[i]) * (a[i, j] - m[i])",
                     f"d: f32[{i}] = 1.0 / sqrt((v[i] / {float(length)}) + 1e-05)",
                     f"y: f32[{i}, {j}] = (((a[i, j] - m[i]) * d[i]) * g[j]) + b[j]"],
                    {"x": (rows, length), "r": (rows, length), "g": (length,), "b": (length,)}, "gb")  # fmt: skip


def instance_norm(channels: int, high: int, wide: int) -> Case:
    """Each channel normalised over its image, by the mean of its squares alone."""
    c, hw = f"c:{channels}", f"h:{high}, w:{wide}"
    return operator([f"v: f32[n:1, {c}] = sum[{hw}] x[n, c, h, w] * x[n, c, h, w]",
                     f"y: f32[n:1, {c}, {hw}] = (x[n, c, h, w] / sqrt(v[n, c] + 0.5)) * g[c]"],
                    {"x": (1, channels, high, wide), "g": (channels,)}, "g")  # fmt: skip


def pool_all(channels: int, high: int, wide: int) -> Case:
    """ReLU, then the mean of each image."""
    c, hw = f"c:{channels}", f"p:{high}, q:{wide}"
    return operator([f"r: f32[n:1, {c}, h:{high}, w:{wide}] = max(x[n, c, h, w], 0.0)",
                     f"s: f32[n:1, {c}, h:1, w:1] = sum[{hw}] r[n, c, p, q]",
                     f"y: f32[n:1, {c}, h:1, w:1] = s[n, c, h, w] / {float(high * wide)}"],
                    {"x": (1, channels, high, wide)})  # fmt: skip


def arg_max(rows: int, length: int) -> Case:
    """The first position of the largest element."""
    i, j = f"i:{rows}", f"j:{length}"
    return operator([f"m: f32[{i}] = max[{j}] x[i, j]",
                     f"y: i64[{i}] = min[{j}] where(eq(x[i, j], m[i]), j, {length})"], {"x": (rows, length)})  # fmt: skip


def scale_shift(channels: int, size: int) -> Case:
    """Batch normalisation that nothing could fold, and ReLU."""
    axes, point = f"n:1, c:{channels}, h:{size}, w:{size}", "n, c, h, w"
    return operator([f"t: f32[{axes}] = (x[{point}] * a[c]) + b[c]", f"y: f32[{axes}] = max(t[{point}], 0.0)"],
                    {"x": (1, channels, size, size), "a": (channels,), "b": (channels,)}, "ab", "thread")  # fmt: skip


def turned(rows: int, columns: int) -> Case:
    """A transposed copy."""
    return operator([f"y: f32[i:{rows}, j:{columns}] = x[j, i] + 1.0"], {"x": (columns, rows)})


def shifted(rows: int, columns: int) -> Case:
    """Rows shifted by one with zeros, plus their position."""
    return operator([f"y: f32[i:{rows}, j:{columns}] = pad(x[i, j + 1], 0.0) + table(float32, {[0.5] * columns}, j)"],
                    {"x": (rows, columns)})  # fmt: skip


def taken(rows: int, length: int, columns: int) -> Case:
    """Rows looked up in a table."""
    return operator([f"y: f32[i:{rows}, j:{columns}] = pad(x[k[i], j], 0.0)"], {"x": (length, columns), "k": (rows,)},
                    dtypes={"k": "int64"})  # fmt: skip


def matvec(vectors: int, depth: int, rows: int, turned: bool = False, constant: bool = True) -> Case:
    """``vectors`` products with one matrix, a bias and a ReLU; ``turned`` stores the matrix products first."""
    w, shape = ("w[k, n]", (depth, rows)) if turned else ("w[n, k]", (rows, depth))
    m, n = f"m:{vectors}", f"n:{rows}"
    return operator([f"s: f32[{m}, {n}] = sum[k:{depth}] x[m, k] * {w}", f"a: f32[{m}, {n}] = s[m, n] + b[n]",
                     f"y: f32[{m}, {n}] = max(a[m, n] + r[m, n], 0.0)"],
                    {"x": (vectors, depth), "w": shape, "b": (rows,), "r": (vectors, rows)},
                    "wb" if constant else "b", "thread")  # fmt: skip


def depthwise(channels: int, size: int, kernel: int, stride: int) -> Case:
    """A padded depthwise convolution with bias and ReLU6."""
    out, pad = (size - 1) // stride + 1, kernel // 2
    axes = f"n:1, m:{channels}, h:{out}, w:{out}"
    index = ", ".join(f"(({a} * {stride}) + k{a}) + -{pad}" for a in "hw")
    return operator([f"s: f32[{axes}] = sum[kh:{kernel}, kw:{kernel}] pad(x[n, m, {index}], 0.0) * f[m, 0, kh, kw]",
                     f"a: f32[{axes}] = s[n, m, h, w] + b[m]", f"y: f32[{axes}] = min(max(a[n, m, h, w], 0.0), 6.0)"],
                    {"x": (1, channels, size, size), "f": (channels, 1, kernel, kernel), "b": (channels,)}, "fb",
                    "thread")  # fmt: skip


def max_pool(channels: int, size: int, out: int) -> Case:
    """3 by 3 windows at stride 2 that may reach over the end (ceil mode)."""
    axes = f"n:1, c:{channels}, h:{out}, w:{out}"
    return operator([f"y: f32[{axes}] = max[kh:3, kw:3] pad(x[n, c, (h * 2) + kh, (w * 2) + kw], -1e30)"],
                    {"x": (1, channels, size, size)})  # fmt: skip


def average_pool(channels: int, size: int) -> Case:
    """3 by 3 windows; padding does not count."""
    axes = f"n:1, c:{channels}, h:{size}, w:{size}"
    counts = str([2.0, *[3.0] * (size - 2), 2.0])
    return operator([f"s: f32[{axes}] = sum[kh:3, kw:3] pad(x[n, c, (h + kh) + -1, (w + kw) + -1], 0.0)",
                     f"y: f32[{axes}] = s[n, c, h, w] / (table(float32, {counts}, h) * table(float32, {counts}, w))"],
                    {"x": (1, channels, size, size)}, "", "thread")  # fmt: skip


ROWS = {
    "softmax": softmax(37, 128), "long softmax": softmax(3, 1000), "odd softmax": softmax(5, 77), "log": softmax(9, 260, True),
    "layer norm": layer_norm(19, 768), "odd layer norm": layer_norm(6, 333), "instance norm": instance_norm(10, 6, 14),
    "pool": pool_all(33, 7, 7), "even pool": pool_all(20, 8, 8), "arg max": arg_max(21, 50), "long": softmax(2, 8192),
    "channels": channel_softmax(21, 60),
}  # fmt: skip
VECTORS = {
    "one": matvec(1, 256, 100), "four": matvec(4, 256, 60), "eight": matvec(8, 96, 33), "turned": matvec(2, 512, 40, True),
    "odd": matvec(3, 77, 50, True), "deep": matvec(1, 12544, 24), "computed": matvec(2, 128, 30, constant=False),
}  # fmt: skip
WINDOWS = {
    "depthwise": depthwise(13, 17, 3, 1), "strided": depthwise(24, 15, 3, 2), "five": depthwise(8, 16, 5, 1),
    "seven": depthwise(6, 14, 7, 2), "max": max_pool(11, 14, 7), "average": average_pool(9, 17),
}  # fmt: skip
MAPS = {
    "scale": scale_shift(7, 14), "odd scale": scale_shift(9, 7), "turned copy": turned(40, 12), "shifted": shifted(5, 33),
    "taken": taken(11, 2, 24),
}  # fmt: skip
CASES = ROWS | VECTORS | WINDOWS | MAPS


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("case", ["softmax", "odd layer norm", "arg max", "four", "deep", "depthwise", "max"])
def test_machine_code(case: str, target: str) -> None:
    backend = open_backend(OpenOptions(target=target))
    assert isinstance(backend, CudaBackend)
    found = [o for choose in CHOOSERS for _, o in choose(*CASES[case], backend.vdevice, 3)]
    assert found
    for tiled in found[:3]:
        resources = backend.resources(tiled, CASES[case][1])
        assert resources.spills == 0
        assert 10 <= resources.registers <= 255


@pytest.mark.parametrize(
    ("cases", "choose"), [(ROWS | MAPS, rowwise_candidates), (VECTORS, gemv_candidates), (WINDOWS, window_candidates)]
)
def test_families_keep_to_their_operators(cases: dict[str, Case], choose: object) -> None:
    device = open_backend(OpenOptions(target="sm_90a")).vdevice
    for case in cases.values():
        assert [bool(c(*case, device, 1)) for c in CHOOSERS] == [c is choose for c in CHOOSERS]


def test_candidates_start_with_one_of_each_family() -> None:
    backend = open_backend(OpenOptions(target="sm_90a"))
    families = [o.family for o in backend.candidates(*VECTORS["eight"])]
    assert set(families[:4]) == {"gemm", "gemm_tf32x3", "gemv", ""}


def test_rows_are_seen() -> None:
    form = row_form(ROWS["instance norm"][0])
    assert form is not None
    assert ([a.name for a in form.rows], form.length, form.whole) == (["c"], 84, True)
    assert form.element_of == (None, None, 0, 1)
    strides = {"x": (840, 84, 14, 1), "y": (840, 84, 14, 1), "g": (1,)}
    assert joinable(form, strides)
    assert not joinable(form, strides | {"x": (840, 84, 16, 1)}), "rows of the image are not next to each other"
    pooled = row_form(ROWS["pool"][0])
    assert pooled is not None
    assert (pooled.length, pooled.whole) == (49, False)
    position = row_form(ROWS["arg max"][0])
    assert position is not None
    assert joinable(position, {"x": (50, 1)}) is False, "the position itself is used"


def test_reductions_over_different_rows_are_no_row_form() -> None:
    case = operator(["m: f32[i:4] = max[j:6] x[i, j]", "e: f32[i:4, j:6] = x[i, j] - m[i]", "y: f32[j:6] = sum[i:4] e[i, j]"],
                    {"x": (4, 6)})  # fmt: skip
    assert row_form(case[0]) is None


def test_maps_have_rows_as_long_as_memory_allows() -> None:
    case, _ = MAPS["scale"]
    assert row_form(case) is None
    dense_strides = {"x": (1372, 196, 14, 1), "y": (1372, 196, 14, 1), "a": (1,), "b": (1,)}
    for most, names in ((2048, "hw"), (100, "w")):
        form = map_form(case, dense_strides, most)
        assert form is not None
        assert "".join(a.name for a in form.elements) == names
    assert map_form(ROWS["softmax"][0], {}, 2048) is None
    position = map_form(MAPS["shifted"][0], {"x": (33, 1), "y": (33, 1)}, 2048)
    assert position is not None
    assert [a.name for a in position.rows] == ["i"], "a row's padding and table must not see the next row"


def test_forms_refuse() -> None:
    with pytest.raises(Unsuited, match="two matrices"):
        matvec_of(*matvec(16, 64, 64))
    with pytest.raises(Unsuited, match="no long sum"):
        matvec_of(*matvec(1, 8, 64))
    with pytest.raises(Unsuited, match="no window"):
        window_of(softmax(4, 8)[0].__class__("op", softmax(4, 8)[0].computes[1:2], (), ("m",)))
    with pytest.raises(Unsuited, match="no short reduction"):
        window_of(depthwise(4, 40, 13, 1)[0])


def _random(kind: TensorType, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 2, kind.shape) if kind.dtype == "int64" else rng.standard_normal(kind.shape, np.float32)


def _reference(tiled: ROperator, given: Mapping[str, np.ndarray]) -> np.ndarray:
    values = {n: v.astype(np.float64) if v.dtype.kind == "f" else v for n, v in given.items()}
    for c in tiled.computes:
        values[c.name] = evaluate(c, values, precise=True)
    return values[tiled.anchor.name]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("case", sorted(CASES))
def test_kernels_agree_with_float64_on_the_host(case: str) -> None:
    device = open_backend(OpenOptions(target="sm_90a")).vdevice
    untiled, binding = CASES[case]
    rng = np.random.default_rng()
    choices = [o for choose in CHOOSERS for _, o in choose(untiled, binding, device, 200)]
    choices = [o for o in choices if task_kernel(o, binding).threads <= 256] or choices
    for i in rng.choice(len(choices), min(3, len(choices)), replace=False):
        tiled = choices[int(i)]
        given = {n: _random(binding.types[n], rng) for n in tiled.inputs}
        kernel = task_kernel(tiled, binding)
        arguments = [HostArgument(a.tensor, a.written, a.packing and a.packing.make(given[a.tensor])) for a in kernel.arguments]
        have = run_on_host(kernel.text, kernel.entry, arguments, tiled.task_count, kernel.threads, binding, given)["y"]
        want = _reference(tiled, given)
        assert np.linalg.norm(have - want) <= 2e-6 * np.linalg.norm(want), tiled.head()


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(("case", "tile", "config"), [
    ("depthwise", (1, 1, 7, 17), {"high": 2, "wide": 2}), ("average", (1, 2, 5, 17), {"high": 4, "wide": 1}),
    ("four", (4, 7), {"lanes": 16, "columns": 2}), ("odd softmax", (2, 77), {"lanes": 16, "vector": 1}),
    ("pool", (1, 5, 1, 1), {"lanes": 8, "vector": 1}),
])  # fmt: skip
def test_a_task_writes_its_own_part_alone(case: str, tile: tuple[int, ...], config: dict[str, int]) -> None:
    """All of it and nothing else, also where strips and rows do not divide tiles, nor tiles the tensor."""
    untiled, binding = CASES[case]
    family = "gemv" if case in VECTORS else "window" if case in WINDOWS else "rowwise"
    tiled = replace(untiled, tile=tile, family=family, config=tuple(config.items()))
    kernel = task_kernel(tiled, binding)
    given = {n: np.ones(binding.types[n].shape, np.float32) for n in tiled.inputs}
    arguments = [HostArgument(a.tensor, a.written, a.packing and a.packing.make(given[a.tensor])) for a in kernel.arguments]
    for task in (0, 1, tiled.task_count // 2, tiled.task_count - 1):
        blank = np.full(tiled.anchor.shape, np.nan, np.float32)
        have = run_on_host(kernel.text, kernel.entry, arguments, 1, kernel.threads, binding, given | {"y": blank}, task)["y"]
        own = np.zeros(tiled.anchor.shape, bool)
        own[tuple(slice(low, high) for low, high in tiled.task_box(task))] = True
        assert np.array_equal(~np.isnan(have), own), f"task {task} of {tiled.head()}"


@pytest.mark.cuda
@pytest.mark.parametrize("case", sorted(CASES))
def test_every_family_agrees_with_float64(case: str) -> None:
    from rammer_cuda.profiler import whole_program

    backend = open_backend(OpenOptions())
    assert isinstance(backend, CudaBackend)
    untiled, binding = CASES[case]
    rng = np.random.default_rng()
    choices = [o for choose in CHOOSERS for _, o in choose(untiled, binding, backend.vdevice, 200)]
    assert choices
    for i in rng.choice(len(choices), min(10, len(choices)), replace=False):
        tiled = choices[int(i)]
        program, constants = whole_program(tiled, binding)
        inputs = {p.external: _random(binding.types[p.tensor], rng) for p in program.inputs}
        want = _reference(tiled, constants | inputs)
        loaded = backend.load(program, constants)
        have, again = (loaded.run(inputs).outputs["y"] for _ in range(2))
        loaded.close()
        assert np.linalg.norm(have - want) <= 2e-6 * np.linalg.norm(want), tiled.head()
        assert have.tobytes() == again.tobytes()


@pytest.mark.cuda
@pytest.mark.parametrize("case", ["softmax", "odd layer norm", "odd", "strided"])
def test_a_nan_stays_in_its_row(case: str) -> None:
    """NaN reaches exactly the results that depend on it."""
    from rammer_cuda.profiler import whole_program

    backend = open_backend(OpenOptions())
    assert isinstance(backend, CudaBackend)
    untiled, binding = CASES[case]
    for choose in CHOOSERS:
        for _, tiled in choose(untiled, binding, backend.vdevice, 2):
            program, constants = whole_program(tiled, binding)
            inputs = {p.external: np.ones(binding.types[p.tensor].shape, np.float32) for p in program.inputs}
            inputs["x"].reshape(-1)[-1] = np.nan
            want = _reference(tiled, constants | inputs)
            loaded = backend.load(program, constants)
            have = loaded.run(inputs).outputs["y"]
            loaded.close()
            assert np.array_equal(np.isnan(have), np.isnan(want)), tiled.head()
            assert not np.isnan(have).all()


@pytest.mark.cuda
def test_half_precision_rows() -> None:
    """Rows of float16 compute in float32: one rounding, at the store."""
    from rammer_cuda.profiler import whole_program

    backend = open_backend(OpenOptions())
    assert isinstance(backend, CudaBackend)
    untiled, binding = channel_softmax(32, 40, "f16")
    for _, tiled in rowwise_candidates(untiled, binding, backend.vdevice, 4):
        program, constants = whole_program(tiled, binding)
        inputs = {"x": np.random.default_rng().standard_normal((32, 40)).astype(np.float16)}
        want = _reference(tiled, inputs)
        loaded = backend.load(program, constants)
        have = loaded.run(inputs).outputs["y"]
        loaded.close()
        assert have.dtype == np.float16
        assert np.linalg.norm(have - want) <= 4e-4 * np.linalg.norm(want), tiled.head()


def test_rows_apart_are_predicted_slower() -> None:
    device = open_backend(OpenOptions(target="sm_90a")).vdevice
    near, apart = ROWS["softmax"], channel_softmax(128, 37)
    best = [rowwise_candidates(*case, device, 1)[0][0] for case in (softmax(4096, 128), channel_softmax(128, 4096))]
    assert best[0] < best[1]
    assert rowwise_candidates(*near, device, 1)
    assert rowwise_candidates(*apart, device, 1)


def test_vectors_need_aligned_rows() -> None:
    device = open_backend(OpenOptions(target="sm_90a")).vdevice
    for name, wanted in (("softmax", True), ("odd softmax", False)):
        case = ROWS[name]
        vectors = {dict(o.config)["vector"] for _, o in rowwise_candidates(*case, device, 50)}
        assert (VECTOR in vectors) is wanted
    shifted, binding = ROWS["softmax"]
    moved = replace(binding, storages={n: replace(s, offset=2) for n, s in binding.storages.items()})
    from rammer_cuda.kernels.rowwise import rowwise

    best = next(o for _, o in rowwise_candidates(shifted, moved, device, 50) if dict(o.config)["vector"] == VECTOR)
    assert "float4" not in rowwise(best, moved).text
    assert "float4" in rowwise(best, binding).text

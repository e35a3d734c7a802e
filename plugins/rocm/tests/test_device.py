"""The rocm device on any available OpenCL unit: hand-built programs against float64 references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from onnx import helper, numpy_helper

import rammer
from rammer.device.manifest import Array, Backend, Binding, OpenOptions
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable
from rammer.ir.compute import Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import Buffer, Counter, Port, RProgram, Storage, Task, Wait, dense
from rammer_testing.nonempty import some

pytest.importorskip("pyopencl")
from rammer.codegen.task_parameters import Unsuited

from rammer_rocm.backend import OpenClProfiler, random_inputs
from rammer_rocm.panel.recognise import panel_product
from rammer_rocm.plugin import DEVICE
from rammer_rocm.resident import OpenClProgram
from rammer_rocm.table_executor import make_table

if not DEVICE.probe():
    pytest.skip("no OpenCL unit", allow_module_level=True)

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=["single", "waves"])
def backend(request: pytest.FixtureRequest) -> Backend:
    try:
        return DEVICE.open(OpenOptions(options={"executor": request.param}))
    except BadInput:
        pytest.skip("executor=single is for CPUs")


def operator(
    name: str, lines: Sequence[str], tile: tuple[int, ...], layer: str = "thread", family: str = "", **config: int
) -> ROperator:
    """Return an operator whose Computes are all connected at ``layer``."""
    computes = tuple(Compute.parse(line) for line in lines)
    inside = {c.name for c in computes}
    edges = tuple(Connection(p, c.name, layer) for c in computes for p in c.reads if p in inside)  # type: ignore[arg-type]
    return ROperator(name, computes, edges, (computes[-1].name,), tile, family, tuple(sorted(config.items())))


def chain(
    operators: Sequence[ROperator], inputs: Mapping[str, tuple[int, ...]], constants: Mapping[str, tuple[int, ...]], veus: int = 2
) -> RProgram:
    """Return a program that runs the operators one after another, each after all tasks of the previous one."""
    shapes = {**inputs, **constants, **{o.anchor.name: o.anchor.shape for o in operators}}
    last = operators[-1].anchor.name
    kinds = {n: "input" for n in inputs} | {n: "constant" for n in constants} | {last: "output"}
    buffers, place = [], 0
    for name, shape in shapes.items():
        kind, size = kinds.get(name, "arena"), int(np.prod(shape))
        buffers.append(Buffer(f"b_{name}", "float32", size, kind, place if kind == "arena" else 0))  # type: ignore[arg-type]
        place += -(-size * 4 // 64) * 64 if kind == "arena" else 0
    counters = tuple(Counter(f"c_{o.name}", o.name, 0, o.task_count) for o in operators[:-1])
    rows: list[list[Task]] = [[] for _ in range(veus)]
    for number, o in enumerate(operators):
        waits = (Wait(counters[number - 1].name, counters[number - 1].total),) if number else ()
        for veu in range(veus):
            mine = range(veu, o.task_count, veus)
            rows[veu] += [Task(o.name, i, waits if i == veu else ()) for i in mine]
    storages = tuple(dense(n, f"b_{n}", s) for n, s in shapes.items())
    ports = tuple(Port(n.upper(), n) for n in inputs)
    return RProgram(
        "test", "test", ports, (Port("OUT", last),), tuple(buffers), storages, tuple(operators), counters, tuple(map(tuple, rows))
    )


def check(rng: np.random.Generator, backend: Backend, program: RProgram, constants: Mapping[str, Array], runs: int = 2) -> None:
    """Check every output element for fresh inputs in each run. All memory is poisoned before."""
    loaded = backend.load(program, constants)
    assert isinstance(loaded, OpenClProgram)
    for _ in range(runs):
        inputs = {p.external: rng.standard_normal(program.types[p.tensor].shape).astype(np.float32) for p in program.inputs}
        loaded.poison()
        result = loaded.run(inputs)
        values: dict[str, Array] = {**constants, **{p.tensor: inputs[p.external] for p in program.inputs}}
        for compute in (c for o in program.operators for c in o.computes):
            values[compute.name] = evaluate_compute(compute, values, precise=True)
        for port in some(program.outputs):
            expected, got = values[port.tensor], result.outputs[port.external]
            assert got.shape == expected.shape and got.dtype == np.float32
            error = float(np.linalg.norm(got - expected)) / max(float(np.linalg.norm(expected)), 1e-30)
            assert error <= TOLERANCE, f"{port.external}: relative L2 error {error}"
        assert result.seconds > 0
    loaded.close()


def values(rng: np.random.Generator, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def conv(x: str, y: str, c: int, m: int, size: int, k: int, stride: int = 1, groups: int = 1) -> list[str]:
    """Return convolution, bias and relu as three Computes."""
    out, pad = (size + 2 * (k // 2) - k) // stride + 1, k // 2
    channel = f"m // {m // groups} * {c // groups} + c" if groups > 1 else "c"
    rows, cols = (f"{a} * {stride} + k{a} - {pad}" for a in "hw")
    source = f"pad({x}[n, {channel}, {rows}, {cols}], 0.0)"
    axes = f"f32[n:1, m:{m}, h:{out}, w:{out}]"
    return [
        f"{y}_s: {axes} = sum[c:{c // groups}, kh:{k}, kw:{k}] {source} * {y}_w[m, c, kh, kw]",
        f"{y}_b: {axes} = {y}_s[n, m, h, w] + {y}_c[m]",
        f"{y}: {axes} = max({y}_b[n, m, h, w], 0.0)",
    ]


def conv_constants(y: str, c: int, m: int, k: int, groups: int = 1) -> dict[str, tuple[int, ...]]:
    return {f"{y}_w": (m, c // groups, k, k), f"{y}_c": (m,)}


@pytest.mark.sampled(2, of="family")
@pytest.mark.parametrize("family", ["", "panel"])
@pytest.mark.parametrize(
    ("c", "m", "size", "k", "stride", "groups", "tile"),
    [
        (5, 13, 11, 3, 1, 1, (1, 13, 4, 11)),
        (3, 8, 19, 7, 2, 1, (1, 8, 3, 10)),
        (16, 24, 9, 1, 1, 1, (1, 9, 9, 9)),
        (8, 12, 10, 3, 1, 4, (1, 3, 10, 10)),
        (4, 6, 12, 5, 3, 1, (1, 6, 2, 3)),
    ],
)
def test_convolution(
    backend: Backend,
    family: str,
    c: int,
    m: int,
    size: int,
    k: int,
    stride: int,
    groups: int,
    tile: tuple[int, ...],
    rng: np.random.Generator,
) -> None:
    o = operator("A", conv("x", "y", c, m, size, k, stride, groups), tile, family=family, mr=6, nv=2)
    shapes = conv_constants("y", c, m, k, groups)
    check(rng, backend, chain([o], {"x": (1, c, size, size)}, shapes), values(rng, shapes))


def test_two_layers_wait_for_each_other(backend: Backend, rng: np.random.Generator) -> None:
    first = operator("A", conv("x", "t", 3, 8, 14, 3), (1, 8, 5, 14), family="panel", mr=8, nv=1)
    second = operator("B", conv("t", "y", 8, 6, 14, 3), (1, 6, 7, 14))
    shapes = conv_constants("t", 3, 8, 3) | conv_constants("y", 8, 6, 3)
    check(rng, backend, chain([first, second], {"x": (1, 3, 14, 14)}, shapes), values(rng, shapes), runs=5)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "tile", "mr", "nv"),
    [
        (17, 45, 31, (9, 20), 4, 2),
        (1, 77, 50, (1, 33), 1, 8),
        (40, 1, 30, (40, 1), 8, 1),
        (5, 64, 8, (5, 64), 5, 3),
    ],
)
def test_matrix_product(
    backend: Backend, m: int, n: int, k: int, tile: tuple[int, ...], mr: int, nv: int, constant: bool, rng: np.random.Generator
) -> None:
    o = operator("A", [f"y: f32[i:{m}, j:{n}] = sum[k:{k}] a[i, k] * b[k, j]"], tile, family="panel", mr=mr, nv=nv)
    shapes = {"a": (m, k)} if constant else {"a": (m, k), "b": (k, n)}
    fixed = {"b": (k, n)} if constant else {}
    check(rng, backend, chain([o], shapes, fixed), values(rng, fixed))


@pytest.mark.parametrize("tile", [(1, 10, 11), (1, 7, 21)])
def test_transposed_batched_product(backend: Backend, tile: tuple[int, ...], rng: np.random.Generator) -> None:
    line = "y: f32[b:3, i:10, j:21] = sum[d:12] q[b, i, d] * k[b, j, d]"
    o = operator("A", [line], tile, family="panel", mr=5, nv=1)
    check(rng, backend, chain([o], {"q": (3, 10, 12), "k": (3, 21, 12)}, {}), {})


def test_channels_last_convolution(backend: Backend, rng: np.random.Generator) -> None:
    """Check distant columns with adjacent K: the panel is a transposition."""
    line = "y: f32[n:2, m:9, h:6, w:19] = sum[c:5, kh:3] x[n, h + kh, w, c] * v[m, c, kh]"
    o = operator("A", [line], (1, 9, 4, 19), family="panel", mr=3, nv=2)
    check(rng, backend, chain([o], {"x": (2, 8, 19, 5)}, {"v": (9, 5, 3)}), values(rng, {"v": (9, 5, 3)}))


def test_gemm_with_constant_transposed_weights(backend: Backend, rng: np.random.Generator) -> None:
    lines = ["g: f32[n:2, m:50] = sum[k:40] x[n, k] * w[m, k]", "y: f32[n:2, m:50] = g[n, m] + b[m]"]
    shapes = {"w": (50, 40), "b": (50,)}
    o = operator("A", lines, (2, 23), family="panel", mr=2, nv=2)
    check(rng, backend, chain([o], {"x": (2, 40)}, shapes), values(rng, shapes))


def test_computed_operand_and_residual(backend: Backend, rng: np.random.Generator) -> None:
    """Check maps applied while the contraction reads, and an epilogue that reads a second tensor."""
    axes = "f32[n:1, m:10, h:7, w:9]"
    lines = [
        "p: f32[n:1, c:6, h:7, w:9] = max(x[n, c, h, w] * s[c], 0.0)",
        f"t: {axes} = sum[c:6] p[n, c, h, w] * v[m, c]",
        f"y: {axes} = tanh(t[n, m, h, w]) + r[n, m, h, w] * exp(t[n, m, h, w] * 0.1)",
    ]
    shapes = {"s": (6,), "v": (10, 6)}
    o = operator("A", lines, (1, 10, 4, 9), family="panel", mr=4, nv=2)
    check(rng, backend, chain([o], {"x": (1, 6, 7, 9), "r": (1, 10, 7, 9)}, shapes), values(rng, shapes))


@pytest.mark.parametrize("stride, window", [(1, 0), (1, 1), (2, 0), (3, 0)])
def test_operand_computed_before_an_end(backend: Backend, stride: int, window: int, rng: np.random.Generator) -> None:
    """Check maps that end at an index, applied while the contraction reads: zeros follow, as past the length of a range."""
    width, wide = 71, (71 + 2 - 3) // stride + 1
    axes = f"f32[n:1, m:10, w:{wide}]"
    lines = [
        f"p: f32[n:1, c:6, w:{width}] = where(and_(lt(w, 52), not_(lt(w, 3))), x[n, c, w] * s[c], 0.0)",
        f"y: {axes} = sum[c:6, k:3] pad(p[n, c, w * {stride} + k - 1], 0.0) * v[m, c, k]",
    ]
    shapes = {"s": (6,), "v": (10, 6, 3)}
    o = operator("A", lines, (1, 10, -(-wide // 2)), family="panel", mr=4, nv=2, window=window)
    check(rng, backend, chain([o], {"x": (1, 6, width)}, shapes), values(rng, shapes))


def test_depthwise(backend: Backend, rng: np.random.Generator) -> None:
    axes = "f32[n:1, m:9, h:8, w:8]"
    line = f"y: {axes} = sum[kh:3, kw:3] pad(x[n, m, h + kh - 1, w + kw - 1], 0.0) * v[m, 0, kh, kw]"
    shapes = {"v": (9, 1, 3, 3)}
    check(rng, backend, chain([operator("A", [line], (1, 4, 8, 8))], {"x": (1, 9, 8, 8)}, shapes), values(rng, shapes))


@pytest.mark.parametrize("combiner", ["max", "sum"])
def test_pooling(backend: Backend, combiner: str, rng: np.random.Generator) -> None:
    axes = "f32[n:2, c:5, h:6, w:6]"
    line = f"y: {axes} = {combiner}[kh:3, kw:3] x[n, c, h * 2 + kh, w * 2 + kw]"
    check(rng, backend, chain([operator("A", [line], (1, 2, 3, 6))], {"x": (2, 5, 13, 13)}, {}), {})


def test_softmax_is_one_operator(backend: Backend, rng: np.random.Generator) -> None:
    lines = [
        "m: f32[i:7] = max[j:33] x[i, j]",
        "e: f32[i:7, j:33] = exp(x[i, j] - m[i])",
        "s: f32[i:7] = sum[j:33] e[i, j]",
        "y: f32[i:7, j:33] = e[i, j] / s[i]",
    ]
    check(rng, backend, chain([operator("A", lines, (2, 33), layer="veu")], {"x": (7, 33)}, {}), {})


@pytest.mark.slow
def test_random_tiles_of_panels(backend: Backend, rng: np.random.Generator) -> None:
    """Check any tile that the family accepts, including clipped tiles and odd register tiles."""
    for _ in range(4):
        c, m, size, k = (int(rng.integers(lo, hi)) for lo, hi in ((1, 9), (1, 20), (5, 18), (1, 4)))
        c = max(c, 2)
        tile = (1, *(int(rng.integers(1, n + 1)) for n in (m, size, size)))
        mr, nv = int(rng.integers(1, 9)), int(rng.integers(1, 4))
        size = size + (k % 2 == 0)
        o = operator("A", conv("x", "y", c, m, size, k + (k % 2 == 0)), tile, family="panel", mr=mr, nv=nv)
        shapes = conv_constants("y", c, m, k + (k % 2 == 0))
        program = chain([o], {"x": (1, c, size, size)}, shapes)
        try:
            panel_product(o, Binding(program.types, program.storage, frozenset(shapes)))
        except Unsuited:
            continue
        check(rng, backend, chain([o], {"x": (1, c, size, size)}, shapes), values(rng, shapes))


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("c", "m", "size", "k", "tile", "mr", "nv"),
    [
        (3, 10, 11, 3, (1, 10, 4, 11), 8, 2),
        (4, 5, 20, 5, (1, 5, 20, 20), 3, 1),
        (2, 9, 7, 3, (1, 4, 3, 7), 4, 3),
        (5, 6, 33, 3, (1, 6, 1, 33), 6, 2),
        (2, 3, 40, 3, (1, 3, 1, 17), 3, 2),
    ],
)
def test_one_copy_serves_all_taps(
    backend: Backend, c: int, m: int, size: int, k: int, tile: tuple[int, ...], mr: int, nv: int, rng: np.random.Generator
) -> None:
    o = operator("A", conv("x", "y", c, m, size, k), tile, family="panel", mr=mr, nv=nv, window=1)
    shapes = conv_constants("y", c, m, k)
    check(rng, backend, chain([o], {"x": (1, c, size, size)}, shapes), values(rng, shapes))


def test_windows_with_groups_dilation_and_residual(backend: Backend, rng: np.random.Generator) -> None:
    axes = "f32[n:2, m:8, h:9, w:12]"
    source = "pad(x[n, m // 4 * 3 + c, h + kh * 2 - 2, w + kw * 3 - 1], 0.0)"
    lines = [
        f"t: {axes} = sum[c:3, kh:3, kw:2] {source} * v[m, c, kh, kw]",
        f"y: {axes} = t[n, m, h, w] + r[n, m, h, w]",
    ]
    shapes = {"v": (8, 3, 3, 2)}
    o = operator("A", lines, (1, 4, 5, 12), family="panel", mr=4, nv=2, window=1)
    check(rng, backend, chain([o], {"x": (2, 6, 9, 14), "r": (2, 8, 9, 12)}, shapes), values(rng, shapes))


def test_strided_windows_are_refused(backend: Backend, rng: np.random.Generator) -> None:
    o = operator("A", conv("x", "y", 3, 8, 12, 3, stride=2), (1, 8, 6, 6), family="panel", window=1)
    shapes = conv_constants("y", 3, 8, 3)
    if backend.vdevice.threads > 1:
        pytest.skip("panels are for CPUs")
    with pytest.raises(DeviceFailure, match="columns are strided"):
        backend.load(chain([o], {"x": (1, 3, 12, 12)}, shapes), values(rng, shapes))


def test_more_rows_than_units(backend: Backend, rng: np.random.Generator) -> None:
    """Check that a program for many vEUs runs on few."""
    o = operator("A", conv("x", "y", 3, 8, 12, 3), (1, 2, 3, 12))
    shapes = conv_constants("y", 3, 8, 3)
    check(rng, backend, chain([o], {"x": (1, 3, 12, 12)}, shapes, veus=13), values(rng, shapes))


def test_strided_storages(rng: np.random.Generator) -> None:
    """Check two operators that write halves of one buffer, as Concat without a copy."""
    backend = DEVICE.open(OpenOptions())
    halves = [
        operator(name, [f"{y}: f32[n:2, c:3, w:20] = x[n, c, w] * {factor}"], (1, 3, 20))
        for name, y, factor in (("A", "p", 2.0), ("B", "q", 3.0))
    ]
    storages = (
        dense("x", "in", (2, 3, 20)),
        Storage("p", "out", 0, (2, 3, 20), (120, 20, 1)),
        Storage("q", "out", 60, (2, 3, 20), (120, 20, 1)),
        dense("y", "out", (2, 6, 20)),
    )
    buffers = (Buffer("in", "float32", 120, "input"), Buffer("out", "float32", 240, "output"))
    rows = (tuple(Task(o.name, i) for o in halves for i in range(2)), ())
    program = RProgram("t", "t", (Port("x", "x"),), (Port("y", "y"),), buffers, storages, tuple(halves), (), rows)
    loaded = backend.load(program, {})
    x = rng.standard_normal((2, 3, 20)).astype(np.float32)
    got = loaded.run({"x": x}).outputs["y"]
    np.testing.assert_allclose(got, np.concatenate([x * 2, x * 3], axis=1), rtol=1e-6)


def test_profiler_measures(backend: Backend, rng: np.random.Generator) -> None:
    profiler = backend.profiler
    assert isinstance(profiler, OpenClProfiler)
    o = operator("A", conv("x", "y", 8, 16, 16, 3), (1, 16, 8, 16), family="panel", mr=8, nv=2)
    shapes = conv_constants("y", 8, 16, 3)
    program = chain([o], {"x": (1, 8, 16, 16)}, shapes)
    binding = Binding(program.types, program.storage, frozenset(shapes))
    kernel = backend.kernel(o, binding)
    alone, crowded = profiler.task_time(kernel, binding)
    assert 0 < alone < 0.1 and 0 < crowded < 0.1
    assert profiler.resources(kernel, binding).registers == -1
    assert profiler.program_time(program, values(rng, shapes), iterations=3) > 0
    assert set(random_inputs(program, rng)) == {"X"}


def test_candidates_put_panels_first(backend: Backend) -> None:
    o = operator("A", conv("x", "y", 8, 16, 16, 3), ())
    shapes = conv_constants("y", 8, 16, 3)
    tiled = operator("A", conv("x", "y", 8, 16, 16, 3), (1, 16, 8, 16))
    program = chain([tiled], {"x": (1, 8, 16, 16)}, shapes)
    binding = Binding(program.types, program.storage, frozenset(shapes))
    found = backend.candidates(o, binding)
    assert found and found[-1].family == ""
    if backend.vdevice.threads == 1:
        assert found[0].family == "panel"


def test_table_folds_rows_into_runs() -> None:
    o = operator("A", ["y: f32[i:12] = x[i] + 1.0"], (1,))
    table = make_table(chain([o], {"x": (12,)}, {}, veus=3), {"A": 0}, {"A": 5})
    assert table.runs.tolist() == [[0, 5, 0, 4, 3], [0, 5, 1, 4, 3], [0, 5, 2, 4, 3]]
    assert table.filled.tolist() == [3]


def test_refusals() -> None:
    kind = DEVICE.probe()[0].kind
    other = "gpu" if kind == "cpu" else "cpu"
    with pytest.raises(DeviceUnavailable, match=f"is a {kind} .* not a {other}"):
        DEVICE.open(OpenOptions(require=other))
    with pytest.raises(DeviceUnavailable, match="does not exist"):
        DEVICE.open(OpenOptions(index=99))
    with pytest.raises(BadInput, match="no option 'speed'"):
        DEVICE.check_options({"speed": "1"})


def test_too_large_a_program_is_refused(backend: Backend) -> None:
    size = 2**42
    o = operator("A", [f"y: f32[i:{size}] = x[i] + 1.0"], (size // 2,))
    with pytest.raises(DeviceFailure, match="needs 35184372"):
        backend.load(chain([o], {"x": (size,)}, {}), {})


def test_a_kernel_that_does_not_compile_names_the_error() -> None:
    from rammer_rocm.backend import OpenClBackend
    from rammer_rocm.build import build_program

    backend = DEVICE.open(OpenOptions())
    assert isinstance(backend, OpenClBackend)
    with pytest.raises(DeviceFailure, match="does not compile") as caught:
        build_program(backend.context, "__kernel void f(__global float *x) { x[0] = nonsense; }")
    assert "nonsense" in caught.value.where


def test_long_sorts_run_on_the_host_of_a_cpu(backend: Backend, rng: np.random.Generator) -> None:
    if backend.vdevice.threads > 1:
        pytest.skip("a GPU has its own memory")
    for extent, hosted in ((50, []), (5000, ["TopK"])):
        x = rng.integers(0, 99, (2, extent)).astype(np.float32)
        ports = [helper.make_tensor_value_info(n, t, s) for n, t, s in (("x", 1, x.shape), ("v", 1, None), ("i", 7, None))]
        nodes = [helper.make_node("Neg", ["x"], ["n"]), helper.make_node("TopK", ["n", "k"], ["v", "i"])]
        graph = helper.make_graph(nodes, "sort", ports[:1], ports[1:], [numpy_helper.from_array(np.array([40]), "k")])
        with rammer.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), "rocm") as exe:
            found = exe.run({"x": x})
            assert [h.node.node.op for h in exe.prepare({"x": x}).host_nodes] == hosted
        np.testing.assert_array_equal(found["i"], np.argsort(x, kind="stable")[:, :40])
        np.testing.assert_array_equal(found["v"], -np.sort(x)[:, :40])

"""Attention as one kernel: supported forms, fragments and copies on the host, machine code; on a GPU also results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rammer.device.manifest import Binding, OpenOptions
from rammer.ir.compute import Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import Storage, dense
from rammer.ir.types import TensorType
from rammer_testing.host_c import Array
from rammer_testing.nonempty import some

from .emulator.launch import COMPILER

pytest.importorskip("cuda.bindings")

from rammer.codegen.task_parameters import Unsuited

from .warps import random_values, run_warps
from rammer_cuda.attention.cost import ATTENTION
from rammer_cuda.attention.recognise import attention_of, tile_attention
from rammer_cuda.backend import CudaBackend, open_backend

Case = tuple[ROperator, Binding]
LONG = {"f32": "float32", "f16": "float16"}


def head_rows(name: str, heads: int, rows: int, width: int) -> Storage:
    """Return the storage of adjacent heads, as a transformer's projections write and read them."""
    return Storage(name, f"b_{name}", 0, (1, heads, rows, width), (0, width, heads * width, 1))


def attention_texts(sizes: tuple[int, int, int, int, int], kind: str, mask: str, softmax: bool, following_map: bool) -> list[str]:
    """Return the Computes of ``attend``: heads, rows, keys, depth and width."""
    heads, rows, keys, depth, width = sizes
    h, m, n = f"h:{heads}", f"m:{rows}", f"n:{keys}"
    full, row = f"b:1, {h}, {m}, {n}", f"b:1, {h}, {m}"
    add = f" + mask[{mask}]" if mask else ""
    to = (lambda x: f"cast(float32, {x})") if kind == "f16" else (lambda x: x)
    back = (lambda x: f"cast(float16, {x})") if kind == "f16" else (lambda x: x)
    scale = "const(float16, 0.125)" if kind == "f16" else "0.125"
    texts = [
        f"s: {kind}[{full}] = sum[k:{depth}] q[b, h, m, k] * t[b, h, k, n]",
        f"a: {kind}[{full}] = (s[b, h, m, n] * {scale}){add}",
    ]
    if softmax:
        texts += [
            f"x: f32[{row}] = max[{n}] {to('a[b, h, m, n]')}",
            f"e: f32[{full}] = exp({to('a[b, h, m, n]')} - x[b, h, m])",
            f"z: f32[{row}] = sum[{n}] e[b, h, m, n]",
            f"p: {kind}[{full}] = {back('e[b, h, m, n] / z[b, h, m]')}",
        ]
    else:
        texts += [
            f"z: f32[{row}] = sum[{n}] {to('a[b, h, m, n]')} * {to('a[b, h, m, n]')}",
            f"r: f32[{row}] = 1.0 / sqrt(z[b, h, m] + 0.5)",
            f"p: {kind}[{full}] = {back(to('a[b, h, m, n]') + ' * r[b, h, m]')}",
        ]
    texts.append(f"c: {kind}[b:1, {h}, {m}, j:{width}] = sum[l:{keys}] p[b, h, m, l] * v[b, h, l, j]")
    if following_map:
        texts.append(f"y: {kind}[b:1, {h}, {m}, j:{width}] = c[b, h, m, j] + bias[j]")
    return texts


def attend(
    heads: int,
    rows: int,
    keys: int,
    depth: int,
    width: int,
    kind: str = "f32",
    mask: str = "",
    turned: bool = False,
    softmax: bool = True,
    following_map: bool = False,
) -> Case:
    """Return scaled scores, an additive ``mask`` (its indices), softmax in float32 (or division by the sum of squares), and
    context."""
    texts = attention_texts((heads, rows, keys, depth, width), kind, mask, softmax, following_map)
    computes = tuple(Compute.parse(t) for t in texts)
    names = {c.name for c in computes}
    links = tuple(
        Connection(r, c.name, "thread" if (r, c.name) in (("s", "a"), ("z", "r"), ("c", "y")) else "veu")
        for c in computes
        for r in c.reads
        if r in names
    )
    last = computes[-1].name
    operator = ROperator(last, computes, links, (last,))
    shapes = {
        "q": (1, heads, rows, depth),
        "t": (1, heads, depth, keys),
        "v": (1, heads, keys, width),
        "mask": (1, 1, 1 if "m" not in mask.split(", ") else rows, keys),
        "bias": (width,),
    }
    types = {n: TensorType(LONG[kind], shapes[n]) for n in operator.inputs} | {c.name: c.type for c in computes}
    storages = {n: dense(n, f"b_{n}", types[n].shape) for n in operator.inputs if n in ("mask", "bias", "t")}
    storages |= {"q": head_rows("q", heads, rows, depth), "v": head_rows("v", heads, keys, width)}
    storages[last] = head_rows(last, heads, rows, width)
    if not turned:  # keys as the projection writes them, read transposed
        storages["t"] = Storage("t", "b_t", 0, shapes["t"], (0, depth, 1, heads * depth))
    return operator, Binding(types, storages)


CASES = {
    "bert": attend(12, 128, 128, 64, 64),
    "bert half": attend(12, 128, 128, 64, 64, "f16"),
    "ragged": attend(2, 19, 37, 24, 40, mask="b, 0, 0, n"),
    "ragged half": attend(2, 19, 37, 24, 40, "f16", "b, 0, 0, n"),
    "odd": attend(3, 33, 21, 7, 5),
    "odd half": attend(3, 33, 21, 7, 5, "f16"),
    "turned": attend(2, 16, 40, 16, 16, mask="b, 0, m, n", turned=True),
    "turned half": attend(2, 16, 40, 16, 16, "f16", "b, 0, m, n", turned=True),
    "norm": attend(2, 20, 24, 16, 32, softmax=False, following_map=True),
    "norm half": attend(2, 20, 24, 16, 32, "f16", softmax=False),
    "one query": attend(3, 1, 37, 24, 40, mask="b, 0, 0, n"),
    "one query half": attend(3, 1, 37, 24, 40, "f16", "b, 0, 0, n"),
    "long": attend(1, 40, 1024, 32, 32),
    "long half": attend(1, 40, 1000, 32, 32, "f16"),
}
SMALL = [n for n in CASES if "bert" not in n and "long" not in n]


def target(name: str) -> CudaBackend:
    backend = open_backend(OpenOptions(target=name))
    assert isinstance(backend, CudaBackend)
    return backend


def reference(operator: ROperator, values: dict[str, Array]) -> Array:
    known: dict[str, Array] = {n: v.astype(np.float64) for n, v in values.items()}
    for c in operator.computes:
        known[c.name] = evaluate_compute(c, known, precise=True)
    return known[operator.anchor.name]


def blocks(case: Case) -> list[ROperator]:
    """Return one block for each number of warps, chunks and stages that fits."""
    found = ATTENTION.candidates(*case, target("sm_90a").gpu)
    return list({(o.config[0][1], o.config[1][1]): o for _, o in reversed(found)}.values())


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("case", SMALL)
def test_fragments_copies_and_rows_on_the_host(case: str, rng: np.random.Generator) -> None:
    operator, binding = CASES[case]
    options = blocks(CASES[case])
    assert len(options) >= 4
    for option in some(options[int(i)] for i in rng.choice(len(options), 3, replace=False)):
        values = random_values(rng, binding, option.inputs)
        have = run_warps(ATTENTION.kernel(option, binding), option.task_count, binding, values)[operator.anchor.name]
        want = reference(operator, values)
        bound = 2e-3 if "half" in case else 1e-6
        assert np.linalg.norm(have - want) <= bound * np.linalg.norm(want), option.head()


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("numbers", [(1, 2, 16, 2), (2, 1, 32, 2), (1, 1, 8, 3)], ids=str)
def test_a_task_writes_its_own_rows_alone(numbers: tuple[int, int, int, int], rng: np.random.Generator) -> None:
    operator, binding = CASES["ragged"]
    config = dict(zip(("groups", "warps", "chunk", "stages"), numbers, strict=True))
    option = tile_attention(attention_of(operator, binding), config["groups"] * 16, config)
    values = random_values(rng, binding, option.inputs)
    blank = np.full(operator.anchor.shape, np.nan, np.float32)
    for task in range(option.task_count):
        have = run_warps(ATTENTION.kernel(option, binding), 1, binding, values | {"c": blank}, task)["c"]
        own = np.zeros(operator.anchor.shape, bool)
        own[tuple(slice(low, high) for low, high in option.task_box(task))] = True
        assert np.array_equal(~np.isnan(have), own), task


@pytest.mark.sampled(2, of="arch")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("case", sorted(CASES))
def test_machine_code_does_not_spill(case: str, arch: str) -> None:
    backend, (operator, binding) = target(arch), CASES[case]
    offered = [o for o in backend.candidates(operator, binding) if o.family == "attention"]
    assert offered
    for option in offered[:2]:
        resources = backend.resources(option, binding)
        assert resources.spills == 0, option.head()
        assert resources.local_bytes <= backend.gpu.shared


def test_what_is_no_attention() -> None:
    operator, binding = CASES["bert"]
    with pytest.raises(Unsuited, match="one head"):
        attention_of(replace(operator, tile=(1, 2, 16, 64)), binding)
    with pytest.raises(Unsuited, match="too long"):
        attention_of(*attend(1, 16, 1025, 16, 16))
    first = ROperator("a", operator.computes[:2], operator.connections[:1], ("a",))
    with pytest.raises(Unsuited, match="two products"):
        attention_of(first, binding)
    texts = [str(c).replace("max[n:128] a[b, h, m, n]", "max[n:128] a[b, h, n, m]") for c in operator.computes]
    with pytest.raises(Unsuited, match="does not reduce rows"):
        attention_of(replace(operator, computes=tuple(map(Compute.parse, texts))), binding)


def test_a_matrix_read_after_its_place_is_taken_is_declined() -> None:
    operator, binding = CASES["turned"]
    texts = [str(c).replace("e[b, h, m, n] / z", "(e[b, h, m, n] + a[b, h, m, n]) / z") for c in operator.computes]
    links = (*operator.connections, Connection("a", "p", "veu"))
    changed = replace(operator, computes=tuple(map(Compute.parse, texts)), connections=links)
    option = tile_attention(attention_of(changed, binding), 16, {"groups": 1, "warps": 4, "chunk": 16, "stages": 2})
    with pytest.raises(Unsuited, match="a position other"):
        ATTENTION.kernel(option, binding)


def test_its_rate_is_far_above_the_generic_kernels() -> None:
    backend = target("sm_90a")
    other, bound = attend(12, 128, 1025, 64, 64)
    assert backend.rate(*CASES["bert half"]) > 0.12 > backend.rate(other, bound)


@pytest.mark.cuda
@pytest.mark.parametrize("case", sorted(CASES))
def test_attention_agrees_with_float64(case: str, rng: np.random.Generator) -> None:
    from rammer_cuda.backend import whole_program

    operator, binding = CASES[case]
    backend = open_backend(OpenOptions())
    offered = [o for o in backend.candidates(operator, binding) if o.family == "attention"]
    for option in some({o.tile + o.config: o for o in (*offered, *blocks(CASES[case]))}.values()):
        program, _ = whole_program(option, binding)
        values = random_values(rng, binding, option.inputs)
        inputs = {p.external: values[p.tensor] for p in program.inputs}
        loaded = backend.load(program, {})
        have, again = (next(iter(loaded.run(inputs).outputs.values())) for _ in range(2))
        loaded.close()
        want = reference(operator, values)
        bound = 2e-3 if "half" in case else 1e-6
        assert np.linalg.norm(have - want) <= bound * np.linalg.norm(want), option.head()
        assert have.tobytes() == again.tobytes(), option.head()

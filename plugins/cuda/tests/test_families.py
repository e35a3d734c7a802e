"""Families of the cuda plugin other than the matrix products: forms, machine code; on a GPU also results."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from rammer.codegen.rowform import can_join_axes, map_form, row_form
from rammer.codegen.task_parameters import Unsuited
from rammer.device.manifest import OpenOptions
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.operator import ROperator
from rammer.ir.types import TensorType
from rammer_testing.nonempty import some

from .emulator.launch import COMPILER, HostKernel, run_on_host

pytest.importorskip("cuda.bindings")

from families import (
    CASES,
    HALVES,
    MAPS,
    ROWS,
    VECTORS,
    WINDOWS,
    Case,
    channel_softmax,
    depthwise,
    matvec,
    operator,
    softmax,
)

from rammer.codegen.products.window_strips import window_of

from .cuda_choices import OTHERS, choices, others
from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.family import Family
from rammer_cuda.kernels.frame import VECTOR
from rammer_cuda.rows.gemv import GEMV, matvec_of
from rammer_cuda.rows.rowwise import ROWWISE
from rammer_cuda.source import task_kernel
from rammer_cuda.window.kernel import WINDOW


def target() -> CudaBackend:
    backend = open_backend(OpenOptions(target="sm_90a"))
    assert isinstance(backend, CudaBackend)
    return backend


@pytest.mark.sampled(7)
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("case", ["softmax", "odd layer norm", "arg max", "four", "deep", "depthwise", "max"])
def test_machine_code(case: str, target: str) -> None:
    backend = open_backend(OpenOptions(target=target))
    assert isinstance(backend, CudaBackend)
    found = others(backend, *CASES[case], 3)
    assert found
    for tiled in found[:3]:
        resources = backend.resources(tiled, CASES[case][1])
        assert resources.spills == 0
        assert 10 <= resources.registers <= 255


@pytest.mark.parametrize(("cases", "family"), [(ROWS | MAPS, ROWWISE), (VECTORS, GEMV), (WINDOWS, WINDOW)])
def test_families_keep_to_their_operators(cases: dict[str, Case], family: Family) -> None:
    for case in some(cases.values()):
        assert [bool(choices(target(), *case, (f,), 1)) for f in OTHERS] == [f is family for f in OTHERS]


def test_candidates_start_with_one_of_each_family() -> None:
    backend = open_backend(OpenOptions(target="sm_90a"))
    families = [o.family for o in backend.candidates(*VECTORS["eight"])]
    leaders = list(dict.fromkeys(families))
    assert families[: len(leaders)] == leaders, "no second of a family comes before the first of another"
    assert {"gemm", "gemm_tf32x3", "gemv", ""} <= set(leaders) and len(families) > len(leaders)


def test_rows_are_seen() -> None:
    form = row_form(ROWS["instance norm"][0])
    assert form is not None
    assert ([a.name for a in form.rows], form.length, form.whole("y")) == (["c"], 84, True)
    assert form.element_of == (None, None, 0, 1)
    strides = {"x": (840, 84, 14, 1), "y": (840, 84, 14, 1), "g": (1,)}
    assert can_join_axes(form, strides)
    assert not can_join_axes(form, strides | {"x": (840, 84, 16, 1)}), "rows of the image are not next to each other"
    pooled = row_form(ROWS["pool"][0])
    assert pooled is not None
    assert (pooled.length, pooled.whole("y")) == (49, False)
    position = row_form(ROWS["arg max"][0])
    assert position is not None
    assert can_join_axes(position, {"x": (50, 1)}) is False, "the position itself is used"


def test_reductions_over_different_rows_are_no_row_form() -> None:
    case = operator(
        ["m: f32[i:4] = max[j:6] x[i, j]", "e: f32[i:4, j:6] = x[i, j] - m[i]", "y: f32[j:6] = sum[i:4] e[i, j]"], {"x": (4, 6)}
    )
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
    operator_, binding = matvec(1, 64, 64)
    for names, refused in (("xw", False), ("x", True), ("w", True)):
        halves = {n: TensorType("float16", t.shape) if n in names else t for n, t in binding.types.items()}
        with pytest.raises(Unsuited, match="not float16") if refused else nullcontext():
            assert matvec_of(operator_, replace(binding, types=halves)).half
    with pytest.raises(Unsuited, match="no long sum"):
        matvec_of(*matvec(1, 8, 64))
    with pytest.raises(Unsuited, match="no window"):
        window_of(softmax(4, 8)[0].__class__("op", softmax(4, 8)[0].computes[1:2], (), ("m",)), softmax(4, 8)[1])
    with pytest.raises(Unsuited, match="no short reduction"):
        window_of(*depthwise(4, 40, 13, 1))


def _random(kind: TensorType, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 2, kind.shape) if kind.dtype == "int64" else rng.standard_normal(kind.shape, np.float32)


def _reference(tiled: ROperator, given: Mapping[str, np.ndarray]) -> np.ndarray:
    values = {n: v.astype(np.float64) if v.dtype.kind == "f" else v for n, v in given.items()}
    for c in tiled.computes:
        values[c.name] = evaluate_compute(c, values, precise=True)
    return values[tiled.anchor.name]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("case", sorted(CASES))
def test_kernels_agree_with_float64_on_the_host(case: str, rng: np.random.Generator) -> None:
    untiled, binding = CASES[case]
    found = [o for o in others(target(), untiled, binding, 200) if task_kernel(o, binding).blocks == 1]  # clusters need a GPU
    found = [o for o in found if task_kernel(o, binding).threads <= 256] or found
    for i in some(rng.choice(len(found), min(3, len(found)), replace=False)):
        tiled = found[int(i)]
        given = {n: _random(binding.types[n], rng) for n in tiled.inputs}
        kernel = task_kernel(tiled, binding)
        have = run_on_host(HostKernel.of(kernel, binding, given, blocks=tiled.task_count), given)["y"]
        want = _reference(tiled, given)
        assert np.linalg.norm(have - want) <= 2e-6 * np.linalg.norm(want), tiled.head()


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("case", "tile", "config"),
    [
        ("depthwise", (1, 1, 7, 17), {"high": 2, "wide": 2}),
        ("average", (1, 2, 5, 17), {"high": 4, "wide": 1}),
        ("four", (4, 7), {"lanes": 16, "columns": 2}),
        ("odd across", (3, 24), {"lanes": 16, "columns": 4}),
        ("odd softmax", (2, 77), {"lanes": 16, "vector": 1}),
        ("pool", (1, 5, 1, 1), {"lanes": 8, "vector": 1}),
    ],
)
def test_a_task_writes_its_own_part_alone(case: str, tile: tuple[int, ...], config: dict[str, int]) -> None:
    """Check that a task writes exactly its part, also if strips and rows do not divide tiles, or tiles the tensor."""
    untiled, binding = CASES[case]
    family = "gemv" if case in VECTORS else "window" if case in WINDOWS else "rowwise"
    tiled = replace(untiled, tile=tile, family=family, config=tuple(config.items()))
    kernel = task_kernel(tiled, binding)
    given = {n: np.ones(binding.types[n].shape, np.float32) for n in tiled.inputs}
    host = HostKernel.of(kernel, binding, given)
    for task in (0, 1, tiled.task_count // 2, tiled.task_count - 1):
        blank = np.full(tiled.anchor.shape, np.nan, np.float32)
        have = run_on_host(host, given | {"y": blank}, task)["y"]
        own = np.zeros(tiled.anchor.shape, bool)
        own[tuple(slice(low, high) for low, high in tiled.task_box(task))] = True
        assert np.array_equal(~np.isnan(have), own), f"task {task} of {tiled.head()}"


@pytest.mark.cuda
@pytest.mark.parametrize("case", sorted(CASES))
def test_every_family_agrees_with_float64(case: str, rng: np.random.Generator) -> None:
    from rammer_cuda.backend import whole_program

    backend = open_backend(OpenOptions())
    assert isinstance(backend, CudaBackend)
    untiled, binding = CASES[case]
    found = others(backend, untiled, binding, 200)
    assert found
    for i in some(rng.choice(len(found), min(10, len(found)), replace=False)):
        tiled = found[int(i)]
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
    """Check that NaN reaches exactly the dependent results."""
    from rammer_cuda.backend import whole_program

    backend = open_backend(OpenOptions())
    assert isinstance(backend, CudaBackend)
    untiled, binding = CASES[case]
    found = others(backend, untiled, binding, 2)
    assert found
    for tiled in found:
        program, constants = whole_program(tiled, binding)
        inputs = {p.external: np.ones(binding.types[p.tensor].shape, np.float32) for p in program.inputs}
        inputs["x"].reshape(-1)[-1] = np.nan
        want = _reference(tiled, constants | inputs)
        loaded = backend.load(program, constants)
        have = loaded.run(inputs).outputs["y"]
        loaded.close()
        assert np.array_equal(np.isnan(have), np.isnan(want)), tiled.head()
        assert not np.isnan(have).all()


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("case", sorted(HALVES))
def test_float16_is_rounded_once(case: str, rng: np.random.Generator) -> None:
    """Check that float16 values compute in float32 and only the store rounds."""
    untiled, binding = HALVES[case]
    given = {"x": rng.standard_normal(binding.types["x"].shape).astype(np.float16)}
    found = others(target(), untiled, binding, 3)
    assert found
    for tiled in found:
        kernel = task_kernel(tiled, binding)
        have = run_on_host(HostKernel.of(kernel, binding, given, blocks=tiled.task_count), given)["y"]
        want = _reference(tiled, given)
        assert have.dtype == np.float16
        assert np.abs(have - want).max() <= 2**-11 * np.abs(want).max() * 1.01, tiled.head()


def test_rows_apart_are_predicted_slower() -> None:
    def best(case: Case) -> float:
        return choices(target(), *case, (ROWWISE,), 1)[0].seconds

    assert best(softmax(4096, 128)) < best(channel_softmax(128, 4096))
    assert best(ROWS["softmax"]) and best(channel_softmax(128, 37))


def test_vectors_need_aligned_rows() -> None:
    for name, wanted in (("softmax", True), ("odd softmax", False)):
        case = ROWS[name]
        vectors = {dict(o.config)["vector"] for _, o in choices(target(), *case, (ROWWISE,), 50)}
        assert (VECTOR in vectors) is wanted
    shifted, binding = ROWS["softmax"]
    moved = replace(binding, storages={n: replace(s, offset=2) for n, s in binding.storages.items()})
    best = next(o for _, o in choices(target(), shifted, moved, (ROWWISE,), 50) if dict(o.config)["vector"] == VECTOR)
    assert "float4" not in ROWWISE.kernel(best, moved).text
    assert "float4" in ROWWISE.kernel(best, binding).text

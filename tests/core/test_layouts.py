"""The layout pass: moved tensors keep their elements, and ``auto`` chooses the cheaper layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler import policy_choice
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.device.manifest import Backend, Binding
from rammer.errors import DeviceFailure
from rammer.frontend.read.reader import read_model
from rammer.ir.compute import Compute, ComputeGraph, verify_compute_graph
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.evaluate import run_graph
from rammer.ir.operator import RKernel, ROperator
from rammer.ir.parts import Storage
from rammer.ir.program import RProgram, dense
from rammer.ir.types import TensorType
from rammer.passes.compute.pad_channels import pad_channels
from rammer.plan.image_layout import LEAST_GAIN, assign_layouts, channels_last
from rammer.plan.storage import StoragePlan
from rammer.tuning import measure_process
from rammer.tuning.kernel_store import KernelStore
from rammer.tuning.tuner import Tuner
from rammer_testing.small_models import MODELS

Array = np.ndarray[Any, np.dtype[Any]]


TARGET = VDevice(
    "d", "test", 4, (MemoryLayer("far", "device", 1 << 30, 1e9), MemoryLayer("near", "veu", 1 << 20, 1e10)), 1e9, 1e-6
)


def convolution(name: str, source: str, shape: tuple[int, ...]) -> ROperator:
    """Make a 1x1 convolution of ``source`` with an equal number of output channels."""
    n, c, h, w = shape
    line = f"{name}: f32[n:{n}, o:{c}, i:{h}, j:{w}] = sum[k:{c}] {source}[n, k, i, j] * w[o, k]"
    return ROperator(name, (Compute.parse(line),), (), (name,))


def plan_of(storages: Sequence[Storage], inputs: Sequence[str] = ("x",)) -> StoragePlan:
    """Make a plan of float32 tensors; the weights are ``w``."""
    types = {s.tensor: TensorType("float32", s.shape) for s in storages}
    graph = ComputeGraph("net", tuple(inputs), (), (), types, {"w": np.zeros(1, np.float32)})
    weights = dense("w", "w", (1,))
    return StoragePlan(graph, {"w": weights, **{s.tensor: s for s in storages}}, {})


def elements(storage: Storage, memory: Array) -> Array:
    """Return the elements of the buffer that ``storage`` views."""
    steps = [s * memory.itemsize for s in storage.strides]
    return as_strided(memory[storage.offset :], storage.shape, steps)


SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))


@st.composite
def parts(draw: st.DrawFn, shape: tuple[int, ...]) -> Storage:
    """Draw a view of a dense tensor of ``shape``: steps along its axes, which may be swapped, omitted or, with -1, reversed."""
    steps = dense("b", "b", shape).strides
    offset, extents, strides = 0, [], []
    for extent, stride in zip(shape, steps, strict=True):
        low = draw(st.integers(0, extent - 1))
        step = draw(st.sampled_from((1, 2, -1)))
        count = draw(st.integers(1, low + 1 if step < 0 else -(-(extent - low) // step)))
        offset += low * stride
        extents.append(count)
        strides.append(step * stride)
    order = draw(st.permutations(range(4)).map(lambda p: [d for d in p if extents[d] > 1 or d % 2]))
    return Storage("part", "b", offset, tuple(extents[d] for d in order), tuple(strides[d] for d in order))


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_parts_of_a_moved_tensor_have_the_same_elements(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    part = data.draw(parts(shape))
    have = plan_of([dense("x", "x", shape), dense("b", "b", shape), part])
    moved = assign_layouts(have, [convolution("b", "x", shape)]).storages
    values = np.arange(np.prod(shape)).reshape(shape)
    memory = np.empty(values.size, values.dtype)
    elements(moved["b"], memory)[...] = values
    np.testing.assert_array_equal(elements(moved["part"], memory), elements(part, values.ravel()))
    can = shape[1] > 1 and shape[2] * shape[3] > 1
    assert (moved["b"].strides != have.storages["b"].strides) == can and moved["x"] == have.storages["x"]


def test_channels_last_is_nhwc() -> None:
    assert channels_last((2, 3, 4, 5)) == (60, 1, 15, 3)
    assert channels_last((2, 3, 4, 5, 6)) == (360, 1, 90, 18, 3)


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        (0, (2, 3, 20), (60, 20, 1)),
        (0, (6, 4, 5), (20, 5, 1)),
        (0, (2, 3, 5, 4), (60, 20, 4, 1)),
        (119, (120,), (-1,)),
        (0, (3,), (6,)),
    ],
)
def test_a_tensor_that_somebody_reads_across_axes_stays(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Check joined axes, other rows, a full reversal and a diagonal."""
    have = plan_of([dense("x", "x", (2, 3, 4, 5)), dense("b", "b", (2, 3, 4, 5)), Storage("v", "b", offset, shape, strides)])
    assert assign_layouts(have, [convolution("b", "x", (2, 3, 4, 5))]).storages == have.storages


def test_a_squeezed_axis_does_no_harm() -> None:
    have = plan_of([dense("x", "x", (1, 3, 4, 5)), dense("b", "b", (1, 3, 4, 5)), dense("v", "b", (3, 4, 5))])
    moved = assign_layouts(have, [convolution("b", "x", (1, 3, 4, 5))]).storages
    assert moved["v"].strides == (1, 15, 3)


def test_empty_images_stay() -> None:
    have = plan_of([dense("x", "x", (1, 3, 0, 5)), dense("b", "b", (1, 3, 0, 5))])
    assert assign_layouts(have, [convolution("b", "x", (1, 3, 0, 5))]).storages == have.storages


@pytest.mark.parametrize(
    "line",
    [
        "s: f32[b:2, h:3, i:4, j:4] = sum[k:5] q[b, h, i, k] * t[b, h, j, k]",
        "s: f32[b:2, i:4, o:6] = sum[h:3, k:5] q[b, h, i, k] * w[o, h, k]",
    ],
)
def test_attention_has_no_images(line: str) -> None:
    """Check operators of four axes without a sum over the second, or with a further sum over the last."""
    compute = Compute.parse(line)
    have = plan_of([dense("s", "s", compute.shape), *(dense(n, n, (2, 3, 4, 5)) for n in "qt")], ())
    assert assign_layouts(have, [ROperator("s", (compute,), (), ("s",))]).storages == have.storages


def chain_of(length: int) -> tuple[StoragePlan, list[ROperator]]:
    """Make x -> b0 -> b1 ...; x is an input and keeps its layout."""
    shape, names = (1, 2, 3, 3), ["x", *(f"b{i}" for i in range(length))]
    operators = [convolution(new, old, shape) for old, new in pairwise(names)]
    return plan_of([dense(n, n, shape) for n in names]), operators


def moved_in(storages: Mapping[str, Storage]) -> frozenset[str]:
    return frozenset(n for n, s in storages.items() if not s.row_major)


@settings(max_examples=100)
@given(length=st.integers(1, 5), data=st.data())
def test_auto_costs_no_more_than_none_all_or_one_change(length: int, data: st.DataObject) -> None:
    """Check optimality up to LEAST_GAIN, which one change must save of its neighbours' time. Isolated operators are decided like
    brute force."""
    plan, operators = chain_of(length)
    asked: dict[tuple[str, frozenset[str]], float] = {}

    def price(operator: ROperator, storages: Mapping[str, Storage]) -> float:
        key = operator.name, moved_in({t: storages[t] for t in (*operator.inputs, *operator.outputs) if t != "w"})
        if key not in asked:
            asked[key] = data.draw(st.floats(0.1, 10))
        return asked[key]

    def cost(moved: frozenset[str]) -> float:
        return sum(
            price(o, {t: replace(s, strides=channels_last(s.shape)) if t in moved else s for t, s in plan.storages.items()})
            for o in operators
        )

    chosen = moved_in(assign_layouts(plan, operators, price).storages)
    names = [o.name for o in operators]
    others = [frozenset[str](), frozenset(names), *(chosen ^ {n} for n in names)]
    assert cost(chosen) * (1 - LEAST_GAIN) <= min(map(cost, others))
    if length == 1:
        every = chain.from_iterable(combinations(names, k) for k in range(length + 1))
        assert cost(chosen) == min(cost(frozenset(c)) for c in every)


def price_as(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Scale kernel times by ``factor`` for every channels-last tensor of an operator."""
    ask = Tuner.kernels

    def priced(tuner: Tuner, operator: ROperator, binding: Binding) -> tuple[RKernel, ...]:
        scale = factor ** sum(not binding.storages[t].row_major for t in (*operator.inputs, *operator.outputs))
        return tuple(replace(k, alone=k.alone * scale, crowded=k.crowded * scale) for k in ask(tuner, operator, binding))

    monkeypatch.setattr(Tuner, "kernels", priced)


def permuted(rng: np.random.Generator, backend: Backend, layout: str, tune: str = "off") -> tuple[str, ...]:
    """Return the buffers of a small network that the compiler moves."""
    model = read_model(MODELS["images"].build(rng))
    compiler = Compiler(backend, CompileOptions(tune=tune, layout=layout), KernelStore(None))
    (segment,) = compiler.compile_model(model, {}).segments
    assert isinstance(segment, ProgramSegment)
    return segment.program.permuted


@pytest.mark.parametrize(("better", "factor"), [("nhwc", 0.5), ("keep", 2.0)])
def test_the_compiler_asks_the_devices_kernels(
    better: str, factor: float, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Check that ``auto`` moves the same buffers as the better layout: kernels are twice as fast in it."""
    price_as(monkeypatch, factor)
    backend = Registry().open("toy")
    assert permuted(rng, backend, "auto") == permuted(rng, backend, better)
    assert bool(permuted(rng, backend, "auto")) == (better == "nhwc")


@pytest.mark.parametrize(("share", "moves"), [(0.9, True), (0.997, False), (1.5, False)])
def test_a_whole_program_is_measured_where_kernels_are(
    share: float, moves: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Check kernels with a predicted gain; the channels-last program needs ``share`` of the other's time."""
    price_as(monkeypatch, 0.5)
    monkeypatch.setattr(measure_process, "opening_of", lambda backend: None)  # the clock is in this process
    backend = Registry().open("toy")
    profiler = backend.profiler.__class__  # the class under the guard
    monkeypatch.setattr(profiler, "task_time", lambda self, kernel, binding: (kernel.alone, kernel.crowded))
    monkeypatch.setattr(profiler, "program_time", lambda self, program, constants, *runs: share if program.permuted else 1)

    @contextmanager
    def opened(program: RProgram) -> Iterator[Callable[[], float]]:
        yield lambda: share if program.permuted else 1.0

    monkeypatch.setattr(policy_choice, "program_opener", lambda backend, constants: opened)
    assert bool(permuted(rng, backend, "auto", "quick")) == moves


@pytest.mark.parametrize("some", [True, False])
def test_what_does_not_fit_is_not_chosen(some: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Check that the device's error is reported if no layout fits."""
    ask = Tuner.kernels

    def fitting(tuner: Tuner, operator: ROperator, binding: Binding) -> tuple[RKernel, ...]:
        buffers = {binding.storages[t].buffer for t in (*operator.inputs, *operator.outputs)}
        if not (some and all(binding.storages[b].row_major for b in buffers)):
            raise DeviceFailure("no tile fits", where=operator.name)
        return ask(tuner, operator, binding)

    monkeypatch.setattr(Tuner, "kernels", fitting)
    if some:
        assert permuted(rng, Registry().open("toy"), "auto") == ()
        return
    with pytest.raises(DeviceFailure, match="no tile fits"):
        permuted(rng, Registry().open("toy"), "auto")


def test_without_a_layout_images_of_codes_move_alone() -> None:
    """Check that all 8-bit buffers move, and no buffer of another type."""
    shape = (1, 4, 5, 6)
    storages = [dense("x", "x", shape), dense("b", "b", shape), dense("c", "c", shape), dense("d", "d", shape)]
    have, operators = (
        plan_of(storages),
        [convolution("b", "x", shape), convolution("c", "b", shape), convolution("d", "c", shape)],
    )
    types = {**have.graph.types, "b": TensorType("uint8", shape), "d": TensorType("int8", shape)}
    have = replace(have, graph=replace(have.graph, types=types))
    assert moved_in(assign_layouts(have, operators, narrow=True).storages) == {"b", "d"}
    assert moved_in(assign_layouts(have, operators).storages) == {"b", "c", "d"}
    shared = replace(have, storages={**have.storages, "d": replace(have.storages["d"], buffer="c")})
    assert moved_in(assign_layouts(shared, operators, narrow=True).storages) == {"b"}


# --- few channels -----------------------------------------------------------------------------------


def stem(dtype: str = "float16", steps: int = 3, more: tuple[str, ...] = ()) -> ComputeGraph:
    """Return a convolution of an image of 3 channels, which a map converts, with ``steps`` x ``steps`` windows."""
    kind = {"float16": "f16", "float32": "f32"}[dtype]
    lines = (
        f"x: {kind}[n:2, c:3, h:8, w:8] = cast({dtype}, image[n, c, h, w])",
        f"y: {kind}[n:2, m:5, h:4, w:4] = sum[c:3, i:{steps}, j:{steps}] pad(x[n, c, h * 2 + i, w * 2 + j], 0.0) * k[m, c, i, j]",
        *more,
    )
    computes = tuple(map(Compute.parse, lines))
    types = {"image": TensorType("float32", (2, 3, 8, 8)), "k": TensorType(dtype, (5, 3, steps, steps))}
    types |= {c.name: c.type for c in computes}
    values = np.random.default_rng(3).standard_normal(types["k"].shape).astype(dtype)
    return ComputeGraph("stem", ("image",), tuple(c.name for c in computes[1:]), computes, types, {"k": values})


def test_images_of_few_channels_are_padded(rng: np.random.Generator) -> None:
    given = {"image": rng.standard_normal((2, 3, 8, 8)).astype(np.float32)}
    for steps in (2, 3, 7):
        before = stem(steps=steps)
        after = pad_channels(before, replace(TARGET, channels=4))
        verify_compute_graph(after)
        assert [c.shape for c in after.computes] == [(2, 4, 8, 8), (2, 5, 4, 4)]
        assert [r.extent for r in after.computes[1].reduce] == [steps, steps, 4]
        want, have = (run_graph(g, {**given, **g.constants})["y"] for g in (before, after))
        np.testing.assert_allclose(have, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("graph", "channels"),
    [
        (stem(), 1),
        (stem(), 3),
        (stem("float32"), 4),
        (stem(steps=8), 4),
        (stem(more=("z: f16[n:2, c:3, h:8, w:8] = x[n, c, h, w] * 2.0",)), 4),
    ],
    ids=["no groups", "enough channels", "float32", "whole groups of steps", "another reader"],
)
def test_other_images_stay(graph: ComputeGraph, channels: int) -> None:
    assert pad_channels(graph, replace(TARGET, channels=channels)) is graph

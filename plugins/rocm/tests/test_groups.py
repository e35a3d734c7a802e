"""Kernels of GPUs (groups of work-items) on any OpenCL device: products, windows, both executors, and how launches are joined."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import onnx.parser
import pytest
from products import PROLOGUES

import rammer
from rammer.compiled.segments import ProgramSegment
from rammer.device.manifest import OpenOptions
from rammer.errors import DeviceFailure
from rammer.ir.launches import Launch
from rammer_testing.cases import NetCase
from rammer_testing.nonempty import some

pytest.importorskip("pyopencl")
from rammer_testing.single import UntiledOperator, check, subjects, trial_of

from rammer_rocm import opened_unit, persistent_executor
from rammer_rocm.build import build_program
from rammer_rocm.kernels.task import TaskFunction
from rammer_rocm.opencl_runtime import QueuedKernel, import_opencl, units
from rammer_rocm.persistent_executor import PersistentProgram
from rammer_rocm.planned_program import MOST_GROUPS, MOST_PARTS, join_level, launch_levels
from rammer_rocm.plugin import DEVICE

if not DEVICE.probe():
    pytest.skip("no OpenCL unit", allow_module_level=True)

#: Products and windows: groups, strides, dilations, padding, odd offsets, slices, and maps behind them.
CASES = (
    "conv n=1 c=33 m=20 h=9 w=11 k=3 s=1 d=1 p=1 q=0 g=1 off=1 +relu",
    "conv n=2 c=12 m=18 h=13 w=8 k=3 s=2 d=1 p=1 q=1 g=3 off=0 +bias +relu",
    "conv n=1 c=70 m=9 h=5 w=7 k=1 s=1 d=1 p=0 q=0 g=1 off=3 +add",
    "conv n=1 c=3 m=16 h=21 w=19 k=5 s=2 d=2 p=2 q=-1 g=1 off=0 +slice +concat",
    "depthwise n=1 c=13 h=12 w=17 k=3 s=1 d=1 p=1 q=0 off=0 +relu",
    "depthwise n=2 c=6 h=14 w=9 k=5 s=2 d=1 p=2 q=1 off=2",
)


@pytest.fixture(scope="module")
def backend() -> Iterator[Any]:
    """Return the device with kernels of GPUs."""
    made = DEVICE.open(OpenOptions(options={"kernels": "gpu", "executor": "waves"}))
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("text", CASES)
def test_products_and_windows_are_right_in_any_block(backend: Any, text: str, seed: int) -> None:
    """Check every element of random tiles and blocks within an error bound; memory is NaN before."""
    random, tried = Random(seed), Counter[str]()
    for one in some(subjects(NetCase.parse(text), backend)):
        for family in (f for f in backend.usable if f.name in ("ring", "window")):
            choices = list(islice(family.candidates(one.operator, one.binding, backend.unit), 4000))
            split = [c for c in choices if dict(c.operator.config).get("split_k", 1) > 1]
            picked = random.sample(choices, min(3, len(choices))) + random.sample(split, min(2, len(split)))
            for choice in (c for c in picked if backend.fits(c.operator, one.binding)):
                problem = check(backend, choice.operator, trial_of(one, random.randrange(1 << 20)))
                assert problem == "", f"{seed}: {choice.operator.tile} {choice.operator.config}: {problem}"
                tried[family.name] += 1
    assert tried


@pytest.mark.parametrize("name", PROLOGUES)
def test_maps_before_a_product_are_applied_to_staged_elements(
    backend: Any, name: str, seed: int, rng: np.random.Generator
) -> None:
    """Check random tiles, also of shared sums. ReLU does not clip the shifts, so padding before the maps would show."""
    random, (operator, binding) = Random(seed), PROLOGUES[name]
    values = {n: rng.standard_normal(binding.types[n].shape, np.float32) for n in binding.constants}
    one = UntiledOperator(operator, binding, values | {"g": np.abs(values["g"]) + np.float32(0.5)})
    (ring,) = (f for f in backend.usable if f.name == "ring")
    choices = [c.operator for c in islice(ring.candidates(operator, binding, backend.unit), 2000)]
    shared = [o for o in choices if dict(o.config)["split_k"] > 1]
    picked = random.sample(choices, 3) + random.sample(shared, min(2, len(shared)))
    fitting = [o for o in picked if backend.fits(o, binding)]
    for tiled in some(fitting):
        assert "prologue(at, use);" in backend.writer.written(tiled, binding).text
        problem = check(backend, tiled, trial_of(one, random.randrange(1 << 20)))
        assert problem == "", f"{seed}: {tiled.tile} {tiled.config}: {problem}"


def test_groups_that_share_a_sum_add_in_one_order(backend: Any, seed: int) -> None:
    """Check that results repeat bit for bit, though groups arrive in any order."""
    random, one = Random(seed), subjects(NetCase.parse("conv n=1 c=64 m=8 h=4 w=5 k=3 s=1 d=1 p=1 q=0 g=1 off=0"), backend)[0]
    (ring,) = (f for f in backend.usable if f.name == "ring")
    choices = [c.operator for c in islice(ring.candidates(one.operator, one.binding, backend.unit), 2000)]
    shared = [o for o in choices if dict(o.config)["split_k"] > 2 and backend.fits(o, one.binding)]
    operator = random.choice([*some(shared)])
    function = backend.writer.written(operator, one.binding)
    assert function.blocks > 2 and "atomic_inc" in function.text
    for _ in range(3):
        assert check(backend, operator, trial_of(one, seed)) == ""


#: Two products with a softmax between them: at least three levels.
LAYERS = """<ir_version: 8, opset_import: ["" : 17]>
g (float[n,40] x, float[40,48] w_a, float[48,7] w_b) => (float[n,7] y) {
    a = MatMul(x, w_a)
    r = Relu(a)
    s = Softmax(r)
    y = MatMul(s, w_b)
}"""


def layers(rng: np.random.Generator) -> tuple[dict[str, Any], Any]:
    """Return inputs of LAYERS, and the result."""
    x, w_a, w_b = (rng.standard_normal(s, np.float32) for s in ((3, 40), (40, 48), (48, 7)))
    a = np.maximum(x.astype(np.float64) @ w_a, 0)
    e = np.exp(a - a.max(1, keepdims=True))
    return {"x": x, "w_a": w_a, "w_b": w_b}, e / e.sum(1, keepdims=True) @ w_b


@pytest.mark.parametrize("executor", ["waves", "single", "mixed"])
def test_executors_are_right(executor: str, rng: np.random.Generator) -> None:
    exe = rammer.compile(onnx.parser.parse_model(LAYERS), device="rocm", options={"kernels": "gpu", "executor": executor})
    for _ in range(3):
        inputs, wanted = layers(rng)
        assert np.abs(exe.run(inputs)["y"] - wanted).max() < 1e-5
    exe.close()


@pytest.mark.parametrize("executor", ["waves", "single"])
def test_a_bound_call_uses_arrays_with_room_in_place(executor: str, rng: np.random.Generator) -> None:
    import pyopencl.array

    exe = rammer.compile(onnx.parser.parse_model(LAYERS), device="rocm", options={"kernels": "gpu", "executor": executor})
    inputs, wanted = layers(rng)
    bound = exe.bind(inputs)
    assert not bound.notes
    tight = exe.bind({n: pyopencl.array.to_device(bound.stream, a) for n, a in inputs.items()}, stream=bound.stream)
    assert any("copied" in note for note in tight.notes)
    for call in (bound, tight, bound):
        call.run()
        assert np.abs(call.to_host("y")["y"] - wanted).max() < 1e-5
        inputs, wanted = layers(rng)
        assert np.abs(exe.run(inputs)["y"] - wanted).max() < 1e-5
        for other in (bound, tight):
            other.write(inputs)
    exe.close()


#: Maps in a chain, each of which is a level of few groups.
CHAIN = """<ir_version: 8, opset_import: ["" : 17]>
g (float[2] x) => (float[2] y) {
    a = Relu(x)
    b = Tanh(a)
    c = Exp(b)
    d = Neg(c)
    y = Exp(d)
}"""


def test_a_form_of_ranges_is_raced_and_right(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Check that small levels share launches beside those of others, with the caller's arrays in place, also after resets."""
    monkeypatch.setattr(opened_unit, "kind_of", lambda device: "gpu")
    monkeypatch.setattr(PersistentProgram, "_is_small", lambda program, level, veus: level[0].operator != "d")
    exe = rammer.compile(onnx.parser.parse_model(CHAIN), device="rocm", options={"kernels": "gpu"}, fusion="none")
    inputs = {"x": rng.standard_normal(2, np.float32)}
    (segment,) = exe.prepare(exe.checked(inputs)).compiled.segments
    assert isinstance(segment, ProgramSegment)
    assert re.search(r"form \w+, by measurement( before)?: waves [\d.]+ ms, mixed [\d.]+ ms", segment.choice)
    mixed = rammer.compile(
        onnx.parser.parse_model(CHAIN), device="rocm", options={"kernels": "gpu", "executor": "mixed"}, fusion="none"
    )
    assert mixed.prepare(mixed.checked(inputs)).kernels == 3, "three levels, one, and the last one"
    bound = mixed.bind(inputs)
    assert not bound.notes
    for largest in (1 << 30, 1 << 30, 0, 0):
        monkeypatch.setattr(persistent_executor, "LARGEST", largest)
        wanted = np.exp(-np.exp(np.tanh(np.maximum(inputs["x"], 0))))
        bound.run()
        for found in (bound.to_host("y")["y"], mixed.run(inputs)["y"]):
            assert np.abs(found - wanted).max() < 1e-5
        inputs = {"x": rng.standard_normal(2, np.float32)}
        bound.write(inputs)
    with pytest.raises(DeviceFailure, match="for the execution form other, which device rocm does not have"):
        exe.backend.load(replace(segment.program, form="other"), {})
    exe.close()
    mixed.close()


def test_a_run_whose_groups_do_not_all_run_is_reported(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Check that groups give up waiting for groups that have not started, and that the next runs are reported, too."""
    monkeypatch.setattr(persistent_executor, "CPU_POLLS", (1000, 1000))
    monkeypatch.setattr(PersistentProgram, "find_groups", lambda program: 512 * program.device.veus)
    options = {"kernels": "gpu", "executor": "single"}
    exe = rammer.compile(onnx.parser.parse_model(LAYERS), device="rocm", options=options, fusion="none")  # several waves
    inputs, _ = layers(rng)
    for _ in range(2):
        with pytest.raises(DeviceFailure, match="do not run at the same time"):
            exe.run(inputs)
    bound = exe.bind(inputs)
    for wait in (bound.synchronize, bound.to_host):
        bound.run()
        with pytest.raises(DeviceFailure, match="do not run at the same time"):
            wait()
    monkeypatch.setattr(persistent_executor, "LARGEST", 0)  # as if the counters overflowed between the runs
    bound.run()
    bound.run()
    with pytest.raises(DeviceFailure, match="do not run at the same time"):
        bound.seconds()
    exe.close()


def test_a_refused_launch_is_reported() -> None:
    cl = import_opencl()
    context = cl.Context([units()[0]])
    queue, program = cl.CommandQueue(context), build_program(context, "kernel void f() {}")
    with pytest.raises(cl.Error, match="clEnqueueNDRangeKernel failed: INVALID_WORK_GROUP_SIZE"):
        QueuedKernel(queue, cl.Kernel(program, "f"), 3, 2).launch()


def test_launches_that_do_not_depend_share_a_kernel() -> None:
    function = TaskFunction("f", "", (), (), 0, threads=64)
    functions = {n: function for n in "abcd"} | {"e": TaskFunction("g", "", (), (), 0, threads=32)}
    launches = [
        Launch("a", (0,), ()),
        Launch("b", (0, 1), ()),
        Launch("e", (0,), ()),
        Launch("c", (0,), (0,)),
        Launch("d", (0,), (3,)),
    ]
    assert [[x.operator for x in level] for level in launch_levels(launches)] == [["a", "b", "e"], ["c"], ["d"]]
    joined = [kernel for level in launch_levels(launches) for kernel in join_level(level, functions, 2)]
    assert [[x.operator for x in kernel] for kernel in joined] == [["a", "b"], ["e"], ["c"], ["d"]]
    many = [Launch("a", (0,), ()) for _ in range(MOST_PARTS + 1)]
    assert [len(k) for k in join_level(many, functions, 2)] == [MOST_PARTS, 1]
    large = Launch("a", tuple(range(2 * MOST_GROUPS + 1)), ())
    assert [len(k) for k in join_level([large, large], functions, 2)] == [1, 1]

"""Horizontal fusion of small independent operators: one kernel computes the results of all of them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from onnx import TensorProto, helper

from rammer.compiled.segments import Compiled, ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions, Recorded, Span
from rammer.frontend.bind.binder import bind
from rammer.frontend.read.reader import read_model
from rammer.ir.evaluate import run_graph
from rammer.report.measured_trace import summarise_run
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some

from .emulator.launch import COMPILER, HostKernel, run_on_host

pytest.importorskip("cuda.bindings")

from rammer.ir.launches import Launch, make_launches

from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.compile import compile_cubin
from rammer_cuda.horizontal_fusion import LaunchPiece, delay_launches, fuse_launches, pack_launches
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.source import translation_unit
from rammer_cuda.trace import traced_tasks

US = 1e-6


def target() -> CudaBackend:
    backend = open_backend(OpenOptions(target="sm_90a"))
    assert isinstance(backend, CudaBackend)
    return backend


def unrelated(shapes: list[tuple[int, ...]], operators: list[str]) -> Compiled:
    """Return a model of operators, each on a separate input."""
    nodes = [
        helper.make_node(op, [f"x{i}"], [f"y{i}"], **({"axis": -1} if op == "Softmax" else {})) for i, op in enumerate(operators)
    ]
    inputs = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, s) for i, s in enumerate(shapes)]
    outputs = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, s) for i, s in enumerate(shapes)]
    made = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs), opset_imports=[helper.make_opsetid("", 21)], ir_version=9
    )
    return Compiler(target(), store=KernelStore(None)).compile(bind(read_model(made), {}))


def kernels_of(compiled: Compiled) -> tuple[ProgramSegment, Binding, list[Launch], dict[str, TaskKernel]]:
    (segment,) = compiled.segments
    assert isinstance(segment, ProgramSegment)
    binding, backend = Binding.of(segment.program, segment.constants), target()
    kernels = backend.writer.all(segment.program.operators, binding)
    plan, made = fuse_launches(make_launches(segment.program), kernels, segment.program, binding, backend.gpu)
    return segment, binding, plan, made


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_kernel_of_unrelated_operators_is_right(seed: int) -> None:
    """Check on host threads that every part has separate blocks, pointers and a first task."""
    random, rng = Random(seed), np.random.default_rng(seed)
    count = random.randrange(3, 6)
    shapes = [(random.randrange(1, 9), random.choice((3, 17, 33, 64))) for _ in range(count)]
    compiled = unrelated(shapes, [random.choice(("Relu", "Exp", "Tanh", "Softmax", "Neg")) for _ in range(count)])
    segment, binding, plan, kernels = kernels_of(compiled)
    (launch,) = plan
    assert segment.compute is not None
    values = {n: rng.standard_normal(segment.compute.types[n].shape).astype(np.float32) for n in segment.compute.inputs}
    wanted = run_graph(segment.compute, values, precise=True)
    have = run_on_host(HostKernel.of(kernels[launch.operator], binding, values, blocks=len(launch.tasks)), values)
    for port in some(segment.program.outputs):
        np.testing.assert_allclose(have[port.tensor], wanted[port.tensor], rtol=1e-5, atol=1e-6)


def test_parts_of_different_blocks_are_one_kernel() -> None:
    """Check barriers of parts with fewer threads than the kernel: a row of several warps among other parts."""
    compiled = unrelated([(4, 2000), (64, 33), (4, 700), (3, 5)], ["Softmax", "Relu", "Softmax", "Exp"])
    _, _, plan, kernels = kernels_of(compiled)
    (launch,) = plan
    kernel = kernels[launch.operator]
    assert "rm_part_meet<" in kernel.text
    for architecture in ("sm_80", "sm_90a"):
        assert compile_cubin(translation_unit([kernel]), architecture).resources[kernel.entry].spills == 0


def test_a_kernel_of_several_launches_leaves_records() -> None:
    """Check that each part's blocks write records, one per block of the whole launch."""
    _, _, plan, kernels = kernels_of(unrelated([(4, 2000), (64, 33), (4, 700), (3, 5)], ["Softmax", "Relu", "Softmax", "Exp"]))
    (launch,) = plan
    traced = replace(kernels[launch.operator], traced=True)
    code = compile_cubin(translation_unit([traced]), "sm_90a")
    assert code.resources[traced.entry].registers > 0 and traced.text.count("RmPart{block}") >= 4
    assert "__device__ RmRecord *" not in traced.text, "launches of one module share it while they run"


def test_records_of_a_kernel_of_several_launches_are_their_operators(rng: np.random.Generator) -> None:
    """Check that a trace has every task of each original operator exactly once."""
    count = int(rng.integers(3, 9))
    operators = [str(rng.choice(["Relu", "Exp", "Tanh", "Softmax", "Neg"])) for _ in range(count)]
    compiled = unrelated([(int(rng.integers(1, 9)), int(rng.choice([3, 17, 33, 64]))) for _ in range(count)], operators)
    segment, _, plan, kernels = kernels_of(compiled)
    program, tasks = segment.program, list(traced_tasks(plan, kernels))
    assert len(plan) == 1 and len(plan[0].parts) == count
    assert sorted(tasks) == sorted((o.name, k) for o in program.operators for k in range(o.task_count))
    spans = [Span(0, name, task, float(n), n + 1.0) for n, (name, task) in enumerate(tasks)]
    assert [o.tasks for o in some(summarise_run(Recorded(program, spans), 132).operators)] == [
        o.task_count for o in program.operators
    ]


def test_launches_keep_their_order() -> None:
    """Check that a consumer of a fused kernel's result comes after it."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Exp", ["z"], ["b"]),
        helper.make_node("ReduceMax", ["b"], ["c"], keepdims=0),
        helper.make_node("Softmax", ["a"], ["d"], axis=0),
    ]
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", (40, 30)), ("z", (50, 7)))]
    outputs = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
        for n, s in (("a", (40, 30)), ("c", ()), ("d", (40, 30)), ("b", (50, 7)))
    ]
    made = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs), opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    )
    compiled = Compiler(target(), store=KernelStore(None)).compile(bind(read_model(made), {}))
    segment, _, plan, _ = kernels_of(compiled)
    before = make_launches(segment.program)
    assert len(plan) < len(before)
    assert all(p < number for number, launch in enumerate(plan) for p in launch.after)
    names = [o for launch in plan for o in launch.operator.split("__")]
    assert sorted(names) == sorted(x.operator for x in before)


#: Rows by number and length, operators, and a predicate of the text that identifies the chosen scheme.
SCHEMES = {
    "thread": ([(1000000, 4)], ["Softmax"], lambda text: "__shfl" not in text and "__syncthreads" not in text),
    "warp": ([(4096, 100)], ["Softmax"], lambda text: "__shfl" in text and "__syncthreads" not in text),
    "block": ([(16, 4000)], ["Softmax"], lambda text: "__shfl" in text and "__syncthreads" in text),
    "cluster": ([(4, 262144)], ["Softmax"], lambda text: "rm_cluster_meet" in text),
    "mixed": ([(4, 4000), (32, 3), (64, 33)], ["Softmax", "Softmax", "Relu"], lambda text: text.count("rm_part") >= 6),
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_chosen_by_some_case(scheme: str) -> None:
    """Check rows of a thread, a warp, a block or a cluster, and several of these in one kernel."""
    shapes, operators, shows = SCHEMES[scheme]
    _, _, plan, kernels = kernels_of(unrelated(shapes, operators))
    (launch,) = plan
    kernel = kernels[launch.operator]
    assert shows(kernel.text), kernel.text
    assert compile_cubin(translation_unit([kernel]), "sm_90a").resources[kernel.entry].spills == 0


@pytest.mark.cuda
def test_packs_that_run_at_the_same_time_leave_all_records(rng: np.random.Generator) -> None:
    """Check concurrent launches of one module: each writes its records to a separate address."""
    backend = open_backend(OpenOptions(options={"executor": "graph"}))
    compiled = unrelated([(48, 256)] * 48, ["Relu"] * 48)
    (segment,) = compiled.segments
    assert isinstance(segment, ProgramSegment)
    _, _, plan, _ = kernels_of(compiled)
    assert sum(bool(launch.parts) for launch in plan) > 1
    inputs = {f"x{i}": rng.standard_normal((48, 256), np.float32) for i in range(48)}
    for _ in range(5):
        recorded = backend.trace(segment.program, segment.constants, inputs)
        assert {(s.operator, s.index) for s in recorded.spans} == {(t.operator, t.index) for r in segment.program.rows for t in r}


def test_unrelated_small_launches_are_one() -> None:
    assert pack_launches([LaunchPiece((), US, 0.1)] * 4, US) == [(0, 1, 2, 3)]


def test_what_fills_the_device_stands_alone() -> None:
    assert pack_launches([LaunchPiece((), US, 0.7), LaunchPiece((), US, 0.7), LaunchPiece((), US, 0.2)], US) == [(0, 2), (1,)]


def test_a_kernel_that_cannot_stand_beside_others_does_not() -> None:
    assert pack_launches([LaunchPiece((), US, 0.1), LaunchPiece((), US, 0.0), LaunchPiece((), US, 0.1)], US) == [(0, 2), (1,)]


def test_nobody_waits_for_a_longer_one_than_its_own() -> None:
    short, long = LaunchPiece((), US, 0.1), LaunchPiece((), 9 * US, 0.1)
    following = [LaunchPiece((0,), US, 0.0), LaunchPiece((1,), US, 0.0)]
    assert pack_launches([short, long, *following], US)[:2] == [(0,), (1,)]
    assert pack_launches([short, long, LaunchPiece((0, 1), US, 0.0)], US) == [(0, 1), (2,)], (
        "who reads both waits for both anyway"
    )


def test_a_short_launch_joins_the_one_for_which_its_reader_waits() -> None:
    """Check a cast at the start whose reader also waits for the end of a chain: it joins the last link that is longer."""
    after = [(), (), (1,), (2,), (0, 3)]
    plan = [Launch(f"l{i}", (0,), a) for i, a in enumerate(after)]
    pieces = [LaunchPiece(a, s * US, 0.1) for a, s in zip(after, (1, 2, 2, 0.5, 2), strict=True)]
    delayed = delay_launches(plan, pieces)
    assert [(x.operator, x.after) for x in delayed] == [("l1", ()), ("l0", (0,)), ("l2", (0,)), ("l3", (2,)), ("l4", (1, 3))]
    number = {x.operator: i for i, x in enumerate(plan)}
    moved = [replace(pieces[number[x.operator]], after=x.after) for x in delayed]
    assert pack_launches(moved, 2 * US) == [(0,), (1, 2), (3,), (4,)]
    assert delay_launches(plan, [replace(p, share=0.6) for p in pieces]) == plan, "the two do not fit on the device"


def test_random_graphs_stay_in_order(seed: int) -> None:
    """Check that every launch is in one kernel, after its predecessors, with and without delays."""
    random, joined = Random(seed), 0
    for _ in range(200):
        count = random.randrange(1, 30)
        pieces = [
            LaunchPiece(
                tuple(sorted(random.sample(range(i), min(i, random.choice((0, 0, 1, 1, 2)))))),
                random.random() * US,
                random.random() * 0.6,
            )
            for i in range(count)
        ]
        plan = delay_launches([Launch(str(i), (0,), p.after) for i, p in enumerate(pieces)], pieces)
        behind = [{plan[i].operator for i in x.after} for x in plan]
        for x, others in zip(plan, behind, strict=True):
            for i in x.after:
                others |= behind[i]
            assert {str(i) for i in pieces[int(x.operator)].after} <= others
        pieces = [replace(pieces[int(x.operator)], after=x.after) for x in plan]
        found = pack_launches(pieces, 0.5 * US)
        assert sorted(i for p in found for i in p) == list(range(count))
        place = {i: number for number, p in enumerate(found) for i in p}
        for p in found:
            assert sum(pieces[i].share for i in p) <= 1.0 or len(p) == 1
            joined += len(p) > 1
            assert all(place[before] < place[i] for i in p for before in pieces[i].after)
    assert joined > 50

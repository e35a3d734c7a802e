"""Mixed programs of launches, the rows of one persistent kernel, and launches. The reference runs the parts, and a recording
driver receives the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import onnx
import pytest
from zoo.net import Net
from zoo.sequence import lstm_tc
from zoo.speech import deepspeech2

pytest.importorskip("cuda.bindings")

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions
from rammer.errors import DeviceFailure
from rammer.frontend.read.reader import read_model
from rammer.ir.launches import Launch
from rammer.ir.program import RProgram, waves
from rammer.runtime.host_memory import HostMemory, storage_view
from rammer.tuning.kernel_store import KernelStore
from rammer.verify.in_place_state import state_pairs
from rammer_testing.nonempty import some

from .cuda_choices import planned_rows
from rammer_cuda import executor, forms
from rammer_cuda.backend import open_backend
from rammer_cuda.families import family_of
from rammer_cuda.gpu import TARGETS
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.persistent import persistent_executor as persistent
from rammer_cuda.persistent.dataflow import plan_words, shares_memory
from rammer_cuda.persistent.partition import MixedParts, split_parts

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def compiled(model: onnx.ModelProto, options: Mapping[str, str] = MappingProxyType({})) -> ProgramSegment:
    backend = open_backend(OpenOptions(target="sm_90a", options=options))
    (segment,) = Compiler(backend, CompileOptions(), KernelStore(None)).compile_model(read_model(model), {}).segments
    assert isinstance(segment, ProgramSegment)
    return segment


def drawn(rng: np.random.Generator) -> onnx.ModelProto:
    """Return recurrent layers, mostly between products, with a path around them and outputs of each part."""
    net, hidden = Net("drawn", int(rng.integers(1 << 30))), 128
    steps, batch, ways = int(rng.integers(2, 4)), int(rng.integers(1, 3)), int(rng.integers(1, 3))
    before, layers, after = int(rng.integers(0, 3)), int(rng.integers(1, 4 - ways)), int(rng.integers(0, 3))
    x = net.input("x", (steps, batch, 128))
    for _ in range(before):
        x = net.relu(product(net, x, 128))
    around, outputs = x, [x] if before and rng.integers(2) else []
    for _ in range(layers):
        width = net.shape(x)[-1]
        weights = [net.normal((ways, 4 * hidden, n), 0.1, "w") for n in (width, hidden)]
        operands, way = [x, *weights, net.normal((ways, 8 * hidden), 0.1, "b")], "bidirectional" if ways == 2 else "forward"
        (y,) = net.node_of("LSTM", operands, [(steps, ways, batch, hidden)], hidden_size=hidden, direction=way)
        x = net.reshape(net.transpose(y, (0, 2, 1, 3)), (steps, batch, ways * hidden))
    outputs += [x] if not after or rng.integers(2) else []
    for number in range(after):
        x = product(net, x, 128)
        x = branch(net, x, around, int(rng.integers(3))) if not number else x
    return net.finish(*outputs, *([x] if after else []), fit=False)


def branch(net: Net, x: str, around: str, how: int) -> str:
    """Return ``x`` combined with the earlier value: added, concatenated, or not at all."""
    if how < 2:
        return net.map("Add", x, around) if how else x
    return net.node("Concat", [x, around], (*net.shape(x)[:-1], 256), axis=-1)


def product(net: Net, x: str, width: int) -> str:
    return net.node("MatMul", [x, net.normal((net.shape(x)[-1], width), 0.1, "m")], (*net.shape(x)[:-1], width))


def run_in(program: RProgram, constants: Mapping[str, Array], buffers: Mapping[str, Array]) -> HostMemory:
    """Run a program and return its memory, which shares the ``buffers`` of equal name."""
    memory = HostMemory(program, {n: v for n, v in constants.items() if n in program.storage})
    memory.buffers |= {b.name: buffers[b.name] for b in program.buffers if b.name in buffers and b.kind != "constant"}
    memory.tensors |= {s.tensor: storage_view(memory.buffers[s.buffer], s) for s in program.storages}
    for placed in (placed for wave in waves(program) for placed in wave):
        memory.run_task(program.operator[placed.task.operator], placed.task.index)
    return memory


def results(
    program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array], parts: Sequence[RProgram]
) -> dict[str, Array]:
    """Return the outputs of ``program`` after its ``parts`` have run in order in its memory."""
    memory = HostMemory(program, constants)
    memory.write_inputs(inputs)
    for part in parts:
        run_in(part, constants, memory.buffers)
    return memory.read_outputs()


def parts_of(cut: MixedParts) -> list[RProgram]:
    return [p for p in (cut.before, cut.rows, cut.after) if p is not None]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(24))
def test_parts_compute_what_the_program_does(number: int, rng: np.random.Generator) -> None:
    """Check parts in one memory and in order. Every task is in one part, and operators that hold constants are in the kernel's
    part. A program stays whole if two parts would write one buffer."""
    segment = compiled(drawn(rng), {"executor": "graph"})
    program = planned_rows(open_backend(OpenOptions(target="sm_90a")), segment, (forms.MIXED, forms.HOLDING)).program
    held = {o.name for o in program.operators if family_of(o).persistent}
    if program.form != "mixed":
        written = [program.storage[t].buffer for o in program.operators for t in o.outputs]
        assert program.form == "holding" and (len(held) == len(program.operators) or len({*written}) < len(written))
        return
    cut = split_parts(program)
    parts = parts_of(cut)
    assert sorted(o.name for p in parts for o in p.operators) == sorted(o.name for o in program.operators)
    assert held <= {o.name for o in cut.rows.operators} and len(parts) > 1
    assert sum(p.task_count for p in parts) == program.task_count
    inputs = {p.external: rng.standard_normal(program.types[p.tensor].shape, dtype=np.float32) for p in program.inputs}
    want = results(program, segment.constants, inputs, [program])
    have = results(program, segment.constants, inputs, parts)
    for name, values in some(want.items()):
        np.testing.assert_array_equal(have[name], values)


def speech() -> onnx.ModelProto:
    return deepspeech2(3, frames=12, bins=21, channels=4, layers=1, kernels=((5, 3), (3, 3)))


def test_convolutions_are_launched_before_recurrent_layers_and_what_is_read_behind_them_is_stored() -> None:
    segment = compiled(speech())
    program, cut = segment.program, split_parts(segment.program)
    assert cut.before is not None and cut.after is not None and not shares_memory(program)
    assert [o.name for o in cut.before.operators] == [o.name for o in program.operators[:2]]
    assert [o.name for o in cut.after.operators] == [program.operators[-1].name]
    assert all(family_of(o).persistent for o in some(cut.rows.operators))
    flow = plan_words(cut.rows, Binding.of(cut.rows, segment.constants))
    (awaited,) = {program.storage[t].buffer for o in cut.after.operators for t in o.inputs} & {
        program.storage[t].buffer for o in cut.rows.operators for t in o.outputs
    }
    last = {t for o in cut.rows.operators for t in o.outputs if program.storage[t].buffer == awaited}
    assert last and last <= flow.stored and last & {t for words in flow.words.values() for t in words}


def products() -> onnx.ModelProto:
    net = Net("products", 3)
    return net.finish(product(net, net.input("x", (32, 64)), 32), fit=False)


@pytest.mark.parametrize("key, form", [("lstm", "holding"), ("products", ""), ("speech", "mixed")])
def test_a_program_without_a_part_for_each_has_one_executor(key: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the requested executor of launches around one kernel, which receives the compiled program itself."""
    opened = list[tuple[str, Any]]()
    monkeypatch.setattr(forms, "CudaProgram", lambda *given: opened.append(("graph", given)))
    monkeypatch.setattr(forms, "PersistentProgram", lambda *given: opened.append(("persistent", given)))
    how = {"executor": "mixed", "watchdog": "0.25"}
    model = {"lstm": lambda: lstm_tc(0, layers=2, steps=4), "speech": speech, "products": products}[key]()
    segment = compiled(model, how)
    assert segment.program.form == form
    forms.open_executor(segment.program, segment.constants, TARGETS["sm_90a"], 0, forms.Execution.of(how))
    ((kind, given),) = opened
    assert given[0] is segment.program and kind == ("persistent" if form else "graph")
    assert not form or given[4:] == (250_000_000, True, 512, 1, form == "mixed")


def test_rows_that_mix_the_parts_are_refused() -> None:
    program = compiled(speech()).program
    mixed = tuple(tuple(reversed(row)) for row in program.rows)
    with pytest.raises(DeviceFailure, match="are not in the order of its parts"):
        split_parts(replace(program, rows=mixed))
    with pytest.raises(DeviceFailure, match="no operator of program products holds constants"):
        split_parts(compiled(products()).program)


# --- the graph --------------------------------------------------------------------------------------


class WritingDriver:
    """A driver that records nodes and edges: (before, after, may the later one start early)."""

    CUgraphDependencyType = SimpleNamespace(CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC=1)
    CUkernelNodeAttrID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_COOPERATIVE="cooperative")
    CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC = 1
    CUDA_KERNEL_NODE_PARAMS = CUgraphEdgeData = CUkernelNodeAttrValue = SimpleNamespace

    def __init__(self) -> None:
        self.functions, self.cooperative = list[str](), list[int]()
        self.edges = set[tuple[int, int, bool]]()
        for name in ("cuGraphCreate", "cuGraphInstantiate", "cuGraphDestroy", "cuGraphExecDestroy"):
            setattr(self, name, lambda *given: (0, "a graph"))

    def cuGraphAddKernelNode(self, graph: str, before: list[int], count: int, node: Any) -> tuple[int, int]:
        assert len(before) == count
        self.functions.append(node.func)
        self.edges |= {(b, len(self.functions) - 1, False) for b in before}
        return 0, len(self.functions) - 1

    def cuGraphAddDependencies(self, graph: str, before: list[int], after: list[int], how: Any, count: int) -> tuple[int]:
        assert len(before) == len(after) == count
        self.edges |= {(b, a, how is not None) for b, a in zip(before, after, strict=True)}
        return (0,)

    def cuGraphKernelNodeSetAttribute(self, node: int, kind: str, value: Any) -> tuple[int]:
        assert kind == "cooperative" and value.cooperative == 1
        self.cooperative.append(node)
        return (0,)


def recipe(rng: np.random.Generator, name: str, launches: int) -> executor.Recipe | None:
    """Return ``launches`` launches, each after some of the preceding ones."""
    plan = [Launch(f"{name}{i}", (0, 1), tuple(k for k in range(i) if rng.integers(2))) for i in range(launches)]
    kernels = {x.operator: TaskKernel(x.operator, "", (), "", (), 32, 0) for x in plan}
    return executor.Recipe(plan, kernels, {n: n for n in kernels}, bool(rng.integers(2))) if plan else None


@pytest.mark.parametrize("number", range(20))
def test_the_persistent_kernel_begins_behind_all_before_it_and_ends_before_all_behind_it(
    number: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, memory = WritingDriver(), SimpleNamespace(data=SimpleNamespace(ptr=64))
    for module in (executor, persistent):
        monkeypatch.setattr(module, "import_driver", lambda: api)
    resident = SimpleNamespace(cp=SimpleNamespace(asarray=lambda values: memory), device=nullcontext())
    table, parts = SimpleNamespace(entries=(), rows=()), SimpleNamespace(threads=512, shared=16)
    owner: Any = SimpleNamespace(table=lambda at: table, resident=resident, counters=memory, control=memory, parts=parts)
    owner.walked, owner.limit = SimpleNamespace(veus=4), 1
    sizes = [int(n) for n in rng.integers(0, 5, 2)]
    sizes[number % 2] += 1
    around = persistent.Around(recipe(rng, "before", sizes[0]), recipe(rng, "after", sizes[1]))
    persistent.Walk(owner, resident, "walk", around)  # type: ignore[arg-type]
    walk = sizes[0]
    assert api.functions == [*(f"before{i}" for i in range(sizes[0])), "walk", *(f"after{i}" for i in range(sizes[1]))]
    assert api.cooperative == [walk]
    assert not any(early for a, b, early in some(api.edges) if walk in (a, b))
    past = {walk}
    for after in range(walk + 1, len(api.functions)):
        assert any((before, after) in {e[:2] for e in api.edges} for before in past), "begins before the walk has ended"
        past.add(after)
    led = {walk}
    for before in reversed(range(walk)):
        assert any((before, after) in {e[:2] for e in api.edges} for after in led), "may go on when the walk begins"
        led.add(before)


def test_what_continues_an_input_waits_for_no_task_of_its_own() -> None:
    """Check waits of operators stored over an input, next to cells, whose values are sent as words. Other tasks get new waits.
    Old elements of a cache are present from the start."""
    size = 256
    model = onnx.parser.parse_model(f"""<ir_version: 11, opset_import: ["" : 24]>
        grown (float[4, 1, {size}] x, float[1, 1, 12, {size}] past, int64[1] at) => (float[1, 1, 12, {size}] present) {{
            y = LSTM <hidden_size = {size}> (x, w, r)
            shape = Constant <value_ints = [1, 1, 4, {size}]> ()
            rows = Reshape (y, shape)
            present = TensorScatter (past, rows, at)
        }}""")
    weights = np.full((1, 4 * size, size), 0.01, np.float32)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(weights, n) for n in "wr")
    compiler = Compiler(open_backend(OpenOptions(target="sm_90a")), CompileOptions(), KernelStore(None))
    (segment,) = compiler.compile_model(read_model(model), {}, {"present": "past"}).segments
    assert isinstance(segment, ProgramSegment) and state_pairs(segment.program) == {"present": "past"}
    flow = plan_words(segment.program, Binding.of(segment.program, segment.constants))
    assert flow.words
    waits = [(t.operator, w.counter) for row in flow.program.rows for t in row for w in t.waits]
    assert all(counter != operator for operator, counter in some(waits))
    assert ("present", "present") not in waits and any(o == "present" for o, _ in waits)

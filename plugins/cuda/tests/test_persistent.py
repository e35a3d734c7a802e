"""The persistent executor: its table and flags by static checks, its kernel by NVRTC, its runs on a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import onnx
import pytest
from zoo import find
from zoo.sequence import lstm_tc

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions
from rammer.errors import BadInput, DeviceFailure
from rammer.frontend.read.reader import read_model
from rammer.ir.program import Counter, Port, RProgram, Task, Wait
from rammer.jit.self_test import tiny_graph
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.conformance import CHECKS, TIMED, subject
from rammer_testing.nonempty import some
from rammer_testing.peer_process import PeerSession

from rammer_cuda.backend import open_backend
from rammer_cuda.compile import compile_cubin
from rammer_cuda.forms import keeps_constants
from rammer_cuda.gpu import TARGETS
from rammer_cuda.persistent.bodies import KernelBodies, operator_bodies
from rammer_cuda.persistent.dataflow import Dataflow, plan_words
from rammer_cuda.persistent.kernel_text import kernel_text
from rammer_cuda.persistent.persistent_executor import find_hang
from rammer_cuda.persistent.task_table import RowTable, make_table

pytest.importorskip("cuda.bindings")


def compiled(model: onnx.ModelProto, target: str = "sm_90a") -> ProgramSegment:
    backend = open_backend(OpenOptions(target=target))
    segment = Compiler(backend, CompileOptions(), KernelStore(None)).compile_model(read_model(model), {}).segments[0]
    assert isinstance(segment, ProgramSegment)
    return segment


def binding_of(segment: ProgramSegment) -> Binding:
    return Binding(segment.program.types, segment.program.storage, frozenset(segment.constants))


def small_lstm(rng: np.random.Generator, batch: int = 1, layers: int = 3, steps: int = 5) -> onnx.ModelProto:
    return lstm_tc(int(rng.integers(1 << 30)), batch=batch, layers=layers, steps=steps)


def table_of(flow: Dataflow, parts: KernelBodies) -> RowTable:
    fake = {n: range(1000 * i, 1000 * i + len(a) + len(parts.words[n])) for i, (n, a) in enumerate(parts.arguments.items())}
    return make_table(flow.program, parts.number, fake, parts.held())


# --- planning ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
def test_every_read_is_ordered_after_its_write(batch: int, rng: np.random.Generator) -> None:
    """Check that each value that a task reads is a word, or ordered after its write by rows or waits."""
    segment = compiled(small_lstm(rng, batch, layers=7))  # waves of one to five cells: tasks of several widths
    flow = plan_words(segment.program, binding_of(segment))
    assert len({o.tile for o in flow.program.operators}) > 1
    assert any(flow.words.values())
    before = happens_before(flow.program)
    types, checked = flow.program.types, 0
    writer = {t: o for o in flow.program.operators for t in o.outputs}
    for row in some(flow.program.rows):
        for task in row:
            reader = flow.program.operator[task.operator]
            boxes = reader.boxes(reader.task_box(task.index), types)
            for tensor in set(reader.inputs) & writer.keys():
                if tensor in flow.words[reader.name]:
                    continue
                other = writer[tensor]
                for i in range(other.task_count):
                    if meets(other.part(tensor, other.task_box(i)), boxes[tensor]):
                        assert (other.name, i) in before[task.operator, task.index], f"{task} reads {tensor}"
                        checked += 1
    assert checked


def happens_before(program: RProgram) -> dict[tuple[str, int], set[tuple[str, int]]]:
    """Return the tasks that have finished when each task starts, by rows and counters alone."""
    direct: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for row in program.rows:
        for task in row:
            named = (program.counter[w.counter] for w in task.waits)
            direct[task.operator, task.index] = {(c.operator, i) for c in named for i in range(c.first, c.last)}
        for first, second in pairwise(row):
            direct[second.operator, second.index].add((first.operator, first.index))
    result: dict[tuple[str, int], set[tuple[str, int]]] = {}

    def known(task: tuple[str, int]) -> set[tuple[str, int]]:
        if task not in result:
            result[task] = set(direct[task])
            for earlier in direct[task]:
                result[task] |= known(earlier)
        return result[task]

    for row in program.rows:
        for task in row:
            known((task.operator, task.index))
    return result


def meets(a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...]) -> bool:
    return all(max(p[0], q[0]) < min(p[1], q[1]) for p, q in zip(a, b, strict=True))


def test_words_share_no_memory(rng: np.random.Generator) -> None:
    segment = compiled(small_lstm(rng))
    flow = plan_words(segment.program, binding_of(segment))
    spans = sorted((b.offset, b.offset + b.nbytes) for b in flow.program.buffers if b.kind == "arena")
    assert all(first[1] <= second[0] for first, second in some(pairwise(spans)))


def test_a_program_without_cells_keeps_its_arena_and_waits() -> None:
    backend = open_backend(OpenOptions(target="sm_90a"))
    segment = Compiler(backend, CompileOptions(), KernelStore(None)).program(tiny_graph(3), (Port("x", "x"),), (Port("y", "y"),))
    assert plan_words(segment.program, binding_of(segment)).program is segment.program
    assert not keeps_constants(segment.program)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_step_of_a_recurrence_is_one_operator(batch: int, rng: np.random.Generator) -> None:
    """Check that both products and the gates of a step are fused: the launches that this saves are no uncertain gain."""
    program = compiled(small_lstm(rng, batch, layers=2, steps=3)).program
    assert [o.family for o in program.operators] == ["cell"] * 6


@pytest.mark.slow
def test_rows_run_a_task_again_and_again() -> None:
    segment = compiled(lstm_tc(0, layers=4, steps=20))
    assert keeps_constants(segment.program)
    flow = plan_words(segment.program, binding_of(segment))
    table = table_of(flow, operator_bodies(flow, binding_of(segment)))
    longest = max(int(count) for _, _, count in table.runs)
    assert longest >= 17  # nearly all steps of a layer with its weights in place


def test_table_holds_the_program(rng: np.random.Generator) -> None:
    segment = compiled(small_lstm(rng))
    flow = plan_words(segment.program, binding_of(segment))
    table = table_of(flow, operator_bodies(flow, binding_of(segment)))
    program, form = flow.program, table.form
    at = 0
    for number, row in some(enumerate(program.rows)):
        runs = table.runs[table.first[number] : table.first[number + 1]]
        assert sum(int(n) for _, _, n in runs) == len(row)
        for task in row:
            entry = table.entries[at]
            waits = [tuple(entry[4 + 3 * i : 7 + 3 * i].tolist()) for i in range(entry[1])]
            want = [(list(program.counter).index(w.counter), w.threshold, program.counter[w.counter].total) for w in task.waits]
            assert (int(entry[0]), waits) == (task.index, want)
            fed = [program.counters[i].operator for i in entry[form.signal_at : form.signal_at + 2 * entry[2] : 2]]
            assert set(fed) <= {task.operator}
            at += 1


def signalled(program: RProgram, table: RowTable) -> dict[str, int]:
    """Return the number of signalled tasks by counter. Fail if a signal precedes the end of one of its tasks on the row."""
    said, at, form = dict.fromkeys(program.counter, 0), 0, table.form
    for row in some(program.rows):
        ended, mine = dict.fromkeys(said, 0), dict.fromkeys(said, 0)
        for task in row:
            for c in program.counters:
                ended[c.name] += c.operator == task.operator and c.first <= task.index < c.last
            entry = table.entries[at]
            for i in range(entry[2]):
                counter, amount = entry[form.signal_at + 2 * i : form.signal_at + 2 * i + 2].tolist()
                mine[program.counters[counter].name] += amount
            assert all(mine[c] <= ended[c] for c in said), f"{task} says more than is done"
            at += 1
        assert mine == ended, "a row keeps to itself what it has done"
        said = {c: n + mine[c] for c, n in said.items()}
    return said


@pytest.mark.slow
@pytest.mark.parametrize("early", [False, True])
def test_a_row_signals_once_what_is_awaited_as_a_whole(early: bool, rng: np.random.Generator) -> None:
    """Check that a row signals a counter once, at its last task, or per task if a wait needs only part."""
    program = compiled(small_lstm(rng)).program
    a, b, *_ = sorted(program.operators, key=lambda o: -o.task_count)
    tasks = [Task(a.name, int(i)) for i in rng.permutation(a.task_count)]
    cut = int(rng.integers(1, a.task_count))
    wait = Wait("c", int(rng.integers(1, a.task_count)) if early else a.task_count)
    rows = (tuple(tasks[:cut]), tuple(tasks[cut:]), tuple(Task(b.name, i, (wait,)) for i in range(b.task_count)))
    program = replace(program, operators=(a, b), rows=rows, counters=(Counter("c", a.name, 0, a.task_count),))
    table = make_table(program, {o.name: 0 for o in (a, b)}, {o.name: (1, 2) for o in (a, b)}, {o.name: () for o in (a, b)})
    assert signalled(program, table) == {"c": a.task_count}
    assert int(table.entries[:, 2].sum()) == (a.task_count if early else 2)


def test_signals_of_a_whole_program_are_all_of_its_tasks(rng: np.random.Generator) -> None:
    segment = compiled(small_lstm(rng))
    flow = plan_words(segment.program, binding_of(segment))
    said = signalled(flow.program, table_of(flow, operator_bodies(flow, binding_of(segment))))
    assert said == {c.name: c.total for c in flow.program.counters} and said


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernel_compiles_and_holds_its_weights_in_registers(arch: str, rng: np.random.Generator) -> None:
    segment = compiled(small_lstm(rng, batch=4), "sm_90a")
    flow = plan_words(segment.program, binding_of(segment))
    parts = operator_bodies(flow, binding_of(segment))
    found = compile_cubin(kernel_text(parts.bodies, table_of(flow, parts).form, parts.threads), arch).resources["rm_persistent"]
    assert found.registers <= 128 and found.spills <= 64  # far less than the 80 weights a thread


def test_a_hang_is_traced_to_the_wait_at_fault(rng: np.random.Generator) -> None:
    """Check a hang where row 1 waits for a counter that is complete but below its threshold. Row 0 waits for row 1, and detects
    the hang first."""
    program = compiled(small_lstm(rng)).program
    a, b, c = (program.operators[i] for i in (0, 1, 2))
    counters = (Counter("ca", a.name, 0, 1), Counter("cb", b.name, 0, 1))
    rows = (
        (Task(c.name, 0, (Wait("cb", 1),)),),
        (Task(b.name, 0, (Wait("ca", 2),)),),
        (Task(a.name, 0),),
    )
    stuck = replace(program, rows=rows, counters=counters, operators=(a, b, c))
    found = find_hang(stuck, [1, 1, 0], {"ca": 4, "cb": 3}, 3, {})
    assert (found.veu, found.order, found.awaited) == (1, 0, "counter ca to reach 5, but it stayed at 4")


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf", "86400"])
def test_a_watchdog_is_a_time(text: str) -> None:
    with pytest.raises(BadInput, match="is not a valid timeout"):
        open_backend(OpenOptions(target="sm_90a", options={"watchdog": text}))


def test_a_watchdog_reaches_the_persistent_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    from rammer_cuda import forms

    how = forms.Execution.of({"executor": "persistent", "watchdog": "0.25"})
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(forms, "PersistentProgram", lambda *arguments: seen.append(arguments))
    program = compiled(lstm_tc(0, layers=2, steps=4)).program
    for given in (program, replace(program, form="")):
        forms.open_executor(given, {}, TARGETS["sm_90a"], 0, how)
        assert seen.pop() == (given, {}, TARGETS["sm_90a"], 0, 250_000_000, True, 512, 1, False)


def test_a_program_for_an_unknown_form_is_refused() -> None:
    from rammer_cuda.forms import open_executor

    program = replace(compiled(lstm_tc(0, layers=2, steps=4)).program, form="tiles")
    with pytest.raises(DeviceFailure, match="is for the execution form tiles"):
        open_executor(program, {}, TARGETS["sm_90a"], 0)


def test_an_unknown_executor_is_refused() -> None:
    with pytest.raises(BadInput, match="unknown executor 'waves'"):
        open_backend(OpenOptions(target="sm_90a", options={"executor": "waves"}))


# --- on a GPU ---------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("check", [pytest.param(c, marks=[pytest.mark.alone] if c in TIMED else []) for c in CHECKS])
def test_conformance(check: str) -> None:
    with subject("cuda", executor="persistent") as opened:
        CHECKS[check](opened)


@pytest.mark.cuda
@pytest.mark.parametrize("key", ["lstm 1", "lstm 4", "squeezenet:small", "resnext29_branches:small"])
def test_a_thousand_fresh_runs_equal_the_reference(key: str, rng: np.random.Generator) -> None:
    """Check against the other executor to 1e-5, where a race would show, and against ONNX Runtime.

    Nets whose sums cancel are compared with ONNX Runtime to 1e-4. For the small SqueezeNet, rocm and ONNX Runtime are themselves
    1e-5 and 5e-6 from float64."""

    seed, batch = int(rng.integers(1 << 30)), key.removeprefix("lstm ")
    model = small_lstm(rng, int(batch), layers=4, steps=12) if batch.isdigit() else find(key).build(seed)
    backend = open_backend(OpenOptions(options={"executor": "persistent"}))
    segment = Compiler(backend, CompileOptions(), KernelStore(None)).compile_model(read_model(model), {}).segments[0]
    assert isinstance(segment, ProgramSegment)
    session = PeerSession(model)
    assert segment.program.form.startswith("holding" if batch.isdigit() else "rows_")
    loaded = backend.load(segment.program, segment.constants)
    graph = open_backend(OpenOptions()).load(replace(segment.program, form="graph"), segment.constants)
    for _ in range(1000):
        feeds = {i.name: rng.standard_normal(i.shape, dtype=np.float32) for i in session.get_inputs()}
        (have,), (other,) = (program.run(feeds).outputs.values() for program in (loaded, graph))
        (want,) = session.run(None, feeds)
        assert np.linalg.norm(have - other) <= 1e-5 * np.linalg.norm(other)
        assert np.linalg.norm(have - want) <= (1e-5 if batch.isdigit() else 1e-4) * np.linalg.norm(want)
    graph.close()
    loaded.close()


@pytest.mark.cuda
def test_a_hang_names_the_veu_and_the_wait(rng: np.random.Generator) -> None:
    from rammer_cuda.persistent.persistent_executor import PersistentProgram

    backend = open_backend(OpenOptions(options={"executor": "persistent"}))
    segment = Compiler(backend, CompileOptions(), KernelStore(None)).compile_model(read_model(small_lstm(rng)), {}).segments[0]
    assert isinstance(segment, ProgramSegment)
    program = segment.program
    counter = program.counters[0]
    veu = next(v for v, row in enumerate(program.rows) if row)
    stuck = Task(program.rows[veu][-1].operator, program.rows[veu][-1].index, (Wait(counter.name, counter.total + 1),))
    rows = tuple((*row[:-1], stuck) if v == veu else row for v, row in enumerate(program.rows))
    loaded = PersistentProgram(replace(program, rows=rows), segment.constants, backend.gpu, 0, limit=50_000_000, words=False)
    x = np.zeros((5, 1, 256), np.float32)
    fault = rf"vEU {veu} waited .* counter {re.escape(counter.name)} to reach {counter.total + 1}"
    for _ in range(2):  # the next run starts afresh
        with pytest.raises(DeviceFailure, match=fault):
            loaded.run({"sequence": x})
    loaded.close()


@pytest.mark.cuda
def test_bound_calls_use_the_callers_arrays(rng: np.random.Generator) -> None:
    import cupy

    backend = open_backend(OpenOptions(options={"executor": "persistent"}))
    segment = Compiler(backend, CompileOptions(), KernelStore(None)).compile_model(read_model(small_lstm(rng)), {}).segments[0]
    assert isinstance(segment, ProgramSegment)
    loaded = backend.load(segment.program, segment.constants)
    x = rng.standard_normal((5, 1, 256), dtype=np.float32)
    (want,) = loaded.run({"sequence": x}).outputs.values()
    bound = loaded.bind({"sequence": cupy.asarray(x)}, {})
    for _ in range(3):
        bound.run()
    (have,) = bound.to_host().values()
    np.testing.assert_array_equal(have, want)
    loaded.close()

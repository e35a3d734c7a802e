"""Kernels as functions that a block of the persistent kernel calls for a task, and the calling block."""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from zoo import find

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions
from rammer.errors import DeviceFailure, DeviceUnavailable
from rammer.frontend.read.reader import read_model
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.cases import KINDS, NetCase, Sampler
from rammer_testing.nonempty import some
from rammer_testing.single import Trial, subjects, trial_of

from .emulator.launch import COMPILER, HostKernel, find_race

pytest.importorskip("cuda.bindings")

from .cuda_choices import planned_rows
from .cuda_on_host import HostSearch, on_host, planted, problem_of, run_cases
from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.compile import compile_cubin
from rammer_cuda.device import device_source
from rammer_cuda.families import family_of
from rammer_cuda.forms import BY_NAME, ROWS
from rammer_cuda.kernels.part import dynamic_bytes, with_statics_at
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.persistent.bodies import callable_part, operator_bodies, pointee_types
from rammer_cuda.persistent.dataflow import plan_words
from rammer_cuda.persistent.kernel_text import Body, kernel_text, part_function
from rammer_cuda.persistent.task_table import KERNEL_BITS, EntryForm, make_table
from rammer_cuda.source import task_kernel

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
#: Replacement of the persistent kernel's waits: each task waits as its launch does.
WAITS = """
struct rm_turn {};
template <int METHOD, int THREADS> static bool rm_ready(const rm_turn &) { rm_after(); return true; }
template <int THREADS> static void rm_turn_meet() { __syncthreads(); }
template <int THREADS> static RmPart rm_thread() { return {(int)threadIdx.x}; }
"""
#: Rows of several warps whose sums are combined in static shared memory.
LONG = "rows b=3 m=2 depth=700 t=1 off=1 @float32 seed=105275"


def as_called(kernel: TaskKernel) -> TaskKernel:
    """Return a kernel that calls ``kernel`` as a larger block would: with a separate barrier and the block's shared memory."""
    function = part_function(kernel, kernel.threads + 32).replace("__forceinline__", "")
    names = "".join(f"p{k}, " for k in range(len(kernel.parameters)))
    call = f"rm_part_{kernel.entry}({names}order, first, RmPart{{(int)blockIdx.x}}, rm_turn(), memory);\n"
    body = f"extern __shared__ __align__(16) char memory[];\n{call}"
    return replace(
        kernel,
        device=device_source("part") + WAITS + device_source("constant") + kernel.device + function,
        body=body,
        dynamic=dynamic_bytes(kernel),
    )


def as_row(kernel: TaskKernel, done: str = "__syncthreads();") -> TaskKernel:
    """Return a kernel that calls ``kernel`` for its task twice, as a row of two tasks does. The second call first overwrites
    memory that the first reads last. Only ``done`` separates the two calls."""
    called = as_called(kernel)
    head, _, call = called.body.partition("\n")
    return replace(called, body=f"{head}\n{call}{done}\n{call}")


class Called(HostSearch):
    """The kernel search, with each kernel called as a part."""

    def check(self, tiled: ROperator, trial: Trial) -> str:
        """Return the error of ``tiled``, or "" if it is right or not callable."""
        kernel = callable_part(tiled, trial.subject.binding)
        return "" if kernel is None else problem_of(as_called(kernel), tiled, trial)


@pytest.mark.slow
def test_a_called_kernel_computes_what_its_launch_does(seed: int) -> None:
    """Check a small fresh case, one candidate of each family, with its barrier, shared memory and wait."""
    search, random = Called("sm_90a"), Random(seed)
    kinds = (random.choice(("matmul", "gemv", "rows", "pool")),)
    case = Sampler(random, 1_000, ("float32", "tf32", "float16"), kinds).next()
    count, problems = run_cases(search, case, random)
    assert count and problems == []


@functools.cache
def segment_of(key: str) -> tuple[CudaBackend, ProgramSegment]:
    """Return the program of a zoo model."""
    backend = open_backend(OpenOptions(target="sm_90a"))
    assert isinstance(backend, CudaBackend)
    (segment,) = Compiler(backend, CompileOptions(), KernelStore(None)).compile_model(read_model(find(key).build()), {}).segments
    assert isinstance(segment, ProgramSegment)
    return backend, segment


@functools.cache
def rows_of(key: str) -> RProgram:
    """Return a zoo model's program as rows of a persistent kernel."""
    return planned_rows(*segment_of(key)).program


@functools.cache
def small_rows() -> tuple[list[ROperator], Binding]:
    """Return operators of a small network as tasks of a persistent kernel, one per kernel, and their binding."""
    program, (_, segment) = rows_of("squeezenet:small"), segment_of("squeezenet:small")
    binding, kinds = Binding.of(program, segment.constants), dict[str, ROperator]()
    for o in program.operators:
        if kernel := callable_part(o, binding):
            kinds.setdefault(kernel.entry, o)
    return list(kinds.values()), binding


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(25))
def test_tasks_of_a_row_share_a_blocks_memory_without_a_race(number: int) -> None:
    """Check consecutive tasks with ThreadSanitizer. Each waits at its threads' barrier, followed by the block's barrier."""
    operators, binding = small_rows()
    operator = operators[number % len(operators)]
    assert race_of(as_row(task_kernel(operator, binding)), binding) == "", operator.head()


@pytest.mark.slow
def test_a_row_without_its_barrier_is_a_race() -> None:
    operators, binding = small_rows()
    operator = next(o for o in operators if o.family == "gemm_tf32x3")
    assert "data race" in race_of(as_row(task_kernel(operator, binding), done=""), binding)


def race_of(kernel: TaskKernel, binding: Binding) -> str:
    values = {a.tensor: np.ones(binding.types[a.tensor].shape, np.float32) for a in kernel.arguments if not a.written}
    try:
        return find_race(HostKernel.of(kernel, binding, values, on_host(kernel)))
    except DeviceUnavailable as problem:
        pytest.skip(str(problem))


def test_what_no_task_writes_is_said_to_be_constant() -> None:
    """Check constness: the compiler cannot infer it for a pointer from the table, and loads would stay after stores."""
    _, segment = segment_of("squeezenet:small")
    binding, found = Binding.of(segment.program, segment.constants), set[tuple[bool, ...]]()
    kernels = (callable_part(o, binding) for o in segment.program.operators)
    for kernel in some([k for k in kernels if k is not None]):
        head = part_function(kernel, kernel.threads).partition("bool rm_part_")[2].partition(") {")[0]
        constant = tuple(p.startswith("const ") and "__restrict__" in p for p in kernel.parameters)
        assert tuple(f"rm_constant<float> p{i}," in head for i in range(len(constant))) == constant
        assert all(a.tensor in binding.constants for a, c in zip(kernel.arguments, constant, strict=True) if c)
        found.add(constant)
    assert {(True, False, True, False), (False, False)} <= found, "weights and a bias; none"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "no barrier", "no wait"])
def test_faults_in_calling_are_found(fault: str) -> None:
    """Check that rows with several warps are wrong without their barrier and without the wait."""
    search, case = Called("sm_90a"), NetCase.parse(LONG)
    subject = next(iter(subjects(case, search.backend)))
    kernels = ((o, callable_part(o, subject.binding)) for o in search.backend.all_candidates(subject.operator, subject.binding))
    tiled, kernel = next((o, k) for o, k in kernels if k is not None and "__shared__" in k.body and k.threads <= 256)
    assert search.possible(tiled, subject) and "rm_turn_meet<" in as_called(kernel).text
    edits = {
        "": lambda text: text,
        "no barrier": lambda text: text.replace("{ rm_turn_meet<", "{ if (0) rm_turn_meet<"),
        "no wait": lambda text: text.replace("if (!rm_ready", "if (0 && !rm_ready"),
    }
    called = as_called(kernel)
    made = called if not fault else planted(called, edits[fault])
    try:
        problem = problem_of(made, tiled, trial_of(subject, case.seed))
    except AssertionError as stuck:
        problem = str(stuck)
    assert bool(problem) == bool(fault), problem


def test_static_shared_memory_moves_into_the_block() -> None:
    """Check that every declaration has a member and the structure has at most the requested size."""
    made = TaskKernel(
        "k", "", (), "__shared__ float a[2][3];\n__shared__ __align__(16) char b[5];\n__shared__ int c;\n", (), 32, 33
    )
    moved = with_statics_at(made, "Held", "block")
    assert moved.members == ("float a[2][3];", "__align__(16) char b[5];", "int c;")
    assert moved.body.splitlines() == [f"auto &{n} = ((Held *)block)->{n};" for n in "abc"]
    assert moved.most >= 33 and "static_assert(sizeof(Held)" in moved.text


@pytest.mark.slow
@pytest.mark.parametrize("key", ["resnext29_branches:small", pytest.param("nasnet_cifar", marks=pytest.mark.large)])
def test_rows_call_kernels_of_their_families(key: str) -> None:
    """Check that callable kernels replace the core's emitter for operators of families, and that all blocks fit on the SMs."""
    backend, segment = segment_of(key)
    program = rows_of(key)
    form = BY_NAME[program.form]
    assert form in ROWS and program.veus == backend.gpu.sms * form.rows
    binding = Binding.of(program, segment.constants)
    flow = plan_words(program, binding)
    parts = operator_bodies(flow, binding, form.threads)
    written = [parts.bodies[parts.number[o.name]] for o in flow.program.operators if o.family]
    assert all(b.part or b.held for b in some(written)) and parts.threads <= form.threads
    table = make_table(flow.program, parts.number, {n: range(len(a)) for n, a in parts.arguments.items()}, parts.held())
    text = kernel_text(parts.bodies, table.form, parts.threads, blocks=form.rows)
    found = compile_cubin(text, backend.gpu.architecture).resources["rm_persistent"]
    assert found.registers * parts.threads * form.rows <= backend.gpu.registers and found.spills <= 1024
    assert (found.shared + parts.shared + 1024) * form.rows <= backend.gpu.shared + 1024


def test_entries_tell_where_runs_begin() -> None:
    """Check the word of each entry: the first of a run has its kernel and the number of following entries, others have 0."""
    _, segment = segment_of("seq2seq:small")
    binding = Binding.of(segment.program, segment.constants)
    flow = plan_words(segment.program, binding)
    parts = operator_bodies(flow, binding)
    places = {n: range(len(a) + len(parts.words[n])) for n, a in parts.arguments.items()}
    table = make_table(flow.program, parts.number, places, parts.held())
    begun = {int(first): int(kernel) | int(count) << KERNEL_BITS for kernel, first, count in table.runs}
    assert [int(w) for w in table.entries[:, 3]] == [begun.get(i, 0) for i in range(len(table.entries))]
    assert table.rows.tolist() == [sum(map(len, flow.program.rows[:v])) for v in range(flow.program.veus + 1)]


def alone(operator: ROperator, binding: Binding) -> str:
    """Return the persistent kernel of one operator, or "" if its kernel is not callable."""
    kernel = callable_part(operator, binding)
    if kernel is None:
        return ""
    body = Body(kernel.entry, kernel.device, pointee_types(kernel), part=kernel)
    return kernel_text([body], EntryForm(2, 1, len(kernel.arguments)), 512)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_every_kind_compiles_as_called(kind: str, seed: int) -> None:
    """Check that NVRTC compiles one candidate of each family as a called part, for a fresh case."""
    search, random = Called("sm_90a"), Random(seed)
    case = Sampler(random, 100_000, ("float32", "tf32", "float16", "bfloat16"), (kind,)).next()
    for subject in some(subjects(case, search.backend)):
        for tiled in search.candidates(subject, random):
            if text := alone(tiled, subject.binding):
                assert compile_cubin(text, "sm_90a").resources["rm_persistent"].registers <= 128, f"{case} {tiled.family}"


@pytest.mark.parametrize("kind", ["matmul", "conv"])
def test_threads_are_known_before_a_kernel_is_written(kind: str, seed: int) -> None:
    """Check the thread counts of products, by which rows detect kernels that none of their blocks can call."""
    search, random = Called("sm_90a"), Random(seed)
    sampler, known = Sampler(random, 30_000, ("float32", "tf32", "float16"), (kind,)), set[str]()
    while len(known) < 2:
        for subject in some(subjects(sampler.next(), search.backend)):
            for tiled in search.candidates(subject, random):
                with suppress(DeviceFailure):  # some choices with a price cannot be written
                    written = task_kernel(tiled, subject.binding).threads
                    threads = family_of(tiled).threads
                    assert threads is None or threads(tiled, subject.binding) == written, tiled.head()
                    known |= {tiled.family} if threads else set()

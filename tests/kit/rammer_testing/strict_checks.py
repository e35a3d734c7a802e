"""Conformance in corner cases: waits with unequal tasks, families of other devices, precisions, strided arrays, NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from rammer.compiled.segments import ProgramSegment
from rammer.errors import BadInput
from rammer.ir.compute import Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.operator import ROperator
from rammer.ir.program import Buffer, BufferKind, Counter, Port, RProgram, Task, Wait, dense
from rammer.runtime.executable import Executable
from rammer.verify.verifier import verify
from rammer_testing.bound_checks import equal, opened
from rammer_testing.judge import TOLERANCE, reference, relative_error
from rammer_testing.long_checks import usual_seconds
from rammer_testing.small_models import MODELS
from rammer_testing.subject import Subject
from rammer_testing.thread_checks import ended

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Rows and columns of the matrices of long tasks, number of tasks that wait for them, and runs.
SIZE, READERS, RUNS = 128, 8, 3
#: Error bound for a whole small model, by precision.
ALLOWED = {"tf32": 2e-3, "float16": 2e-3, "bfloat16": 1.6e-2}
#: Element-wise functions whose results for NaN, infinities and zeros NumPy defines.
MAPS = ("max(x[i], 0.0)", "min(x[i], 1.0)", "exp(x[i]) - x[i]", "where(lt(x[i], 0.0), 0.0 - x[i], x[i])", "abs(x[i]) * 0.0")
#: Reductions over rows, some of which contain a NaN or an infinity.
REDUCTIONS = ("max[k:12] x[i, k]", "min[k:12] x[i, k]", "sum[k:12] x[i, k]", "prod[k:12] x[i, k]")


def check_waits(device: Subject) -> None:
    """Check every wait of readers that run on other rows than the long tasks, for few and many rows."""
    for rows in (2, 3, 6):
        program = crooked(SIZE, rows)
        verify(program)
        usual = usual_seconds(device, program, {"x": device.rng.standard_normal((SIZE, SIZE)).astype(np.float32)})
        loaded = device.backend.load(program, {})
        for _ in range(RUNS):
            x = device.rng.standard_normal((SIZE, SIZE)).astype(np.float32)
            what = f"long tasks and their readers on {rows} rows"
            have = ended(device, what, lambda: loaded.run({"x": x}), usual)  # noqa: B023
            error = relative_error(have.outputs["y"], crooked_result(x))
            device.expect(error <= TOLERANCE, f"{what}: relative L2 error {error:.1e}")
        loaded.close()


def crooked(size: int, rows: int) -> RProgram:
    """Return a program in which every wait matters.

    ``c`` and ``e`` are long and start immediately; ``d`` is long and reads ``e``. The readers of ``c`` and ``d`` are on rows that
    are idle until then. Their waits for the two alternate in order from task to task."""
    whole, part = (size, size), (size // READERS, size)
    head = f"f32[i:{size}, j:{size}]"
    product = f"{head} = sum[k:{size}]"
    operators = (
        _operator(f"c: {product} x[i, k] * x[k, j]", whole),
        _operator(f"e: {product} x[i, k] * x[j, k]", whole),
        _operator(f"d: {product} e[i, k] * x[k, j]", whole),
        _operator(f"y: {head} = c[i, j] + d[i, j]", part),
    )
    kinds: dict[str, BufferKind] = {"x": "input", "c": "arena", "e": "arena", "d": "arena", "y": "output"}
    places = {"e": size * size * 4, "d": 2 * size * size * 4}
    buffers = tuple(Buffer(f"b{t}", "float32", size * size, kind, places.get(t, 0)) for t, kind in kinds.items())
    counters = tuple(Counter(n, n, 0, 1) for n in "ced")
    table: list[list[Task]] = [[] for _ in range(rows)]
    table[0].append(Task("c", 0))
    table[1].append(Task("e", 0))
    table[-1].append(Task("d", 0, (Wait("e", 1),)))
    for index in range(READERS):
        waits = (Wait("c", 1), Wait("d", 1))
        table[index % rows].append(Task("y", index, waits[:: 1 if index % 2 else -1]))
    return RProgram(
        "crooked",
        "test",
        (Port("x", "x"),),
        (Port("y", "y"),),
        buffers,
        tuple(dense(t, f"b{t}", whole) for t in kinds),
        operators,
        counters,
        tuple(map(tuple, table)),
    )


def crooked_result(x: Array) -> Array:
    """Return the exact result of ``crooked`` for ``x``, in float64."""
    exact = x.astype(np.float64)
    return np.asarray(exact @ exact + (exact @ exact.T) @ exact)


def _operator(line: str, tile: tuple[int, ...]) -> ROperator:
    compute = Compute.parse(line)
    return ROperator(compute.name, (compute,), (), (compute.name,), tile)


def check_unknown_family(device: Subject) -> None:
    """Check that the generic kernel computes a kernel family that the device lacks."""
    model = MODELS["product"]
    compiled = device.executable(model).compile_only({})
    (segment,) = compiled.segments
    assert isinstance(segment, ProgramSegment)
    strange = tuple(replace(o, family="strange", config=(("u", 1),)) for o in segment.program.operators)
    inputs = model.inputs(device.rng, {})
    loaded = device.backend.load(replace(segment.program, operators=strange), segment.constants)
    error = relative_error(loaded.run(inputs).outputs["y"], reference(compiled, inputs)["y"])
    loaded.close()
    device.expect(error <= TOLERANCE, f"an unknown kernel family: relative L2 error {error:.1e}")


def check_precisions(device: Subject) -> None:
    """Check every precision other than float32 that the device declares against float64."""
    others = sorted(set(device.backend.vdevice.precisions) - {"float32"})
    if not others:
        return device.skip_whole("its only precision is float32")
    for precision in others:
        for name in ("convolution", "product", "softmax"):
            model = MODELS[name]
            exe = device.executable(model, precision=precision)
            inputs = model.inputs(device.rng, model.shapes[0])
            plain = Executable(exe.source, device.backend, device.spec, registry=device.registry, store=exe.store)
            have, want = exe.run(inputs), reference(plain.compile_only({}), inputs)
            exe.close()
            for port, exact in want.items():
                error = relative_error(have[port], exact)
                device.expect(error <= ALLOWED[precision], f"{name} in {precision}: relative L2 error {error:.1e}")


def check_strided_arrays(device: Subject) -> None:
    """Check that bound arrays with gaps between elements are read and written only at their elements, or rejected."""
    model = MODELS["dynamic"]
    with opened(device, model) as exe:
        wide, narrow = ({"x": device.rng.standard_normal((n, 4)).astype(np.float32)} for n in (6, 3))
        room = exe.bind(wide)
        room.run()
        before = room.to_host()["y"]
        gaps = np.repeat(narrow["x"], 2, axis=1)[:, ::2]
        read = exe.bind({"x": gaps})
        read.run()
        equal(device, "an input with gaps", read.to_host(), exe.run(narrow))
        try:
            written = exe.bind(narrow, {"y": room.outputs["y"][::2]})
        except BadInput as problem:  # a clear rejection is acceptable
            return device.skip(f"outputs with gaps: bound calls refuse them: {problem}")
        written.run()
        written.synchronize()
        after = room.to_host()["y"]
        equal(device, "an output with gaps", {"y": after[::2]}, exe.run(narrow))
        equal(device, "the gaps of an output", {"y": after[1::2]}, {"y": before[1::2]})


def check_special_values(device: Subject) -> None:
    """Check that NaN and infinities pass through maps and reductions as in NumPy."""
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -2.5, 1e30], np.float32)
    for text in MAPS:
        x = np.concatenate([values, device.rng.standard_normal(32).astype(np.float32)])
        device.rng.shuffle(x)
        _special(device, f"y: f32[i:40] = {text}", x, 20)
    for text in REDUCTIONS:
        x = device.rng.standard_normal((9, 12)).astype(np.float32)
        x[[0, 2, 4], [0, 11, 5]], x[[5, 6], [3, 7]], x[8, 1:3] = np.nan, (np.inf, -np.inf), (np.inf, np.nan)
        _special(device, f"y: f32[i:9] = {text}", x, 4)


def _special(device: Subject, line: str, x: Array, tile: int) -> None:
    operator = _operator(line, (tile,))
    (compute,) = operator.computes
    program = _alone(operator, x.shape, compute.shape)
    with np.errstate(all="ignore"):
        want = evaluate_compute(compute, {"x": x.astype(np.float64)}, precise=True)
    loaded = device.backend.load(program, {})
    have = loaded.run({"x": x}).outputs["y"]
    loaded.close()
    good = np.allclose(have, want, rtol=1e-5, atol=1e-6, equal_nan=True)
    device.expect(good, f"{line} of NaN and infinities gives {have[:8]}, not {np.asarray(want)[:8]}")


def _alone(operator: ROperator, reads: Sequence[int], writes: Sequence[int]) -> RProgram:
    """Return a program with all tasks of ``operator``, from ``x`` to ``y``, in one row."""
    buffers = (Buffer("bx", "float32", int(np.prod(reads)), "input"), Buffer("by", "float32", int(np.prod(writes)), "output"))
    tasks = tuple(Task("y", i) for i in range(operator.task_count))
    return RProgram(
        "special",
        "test",
        (Port("x", "x"),),
        (Port("y", "y"),),
        buffers,
        (dense("x", "bx", tuple(reads)), dense("y", "by", tuple(writes))),
        (operator,),
        (),
        (tasks,),
    )

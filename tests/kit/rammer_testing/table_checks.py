"""Conformance of tables and storages: any legal program runs, with any rows, counters and storages.

The compiler's programs are regular: equal rows, waits for whole operators, dense tensors. The language allows more, as the
verifier defines. These programs are written by hand or drawn at random, and verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from rammer.compiled.segments import ProgramSegment
from rammer.device.manifest import Binding
from rammer.errors import DeviceFailure
from rammer.ir.compute import Compute
from rammer.ir.evaluate import run_graph
from rammer.ir.operator import ROperator
from rammer.ir.program import ALIGNMENT, Buffer, Counter, Port, RProgram, Task, Wait, dense
from rammer.verify.verifier import verify
from rammer_testing.judge import TOLERANCE, reference, relative_error
from rammer_testing.long_checks import usual_seconds
from rammer_testing.single import UntiledOperator as Alone
from rammer_testing.single import check, moved, trial_of
from rammer_testing.small_models import MODELS, SmallModel
from rammer_testing.subject import Subject
from rammer_testing.thread_checks import at_once, ended

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Rows and columns of the matrix of long tasks, runs of a program, and bands.
SIZE, RUNS, BANDS = 128, 3, 4
#: Rows of the random tables, and the models whose programs are dealt to them.
ROWS, DEALT = (1, 3, 7), ("images", "recurrence", "views")
#: Models whose operators are computed between guards, and the views of their tensors (``cases.VIEWS``).
GUARDED, PLACES = ("convolution", "product", "softmax", "pooling", "gather"), ("15", "92")
#: Names that ONNX allows, two of which map to the same identifier.
NAMES = ("serving/x:0", "a b", "a.b", "größe", "1")


def program_of(device: Subject, model: SmallModel, shape: Mapping[str, int] | None = None) -> ProgramSegment:
    """Return the single program of ``model`` on this device, with its constants and computes."""
    exe = device.executable(model)
    inputs = model.inputs(device.rng, shape or model.shapes[0])
    (segment,) = exe.compile_only({n: a.shape for n, a in inputs.items()}).segments
    assert isinstance(segment, ProgramSegment)
    return segment


def exact(segment: ProgramSegment, inputs: Mapping[str, Array], constants: Mapping[str, Array]) -> dict[str, Array]:
    """Return outputs of ``segment`` in float64, by tensor, with ``constants`` in place of the segment's."""
    assert segment.compute is not None
    return run_graph(segment.compute, {**inputs, **constants}, precise=True)


# --- counters ---------------------------------------------------------------------------------------


def check_bands(device: Subject) -> None:
    """Check counters over a subset of an operator's tasks: readers of late tasks wait for those tasks."""
    for rows in (3, 5):
        program = banded(SIZE, rows)
        verify(program)
        usual = usual_seconds(device, program, {"x": device.rng.standard_normal((SIZE, SIZE)).astype(np.float32)})
        loaded = device.backend.load(program, {})
        for _ in range(RUNS):
            x = device.rng.standard_normal((SIZE, SIZE)).astype(np.float32)
            what = f"counters of bands of tasks on {rows} rows"
            have = ended(device, what, lambda: loaded.run({"x": x}), usual).outputs["y"]  # noqa: B023
            error = relative_error(have, x.astype(np.float64) * 6)
            device.expect(error <= TOLERANCE, f"{what}: relative L2 error {error:.1e}")
        loaded.close()


def banded(size: int, rows: int) -> RProgram:
    """Return a program in which a reader of a band waits for the bands of its half. ``c`` has one task per band. A long task
    ``e`` precedes the tasks of the second half in their row."""
    whole, part = (size, size), (size // BANDS, size)
    head = f"f32[i:{size}, j:{size}]"
    lines = (
        (f"e: {head} = max[k:{4 * size}] x[i, k // 4] * x[k // 4, j]", whole),
        (f"c: {head} = x[i, j] * 2.0", part),
        (f"y: {head} = c[i, j] * 3.0", part),
    )
    computes = [(Compute.parse(line), tile) for line, tile in lines]
    operators = tuple(ROperator(c.name, (c,), (), (c.name,), tile) for c, tile in computes)
    half = BANDS // 2
    counters = (Counter("first", "c", 0, half), Counter("second", "c", half, BANDS))
    table: list[list[Task]] = [[] for _ in range(rows)]
    table[0] = [Task("c", i) for i in range(half)]
    table[1] = [Task("e", 0), *(Task("c", i) for i in range(half + 1, BANDS))]
    table[2].append(Task("c", half))
    for i in range(BANDS):
        table[-1 - i % 2].append(Task("y", i, (Wait("first" if i < half else "second", half),)))
    kinds = (("x", "input"), ("e", "output"), ("c", "arena"), ("y", "output"))
    buffers = tuple(Buffer(f"b{n}", "float32", size * size, kind) for n, kind in kinds)  # type: ignore[arg-type]
    return RProgram(
        "banded",
        "test",
        (Port("x", "x"),),
        (Port("e", "e"), Port("y", "y")),
        buffers,
        tuple(dense(n, f"b{n}", whole) for n, _ in kinds),
        operators,
        counters,
        tuple(map(tuple, table)),
    )


# --- tables -----------------------------------------------------------------------------------------


def check_tables(device: Subject) -> None:
    """Check random tables: tasks on random rows, some rows empty, in any legal order."""
    for name in DEALT:
        segment = program_of(device, MODELS[name])
        inputs = MODELS[name].inputs(device.rng, {})
        parts = int(device.rng.integers(2, 5))
        plain = replace(segment.program, operators=tuple(_cut(o, parts) for o in segment.program.operators))
        want, usual = exact(segment, {p.tensor: inputs[p.external] for p in segment.program.inputs}, {}), 0.0
        for rows in ROWS:
            program = dealt(plain, rows, device.rng)
            verify(program)
            usual = usual_seconds(device, program, inputs, segment.constants) if rows == ROWS[0] else usual
            loaded = device.backend.load(program, segment.constants)
            what = f"{name}, its tasks dealt at random to {rows} rows and an empty one"
            have = ended(device, what, lambda: loaded.run(inputs), usual).outputs  # noqa: B023
            loaded.close()
            for port in program.outputs:
                error = relative_error(have[port.external], np.asarray(want[port.tensor]))
                device.expect(error <= TOLERANCE, f"{what}: relative L2 error {error:.1e}")


def dealt(program: RProgram, rows: int, rng: np.random.Generator) -> RProgram:
    """Return the program with its tasks on ``rows`` random rows and an empty row in the middle, operator by operator. Each task
    waits for all writers of its inputs. Buffers share no memory, so further waits are unnecessary."""
    places, offset = list[Buffer](), 0
    for buffer in program.buffers:
        places.append(replace(buffer, offset=offset) if buffer.kind == "arena" else buffer)
        offset += -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT if buffer.kind == "arena" else 0
    writers: dict[str, list[str]] = {}
    table: list[list[Task]] = [[] for _ in range(rows)]
    for operator in program.operators:
        read = {program.storage[n].buffer for n in operator.inputs}
        waits = tuple(Wait(w, program.operator[w].task_count) for b in sorted(read) for w in writers.get(b, ()))
        for index in rng.permutation(operator.task_count):
            table[rng.integers(rows)].append(Task(operator.name, int(index), tuple(dict.fromkeys(waits))))
        for name in operator.outputs if operator.task_count else ():
            writers.setdefault(program.storage[name].buffer, []).append(operator.name)
    table.insert(rows // 2, [])
    counters = tuple(Counter(o.name, o.name, 0, o.task_count) for o in program.operators)
    return replace(program, buffers=tuple(places), counters=counters, rows=tuple(map(tuple, table)))


def _cut(operator: ROperator, parts: int) -> ROperator:
    """Return the operator with its generic kernel and ``parts`` tiles per axis; on-chip results of its tasks stay whole."""
    if any(c.layer == "veu" for c in operator.connections):
        return operator
    axes = enumerate(operator.anchor.axes)
    tile = tuple(max(1, a.extent if d in operator.uncut else -(-a.extent // parts)) for d, a in axes)
    return replace(operator, tile=tile, family="", config=())


# --- storages ---------------------------------------------------------------------------------------


def check_guards(device: Subject) -> None:
    """Check operators on tensors at odd offsets with odd strides: within float32 bounds and without stray writes."""
    for name in GUARDED:
        program = program_of(device, MODELS[name]).program
        constants = [n for n, s in program.storage.items() if program.buffer[s.buffer].kind == "constant"]
        binding = Binding.of(program, constants)
        for number, operator in enumerate(program.operators):
            for views in PLACES:
                place = moved(operator, binding, views)
                trial = trial_of(Alone(operator, place, {}), int(device.rng.integers(1 << 30)))
                problem = check(device.backend, operator, trial)
                device.expect(not problem, f"{name}, operator {number}, tensors at places {views!r} between guards: {problem}")


def check_names(device: Subject) -> None:
    """Check that ports may have any name, are identified by name only and accept any order."""
    model = SmallModel(
        "ports",
        """(float[4] p, float[4] q, float[4] r) => (float[4] u, float[4] v) {
        u = Sub(p, q)
        v = Sub(q, r)
    }""",
    )
    segment = program_of(device, model)
    program, given, made = segment.program, *(dict(zip(s, NAMES[k:], strict=False)) for k, s in ((0, "pqr"), (1, "uv")))
    program = replace(
        program,
        inputs=tuple(replace(p, external=given[p.external]) for p in program.inputs),
        outputs=tuple(replace(p, external=made[p.external]) for p in program.outputs),
    )
    values = model.inputs(device.rng, {})
    loaded = device.backend.load(program, segment.constants)
    have = loaded.run({given[n]: values[n] for n in "rqp"}).outputs
    loaded.close()
    device.expect(set(have) == set(made.values()), f"outputs named {sorted(have)}, not {sorted(made.values())}")
    want = {made["u"]: values["p"] - values["q"], made["v"]: values["q"] - values["r"]}
    same = all(np.array_equal(have[n], want[n]) for n in want)
    device.expect(same, f"wrong values of ports that are named {', '.join(map(repr, NAMES))}")


def check_empty(device: Subject) -> None:
    """Check tensors without elements and operators without tasks."""
    model = MODELS["dynamic"]
    exe = device.executable(model)
    for shape in ({"N": 0, "C": 5}, {"N": 3, "C": 0}, {"N": 2, "C": 3}):
        inputs = model.inputs(device.rng, shape)
        special = exe.prepare(exe.checked(inputs))
        have, _ = special.run(inputs)
        want = reference(special.compiled, inputs)
        error = max(relative_error(have[n], want[n]) for n in want)
        device.expect(error <= TOLERANCE, f"dynamic of {shape}: relative L2 error {error:.1e}")
    exe.close()


# --- concurrent programs ----------------------------------------------------------------------------


def check_twins(device: Subject) -> None:
    """Check one program loaded twice with different constants: each keeps its constants after runs, closes and overwrites."""
    model = MODELS["images"]
    segment = program_of(device, model)
    constants = [_strided(segment.constants, device.rng) for _ in range(2)]
    copies = [{n: np.array(a) for n, a in c.items()} for c in constants]
    loaded = [device.backend.load(segment.program, c) for c in constants]
    for array in (a for c in constants for a in c.values()):
        array[...] = 0

    def works(which: int, inputs: Sequence[Mapping[str, Array]]) -> float:
        return max(_error(segment, loaded[which].run(_read_as_it_lies(x)).outputs, x, copies[which]) for x in inputs)

    inputs = [model.inputs(device.rng, {}) for _ in range(8)]
    for which in (0, 1, 0):
        error = works(which, inputs[:1])
        device.expect(error <= TOLERANCE, f"program {which} of two of one text, loaded with other constants: error {error:.1e}")
    for error in at_once(device, [partial(works, i % 2, inputs[i::4]) for i in range(4)]):
        device.expect(error <= TOLERANCE, f"two programs of one text at the same time: error {error:.1e}")
    loaded[0].close()
    error = works(1, inputs[:1])
    device.expect(error <= TOLERANCE, f"a program after another one of its text was closed: error {error:.1e}")
    loaded[1].close()


def _strided(constants: Mapping[str, Array], rng: np.random.Generator) -> dict[str, Array]:
    """Return new values for float constants, with gaps between their elements."""

    def spread(array: Array) -> Array:
        room = np.zeros((*array.shape, 2), array.dtype)
        room[..., 0] = rng.standard_normal(array.shape) / 4 if array.dtype.kind == "f" else array
        return room[..., 0]

    return {n: spread(a) for n, a in constants.items()}


def _read_as_it_lies(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return equal read-only arrays with another order of axes in memory."""
    result = {n: np.asfortranarray(a) for n, a in inputs.items()}
    for array in result.values():
        array.flags.writeable = False
    return result


def _error(
    segment: ProgramSegment, have: Mapping[str, Array], inputs: Mapping[str, Array], constants: Mapping[str, Array]
) -> float:
    want = exact(segment, {p.tensor: inputs[p.external] for p in segment.program.inputs}, constants)
    return max(relative_error(have[p.external], np.asarray(want[p.tensor])) for p in segment.program.outputs)


def check_after_failure(device: Subject) -> None:
    """Check that a program that does not fit leaves the device unchanged."""
    memory = device.backend.hardware.memory
    if not memory:
        return device.skip_whole("the hardware has no known amount of memory")
    for _ in range(3):
        with suppress(DeviceFailure):
            device.backend.load(copying_program(memory // 4 + 1), {}).close()
    x = device.rng.standard_normal(100).astype(np.float32)
    loaded = device.backend.load(copying_program(100), {})
    device.expect(np.array_equal(loaded.run({"x": x}).outputs["y"], x), "wrong values after a program did not fit")
    loaded.close()


def copying_program(length: int) -> RProgram:
    """Return a program that copies ``y[i] = x[i]`` over ``length`` floats in one task."""
    operator = ROperator("y", (Compute.parse(f"y: f32[i:{length}] = x[i]"),), (), ("y",), (length,))
    buffers = (Buffer("bx", "float32", length, "input"), Buffer("by", "float32", length, "output"))
    storages = (dense("x", "bx", (length,)), dense("y", "by", (length,)))
    return RProgram(
        "copy", "sequential", (Port("x", "x"),), (Port("y", "y"),), buffers, storages, (operator,), (), ((Task("y", 0),),)
    )


def spreading_program(length: int) -> RProgram:
    """Return a program that computes ``t[i] = x[i % 4]`` over ``length`` arena floats and outputs the first four as ``y``."""
    lines = ((f"t: f32[i:{length}] = x[i % 4]", length), ("y: f32[i:4] = t[i]", 4))
    computes = [(Compute.parse(line), tile) for line, tile in lines]
    operators = tuple(ROperator(c.name, (c,), (), (c.name,), (tile,)) for c, tile in computes)
    buffers = tuple(
        Buffer(f"b{n}", "float32", size, kind)  # type: ignore[arg-type]
        for n, size, kind in (("x", 4, "input"), ("t", length, "arena"), ("y", 4, "output"))
    )
    storages = (dense("x", "bx", (4,)), dense("t", "bt", (length,)), dense("y", "by", (4,)))
    return RProgram(
        "spread",
        "sequential",
        (Port("x", "x"),),
        (Port("y", "y"),),
        buffers,
        storages,
        operators,
        (),
        ((Task("t", 0), Task("y", 0)),),
    )

"""Conformance of large tables and concurrent programs: no counter is truncated to 8 bits, no scratch memory is shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np

from rammer.ir.compute import Compute
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import ALIGNMENT, Buffer, BufferKind, Counter, Port, RProgram, Task, Wait, dense, waves
from rammer.verify.verifier import verify
from rammer_testing.subject import Subject
from rammer_testing.thread_checks import at_once, ended

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Tasks per counter, around 256 and 512, so that a truncated number ends a wait too early; and tasks of one row.
BANDS, LONG = (256, 257, 300, 513), 1100
#: Rows and columns of a slow task, and links of a chain with an operator, a counter and a wave for each.
SLOW, LINKS = 96, 300
#: Extent of the tensors of concurrent programs, tasks and runs of each program, and repetitions.
SIDE, TILES, RUNS, AGAIN = 256, 8, 6, 3


def program_of_operators(
    name: str,
    operators: Sequence[ROperator],
    kinds: Sequence[tuple[str, BufferKind, tuple[int, ...]]],
    counters: Sequence[Counter],
    rows: Sequence[Sequence[Task]],
) -> RProgram:
    """Return a verified program of float32 tensors, each in a separate buffer. Ports are named after their tensors."""
    buffers, offset = list[Buffer](), 0
    for tensor, kind, shape in kinds:
        buffers.append(Buffer(f"b_{tensor}", "float32", int(np.prod(shape)), kind, offset if kind == "arena" else 0))
        offset += -(-buffers[-1].nbytes // ALIGNMENT) * ALIGNMENT if kind == "arena" else 0
    program = RProgram(
        name,
        "test",
        tuple(Port(t, t) for t, kind, _ in kinds if kind == "input"),
        tuple(Port(t, t) for t, kind, _ in kinds if kind == "output"),
        tuple(buffers),
        tuple(dense(t, f"b_{t}", shape) for t, _, shape in kinds),
        tuple(operators),
        tuple(counters),
        tuple(map(tuple, rows)),
    )
    verify(program)
    return program


def operator_of(*lines: str, tile: tuple[int, ...], layer: str = "veu") -> ROperator:
    """Return an operator of a chain of Computes; each reads the previous one at ``layer``."""
    computes = tuple(map(Compute.parse, lines))
    links = tuple(Connection(a.name, b.name, layer) for a, b in pairwise(computes))
    return ROperator(computes[-1].name, computes, links, (computes[-1].name,), tile)


def check_long_tables(device: Subject) -> None:
    """Check counters of over 255 tasks, rows of over 512, and over 255 operators, counters and waves."""
    x = device.rng.integers(-99, 100, sum(BANDS)).astype(np.float32)
    given = {"x": x, "s": device.rng.standard_normal((SLOW, SLOW)).astype(np.float32)}
    _expect_exact(device, long_table(4), given, x * 6, f"{sum(BANDS)} tasks, of which one row has {LONG}")
    few = x[:4]
    _expect_exact(device, long_chain(), {"x": few}, few * (LINKS + 1), f"a chain of {LINKS} operators")


def long_table(rows: int) -> RProgram:
    """Return tasks of one element on two rows, after a long task on each. Each band of tasks has a counter, and a reader on
    another row waits for it."""
    count, head = sum(BANDS), f"f32[i:{sum(BANDS)}]"
    ends = [0, *accumulate(BANDS)]
    operators = [
        operator_of(f"e: f32[i:{SLOW}, j:{SLOW}] = max[k:{4 * SLOW}] s[i, k // 4] * s[k // 4, j]", tile=(-(-SLOW // 2), SLOW)),
        operator_of(f"c: {head} = x[i] * 2.0", tile=(1,)),
    ]
    counters, table = list[Counter](), [list[Task]() for _ in range(rows)]
    for row, tasks in enumerate((range(LONG), range(LONG, count))):
        table[row] = [Task("e", row), *(Task("c", i) for i in tasks)]
    outputs = list[tuple[str, BufferKind, tuple[int, ...]]]()
    for number, (first, last) in enumerate(pairwise(ends)):
        operators.append(operator_of(f"y{number}: f32[i:{last - first}] = c[i + {first}] * 3.0", tile=(last - first,)))
        counters.append(Counter(f"n{number}", "c", first, last))
        table[2 + number % (rows - 2)].append(Task(f"y{number}", 0, (Wait(f"n{number}", last - first),)))
        outputs.append((f"y{number}", "output", (last - first,)))
    kinds: list[tuple[str, BufferKind, tuple[int, ...]]] = [
        ("s", "input", (SLOW, SLOW)),
        ("x", "input", (count,)),
        ("e", "output", (SLOW, SLOW)),
        ("c", "arena", (count,)),
        *outputs,
    ]
    return program_of_operators("long_table", operators, kinds, counters, table)


def long_chain() -> RProgram:
    """Return operators that each add ``x`` to the previous result on another row; each has a counter and a wave."""
    names = ["x", *(f"t{n}" for n in range(1, LINKS)), "y"]
    operators = [operator_of(f"{b}: f32[i:4] = {a}[i] + x[i]", tile=(4,)) for a, b in pairwise(names)]
    counters = [Counter(o.name, o.name, 0, 1) for o in operators]
    tasks = [Task(b, 0, (Wait(a, 1),) if a != "x" else ()) for a, b in pairwise(names)]
    kinds = [(n, "input" if n == "x" else "output" if n == "y" else "arena", (4,)) for n in names]
    return program_of_operators("long_chain", operators, kinds, counters, [tasks[::2], tasks[1::2]])  # type: ignore[arg-type]


def _expect_exact(device: Subject, program: RProgram, inputs: dict[str, Array], want: Array, what: str) -> None:
    """Expect the concatenated outputs ``y...`` to equal ``want``."""
    usual = usual_seconds(device, program, inputs)
    loaded = device.backend.load(program, {})
    have = ended(device, what, lambda: loaded.run(inputs), usual).outputs
    joined = np.concatenate([have[p.external].ravel() for p in program.outputs if p.external.startswith("y")])
    wrong = np.flatnonzero(joined != want)
    device.expect(not wrong.size, f"{what}: {wrong.size} elements are wrong, the first at {wrong[:3].tolist()}")
    loaded.close()


def usual_seconds(
    device: Subject, program: RProgram, inputs: Mapping[str, Array], constants: Mapping[str, Array] | None = None
) -> float:
    """Return the caller's seconds for all tasks of ``program`` in one row, without waits."""
    row = tuple(replace(w.task, waits=()) for wave in waves(program) for w in wave)
    loaded = device.backend.load(replace(program, rows=(row,), counters=()), constants or {})
    _, seconds = device.timed(lambda: loaded.run(inputs))
    loaded.close()
    return seconds


# --- programs side by side --------------------------------------------------------------------------


def check_side_by_side(device: Subject) -> None:
    """Check concurrent programs with equal tensor names: each has separate unit memory and a separate arena."""
    programs = [side(kind, factor) for kind in ("veu", "device") for factor in (2, 5)]
    loaded = [device.backend.load(p, {}) for p in programs]
    given = [device.rng.integers(-99, 100, (SIDE, SIDE)).astype(np.float32) for _ in range(RUNS)]

    def run(number: int) -> list[bool]:
        factor = (2, 5)[number % 2]
        return [bool((loaded[number].run({"x": x}).outputs["y"] == x * factor + (3 * factor + 1)).all()) for x in given]

    for number in range(len(programs)):
        device.expect(all(run(number)), f"{programs[number].name}: wrong values, run alone after others were loaded")
    for _ in range(AGAIN):
        for pair in ((0, 1), (2, 3), (0, 1, 2, 3)):
            right = at_once(device, [partial(run, n) for n in pair])
            wrong = sum(not good for part in right for good in part)
            device.expect(not wrong, f"{wrong} of {len(pair) * RUNS} runs of {len(pair)} programs at the same time are wrong")
    for one in loaded:
        one.close()


def side(kind: str, factor: int) -> RProgram:
    """Return ``y = factor * (x + 3) + 1`` in two steps; the intermediate is in the task's memory or in the arena."""
    head, tile = f"f32[i:{SIDE}, j:{SIDE}]", (SIDE // TILES, SIDE)
    lines = (f"t: {head} = x[i, j] + 3.0", f"y: {head} = t[i, j] * {factor}.0 + 1.0")
    ports: list[tuple[str, BufferKind, tuple[int, ...]]] = [("x", "input", (SIDE, SIDE)), ("y", "output", (SIDE, SIDE))]
    if kind == "veu":
        rows = [[Task("y", i) for i in range(n, TILES, 2)] for n in (0, 1)]
        return program_of_operators("side", [operator_of(*lines, tile=tile)], ports, (), rows)
    operators = [operator_of(line, tile=tile) for line in lines]
    mine = [range(n, TILES, 2) for n in (0, 1)]
    rows = [[*(Task("t", i) for i in own), *(Task("y", i, (Wait("t", TILES),)) for i in own)] for own in mine]
    return program_of_operators("side", operators, [*ports, ("t", "arena", (SIDE, SIDE))], [Counter("t", "t", 0, TILES)], rows)

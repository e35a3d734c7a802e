"""Conformance of measured times: what a run, a bound call and the profiler say, against a clock of our own.

The link of a chain of products takes what its task takes, since each waits for the one before; a longer chain less a shorter
one leaves out what a run costs besides. For a simulated device the clock is what its runs say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from rammer.device.manifest import Binding, Tracer
from rammer.ir.compute import Compute
from rammer.ir.operator import ROperator
from rammer.ir.program import Buffer, Port, RProgram, Task, dense
from rammer.ir.verify import verify
from rammer.testing.small_models import MODELS
from rammer.testing.subject import Subject
from rammer.testing.table_checks import program_of

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Rows and columns of the matrices, and links of the chains: long enough that a run is more than what it costs to begin one, on a
#: GPU that others use, too; and short enough that products of numbers near 1 stay finite.
SIZE, SHORT, LONG = 96, 2, 30
#: Measurements of which the least counts, how often a contradiction is measured again, and by how much times may differ: the
#: machine may be busy. Milliseconds taken for seconds are 1,000 times.
SAMPLES, RETRIES, FACTOR = 4, 4, 8.0


def chain(links: int, size: int = SIZE) -> RProgram:
    """``t1 = x x``, ``t2 = t1 x`` and so on: tasks that can only run one after another."""
    names = ["x", *(f"t{i}" for i in range(1, links + 1))]
    operators = []
    for source, name in pairwise(names):
        line = f"{name}: f32[i:{size}, j:{size}] = sum[k:{size}] {source}[i, k] * x[k, j]"
        operators.append(ROperator(name, (Compute.parse(line),), (), (name,), (size, size)))
    kinds = ["input", *["arena"] * (links - 1), "output"]
    room = size * size * 4
    buffers = tuple(
        Buffer(f"b_{n}", "float32", size * size, k, (i - 1) * room if k == "arena" else 0)  # type: ignore[arg-type]
        for i, (n, k) in enumerate(zip(names, kinds, strict=True))
    )
    return RProgram(
        "chain",
        "test",
        (Port("x", "x"),),
        (Port("y", names[-1]),),
        buffers,
        tuple(dense(n, f"b_{n}", (size, size)) for n in names),
        tuple(operators),
        (),
        (tuple(Task(o.name, 0) for o in operators),),
    )


def check_clocks(device: Subject) -> None:
    """Seconds are seconds: of runs, of bound calls, of whole programs and of single tasks."""
    for program in (short := chain(SHORT), long := chain(LONG)):
        verify(program)
    x = {"x": (device.rng.standard_normal((SIZE, SIZE)) / SIZE**0.5).astype(np.float32)}
    times: dict[str, float] = {}
    problems = [""]
    for _ in range(1 + RETRIES):  # the least of all that was measured is nobody else's time
        for name, seconds in _measured(device, short, long, x).items():
            times[name] = min(times.get(name, np.inf), seconds)
        problems = _contradictions(times, device.backend.vdevice.simulated)
        if not problems:
            return
    device.expect(False, "; ".join(problems))


def check_trace(device: Subject) -> None:
    """Where the device records when its tasks run: each task of a run has its spans, on units that there are, in a run's time."""
    backend = device.backend
    if not isinstance(backend, Tracer):
        return
    segment = program_of(device, MODELS["branches"])
    program = segment.program
    run = backend.trace(program, segment.constants, MODELS["branches"].inputs(device.rng, {}))
    if run.program is not program:  # what the device made of it computes the same
        verify(run.program)
        same = run.program.inputs == program.inputs and run.program.outputs == program.outputs
        device.expect(same, "what was recorded is another program, by its inputs and outputs")
    tasks = {(t.operator, t.index) for row in run.program.rows for t in row}
    have = {(s.operator, s.index) for s in run.spans}
    without, strange = sorted(tasks - have)[:4], sorted(have - tasks)[:4]
    device.expect(have == tasks, f"tasks without a span: {without}; spans of no task: {strange}")
    for span in run.spans:
        good = 0 <= span.start <= span.end < 60 and 0 <= span.veu < backend.vdevice.veus
        device.expect(good, f"a span from {span.start} to {span.end} s on unit {span.veu}")


def _measured(device: Subject, short: RProgram, long: RProgram, inputs: Mapping[str, Array]) -> dict[str, float]:
    """Seconds of the two chains and of a task, by every clock that there is."""
    profiler, found = device.backend.profiler, dict[str, float]()
    for what, program in (("short", short), ("long", long)):
        loaded = device.backend.load(program, {})
        loaded.run(inputs)
        found |= _two(f"a run of the {what} chain", lambda: loaded.run(inputs).seconds)  # noqa: B023
        bound = loaded.bind(inputs, {})
        bound.seconds()
        found |= _two(f"a bound run of the {what} chain", bound.seconds)
        loaded.close()
        found[f"the {what} chain by the profiler"] = profiler.program_time(program, {}, 3)
    operator = short.operators[0]
    binding = Binding.of(short, ())
    kernel = device.backend.kernel(operator, binding)
    found["a task by the profiler"] = min(profiler.task_time(kernel, binding)[0] for _ in range(SAMPLES))
    return found


def _two(name: str, call: Callable[[], float]) -> dict[str, float]:
    """The least that ``call`` says, and the least that it takes."""
    said, taken = [], []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        said.append(call())
        taken.append(time.perf_counter() - start)
    return {name: min(said), f"{name}, from outside": min(taken)}


def _contradictions(times: Mapping[str, float], simulated: bool) -> list[str]:
    """What cannot be true of one device: pairs of times that differ by more than ``FACTOR``."""
    clock = "" if simulated else ", from outside"
    pairs = [
        ("the long chain by the profiler", f"a run of the long chain{clock}"),
        ("a bound run of the long chain", f"a bound run of the long chain{clock}"),
    ]
    if not simulated:
        pairs.append(("a run of the long chain", f"a run of the long chain{clock}"))
    said = [(a, times[a], times[b]) for a, b in pairs]
    link = (times[f"a run of the long chain{clock}"] - times[f"a run of the short chain{clock}"]) / (LONG - SHORT)
    said.append(("a task by the profiler", times["a task by the profiler"], link))
    return [
        f"{name} takes {have:.2e} s, but {want:.2e} s by the clock"
        for name, have, want in said
        if not want / FACTOR <= have <= want * FACTOR
    ]

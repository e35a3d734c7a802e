"""Conformance of measured times: what a run, a bound call and the profiler say, against a clock of our own.

The link of a chain of products takes what its task takes, since each waits for the one before; a longer chain less a shorter
one leaves out what a run costs besides. For a simulated device the clock is what its runs say.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rammer.device.manifest import Binding, Recorded, Span, Tracer
from rammer.ir.compute import Compute
from rammer.ir.operator import ROperator
from rammer.ir.program import Buffer, Port, RProgram, Task, dense
from rammer.verify.verifier import verify
from rammer_testing.small_models import MODELS
from rammer_testing.strict_checks import crooked
from rammer_testing.subject import Subject
from rammer_testing.table_checks import program_of

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Rows and columns of the matrices, links of the short chain, least and most links of the long one, and how much longer it takes.
#: Products of numbers near 1 stay finite.
SIZE, SHORT, FEW, MANY, APART = 64, 1, 12, 96, 2.5
#: Measurements of which the least counts, rounds of them until one contradicts nothing, and by how much times may differ.
SAMPLES, ROUNDS, FACTOR = 4, 4, 4.0
#: By how much they may not differ on a busy machine either.
GROSS = 200.0
#: By how much a device's clock may be faster than the host's, and seconds that either may be coarse by.
SLACK, INSTANT = 1.05, 5e-5
#: Threads that compute beside a run.
BURNING = 6
#: By how much the times of a recorded run may differ from those of an unrecorded one, and seconds by which spans may touch.
RECORDED, TICK = 50.0, 2e-6


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
    """Seconds are seconds of the wall, of each run: of runs, of bound calls, of whole programs and of single tasks."""
    x = {"x": (device.rng.standard_normal((SIZE, SIZE)) / SIZE**0.5).astype(np.float32)}
    links, short = _links(device, x), chain(SHORT)
    long = chain(links)
    for program in (short, long):
        verify(program)
    simulated, gross, wrong = device.backend.vdevice.simulated, list[str](), list[str]()
    unchanged = _runs_unchanged(device, long, x)
    for _ in range(ROUNDS):
        times = _measured(device, short, long, x)
        if not simulated:
            for name in ("a run", "a bound run"):
                _against_caller(device, name, times, links - SHORT)
        gross, wrong = (_contradictions(times, links - SHORT, factor, unchanged) for factor in (GROSS, FACTOR))
        if not wrong:
            break
    device.expect(not gross, "; ".join(gross))
    device.expect_time(not wrong, "; ".join(wrong))
    if not simulated:
        _busy(device, long, x)


def _runs_unchanged(device: Subject, program: RProgram, inputs: Mapping[str, Array]) -> bool:
    """Return False if the device records tasks of another program, with other kernels, in place of this one."""
    backend = device.backend
    return not isinstance(backend, Tracer) or backend.trace(program, {}, inputs).program is program


def _links(device: Subject, inputs: Mapping[str, Array]) -> int:
    """Links of a chain that takes its caller ``APART`` times as long as the short one: few where a link is much more than what it
    takes to begin a run, so that a run ends before a busy machine interrupts it."""

    def waited(links: int) -> float:
        loaded = device.backend.load(chain(links), {})
        found = min(t.waited for t in _timed(lambda: loaded.run(inputs).seconds, SAMPLES))
        loaded.close()
        return found

    links, least = FEW, waited(SHORT)
    while links < MANY and waited(links) < APART * least:
        links *= 2
    return links


class Timed(NamedTuple):
    """Seconds that a call says it took, and seconds that its caller waited."""

    said: float
    waited: float


def _timed(call: Callable[[], float], count: int) -> list[Timed]:
    """``count`` calls after one that does not count."""
    call()
    found = list[Timed]()
    for _ in range(count):
        start = time.perf_counter()
        said = call()
        found.append(Timed(said, time.perf_counter() - start))
    return found


def _busy(device: Subject, program: RProgram, inputs: Mapping[str, Array]) -> None:
    """While other threads of the process compute, a run takes no longer than its caller waits: processor time of all threads
    does, where there are several processors."""
    loaded, over = device.backend.load(program, {}), threading.Event()
    block = bytes(1 << 20)

    def burn() -> None:
        while not over.is_set():
            hashlib.sha256(block)  # without the interpreter's lock

    threads = [threading.Thread(target=burn, daemon=True) for _ in range(BURNING)]
    for thread in threads:
        thread.start()
    try:
        runs = _timed(lambda: loaded.run(inputs).seconds, 2)
    finally:
        over.set()
        for thread in threads:
            thread.join()
        loaded.close()
    for said, waited in runs:
        device.expect(
            said <= waited * SLACK + INSTANT,
            f"a run beside busy threads took {said:.2e} s, but its caller waited {waited:.2e} s: is it processor time?",
        )


def check_trace(device: Subject) -> None:
    """Where the device records when its tasks run: each task of a run has its spans, on units that there are, in a run's time.
    A task ends after those that it waits for; a unit of one thread runs one task at a time; rows that run at the same time are on
    different units."""
    backend = device.backend
    if not isinstance(backend, Tracer):
        return device.skip_whole("it records no spans (rammer.device.manifest.Tracer)")
    segment = program_of(device, MODELS["branches"])
    _spans(device, segment.program, segment.constants, MODELS["branches"].inputs(device.rng, {}))
    program = crooked(SIZE, max(2, min(backend.vdevice.veus, 4)))
    x = {"x": (device.rng.standard_normal((SIZE, SIZE)) / SIZE**0.5).astype(np.float32)}
    run = _spans(device, program, {}, x)
    units = {s.veu for s in run.spans}
    rows = sum(bool(row) for row in run.program.rows)
    alone = backend.vdevice.veus == 1 or rows < 2 or len(units) > 1
    device.expect(alone, f"tasks of {rows} rows all have their spans on unit {min(units, default=0)}")
    loaded = backend.load(program, {})
    loaded.run(x)
    took, last = min(loaded.run(x).seconds for _ in range(SAMPLES)), max(s.end for s in run.spans)
    loaded.close()
    device.expect_time(took / RECORDED <= last <= took * RECORDED, f"spans end after {last:.2e} s, but a run takes {took:.2e} s")


def _spans(device: Subject, program: RProgram, constants: Mapping[str, Array], inputs: Mapping[str, Array]) -> Recorded:
    """Record a run, and expect what holds of the spans of every device."""
    backend = device.backend
    assert isinstance(backend, Tracer)
    run = backend.trace(program, constants, inputs)
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
    device.expect(any(s.end > s.start for s in run.spans), "all spans are empty")
    _after_waits(device, run)
    if backend.vdevice.threads == 1:
        for (one, two), unit in ((pair, u) for u in {s.veu for s in run.spans} for pair in pairwise(_of_unit(run, u))):
            apart = two.start >= one.end - TICK
            device.expect(apart, f"on unit {unit} {one.operator}[{one.index}] and {two.operator}[{two.index}] overlap")
    return run


def _of_unit(run: Recorded, unit: int) -> list[Span]:
    return sorted((s for s in run.spans if s.veu == unit), key=lambda s: (s.start, s.end))


def _after_waits(device: Subject, run: Recorded) -> None:
    """A task that waits for all that a counter counts ends no sooner than any of that."""
    ends: dict[tuple[str, int], float] = {}
    for span in run.spans:
        key = (span.operator, span.index)
        ends[key] = max(ends.get(key, 0.0), span.end)
    counters = run.program.counter
    last = {c.name: max((ends[c.operator, i] for i in range(c.first, c.last)), default=0.0) for c in run.program.counters}
    for task in (t for row in run.program.rows for t in row):
        for wait in task.waits:
            if wait.threshold == counters[wait.counter].total:
                late = ends[task.operator, task.index] >= last[wait.counter] - TICK
                device.expect(late, f"{task.operator}[{task.index}] ends before what it waits for by {wait.counter}")


def _measured(device: Subject, short: RProgram, long: RProgram, inputs: Mapping[str, Array]) -> dict[str, list[Timed]]:
    """Seconds of the two chains and of a task, by every clock that there is."""
    profiler, found = device.backend.profiler, dict[str, list[Timed]]()
    for what, program in (("short", short), ("long", long)):
        loaded = device.backend.load(program, {})
        found[f"a run of the {what} chain"] = _timed(lambda: loaded.run(inputs).seconds, SAMPLES)  # noqa: B023
        bound = loaded.bind(inputs, {})
        found[f"a bound run of the {what} chain"] = _timed(bound.seconds, SAMPLES)
        loaded.close()
    found["the long chain by the profiler"] = [Timed(profiler.program_time(long, {}, 3), np.inf) for _ in range(2)]
    operator = short.operators[0]
    binding = Binding.of(short, ())
    kernel = device.backend.kernel(operator, binding)
    found["a task by the profiler"] = [Timed(profiler.task_time(kernel, binding)[0], np.inf)]
    return found


def _contradictions(times: Mapping[str, Sequence[Timed]], links: int, factor: float, unchanged: bool) -> list[str]:
    """What the profiler says that contradicts all runs, of which the long ones have so many ``links`` more, by ``factor``. Where
    there is other work meanwhile runs differ, and less contradicts them. The time of a task is compared where a device runs the
    program ``unchanged``: other kernels take other times."""
    runs, short = ([t.said for t in times[f"a run of the {what} chain"]] for what in ("long", "short"))
    bounds = {
        "the long chain by the profiler": (min(runs), max(runs)),
    }
    if unchanged:
        bounds["a task by the profiler"] = ((min(runs) - min(short)) / links, max(runs) / links)
    problems = list[str]()
    for name, (low, high) in bounds.items():
        said = min(t.said for t in times[name])
        if not low / factor <= said <= high * factor:
            problems.append(f"{name} takes {said:.2e} s, but {low:.2e} to {high:.2e} s by the clock of runs")
    return problems


def _against_caller(device: Subject, name: str, times: Mapping[str, Sequence[Timed]], links: int) -> None:
    """What runs say against what their caller waits: no run takes longer, and the links of the chain that one run has beside the
    other are in its seconds, too."""
    runs, short = times[f"{name} of the long chain"], times[f"{name} of the short chain"]
    for said, waited in (*runs, *short):
        good = 0 < said <= waited * SLACK + INSTANT
        device.expect(good, f"{name} of a chain takes {said:.2e} s, but {waited:.2e} s by the clock of its caller")
    best = min(runs, key=lambda t: t.waited)
    more = best.waited - min(t.waited for t in short)
    device.expect_time(
        best.said >= more / FACTOR,
        f"{name} of the long chain takes {best.said:.2e} s, but {links} of its links {more:.2e} s by the clock of its caller",
    )
    same = len({t.said for t in runs}) == 1
    device.expect(not same, f"{len(runs)} times {name} took {runs[0].said} s: is it the clock of the first run?")

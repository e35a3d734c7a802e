"""Conformance of measured times of runs, bound calls and the profiler against an independent clock.

Each product of a chain waits for the previous one, so a link costs the time of its task. The difference of a long and a short
chain excludes the fixed cost of a run. For a simulated device the times reported by its runs are the clock."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rammer.device.manifest import Binding, Recorded, Span
from rammer.ir.compute import Compute
from rammer.ir.operator import ROperator
from rammer.ir.program import Buffer, Port, RProgram, Task, dense
from rammer.verify.verifier import verify
from rammer_testing.small_models import MODELS
from rammer_testing.strict_checks import crooked
from rammer_testing.subject import Subject
from rammer_testing.table_checks import program_of

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Rows and columns of the matrices, links of the short chain, least and most links of the long one, and the required ratio of
#: their times. Products of numbers near 1 stay finite.
SIZE, SHORT, FEW, MANY, APART = 64, 1, 12, 96, 2.5
#: Measurements per minimum, rounds until one shows consistent times, and the allowed ratio of times.
SAMPLES, ROUNDS, FACTOR = 4, 4, 4.0
#: Allowed ratio on a busy machine.
GROSS = 200.0
#: Allowed ratio of the device's clock to the host's, and the resolution of either in seconds.
SLACK, INSTANT = 1.05, 5e-5
#: Threads that compute during a run, and the number of runs after which other work on the machine left them no processor.
BURNING, MOST_BUSY = 6, 16
#: Allowed ratio of the times of recorded and unrecorded runs, and allowed overlap of spans in seconds.
RECORDED, TICK = 50.0, 2e-6


def chain(links: int, size: int = SIZE) -> RProgram:
    """Return a chain of dependent tasks: ``t1 = x x``, ``t2 = t1 x`` and so on."""
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
    """Check wall-clock seconds of every run: of runs, of bound calls, of whole programs and of single tasks."""
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
    """Return False if the device records tasks of another program with other kernels."""
    backend = device.backend
    return not backend.records_tasks or backend.trace(program, {}, inputs).program is program


def _links(device: Subject, inputs: Mapping[str, Array]) -> int:
    """Return the number of links of a chain with ``APART`` times the duration of the short chain for its caller. If a link costs
    much more than starting a run, few links suffice: the run ends before a busy machine interrupts it."""

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
    """Seconds reported by a call, and seconds that its caller waited."""

    said: float
    waited: float


def _timed(call: Callable[[], float], count: int) -> list[Timed]:
    """Time ``count`` calls after one warm-up call."""
    call()
    found = list[Timed]()
    for _ in range(count):
        start = time.perf_counter()
        said = call()
        found.append(Timed(said, time.perf_counter() - start))
    return found


def _busy(device: Subject, program: RProgram, inputs: Mapping[str, Array]) -> None:
    """Check that a run reports at most the time that its caller waits while other threads compute. A device that reports
    processor time of all threads fails if the machine has several processors. Runs repeat until two of them coincide with more
    processor time than one thread has."""
    loaded, over = device.backend.load(program, {}), threading.Event()
    block = bytes(1 << 20)

    def burn() -> None:
        while not over.is_set():
            hashlib.sha256(block)  # without the interpreter lock

    threads = [threading.Thread(target=burn, daemon=True) for _ in range(BURNING)]
    for thread in threads:
        thread.start()
    runs, conclusive = list[Timed](), 0
    try:
        while conclusive < 2 and len(runs) < MOST_BUSY:
            processor = time.process_time()
            runs += _timed(lambda: loaded.run(inputs).seconds, 1)
            conclusive += time.process_time() - processor > 2 * SLACK * runs[-1].waited + INSTANT
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
    """Check the recorded spans of tasks: each task of a run has spans on existing units, within the time of the run.

    A task ends after the tasks that it waits for. A unit of one thread runs one task at a time. Rows that run concurrently are on
    different units. Skipped if the device does not record tasks."""
    backend = device.backend
    if not backend.records_tasks:
        return device.skip_whole("it records no spans (Backend.trace)")
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
    """Record a run and check the properties of spans that hold on every device."""
    backend = device.backend
    run = backend.trace(program, constants, inputs)
    if run.program is not program:  # the device's own version computes the same
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
    """Check that a task that waits for a whole counter ends no sooner than the counted tasks."""
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
    """Return seconds of the two chains and of one task, by every available clock."""
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
    """Return the profiler's times that differ from all runs by more than ``factor``.

    The long runs have ``links`` more links than the short ones. Other load widens the range of runs, so fewer times contradict
    them. The time of a task is compared only if the device runs the program ``unchanged``, since other kernels have other times.
    """
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
    """Compare the times reported by runs with the times that their caller waits. A run must not report more than the caller
    waited, and its seconds must include the extra links of the long chain."""
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

"""Conformance of threads: concurrent calls from several Python threads give the results of sequential calls. Every check keeps
all outputs until all runs are done. This also detects output memory that a later run overwrites."""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from rammer.compiled.segments import Compiled
from rammer.errors import DeviceFailure
from rammer.runtime.bound_call import BoundCall
from rammer.runtime.executable import Executable
from rammer_testing.bound_checks import HOSTED, opened
from rammer_testing.judge import TOLERANCE, reference, relative_error
from rammer_testing.small_models import MODELS, SmallModel
from rammer_testing.subject import Subject

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Threads of a check, and runs per thread.
THREADS, RUNS = 8, 6
#: Seconds until an unfinished check counts as hanging.
PATIENCE = 300.0
#: The same limit if the usual duration is available: a factor of it, and a minimum in seconds.
SLOWER, LEAST = 20.0, 8.0
#: Thread switch interval in seconds: a hundredth of Python's default, so that switches occur everywhere.
SWITCH = 5e-5
#: Shapes of the model "dynamic" that no other check uses.
SHAPES = tuple({"N": n, "C": c} for n, c in ((3, 5), (7, 2), (4, 9), (2, 6), (5, 5)))


@dataclass
class Job:
    """A model on the device with random inputs of one of its shapes. ``compiled`` is used to compute the reference."""

    model: SmallModel
    exe: Executable
    shape: Mapping[str, int] = field(default_factory=dict)

    def inputs(self, rng: np.random.Generator) -> dict[str, Array]:
        return self.model.inputs(rng, self.shape)

    def compiled(self) -> Compiled:
        """Return the compiled model that the executable runs for this shape."""
        return self.exe.prepare(self.exe.checked(self.inputs(np.random.default_rng(0)))).compiled


@dataclass(frozen=True)
class Done:
    """A finished run: its job, inputs and outputs."""

    job: Job
    inputs: dict[str, Array]
    outputs: dict[str, Array]


def at_once(device: Subject, works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of ``works``, each run in a separate thread, started together. Raises if one of them raised."""
    results: list[Any] = [None] * len(works)
    problems = list[BaseException]()
    start = threading.Barrier(len(works))

    def call(place: int) -> None:
        start.wait()
        try:
            results[place] = works[place]()
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(works))]
    with _restless():
        for thread in threads:
            thread.start()
        end = time.monotonic() + PATIENCE
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
    device.expect(not any(t.is_alive() for t in threads), f"threads have not ended after {PATIENCE:.0f} s")
    if problems:
        device.expect(False, f"{len(problems)} of {len(works)} threads failed: {_said(problems[0])}")
    return results


def ended(device: Subject, what: str, work: Callable[[], Any], usual: float = math.inf) -> Any:
    """Return the result of ``work``. Raises ConformanceError if it does not end in time, as with a missing signal. The limit is
    ``PATIENCE``, or less if the ``usual`` seconds of the same work are short."""
    patience = min(PATIENCE, max(LEAST, SLOWER * usual))
    found: list[Any] = []
    problems: list[BaseException] = []

    def call() -> None:
        try:
            found.append(work())
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(patience)
    device.expect(not thread.is_alive(), f"{what} has not ended after {patience:.0f} s")
    if problems:
        raise problems[0]
    return found[0]


def _said(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else ''}"


@contextmanager
def _restless() -> Iterator[None]:
    """Let Python switch threads as often as possible."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def run_many(device: Subject, jobs: Sequence[Job], threads: int, runs: int) -> int:
    """Run ``jobs`` round-robin, ``runs`` runs in each of ``threads`` threads, with new inputs. Return the number of wrong
    outputs."""
    seeds = device.rng.integers(0, 2**31, threads)

    def work(number: int) -> list[Done]:
        rng, done = np.random.default_rng(seeds[number]), list[Done]()
        for i in range(runs):
            job = jobs[(number + i) % len(jobs)]
            inputs = job.inputs(rng)
            done.append(Done(job, inputs, job.exe.run(inputs)))
        return done

    parts = at_once(device, [partial(work, n) for n in range(threads)])
    return count_wrong([d for part in parts for d in part])


def count_wrong(runs: Sequence[Done]) -> int:
    """Return the number of runs with an output that differs from float64."""
    compiled = {id(d.job): d.job.compiled() for d in runs}
    return sum(not _right(d, compiled[id(d.job)]) for d in runs)


def _right(done: Done, compiled: Compiled) -> bool:
    want = reference(compiled, done.inputs)
    return all(relative_error(done.outputs[n], want[n]) <= TOLERANCE for n in want)


def jobs_of(device: Subject, *names: str, resident: int = 8) -> list[Job]:
    """Return one job per shape of each model; each model has a separate executable."""
    result = list[Job]()
    for name in names:
        model = MODELS[name]
        exe = device.executable(model, resident=resident)
        result += [Job(model, exe, shape) for shape in (SHAPES if name == "dynamic" else model.shapes)]
    return result


@contextmanager
def closing(jobs: Sequence[Job]) -> Iterator[None]:
    try:
        yield
    finally:
        for job in jobs:
            job.exe.close()


def check_runs(device: Subject) -> None:
    """Check concurrent runs of one executable, of several on one device, and of one program without an executable."""
    for names in (("product",), ("branches",), ("product", "softmax", "convolution")):
        jobs = jobs_of(device, *names)
        with closing(jobs):
            wrong = run_many(device, jobs, THREADS, RUNS)
            device.expect(wrong == 0, f"{wrong} of {THREADS * RUNS} runs of {', '.join(names)} in threads are wrong")
    (job,) = jobs_of(device, "product")
    with closing([job]):
        special = job.exe.prepare(job.exe.checked(job.inputs(device.rng)))
        (program,) = special.loaded.values()
        inputs = [job.inputs(device.rng) for _ in range(THREADS * RUNS)]

        def share(number: int) -> list[Done]:
            return [Done(job, x, program.run(x).outputs) for x in inputs[number::THREADS]]

        done = [d for part in at_once(device, [partial(share, n) for n in range(THREADS)]) for d in part]
        wrong = count_wrong(done)
        device.expect(wrong == 0, f"{wrong} of {len(done)} runs of a loaded program in threads are wrong")


def check_first_runs(device: Subject) -> None:
    """Check that concurrent first runs compile every set of shapes once, with correct results."""
    jobs = jobs_of(device, "dynamic")
    exe, bound = jobs[0].exe, list[str]()
    exe.progress = lambda step, detail: bound.append(step) if step == "bind" else None
    with closing(jobs):
        wrong = run_many(device, jobs, 2 * len(jobs), 2)
        device.expect(wrong == 0, f"{wrong} of {4 * len(jobs)} first runs in threads are wrong")
        device.expect(len(bound) == len(jobs), f"{len(jobs)} sets of shapes were compiled {len(bound)} times")


def check_dropped(device: Subject) -> None:
    """Check that executables that were never closed are collected while others run."""
    (job,) = jobs_of(device, "product")

    def drop() -> list[Done]:
        rng, done = np.random.default_rng(0), list[Done]()
        for _ in range(3):
            (other,) = jobs_of(device, "softmax")
            inputs = other.inputs(rng)
            done.append(Done(job, inputs, other.exe.run(inputs)))
            del other
            gc.collect()
        return done

    with closing([job]):
        inputs = [job.inputs(device.rng) for _ in range(4 * RUNS)]

        def share(number: int) -> list[Done]:
            return [Done(job, x, job.exe.run(x)) for x in inputs[number::2]]

        first, second, _ = at_once(device, [partial(share, 0), partial(share, 1), drop])
        wrong = count_wrong([*first, *second])
        device.expect(wrong == 0, f"{wrong} runs are wrong while other executables are collected")


def check_bound_calls(device: Subject) -> None:
    """Check bound calls created in one thread and called in others: one per thread during ordinary runs, and one by all."""
    (job,) = jobs_of(device, "product")
    with closing([job]):
        calls = [job.exe.bind(job.inputs(device.rng)) for _ in range(THREADS // 2)]
        seeds = iter(device.rng.integers(0, 2**31, THREADS))

        def called(bound: BoundCall, seed: int) -> list[Done]:
            rng, done = np.random.default_rng(seed), list[Done]()
            for _ in range(RUNS):
                inputs = job.inputs(rng)
                bound.write(inputs)
                bound.run()
                done.append(Done(job, inputs, bound.to_host()))
            return done

        def ran(seed: int) -> list[Done]:
            rng = np.random.default_rng(seed)
            return [Done(job, x, job.exe.run(x)) for x in (job.inputs(rng) for _ in range(RUNS))]

        works: list[Callable[[], list[Done]]] = [partial(called, b, next(seeds)) for b in calls]
        works += [partial(ran, next(seeds)) for _ in range(THREADS // 2)]
        parts = at_once(device, works)
        wrong = [count_wrong(part) for part in parts]
        device.expect(not any(wrong), f"wrong runs of bound calls and of others in threads: {wrong}")
        inputs = {n: np.array(a) for n, a in job.inputs(device.rng).items()}
        shared = job.exe.bind(inputs)

        def all_of_it() -> Done:
            shared.run()
            shared.seconds()
            return Done(job, inputs, shared.to_host())

        count = count_wrong(at_once(device, [all_of_it] * THREADS))
        device.expect(count == 0, f"{count} of {THREADS} threads read something wrong from one bound call")
    with opened(device, HOSTED) as exe:
        _whole_runs(device, exe)


def _whole_runs(device: Subject, exe: Executable) -> None:
    """Check that a run of several programs sees the inputs of one ``write``, despite concurrent writes."""
    choices = [HOSTED.inputs(device.rng, {}) for _ in range(2)]
    want = [exe.run(inputs) for inputs in choices]
    bound, over = exe.bind(choices[0]), threading.Event()

    def write() -> list[dict[str, Array]]:  # until a thread has run: a fixed number of writes could end before the first run
        turn = 0
        while not over.is_set():
            bound.write(choices[turn := 1 - turn])
        return []

    def run() -> list[dict[str, Array]]:
        found = list[dict[str, Array]]()
        try:
            for _ in range(RUNS):
                bound.run()
                found.append(bound.to_host())
        finally:
            over.set()
        return found

    for have in (h for part in at_once(device, [write, write, run, run]) for h in part):
        same = any(all(np.array_equal(have[n], w[n]) for n in w) for w in want)
        device.expect(same, "a bound run gave what neither of two written sets of inputs gives")


def check_closing(device: Subject) -> None:
    """Check closing in two threads during runs and bound calls: finished runs are correct, later ones report "closed"."""
    (job,) = jobs_of(device, "product")
    compiled = job.compiled()
    running, closed = threading.Event(), threading.Event()

    def until_closed(once: Callable[[dict[str, Array]], dict[str, Array]], seed: int) -> list[Done]:
        rng, done = np.random.default_rng(seed), list[Done]()
        while True:
            inputs, late = job.inputs(rng), closed.is_set()
            try:
                done.append(Done(job, inputs, once(inputs)))
            except DeviceFailure as problem:
                device.expect("closed" in str(problem), f"a call while another thread closes says {problem}")
                return done
            device.expect(not late, "a call that came after close was made")
            if len(done) == 2:
                running.set()

    def bound_once(bound: BoundCall) -> Callable[[dict[str, Array]], dict[str, Array]]:
        def once(inputs: dict[str, Array]) -> dict[str, Array]:
            bound.write(inputs)
            bound.run()
            return bound.to_host()

        return once

    def close() -> list[Done]:
        running.wait(PATIENCE)
        job.exe.close()
        closed.set()
        return []

    works: list[Callable[[], list[Done]]] = [partial(until_closed, job.exe.run, seed) for seed in range(3)]
    for seed in range(2):
        works.append(partial(until_closed, bound_once(job.exe.bind(job.inputs(device.rng))), seed))
    parts = at_once(device, [*works, close, close])
    wrong = sum(not _right(d, compiled) for part in parts for d in part)
    device.expect(wrong == 0, f"{wrong} runs before and while closing are wrong")

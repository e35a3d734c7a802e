"""Conformance of lifetimes: outputs belong to the caller, closed programs raise errors, and few shapes stay resident."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from rammer.compiled.segments import ProgramSegment
from rammer.device.manifest import Backend, Binding, Loaded
from rammer.errors import DeviceFailure
from rammer_testing.bound_checks import HOSTED, equal, fails, opened
from rammer_testing.small_models import MODELS, SmallModel
from rammer_testing.subject import Subject
from rammer_testing.thread_checks import SHAPES, THREADS, at_once, closing, jobs_of, run_many

#: Number of times that a device is opened and closed to detect leaks.
OPENED = 4
#: Outputs that a lazy runtime would not copy: an input, a constant, a tensor under two names, and views on the host.
PASSED = SmallModel(
    "passed",
    """(float[4,4] x, float[4,4] w) => (float[4,4] a, float[4,4] b, float[4,4] c, float[4,4] d) {
    a = Identity(x)
    b = Identity(w)
    s = Add(x, w)
    c = Identity(s)
    d = Identity(s)
}""",
)


def check_own_outputs(device: Subject) -> None:
    """Check that outputs share no memory with inputs, constants, each other or later runs, so writing to them is safe."""
    for model in (MODELS["product"], MODELS["views"], PASSED, HOSTED):
        with opened(device, model) as exe:
            inputs = model.inputs(device.rng, model.shapes[0])
            kept = {n: np.array(a) for n, a in inputs.items()}
            first, second = exe.run(inputs), exe.run(inputs)
            arrays = [*inputs.values(), *first.values(), *second.values()]
            apart = not any(np.may_share_memory(a, b) for a, b in combinations(arrays, 2) if a.size and b.size)
            device.expect(apart, f"{model.name}: outputs share memory with inputs or with other outputs")
            device.expect(all(a.flags.writeable for a in first.values()), f"{model.name}: outputs cannot be written")
            for array in first.values():
                array[...] = 77
            equal(device, f"{model.name}: inputs after outputs were overwritten", inputs, kept)
            equal(device, f"{model.name}: after outputs were overwritten", exe.run(inputs), second)


def check_closed(device: Subject) -> None:
    """Check that every call after ``close`` raises a DeviceFailure that names it. Closing again, in any thread, does nothing."""
    for model in (MODELS["product"], HOSTED):
        _closed_model(device, model)
    _closed_programs(device)


def _closed_model(device: Subject, model: SmallModel) -> None:
    """Check every call of an executable, its specialisations and its bound calls; one bound call is closed earlier."""
    exe, inputs = device.executable(model), model.inputs(device.rng, model.shapes[0])
    exe.run(inputs)
    bound, done = exe.bind(inputs), exe.bind(inputs)
    done.close()
    done.close()
    special = exe.prepare(exe.checked(inputs))
    at_once(device, [exe.close, exe.close])
    exe.close()
    special.close()
    bound.close()
    calls: list[Callable[[], Any]] = [
        lambda: exe.run(inputs),
        lambda: exe.bind(inputs),
        lambda: exe.prepare(inputs),
        lambda: special.run(inputs),
        lambda: special.bind(inputs, {}),
        *(call for b in (bound, done) for call in (b.run, b.seconds, b.to_host, partial(b.write, inputs))),
    ]
    for call in calls:
        fails(device, DeviceFailure, "closed", call)
    bound.synchronize()


def _closed_programs(device: Subject) -> None:
    """Check every call of a closed program that was loaded without an executable."""
    model = MODELS["branches"]
    (segment,) = device.executable(model).compile_only({}).segments
    assert isinstance(segment, ProgramSegment)
    loaded, inputs = device.backend.load(segment.program, segment.constants), model.inputs(device.rng, {})
    bound = loaded.bind(inputs, {})
    bound.run()
    loaded.run(inputs)
    loaded.close()
    loaded.close()
    calls: tuple[Callable[[], Any], ...] = (
        lambda: loaded.run(inputs),
        lambda: loaded.bind(inputs, {}),
        bound.run,
        bound.seconds,
        bound.to_host,
        lambda: bound.write(inputs),
    )
    for call in calls:
        fails(device, DeviceFailure, "closed", call)
    bound.synchronize()
    bound.close()


def check_device_closed(device: Subject) -> None:
    """Check that a closed device runs nothing and leaks nothing. Other instances continue, and it can be opened again."""
    model = MODELS["product"]
    (segment,) = device.executable(model).compile_only({}).segments
    assert isinstance(segment, ProgramSegment)
    program, constants, inputs = segment.program, segment.constants, model.inputs(device.rng, {})

    def used(backend: Backend, what: str) -> Loaded:
        loaded = backend.load(program, constants)
        equal(device, what, loaded.run(inputs).outputs, want)
        return loaded

    first = device.backend.load(program, constants)
    want = first.run(inputs).outputs
    before = _left()
    for _ in range(OPENED):
        other = device.registry.open(device.spec, options=dict(device.options))
        loaded = used(other, "on a device that was opened again")
        bound = loaded.bind(inputs, {})
        bound.run()
        at_once(device, [other.close, other.close])
        other.close()
        loaded.close()
        bound.close()
        for call in (
            lambda: loaded.run(inputs),  # noqa: B023
            bound.run,
            lambda: other.load(program, constants),  # noqa: B023
            lambda: other.kernel(program.operators[0], Binding.of(program, constants)),  # noqa: B023
            lambda: other.profiler.program_time(program, constants, 1),  # noqa: B023
        ):
            fails(device, DeviceFailure, "closed", call)
        equal(device, "after another opening of the device was closed", first.run(inputs).outputs, want)
        used(device.backend, "loaded after another opening of the device was closed").close()
    after = _left()
    first.close()
    for what, had, has in zip(("threads", "open files"), before, after, strict=True):
        device.expect(has - had < OPENED, f"the device was opened and closed {OPENED} times, but {has - had} {what} have stayed")


def _left() -> tuple[int, int]:
    """Return the threads and open files of this process; 0 files if the system does not report them."""
    gc.collect()
    files = Path("/proc/self/fd")
    return threading.active_count(), len(list(files.iterdir())) if files.is_dir() else 0


def check_resident(device: Subject) -> None:
    """Check that only the requested number of shape sets stays resident: the most recently used ones and those in use."""
    jobs = jobs_of(device, "dynamic", resident=2)
    exe, rng = jobs[0].exe, device.rng
    with closing(jobs):
        inputs = [j.inputs(rng) for j in jobs]
        first, second = exe.prepare(inputs[0]), exe.prepare(inputs[1])
        exe.run(inputs[0])
        exe.run(inputs[2])
        device.expect(len(exe.cache) == 2, f"{len(exe.cache)} sets of shapes stay on the device, not 2")
        device.expect(exe.prepare(inputs[0]) is first, "the set of shapes that was used last but one was freed")
        fails(device, DeviceFailure, "closed", lambda: second.run(inputs[1]))
        for program in second.loaded.values():
            fails(device, DeviceFailure, "closed", lambda: program.run(inputs[1]))  # noqa: B023
        bound = exe.bind(inputs[0])
        want = exe.run(inputs[0])
        for other in (*inputs[1:], inputs[1]):
            exe.run(other)
        bound.run()
        equal(device, "bound, after other shapes were run", bound.to_host(), want)
        device.expect(exe.prepare(inputs[0]) is first, "a set of shapes with an open bound call was freed")
        bound.close()
        for other in inputs[1:3]:
            exe.run(other)
        fails(device, DeviceFailure, "closed", lambda: first.run(inputs[0]))
        wrong = run_many(device, jobs, THREADS // 2, len(SHAPES))
        device.expect(wrong == 0, f"{wrong} runs of {len(SHAPES)} sets of shapes in threads, of which two stay, are wrong")
        device.expect(len(exe.cache) <= 2, f"{len(exe.cache)} sets of shapes stay on the device after all runs, not 2")

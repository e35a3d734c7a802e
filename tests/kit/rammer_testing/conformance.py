"""The conformance kit: the checks that every device must pass, for a plugin author's own tests.

``check_device("toy")`` runs everything and raises ConformanceError with all findings. For one test per
check, parametrise over ``CHECKS``::

    @pytest.mark.parametrize("check", CHECKS)
    def test_conformance(check: str) -> None:
        with subject("toy") as device:
            CHECKS[check](device)

``python -m rammer_testing.conformance --device toy`` prints a line for each check.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.compiled.segments import ProgramSegment
from rammer.device.hooks import hookimpl
from rammer.device.loader import DeviceStatus, Registry
from rammer.device.manifest import Backend, Binding, Device
from rammer.errors import BadInput, DeviceFailure, RammerError
from rammer.ir.compute import Compute
from rammer.ir.operator import ROperator
from rammer.ir.program import dense
from rammer.runtime.loaded_model import LoadedModel
from rammer_testing.array_checks import check_caller_arrays, check_two_bound
from rammer_testing.backend_checks import check_freed, check_kernels, check_opening, check_queue
from rammer_testing.bound_checks import check_bind
from rammer_testing.claim_checks import check_large_tiles, check_odd_operators, check_prices, check_virtual_device
from rammer_testing.clock_checks import check_clocks, check_trace
from rammer_testing.judge import TOLERANCE as TOLERANCE
from rammer_testing.judge import reference as reference
from rammer_testing.judge import relative_error as relative_error
from rammer_testing.layer_checks import check_shared_layers
from rammer_testing.lifetime_checks import check_closed, check_device_closed, check_own_outputs, check_resident
from rammer_testing.long_checks import check_long_tables, check_side_by_side
from rammer_testing.place_checks import check_lanes, check_places, check_types
from rammer_testing.small_models import MODELS, SmallModel
from rammer_testing.strict_checks import (
    check_precisions,
    check_special_values,
    check_strided_arrays,
    check_unknown_family,
    check_waits,
)
from rammer_testing.subject import ConformanceError, Subject
from rammer_testing.table_checks import (
    check_after_failure,
    check_bands,
    check_empty,
    check_guards,
    check_names,
    check_tables,
    check_twins,
)
from rammer_testing.table_checks import copying_program as copying_program
from rammer_testing.table_checks import spreading_program as spreading_program
from rammer_testing.thread_checks import check_bound_calls, check_closing, check_dropped, check_first_runs, check_runs
from rammer_testing.value_checks import check_functions, check_half, check_integers, check_subnormals

__all__ = [
    "CHECKS",
    "CheckResult",
    "check_device",
    "chosen_checks",
    "copying_program",
    "failures",
    "reference",
    "registry_of",
    "relative_error",
    "results",
    "spreading_program",
    "subject",
]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Repetitions of a time measurement that contradicts the work.
RETRIES = 4


@dataclass(frozen=True)
class _Manifests:
    """An entry point with an existing plugin."""

    devices: tuple[Device, ...]
    name: str = "given"

    def load(self) -> object:
        """Return a plugin with one hook."""
        return self

    @hookimpl
    def rammer_devices(self) -> Sequence[Device]:
        """Return the manifests of the devices."""
        return self.devices


def registry_of(*devices: Device) -> Registry:
    """Return a registry of these manifests only, to test a device that is not installed."""
    return Registry([_Manifests(devices)])


@contextmanager
def subject(spec: str, **options: str) -> Iterator[Subject]:
    """Open a Subject for ``NAME[:INDEX]``. Raises DeviceUnavailable if the device does not work here."""
    yield Subject(spec, options=options)


# --- checks -----------------------------------------------------------------------------------------


def check_manifest(device: Subject) -> None:
    """Check that the plugin loads, has this core's API version and describes its hardware."""
    status: DeviceStatus = device.registry.status(device.spec.partition(":")[0])
    device.expect(status.state == "ok", f"state {status.state}: {status.reason}")
    device.expect(bool(device.backend.hardware.name and device.backend.hardware.kind), "hardware without name or kind")
    found = status.hardware[int(device.spec.partition(":")[2] or 0)]
    same = (found.name, found.kind) == (device.backend.hardware.name, device.backend.hardware.kind)
    device.expect(same, f"what was found is {found.name} ({found.kind}), what was opened {device.backend.hardware.name}")
    device.expect(bool(device.backend.fingerprint), "an empty fingerprint would mix kernels of different devices")
    for name in (n for n, member in vars(Backend).items() if isinstance(member, cached_property)):
        try:
            getattr(device.backend, name)
        except Exception as problem:
            raise ConformanceError(f"attribute {name} raises {type(problem).__name__}: {problem}") from problem
    again = device.registry.open(device.spec, options=dict(device.options))
    device.expect(again.fingerprint == device.backend.fingerprint, "the fingerprint changes at the next opening")


def check_model(device: Subject, model: SmallModel) -> None:
    """Check every shape of ``model`` against float64, and bit-identical results after other inputs."""
    exe = device.executable(model)
    try:
        for shape in model.shapes:
            first, other = (model.inputs(device.rng, shape) for _ in range(2))
            special = exe.prepare(exe.checked(first))
            have = _compared(device, model, special, first)
            _compared(device, model, special, other)
            again, _ = special.run(first)
            same = all(np.array_equal(have[n], again[n], equal_nan=True) for n in have)
            device.expect(same, f"{model.name}: the same inputs give other bits in a later run")
    finally:
        exe.close()


def _compared(device: Subject, model: SmallModel, special: LoadedModel, inputs: Mapping[str, Array]) -> dict[str, Array]:
    have, timing = special.run(inputs)
    device.expect(timing.device > 0, f"{model.name}: a run took {timing.device} s on the device")
    for name, want in reference(special.compiled, inputs).items():
        error = relative_error(have[name], want)
        device.expect(error <= TOLERANCE, f"{model.name}: output {name!r} has relative L2 error {error:.2e}")
    return have


def check_policies(device: Subject) -> None:
    """Check that the device runs the table of every policy, and of its default policy ("")."""
    model = MODELS["branches"]
    for policy in ("", "sequential", "greedy", "wavefront", "ios"):
        exe = device.executable(model, policy)
        inputs = model.inputs(device.rng, model.shapes[0])
        _compared(device, model, exe.prepare(exe.checked(inputs)), inputs)
        exe.close()


def check_layouts(device: Subject) -> None:
    """Check that kernels read and write tensors according to their storages: the images are channels-last inside."""
    model = MODELS["images"]
    exe = device.executable(model, layout="nhwc")
    inputs = model.inputs(device.rng, model.shapes[0])
    special = exe.prepare(exe.checked(inputs))
    device.expect(any(p.permuted for p in special.compiled.programs), "no tensor inside has its channels last")
    _compared(device, model, special, inputs)
    exe.close()


def check_memory_limit(device: Subject) -> None:
    """Check that a program that needs more memory than available raises DeviceFailure before anything is computed."""
    memory = device.backend.hardware.memory
    if not memory:
        return device.skip_whole("the hardware has no known amount of memory")
    for what, program in (("", copying_program(memory // 4 + 1)), (" in its arena", spreading_program(memory // 4 + 1))):
        try:
            device.backend.load(program, {}).close()
        except DeviceFailure as problem:
            text = str(problem)
            device.expect(any(c.isdigit() for c in text), f"the out-of-memory error names no size: {text}")
        else:
            device.expect(False, f"a program of more than {memory} bytes{what} was loaded into {memory} bytes")


def _product(size: int) -> tuple[ROperator, Binding]:
    """Return an untiled matrix product of ``size`` cubed."""
    line = f"c: f32[i:{size}, j:{size}] = sum[k:{size}] a[i, k] * b[k, j]"
    operator = ROperator("c", (Compute.parse(line),), (), ("c",))
    types = {n: operator.anchor.type for n in ("a", "b", "c")}
    return operator, Binding(types, {n: dense(n, n, (size, size)) for n in types})


def _task_times(device: Subject, size: int) -> list[float]:
    """Return four measured seconds of one task of a product of ``size`` cubed, and check its resources."""
    backend, profiler = device.backend, device.backend.profiler
    operator, binding = _product(size)
    kernel = backend.kernel(replace(operator, tile=(size, size)), binding)
    samples = [profiler.task_time(kernel, binding) for _ in range(4)]
    device.expect(all(0 < t < math.inf for pair in samples for t in pair), f"task times {samples}")
    measured = backend.vdevice.simulated or len(set(samples)) > 1
    device.expect(measured, f"four measurements gave {samples[0]} s: is it a formula?")
    resources = profiler.resources(kernel, binding)
    device.expect(resources.threads >= 1 and resources.local_bytes >= 0, f"resources {resources}")
    return [alone for alone, _ in samples]


def check_profiler(device: Subject) -> None:
    """Check the three measurements of the profiler: positive, larger for more work, and measured on a device with a clock."""
    profiler = device.backend.profiler
    small, large = (_task_times(device, size) for size in (8, 128))
    for _ in range(RETRIES):  # on a busy machine the least of a few samples may include other work
        if min(small) < min(large):
            break
        small, large = small + _task_times(device, 8), large + _task_times(device, 128)
    device.expect(min(small) < min(large), f"4096 times the work takes {min(large)} s instead of {min(small)} s")
    model = MODELS["convolution"]
    special = device.executable(model).prepare(model.inputs(device.rng, model.shapes[0]))
    (segment,) = special.compiled.segments
    assert isinstance(segment, ProgramSegment)
    whole = profiler.program_time(segment.program, segment.constants, 3)
    device.expect(0 < whole < 60, f"the program time is {whole} s")
    special.close()


def _model_check(name: str) -> Callable[[Subject], None]:
    return lambda device: check_model(device, MODELS[name])


#: Cheap checks first, threads and clocks last.
CHECKS: dict[str, Callable[[Subject], None]] = {
    "manifest": check_manifest,
    "opening": check_opening,
    "virtual device": check_virtual_device,
    "kernels": check_kernels,
    **{f"model {name}": _model_check(name) for name in MODELS},
    "policies": check_policies,
    "layouts": check_layouts,
    "special values": check_special_values,
    "functions": check_functions,
    "integers": check_integers,
    "half precision": check_half,
    "subnormal numbers": check_subnormals,
    "unknown family": check_unknown_family,
    "precisions": check_precisions,
    "odd operators": check_odd_operators,
    "large tiles": check_large_tiles,
    "shared layers": check_shared_layers,
    "types": check_types,
    "places": check_places,
    "lanes": check_lanes,
    "guards": check_guards,
    "names": check_names,
    "empty tensors": check_empty,
    "memory limit": check_memory_limit,
    "after a failure": check_after_failure,
    "bind": check_bind,
    "queue": check_queue,
    "two bound calls": check_two_bound,
    "strided arrays": check_strided_arrays,
    "callers' arrays": check_caller_arrays,
    "two programs": check_twins,
    "own outputs": check_own_outputs,
    "closed": check_closed,
    "trace": check_trace,
    "waits": check_waits,
    "bands": check_bands,
    "tables": check_tables,
    "long tables": check_long_tables,
    "side by side": check_side_by_side,
    "prices": check_prices,
    "profiler": check_profiler,
    "clocks": check_clocks,
    "freed": check_freed,
    "device closed": check_device_closed,
    "threads: closing": check_closing,
    "threads: dropped": check_dropped,
    "threads: first runs": check_first_runs,
    "threads: bound calls": check_bound_calls,
    "threads: runs": check_runs,
    "resident": check_resident,
}
#: Checks that measure time; tests mark them ``alone``.
TIMED: Final = frozenset({"clocks", "trace"})


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. ``state`` is ok, failed or skipped. ``reason`` is the fault, or the reason why the check, or a
    part of it, does not apply."""

    name: str
    state: str
    reason: str
    seconds: float

    def __str__(self) -> str:
        said = {"failed": self.reason, "skipped": f"skipped, because {self.reason}"}.get(self.state, "ok")
        if self.state == "ok" and self.reason:
            said = f"ok, in part skipped, because {self.reason}"
        return f"{self.name:<26} {said}  ({self.seconds:.1f} s)"


def results(spec: str, options: Mapping[str, str], checks: Iterable[str]) -> Iterator[CheckResult]:
    """Run each check on a fresh Subject. Raises RammerError if the device does not open."""
    for name in checks:
        start, state = time.perf_counter(), "ok"
        with subject(spec, **options) as device:
            try:
                CHECKS[name](device)
            except Exception as found:
                state, device.skipped = "failed", [f"{type(found).__name__}: {found}"]
        if state == "ok" and device.whole:
            state = "skipped"
        yield CheckResult(name, state, "; ".join(device.skipped), time.perf_counter() - start)


def failures(spec: str, options: Mapping[str, str], checks: Iterable[str]) -> Iterator[tuple[str, str, float]]:
    """Yield the name, fault ("" if none) and seconds of each check. Raises RammerError if the device does not open."""
    for found in results(spec, options, checks):
        yield found.name, found.reason if found.state == "failed" else "", found.seconds


def check_device(spec: str, **options: str) -> None:
    """Run every check on ``NAME[:INDEX]``. Raises ConformanceError with all failures; RammerError if the device does not open."""
    found = [f"{name}: {problem}" for name, problem, _ in failures(spec, options, CHECKS) if problem]
    if found:
        raise ConformanceError(f"{len(found)} of {len(CHECKS)} checks failed\n" + "\n".join(found))


def chosen_checks(names: Sequence[str]) -> list[str]:
    """Return the checks of these names in run order, or all if the list is empty. Raises BadInput for an unknown name."""
    for name in names:
        if name not in CHECKS:
            raise BadInput(f"no check {name!r}", hint=f"checks: {', '.join(CHECKS)}")
    return [c for c in CHECKS if not names or c in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 if a check fails, else as for ``rammer``."""
    parser = argparse.ArgumentParser(description="Checks of every device.")
    parser.add_argument("--device", required=True, metavar="NAME[:INDEX]")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="as for rammer run")
    parser.add_argument("--check", action="append", default=[], metavar="NAME", help="run only this check; repeatable")
    chosen, count, wrong = parser.parse_args(arguments), 0, 0
    try:
        wrong_options = [o for o in chosen.option if "=" not in o]
        if wrong_options:
            raise BadInput(f"option {wrong_options[0]!r} is not KEY=VALUE")
        options = dict(o.split("=", 1) for o in chosen.option)
        checks = chosen_checks(chosen.check)
        for found in results(chosen.device, options, checks):
            print(found, flush=True)
            count, wrong = count + 1, wrong + (found.state == "failed")
    except RammerError as problem:
        print(f"conformance: error: {problem}", file=sys.stderr)
        return problem.exit_code
    print(f"{wrong} of {count} checks failed" if wrong else f"all {count} checks passed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

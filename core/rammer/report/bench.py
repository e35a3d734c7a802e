"""Latency of models on devices and peers: warm-up, then runs until a count and a duration are reached."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rammer.compiled.segments import Compiled
from rammer.device.manifest import Array, Bound
from rammer.report.peers import Prepared, StreamDelay, stream_delays
from rammer.runtime.host_bound import WHOLE
from rammer.runtime.loaded_model import LoadedModel


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the bench table. ``timed`` names the clock and states if copies are included. Times are in seconds. ``simulated``
    rows are never ranked with measured ones.

    ``memory`` is the bytes of arena, constants and ports on the device (0: unknown). ``error`` is the greatest relative L2 error
    of an output against ONNX Runtime. ``agrees`` is True if all outputs are within the tolerance; both are None without a
    reference. ``why`` is the reason for a row without times."""

    model: str
    runner: str
    hardware: str
    timed: str
    simulated: bool
    median: float
    p90: float
    p99: float
    compile: float
    first: float
    kernels: int
    host_nodes: int
    iterations: int
    memory: int = 0
    error: float | None = None
    agrees: bool | None = None
    why: str = ""

    @staticmethod
    def missing(runner: Runner, why: str) -> Row:
        """Return the row of a device that cannot run the model."""
        return Row(runner.model, runner.name, "", "", False, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0, why=why)


@dataclass(frozen=True, slots=True)
class Runner:
    """The model of a run, its device or peer, and the hardware."""

    model: str
    name: str
    hardware: str


@dataclass(frozen=True, slots=True)
class Effort:
    """The number of runs: ``warmup`` untimed runs, then at least ``iterations`` runs and ``duration`` seconds."""

    warmup: int = 3
    iterations: int = 20
    duration: float = 1.0


def sample_times(call: Callable[[], float], effort: Effort) -> tuple[float, list[float]]:
    """Return (seconds of the first call, seconds of the timed calls); ``call`` returns its duration in seconds."""
    first = call()
    for _ in range(effort.warmup):
        call()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < effort.iterations or time.perf_counter() - begin < effort.duration:
        times.append(call())
    return first, times


def latency_percentiles(times: list[float]) -> tuple[float, float, float]:
    """Return the median, 90th and 99th percentile."""
    median, p90, p99 = np.percentile(times, [50, 90, 99])
    return float(median), float(p90), float(p99)


def bound_call(bound: Bound, delays: Sequence[StreamDelay] = ()) -> Callable[[], float]:
    """Return a function that runs ``bound`` on its arrays and returns the seconds by the device's clock. Each run is queued after
    ``delays``. Peers queue the same delays, so that no time includes queueing."""

    def call() -> float:
        for delay in delays:
            delay(bound.stream)
        return bound.seconds()

    return call


def bench_device(
    runner: Runner,
    special: LoadedModel,
    inputs: Mapping[str, Array],
    effort: Effort,
    *,
    simulated: bool = False,
    on_device: bool = False,
) -> Row:
    """Measure whole runs, NumPy in and NumPy out. With ``on_device``, measure a bound call by the device's clock. For a simulated
    device, run once and use its simulated seconds."""
    _, timing = special.run(inputs)
    if simulated:
        times, first, timed = [timing.device], timing.device, "simulated cycles"
    elif on_device:
        bound = special.bind(inputs, {})
        first, times = sample_times(bound_call(bound, stream_delays()), effort)
        timed = bound.clock
        bound.close()
    else:
        _, times = sample_times(lambda: special.run(inputs)[1].total, effort)
        first, timed = timing.total, WHOLE
    hosted = len(special.host_nodes)
    return Row(
        runner.model,
        runner.name,
        runner.hardware,
        timed,
        simulated,
        *latency_percentiles(times),
        special.compile_seconds,
        first,
        special.kernels,
        hosted,
        len(times),
        program_memory(special.compiled),
    )


def program_memory(compiled: Compiled) -> int:
    """Return the bytes that the programs of a model need on the device: the largest arena, and all other buffers."""
    own = {(b.name, b.nbytes) for p in compiled.programs for b in p.buffers if b.kind != "arena"}
    return max((p.arena_bytes for p in compiled.programs), default=0) + sum(nbytes for _, nbytes in own)


def bench_peer(runner: Runner, prepared: Prepared, effort: Effort) -> Row:
    """Measure a model that a peer has prepared."""
    first, times = sample_times(prepared.seconds, effort)
    prepared.close()
    place, spent = prepared.hardware or runner.hardware, prepared.prepare_seconds
    return Row(
        runner.model, runner.name, place, prepared.timed, False, *latency_percentiles(times), spent, first, 0, 0, len(times)
    )

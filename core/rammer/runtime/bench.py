"""Timing models on devices and peers: warm-up, then runs until a count and a duration are reached."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rammer.runtime.executable import Specialised

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the bench table. Times in seconds; ``simulated`` rows are never ranked with measured ones."""

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


@dataclass(frozen=True, slots=True)
class Effort:
    """``warmup`` untimed runs, then at least ``iterations`` runs and ``duration`` seconds."""

    warmup: int = 3
    iterations: int = 20
    duration: float = 1.0


def sample(call: Callable[[], float], effort: Effort) -> tuple[float, list[float]]:
    """(seconds of the first call, seconds of the timed calls); ``call`` returns its own seconds."""
    first = call()
    for _ in range(effort.warmup):
        call()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < effort.iterations or time.perf_counter() - begin < effort.duration:
        times.append(call())
    return first, times


def percentiles(times: list[float]) -> tuple[float, float, float]:
    """Median, 90th and 99th percentile."""
    median, p90, p99 = np.percentile(times, [50, 90, 99])
    return float(median), float(p90), float(p99)


def bench_device(model: str, runner: str, hardware: str, special: Specialised, inputs: Mapping[str, Array],
                 simulated: bool, effort: Effort) -> Row:  # fmt: skip
    """Time whole runs, NumPy in and NumPy out; of a simulated device its simulated seconds, run once."""
    if simulated:
        _, timing = special.run(inputs)
        times, first = [timing.device], timing.device
    else:
        first, times = sample(lambda: special.run(inputs)[1].total, effort)
    hosted = len(special.compiled.host_nodes)
    timed = "simulated cycles" if simulated else "wall, NumPy in and out"
    return Row(model, runner, hardware, timed, simulated, *percentiles(times), special.compile_seconds, first,
               special.kernels, hosted, len(times))  # fmt: skip


def bench_onnxruntime(model: str, open_session: Callable[[], Any], inputs: Mapping[str, Array], hardware: str,
                      effort: Effort) -> Row:  # fmt: skip
    """The same for ONNX Runtime's CPU provider."""
    begin = time.perf_counter()
    session = open_session()
    opened = time.perf_counter() - begin

    def call() -> float:
        start = time.perf_counter()
        session.run(None, dict(inputs))
        return time.perf_counter() - start

    first, times = sample(call, effort)
    return Row(model, "onnxruntime", hardware, "wall, NumPy in and out", False, *percentiles(times), opened, first,
               0, 0, len(times))  # fmt: skip

"""Runners of a model with open lengths and their clocks: rammer's range program, its program for one length, and the peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np
import onnx
from open_torch import feeds_of, open_module

from rammer.errors import DeviceUnavailable
from rammer.runtime.executable import Executable
from rammer.tuning.interleaved_timing import Rounds, time_interleaved
from rammer_bench.graph import Array
from rammer_bench.prepare import event_seconds, set_torch_precision
from rammer_bench.to_torch import load_torch

#: Minimum seconds of a burst.
BURST: Final = 0.02
#: Maximum runs of a burst.
MOST: Final = 50


@dataclass(frozen=True)
class Took:
    """Medians over bursts: seconds of a run by its clock (wall, GPU events or simulated), and CPU seconds of all threads."""

    seconds: float
    cpu: float


@dataclass
class Runner:
    """A runner of the model. ``run`` returns results; ``timed`` runs once and returns seconds by the runner's clock."""

    name: str
    run: Callable[[Mapping[str, Array]], dict[str, Array]]
    timed: Callable[[Mapping[str, Array]], float]
    close: Callable[[], None] = field(default=lambda: None)

    def begin(self, inputs: Mapping[str, Array]) -> float:
        """Run a first time with inputs of a length, which may compile; return the seconds."""
        start = time.perf_counter()
        self.timed(inputs)
        return time.perf_counter() - start


def ours(name: str, exe: Executable, device_clock: bool) -> Runner:
    """Return rammer as a runner, timed by the device's clock (GPU events, simulated time) or by whole runs."""

    def timed(inputs: Mapping[str, Array]) -> float:
        start = time.perf_counter()
        exe.run(inputs)
        return exe.timing.device if device_clock else time.perf_counter() - start

    return Runner(name, exe.run, timed, exe.close)


def onnx_runtime(proto: onnx.ModelProto, threads: int) -> Runner:
    """Return ONNX Runtime on the CPU. Its threads sleep between runs, so that CPU time counts only work."""
    try:
        import onnxruntime
    except ImportError as problem:
        raise DeviceUnavailable("onnxruntime is not installed", hint="pip install onnxruntime") from problem
    runtime: Any = onnxruntime
    options = runtime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = runtime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        return dict(zip(names, session.run(None, dict(inputs)), strict=True))

    def timed(inputs: Mapping[str, Array]) -> float:
        start = time.perf_counter()
        session.run(None, dict(inputs))
        return time.perf_counter() - start

    return Runner("ONNX Runtime", run, timed)


#: Names of torch eager and ``torch.compile(dynamic=True)``.
TORCH: Final = ("torch", "torch.compile")


class TorchPeers:
    """The peers in ``TORCH``, in float32 and timed by GPU events (without a GPU: whole calls). They share a module, which is
    created when the first of them is opened."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.proto = proto
        self.module: Any = None

    def open(self, name: str) -> Runner:
        """Return a peer by name; compilation happens in first calls. Raises DeviceUnavailable without torch."""
        torch = load_torch()
        place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.module is None:
            set_torch_precision("float32")
            torch.backends.cudnn.benchmark = False  # it would search again at every length
            self.module = open_module(self.proto).to(place).eval()
        call = self.module if name == TORCH[0] else torch.compile(self.module, dynamic=True)
        return _torch(name, self.proto, call, place)


def _torch(name: str, proto: onnx.ModelProto, call: Any, place: Any) -> Runner:
    torch = load_torch()

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        with torch.no_grad():
            found = call(*feeds_of(proto, inputs, place))
        return {o.name: np.asarray(t.cpu().numpy()) for o, t in zip(proto.graph.output, found, strict=True)}

    def timed(inputs: Mapping[str, Array]) -> float:
        feeds = feeds_of(proto, inputs, place)
        with torch.no_grad():
            if place.type == "cuda":
                return event_seconds(lambda: call(*feeds))
            start = time.perf_counter()
            call(*feeds)
            return time.perf_counter() - start

    return Runner(name, run, timed)


def alternated(runners: Sequence[Runner], inputs: Mapping[str, Array], rounds: int) -> list[Took]:
    """Run bursts of all runners alternately after their first calls, so that changes on the machine affect all of them."""
    bursts: list[list[Took]] = [[] for _ in runners]

    def burst(number: int) -> float:
        bursts[number].append(_burst(runners[number], inputs))
        return bursts[number][-1].seconds

    times = time_interleaved({n: partial(burst, n) for n in range(len(runners))}, Rounds.exactly(rounds)).all_run()
    return [Took(times.medians[n], median(b.cpu for b in found)) for n, found in enumerate(bursts)]


def _burst(runner: Runner, inputs: Mapping[str, Array]) -> Took:
    seconds, start, end = list[float](), time.process_time(), time.perf_counter() + BURST
    while not seconds or (time.perf_counter() < end and len(seconds) < MOST):
        seconds.append(runner.timed(inputs))
    return Took(median(seconds), (time.process_time() - start) / len(seconds))


def error_of(got: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    """Return the largest difference of an output relative to its largest value; infinite for other shapes and for NaN."""
    worst = 0.0
    for name, value in expected.items():
        if name not in got or got[name].shape != value.shape:
            return float("inf")
        error = float(np.abs(got[name] - value).max(initial=0.0) / max(np.abs(value).max(initial=0.0), 1e-6))
        worst = max(worst, error if np.isfinite(error) else float("inf"))
    return worst

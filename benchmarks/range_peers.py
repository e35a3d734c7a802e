"""Who runs a model of open lengths, and how each is timed: rammer's program of the range, one for a length, and the peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import numpy as np
import onnx
from open_torch import feeds_of, open_module

from rammer.errors import DeviceUnavailable
from rammer.runtime.executable import Executable
from rammer_bench.graph import Array
from rammer_bench.prepare import event_seconds, set_torch_precision
from rammer_bench.to_torch import load_torch

#: Least seconds of a burst.
BURST: Final = 0.02
#: Runs of a burst at most.
MOST: Final = 50


@dataclass(frozen=True)
class Took:
    """Medians over bursts: seconds of a run by its clock (wall, GPU events or simulated), and CPU seconds of all threads."""

    seconds: float
    cpu: float


@dataclass
class Runner:
    """Somebody who runs the model. ``run`` gives results, ``timed`` runs once and gives seconds by its own clock."""

    name: str
    run: Callable[[Mapping[str, Array]], dict[str, Array]]
    timed: Callable[[Mapping[str, Array]], float]
    close: Callable[[], None] = field(default=lambda: None)

    def begin(self, inputs: Mapping[str, Array]) -> float:
        """A first call with inputs of a length, which may compile; its seconds."""
        start = time.perf_counter()
        self.timed(inputs)
        return time.perf_counter() - start


def ours(name: str, exe: Executable, device_clock: bool) -> Runner:
    """Rammer's; by the device's clock where it has one of its own (a GPU's events, simulated time), else whole runs."""

    def timed(inputs: Mapping[str, Array]) -> float:
        start = time.perf_counter()
        exe.run(inputs)
        return exe.timing.device if device_clock else time.perf_counter() - start

    return Runner(name, exe.run, timed, exe.close)


def onnx_runtime(proto: onnx.ModelProto, threads: int) -> Runner:
    """ONNX Runtime on the CPU. Its threads sleep between runs, so that CPU time is that of work."""
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


#: torch eager, and ``torch.compile(dynamic=True)``.
TORCH: Final = ("torch", "torch.compile")


class TorchPeers:
    """Those of ``TORCH``, in float32 and by GPU events (without a GPU: whole calls). They share a module, which is made when the
    first of them is opened."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.proto = proto
        self.module: Any = None

    def open(self, name: str) -> Runner:
        """One by name; what is compiled is so in first calls. DeviceUnavailable without torch."""
        torch = load_torch()
        place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.module is None:
            set_torch_precision("float32")
            torch.backends.cudnn.benchmark = False  # it would search anew at every length
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
    """Each runner's bursts in turns, once all have begun, so that what changes on the machine meanwhile changes for all."""
    bursts: list[list[Took]] = [[] for _ in runners]
    for _ in range(rounds):
        for found, runner in zip(bursts, runners, strict=True):
            found.append(_burst(runner, inputs))
    return [Took(median(b.seconds for b in found), median(b.cpu for b in found)) for found in bursts]


def _burst(runner: Runner, inputs: Mapping[str, Array]) -> Took:
    seconds, start, end = list[float](), time.process_time(), time.perf_counter() + BURST
    while not seconds or (time.perf_counter() < end and len(seconds) < MOST):
        seconds.append(runner.timed(inputs))
    return Took(median(seconds), (time.process_time() - start) / len(seconds))


def error_of(got: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    """The largest difference of an output, relative to its largest value; infinite for other shapes, and where NaN is."""
    worst = 0.0
    for name, value in expected.items():
        if name not in got or got[name].shape != value.shape:
            return float("inf")
        error = float(np.abs(got[name] - value).max(initial=0.0) / max(np.abs(value).max(initial=0.0), 1e-6))
        worst = max(worst, error if np.isfinite(error) else float("inf"))
    return worst

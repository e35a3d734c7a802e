"""Accuracy of real models against ONNX Runtime on random inputs, before any final softmax.

``cases()`` lists every model with two sets of inputs. ``model_error`` runs one case on a device. The tests use it, as does
``python -m rammer_testing.accuracy --device D``, which prints the table."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import onnx

from rammer.report.text_table import format_duration, plain_table
from rammer.runtime.executable import Executable
from rammer_testing.models import LIGHT_MODELS, WHEEL_MODELS, fetch, inputs_for, light_model
from rammer_testing.weights import graph_inputs, random_inputs, reseed, runner, strip_final_softmax

#: Relative L2 error allowed between two fp32 implementations.
TOLERANCE = 1e-4
#: Models that take more than a few seconds on two CPU cores or the simulator.
LARGE = (
    "vgg19",
    "zfnet512",
    "bvlc_alexnet",
    "resnet50",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "ppocr_det",
    "ppocr_rec",
    "nudenet_320n",
    "shufflenet",
)


@dataclass(frozen=True, slots=True)
class AccuracyCase:
    """A model with one of its two sets of inputs."""

    model: str
    inputs: int

    def __str__(self) -> str:
        return f"{self.model}-{self.inputs}"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one case.

    ``error`` is the largest relative L2 error over the outputs against ONNX Runtime; NaN always fails. ``exact`` and
    ``runtime_exact`` are the errors of the device and of ONNX Runtime against float64. They are computed only if the two differ
    by more than TOLERANCE (NaN otherwise). Times are in seconds.
    """

    case: AccuracyCase
    error: float
    exact: float
    runtime_exact: float
    compile: float
    device: float
    kernels: int
    host_nodes: int

    @property
    def good(self) -> bool:
        """True if the error is within TOLERANCE, or if the device agrees with float64 and ONNX Runtime is not closer."""
        return bool(self.error <= TOLERANCE or self.exact <= min(TOLERANCE, self.runtime_exact))


def cases() -> list[AccuracyCase]:
    """Return the cases of all models. Light models have one input shape and therefore one case."""
    light = [AccuracyCase(name, 0) for name in LIGHT_MODELS]
    return light + [AccuracyCase(m.key, i) for m in WHEEL_MODELS for i in range(len(inputs_for(m.key)))]


@lru_cache(maxsize=2)
def load_model(name: str, seed: int) -> onnx.ModelProto:
    """Return the model without its final softmax; light models get fresh weights."""
    if name in LIGHT_MODELS:
        return strip_final_softmax(reseed(light_model(name), seed))
    return strip_final_softmax(onnx.load(fetch(name)))


def model_error(case: AccuracyCase, device: str, seed: int, **options: str) -> Result:
    """Run ``case`` on ``device`` with inputs of ``seed`` and compare every output with ONNX Runtime."""
    import rammer

    proto = load_model(case.model, seed)
    specs = graph_inputs(proto) if case.model in LIGHT_MODELS else inputs_for(case.model)[case.inputs]
    inputs = random_inputs(specs, seed + 1)
    want = runner(proto)(inputs)
    exe: Executable = rammer.compile(proto, device=device, **options)  # type: ignore[arg-type]
    start = time.perf_counter()
    special = exe.prepare(exe.checked(inputs))
    seconds = time.perf_counter() - start
    have, timing = special.run(exe.checked(inputs))
    exe.close()
    error = _worst(have, want)
    exact = runtime_exact = float("nan")
    if not error <= TOLERANCE:
        truth = exact_outputs(proto, inputs)
        exact, runtime_exact = _worst(have, truth), _worst(want, truth)
    hosted = len(special.compiled.host_nodes)
    return Result(case, error, exact, runtime_exact, seconds, timing.device, special.kernels, hosted)


def exact_outputs(proto: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Evaluate the model's tensor expressions in float64 with NumPy, without a device."""
    from rammer.frontend.bind.binder import bind
    from rammer.frontend.lower.graph_lowering import lower
    from rammer.frontend.read.reader import read_model
    from rammer.ir.evaluate import run_graph

    graph = bind(read_model(proto), {name: a.shape for name, a in inputs.items()})
    named = {v.name: inputs[v.external or v.name] for v in graph.inputs}
    values = run_graph(lower(graph), named, precise=True)
    return {v.external or v.name: values[v.name] for v in graph.outputs}


def _worst(have: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> float:
    return max(_relative(np.asarray(have[name]), np.asarray(want[name])) for name in want)


def _relative(have: np.ndarray, want: np.ndarray) -> float:
    if have.shape != want.shape or not np.isfinite(have).all():
        return float("inf")
    a, b = have.astype(np.float64), want.astype(np.float64)
    return float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-30))


def table(device: str, chosen: Sequence[AccuracyCase], seed: int) -> Iterator[list[str]]:
    """Yield one table row per case, as soon as it is measured. A failed case also yields a row."""
    for case in chosen:
        try:
            r = model_error(case, device, seed)
            verdict = "ok" if r.good else "MISMATCH"
            exact = f"{r.exact:.1e}, ONNX Runtime {r.runtime_exact:.1e}" if r.exact == r.exact else ""
            row = [
                str(case),
                f"{r.error:.2e}",
                exact,
                verdict,
                format_duration(r.compile),
                format_duration(r.device),
                str(r.kernels),
                str(r.host_nodes),
            ]
        except Exception as problem:
            reason = f"FAILED {type(problem).__name__}: {problem}".splitlines()[0][:100]
            row = [str(case), "-", "", reason, "-", "-", "-", "-"]
        print("  ".join(row), flush=True)
        yield row


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 if any case fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--only", default="", help="comma-separated model names")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    names = set(filter(None, options.only.split(",")))
    chosen = [c for c in cases() if not names or c.model in names]
    rows = list(table(options.device, chosen, options.seed))
    print(plain_table(rows, ["model-inputs", "rel L2", "to float64", "verdict", "compile", "run", "launches", "on host"]))
    return 0 if all(r[3] == "ok" for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

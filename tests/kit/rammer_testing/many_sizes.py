"""Models at many sizes on one device: correctness against ONNX Runtime, number of programs, and starts of new sizes.

``python -m rammer_testing.many_sizes --device rocm --seed 1 hubert=hubert_dynamo.onnx ppocr_rec`` prints the results of each
model. Times are processor time of all threads: a new size's start is its first run less the slower of two more, unless the
first run compiled a program."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import click
import numpy as np
import onnxruntime

import rammer
from rammer_testing.accuracy import TOLERANCE
from rammer_testing.models import fetch

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: Drawn sizes of each model, and the maxima: programs of its ranges, seconds that a new size may take to start.
SIZES, PROGRAMS, START = 40, 5, 0.05
#: An error above TOLERANCE may be this multiple of the error of ONNX Runtime without optimisations: a sigmoid of large negative
#: numbers has few equal digits.
NOISE: Final = 4.0


@dataclass(frozen=True)
class SizedModel:
    """A model whose only input has this shape, with names for the dimensions in ``spans``: least, greatest, step."""

    shape: tuple[int | str, ...]
    spans: Mapping[str, tuple[int, int, int]]

    def points(self, rng: np.random.Generator) -> Iterator[dict[str, int]]:
        """Draw sizes without end."""
        while True:
            yield {n: int(rng.choice(range(low, high + 1, step))) for n, (low, high, step) in self.spans.items()}


#: By name; a model of ``rammer_testing.models`` or an export of ``tests/models/export_torch.py``.
MODELS: Final = {
    "ppocr_rec": SizedModel((1, 3, 48, "w"), {"w": (32, 640, 1)}),
    "ppocr_det": SizedModel((1, 3, "h", "w"), {"h": (64, 256, 32), "w": (64, 256, 32)}),
    "hubert": SizedModel((1, "n"), {"n": (800, 32000, 1)}),
    "whisper": SizedModel((1, 16, "n"), {"n": (20, 800, 1)}),
    "segformer": SizedModel((1, 3, "h", "w"), {"h": (64, 256, 1), "w": (64, 256, 1)}),
}


@dataclass
class Outcome:
    """Counts and times of a model at its sizes. ``wrong`` lists sizes with their relative L2 errors."""

    wrong: dict[str, float] = field(default_factory=dict)
    worst: float = 0.0
    programs: int = 0
    compiled: float = 0.0
    starts: dict[str, float] = field(default_factory=dict)

    @property
    def slow(self) -> dict[str, float]:
        """Sizes that took longer than START to start."""
        return {size: s for size, s in self.starts.items() if s > START}

    def __str__(self) -> str:
        start = max(self.starts.values(), default=0.0)
        return (
            f"{len(self.wrong)} wrong (worst {self.worst:.1e}), {self.programs} programs in {self.compiled:.1f} s, "
            f"slowest start {start * 1e3:.0f} ms, {len(self.slow)} slow\n    {self.wrong} {self.slow}"
        )


def run_sizes(
    name: str, path: Path, device: str, rng: np.random.Generator, sizes: int = SIZES, options: Mapping[str, str] | None = None
) -> Outcome:
    """Run the model called ``name``, in the file ``path``, at ``sizes`` drawn sizes."""
    model, outcome = MODELS[name], Outcome()
    peer, plain = _peer(path, optimised=True), _peer(path, optimised=False)
    (port,) = peer.get_inputs()
    named = {d: f for d, f in zip(port.shape, model.shape, strict=True) if isinstance(f, str)}
    shapes = {d: model.spans[f] for d, f in named.items()}
    with rammer.compile(path, device, shapes=shapes, options=dict(options or {})) as exe:
        exe.cache_root = None
        for _, point in zip(range(sizes), model.points(rng), strict=False):
            shape = tuple(point[d] if isinstance(d, str) else d for d in model.shape)
            x = rng.standard_normal(shape).astype(np.float32)
            gc.collect()  # a collection after a compile takes longer than a start
            programs, marks = len(exe.cache), [time.process_time()]
            for _ in range(3):
                got = exe.run({port.name: x})
                marks.append(time.process_time())
            first, second = marks[1] - marks[0], max(marks[2] - marks[1], marks[3] - marks[2])
            outcome.programs, size = len(exe.cache), str(point)
            if outcome.programs > programs:
                outcome.compiled += first - second
            else:
                outcome.starts[size] = first - second
            want = peer.run(None, {port.name: x})
            for number, (have, value) in enumerate(zip(got.values(), want, strict=True)):
                error = _error(have, value)
                outcome.worst = max(outcome.worst, error)
                if error > TOLERANCE and error > NOISE * _error(plain.run(None, {port.name: x})[number], value):
                    outcome.wrong[size] = error
    return outcome


def _peer(path: Path, optimised: bool) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _error(have: Array, value: Array) -> float:
    """Return the relative L2 error, or infinity for another shape or a result without a number."""
    error = float(np.linalg.norm(have - value) / np.linalg.norm(value)) if have.shape == value.shape else np.inf
    return error if np.isfinite(error) else np.inf


@click.command()
@click.option("--device", default="rocm", help="Device to run on.")
@click.option("--seed", default=0, help="Seed of sizes and inputs.")
@click.option("--sizes", default=SIZES, help="Number of sizes.")
@click.option("--option", "options", multiple=True, help="Option of the device, KEY=VALUE.")
@click.argument("models", nargs=-1)
def main(device: str, seed: int, sizes: int, options: tuple[str, ...], models: tuple[str, ...]) -> None:
    """Run models at many sizes."""
    failed, given = False, dict(o.split("=", 1) for o in options)
    for model in models:
        name, _, file = model.partition("=")
        found = run_sizes(name, Path(file) if file else fetch(name), device, np.random.default_rng(seed), sizes, given)
        print(f"{name:10} {device:8} {found}", flush=True)
        failed |= bool(found.wrong or found.slow or found.programs > PROGRAMS)
    sys.exit(failed)


if __name__ == "__main__":
    main()

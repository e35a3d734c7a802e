"""The corpus in tests: files, sizes, fresh inputs, and results of ONNX Runtime."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
#: Relative L2 errors allowed. Half: two implementations that round to float16 at other places. Quantised: a value near the middle
#: between two steps. The last bit of a sum in float32 decides its rounding.
TOLERANCE = {"float32": 1e-4, "float16": 5e-3, "quantised": 2e-2}


@dataclass(frozen=True)
class Entry:
    """A model of the corpus: its entry of ``corpus.json``."""

    name: str
    said: Mapping[str, Any]

    @property
    def path(self) -> Path:
        """The path of the file."""
        return HERE / "models" / f"{self.name}.onnx"

    @cached_property
    def sizes(self) -> list[dict[str, int]]:
        """Sizes of open dimensions: those of the export, then two further ones if any dimension is open."""
        return list(self.said["sizes"])

    @property
    def tolerance(self) -> float:
        """The relative L2 error allowed."""
        return TOLERANCE[self.said["kind"]]

    def inputs(self, rng: np.random.Generator, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Return fresh inputs at these sizes."""
        return {
            name: filled(rng, np.dtype(dtype), tuple(sizes.get(d, d) for d in shape), values)
            for name, (dtype, shape, values) in self.said["inputs"].items()
        }

    @cached_property
    def session(self) -> Any:
        """A session of ONNX Runtime with one thread and without optimisations. Its optimisations replace quantised products by
        less exact ones."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        return onnxruntime.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])

    def expected(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the outputs of ONNX Runtime by name."""
        names = [o.name for o in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, dict(inputs)), strict=True))

    def differs(self, have: np.ndarray, want: np.ndarray) -> str:
        """Return the difference of an output from its reference, or "" if it is correct. Shape, type, integers and the relative
        L2 error are compared."""
        if have.shape != want.shape or have.dtype != want.dtype:
            return f"{have.dtype}{list(have.shape)} for {want.dtype}{list(want.shape)}"
        if want.dtype.kind != "f":
            return "" if np.array_equal(have, want) else f"{(have != want).mean():.1%} of the elements are others"
        if not np.isfinite(want).all():
            return "ONNX Runtime's is not finite"
        error = np.linalg.norm(have.astype(np.float64) - want) / max(np.linalg.norm(want.astype(np.float64)), 1e-30)
        return "" if error <= self.tolerance else f"relative L2 error {error:.1e}"


@lru_cache(1)
def corpus() -> dict[str, Entry]:
    """Return every model, by name."""
    return {n: Entry(n, said) for n, said in json.loads((HERE / "corpus.json").read_text())["models"].items()}


def filled(rng: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...], values: str) -> np.ndarray:
    """Return an input filled by ``values``. They are ``normal``, ``unit`` (0 to 1), ``below N`` (integers) or ``mask`` (1 for the
    first few, at least one). Others are ``ones``, ``steps`` (0, 1, 2, ... along the last axis) and ``is N`` (all of them N)."""
    word, _, number = values.partition(" ")
    match word:
        case "normal":
            return rng.standard_normal(shape).astype(dtype)
        case "unit":
            return rng.random(shape).astype(dtype)
        case "below":
            return rng.integers(0, int(number), shape).astype(dtype)
        case "mask":
            kept = rng.integers(1, shape[-1] + 1, (*shape[:-1], 1))
            return (np.arange(shape[-1]) < kept).astype(dtype)
        case "ones":
            return np.ones(shape, dtype)
        case "steps":
            return np.broadcast_to(np.arange(shape[-1]), shape).astype(dtype)
        case "is":
            return np.full(shape, float(number), dtype)
    raise ValueError(f"no values are called {values!r}")

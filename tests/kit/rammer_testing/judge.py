"""Correct results: float64 values of a compiled model, and the tolerance for equality."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from rammer.compiled.segments import Compiled, ProgramSegment
from rammer.ir.evaluate import run_graph

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Relative L2 error allowed against float64. fp32 sums of a few hundred products stay below 1e-6.
TOLERANCE = 1e-5


def reference(compiled: Compiled, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the float64 outputs of a model with one device segment, by ONNX names."""
    (segment,) = compiled.segments
    assert isinstance(segment, ProgramSegment) and segment.compute is not None
    graph = segment.compute
    known = {p.tensor: inputs[p.external] for p in segment.program.inputs}
    values = run_graph(graph, known, precise=True)
    # Outputs without elements are not computed.
    values = {n: np.zeros(t.shape, t.dtype) for n, t in graph.types.items() if not t.size} | values
    return {p.external: np.asarray(values[p.tensor]) for p in segment.program.outputs}


def relative_error(have: Array, want: Array) -> float:
    """Return the relative L2 error; infinite for another shape or type kind, or a different integer."""
    if have.shape != want.shape or have.dtype.kind != want.dtype.kind:
        return math.inf
    if want.dtype.kind != "f":
        return 0.0 if np.array_equal(have, want) else math.inf
    norm = float(np.linalg.norm(want.astype(np.float64)))
    return float(np.linalg.norm(have.astype(np.float64) - want)) / max(norm, 1e-30)

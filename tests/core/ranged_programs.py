"""The program of a model for a range of lengths, compared at single lengths with the program of that length."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from ranged_models import RangedModel

from rammer.frontend.bind.bind_state import MetLoops
from rammer.frontend.bind.binder import bind_until
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.ranges.anti_unify import Generalised, generalise_programs
from rammer.frontend.ranges.dimension_ranges import probe_points
from rammer.frontend.ranges.length_fit import LengthFit, MoreProbes
from rammer.frontend.read.reader import read_model
from rammer.ir.compute import ComputeGraph
from rammer.ir.evaluate import run_graph
from rammer.passes.pass_pipeline import OF_EXTENTS, Pipeline, default_passes
from rammer_testing.nonempty import some


def lowered(found: RangedModel, point: Mapping[str, int]) -> ComputeGraph:
    """Return the model's tensor program at these lengths."""
    read = read_model(found.proto)
    shapes = {p.name: tuple(point[d] if isinstance(d, str) else int(d or 0) for d in p.shape) for p in read.inputs}
    graph, rest = bind_until(read, shapes, ranged=MetLoops())
    if rest is not None:
        raise rest.why
    return lower(Pipeline(tuple(p for p in default_passes() if p.name not in OF_EXTENTS)).run(graph)[0], ranged=True)


def program_of(found: RangedModel) -> Generalised:
    """Return the program of the model's ranges. Raises NoRange if none exists."""
    points = probe_points(found.spans)
    while True:
        fit = LengthFit(points, found.spans)
        try:
            made = generalise_programs(fit, [lowered(found, p) for p in points])
            fit.settle()
        except MoreProbes as more:
            points = [*points, *more.points]
        else:
            return made


def same_at(model: RangedModel, found: Generalised, point: Mapping[str, int], rng: np.random.Generator) -> None:
    """Raise AssertionError unless ``found`` gives the results of a program of these lengths at ``point``."""
    graph, ranged, _ = found
    inputs = model.inputs(point, rng)
    alone, wide = lowered(model, point), dict[str, np.ndarray]()
    for tensor, array in inputs.items():
        wide[tensor] = np.zeros(graph.types[tensor].shape, array.dtype)
        wide[tensor][tuple(map(slice, array.shape))] = array
    wide |= {tensor: np.array(n) for tensor, n in ranged.scalars(point).items()}
    expected, got = run_graph(alone, inputs), run_graph(graph, wide)
    for output in some(alone.outputs):
        shape = ranged.shape(output, point)
        assert shape == alone.types[output].shape
        np.testing.assert_allclose(got[output][tuple(map(slice, shape))], expected[output], 1e-12, 1e-12, err_msg=str(point))

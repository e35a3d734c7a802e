"""Reductions down columns: several vectors of columns in one loop, and producer maps recomputed at their reads."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from stitched_graphs import device, graph_of, stitched

from rammer.codegen.dialects import C99
from rammer.codegen.emit import emit_operator
from rammer.codegen.vector_rows import side_by_side
from rammer.device.manifest import Binding
from rammer.fusion.fusion_legality import read_in_place, recompute_maps
from rammer.ir.compute import Compute, ComputeGraph
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import dense
from rammer.ir.types import TensorType
from rammer_testing.host_c import HostCase, check
from rammer_testing.nonempty import some
from rammer_testing.small_models import SmallModel


def columns(rows: int, count: int, sums: int) -> ROperator:
    """Make ``sums`` reductions of the columns of ``x``, which is ``[rows, count]``."""
    kinds = ("sum", "max", "min")
    computes = tuple(Compute.parse(f"s{n}: f32[i:{count}] = {kinds[n % 3]}[k:{rows}] x[k, i] * {n + 1}.0") for n in range(sums))
    return ROperator(computes[-1].name, computes, (), tuple(c.name for c in computes))


def types_of(operator: ROperator, rows: int) -> dict[str, TensorType]:
    return {"x": TensorType("float32", (rows, operator.anchor.shape[0]))} | {c.name: c.type for c in operator.computes}


@pytest.mark.parametrize(
    ("count", "tile", "sums", "together"),
    [
        (1024, 256, 1, 8),
        (1024, 1024, 3, 8),
        (1024, 128, 5, 4),
        (1024, 64, 1, 4),
        (1024, 32, 1, 2),
        (1024, 16, 1, 1),
        (1024, 128, 13, 1),
        (1000, 256, 1, 1),
        (48, 48, 1, 1),
    ],
)
def test_vectors_that_are_summed_in_one_loop(count: int, tile: int, sums: int, together: int) -> None:
    """Check the number of vectors: it divides a task's columns and leaves registers; one if tasks differ in width."""
    operator = columns(50, count, sums).tiled((tile,))
    types = types_of(operator, 50)
    storages = {n: dense(n, n, t.shape) for n, t in types.items()}
    text = emit_operator(operator, Binding(types, storages), C99).text
    widest = max(C99.vectors)
    steps = {w * n for w in C99.vectors for n in (1, 2, 4, 8)}
    assert together == 1 or side_by_side(tile, widest, sums) == together
    assert f"+= {widest * together})" in text
    assert not any(f"+= {n})" in text for n in some(steps) if n > widest * together)


def test_columns_are_right_whatever_their_number(seed: int, rng: np.random.Generator) -> None:
    random = Random(seed)
    for _ in range(6):
        rows, count, sums = random.choice((1, 7, 40, 2500)), random.choice((16, 48, 64, 100, 128, 256)), random.randint(1, 7)
        operator = columns(rows, count, sums)
        values = {"x": rng.standard_normal((rows, count)).astype(np.float32)}
        tile = random.choice([t for t in (16, 32, 64, 128, random.randint(1, count), count) if t <= count])
        check(HostCase(operator.tiled((tile,)), types_of(operator, rows), {}, values), C99)


VARIANCE = """(float[512,64] x) => (float[1,64] mean, float[1,64] var, float[1,64] high) <int64[1] along = {0}> {
    mean = ReduceMean(x, along)
    d = Sub(x, mean)
    e = Mul(d, d)
    var = ReduceMean(e, along)
    high = ReduceMax(x, along)
}"""


def statistics(rng: np.random.Generator) -> tuple[ROperator, ComputeGraph]:
    graph = graph_of(SmallModel("columns", VARIANCE), rng)
    (operator,) = stitched(graph, device())[1].operators
    return operator, graph


def layers(operator: ROperator) -> dict[str, str]:
    """Return the layers at which the rows of ``e`` and the mean meet their consumers."""
    return {e.producer: e.layer for e in operator.connections if e.producer in ("mean", "e")}


@pytest.mark.parametrize("change", [read_in_place, recompute_maps], ids=lambda f: f.__name__)
def test_maps_are_computed_where_they_are_read_but_no_sum_is_again(change: object, rng: np.random.Generator) -> None:
    """Check that the mean of a column is stored: its sum would be recomputed for every element."""
    operator, graph = statistics(rng)
    changed = change(operator)  # type: ignore[operator]
    assert layers(operator) == {"mean": "veu", "e": "veu"}
    assert layers(changed) == {"mean": "veu", "e": "thread"}
    values = {"x": rng.standard_normal((512, 64)).astype(np.float32)}
    check(HostCase(changed.tiled((1, 32)), graph.types, {}, values), C99)


@pytest.mark.parametrize(
    ("e", "s", "more", "place"),
    [
        ("x[i, j] - 1.0", "sum[k:30] e[i, k]", "", "thread"),
        ("exp(x[i, j])", "sum[k:30] e[i, k]", "", "veu"),
        ("x[i, j] - 1.0", "sum[k:30] e[i, k] * e[i, k]", "", "veu"),
        ("x[i, j] - 1.0", "sum[k:30, n:2] e[i, k] * cast(float32, n)", "", "veu"),
        ("x[i, j] - 1.0", "sum[k:30] e[i, k]", "t: f32[i:20] = max[k:30] e[i, k]", "veu"),
    ],
    ids=["once", "dear", "twice in one", "again and again", "by two"],
)
def test_what_is_read_once_is_computed_there(e: str, s: str, more: str, place: str) -> None:
    texts = [f"e: f32[i:20, j:30] = {e}", f"s: f32[i:20] = {s}", *([more] if more else [])]
    computes = tuple(map(Compute.parse, texts))
    links = tuple(Connection("e", c.name, "veu") for c in computes[1:])
    operator = ROperator(computes[-1].name, computes, links, tuple(c.name for c in computes[1:]))
    assert {c.layer for c in read_in_place(operator).connections} == {place}
    kept = ROperator(computes[-1].name, computes, links, tuple(c.name for c in computes))
    assert read_in_place(kept) == kept, "it is written in any case"

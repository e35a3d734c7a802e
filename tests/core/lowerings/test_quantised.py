"""Quantised operators as tensor expressions: ONNX's specification per element, and the canonical form of integer products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lowerings.quantised_words import QUANTISED

from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model
from rammer.ir.compute import Compute, ComputeGraph, contraction_operands
from rammer.ir.evaluate import run_graph
from rammer.ir.expr import Cast, Op
from rammer.passes.graph.convert_to_float16 import narrow_graph
from rammer.passes.pass_pipeline import default_passes
from rammer_testing.nonempty import some
from rammer_testing.operators.case import OperatorCase
from rammer_testing.operators.draw import Draw

#: Random cases of each operator.
COUNT = 40
BYTES = ("uint8", "int8")


def lowered(case: OperatorCase) -> ComputeGraph:
    """Return the lowered model of the case. Raises BadInput or CannotLower if it has no tensor expressions."""
    return lower(bind(read_model(case.model()), {}))


def codes(draw: Draw, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Draw codes of all sizes, many at the ends of the range of ``kind``."""
    return draw.array(shape, kind, 0.3, -60, 60 if kind == "int8" else 200)


def point(draw: Draw, kind: str, shape: tuple[int, ...] = ()) -> np.ndarray:
    """Draw zero points, often at the ends of the range."""
    return draw.array(shape, kind, 0.5, -9, 9)


def scales(draw: Draw, shape: tuple[int, ...] = ()) -> np.ndarray:
    """Draw scales, sometimes powers of two, which give ties."""
    bits = draw.chance(0.3)
    values = [draw.either(2.0**-7, 2.0**-6) if bits else draw.uniform(0.003, 0.05) for _ in range(int(np.prod(shape)))]
    return np.array(values, np.float32).reshape(shape)


def convolution(draw: Draw, op: str) -> OperatorCase:
    group, rank = draw.either(1, 1, 2, 3), draw.either(1, 2, 2, 3)
    each, features, kernel = draw.size(1, 4), group * draw.size(1, 3), draw.ints(rank, 1, 3)
    one, two = draw.either(*BYTES), draw.either(*BYTES)
    x = codes(draw, (draw.size(1, 2), group * each, *draw.ints(rank, 3, 7)), one)
    w = codes(draw, (features, each, *kernel), two)
    attributes = {
        "group": group,
        "strides": draw.either(None, draw.ints(rank, 1, 2)),
        "dilations": draw.either(None, [1] * rank),
        "pads": draw.either(None, draw.ints(2 * rank, 0, 2)),
    }
    zx = point(draw, one, draw.either((), (1,)))
    zw = draw.either(np.zeros((), two), point(draw, two), point(draw, two, (features,)))
    if op == "ConvInteger":
        operands: tuple[Any, ...] = (x, w, *draw.either((None, None), (zx, None), (zx, zw)))
    else:
        bias = draw.array((features,), "int32", low=-5000, high=5000) if draw.chance() else None
        each_scale = scales(draw, draw.either((), (features,)))
        operands = (x, scales(draw), zx, w, each_scale, zw, scales(draw) * 300, point(draw, one), bias)
    return OperatorCase(op, 19, operands, attributes, static=static(draw, operands, 3 if op == "QLinearConv" else 1))


def product(draw: Draw, op: str) -> OperatorCase:
    one, two = draw.either(*BYTES), draw.either(*BYTES)
    m, k, n, batch = draw.size(), draw.size(1, 40), draw.size(), draw.shape(0, 2)
    a, b = codes(draw, (*batch, m, k), one), codes(draw, (*draw.either((), batch), k, n), two)
    za, zb = draw.either(point(draw, one), point(draw, one, (m,))), draw.either(point(draw, two), point(draw, two, (n,)))
    if op == "MatMulInteger":
        operands: tuple[Any, ...] = (a, b, *draw.either((None, None), (za, None), (za, zb)))
    else:
        rows = draw.either((), (m,))
        operands = (a, scales(draw, rows), za, b, scales(draw, draw.either((), (n,))), zb, scales(draw) * 300, point(draw, one))
    return OperatorCase(op, 21, operands, static=static(draw, operands, 3 if op == "QLinearMatMul" else 1))


def static(draw: Draw, operands: tuple[Any, ...], weights: int) -> frozenset[int]:
    """Draw the static operands: none, all but the data, or all but data and weights."""
    parameters = frozenset(range(1, len(operands)))
    return draw.either(frozenset(), parameters, parameters, parameters - {weights})


MAKERS = {"ConvInteger": convolution, "QLinearConv": convolution, "MatMulInteger": product, "QLinearMatMul": product}


@pytest.mark.slow
@pytest.mark.parametrize("op", sorted(MAKERS))
def test_products_of_codes_are_exact(op: str, seed: int) -> None:
    for number in range(COUNT):
        case = MAKERS[op](Draw(np.random.default_rng([seed, number]), 21, largest=6, alone="any"), op)
        graph = lowered(case)
        feeds = {n: case.feeds[graph.aliases[n]] for n in graph.inputs}
        (have,) = (run_graph(graph, feeds, precise=False)[n] for n in graph.outputs)
        given = {k: v for k, v in case.attributes.items() if v is not None}
        (want,) = QUANTISED[op](given, case.operands) or ()
        np.testing.assert_array_equal(have, want, err_msg=f"{seed} {number} {case}")
        assert [c for c in graph.computes if c.kind == "contraction"] or have.size == 0 or _tiny(graph), str(graph)


def _tiny(graph: ComputeGraph) -> bool:
    """Return True if every sum has at most one term, or if no reduction remains."""
    return all(max((r.extent for r in c.reduce), default=1) == 1 or not c.reduce for c in graph.computes)


def known(op: str, signed: bool, pads: int = 1) -> OperatorCase:
    """Make a product as quantisers write it: static weights and parameters, and weights without a zero point."""
    rng, kind = np.random.default_rng(3), "int8" if signed else "uint8"
    ends = np.iinfo(kind)
    scale, each = np.float32(0.02), rng.uniform(0.01, 0.02, 6).astype(np.float32)
    za, zy = np.array(-7 if signed else 131, kind), np.array(5, kind)
    if op == "conv":
        x, w = (
            rng.integers(ends.min, ends.max + 1, (1, 4, 5, 5)).astype(kind),
            rng.integers(-127, 128, (6, 4, 3, 3)).astype(np.int8),
        )
        operands = (x, scale, za, w, each, np.zeros(6, np.int8), np.float32(2), zy, rng.integers(-900, 900, 6).astype(np.int32))
        attributes = {"pads": [pads] * 4}
    else:
        x, w = rng.integers(ends.min, ends.max + 1, (3, 16)).astype(kind), rng.integers(-127, 128, (16, 6)).astype(np.int8)
        operands, attributes = (x, scale, za, w, scale, np.int8(0), np.float32(2), zy), {}
    given = tuple(np.asarray(v) for v in operands)
    return OperatorCase("QLinearConv" if op == "conv" else "QLinearMatMul", 19, given, attributes, static=frozenset(range(1, 9)))


def contraction_of(graph: ComputeGraph) -> Compute:
    """Return the only contraction after checking its integer form: two conversions of bare loads to int32."""
    (main,) = (c for c in graph.computes if c.kind == "contraction")
    body = main.body
    assert isinstance(body, Op) and body.fn == "mul" and main.dtype == "int32"
    assert all(isinstance(a, Cast) and a.dtype == "int32" for a in some(body.args))
    assert tuple(a.arg for a in body.args if isinstance(a, Cast)) == contraction_operands(main)
    return main


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("op", ["conv", "matmul"])
def test_one_contraction_and_one_map(op: str, signed: bool) -> None:
    graph = lowered(known(op, signed))
    main = contraction_of(graph)
    assert [c.kind for c in graph.computes] == ["contraction", "map"]
    a, b = contraction_operands(main) or ()
    zero = -7 if signed else 131
    assert a.fill == (zero if op == "conv" else None) and b.fill is None
    # The effect of the zero point is constant: a bias of 32 bits.
    assert {str(graph.types[n].dtype) for n in graph.computes[1].reads} == {"int32", "float32", "int8" if signed else "uint8"}


def test_unsigned_weights_are_stored_with_their_sign() -> None:
    case = known("matmul", False)
    operands = list(case.operands)
    operands[3] = (np.asarray(case.operands[3]).astype(np.int16) + 128).astype(np.uint8)
    operands[5] = np.array(128, np.uint8)
    moved = OperatorCase(case.op, case.opset, tuple(operands), case.attributes, static=case.static)
    graph, same = lowered(moved), lowered(case)
    (weights,) = (v for n, v in graph.constants.items() if v.shape == (16, 6))
    np.testing.assert_array_equal(weights, np.asarray(case.operands[3]))
    assert [c.kind for c in graph.computes] == ["contraction", "map"]
    feeds = {"x0": np.asarray(case.operands[0])}
    np.testing.assert_array_equal(run_graph(graph, feeds, precise=False)["y0"], run_graph(same, feeds, precise=False)["y0"])


def test_without_zero_points_the_sum_is_the_result() -> None:
    operands = (np.ones((3, 8), np.uint8), np.ones((8, 5), np.int8), np.zeros((), np.uint8), np.zeros((), np.int8))
    graph = lowered(OperatorCase("MatMulInteger", 10, operands, static=frozenset((1, 2, 3))))
    assert [c.name for c in graph.computes] == ["y0"] and contraction_of(graph).name == "y0"


@pytest.mark.parametrize("op", ["conv", "matmul"])
def test_scales_keep_their_precision(op: str) -> None:
    graph = bind(read_model(known(op, True).model()), {})
    narrow = narrow_graph(graph, default_passes())[0]
    assert len(narrow.nodes) == 1 and "float16" not in {t.dtype for t in narrow.types.values()}, str(narrow)


@pytest.mark.parametrize("op", ["QuantizeLinear", "DequantizeLinear"])
def test_codes_and_numbers(op: str, seed: int) -> None:
    for number in range(COUNT):
        draw = Draw(np.random.default_rng([seed, number]), 21, largest=6, alone="any")
        kind, shape = draw.either("uint8", "int8", "uint16", "int16"), draw.shape(1, 4)
        axis, block = draw.integer(-len(shape), len(shape) - 1), 0
        grain = draw.either((), (shape[axis],))
        if draw.chance(0.3):
            block = draw.integer(1, shape[axis])
            grain = tuple(-(-n // block) if d == axis % len(shape) else n for d, n in enumerate(shape))
        scale, zero = scales(draw, grain) * 9, draw.array(grain, kind, 0.4, -9, 9)
        x = draw.array(shape, "float32", 0.2, -40, 40) if op == "QuantizeLinear" else draw.array(shape, kind, 0.4, -99, 99)
        if op == "QuantizeLinear" and draw.chance(0.3):  # ties
            scale, x = (
                np.full(grain, draw.either(0.25, 0.5), np.float32),
                np.round(np.nan_to_num(np.clip(x, -99, 99)) * 8) / np.float32(8),
            )
        attributes = {"axis": axis, "block_size": block or None}
        case = OperatorCase(op, 21, (x, scale, zero), attributes, static=draw.either(frozenset(), frozenset((1, 2))))
        graph = lowered(case)
        assert [c.kind for c in some(graph.computes)] == ["map"]
        (have,) = (run_graph(graph, {n: case.feeds[graph.aliases[n]] for n in graph.inputs}, False)[n] for n in graph.outputs)
        with np.errstate(all="ignore"):
            (want,) = QUANTISED[op]({k: v for k, v in attributes.items() if v is not None}, case.operands) or ()
        np.testing.assert_array_equal(have, want, err_msg=f"{seed} {number} {case}")

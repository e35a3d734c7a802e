"""MatMul, Gemm and Einsum compared with onnx's node tests and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import check_node_case, check_random, compare, node_cases, node_model, run_node_model

from rammer.errors import BadInput


def _data(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("case", node_cases("MatMul", "Gemm", "Einsum"))
def test_node_case(case: Any, rng: np.random.Generator) -> None:
    check_node_case(rng, case)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((3, 4), (4, 5)),
        ((4,), (4, 5)),
        ((3, 4), (4,)),
        ((4,), (4,)),
        ((2, 3, 4), (4, 5)),
        ((2, 1, 3, 4), (7, 4, 5)),
        ((3, 4), (2, 4, 5)),
        ((2, 3, 4), (4,)),
        ((1, 1, 4), (6, 4, 1)),
        ((3, 1), (1, 5)),
    ],
)
def test_matmul(left: tuple[int, ...], right: tuple[int, ...], rng: np.random.Generator) -> None:
    graph = check_random("MatMul", {"a": _data(rng, *left), "b": _data(rng, *right)})
    assert [c.kind for c in graph.computes] == ["contraction"]


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "float64"])
def test_matmul_types(dtype: str, rng: np.random.Generator) -> None:
    a, b = (rng.integers(0, 9, s).astype(dtype) for s in ((2, 3, 4), (4, 2)))
    model = node_model("MatMul", {"a": a, "b": b})
    compare(run_node_model(model, {"a": a, "b": b}), [a @ b], 0, 0)


@pytest.mark.parametrize("bias", [None, (), (5,), (1, 5), (3, 1), (3, 5)])
@pytest.mark.parametrize("flips", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_gemm(flips: tuple[int, int], bias: tuple[int, ...] | None, rng: np.random.Generator) -> None:
    a, b = _data(rng, *((4, 3) if flips[0] else (3, 4))), _data(rng, *((5, 4) if flips[1] else (4, 5)))
    inputs = {"a": a, "b": b} | ({} if bias is None else {"c": _data(rng, *bias)})
    for alpha, beta in ((1.0, 1.0), (0.5, 0.25)):
        graph = check_random("Gemm", inputs, transA=flips[0], transB=flips[1], alpha=alpha, beta=beta)
        assert graph.computes[0].kind == "contraction"


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", [(2, 3), (3, 4)]),
        ("bij,bjk", [(2, 3, 4), (2, 4, 5)]),
        ("...ij,...jk->...ik", [(2, 1, 3, 4), (1, 5, 4, 6)]),
        ("ii->i", [(4, 4)]),
        ("ii", [(4, 4)]),
        ("i,j,k->kji", [(2,), (3,), (4,)]),
        ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)]),
        ("ij->ji", [(2, 3)]),
        ("i...->...", [(3, 4, 5)]),
        ("ab,bc->abc", [(2, 1), (4, 3)]),
    ],
)
def test_einsum(equation: str, shapes: list[tuple[int, ...]], rng: np.random.Generator) -> None:
    arrays = [_data(rng, *s) for s in shapes]
    inputs = {f"x{i}": a for i, a in enumerate(arrays)}
    model = node_model("Einsum", inputs, equation=equation)
    compare(run_node_model(model, inputs, precise=True), [np.einsum(equation, *arrays)], 1e-4, 1e-5)


@pytest.mark.parametrize(
    ("equation", "shapes", "said"),
    [
        ("abcd,dpa,cdn -> ndp", [(3, 1, 2, 4), (4, 3, 3), (2, 9, 2)], "'d' in the equation .* is an axis of 4 and of 9"),
        ("ii->i", [(3, 2)], "'i' in the equation .* is an axis of 3 and of 2"),
        ("ij,jk", [(3, 4), (0, 5)], "4 and of 0"),
        ("ij->k", [(3, 2)], "label missing|a letter that no operand has"),
        ("ij->ii", [(3, 2)], "or a letter twice"),
        ("ij", [(3, 2), (2,)], "number of input tensors|operands has the equation"),
        ("ijk", [(3, 2)], "rank of input|axes"),
    ],
)
def test_equations_that_do_not_fit_their_operands(equation: str, shapes: list[tuple[int, ...]], said: str) -> None:
    inputs = {f"x{i}": np.ones(shape, np.float32) for i, shape in enumerate(shapes)}
    with pytest.raises(BadInput, match=f"(?i){said}"):
        run_node_model(node_model("Einsum", inputs, equation=equation), inputs)

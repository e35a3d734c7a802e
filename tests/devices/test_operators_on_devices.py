"""Single operators at values where C does not define NumPy's result: devices against the expressions in NumPy. ``python -m
rammer_testing.operators --device rocm --seconds 600 --seed 3`` draws more."""

from __future__ import annotations

import numpy as np
import pytest

from rammer_testing.operators.case import OperatorCase
from rammer_testing.operators.oracles import judge_device

F32 = np.float32
NAN = np.array([[1, np.nan, 9, np.nan], [4, 5, 5, 0], [-np.inf, -np.inf, 3, 3]], F32)
CASES = [
    OperatorCase("Cast", 13, (np.array([-1, -3, 2**63, 7, 0.9, -0.9], F32),), {"to": 13}),
    OperatorCase("Pow", 13, (np.array([-2, -1, 0, 1, 2, 7], np.int32), np.array([-1, -3, -1, -5, 5, -2], np.int32))),
    *(
        OperatorCase("Pow", 15, (np.array([-np.inf, -0.0, 0, np.inf, np.nan, -1, 4], kind), np.array(e, kind)), static=given)
        for kind in (F32, np.float16)
        for e in (0.5, -0.5, [0.5, 0.5, 1.5, -0.5, 0.5, 0.5, 0.5])
        for given in (frozenset((1,)), frozenset[int]())
    ),
    OperatorCase("Div", 14, (np.array([-(2**31), 7, -7], np.int32), np.array([2, -2, 2], np.int32))),
    OperatorCase("Softplus", 7, (np.array([-100, -20, -1e-8, 0, 1e-8, 30, 100], F32),)),
    OperatorCase("Elu", 7, (np.array([-100, -1e-8, -1e-3, 2], F32),)),
    OperatorCase("Mish", 18, (np.array([-20, -2, 0, 5], F32),)),
    OperatorCase("ArgMax", 13, (NAN,), {"axis": 1}),
    OperatorCase("ArgMin", 13, (NAN,), {"axis": 1, "select_last_index": 1}),
    OperatorCase("Hardmax", 13, (NAN,)),
    OperatorCase(
        "MaxPool", 22, (np.arange(40, dtype=F32).reshape(1, 2, 4, 5) % 7,), {"kernel_shape": [2, 3], "pads": [1, 1, 0, 0]}, 2
    ),
    OperatorCase("LRN", 13, (np.arange(1, 9, dtype=F32).reshape(1, 2, 2, 2),), {"size": 1, "alpha": 0.5}),
    OperatorCase("Conv", 11, (np.ones((1, 1, 2), F32), np.ones((1, 1, 3), F32)), {"strides": [3]}),
    OperatorCase(
        "RNN",
        14,
        (np.ones((3, 2, 2), F32), np.ones((1, 3, 2), F32), np.ones((1, 3, 3), F32), None, np.array([1, 3], np.int32)),
        {"hidden_size": 3, "direction": "reverse", "clip": 0.5},
        2,
    ),
]


@pytest.mark.sampled(13)
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_devices_agree(case: OperatorCase, device: str) -> None:
    verdict = judge_device(case, device)
    assert verdict.kind == "ok", f"{verdict.kind}: {verdict.text}"


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("op", "count"), [("Sum", 1100), ("Max", 100), ("Min", 33), ("Mean", 70), ("Concat", 300)])
def test_operators_of_many_operands(op: str, count: int) -> None:
    rng = np.random.default_rng(count)
    shapes = [(1 + i % 3, 2) if op == "Concat" else ((3, 2), (1,), (3, 1))[i % 3] for i in range(count)]
    operands = tuple(rng.normal(size=shape).astype(F32) for shape in shapes)
    static = frozenset(range(4, count // 2))
    case = OperatorCase(op, 13, operands, {"axis": 0} if op == "Concat" else {}, static=static)
    verdict = judge_device(case, "ipu_sim")
    assert verdict.kind == "ok", f"{verdict.kind}: {verdict.text}"

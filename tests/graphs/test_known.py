"""Regression graphs that once failed, on every working device: a table of cases, and files that the fuzzer wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rammer.device.loader import Registry
from rammer_testing.graphs.case import Call, GraphCase
from rammer_testing.graphs.generate import merged
from rammer_testing.graphs.judge import Judge, Setting
from rammer_testing.nonempty import some

KEPT = sorted((Path(__file__).parent / "cases").glob("*.json"))
DEVICES = ("toy", "ipu_sim", "rocm")


def values(*shape: int) -> np.ndarray[Any, Any]:
    """Return small floats of both signs."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7 - 3).astype(np.float32)


def node(op: str, *inputs: Any, opset: int = 17, **attributes: Any) -> GraphCase:
    """Return a case of one operator on these arrays."""
    names = {f"x{i}": np.asarray(a) for i, a in enumerate(inputs)}
    return GraphCase(opset, names, {}, (Call(op, tuple(names), ("y",), attributes),), ("y",))


f = values
TABLE = {
    # Dot products have no axes; empty products have no terms.
    "dot": node("MatMul", f(5), f(5)),
    "vector matrix": node("MatMul", f(5), f(5, 3)),
    "matrix vector": node("MatMul", f(3, 5), f(5)),
    "einsum dot": node("Einsum", f(5), f(5), equation="i,i->"),
    "einsum implicit": node("Einsum", f(5), f(5), equation="i,i"),
    "no terms": node("MatMul", f(3, 0), f(0, 4)),
    "no terms, bias": node("Gemm", f(3, 0), f(0, 4), f(4)),
    "dot of nothing": node("MatMul", f(0), f(0)),
    "einsum of nothing": node("Einsum", f(0), f(0), equation="i,i->"),
    # Tensors without elements.
    "no rows": node("MatMul", f(0, 3), f(3, 4)),
    "no columns": node("MatMul", f(2, 3), f(3, 0)),
    "map": node("Relu", f(0, 3)),
    "sum": node("ReduceSum", f(3, 0), opset=11, axes=[1]),
    "softmax": node("Softmax", f(0, 3)),
    "softmax of none": node("Softmax", f(3, 0)),
    "empty piece": node("Concat", f(2, 0), f(2, 3), axis=1),
    "empty pieces": node("Concat", f(2, 0), f(2, 0), axis=1),
    "transpose": node("Transpose", f(2, 0, 3)),
    "conv, no batch": node("Conv", f(0, 2, 5, 5), f(3, 2, 3, 3)),
    "conv, no features": node("Conv", f(1, 2, 5, 5), f(0, 2, 3, 3)),
    "layer norm": node("LayerNormalization", f(0, 3), f(3)),
    "gather none": node("Gather", f(3, 2), np.zeros(0, np.int64)),
    "pool": node("MaxPool", f(0, 2, 5, 5), kernel_shape=[2, 2]),
    "arg max": node("ArgMax", f(0, 3), axis=1),
    "pad": node("Pad", f(0, 3), opset=10, pads=[1, 1, 1, 1]),
    "copy": node("Identity", f(0)),
    "flatten": node("Flatten", f(2, 0, 3)),
    "lrn": node("LRN", f(0, 2, 3, 3), size=3),
    "rnn, no batch": node("RNN", f(2, 0, 3), f(1, 4, 3), f(1, 4, 4), hidden_size=4),
    # Zeros inserted between zero elements, and shapes that an upgrade restores.
    "spread nothing": node("ConvTranspose", f(0, 1, 0), f(1, 1, 2), dilations=[2], strides=[3]),
    "spread nothing but a kernel": node("ConvTranspose", f(1, 1, 0), f(1, 1, 2), dilations=[2], strides=[2]),
    "flat softmax": node("Softmax", f(1, 2, 0), opset=11),
    "flat hardmax": node("Hardmax", f(2, 1, 0), opset=11, axis=2),
    "flat log softmax": node("LogSoftmax", f(0), opset=11, axis=0),
    "instance norm": node("InstanceNormalization", f(0, 2, 3), f(2), f(2)),
}


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    made = Judge()
    yield made
    made.outside.close()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if Registry().status(name).state != "ok":
        pytest.skip(f"{name} does not work here")
    return name


@pytest.mark.slow
def test_graphs_of_the_table(judge: Judge, device: str) -> None:
    # One model of all operators needs only one program. If it fails, each operator is run separately.
    for opset in sorted({c.opset for c in TABLE.values()}):
        if judge(merged([c for c in TABLE.values() if c.opset == opset]), Setting(device)).kind != "ok":
            break
    else:
        return
    found = {name: judge(case, Setting(device)) for name, case in TABLE.items()}
    wrong = {name: f"{v.kind} {v.site} {v.detail[-200:]}" for name, v in some(found.items()) if v.kind != "ok"}
    assert not wrong
    pytest.fail("each is right by itself, but not all of them in one model")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("path", KEPT, ids=lambda p: p.stem)
def test_kept_cases(judge: Judge, device: str, path: Path) -> None:
    case, extra = GraphCase.load(path)
    setting = {k: v for k, v in extra.get("setting", {}).items() if k != "device"}
    if device == "toy" and setting.get("precision", "float32") != "float32":
        pytest.skip("toy has no other precision")
    verdict = judge(case, Setting(device, **setting))
    assert verdict.kind == extra.get("expect", "ok"), f"{verdict.kind} {verdict.site}\n{verdict.detail}\n{case}"

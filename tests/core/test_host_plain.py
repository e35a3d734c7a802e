"""Operators with a direct NumPy implementation for interpreted bodies: the general evaluator's results, or none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import NodeProto, TensorProto, helper

from rammer.errors import BadInput
from rammer.frontend.bind import evaluator
from rammer.frontend.bind.evaluator import evaluate_proto, host_node
from rammer.frontend.host import numpy_fast
from rammer.frontend.host.operators import OPERATORS, order_elements

OPSET = {"": 21}
DTYPES = [np.float32, np.float64, np.int32, np.int64, np.bool_, np.uint8, np.float16]


def values(rng: np.random.Generator, dtype: Any, *shape: int) -> np.ndarray:
    """Draw small numbers, some equal; floats sometimes contain NaN, infinities and values beyond integer ranges."""
    made = np.asarray(rng.integers(-3, 4, shape) * rng.choice([1, 0.5]))
    if np.dtype(dtype).kind == "f" and rng.random() < 0.2 and made.size:
        made = np.asarray(made, np.float64)
        made.flat[rng.integers(made.size)] = rng.choice([np.nan, np.inf, -np.inf, 3e9])
    with np.errstate(all="ignore"):
        return np.asarray(np.abs(made) if np.dtype(dtype).kind == "u" else made).astype(dtype)


def drawn(op: str, rng: np.random.Generator) -> tuple[NodeProto, list[np.ndarray | None]]:
    """Draw a mostly legal use of ``op``."""
    dtype = np.bool_ if op in ("And", "Or", "Not") else DTYPES[rng.integers(len(DTYPES))]
    shape = tuple(rng.integers(0 if rng.random() < 0.2 else 1, 4, rng.integers(0, 4)).tolist())
    x, rank, more = values(rng, dtype, *shape), len(shape), dict[str, Any]()
    operands: list[np.ndarray | None] = [x]
    some_axis = int(rng.integers(-rank - 1, rank + 1))
    match op:
        case "Add" | "Sub" | "Mul" | "Equal" | "Less" | "Greater" | "And" | "Or":
            operands.append(values(rng, dtype if rng.random() < 0.9 else np.int64, *shape[int(rng.integers(0, rank + 1)) :]))
        case "Where":
            operands = [values(rng, np.bool_, *shape[rank // 2 :]), x, values(rng, dtype, *shape)]
        case "Gather":
            operands.append(rng.integers(-3, 4, rng.integers(0, 3, 2).tolist()))
            more = {"axis": some_axis}
        case "Unsqueeze" | "Squeeze":
            operands.append(np.unique(rng.integers(-rank - 1, rank + 1, rng.integers(0, 3))))
        case "Concat":
            operands += [values(rng, dtype if rng.random() < 0.9 else np.float32, *shape) for _ in range(rng.integers(0, 3))]
            more = {"axis": some_axis}
        case "Slice":
            axes = rng.permutation(rank)[: rng.integers(0, rank + 1)] if rank else np.zeros(0, np.int64)
            ends = rng.integers(-9, 10, (2, len(axes)))
            operands += [ends[0], ends[1], axes, rng.choice([1, 2, -1], len(axes), p=[0.7, 0.2, 0.1])]
        case "Reshape":
            target = list(rng.permutation(shape)) if rank else [1]
            target[int(rng.integers(len(target)))] = int(rng.choice([-1, 0, 2]))
            operands.append(np.array(target, np.int64))
        case "Transpose":
            more = {"perm": rng.permutation(rank).tolist()} if rng.random() < 0.7 and rank else {}
        case "Cast":
            more = {
                "to": int(
                    rng.choice([TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL, TensorProto.UINT8])
                )
            }
        case "ConstantOfShape":
            operands = [rng.integers(0, 4, rng.integers(0, 3))]
            more = {"value": helper.make_tensor("v", TensorProto.INT64, [1], [7])} if rng.random() < 0.5 else {}
        case "Expand":
            operands.append(np.array([2, *shape][int(rng.integers(0, 2)) :], np.int64))
        case "ReduceMax" | "ReduceMin":
            operands.append(np.unique(rng.integers(-rank - 1, rank + 1, rng.integers(0, 3))) if rng.random() < 0.7 else None)
            more = {"keepdims": int(rng.integers(2)), "noop_with_empty_axes": int(rng.integers(2))}
        case "Shape":
            more = {"start": int(rng.integers(-3, 4))}
    names = ["" if a is None else f"x{i}" for i, a in enumerate(operands)]
    return helper.make_node(op, names, ["y"], **more), operands


def general(proto: NodeProto, operands: list[np.ndarray | None]) -> np.ndarray | None:
    """Return the general evaluator's result; None if it refuses."""
    try:
        return evaluate_proto(proto, {n: a for n, a in zip(proto.input, operands, strict=True) if a is not None}, OPSET)["y"]
    except (BadInput, ValueError, IndexError, TypeError, NotImplementedError):
        return None


@pytest.mark.parametrize("op", list(numpy_fast.PLAIN))
def test_as_the_general_way(op: str, rng: np.random.Generator) -> None:
    met = 0
    for _ in range(600):
        if met == 15:
            break
        proto, operands = drawn(op, rng)
        computed = numpy_fast.make_plain(host_node(proto, OPSET), proto)
        assert computed is not None
        found = computed(operands)
        if found is None:
            continue
        want = general(proto, operands)
        about = f"{proto} {operands}"
        assert want is not None and (found.dtype, found.shape) == (want.dtype, want.shape), about
        np.testing.assert_array_equal(found, want, err_msg=about)
        met += 1
    assert met == 15


def test_boxes_that_overlap(rng: np.random.Generator) -> None:
    """Check the selected boxes against a loop that follows ONNX's definition."""
    for turn in range(40):
        boxes, scores = rng.random((2, 20, 4), np.float32), rng.random((2, 2, 20), np.float32)
        if turn % 3 == 0:  # equal scores, and boxes that touch
            boxes, scores = np.round(boxes, 1), np.round(scores, 1)
        most, share, least = 6, np.float32(rng.choice([0, 0.3, 0.5, 1])), np.float32(0.2)
        operands = [boxes, scores, np.array([most]), np.array([share]), np.array([least])]
        (found,) = OPERATORS["NonMaxSuppression"]({}, operands) or ()
        assert found.tolist() == [
            [b, c, k] for b in range(2) for c in range(2) for k in kept(boxes[b], scores[b, c], most, share, least)
        ]


def kept(boxes: np.ndarray, scores: np.ndarray, most: int, share: np.float32, least: np.float32) -> list[int]:
    chosen: list[int] = []
    for box in np.argsort(-scores, kind="stable"):
        if len(chosen) < most and scores[box] > least and all(np.float32(shared(boxes[box], boxes[k])) <= share for k in chosen):
            chosen.append(int(box))
    return chosen


def shared(a: np.ndarray, b: np.ndarray) -> float:
    one, two = (np.concatenate([np.minimum(x[:2], x[2:]), np.maximum(x[:2], x[2:])]) for x in (a, b))
    width = np.maximum(np.minimum(one[2:], two[2:]) - np.maximum(one[:2], two[:2]), 0)
    both, areas = float(width[0] * width[1]), float(np.prod(one[2:] - one[:2]) + np.prod(two[2:] - two[:2]))
    return both / (areas - both) if areas > both else 0.0


def test_constants_of_a_body_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that only operators without a direct NumPy form use the general evaluator when a body runs again."""
    nodes = [helper.make_node("Constant", [], ["two"], value_float=2.0), helper.make_node("Mul", ["x", "two"], ["m"])]
    nodes += [helper.make_node("Unique", ["m"], ["u"]), helper.make_node("Sin", ["u"], ["y"])]
    graph = helper.make_graph(nodes, "body", [], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    body, met = evaluator.nd.SubGraph(graph.SerializeToString(), ("x",), (("", 21),)), list[str]()
    run = evaluator.evaluate_proto
    monkeypatch.setattr(evaluator, "evaluate_proto", lambda proto, *rest: (met.append(proto.op_type), run(proto, *rest))[1])
    for x in (np.ones(2, np.float32), np.zeros(3, np.float32)):
        (y,) = evaluator.interpret_body(body, (), {"x": x})
        np.testing.assert_allclose(y, np.sin(np.unique(x * 2)))
    assert met == ["Constant", "Sin", "Sin"]


@pytest.mark.parametrize("extent", [40, 700, 4100])
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int32", "uint32", "int64", "uint64"])
def test_elements_are_ordered_as_numbers(dtype: str, largest: bool, extent: int, rng: np.random.Generator) -> None:
    """Check few elements, all elements of longer rows, and the best elements of long rows."""
    x = rng.integers(0, 9, (3, extent)).astype(dtype)
    if x.dtype.kind == "f":
        x[:, :6] = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0]
    else:
        x[:, :2] = [np.iinfo(dtype).max, np.iinfo(dtype).min]
    for count in (0, 1, 7, extent):
        found = order_elements(x, count, largest)
        assert found.dtype == np.int64 and found.shape == (3, count)
        for row, places in zip(x, found, strict=True):
            # NaN sorts last in NumPy. Of the reversed row, the last equal element is the first one.
            order = extent - 1 - np.argsort(row[::-1], kind="stable")[::-1] if largest else np.argsort(row, kind="stable")
            assert places.tolist() == order[:count].tolist()

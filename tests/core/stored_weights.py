"""Random matrix products with weights stored as codes."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from rammer.ir.formats import FORMATS, numpy_type

Array = np.ndarray[Any, np.dtype[Any]]
#: Bits per code.
KINDS = {"uint4": 4, "int4": 4, "uint2": 2, "int2": 2, "int8": 8, "uint8": 8}


def stored(random: Random, kind: str) -> tuple[onnx.ModelProto, Array, int]:
    """Make a product with weights of ``kind``; return it, the weights in float64, and the byte size of the codes."""
    rng = np.random.default_rng(random.getrandbits(63))
    depth, columns, turned = random.choice([64, 96, 80]), random.choice([65, 96]), random.random() < 0.5
    shape, inner = ((columns, depth), 1) if turned else ((depth, columns), 0)
    ends = FORMATS[kind].ends if kind in FORMATS else (np.iinfo(kind).min, np.iinfo(kind).max)  # type: ignore[union-attr]
    codes = rng.integers(ends[0], ends[1] + 1, shape)
    grain = random.choice(["tensor", "column", "block"])
    block = random.choice([16, 32, 33]) if grain == "block" else 0
    sizes = [-(-n // block) if d == inner else n for d, n in enumerate(shape)] if block else [columns] * (grain == "column")
    scale, zero = rng.uniform(0.01, 0.1, sizes).astype(np.float32), rng.integers(ends[0], ends[1] + 1, sizes)
    attributes = {"axis": inner if block else 1 - inner} | ({"block_size": block} if block else {})
    wide: list[Array] = [scale.astype(np.float64), zero]
    if block:
        wide = [np.take(np.repeat(v, block, inner), range(shape[inner]), inner) for v in wide]
    elif grain == "column":
        wide = [v[:, None] if turned else v for v in wide]
    numbers = (codes - wide[1]) * wide[0]
    constants = {"w": codes.astype(numpy_type(kind)), "s": scale, "z": zero.astype(numpy_type(kind))}
    nodes = [helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"], **attributes)]
    if turned and random.random() < 0.5:
        nodes.append(helper.make_node("Gemm", ["x", "d"], ["y"], transB=1))
    else:
        nodes += [helper.make_node("Transpose", ["d"], ["t"], perm=[1, 0])] * turned
        nodes.append(helper.make_node("MatMul", ["x", "t" if turned else "d"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "stored",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, depth])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, columns])],
        [numpy_helper.from_array(v, n) for n, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=11)
    return model, numbers.T if turned else numbers, codes.size * KINDS[kind] // 8

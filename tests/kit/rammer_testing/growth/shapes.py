"""Graphs of about ``n`` operators in shapes that slow compilers down: chains, fans, ladders, bodies, calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from rammer_testing.growth.bodies import (
    calls,
    decided_ifs,
    hosted,
    loop,
    many_calls,
    many_ifs,
    nested_ifs,
    scan,
)
from rammer_testing.growth.sketch import MAPS, Sketch

Shape: TypeAlias = Callable[[int], onnx.ModelProto]


# --- chains -------------------------------------------------------------------------------------


def elementwise(n: int) -> onnx.ModelProto:
    """Return a chain of element-wise operators."""
    s = Sketch()
    value = s.input(4, 8)
    for i in range(n):
        value = s.node(MAPS[i % len(MAPS)], value)
    return s.model(value)


def biased(n: int) -> onnx.ModelProto:
    """Return alternating additions of distinct constants and activations."""
    s = Sketch()
    value = s.input(4, 8)
    for i in range(n):
        value = s.node("Add", value, s.weight(8)) if i % 2 == 0 else s.node("Relu", value)
    return s.model(value)


def _chain(step: Callable[[Sketch, str, int], str], *shape: int) -> Shape:
    def build(n: int) -> onnx.ModelProto:
        s = Sketch()
        value = s.input(*shape)
        for i in range(n):
            value = step(s, value, i)
        return s.model(value)

    return build


def _shared(op: str, rows: int, width: int) -> Shape:
    """Return a chain of products with one shared weight."""

    def build(n: int) -> onnx.ModelProto:
        s = Sketch()
        value, weight = s.input(rows, width), s.weight(width, width)
        for _ in range(n):
            value = s.node(op, value, weight)
        return s.model(value)

    return build


def _layer(s: Sketch, value: str, i: int) -> str:
    """Append a product, bias and activation, and sometimes a rearrangement, a normalisation or a residual."""
    kind = i % 8
    if kind in (0, 4):
        return s.node("MatMul", value, s.weight(16, 16))
    if kind in (1, 5):
        return s.node("Add", value, s.weight(16))
    if kind == 2:
        return s.node("Relu", value)
    if kind == 6:
        return s.node("Softmax", value, axis=-1)
    if kind == 3:
        return s.node("Transpose", value, perm=[1, 0])
    return s.node("Add", value, s.nodes[-4].output[0])


def _gated(s: Sketch, value: str, i: int) -> str:
    """Append a product in two blocks, one of which gates the second."""
    s.node("Split", s.node("MatMul", value, s.weight(8, 16)), outputs=2, axis=1, num_outputs=2)
    gate, content = s.nodes[-1].output
    return s.node("Mul", s.node("Sigmoid", gate), s.node("Tanh", content))


def _rearranged(s: Sketch, value: str, i: int) -> str:
    op = ("Transpose", "Relu", "Reshape", "Neg")[i % 4]
    if op == "Transpose":
        return s.node(op, value, perm=[1, 0, 2])
    return s.node(op, value, s.constant(np.array([4, 4, 4], np.int64))) if op == "Reshape" else s.node(op, value)


# --- fans and ladders ---------------------------------------------------------------------------


def fan_out(n: int) -> onnx.ModelProto:
    """Return one value that every operator reads; each result is an output."""
    s = Sketch()
    value = s.node("Relu", s.input(4, 8))
    return s.model(*[s.node("Mul", value, s.weight(8)) for _ in range(n)])


def _fan_in(op: str, **attributes: Any) -> Shape:
    def build(n: int) -> onnx.ModelProto:
        s = Sketch()
        value = s.input(1, 8)
        return s.model(s.node(op, *[s.node("Mul", value, s.weight(8)) for _ in range(n)], **attributes))

    return build


def ladder(n: int) -> onnx.ModelProto:
    """Return a repeated pair of branches that join."""
    s = Sketch()
    value = s.input(4, 8)
    for _ in range(n // 3):
        value = s.node("Add", s.node("Relu", value), s.node("Tanh", value))
    return s.model(value)


def product_ladder(n: int) -> onnx.ModelProto:
    """Return a repeated pair of products that join."""
    s = Sketch()
    value = s.input(16, 16)
    for _ in range(n // 3):
        value = s.node("Add", s.node("MatMul", value, s.weight(16, 16)), s.node("MatMul", value, s.weight(16, 16)))
    return s.model(value)


def dense_block(n: int) -> onnx.ModelProto:
    """Return a growing concatenation of at most 32 parts, as in a DenseNet."""
    s = Sketch()
    parts = [s.input(1, 4, 4, 4)]
    for i in range(n // 2):
        parts = parts[-31:]
        joined = s.node("Concat", *parts, axis=1) if len(parts) > 1 else parts[0]
        parts.append(s.node("Conv", joined, s.weight(4, 4 * len(parts), 1, 1)))
        if i % 32 == 31:
            parts = parts[-1:]
    return s.model(parts[-1])


def parallel(n: int) -> onnx.ModelProto:
    """Return many parallel chains of eight operators, added at the end."""
    s = Sketch()
    start, ends = s.input(4, 8), list[str]()
    for _ in range(max(1, n // 8)):
        value = s.node("Mul", start, s.weight(8))
        for op in (*MAPS, "Relu", "Tanh"):
            value = s.node(op, value)
        ends.append(value)
    return s.model(s.node("Sum", *ends))


# --- many small things --------------------------------------------------------------------------


def many_inputs(n: int) -> onnx.ModelProto:
    """Return a graph with equally many inputs and operators."""
    s = Sketch()
    return s.model(*[s.node("Relu", s.input(4)) for _ in range(n)])


def many_initializers(n: int) -> onnx.ModelProto:
    """Return used initializers and equally many unused ones."""
    s = Sketch()
    value = s.input(8)
    for _ in range(n // 2):
        s.weight(8)
    for _ in range(n // 2):
        value = s.node("Max", value, s.weight(8))
    return s.model(value)


def shape_arithmetic(n: int) -> onnx.ModelProto:
    """Return foldable Shape, Gather, Concat and Reshape, in the form of exporters."""
    s = Sketch()
    value, first = s.input(4, 8), s.constant(np.array([0], np.int64))
    for i in range(n // 5):
        rows = s.node("Gather", s.node("Shape", value), first)
        rest = s.node("Constant", value=numpy_helper.from_array(np.array([-1], np.int64)))
        value = s.node("Reshape", s.node("Neg" if i % 2 else "Abs", value), s.node("Concat", rows, rest, axis=0))
    return s.model(value)


def constants(n: int) -> onnx.ModelProto:
    """Return a chain of operators with constant operands, and many Constant nodes."""
    s = Sketch()
    known = s.constant(np.arange(8, dtype=np.float32))
    for i in range(n):
        if i % 3 == 0:
            known = s.node("Add", known, s.node("Constant", value=numpy_helper.from_array(np.full(8, i, np.float32))))
        else:
            known = s.node("Identity" if i % 3 == 1 else "Neg", known)
    return s.model(s.node("Add", s.input(8), known))


def casts(n: int) -> onnx.ModelProto:
    """Return Identity operators and casts to another type and back."""
    s = Sketch()
    value = s.input(4, 8)
    for i in range(n):
        op = ("Identity", "Cast", "Cast", "Identity")[i % 4]
        kind = {"to": TensorProto.FLOAT16 if i % 4 == 1 else TensorProto.FLOAT} if op == "Cast" else {}
        value = s.node(op, value, **kind)
    return s.model(value)


def splits(n: int) -> onnx.ModelProto:
    """Return one tensor that is split into many slices, processed, and concatenated again."""
    s = Sketch()
    value = s.input(max(1, n // 3), 4)
    s.node("Split", value, outputs=max(1, n // 3), axis=0, num_outputs=max(1, n // 3))
    parts = [s.node("Tanh", name) for name in list(s.nodes[0].output)]
    return s.model(s.node("Concat", *parts, axis=0))


def accumulated(n: int) -> onnx.ModelProto:
    """Return products of one tensor that are accumulated one by one."""
    s = Sketch()
    start = s.input(16, 16)
    value = s.node("MatMul", start, s.weight(16, 16))
    for _ in range(n // 2):
        value = s.node("Add", value, s.node("MatMul", start, s.weight(16, 16)))
    return s.model(value)


def scaled(n: int) -> onnx.ModelProto:
    """Return a product that is multiplied by a chain of constants."""
    s = Sketch()
    value = s.node("MatMul", s.input(16, 16), s.weight(16, 16))
    for i in range(n):
        value = s.node("Mul", value, s.constant(np.array(2.0 if i % 2 else 0.5, np.float32)))
    return s.model(s.node("Relu", value))


def twice(n: int) -> onnx.ModelProto:
    """Return a graph in which two products read every weight."""
    s = Sketch()
    value = s.input(1, 16)
    for _ in range(n // 2):
        weight = s.weight(16, 16)
        value = s.node("MatMul", s.node("MatMul", value, weight), weight)
    return s.model(value)


def kept(n: int) -> onnx.ModelProto:
    """Return a value that a separate condition updates or retains in each step of three operators."""
    s = Sketch()
    value, limit = s.input(4, 8), s.input(4, 8)
    for i in range(max(n // 3, 1)):
        made = s.node(MAPS[i % len(MAPS)], value)
        value = s.node("Where", s.node("Greater", limit, s.weight(8)), made, value)
    return s.model(value)


def regrouped(n: int) -> onnx.ModelProto:
    """Return many parts that are concatenated and split again at other offsets."""
    s, count = Sketch(), 2 * max(1, n // 6)
    start = s.input(1, 8)
    joined = s.node("Concat", *[s.node("Mul", start, s.weight(8)) for _ in range(count)], axis=0)
    s.node("Split", s.node("Transpose", joined, perm=[1, 0]), outputs=8, axis=0, num_outputs=8)
    s.node("Split", joined, outputs=count // 2, axis=0, num_outputs=count // 2)
    return s.model(*[s.node("Tanh", name) for name in (*s.nodes[-2].output, *s.nodes[-1].output)])


#: Graphs by name. Graphs in ``DEEP`` nest as deep as they are large.
SHAPES: Final[Mapping[str, Shape]] = {
    "elementwise": elementwise,
    "biased": biased,
    "matmul": _chain(lambda s, v, i: s.node("MatMul", v, s.weight(16, 16)), 16, 16),
    "matmul_shared": _shared("MatMul", 16, 16),
    "matmul_row": _chain(lambda s, v, i: s.node("MatMul", v, s.weight(16, 16)), 1, 16),
    "gemm_bias": _chain(lambda s, v, i: s.node("Gemm", v, s.weight(16, 16), s.weight(16)), 4, 16),
    "conv": _chain(lambda s, v, i: s.node("Conv", v, s.weight(4, 4, 3, 3), pads=[1, 1, 1, 1]), 1, 4, 6, 6),
    "mixed": _chain(_layer, 16, 16),
    "gated": _chain(_gated, 4, 8),
    "reductions": _chain(lambda s, v, i: s.node("Add", v, s.node("ReduceMean", v, axes_of(s), keepdims=1)), 4, 8),
    "softmax": _chain(lambda s, v, i: s.node("Softmax", v, axis=i % 2), 4, 8),
    "rearranged": _chain(_rearranged, 4, 4, 4),
    "pool": _chain(lambda s, v, i: s.node("MaxPool", v, kernel_shape=[3, 3], pads=[1, 1, 1, 1]), 1, 2, 6, 6),
    "transposes": _chain(lambda s, v, i: s.node("Transpose", v, perm=[1, 2, 0]), 4, 4, 4),
    "reshapes": _chain(lambda s, v, i: s.node("Reshape", v, s.constant(np.array([2, 8] if i % 2 else [4, 4]))), 2, 8),
    "group_norm": _chain(lambda s, v, i: s.node("GroupNormalization", v, s.weight(4), s.weight(4), num_groups=2), 1, 4, 3, 3),
    "scaled_conv": _chain(
        lambda s, v, i: s.node("Mul", v, s.weight(1, 4, 1, 1)) if i % 2 == 0 else s.node("Conv", v, s.weight(4, 4, 1, 1)),
        1,
        4,
        3,
        3,
    ),
    "accumulated": accumulated,
    "scaled": scaled,
    "twice": twice,
    "regrouped": regrouped,
    "kept": kept,
    "hosted": hosted,
    "fan_out": fan_out,
    "sum": _fan_in("Sum"),
    "concat": _fan_in("Concat", axis=0),
    "ladder": ladder,
    "product_ladder": product_ladder,
    "dense_block": dense_block,
    "parallel": parallel,
    "many_inputs": many_inputs,
    "many_initializers": many_initializers,
    "shape_arithmetic": shape_arithmetic,
    "constants": constants,
    "casts": casts,
    "splits": splits,
    "loop": loop,
    "scan": scan,
    "many_ifs": many_ifs,
    "many_calls": many_calls,
    "nested_ifs": nested_ifs,
    "decided_ifs": decided_ifs,
    "calls": calls,
}
DEEP: Final = frozenset({"nested_ifs", "decided_ifs", "calls"})


def axes_of(s: Sketch) -> str:
    """Return the constant [-1], created once."""
    if not s.constants:
        s.constant(np.array([-1], np.int64))
    return str(s.constants[0].name)

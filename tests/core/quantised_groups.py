"""Random groups as quantisers write them (DequantizeLinear, operators, QuantizeLinear), and the check of their results.

Unoptimised ONNX Runtime computes them as written, in floats. Its codes equal ours unless the quotient before rounding is a tie
within float32 precision: then they may differ by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from rammer_testing.nonempty import some

Array = np.ndarray[Any, np.dtype[Any]]
#: Distance from a tie, relative to the summed terms, below which a quotient counts as a tie.
TIE = 2e-5


@dataclass
class Group:
    """An ONNX graph under construction. ``quotients`` has (codes, quantised value, scale) of its results; ``others`` has results
    without rounding. ``floats``: some product must stay in floats."""

    random: Random
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    inputs: dict[str, Array] = field(default_factory=dict)
    quotients: list[tuple[str, str, float]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    floats: bool = False

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.random.getrandbits(63))

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return its output."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def constant(self, values: Any) -> str:
        """Add a constant with these values."""
        self.constants.append(numpy_helper.from_array(np.asarray(values), f"c{len(self.constants)}"))
        return f"c{len(self.constants) - 1}"

    def chance(self, share: float = 0.5) -> bool:
        """Return True in a fraction ``share`` of the draws."""
        return self.random.random() < share

    def point(self, kind: str, plain: bool = False) -> Array:
        """Draw a zero point: 0, an end of the range, or any."""
        ends = np.iinfo(kind)
        choices = [0] if plain else [0, int(ends.min), int(ends.max), self.random.randint(int(ends.min), int(ends.max))]
        return np.array(self.random.choice(choices), kind)

    def scale(self) -> np.float32:
        """Draw a scale; a power of two makes ties."""
        return np.float32(self.random.choice([2.0**-5, 2.0**-4, self.random.uniform(0.01, 0.1)]))

    def data(self, shape: tuple[int, ...], kind: str) -> tuple[str, str]:
        """Add an input of codes that covers all of them; return the codes and their dequantised values."""
        ends, name = np.iinfo(kind), f"x{len(self.inputs)}"
        self.inputs[name] = self.rng.integers(ends.min, int(ends.max) + 1, shape).astype(kind)
        scale = self.scale() * np.float32(-1 if self.chance(0.3) else 1)
        return name, self.dequantized(name, scale, self.point(kind))

    def weights(self, shape: tuple[int, ...], kind: str, axis: int, plain: bool = False) -> tuple[str, Array]:
        """Add constant codes with one scale, or one per index along ``axis``; return their values and the scales."""
        ends = np.iinfo(kind)
        codes = self.constant(self.rng.integers(ends.min, int(ends.max) + 1, shape).astype(kind))
        if self.chance():
            scale = self.rng.uniform(0.001, 0.02, shape[axis]).astype(np.float32)
            zero = np.array([self.point(kind, plain) for _ in range(shape[axis])])
            return self.dequantized(codes, scale, zero, axis), scale
        scale = np.float32(self.random.uniform(0.001, 0.02))
        return self.dequantized(codes, scale, self.point(kind, plain)), np.asarray(scale)

    def dequantized(self, codes: str, scale: Any, zero: Any, axis: int = 0) -> str:
        """Add a DequantizeLinear; a zero point of 0 may be omitted."""
        zeros = [] if not np.any(zero) and self.chance() and np.asarray(zero).dtype == np.uint8 else [self.constant(zero)]
        return self.node("DequantizeLinear", codes, self.constant(scale), *zeros, axis=axis)

    def result(self, x: str, size: float, kind: str) -> None:
        """Add a result of codes for values of about the magnitude ``size``."""
        scale = np.float32(2.0 ** np.round(np.log2(size / 60)) if self.chance(0.3) else size / self.random.uniform(30, 90))
        codes = self.node("QuantizeLinear", x, self.constant(scale), self.constant(self.point(kind)))
        self.quotients.append((codes, x, float(scale)))

    @property
    def results(self) -> list[str]:
        """The names of all results."""
        return [*(c for c, _, _ in self.quotients), *self.others]

    def model(self, inside: bool = False) -> onnx.ModelProto:
        """Return the model; with ``inside``, values before quantisation are outputs, too."""
        ports = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in self.inputs.items()
        ]
        names = self.results + [x for _, x, _ in self.quotients] * inside
        results = [onnx.ValueInfoProto(name=n) for n in dict.fromkeys(names)]
        graph = helper.make_graph(self.nodes, "group", ports, results, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=9)

    def problem(self, have: dict[str, Array]) -> str:
        """Return a description of wrong codes of a run; "" if all are right."""
        options = ort.SessionOptions()
        options.graph_optimization_level, options.log_severity_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL, 3
        session = ort.InferenceSession(self.model(True).SerializeToString(), options, providers=["CPUExecutionProvider"])
        names = [o.name for o in session.get_outputs()]
        want = dict(zip(names, session.run(None, self.inputs), strict=True))
        for name in self.others:
            if not np.array_equal(have[name], want[name]):
                return f"{name} differs"
        for codes, x, scale in some(self.quotients):
            quotient = want[x].astype(np.float64) / scale
            assert np.isfinite(quotient).all()
            slack = TIE * (1 + np.abs(quotient) + float(np.abs(quotient).max(initial=0)))
            tie = np.abs(np.abs(quotient - np.floor(quotient)) - 0.5) <= slack
            away = np.abs(have[codes].astype(int) - want[codes].astype(int))
            if have[codes].dtype != want[codes].dtype or np.any(away > tie):
                return f"{codes}: {int((away > tie).sum())} of {away.size} differ, most by {int(away.max())}"
        return ""


def convolution(g: Group) -> Group:
    """Add a Conv with an optional bias, residual and activation."""
    kind, group, rank = g.random.choice(["uint8", "int8"]), g.random.choice([1, 1, 3]), g.random.choice([1, 2, 2, 3])
    each, features = g.random.randint(1, 4), group * g.random.randint(1, 3)
    spatial, kernel = [g.random.randint(3, 6) for _ in range(rank)], [g.random.randint(1, 3) for _ in range(rank)]
    codes, x = g.data((g.random.randint(1, 2), group * each, *spatial), kind)
    w, scales = g.weights((features, each, *kernel), g.random.choice(["int8", "int8", kind]), 0, g.chance(0.7))
    operands = [x, w]
    if g.chance():
        sums = _scale_of(g, x) * scales if g.chance(0.7) else np.float32(0.003)
        bias = g.constant(g.rng.integers(-3000, 3000, features).astype(np.int32))
        operands.append(g.node("DequantizeLinear", bias, g.constant(np.asarray(sums, np.float32)), axis=0))
    pads = [g.random.randint(0, 1) for _ in range(2 * rank)]
    strides = [g.random.randint(1, 2) for _ in range(rank)]
    y = g.node("Conv", *operands, group=group, pads=pads, strides=strides)
    shape = [
        (n + pads[d] + pads[rank + d] - k) // s + 1 for d, (n, k, s) in enumerate(zip(spatial, kernel, strides, strict=True))
    ]
    return behind(g, y, (g.inputs[codes].shape[0], features, *shape), each * int(np.prod(kernel)), kind)


def _scale_of(g: Group, x: str) -> Array:
    made = next(n for n in g.nodes if n.output[0] == x)
    return numpy_helper.to_array(next(c for c in g.constants if c.name == made.input[1]))


def behind(g: Group, y: str, shape: tuple[int, ...], depth: int, kind: str) -> Group:
    """Add an optional residual and activation, and the codes."""
    if g.chance(0.4):
        y = g.node("Add", *g.random.sample([y, g.data(shape, kind)[1]], 2))
    if g.chance(0.6):
        y = g.node("Relu", y) if g.chance() else g.node("Clip", y, g.constant(np.float32(0)), g.constant(np.float32(6)))
    g.result(y, 4 * np.sqrt(depth), kind)
    return g


def product(g: Group) -> Group:
    """Add a MatMul with weights or of two inputs, or a Gemm."""
    kind, m, k, n = g.random.choice(["uint8", "int8"]), *(g.random.randint(1, 20) for _ in range(3))
    batch = tuple(g.random.choice([(), (), (2,), (2, 3)]))
    if g.chance(0.3):
        _, a = g.data((*batch, m, k), kind)
        _, b = g.data((*g.random.choice([(), batch]), k, n), kind)
        return behind(g, g.node("MatMul", a, b), (*batch, m, n), k, kind)
    if g.chance(0.1):  # scales along the reduction axis cannot be moved out of the sum
        g.floats = k > 1
        _, a = g.data((m, k), kind)
        codes = g.constant(g.rng.integers(-9, 9, (k, n)).astype(np.int8))
        scale = g.rng.uniform(0.001, 0.02, k).astype(np.float32)
        return behind(g, g.node("MatMul", a, g.node("DequantizeLinear", codes, g.constant(scale), axis=0)), (m, n), k, kind)
    if g.chance():
        _, a = g.data((*batch, m, k), kind)
        b, _ = g.weights((k, n), g.random.choice(["int8", kind]), 1, g.chance(0.7))
        y = g.node("MatMul", a, b)
        y = g.node("Add", y, g.constant(g.rng.normal(size=n).astype(np.float32))) if g.chance() else y
        return behind(g, y, (*batch, m, n), k, kind)
    turned = g.chance()
    _, a = g.data((m, k), kind)
    b, scales = g.weights((n, k) if turned else (k, n), "int8", 0 if turned else 1, True)
    operands = [a, b]
    if g.chance():
        bias = g.constant(g.rng.integers(-900, 900, n).astype(np.int32))
        operands.append(g.node("DequantizeLinear", bias, g.constant(np.asarray(_scale_of(g, a) * scales, np.float32)), axis=0))
    alpha, beta = g.random.choice([(1.0, 1.0), (1.0, 1.0), (0.5, 2.0)])
    return behind(g, g.node("Gemm", *operands, transB=int(turned), alpha=alpha, beta=beta), (m, n), k, kind)


def moved(g: Group) -> Group:
    """Add operators that move elements, take maxima or concatenate, between codes of one or of two scales."""
    kind = g.random.choice(["uint8", "int8"])
    _, x = g.data((1, g.random.choice([2, 4]), 4, 6), kind)
    size = abs(float(_scale_of(g, x))) * 120
    for _ in range(g.random.randint(1, 3)):
        x = g.random.choice(_MOVES)(g, x, kind)
    made = next(n for n in g.nodes if n.op_type == "DequantizeLinear")
    if g.chance():  # as quantisers write it: the scale does not change
        zero = made.input[2] if len(made.input) > 2 and g.chance(0.5) else g.constant(g.point(kind))
        result = g.node("QuantizeLinear", x, made.input[1], zero)
        g.quotients.append((result, x, float(_scale_of(g, made.output[0]))))
    else:
        g.result(x, size, kind)
    return g


def _pooled(g: Group, x: str, kind: str) -> str:
    if g.chance(0.3):
        g.others.append(f"places{len(g.nodes)}")
        made = helper.make_node("MaxPool", [x], [f"v{len(g.nodes)}", g.others[-1]], kernel_shape=[2, 2], pads=[1, 0, 0, 1])
        g.nodes.append(made)
        return made.output[0]
    return g.node("MaxPool", x, kernel_shape=[2, 2], pads=[1, 0, 0, 1]) if g.chance(0.7) else g.node("Identity", x)


def _joined(g: Group, x: str, kind: str) -> str:
    return g.node("Concat", x, g.node("Relu", x), axis=1) if g.chance(0.4) else g.node("Concat", x, x, axis=2)


def _averaged(g: Group, x: str, kind: str) -> str:
    whole = g.chance(0.3)
    return g.node("GlobalAveragePool", x) if whole else g.node("AveragePool", x, kernel_shape=[2, 2], pads=[1, 1, 0, 0])


def _chosen(g: Group, x: str, kind: str) -> str:
    largest = g.node("MaxPool", x, kernel_shape=[1, 3], pads=[0, 1, 0, 1])
    return g.node("Where", g.node("Greater", x, g.constant(np.float32(0.1))), x, largest)


_MOVES = (
    _pooled,
    _chosen,
    _joined,
    lambda g, x, kind: g.node("Transpose", x, perm=[0, 1, 3, 2]),
    lambda g, x, kind: g.node("Slice", x, *(g.constant(np.array([v], np.int64)) for v in (0, 9, 3, 2))),
    lambda g, x, kind: g.node("Resize", x, "", g.constant(np.array([1, 1, 2, 2], np.float32)), mode="nearest"),
    lambda g, x, kind: g.node("Relu", x),
    _averaged,
    lambda g, x, kind: g.node("Reshape", g.node("Flatten", x), g.node("Shape", x)),
)
MAKERS = {"convolution": convolution, "product": product, "moved": moved}

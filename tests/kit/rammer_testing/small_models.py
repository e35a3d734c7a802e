"""Small models that together need every kind of kernel and view; weights and inputs are drawn for each test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import numpy_helper, parser

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

HEADER = '<ir_version: 9, opset_import: ["" : 21]>'


@dataclass(frozen=True)
class SmallModel:
    """A model in ONNX's text form; inputs whose names start with ``w_`` become constants. ``shapes`` are extents of its symbolic
    dimensions, one mapping per run. Integer inputs are in 0 .. ``below`` - 1."""

    name: str
    text: str
    shapes: tuple[Mapping[str, int], ...] = ({},)
    below: int = 5

    def build(self, rng: np.random.Generator) -> onnx.ModelProto:
        """Return the model with random weights."""
        model = parser.parse_model(f"{HEADER} {self.name} {self.text}")
        ports = list(model.graph.input)
        del model.graph.input[:]
        for port in ports:
            if port.name.startswith("w_"):
                value = self._random(port, {}, rng)
                # He scale keeps values near one after a contraction.
                fan_in = max(1, int(np.prod(value.shape[1:])))
                scaled = value * np.float32((2 / fan_in) ** 0.5) if value.dtype.kind == "f" else value
                model.graph.initializer.append(numpy_helper.from_array(scaled, port.name))
            else:
                model.graph.input.append(port)
        return model

    def inputs(self, rng: np.random.Generator, shape: Mapping[str, int]) -> dict[str, Array]:
        """Return random inputs: floats N(0,1), uniform integers, fair booleans."""
        ports = parser.parse_model(f"{HEADER} {self.name} {self.text}").graph.input
        return {p.name: self._random(p, shape, rng) for p in ports if not p.name.startswith("w_")}

    def _random(self, port: onnx.ValueInfoProto, shape: Mapping[str, int], rng: np.random.Generator) -> Array:
        tensor = port.type.tensor_type
        extents = [d.dim_value if d.HasField("dim_value") else shape[d.dim_param] for d in tensor.shape.dim]
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        if dtype.kind == "f":
            return np.asarray(rng.standard_normal(extents)).astype(dtype)
        return np.asarray(rng.integers(0, 2 if dtype.kind == "b" else self.below, extents)).astype(dtype)


_LIST = (
    SmallModel(
        "convolution",
        """(float[1,3,13,11] x, float[8,3,3,3] w_k, float[8] w_b) => (float[1,8,7,6] y) {
        c = Conv<pads=[1,1,1,1], strides=[2,2]>(x, w_k, w_b)
        y = Relu(c)
    }""",
    ),
    SmallModel(
        "grouped",
        """(float[2,6,9,9] x, float[6,1,3,3] w_d, float[12,6,1,1] w_p) => (float[2,12,7,7] y) {
        d = Conv<group=6>(x, w_d)
        s = HardSwish(d)
        y = Conv(s, w_p)
    }""",
    ),
    SmallModel(
        "product",
        """(float[5,33] x, float[17,33] w_a, float[17] w_b, float[5,17] z) => (float[5,17] y) {
        g = Gemm<transB=1>(x, w_a, w_b)
        t = Tanh(g)
        y = Mul(t, z)
    }""",
    ),
    SmallModel(
        "softmax",
        """(float[3,4,37] x) => (float[3,4,37] y) {
        y = Softmax<axis=-1>(x)
    }""",
    ),
    SmallModel(
        "normalisation",
        """(float[6,50] x, float[50] w_s, float[50] w_b) => (float[6,50] y) {
        y = LayerNormalization<axis=-1>(x, w_s, w_b)
    }""",
    ),
    SmallModel(
        "pooling",
        """(float[1,4,10,10] x) => (float[1,4,5,5] m, float[1,4,5,5] a, float[1,4,1,1] g) {
        m = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x)
        a = AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)
        g = GlobalAveragePool(x)
    }""",
    ),
    SmallModel(
        "views",
        """(float[2,6,5] x) => (float[2,7,6] y) {
        a, b = Split<axis=1, num_outputs=2>(x)
        na = Neg(a)
        eb = Exp(b)
        c = Concat<axis=1>(eb, x, na)
        starts = Constant<value = int64[1] {1}>()
        ends = Constant<value = int64[1] {8}>()
        axes = Constant<value = int64[1] {1}>()
        s = Slice(c, starts, ends, axes)
        t = Transpose<perm=[0,2,1]>(s)
        shape = Constant<value = int64[3] {2, 7, 5}>()
        r = Reshape(t, shape)
        pads = Constant<value = int64[6] {0, 0, 1, 0, 0, 0}>()
        y = Pad(r, pads)
    }""",
    ),
    SmallModel(
        "gather",
        """(float[5,7] x, int64[3,2] i, int64[4] w_j) => (float[3,2,7] y, float[5,4] z) {
        y = Gather<axis=0>(x, i)
        z = Gather<axis=1>(x, w_j)
    }""",
    ),
    SmallModel(
        "integers",
        """(int32[4,9] a, int32[4,9] b, int64[9] c, bool[4,9] f)
        => (int32[4,9] q, int64[4,9] s, bool[4,9] l, int64[4,1] k, float[4,9] r) {
        one = Constant<value = int32 {1}>()
        b1 = Add(b, one)
        q = Div(a, b1)
        wide = Cast<to=7>(a)
        s = Sub(c, wide)
        g = Greater(a, b)
        l = And(g, f)
        k = ArgMax<axis=1>(a)
        h = Where(l, a, b)
        r = Cast<to=1>(h)
    }""",
        below=100,
    ),
    SmallModel(
        "reductions",
        """(float[3,200] x) => (float[3] s, float m, float[3,1] p) {
        one = Constant<value = int64[1] {1}>()
        s = ReduceSum<keepdims=0>(x, one)
        m = ReduceMax<keepdims=0>(x)
        p = ReduceMean<keepdims=1>(x, one)
    }""",
    ),
    SmallModel(
        "branches",
        """(float[1,4,6,6] x, float[5,4,1,1] w_a, float[3,4,3,3] w_b) => (float[1,12,6,6] y) {
        a = Conv(x, w_a)
        b = Conv<pads=[1,1,1,1]>(x, w_b)
        ra = Relu(a)
        sb = Sigmoid(b)
        y = Concat<axis=1>(ra, sb, x)
    }""",
    ),
    SmallModel(
        "images",
        """(float[2,3,12,10] x, float[6,3,3,3] w_a, float[5,6,1,1] w_b, float[4,6,3,3] w_c, float[9,1,3,3] w_d,
        float[7,9,1,1] w_e) => (float[2,7,4,3] y) {
        a = Conv<pads=[1,1,1,1]>(x, w_a)
        ra = Relu(a)
        b = Conv(ra, w_b)
        c = Conv<pads=[1,1,1,1]>(ra, w_c)
        j = Concat<axis=1>(b, c)
        m = MaxPool<kernel_shape=[2,2], strides=[2,2]>(j)
        d = Conv<group=9>(m, w_d)
        rd = Relu(d)
        y = Conv(rd, w_e)
    }""",
    ),
    SmallModel(
        "recurrence",
        """(float[4,2,3] x, float[1,20,3] w_w, float[1,20,5] w_r, float[1,40] w_b)
        => (float[4,1,2,5] y, float[1,2,5] h) {
        y, h = LSTM<hidden_size=5>(x, w_w, w_r, w_b)
    }""",
    ),
    SmallModel(
        "dynamic",
        """(float[N,C] x, float[1,1] w_s) => (float[N,C] y) {
        p = Softmax<axis=1>(x)
        y = Mul(p, w_s)
    }""",
        ({"N": 3, "C": 5}, {"N": 7, "C": 2}, {"N": 3, "C": 5}),
    ),
)

MODELS: Mapping[str, SmallModel] = {m.name: m for m in _LIST}


def dense_layers(count: int, width: int = 32, seed: int = 0, first: bool = False) -> onnx.ModelProto:
    """Return a chain of products ``m0``, ``m1``, ... of 4 rows, each with a Tanh (``h0``, ...). A residual connects the first
    layer to the last. The output is ``y``; with ``first`` also ``h0``, the first layer's result."""
    rows = f"float[4,{width}]"
    given = ", ".join([f"{rows} x", *(f"float[{width},{width}] w_{k}" for k in range(count))])
    lines = [f"m{k} = MatMul({'x' if not k else f'h{k - 1}'}, w_{k})\n h{k} = Tanh(m{k})" for k in range(count)]
    made = f"{rows} y, {rows} h0" if first else f"{rows} y"
    body = "\n".join([*lines, f"y = Add(h{count - 1}, h0)"])
    return SmallModel("stack", f"({given}) => ({made}) {{\n{body}\n}}").build(np.random.default_rng(seed))

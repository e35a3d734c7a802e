"""Models with dynamic lengths: the constructs that ranged programs support, and one model per unsupported construct."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import numpy_helper, parser

Array = np.ndarray
#: Function that draws the values of an input of this element type and shape.
Values = Callable[[np.random.Generator, tuple[int, ...]], Array]


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def _bits(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    made = rng.integers(0, 2, shape)
    made[..., :1] = 1
    return made


@dataclass(frozen=True)
class RangedModel:
    """A model, the ranges of its dynamic dimensions, and generators of its inputs."""

    proto: onnx.ModelProto
    spans: Mapping[str, tuple[int, int]]
    values: Mapping[str, Values] = field(default_factory=dict)

    def inputs(self, point: Mapping[str, int], rng: np.random.Generator) -> dict[str, Array]:
        """Draw inputs with these lengths."""
        made = {}
        for value in self.proto.graph.input:
            dims = value.type.tensor_type.shape.dim
            shape = tuple(point[d.dim_param] if d.dim_param else d.dim_value for d in dims)
            made[value.name] = self.values.get(value.name, _normal)(rng, shape)
        return made


def parsed(text: str, **constants: Array) -> onnx.ModelProto:
    """Parse the graph of ``text`` in ONNX's textual syntax, with these initializers."""
    proto = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items())
    return proto


def attention(rng: np.random.Generator) -> RangedModel:
    """Make self-attention with a padding mask, as exporters write it, and the mean over the sequence."""
    proto = parsed(
        """attention (float[batch, seq, 8] x, int64[batch, seq] mask) => (float[batch, seq, 8] y, float[batch, 8] pooled) {
            q0 = MatMul(x, wq)  q1 = Reshape(q0, heads)  q = Transpose<perm = [0, 2, 1, 3]>(q1)
            k0 = MatMul(x, wk)  k1 = Reshape(k0, heads)  k = Transpose<perm = [0, 2, 3, 1]>(k1)
            v0 = MatMul(x, wv)  v1 = Reshape(v0, heads)  v = Transpose<perm = [0, 2, 1, 3]>(v1)
            seen = Cast<to = 1>(mask)  hidden = Sub(one, seen)  less = Mul(hidden, least)  bias = Unsqueeze(less, places)
            s = MatMul(q, k)  t = Add(s, bias)  p = Softmax<axis = -1>(t)  o = MatMul(p, v)
            together = Transpose<perm = [0, 2, 1, 3]>(o)  flat = Reshape(together, whole)  y = Add(flat, x)
            pooled = ReduceMean<keepdims = 0>(y, along)
        }""",
        **{n: (rng.standard_normal((8, 8)) / 3).astype(np.float32) for n in ("wq", "wk", "wv")},
        one=np.float32(1),
        least=np.float32(-10000),
        heads=np.array([0, 0, 2, 4]),
        whole=np.array([0, 0, 8]),
        places=np.array([1, 2]),
        along=np.array([1]),
    )
    return RangedModel(proto, {"seq": (1, 9), "batch": (1, 3)}, {"mask": _bits})


def cache(rng: np.random.Generator) -> RangedModel:
    """Make a decoding step: past keys, possibly none, and a new one; positions start at the past's length."""
    proto = parsed(
        """cache (float[2, 1, 4] x, float[2, past, 4] past) => (float[2, 1, 4] y, float[2, all, 4] present) {
            shape = Shape(past)  before = Gather(shape, one)  after = Add(before, one)  places = Range(before, after, one)
            place = Gather(table, places)  new = Add(x, place)  present = Concat<axis = 1>(past, new)
            turned = Transpose<perm = [0, 2, 1]>(present)  s = MatMul(new, turned)  p = Softmax<axis = -1>(s)
            y = MatMul(p, present)
        }""",
        table=rng.standard_normal((16, 4)).astype(np.float32),
        one=np.array(1),
    )
    return RangedModel(proto, {"past": (0, 9)})


def causal(rng: np.random.Generator) -> RangedModel:
    """Make a triangle of ones cut to the length, maxima and products over the sequence, and its last position."""
    proto = parsed(
        """causal (float[2, seq, 3] x) => (float[2, seq, 3] sums, float[2, 3] most, float[2, 3] product, float[2, 3] end) {
            shape = Shape(x)  n = Gather(shape, at)  ends = Concat<axis = 0>(n, n)
            mask = Slice(triangle, zeros, ends, axes)  sums = MatMul(mask, x)
            most = ReduceMax<keepdims = 0>(sums, at)  product = ReduceProd<keepdims = 0>(x, at)
            end = Gather<axis = 1>(x, last)
        }""",
        triangle=np.tril(np.ones((16, 16), np.float32)),
        zeros=np.array([0, 0]),
        axes=np.array([0, 1]),
        at=np.array([1]),
        last=np.array(-1),
    )
    return RangedModel(proto, {"seq": (1, 9)})


def windows(rng: np.random.Generator) -> RangedModel:
    """Make padded convolutions and pools along the sequence, whose length is doubled by a concatenation."""
    proto = parsed(
        """windows (float[1, 3, seq] x) => (float[1, 3, long] y, float[1, 3, 1] pooled) {
            c = Conv<pads = [1, 1]>(x, a)  r = Relu(c)  both = Concat<axis = 2>(r, x)
            d = Conv<pads = [2, 2], dilations = [2]>(both, b)  y = MaxPool<kernel_shape = [3], pads = [1, 1], strides = [1]>(d)
            pooled = GlobalAveragePool(y)
        }""",
        **{n: rng.standard_normal((3, 3, 3)).astype(np.float32) for n in ("a", "b")},
    )
    return RangedModel(proto, {"seq": (1, 12)})


def residual(rng: np.random.Generator) -> RangedModel:
    """Make ResNet's operators with a dynamic batch."""
    proto = parsed(
        """residual (float[batch, 3, 8, 8] x) => (float[batch, 5] y) {
            c = Conv<pads = [3, 3, 3, 3], strides = [2, 2]>(x, a, i)  r = Relu(c)
            p = MaxPool<kernel_shape = [3, 3], strides = [1, 1], pads = [1, 1, 1, 1]>(r)
            d = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(p, b, i)  e = Relu(d)  s = Conv<strides = [2, 2]>(p, k, i)
            t = Add(e, s)  u = Relu(t)  v = GlobalAveragePool(u)  z = Flatten(v)  y = Gemm(z, w, j)
        }""",
        **{
            n: (rng.standard_normal(shape) / 3).astype(np.float32)
            for n, shape in {"a": (4, 3, 7, 7), "b": (4, 4, 3, 3), "k": (4, 4, 1, 1), "w": (4, 5), "i": (4,), "j": (5,)}.items()
        },
    )
    return RangedModel(proto, {"batch": (1, 12)})


def products(rng: np.random.Generator) -> RangedModel:
    """Make products wide enough for fast kernels: weights of a softmax over the sequence, and sums of two tensors along it."""
    proto = parsed(
        """products (float[seq, 32] x, float[2, seq, 48] w) => (float[seq, 32] y, float[2, 32, 48] z, float[seq, 1] n) {
            q = MatMul(x, a)  t = Transpose<perm = [1, 0]>(x)  s = MatMul(q, t)  p = Softmax<axis = -1>(s)  o = MatMul(p, x)
            y = Add(o, q)  r = Relu(x)  u = Transpose<perm = [1, 0]>(r)  z = MatMul(u, w)
            m = ReduceMean<keepdims = 1>(p, last)  n = Add(m, one)
        }""",
        a=(rng.standard_normal((32, 32)) / 6).astype(np.float32),
        last=np.array([1]),
        one=np.float32(1),
    )
    return RangedModel(proto, {"seq": (1, 41)})


def flattened(rng: np.random.Generator) -> RangedModel:
    """Make a reshape whose extents are products of two lengths, and a sum over all of it."""
    constants = {"all": np.array([-1]), "along": np.array([0])}
    text = "flattened (float[a, b] x) => (float[c] y, float[1] z) { r = Relu(x)  y = Reshape(r, all)  z = ReduceSum(y, along) }"
    return RangedModel(parsed(text, **constants), {"a": (1, 6), "b": (1, 7)})


def halved(rng: np.random.Generator) -> RangedModel:
    """Make a selection of every second position, half the length rounded up, and its mean."""
    constants = {"zero": np.array([0]), "far": np.array([1 << 30]), "two": np.array([2])}
    text = """halved (float[a] x) => (float[c] y, float[1] z) {
        s = Slice(x, zero, far, zero, two)  y = Tanh(s)  z = ReduceMean(y, zero)
    }"""
    return RangedModel(parsed(text, **constants), {"a": (3, 23)})


def strided(rng: np.random.Generator) -> RangedModel:
    """Make an audio front: convolutions with strides 5, 3 and 2, then attention over the frames."""
    proto = parsed(
        """strided (float[1, 1, samples] x) => (float[1, frames, 4] y, float[1, 1, 4] z) {
            a = Conv<strides = [5]>(x, wa)  b = Relu(a)  c = Conv<strides = [3], pads = [1, 1]>(b, wb)  d = Relu(c)
            p = MaxPool<kernel_shape = [3], strides = [2], pads = [1, 0]>(d)  t = Transpose<perm = [0, 2, 1]>(p)
            u = Transpose<perm = [0, 2, 1]>(t)  s = MatMul(t, u)  w = Softmax<axis = -1>(s)  y = MatMul(w, t)
            z = ReduceMean(y, one)
        }""",
        wa=rng.standard_normal((4, 1, 10)).astype(np.float32),
        wb=(rng.standard_normal((4, 4, 3)) / 3).astype(np.float32),
        one=np.array([1]),
    )
    return RangedModel(proto, {"samples": (70, 190)})


def pooled(rng: np.random.Generator) -> RangedModel:
    """Make an image of two lengths: strided convolutions, a flattened result, and three scales in one."""
    proto = parsed(
        """pooled (float[1, 3, h, w] x) => (float[1, 4, n] y) {
            a = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(x, wa)  b = Relu(a)
            c = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(b, wb)
            d = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(c)
            e = Reshape(b, flat)  f = Reshape(c, flat)  g = Reshape(d, flat)  y = Concat<axis = 2>(e, f, g)
        }""",
        wa=rng.standard_normal((4, 3, 3, 3)).astype(np.float32),
        wb=(rng.standard_normal((4, 4, 3, 3)) / 3).astype(np.float32),
        flat=np.array([0, 4, -1]),
    )
    return RangedModel(proto, {"h": (17, 30), "w": (16, 33)})


#: Models whose range is served by one program.
RANGED = {
    "flattened": flattened,
    "halved": halved,
    "strided": strided,
    "pooled": pooled,
    "products": products,
    "attention": attention,
    "cache": cache,
    "causal": causal,
    "residual": residual,
    "windows": windows,
}


def clipped() -> onnx.ModelProto:
    """Make a selection of at most five positions: the lesser of two lengths."""
    constants = {"zero": np.array([0]), "five": np.array([5])}
    return parsed("clipped (float[a] x) => (float[c] y) { y = Slice(x, zero, five) }", **constants)


def found() -> onnx.ModelProto:
    """Make a model whose output length is the number of non-zero elements."""
    return parsed("found (float[a] x) => (int64[1, c] y) { y = NonZero(x) }")


def recurrent() -> onnx.ModelProto:
    """Make a recurrent layer, which is one operator per step."""
    constants = {"w": np.ones((1, 8, 3), np.float32), "r": np.ones((1, 8, 2), np.float32)}
    return parsed("recurrent (float[a, 1, 3] x) => (float[a, 1, 1, 2] y) { y = LSTM<hidden_size = 2>(x, w, r) }", **constants)


#: Models whose range no program serves, and the error message.
UNRANGED = {
    "clipped": (clipped, "known function"),
    "found": (found, "run-time data"),
    "recurrent": (recurrent, "differ between"),
}

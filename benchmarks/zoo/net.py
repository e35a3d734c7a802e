"""The class Net: a small builder of ONNX graphs that tracks shapes and draws seeded weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
from onnx import helper, numpy_helper

from rammer_testing.weights import calibrate

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Shape: TypeAlias = tuple[int, ...]

#: The opset of the lowerings, so that reading needs no conversion; every peer supports it.
OPSET: Final = 21
IR_VERSION: Final = 10
#: Mean of the batch norms' shifts. With 0, random deep ReLU networks are chaotic: ResNet-50 multiplies float32's rounding to
#: 1.5e-5 and tf32's to 2.5e-2. With 0.5 float32 errors are 4 to 17 times smaller, and outputs of two inputs still differ by 0.13
#: to 0.3.
SHIFT: Final = 0.5


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """Return (rows, columns) from a pair or from one number for both."""
    return (value, value) if isinstance(value, int) else value


class Net:
    """A builder that adds nodes in topological order. Every method returns the name of its value.

    Images are NCHW; the batch is the input's first extent. All batch norms use ``epsilon``; builders divide numbers of channels
    by ``part``. ``shift`` is the mean of the norms' shifts."""

    def __init__(self, name: str, seed: int, epsilon: float = 1e-5, part: int = 1, shift: float = SHIFT) -> None:
        self.name, self.seed, self.epsilon, self.part, self.shift = name, seed, epsilon, part, shift
        self.rng = np.random.default_rng(seed)
        self.shapes: dict[str, Shape] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.constants: list[onnx.TensorProto] = []

    def shape(self, value: str) -> Shape:
        """Return the static shape of a value."""
        return self.shapes[value]

    def input(self, name: str, shape: Sequence[int], dtype: int = onnx.TensorProto.FLOAT) -> str:
        """Add a graph input of ONNX element type ``dtype``."""
        self.inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        self.shapes[name] = tuple(shape)
        return name

    def constant(self, array: Array, hint: str) -> str:
        """Add an initialiser with these values."""
        name = f"{hint}_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(array, name))
        self.shapes[name] = array.shape
        return name

    def normal(self, shape: Sequence[int], deviation: float, hint: str, mean: float = 0.0) -> str:
        """Add an initialiser drawn from N(mean, deviation^2), float32."""
        values = self.rng.standard_normal(tuple(shape), dtype=np.float32) * np.float32(deviation)
        return self.constant(values + np.float32(mean), hint)

    def node(self, op: str, inputs: Sequence[str], shape: Sequence[int], **attributes: Any) -> str:
        """Add one node with one output of ``shape``."""
        return self.node_of(op, inputs, [shape], **attributes)[0]

    def node_of(self, op: str, inputs: Sequence[str], shapes: Sequence[Sequence[int] | None], **attributes: Any) -> list[str]:
        """Add one node with an output for each of ``shapes``; None omits that output (its name is "")."""
        base = f"{op.lower()}_{len(self.nodes)}"
        names = ["" if s is None else base if i == 0 else f"{base}_{i}" for i, s in enumerate(shapes)]
        self.nodes.append(helper.make_node(op, list(inputs), names, name=base, **attributes))
        self.shapes |= {n: tuple(s) for n, s in zip(names, shapes, strict=True) if s is not None}
        return names

    def conv(
        self,
        x: str,
        channels: int,
        kernel: int | tuple[int, int] = 1,
        stride: int | tuple[int, int] = 1,
        pads: int | tuple[int, int] | None = None,
        groups: int = 1,
        bias: bool = False,
        dilation: int = 1,
    ) -> str:
        """Add a convolution; ``pads`` are per side (rows, columns) and by default keep the size at stride 1."""
        (kh, kw), (sh, sw) = pair(kernel), pair(stride)
        wide, tall = dilation * (kw - 1) + 1, dilation * (kh - 1) + 1
        ph, pw = (tall // 2, wide // 2) if pads is None else pair(pads)
        n, c, h, w = self.shape(x)
        weight = self.normal((channels, c // groups, kh, kw), math.sqrt(2 / (c // groups * kh * kw)), "w")
        operands = [x, weight, self.normal((channels,), 0.1, "b")] if bias else [x, weight]
        out = (n, channels, (h + 2 * ph - tall) // sh + 1, (w + 2 * pw - wide) // sw + 1)
        spread: dict[str, Any] = {"dilations": [dilation] * 2} if dilation > 1 else {}
        return self.node(
            "Conv", operands, out, kernel_shape=[kh, kw], strides=[sh, sw], pads=[ph, pw, ph, pw], group=groups, **spread
        )

    def norm(self, x: str) -> str:
        """Add a batch norm; ``finish`` fits mean and variance."""
        c = self.shape(x)[1]
        mean, variance = self.constant(np.zeros(c, np.float32), "mean"), self.constant(np.ones(c, np.float32), "var")
        operands = [x, self.normal((c,), 0.1, "scale", 1.0), self.normal((c,), 0.1, "shift", self.shift), mean, variance]
        return self.node("BatchNormalization", operands, self.shape(x), epsilon=self.epsilon)

    def map(self, op: str, *values: str, **attributes: Any) -> str:
        """Add an element-wise operator with NumPy broadcasting."""
        return self.node(op, values, np.broadcast_shapes(*(self.shape(v) for v in values)), **attributes)

    def relu(self, x: str) -> str:
        """Add max(x, 0) as a Relu."""
        return self.map("Relu", x)

    def pool(
        self,
        x: str,
        op: str,
        kernel: int | tuple[int, int],
        stride: int | tuple[int, int],
        pads: int | tuple[int, int, int, int] = 0,
        ceil: bool = False,
        count_padding: bool = False,
    ) -> str:
        """Add a MaxPool or AveragePool; ``pads`` are equal or (top, left, bottom, right)."""
        sides = (pads,) * 4 if isinstance(pads, int) else pads
        (n, c, h, w), (kh, kw), (sh, sw) = self.shape(x), pair(kernel), pair(stride)
        rows = (h + sides[0] + sides[2] - kh + (sh - 1 if ceil else 0)) // sh + 1
        columns = (w + sides[1] + sides[3] - kw + (sw - 1 if ceil else 0)) // sw + 1
        attributes: dict[str, Any] = {"count_include_pad": 1} if count_padding else {}
        return self.node(
            op,
            [x],
            (n, c, rows, columns),
            kernel_shape=[kh, kw],
            strides=[sh, sw],
            pads=list(sides),
            ceil_mode=int(ceil),
            **attributes,
        )

    def concat(self, values: Sequence[str], axis: int = 1) -> str:
        """Add a concatenation along ``axis``."""
        shape = list(self.shape(values[0]))
        shape[axis] = sum(self.shape(v)[axis] for v in values)
        return self.node("Concat", values, shape, axis=axis)

    def integers(self, values: Sequence[int], hint: str = "shape") -> str:
        """Add a constant int64 vector: shapes, axes, starts."""
        return self.constant(np.array(values, np.int64), hint)

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        """Add a reshape to ``shape``."""
        return self.node("Reshape", [x, self.integers(shape)], shape)

    def transpose(self, x: str, order: Sequence[int]) -> str:
        """Add a permutation of axes."""
        return self.node("Transpose", [x], [self.shape(x)[i] for i in order], perm=list(order))

    def classifier(self, x: str, classes: int) -> str:
        """Add a global average pool, flatten and fully connected layer."""
        n, c = self.shape(x)[:2]
        pooled = self.node("GlobalAveragePool", [x], (n, c, 1, 1))
        flat = self.node("Flatten", [pooled], (n, c), axis=1)
        weight, bias = self.normal((classes, c), math.sqrt(2 / c), "w"), self.normal((classes,), 0.1, "b")
        return self.node("Gemm", [flat, weight, bias], (n, classes), transB=1)

    def finish(self, *outputs: str, fit: bool) -> onnx.ModelProto:
        """Return the model. ``fit`` fits batch norms (or, without any, convolution biases) to one forward pass."""
        values = [helper.make_tensor_value_info(o, onnx.TensorProto.FLOAT, list(self.shape(o))) for o in outputs]
        graph = helper.make_graph(self.nodes, self.name, self.inputs, values, self.constants)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="rammer-zoo"
        )
        if fit:
            calibrate(model, self.seed)
        return model

"""Random models whose float16 results, or float32 ones in ``precision="float16"``, show where values are rounded or overflow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from rammer.runtime.inputs import scale_outlier_channels

UNARY = ("Neg", "Abs", "Relu", "Sqrt", "Floor", "Identity")
BINARY = ("Add", "Sub", "Mul", "Mul", "Div", "Max", "Min")


@dataclass
class Drawing:
    """A model of one element type under construction."""

    rng: np.random.Generator
    dtype: type[np.floating[Any]]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    @property
    def kind(self) -> int:
        """The number of the element type in ONNX."""
        return int(helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype)))

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node and return the name of its result."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def constant(self, value: Any, dtype: Any = None) -> str:
        """Add a constant, of the model's element type unless ``dtype`` is given."""
        array = np.asarray(value, dtype or self.dtype)
        self.constants.append(numpy_helper.from_array(array, f"c{len(self.constants)}"))
        return self.constants[-1].name

    def pick(self, *choices: Any) -> Any:
        """Return one of ``choices``."""
        return choices[int(self.rng.integers(len(choices)))]

    def model(self, inputs: dict[str, tuple[int, ...]], outputs: list[str]) -> onnx.ModelProto:
        """Return the model with these results."""
        given = [helper.make_tensor_value_info(n, self.kind, s) for n, s in inputs.items()]
        results = [helper.make_tensor_value_info(n, TensorProto.UNDEFINED, None) for n in outputs]
        for value in results:
            value.ClearField("type")
        graph = helper.make_graph(self.nodes, "chain", given, results, self.constants)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        return onnx.shape_inference.infer_shapes(made)


def draw_exact(rng: np.random.Generator) -> tuple[Callable[[list[str]], onnx.ModelProto], list[str], dict[str, np.ndarray]]:
    """Draw a float16 model whose operators are exact but for the rounding of their results.

    Returns a function of the wanted results, the names of all results, and inputs. Products have small integers as operands, so
    that their sums are exact in every order."""
    draw, shape = Drawing(rng, np.float16), (int(rng.integers(1, 6)), int(rng.integers(1, 40)))
    values, inputs = ["x", "w"], {"x": shape, "w": shape}
    feeds = {"x": rng.choice([60000, 300, -300, 7, 2e-4, 3.1, 0.1, -1], shape), "w": rng.choice([1000, 3, -0.3, 1e-3, 11], shape)}
    if rng.random() < 0.5:
        depth = int(rng.integers(1, 70))
        inputs |= {"a": (shape[0], depth)}
        feeds |= {"a": rng.integers(-40, 40, (shape[0], depth))}
        values.append(draw.node("MatMul", "a", draw.constant(rng.integers(-90, 90, (depth, shape[1])))))
    for _ in range(int(rng.integers(2, 9))):
        recent = values[-3:]
        if rng.random() < 0.3:
            values.append(draw.node(draw.pick(*UNARY), draw.pick(*recent)))
        elif rng.random() < 0.15:
            total = draw.node("ReduceMax", draw.pick(*recent), draw.constant([1], np.int64))
            values.append(draw.node(draw.pick(*BINARY), draw.pick(*recent), total))
        else:
            other = draw.constant(draw.pick(3, 0.1, -700)) if rng.random() < 0.2 else draw.pick(*values)
            values.append(draw.node(draw.pick(*BINARY), draw.pick(*recent), other))
    results = [n.output[0] for n in draw.nodes]
    return lambda wanted: draw.model(inputs, wanted), results, {n: v.astype(np.float16) for n, v in feeds.items()}


class Chain(Drawing):
    """A float32 model of norms, attention, statistics and products that bring large intermediates back into float16's range."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(rng, np.float32)
        self.rows, self.width = int(rng.integers(2, 6)), int(rng.choice([8, 24, 64, 96]))

    def axes(self, *axes: int) -> str:
        """Add axes of a reduction as a constant."""
        return self.constant(list(axes or (-1,)), np.int64)

    def square(self, x: str) -> str:
        return self.pick(lambda: self.node("Mul", x, x), lambda: self.node("Pow", x, self.constant(2)))()

    def mean(self, x: str) -> str:
        if self.rng.random() < 0.6:
            return self.node("ReduceMean", x, self.axes())
        total, count = self.node("ReduceSum", x, self.axes()), self.constant(self.width)
        return (
            self.node("Div", total, count) if self.rng.random() < 0.5 else self.node("Mul", total, self.constant(1 / self.width))
        )

    def divided(self, x: str, variance: str) -> str:
        """Divide by the square root of ``variance``, in one of the forms that exporters write."""
        safe = self.node("Add", variance, self.constant(self.pick(1e-5, 1e-6, 1e-3)))
        if self.rng.random() < 0.2:
            return self.node("Mul", x, self.node("Pow", safe, self.constant(-0.5)))
        root = self.node("Sqrt", safe) if self.rng.random() < 0.7 else self.node("Pow", safe, self.constant(0.5))
        if self.rng.random() < 0.5:
            return self.node("Div", x, root)
        inverse = self.node("Reciprocal", root) if self.rng.random() < 0.5 else self.node("Div", self.constant(1), root)
        if self.rng.random() < 0.3:
            inverse = self.node("Mul", inverse, self.constant(self.rng.uniform(0.5, 2, self.width)))
        return self.node("Mul", x, inverse)

    def layer_norm(self, x: str) -> str:
        centred = self.node("Sub", x, self.mean(x))
        y = self.divided(centred, self.mean(self.square(centred)))
        return self.node("Add", self.node("Mul", y, self.weights(self.width)), self.weights(self.width))

    def rms_norm(self, x: str) -> str:
        return self.divided(x, self.mean(self.square(x)))

    def unit(self, x: str) -> str:
        norm = self.pick(
            lambda: self.node("ReduceL2", x, self.axes()),
            lambda: self.node("Sqrt", self.node("ReduceSumSquare", x, self.axes())),
            lambda: self.node("ReduceL1", x, self.axes()),
            lambda: self.node("ReduceMax", self.node("Abs", x), self.axes()),
        )()
        return self.node("Div", x, self.node("Clip", norm, self.constant(1e-6)))

    def weights(self, *shape: int) -> str:
        scale = 1 / np.sqrt(shape[0]) if len(shape) > 1 else 1
        return self.constant(self.rng.standard_normal(shape) * scale)

    def linear(self, x: str) -> str:
        y = self.node("MatMul", x, self.weights(self.width, self.width))
        return self.node("Add", y, self.weights(self.width)) if self.rng.random() < 0.5 else y

    def softmax(self, x: str) -> str:
        if self.rng.random() < 0.5:
            return self.node("Softmax", x, axis=-1)
        powers = self.node("Exp", self.node("Sub", x, self.node("ReduceMax", x, self.axes())))
        return self.node("Div", powers, self.node("ReduceSum", powers, self.axes()))

    def attention(self, x: str) -> str:
        """Add attention: scores without a scale, or with one that follows. Keys and values are products with weights."""
        keys = self.node("Transpose", self.linear(x), perm=[1, 0])
        scores = self.node("MatMul", self.linear(x), keys)
        if self.rng.random() < 0.6:
            scores = self.node("Div", scores, self.constant(np.sqrt(self.width)))
        if self.rng.random() < 0.4:
            mask = np.triu(np.full((self.rows, self.rows), self.pick(-1e4, -1e9, -3.4e38)), 1)
            scores = self.node("Add", scores, self.constant(mask))
        return self.node("MatMul", self.softmax(scores), self.linear(x))

    def gram(self, x: str) -> str:
        """Add a matrix of second moments, normalised by its largest element."""
        moments = self.node("MatMul", self.node("Transpose", x, perm=[1, 0]), x)
        largest = self.node("ReduceMax", self.node("Abs", moments), self.axes(0, 1))
        return self.node("MatMul", self.unit(x), self.node("Div", moments, self.node("Add", largest, self.constant(1))))

    def gate(self, x: str) -> str:
        """Add a product of two activations before a quotient, or of one and a gate."""
        other = self.linear(x)
        if self.rng.random() < 0.3:
            return self.node("Mul", other, self.node("Sigmoid", x))
        product = self.node("Mul", x, other)
        divisor = self.node("Add", self.node("Abs", self.pick(x, other)), self.constant(1))
        return self.node("Div", product, divisor)

    def gelu(self, x: str) -> str:
        cube = self.node("Mul", self.node("Pow", x, self.constant(3)), self.constant(0.044715))
        inner = self.node("Tanh", self.node("Mul", self.node("Add", x, cube), self.constant(0.7978846)))
        return self.node("Mul", self.node("Mul", x, self.constant(0.5)), self.node("Add", inner, self.constant(1)))

    def swish(self, x: str) -> str:
        powers = self.node("Exp", self.node("Neg", x))
        return self.node("Div", x, self.node("Add", powers, self.constant(1)))

    def running_mean(self, x: str) -> str:
        counts = self.constant(np.arange(1, self.width + 1))
        return self.node("Div", self.node("CumSum", x, self.constant(1, np.int64)), counts)

    def scaled(self, x: str) -> str:
        factor = float(self.rng.choice([100, 1000, 3e4]))
        return self.node("Div", self.node("Mul", x, self.constant(factor)), self.constant(factor * 2))

    def log_sum(self, x: str) -> str:
        squares = self.node("Add", self.square(x), self.constant(1))
        return self.node("Log", squares if self.rng.random() < 0.5 else self.node("Mul", squares, squares))

    def deviation(self, x: str) -> str:
        """Add a row's standard deviation as a number for each element."""
        centred = self.node("Sub", x, self.mean(x))
        return self.node("Add", self.node("Mul", x, self.constant(0.5)), self.node("Sqrt", self.mean(self.square(centred))))

    def clipped(self, x: str) -> str:
        return self.node("Clip", self.square(x), self.constant(0), self.constant(self.pick(6, 300)))

    def residual(self, x: str) -> str:
        return self.node("Add", x, self.pick(self.linear, self.gelu)(self.rms_norm(x)))


BLOCKS = (
    *("layer_norm", "rms_norm", "unit", "linear", "softmax", "attention", "gram", "gate", "gelu", "swish", "running_mean"),
    *("scaled", "log_sum", "deviation", "clipped", "residual"),
)


def draw_chain(rng: np.random.Generator) -> tuple[onnx.ModelProto, dict[str, np.ndarray], str]:
    """Draw a model of one to three blocks and the names of its blocks. In some channels, activations reach 10,000."""
    draw = Chain(rng)
    names = [str(n) for n in rng.choice(BLOCKS, int(rng.integers(1, 4)))]
    value = "x"
    for name in names:
        value = getattr(draw, name)(value)
    x = scale_outlier_channels(rng.standard_normal((draw.rows, draw.width)).astype(np.float32), 1, rng)
    return draw.model({"x": x.shape}, [value]), {"x": x}, " ".join(names)

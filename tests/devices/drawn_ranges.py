"""Operators over tensors whose shapes are sums of lengths: half of the operators of ``drawn_models``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

#: An extent: a number, or a symbol with its factor and an offset.
Extent: TypeAlias = "int | tuple[str, int, int]"
Shape: TypeAlias = "tuple[Extent, ...]"
#: Extents of the axes that are not open.
WIDTHS = (1, 3, 4, 6)


def is_open(extent: Extent) -> bool:
    return not isinstance(extent, int)


@dataclass
class RangeDraw:
    """A model under construction: values by name with their shapes, newest last."""

    rng: np.random.Generator
    spans: dict[str, tuple[int, int]]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    known: list[onnx.TensorProto] = field(default_factory=list)
    ports: dict[str, Shape] = field(default_factory=dict)
    shapes: dict[str, Shape] = field(default_factory=dict)

    # --- making -----------------------------------------------------------------------------------

    def port(self, shape: Shape) -> str:
        name = f"x{len(self.ports)}"
        self.ports[name] = self.shapes[name] = shape
        return name

    def constant(self, value: Any) -> str:
        name = f"k{len(self.known)}"
        self.known.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def weights(self, *shape: int) -> str:
        return self.constant((self.rng.standard_normal(shape) / 2).astype(np.float32))

    def node(self, op: str, inputs: list[str], shape: Shape | None, **attributes: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"n{len(self.nodes)}", **attributes))
        if shape is not None:
            self.shapes[name] = shape
        return name

    def chosen(self, count: int) -> int:
        return int(self.rng.integers(count))

    # --- operators: each makes a value of ``x``, or nothing if unsupported ------------------------

    def unary(self, x: str, shape: Shape) -> None:
        self.node(["Relu", "Tanh", "Sigmoid", "Neg", "Abs"][self.chosen(5)], [x], shape)

    def shifted(self, x: str, shape: Shape) -> None:
        """Add constants that broadcast along open axes. A positive shift makes elements past the length nonzero."""
        last = shape[-1]
        other = self.weights(last) if isinstance(last, int) else self.constant(np.float32(1.5))
        self.node(["Add", "Mul", "Sub"][self.chosen(3)], [x, other], shape)

    def softmax(self, x: str, shape: Shape) -> None:
        self.node(["Softmax", "LogSoftmax"][self.chosen(2)], [x], shape, axis=self.chosen(len(shape)))

    def normalised(self, x: str, shape: Shape) -> None:
        if isinstance(shape[-1], int):
            self.node("LayerNormalization", [x, self.weights(shape[-1]), self.weights(shape[-1])], shape, axis=-1)

    def reduced(self, x: str, shape: Shape) -> None:
        op = ["ReduceSum", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceL2", "ReduceLogSumExp"][self.chosen(6)]
        axis, keep = self.chosen(len(shape)), self.chosen(2)
        left = tuple(1 if d == axis else n for d, n in enumerate(shape) if d != axis or keep)
        if left:
            self.node(op, [x, self.constant(np.array([axis]))], left, keepdims=keep)

    def transposed(self, x: str, shape: Shape) -> None:
        order = [int(d) for d in self.rng.permutation(len(shape))]
        self.node("Transpose", [x], tuple(shape[d] for d in order), perm=order)

    def product(self, x: str, shape: Shape) -> None:
        if isinstance(shape[-1], int):
            width = WIDTHS[self.chosen(4)]
            self.node("MatMul", [x, self.weights(shape[-1], width)], (*shape[:-1], width))

    def with_itself(self, x: str, shape: Shape) -> None:
        """Add ``x`` times its transpose, along whichever axis is last."""
        if len(shape) >= 2:
            order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
            turned = self.node("Transpose", [x], None, perm=order)
            self.node("MatMul", [x, turned], (*shape[:-1], shape[-2]))

    def attention(self, x: str, shape: Shape) -> None:
        if len(shape) >= 2 and isinstance(shape[-1], int):
            order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
            scores = self.node("MatMul", [x, self.node("Transpose", [x], None, perm=order)], None)
            self.node("MatMul", [self.node("Softmax", [scores], None, axis=-1), x], shape)

    def joined(self, x: str, shape: Shape) -> None:
        """Concatenate ``x`` with itself, or with a constant, along any axis."""
        axis = self.chosen(len(shape))
        extent = shape[axis]
        both: Extent = 2 * extent if isinstance(extent, int) else (extent[0], 2 * extent[1], 2 * extent[2])
        if isinstance(both, int) or both[1] <= 4:
            self.node("Concat", [x, x], (*shape[:axis], both, *shape[axis + 1 :]), axis=axis)

    def behind(self, x: str, shape: Shape) -> None:
        """Append or prepend a row of ones to an open axis."""
        axes = [d for d, n in enumerate(shape) if is_open(n)]
        if axes and all(isinstance(n, int) for d, n in enumerate(shape) if d != axes[0]):
            axis = axes[0]
            name, factor, offset = shape[axis]  # type: ignore[misc]
            ones = self.constant(np.ones([1 if d == axis else n for d, n in enumerate(shape)], np.float32))
            order = [x, ones] if self.chosen(2) else [ones, x]
            self.node("Concat", order, (*shape[:axis], (name, factor, offset + 1), *shape[axis + 1 :]), axis=axis)

    def cut(self, x: str, shape: Shape) -> None:
        """Remove the last element or the first, also with negative indices."""
        axis = self.chosen(len(shape))
        extent = shape[axis]
        if is_open(extent) and extent[2] < 1:  # type: ignore[index]
            return
        if isinstance(extent, int) and extent < 2:
            return
        less: Extent = extent - 1 if isinstance(extent, int) else (extent[0], extent[1], extent[2] - 1)
        bounds = [(0, -1), (1, 1 << 40)][self.chosen(2)]
        ports = [self.constant(np.array([n])) for n in (*bounds, axis)]
        self.node("Slice", [x, *ports], (*shape[:axis], less, *shape[axis + 1 :]))

    def backwards(self, x: str, shape: Shape) -> None:
        axis = self.chosen(len(shape))
        self.node("Slice", [x, *(self.constant(np.array([n])) for n in (-1, -(1 << 40), axis, -1))], shape)

    def summed(self, x: str, shape: Shape) -> None:
        axis = self.constant(np.array(self.chosen(len(shape))))
        self.node("CumSum", [x, axis], shape, exclusive=self.chosen(2), reverse=self.chosen(2))

    def padded(self, x: str, shape: Shape) -> None:
        axis, ahead, after = self.chosen(len(shape)), self.chosen(2), self.chosen(3)
        pads = [0] * (2 * len(shape))
        pads[axis], pads[axis + len(shape)] = ahead, after
        extent, more = shape[axis], ahead + after
        new: Extent = extent + more if isinstance(extent, int) else (extent[0], extent[1], extent[2] + more)
        fill = self.constant(np.float32(self.chosen(2)))
        self.node("Pad", [x, self.constant(np.array(pads)), fill], (*shape[:axis], new, *shape[axis + 1 :]))

    def convolved(self, x: str, shape: Shape) -> None:
        """Add a convolution along an open last axis, with padding that preserves its extent."""
        if len(shape) == 3 and isinstance(shape[1], int):
            width, kernel = WIDTHS[self.chosen(4)], (1, 3)[self.chosen(2)]
            pads = [kernel // 2] * 2
            self.node("Conv", [x, self.weights(width, shape[1], kernel)], (shape[0], width, shape[2]), pads=pads)

    def pooled(self, x: str, shape: Shape) -> None:
        if len(shape) == 3:
            op = ["MaxPool", "AveragePool"][self.chosen(2)]
            self.node(op, [x], shape, kernel_shape=[3], pads=[1, 1])

    def folded(self, x: str, shape: Shape) -> None:
        """Merge two axes of which one is open, and the heads of the last."""
        places = [d for d in range(len(shape) - 1) if isinstance(shape[d], int) != isinstance(shape[d + 1], int)]
        if places:
            d = places[self.chosen(len(places))]
            a, b = shape[d], shape[d + 1]
            times, (name, factor, offset) = (a, b) if isinstance(a, int) else (b, a)  # type: ignore[misc, assignment]
            if factor * times <= 12:
                whole = (name, factor * times, offset * times)
                sizes = [0] * d + [-1] + [int(n) if isinstance(n, int) else 0 for n in shape[d + 2 :]]
                if not any(n == 0 for n in sizes[d + 1 :]):
                    self.node("Reshape", [x, self.constant(np.array(sizes))], (*shape[:d], whole, *shape[d + 2 :]))

    def heads(self, x: str, shape: Shape) -> None:
        if isinstance(shape[-1], int) and shape[-1] % 2 == 0 and len(shape) <= 3:
            sizes = [0] * (len(shape) - 1) + [2, shape[-1] // 2]
            self.node("Reshape", [x, self.constant(np.array(sizes))], (*shape[:-1], 2, shape[-1] // 2))

    def with_other(self, x: str, shape: Shape) -> None:
        """Add a sum, a product or a choice with a value of the same shape."""
        others = [n for n, s in self.shapes.items() if s == shape]
        other = others[self.chosen(len(others))]
        if self.chosen(3):
            self.node(["Add", "Mul", "Max"][self.chosen(3)], [x, other], shape)
        else:
            self.node("Where", [self.node("Greater", [x, other], None), x, other], shape)

    def positions(self, x: str, shape: Shape) -> None:
        """Add a sum with the positions along an open axis."""
        axes = [d for d, n in enumerate(shape) if is_open(n)]
        if axes:
            axis = axes[self.chosen(len(axes))]
            size = self.node("Squeeze", [self.node("Shape", [x], None, start=axis, end=axis + 1)], None)
            places = self.node("Range", [self.constant(np.array(0)), size, self.constant(np.array(1))], None)
            floats = self.node("Cast", [places], None, to=TensorProto.FLOAT)
            wide = self.constant(np.array([d for d in range(len(shape) - axis)][1:], np.int64))
            column = self.node("Unsqueeze", [floats, wide], None) if len(shape) - axis > 1 else floats
            self.node("Add", [x, self.node("Mul", [column, self.constant(np.float32(0.1))], None)], shape)

    def spread(self, x: str, shape: Shape) -> None:
        """Subtract the mean along an open axis."""
        axis = self.chosen(len(shape))
        mean = self.node("ReduceMean", [x, self.constant(np.array([axis]))], None, keepdims=1)
        self.node("Sub", [x, mean], shape)

    def recurrent(self, x: str, shape: Shape) -> None:
        """Add a recurrent layer over the first of three axes."""
        if len(shape) == 3 and isinstance(shape[2], int) and is_open(shape[0]):
            op, units, ways = ["LSTM", "GRU", "RNN"][self.chosen(3)], 4, 1 + self.chosen(2)
            gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
            inputs = [x, self.weights(ways, gates * units, shape[2]), self.weights(ways, gates * units, units)]
            way = ["forward", "reverse"][self.chosen(2)] if ways == 1 else "bidirectional"
            long = self.node(op, inputs, None, hidden_size=units, direction=way)
            self.node(
                "Squeeze" if ways == 1 else "ReduceSum",
                [long, self.constant(np.array([1]))],
                (shape[0], shape[1], units),
                **({} if ways == 1 else {"keepdims": 0}),
            )

    def scanned(self, x: str, shape: Shape) -> None:
        """Add a running state over the first axis, with outer values that the body reads."""
        if len(shape) >= 2 and is_open(shape[0]) and all(isinstance(n, int) for n in shape[1:]):
            rest, factor = list(shape[1:]), self.constant(np.float32(0.5))
            port = [helper.make_tensor_value_info(n, TensorProto.FLOAT, rest) for n in ("s", "e", "s2", "o")]
            lines = [helper.make_node("Mul", ["s", factor], ["h"]), helper.make_node("Add", ["h", "e"], ["s2"])]
            lines.append(helper.make_node("Tanh", ["s2"], ["o"]))
            body = helper.make_graph(lines, "body", port[:2], port[2:])
            first = self.constant(np.zeros(rest, np.float32))
            name = f"t{len(self.nodes)}"
            back = self.chosen(2)
            self.nodes.append(
                helper.make_node(
                    "Scan",
                    [first, x],
                    [f"{name}_last", name],
                    body=body,
                    num_scan_inputs=1,
                    scan_input_directions=[back],
                    scan_output_directions=[self.chosen(2)],
                )
            )
            self.shapes[name] = shape
            self.shapes[f"{name}_last"] = shape[1:]

    # --- the whole --------------------------------------------------------------------------------

    def model(self) -> onnx.ModelProto:
        def value(name: str, shape: Shape | None) -> onnx.ValueInfoProto:
            dims = None if shape is None else [n if isinstance(n, int) else n[0] for n in shape]
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)

        read = {i for n in self.nodes for i in n.input}
        ends = [n for n in self.shapes if n not in read and n not in self.ports] or [[*self.shapes][-1]]
        inputs = [value(n, s) for n, s in self.ports.items()]
        graph = helper.make_graph(self.nodes, "drawn", inputs, [value(n, None) for n in ends], self.known)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)

    def inputs(self, point: dict[str, int]) -> dict[str, np.ndarray]:
        shapes = {n: [d if isinstance(d, int) else point[d[0]] for d in s] for n, s in self.ports.items()}
        return {n: self.rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}

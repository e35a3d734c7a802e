"""A decoder for two GPUs, whose layers are split by heads and inner units, and where each half is computed."""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import helper, numpy_helper

F32 = onnx.TensorProto.FLOAT


class SplitDecoder:
    """One token behind ``past`` others through ``layers`` of attention and an inner layer of four times the width, float32, as
    GPT-2 has them. In ``parts`` > 1 each layer's heads and inner units are shared out; each part's results cross to the others,
    and every part adds up all of them, in an order of its own."""

    def __init__(
        self, parts: int = 1, layers: int = 12, width: int = 768, heads: int = 12, past: int = 256, seed: int = 0
    ) -> None:
        self.parts, self.layers, self.width, self.heads, self.past = parts, layers, width, heads, past
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.place: list[str] = []

    def node(self, part: int, op: str, *inputs: str, **attributes: object) -> str:
        """A node on a part; its output."""
        name = f"p{part}_{op.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, **attributes))
        self.place.append(f"{name} {part}")
        return name

    def constant(self, name: str, values: np.ndarray) -> str:
        """By a name that several parts may use."""
        self.constants.setdefault(name, values)
        return name

    def normed(self, part: int, x: str, name: str) -> str:
        """A layer's normalisation, by every part."""
        scale = self.constant(f"{name}_scale", np.ones(self.width, np.float32))
        shift = self.constant(f"{name}_shift", np.zeros(self.width, np.float32))
        return self.node(part, "LayerNormalization", x, scale, shift, axis=-1)

    def product(self, part: int, x: str, name: str, matrix: np.ndarray) -> str:
        """Times this part's piece of a matrix."""
        return self.node(part, "MatMul", x, self.constant(f"{name}_{part}", np.ascontiguousarray(matrix)))

    def attended(self, part: int, x: str, layer: int, weights: list[np.ndarray]) -> str:
        """This part's heads, and what they add."""
        heads, width = self.heads // self.parts, self.width // self.heads
        mine = slice(part * heads * width, (part + 1) * heads * width)
        shape = self.constant(f"heads{heads}", np.array([1, heads, 1, width], np.int64))
        flat = self.constant(f"flat{heads}", np.array([1, 1, heads * width], np.int64))
        q, k, v = (
            self.node(part, "Reshape", self.product(part, x, f"l{layer}{n}", w[:, mine]), shape)
            for n, w in zip("qkv", weights[:3], strict=True)
        )
        known = []
        for kind, new in (("keys", k), ("values", v)):
            name = f"{kind}{layer}_{part}"
            self.inputs.append(helper.make_tensor_value_info(name, F32, [1, heads, self.past, width]))
            known.append(self.node(part, "Concat", name, new, axis=2))
        turned = self.node(part, "Transpose", known[0], perm=[0, 1, 3, 2])
        scale = self.constant("scale", np.array(1 / math.sqrt(width), np.float32))
        shares = self.node(part, "Softmax", self.node(part, "Mul", self.node(part, "MatMul", q, turned), scale), axis=-1)
        mixed = self.node(part, "Reshape", self.node(part, "MatMul", shares, known[1]), flat)
        return self.product(part, mixed, f"l{layer}o", weights[3][mine])

    def inner(self, part: int, x: str, layer: int, up: np.ndarray, down: np.ndarray) -> str:
        """This part's inner units, and what they add."""
        size = up.shape[1] // self.parts
        mine = slice(part * size, (part + 1) * size)
        return self.product(
            part, self.node(part, "Relu", self.product(part, x, f"l{layer}u", up[:, mine])), f"l{layer}d", down[mine]
        )

    def added(self, xs: list[str], more: list[str]) -> list[str]:
        """The sum of all parts' results, and what was there, on every part: its own result is there first."""
        result = []
        for part, x in enumerate(xs):
            total = self.node(part, "Add", x, more[part])
            for step in range(1, self.parts):
                total = self.node(part, "Add", total, more[(part + step) % self.parts])
            result.append(total)
        return result

    def model(self) -> onnx.ModelProto:
        """``x_0``, ``x_1`` (one value, for each part) and every part's keys and values of every layer in; the last state out."""
        w, wide = self.width, 4 * self.width
        shape = [1, 1, w]
        xs = [f"x_{p}" for p in range(self.parts)]
        for layer in range(self.layers):
            drawn = [self.rng.standard_normal((w, w), np.float32) / math.sqrt(w) for _ in range(4)]
            up, down = (self.rng.standard_normal(s, np.float32) / math.sqrt(s[0]) for s in ((w, wide), (wide, w)))
            parts = range(self.parts)
            attended = [self.attended(p, self.normed(p, xs[p], f"l{layer}a"), layer, drawn) for p in parts]
            xs = self.added(xs, attended)
            inner = [self.inner(p, self.normed(p, xs[p], f"l{layer}b"), layer, up, down) for p in parts]
            xs = self.added(xs if layer < self.layers - 1 else xs[:1], inner)
        self.nodes.append(helper.make_node("LayerNormalization", [xs[0], "l0a_scale", "l0a_shift"], ["y"], name="y", axis=-1))
        self.place.append("y 0")
        inputs = [*(helper.make_tensor_value_info(f"x_{p}", F32, shape) for p in range(self.parts)), *self.inputs]
        given = [numpy_helper.from_array(v, n) for n, v in self.constants.items()]
        graph = helper.make_graph(self.nodes, "split_decoder", inputs, [helper.make_tensor_value_info("y", F32, shape)], given)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

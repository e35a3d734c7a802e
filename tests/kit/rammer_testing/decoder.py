"""Seeded Llama-like decoders with block-quantised weights, in the form of ONNX Runtime's model builder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Decoder:
    """A decoder for ``tokens`` in one call after ``past`` earlier ones.

    It has ``layers`` of grouped-query attention with rotary positions and a gated layer of ``inner`` units. Weights have ``bits``
    bits in blocks of ``block``, with zero points if ``moved``. ``accuracy`` is the attribute of MatMulNBits: 4 permits rounding
    of the weights' operand to bytes.
    """

    tokens: int = 1
    past: int = 63
    layers: int = 2
    hidden: int = 512
    heads: int = 8
    shared: int = 2
    inner: int = 1024
    words: int = 1000
    bits: int = 4
    block: int = 32
    moved: bool = False
    accuracy: int = 0
    seed: int = 0

    @property
    def width(self) -> int:
        """The width of one head."""
        return self.hidden // self.heads

    def model(self) -> onnx.ModelProto:
        """Return a model from token ids (``ids``) and cached keys and values to ``logits`` and new keys and values."""
        return _Writer(self).model()

    def feeds(self, seed: int) -> dict[str, np.ndarray]:
        """Return random inputs of the model."""
        rng = np.random.default_rng(seed)
        given: dict[str, np.ndarray] = {"ids": rng.integers(0, self.words, (1, self.tokens))}
        if self.past:
            shape = (1, self.shared, self.past, self.width)
            names = [f"{kind}{i}" for i in range(self.layers) for kind in ("key", "value")]
            given |= {name: rng.standard_normal(shape, np.float32) for name in names}
        return given


@dataclass
class _Writer:
    d: Decoder
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.d.seed)

    def node(self, op: str, *inputs: str, outputs: tuple[str, ...] = (), domain: str = "", **attributes: Any) -> str:
        """Append a node and return its first output."""
        names = list(outputs) or [f"v{len(self.nodes)}"]
        self.nodes.append(helper.make_node(op, list(inputs), names, domain=domain, **attributes))
        return names[0]

    def constant(self, value: np.ndarray) -> str:
        self.constants.append(numpy_helper.from_array(value, f"c{len(self.constants)}"))
        return str(self.constants[-1].name)

    def product(self, x: str, depth: int, columns: int) -> str:
        """Append MatMulNBits with random weights whose results have about the magnitude of ``x``."""
        d, blocks = self.d, -(-depth // self.d.block)
        spread = 1.7 / (np.sqrt(depth) * 2 ** (d.bits - 1))
        given = [self.rng.integers(0, 256, (columns, blocks, d.block * d.bits // 8)).astype(np.uint8)]
        given.append(self.rng.uniform(0.5 * spread, 1.5 * spread, (columns, blocks)).astype(np.float32))
        if d.moved:
            middle = np.uint8(sum(1 << p for p in range(d.bits - 1, 8, d.bits)))
            near = self.rng.integers(0, 2, (columns, -(-blocks * d.bits // 8))).astype(np.uint8)
            given.append(middle ^ near)
        names = [self.constant(v) for v in given]
        sizes: dict[str, Any] = {"K": depth, "N": columns, "bits": d.bits, "block_size": d.block, "accuracy_level": d.accuracy}
        return self.node("MatMulNBits", x, *names, domain=MICROSOFT, **sizes)

    def norm(self, x: str) -> str:
        scale = self.constant(self.rng.uniform(0.8, 1.2, self.d.hidden).astype(np.float32))
        return self.node("SimplifiedLayerNormalization", x, scale, axis=-1, epsilon=1e-5, stash_type=1)

    def attention(self, x: str, layer: int) -> str:
        d = self.d
        q, k, v = (self.product(x, d.hidden, n * d.width) for n in (d.heads, d.shared, d.shared))
        before = [f"key{layer}", f"value{layer}"] if d.past else ["", ""]
        names = (f"mixed{layer}", f"key{layer}_new", f"value{layer}_new")
        sizes: dict[str, Any] = {"num_heads": d.heads, "kv_num_heads": d.shared, "do_rotary": 1}
        mixed = self.node("GroupQueryAttention", q, k, v, *before, *self.shapes, outputs=names, domain=MICROSOFT, **sizes)
        return self.product(mixed, d.heads * d.width, d.hidden)

    def gated(self, x: str) -> str:
        gate, up = (self.product(x, self.d.hidden, self.d.inner) for _ in range(2))
        active = self.node("Mul", gate, self.node("Sigmoid", gate))
        return self.product(self.node("Mul", active, up), self.d.inner, self.d.hidden)

    def model(self) -> onnx.ModelProto:
        d = self.d
        total = d.past + d.tokens
        angles = np.arange(total)[:, None] * 10000.0 ** (-np.arange(0, d.width, 2) / d.width)
        places = [np.array([total - 1], np.int32), np.array(total, np.int32)]
        self.shapes = [self.constant(v) for v in (*places, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))]
        x = self.node("Gather", self.constant(self.rng.standard_normal((d.words, d.hidden)).astype(np.float32)), "ids", axis=0)
        for layer in range(d.layers):
            x = self.node("Add", x, self.attention(self.norm(x), layer))
            x = self.node("Add", x, self.gated(self.norm(x)))
        logits = self.product(self.norm(x), d.hidden, d.words)
        self.node("Identity", logits, outputs=("logits",))
        cached = [(kind, i) for i in range(d.layers) for kind in ("key", "value")]
        inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, d.tokens])]
        results = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, d.tokens, d.words])]
        for kind, i in cached:
            shape = [1, d.shared, d.past, d.width]
            inputs += [helper.make_tensor_value_info(f"{kind}{i}", TensorProto.FLOAT, shape)] if d.past else []
            results.append(helper.make_tensor_value_info(f"{kind}{i}_new", TensorProto.FLOAT, [1, d.shared, total, d.width]))
        graph = helper.make_graph(self.nodes, "decoder", inputs, results, self.constants)
        imports = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)

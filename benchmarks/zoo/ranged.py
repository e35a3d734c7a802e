"""Models of the zoo with one open dimension: BERT by length, GPT-2 by its past, ResNet-50 by batch, recurrent layers by steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from rammer.errors import BadInput
from zoo.cnn import resnet50
from zoo.entry import SEED
from zoo.net import Array, Net
from zoo.sequence import bert_base
from zoo.tokens import heads_of, layer_norm, linear, scaled

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


@dataclass(frozen=True)
class Open:
    """A model and the range of its open dimension. ``below`` bounds integers of inputs; ``caches`` are outputs that are inputs of
    the next run. ``small`` are the builder's arguments for the small form, with its greatest length as ``most``."""

    key: str
    builder: Callable[..., onnx.ModelProto] = field(repr=False)
    symbol: str
    span: tuple[int, int]
    below: Mapping[str, int] = field(default_factory=lambda: _NONE)
    small: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    arguments: Mapping[str, Any] = field(default_factory=lambda: _NONE)

    def build(self, seed: int = SEED) -> onnx.ModelProto:
        """Return the model with weights drawn from ``seed``."""
        return self.builder(seed, **self.arguments)

    def sized(self, most: int, **arguments: Any) -> Open:
        """Return the model in another size, for lengths up to ``most``."""
        few = min([*self.below.values(), arguments.get("vocabulary", 2**31)])
        below = {n: b if b <= 2 else few for n, b in self.below.items()}
        return replace(self, span=(self.span[0], most), arguments=arguments, below=below)

    def until(self, most: int) -> Open:
        """Return the model, or its small form, for lengths up to ``most``. Raises BadInput if ``most`` is outside the model's
        range."""
        low, high = RANGED[self.key.removesuffix(":small")].span
        if not low < most <= high:
            raise BadInput(f"{most} is no greatest length of {self.key}", hint=f"from {low + 1} to {high}")
        return replace(self, span=(self.span[0], most))

    def narrow(self) -> Open:
        """Return the small form of the model."""
        found = self.sized(**self.small)
        return replace(found, key=f"{self.key}:small")

    def inputs_at(self, proto: onnx.ModelProto, length: int, rng: np.random.Generator) -> dict[str, Array]:
        """Return random inputs of ``proto`` with this length."""
        made: dict[str, Array] = {}
        for value in proto.graph.input:
            shape = [length if d.dim_param else d.dim_value for d in value.type.tensor_type.shape.dim]
            if value.name in self.below:
                made[value.name] = rng.integers(0, self.below[value.name], shape)
            else:
                made[value.name] = rng.standard_normal(shape, np.float32)
        return made

    def caches(self, proto: onnx.ModelProto) -> dict[str, str]:
        """Return a map from outputs to the inputs of the next run that they become."""
        inputs = {i.name for i in proto.graph.input}
        return {o.name: f"past_{o.name}" for o in proto.graph.output if f"past_{o.name}" in inputs}


def bert(seed: int, **arguments: Any) -> onnx.ModelProto:
    """Return BERT-base for any number of tokens up to 512; the open dimension is ``seq``."""
    proto = bert_base(seed, tokens=_NOMINAL, **arguments)
    graph = proto.graph
    places = next(t for t in graph.initializer if t.name.startswith("places"))
    graph.initializer.remove(places)
    graph.initializer.extend(numpy_helper.from_array(np.array(n, np.int64), name) for n, name in ((0, "none"), (1, "one")))
    made = [
        helper.make_node("Shape", ["input_ids"], ["sizes"], start=1, end=2),
        helper.make_node("Squeeze", ["sizes"], ["count"]),
        helper.make_node("Range", ["none", "count", "one"], [places.name]),
    ]
    nodes = list(graph.node)
    del graph.node[:]
    graph.node.extend([*made, *nodes])
    return _opened(proto, "seq")


def gpt2(
    seed: int, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50257, positions: int = 1024
) -> onnx.ModelProto:
    """Return a step of GPT-2 in the form of exporters: one token, with keys and values of the ``past``. Radford et al., 2019."""
    net = Net("gpt2", seed)
    depth, past = width // heads, _NOMINAL
    ids = net.input("ids", (1, 1), onnx.TensorProto.INT64)
    old = [[net.input(f"past_{n}{i}", (1, heads, past, depth)) for n in "kv"] for i in range(layers)]
    words = net.normal((vocabulary, width), 0.2, "words")
    place = net.node("Shape", [old[0][0]], (1,), start=2, end=3)
    x = net.map("Add", net.node("Gather", [words, ids], (1, 1, width)), _placed(net, place, positions, width))
    new = list[str]()
    for caches in old:
        x = net.map("Add", x, _cached(net, layer_norm(net, x, 1e-5), heads, caches, new))
        inner = net.map("Gelu", linear(net, layer_norm(net, x, 1e-5), 4 * width, 2.0), approximate="tanh")
        x = net.map("Add", x, linear(net, inner, width))
    head = net.node("MatMul", [layer_norm(net, x, 1e-5), net.transpose(words, (1, 0))], (1, 1, vocabulary))
    proto = net.finish(head, *new, fit=False)
    names = {head: "logits", **{name: f"{'kv'[i % 2]}{i // 2}" for i, name in enumerate(new)}}
    for node in proto.graph.node:
        node.output[:] = [names.get(o, o) for o in node.output]
        node.input[:] = [names.get(i, i) for i in node.input]
    for value in proto.graph.output:
        value.name = names[value.name]
    return _opened(proto, "past")


def resnet(seed: int, **arguments: Any) -> onnx.ModelProto:
    """Return ResNet-50 for any ``batch``."""
    return _opened(resnet50(seed, **arguments), "batch", 0)


def recurrent(seed: int, kind: str = "LSTM", units: int = 64, ways: int = 1) -> onnx.ModelProto:
    """Return a recurrent layer for any number of steps, ``seq``, in one or both directions; inputs are ``units`` wide."""
    draw, gates = np.random.default_rng(seed), {"LSTM": 4, "GRU": 3}[kind]
    shapes = {"w": (ways, gates * units, units), "r": (ways, gates * units, units), "b": (ways, 2 * gates * units)}
    known = [numpy_helper.from_array((draw.standard_normal(s) / units**0.5).astype(np.float32), n) for n, s in shapes.items()]
    float32 = onnx.TensorProto.FLOAT
    ports = [helper.make_tensor_value_info("x", float32, ["seq", 1, units])]
    ends = [helper.make_tensor_value_info("y", float32, ["seq", ways, 1, units])]
    ends.append(helper.make_tensor_value_info("last", float32, [ways, 1, units]))
    direction = {1: "forward", 2: "bidirectional"}[ways]
    node = helper.make_node(kind, ["x", *shapes], ["y", "last"], hidden_size=units, direction=direction)
    graph = helper.make_graph([node], f"{kind.lower()}_{units}", ports, ends, known)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


#: Placeholder for the open dimension during construction: no other extent equals it.
_NOMINAL: Final = 509


def _placed(net: Net, place: str, positions: int, width: int) -> str:
    return net.node("Gather", [net.normal((positions, width), 0.1, "positions"), place], (1, width))


def _cached(net: Net, x: str, heads: int, caches: list[str], new: list[str]) -> str:
    """Emit attention of one token to all before it; the extended caches are added to ``new``."""
    width, (_, _, past, depth) = net.shape(x)[-1], net.shape(caches[0])
    joint = linear(net, x, 3 * width)
    q, k, v = net.node_of("Split", [joint], [(1, 1, width)] * 3, axis=-1, num_outputs=3)
    q, k, v = (heads_of(net, y, heads, (0, 2, 1, 3)) for y in (q, k, v))
    keys, values = (net.concat([old, y], 2) for old, y in zip(caches, (k, v), strict=True))
    new += [keys, values]
    product = net.node("MatMul", [q, net.transpose(keys, (0, 1, 3, 2))], (1, heads, 1, past + 1))
    shares = net.map("Softmax", scaled(net, product, depth), axis=-1)
    context = net.node("MatMul", [shares, values], (1, heads, 1, depth))
    return linear(net, net.reshape(net.transpose(context, (0, 2, 1, 3)), (1, 1, width)), width)


def _opened(proto: onnx.ModelProto, symbol: str, axis: int | None = None) -> onnx.ModelProto:
    """Return ``proto`` with ``symbol`` where ports have the nominal extent, or along ``axis``. Targets of Reshape keep that
    extent."""
    for value in (*proto.graph.input, *proto.graph.output):
        for i, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_value == _NOMINAL or i == axis:
                dim.dim_param = symbol
            elif dim.dim_value == _NOMINAL + 1:
                dim.dim_param = f"{symbol}_next"
    targets = {n.input[1] for n in proto.graph.node if n.op_type == "Reshape"}
    for tensor in proto.graph.initializer:
        if tensor.name in targets:
            shape = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(np.where(shape == _NOMINAL, 0, shape), tensor.name))
    return proto


#: The open models by key; GPT-2's past ends at 64 tokens in total.
RANGED: Final[Mapping[str, Open]] = MappingProxyType(
    {
        o.key: o
        for o in (
            Open(
                "bert_base",
                bert,
                "seq",
                (1, 512),
                {"input_ids": 30522, "token_type_ids": 2},
                {"most": 64, "layers": 1, "width": 48, "heads": 3, "vocabulary": 50},
            ),
            Open(
                "gpt2",
                gpt2,
                "past",
                (0, 63),
                {"ids": 50257},
                {"most": 15, "layers": 1, "width": 48, "heads": 3, "vocabulary": 50, "positions": 64},
            ),
            Open("resnet50", resnet, "batch", (1, 32), small={"most": 8, "size": 32, "width": 4}),
            Open("lstm_64", recurrent, "seq", (1, 512), small={"most": 64, "units": 8}),
            Open("lstm_256", recurrent, "seq", (1, 512), small={"most": 64, "units": 16}, arguments={"units": 256}),
            Open(
                "gru_64_both",
                recurrent,
                "seq",
                (1, 512),
                small={"most": 64, "kind": "GRU", "units": 8, "ways": 2},
                arguments={"kind": "GRU", "ways": 2},
            ),
        )
    }
)


def find_ranged(key: str) -> Open:
    """Return an open model by key, or its small form. Raises BadInput for other keys."""
    name = key.removesuffix(":small")
    if name not in RANGED:
        raise BadInput(f"unknown model {key!r} with an open dimension", hint=f"one of: {', '.join(RANGED)}")
    return RANGED[name].narrow() if name != key else RANGED[name]

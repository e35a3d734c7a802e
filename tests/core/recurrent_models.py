"""Random stacks of recurrent layers as exporters write them, for tests of long sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclass(frozen=True)
class Net:
    """A stack of ``layers`` of ``op`` over ``steps``; ``lens`` and ``states`` add optional inputs."""

    op: str
    steps: int
    direction: str = "forward"
    layers: int = 1
    batch: int = 2
    width: int = 3
    hidden: int = 4
    lens: bool = False
    states: bool = False
    layout: int = 0
    reset: int = 0

    @staticmethod
    def random(rng: np.random.Generator, steps: int) -> Net:
        """Draw a random stack of layers."""
        op = str(rng.choice([*GATES]))
        batch, width, hidden = (int(n) for n in rng.integers(1, 5, 3))
        lens, states, layout, reset = (int(n) for n in rng.integers(0, 2, 4))
        way = str(rng.choice(["forward", "reverse", "bidirectional"]))
        # ONNX Runtime lacks batch-first recurrences; ``plain`` uses transpositions around them instead.
        return Net(op, steps, way, int(rng.integers(1, 4)), batch, width, hidden, bool(lens), bool(states), layout, reset)

    @property
    def ways(self) -> int:
        """The number of directions."""
        return 2 if self.direction == "bidirectional" else 1

    def model(self, rng: np.random.Generator, plain: bool = False) -> onnx.ModelProto:
        """Draw weights and make the model; ``plain`` uses transpositions instead of ``layout``."""
        return _Building(self, rng, plain).model()

    def inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Draw inputs; every sequence has at least one step."""
        d, b, h = self.ways, self.batch, self.hidden
        shape = (b, self.steps, self.width) if self.layout else (self.steps, b, self.width)
        found = {"x": rng.standard_normal(shape).astype(np.float32)}
        if self.lens:
            found["lens"] = rng.integers(1, self.steps + 1, b).astype(np.int32)
        for layer in range(self.layers if self.states else 0):
            for name in self.state_names:
                found[f"{name}{layer}"] = rng.standard_normal((b, d, h) if self.layout else (d, b, h)).astype(np.float32)
        return found

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the initial states."""
        return ("h", "c") if self.op == "LSTM" else ("h",)


class _Building:
    def __init__(self, net: Net, rng: np.random.Generator, plain: bool) -> None:
        self.net, self.rng, self.plain = net, rng, plain
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def model(self) -> onnx.ModelProto:
        net, value, width, ends = self.net, "x", self.net.width, list[str]()
        for layer in range(net.layers):
            value, last = self.layer(layer, value, width)
            ends += last
            width = net.hidden * net.ways
        self.nodes.append(helper.make_node("Relu", [value], ["y"]))
        ports = [
            helper.make_tensor_value_info(n, TensorProto.INT32 if n == "lens" else TensorProto.FLOAT, a.shape)
            for n, a in net.inputs(np.random.default_rng(0)).items()
        ]
        outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("y", *ends)]
        graph = helper.make_graph(self.nodes, "net", ports, outputs, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    def weight(self, name: str, *shape: int) -> str:
        values = self.rng.standard_normal(shape) * 0.6 / np.sqrt(shape[-1])
        self.weights.append(numpy_helper.from_array(values.astype(np.float32), name))
        return name

    def layer(self, layer: int, x: str, width: int) -> tuple[str, list[str]]:
        """Add a layer; return its sequence in the next layer's layout, and its last states."""
        net, packed = self.net, GATES[self.net.op] * self.net.hidden
        d, h = net.ways, net.hidden
        first = [f"{n}{layer}" for n in net.state_names] if net.states else []
        turn = bool(net.layout) and self.plain
        given = [self.turned(n, (1, 0, 2)) if turn else n for n in (x, *first)]
        weights = (self.weight(f"w{layer}", d, packed, width), self.weight(f"r{layer}", d, packed, h))
        operands = [given[0], *weights, self.weight(f"b{layer}", d, 2 * packed), "lens" if net.lens else "", *given[1:]]
        made = [f"{n}{layer}" for n in ("seq", *(f"end_{s}" for s in net.state_names))]
        named = [f"{n}_raw" for n in made] if turn else made
        more: dict[str, Any] = {"layout": 1} if net.layout and not self.plain else {}
        more |= {"linear_before_reset": net.reset} if net.op == "GRU" else {}
        made_node = helper.make_node(net.op, operands, named, hidden_size=h, direction=net.direction, **more)
        self.nodes.append(made_node)
        for raw, name in zip(named, made, strict=True) if turn else ():
            order = (2, 0, 1, 3) if name == made[0] else (1, 0, 2)
            self.nodes.append(helper.make_node("Transpose", [raw], [name], perm=order))
        return self.flat(made[0], layer), made[1:]

    def turned(self, name: str, order: tuple[int, ...]) -> str:
        result = f"{name}_{len(self.nodes)}"
        self.nodes.append(helper.make_node("Transpose", [name], [result], perm=order))
        return result

    def flat(self, sequence: str, layer: int) -> str:
        """Concatenate the directions, by Squeeze if only one exists."""
        net, result = self.net, f"flat{layer}"
        if net.ways == 1:
            axis = numpy_helper.from_array(np.array([2 if net.layout else 1]), f"axis{layer}")
            self.nodes.append(helper.make_node("Squeeze", [sequence, axis.name], [result]))
            self.weights.append(axis)
            return result
        moved = sequence if net.layout else self.turned(sequence, (0, 2, 1, 3))
        shape = numpy_helper.from_array(np.array([0, 0, -1]), f"shape{layer}")
        self.weights.append(shape)
        self.nodes.append(helper.make_node("Reshape", [moved, shape.name], [result]))
        return result

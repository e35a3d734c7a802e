"""Recurrent cells as exporters write them with products: per gate, all gates at once, of the concatenated input and state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import NodeProto, helper
from onnx_models import model, tensor

#: How a step's products are written: one for each gate; one for all gates, of the input and of the state; one of both.
WRITTEN = ("gates", "whole", "joint")


@dataclass(frozen=True)
class CellForm:
    """One LSTM layer of ``steps`` steps: ``order`` is how gates lie in its weights, ``bias`` where it is added (``""``: nowhere,
    ``first``: to the input's product, ``last``: to the sum), ``turned`` whether products are Gemms with weights of [columns,
    depth]."""

    written: str = "gates"
    steps: int = 3
    width: int = 16
    depth: int = 16
    order: str = "ifoc"
    bias: str = "last"
    turned: bool = False


def cell_form(rng: np.random.Generator, form: CellForm) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """The layer as ``form`` says, and the same layer by ONNX's LSTM."""
    width, depth = form.width, form.depth
    w = {g: _weights(rng, depth, width) for g in "iofc"}
    u = {g: _weights(rng, width, width) for g in "iofc"}
    b = {g: (rng.standard_normal(width) / 4).astype(np.float32) for g in "iofc"}
    writer = Writer(form, {}, [])
    writer.layer(w, u, b)
    states = [tensor(n, (1, width)) for n in ("h", "c")]
    x = tensor("x", (form.steps, 1, depth))
    made = model(writer.nodes, [x, *states], [f"h{form.steps - 1}"], constants=writer.constants)
    given = {"w": np.stack([np.concatenate([w[g].T for g in "iofc"])]), "r": np.stack([np.concatenate([u[g].T for g in "iofc"])])}
    bias = [np.concatenate([b[g] for g in "iofc"])] if form.bias else []
    given |= {"b": np.stack([np.concatenate([*bias, np.zeros(4 * width, np.float32)])])} if bias else {}
    given |= {"one": np.array([0])}
    nodes = [helper.make_node("Unsqueeze", [n, "one"], [f"{n}s"]) for n in ("h", "c")]
    nodes += [
        helper.make_node("LSTM", ["x", "w", "r", "b" if bias else "", "", "hs", "cs"], ["", "ys"], hidden_size=width),
        helper.make_node("Squeeze", ["ys", "one"], ["y"]),
    ]
    return made, model(nodes, [x, *states], ["y"], constants=given)


def _weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


@dataclass
class Writer:
    """Writes a layer."""

    form: CellForm
    constants: dict[str, np.ndarray]
    nodes: list[NodeProto]

    def op(self, kind: str, inputs: Sequence[str], into: str, **more: object) -> str:
        self.nodes.append(helper.make_node(kind, [*inputs], [into], **more))
        return into

    def product(self, x: str, name: str, weights: np.ndarray, into: str) -> str:
        self.constants[name] = weights.T.copy() if self.form.turned else weights
        return self.op("Gemm", [x, name], into, transB=1) if self.form.turned else self.op("MatMul", [x, name], into)

    def layer(self, w: dict[str, np.ndarray], u: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
        form = self.form
        self.constants["first"] = np.array([0])
        self.nodes.append(helper.make_node("Split", ["x"], [f"x{t}" for t in range(form.steps)], axis=0, num_outputs=form.steps))
        h, c = "h", "c"
        for t in range(form.steps):
            x = self.op("Squeeze", [f"x{t}", "first"], f"in{t}")
            if form.written == "gates":
                sums = {g: self.sums(x, h, f"{g}{t}", (g, w[g], u[g], b[g])) for g in form.order}
            else:
                at = [np.concatenate([a[g] for g in form.order], -1) for a in (w, u, b)]
                whole = self.sums(x, h, f"all{t}", ("all", *at))
                self.nodes.append(helper.make_node("Split", [whole], [f"s{g}{t}" for g in form.order], axis=1, num_outputs=4))
                sums = {g: f"s{g}{t}" for g in form.order}
            gate = {g: self.op("Tanh" if g == "c" else "Sigmoid", [sums[g]], f"g{g}{t}") for g in form.order}
            kept = self.op("Mul", [gate["f"], c], f"k{t}")
            new = self.op("Mul", [gate["i"], gate["c"]], f"n{t}")
            c = self.op("Add", [kept, new], f"c{t}")
            h = self.op("Mul", [gate["o"], self.op("Tanh", [c], f"t{t}")], f"h{t}")

    def sums(self, x: str, h: str, at: str, known: tuple[str, np.ndarray, np.ndarray, np.ndarray]) -> str:
        """What goes into the gates ``at`` of a step, whose weights and bias are ``known`` by a name."""
        name, w, u, b = known
        self.constants |= {f"b{name}": b} if self.form.bias else {}
        if self.form.written == "joint":
            both = self.op("Concat", [x, h], f"xh{at}", axis=1)
            made = self.product(both, f"w{name}", np.concatenate([w, u]), f"p{at}")
        else:
            p, q = self.product(x, f"w{name}", w, f"p{at}"), self.product(h, f"u{name}", u, f"q{at}")
            p = self.op("Add", [p, f"b{name}"], f"pb{at}") if self.form.bias == "first" else p
            made = self.op("Add", [p, q], f"a{at}")
        late = self.form.bias == "last" or (self.form.bias and self.form.written == "joint")
        return self.op("Add", [made, f"b{name}"], f"ab{at}") if late else made

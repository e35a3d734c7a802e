"""Recurrent cells as exporters write them with products: per gate, for all gates, or of the joined input and state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import NodeProto, helper
from onnx_models import model, tensor

#: Forms of a step's products: one per gate; one of the input and one of the state for all gates, added before or after the split;
#: the input's product hoisted over all steps; or one product of the concatenated input and state.
WRITTEN = ("gates", "whole", "apart", "hoisted", "joint")
#: Order of the gates in ONNX.
GATES = {"LSTM": "iofc", "GRU": "zrn"}


@dataclass(frozen=True)
class CellForm:
    """A recurrent layer of ``steps`` steps.

    ``order`` is the order of gates in the weights. ``bias`` is the operand that the bias is added to: ``""`` (none), ``first``
    (the input's product), ``last`` (the sum) or ``both`` (one per product). ``turned``: products are Gemms with weights of
    [columns, depth]. ``together``: one sigmoid serves several gates. ``peepholes`` are for LSTM; ``linear`` resets after the
    product are for GRU."""

    written: str = "gates"
    steps: int = 3
    width: int = 16
    depth: int = 16
    batch: int = 1
    order: str = "ifoc"
    bias: str = "last"
    turned: bool = False
    together: bool = False
    peepholes: bool = False
    linear: bool = False
    kind: str = "LSTM"


def cell_form(rng: np.random.Generator, form: CellForm) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return the layer in the form of ``form``, and the same layer as ONNX's LSTM or GRU."""
    width, depth, gates = form.width, form.depth, GATES[form.kind]
    given = Weights(
        {g: _weights(rng, depth, width) for g in gates},
        {g: _weights(rng, width, width) for g in gates},
        {g: _weights(rng, width) for g in gates},
        {g: _weights(rng, width) if form.bias == "both" else np.zeros(width, np.float32) for g in gates},
        {g: _weights(rng, width) for g in "iof"},
    )
    writer = (LstmWriter if form.kind == "LSTM" else GruWriter)(form, given)
    last = writer.layer()
    states = [tensor(n, (form.batch, width)) for n in ("hc" if form.kind == "LSTM" else "h")]
    x = tensor("x", (form.steps, form.batch, depth))
    return model(writer.nodes, [x, *states], [last], constants=writer.constants), _onnx(form, given, [x, *states])


def _weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


@dataclass(frozen=True)
class Weights:
    """Weights of the input and of the state, both biases, and peepholes, by gate."""

    w: Mapping[str, np.ndarray]
    u: Mapping[str, np.ndarray]
    b: Mapping[str, np.ndarray]
    c: Mapping[str, np.ndarray]
    p: Mapping[str, np.ndarray]


def _onnx(form: CellForm, given: Weights, inputs: list[onnx.ValueInfoProto]) -> onnx.ModelProto:
    gates = GATES[form.kind]
    constants = {n: np.stack([np.concatenate([a[g].T for g in gates])]) for n, a in (("w", given.w), ("r", given.u))}
    constants["one"] = np.array([0])
    if form.bias:
        constants["b"] = np.stack([np.concatenate([a[g] for a in (given.b, given.c) for g in gates])])
    nodes = [helper.make_node("Unsqueeze", [i.name, "one"], [f"{i.name}s"]) for i in inputs[1:]]
    read = ["x", "w", "r", "b" if form.bias else "", "", *(f"{i.name}s" for i in inputs[1:])]
    if form.peepholes:
        constants["p"] = np.stack([np.concatenate([given.p[g] for g in "iof"])])
        read.append("p")
    more = {"linear_before_reset": int(form.linear)} if form.kind == "GRU" else {}
    nodes += [
        helper.make_node(form.kind, read, ["", "ys"], hidden_size=form.width, **more),
        helper.make_node("Squeeze", ["ys", "one"], ["y"]),
    ]
    return model(nodes, inputs, ["y"], constants=constants)


@dataclass
class Writer(ABC):
    """Base class of writers of a layer."""

    form: CellForm
    given: Weights
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    nodes: list[NodeProto] = field(default_factory=list)

    def op(self, kind: str, inputs: Sequence[str], into: str, **more: object) -> str:
        self.nodes.append(helper.make_node(kind, [*inputs], [into], **more))
        return into

    def sigmoid(self, of: str, into: str) -> str:
        return self.op("Sigmoid", [of], into)

    def product(self, x: str, name: str, weights: np.ndarray, into: str) -> str:
        turned = self.form.turned and x != "x"  # a Gemm has two axes
        self.constants[name] = weights.T.copy() if turned else weights
        return self.op("Gemm", [x, name], into, transB=1) if turned else self.op("MatMul", [x, name], into)

    def split(self, of: str, into: Sequence[str], axis: int) -> None:
        self.nodes.append(helper.make_node("Split", [of], [*into], axis=axis, num_outputs=len(into)))

    def layer(self) -> str:
        """Write all steps and return the name of the last state."""
        form, every = self.form, GATES[self.form.kind]
        self.constants["first"] = np.array([0])
        state, source = self.first(), "x"
        if form.written == "hoisted":
            gates = self.order(every)
            source = self.product("x", "wall", self.side_by_side(self.given.w, gates), "all")
            source = self.biased(source, self.given.b, gates, "ball", "ballall") if form.bias in ("first", "both") else source
        self.split(source, [f"s{t}" for t in range(form.steps)], 0)
        for t in range(form.steps):
            x = self.op("Squeeze", [f"s{t}", "first"], f"in{t}")
            state = self.step(x, state, t)
        return state[0]

    @abstractmethod
    def first(self) -> tuple[str, ...]:
        """Return the names of the initial state."""

    @abstractmethod
    def step(self, x: str, state: tuple[str, ...], t: int) -> tuple[str, ...]:
        """Write one step; return its state's names."""

    def order(self, gates: str) -> str:
        """Return ``gates`` in the order of this layer's weights."""
        return "".join(sorted(gates, key=self.form.order.find))

    def side_by_side(self, of: Mapping[str, np.ndarray], gates: str) -> np.ndarray:
        return np.concatenate([of[g] for g in gates], -1)

    def biased(self, of: str, biases: Mapping[str, np.ndarray], gates: str, name: str, into: str) -> str:
        self.constants[name] = self.side_by_side(biases, gates)
        return self.op("Add", [of, name], into)

    def sums(self, x: str, h: str, gates: str, t: int) -> dict[str, str]:
        """Return the pre-activation of each of the ``gates`` of a step; ``h`` may be the state after a reset."""
        written, ordered = self.form.written, self.order(gates)
        if written == "gates" or len(gates) == 1:
            return {g: self._sum(x, h, g, f"{g}{t}") for g in ordered}
        if written == "apart":
            parts = self._products(x, h, ordered, f"{ordered}{t}")
            for n, part in enumerate(parts):
                self.split(part, [f"{n}{g}{t}" for g in ordered], 1)
            sums = {g: self.op("Add", [f"0{g}{t}", f"1{g}{t}"], f"a{g}{t}") for g in ordered}
            late = self.form.bias == "last"
            return {g: self.biased(a, self.given.b, g, f"b{g}", f"s{g}{t}") if late else a for g, a in sums.items()}
        self.split(self._sum(x, h, ordered, f"{ordered}{t}"), [f"s{g}{t}" for g in ordered], 1)
        return {g: f"s{g}{t}" for g in ordered}

    def input_part(self, x: str, gates: str, at: str) -> str:
        """Return the input's product of this step, unless it is hoisted over all steps."""
        if self.form.written != "hoisted":
            return self.product(x, f"w{gates}", self.side_by_side(self.given.w, gates), f"p{at}")
        every, width = self.order(GATES[self.form.kind]), self.form.width
        if gates == every:
            return x
        begin = every.find(gates) * width
        self.constants |= {f"from{gates}": np.array([begin]), f"to{gates}": np.array([begin + len(gates) * width])}
        self.constants["columns"] = np.array([1])
        return self.op("Slice", [x, f"from{gates}", f"to{gates}", "columns"], f"p{at}")

    def _products(self, x: str, h: str, gates: str, at: str) -> tuple[str, str]:
        """Return the two products of a step, with their biases."""
        bias = self.form.bias
        early = bias in ("first", "both") and self.form.written != "hoisted"  # a hoisted product adds the bias for all steps
        p, q = self.input_part(x, gates, at), self.product(h, f"u{gates}", self.side_by_side(self.given.u, gates), f"q{at}")
        p = self.biased(p, self.given.b, gates, f"b{gates}", f"pb{at}") if early else p
        return p, self.biased(q, self.given.c, gates, f"c{gates}", f"qb{at}") if bias == "both" else q

    def _sum(self, x: str, h: str, gates: str, at: str) -> str:
        bias, given = self.form.bias, self.given
        if self.form.written != "joint":
            p, q = self._products(x, h, gates, at)
            made = self.op("Add", [p, q], f"a{at}")
            return self.biased(made, given.b, gates, f"b{gates}", f"ab{at}") if bias == "last" else made
        both = self.op("Concat", [x, h], f"xh{at}", axis=1)
        weights = np.concatenate([self.side_by_side(a, gates) for a in (given.w, given.u)])
        made = self.product(both, f"w{gates}", weights, f"p{at}")
        whole = {g: given.b[g] + given.c[g] for g in gates}
        return self.biased(made, whole, gates, f"b{gates}", f"ab{at}") if bias else made


class LstmWriter(Writer):
    """The writer of an LSTM layer."""

    def first(self) -> tuple[str, ...]:
        return "h", "c"

    def step(self, x: str, state: tuple[str, ...], t: int) -> tuple[str, ...]:
        h, c = state
        sums = self.sums(x, h, "iofc", t)
        if self.form.peepholes:
            sums |= {g: self.peephole(sums[g], c, g, t) for g in "if"}
        gate = {g: self.sigmoid(sums[g], f"g{g}{t}") for g in "if"} | {"c": self.op("Tanh", [sums["c"]], f"gc{t}")}
        kept = self.op("Mul", [gate["f"], c], f"k{t}")
        new = self.op("Mul", [gate["i"], gate["c"]], f"n{t}")
        c = self.op("Add", [kept, new], f"c{t}")
        out = self.peephole(sums["o"], c, "o", t) if self.form.peepholes else sums["o"]
        return self.op("Mul", [self.sigmoid(out, f"go{t}"), self.op("Tanh", [c], f"t{t}")], f"h{t}"), c

    def peephole(self, of: str, c: str, gate: str, t: int) -> str:
        self.constants[f"peep{gate}"] = self.given.p[gate]
        return self.op("Add", [of, self.op("Mul", [c, f"peep{gate}"], f"v{gate}{t}")], f"w{gate}{t}")

    def sums(self, x: str, h: str, gates: str, t: int) -> dict[str, str]:
        if not self.form.together:
            return super().sums(x, h, gates, t)
        # One sigmoid for three adjacent gates.
        ordered = self.order("iof") + "c"
        whole = self._sum(x, h, ordered, f"{ordered}{t}")
        self.constants["widths"] = np.array([3 * self.form.width, self.form.width])
        self.nodes.append(helper.make_node("Split", [whole, "widths"], [f"iof{t}", f"sc{t}"], axis=1))
        self.split(self.op("Sigmoid", [f"iof{t}"], f"giof{t}"), [f"done{g}{t}" for g in ordered[:3]], 1)
        return {g: f"done{g}{t}" for g in ordered[:3]} | {"c": f"sc{t}"}

    def sigmoid(self, of: str, into: str) -> str:
        return of if self.form.together else super().sigmoid(of, into)


class GruWriter(Writer):
    """The writer of a GRU layer."""

    def first(self) -> tuple[str, ...]:
        return ("h",)

    def step(self, x: str, state: tuple[str, ...], t: int) -> tuple[str, ...]:
        (h,) = state
        candidate = self.linear if self.form.linear else self.plain
        z, n = candidate(x, h, t)
        rest = self.op("Sub", [self.one(), z], f"l{t}")
        return (self.op("Add", [self.op("Mul", [rest, n], f"m{t}"), self.op("Mul", [z, h], f"k{t}")], f"h{t}"),)

    def one(self) -> str:
        self.constants["single"] = np.ones((), np.float32)
        return "single"

    def plain(self, x: str, h: str, t: int) -> tuple[str, str]:
        """Return the update gate and the candidate, which reads the state after the reset."""
        sums = self.sums(x, h, "zr", t)
        z, r = (self.sigmoid(sums[g], f"g{g}{t}") for g in "zr")
        left = self.op("Mul", [r, h], f"rh{t}")
        return z, self.op("Tanh", [self.sums(x, left, "n", t)["n"]], f"gn{t}")

    def linear(self, x: str, h: str, t: int) -> tuple[str, str]:
        """Return the update gate and the candidate, with the reset after the product."""
        every = self.order("zrn") if self.form.written != "gates" else ""
        p, q = dict[str, str](), dict[str, str]()
        for gates in [every] if every else "zrn":
            for part, into, n in zip(self._products(x, h, gates, f"{gates}{t}"), (p, q), "pq", strict=True):
                names = {g: f"{n}{g}{t}s" for g in gates}
                if every:
                    self.split(part, [*names.values()], 1)
                into |= names if every else {gates: part}
        z, r = (self.sigmoid(self.op("Add", [p[g], q[g]], f"s{g}{t}"), f"g{g}{t}") for g in "zr")
        left = self.op("Mul", [r, q["n"]], f"rq{t}")
        return z, self.op("Tanh", [self.op("Add", [p["n"], left], f"sn{t}")], f"gn{t}")

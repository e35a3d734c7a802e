"""Random Loops and Scans. They have states of several types and shapes, captured values, indices and gathered results. Conditions
are of every kind; branches and loops are nested."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper
from onnx_models import BOOL, FLOAT, INT64, model, tensor

Feeds = dict[str, np.ndarray]
#: Element type and shape of a value.
Kind = tuple[int, tuple[int, ...]]

SHAPES: Final = ((), (1,), (3,), (2, 3), (0,), (4,))
DTYPES: Final = {FLOAT: np.float32, INT64: np.int64, BOOL: np.bool_}
CONSTANTS: Final = {
    "five": np.array(5),
    "half": np.array(0.5, np.float32),
    "yes": np.array(True),
    "no": np.array(False),
    "table": np.linspace(-1, 1, 5, dtype=np.float32),
    "weights": np.linspace(-0.4, 0.4, 9, dtype=np.float32).reshape(3, 3),
}


@dataclass
class RandomBody:
    """A body under construction: its operators and the values that they may read."""

    rng: np.random.Generator
    prefix: str
    values: dict[str, Kind]
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def pick(self, dtype: int, shape: tuple[int, ...] | None = None) -> str | None:
        """Return a value of a type, more often a recent one."""
        found = [n for n, (d, s) in self.values.items() if d == dtype and shape in (None, s)]
        return found[-1 - min(int(self.rng.geometric(0.4)) - 1, len(found) - 1)] if found else None

    def add(self, op: str, operands: list[str], kind: Kind, **attributes: Any) -> str:
        """Add one operator and return its result."""
        name = f"{self.prefix}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, operands, [name], **attributes))
        self.values[name] = kind
        return name

    def step(self, depth: int) -> None:
        """Add a random operator on the available values."""
        x, i, b = self.pick(FLOAT), self.pick(INT64), self.pick(BOOL, ())
        made = [self._float, self._integer, self._compare, self._chosen, self._reduced, self._looked_up, self._product]
        made += [self._branch, self._inner] if depth else []
        made[self.rng.integers(len(made))](x or "half", i or "five", b or "yes")

    def _kind(self, name: str) -> Kind:
        return self.values[name]

    def _float(self, x: str, i: str, b: str) -> None:
        kind = self._kind(x)
        if self.rng.random() < 0.5:
            self.add(str(self.rng.choice(["Tanh", "Sin", "Abs", "Neg", "Sigmoid", "Identity"])), [x], kind)
            return
        other = self.pick(FLOAT, kind[1]) or self.pick(FLOAT, ()) or "half"
        self.add("Tanh", [self.add(str(self.rng.choice(["Add", "Sub", "Mul", "Max"])), [x, other], kind)], kind)

    def _integer(self, x: str, i: str, b: str) -> None:
        kind, other = self._kind(i), self.pick(INT64, ()) or "five"
        self.add("Mod", [self.add(str(self.rng.choice(["Add", "Sub", "Mul"])), [i, other], kind), "five"], kind)

    def _compare(self, x: str, i: str, b: str) -> None:
        one, bound = (x, "half") if self.rng.random() < 0.5 else (i, "five")
        found = self.add(str(self.rng.choice(["Less", "Greater"])), [one, bound], (BOOL, self._kind(one)[1]))
        self.add("Or" if self.rng.random() < 0.5 else "And", [found, b], (BOOL, self._kind(one)[1]))

    def _chosen(self, x: str, i: str, b: str) -> None:
        kind = self._kind(x)
        self.add("Where", [self.pick(BOOL, kind[1]) or b, x, self.pick(FLOAT, kind[1]) or x], kind)

    def _reduced(self, x: str, i: str, b: str) -> None:
        if 0 not in self._kind(x)[1]:
            self.add(str(self.rng.choice(["ReduceMean", "ReduceMax"])), [x], (FLOAT, ()), keepdims=0)

    def _looked_up(self, x: str, i: str, b: str) -> None:
        kind = self._kind(i)
        place = self.add("Mod", [self.add("Abs", [i], kind), "five"], kind)
        self.add("Gather", ["table", place], (FLOAT, kind[1]))

    def _product(self, x: str, i: str, b: str) -> None:
        found = self.pick(FLOAT, (2, 3)) or self.pick(FLOAT, (3,))
        if found:
            self.add("MatMul", [found, "weights"], self._kind(found))

    def _branch(self, x: str, i: str, b: str) -> None:
        kind, branches = self._kind(x), {}
        for which in ("then_branch", "else_branch"):
            inner = RandomBody(self.rng, f"{self.prefix}{len(self.nodes)}{which[0]}", dict(self.values))
            for _ in range(self.rng.integers(0, 3)):
                inner.step(0)
            result = inner.pick(FLOAT, kind[1]) or x
            if result not in {n.output[0] for n in inner.nodes}:  # ONNX Runtime refuses a branch that returns a captured value
                result = inner.add("Identity", [result], kind)
            branches[which] = helper.make_graph(inner.nodes, which, [], [tensor(result, kind[1], kind[0])])
        self.add("If", [b], kind, **branches)

    def _inner(self, x: str, i: str, b: str) -> None:
        kind, name = self._kind(x), f"{self.prefix}{len(self.nodes)}"
        inner = RandomBody(self.rng, f"{name}r", {**self.values, f"{name}k": (INT64, ()), f"{name}s": kind})
        for _ in range(self.rng.integers(1, 4)):
            inner.step(0)
        end = inner.add("Identity", [inner.pick(FLOAT, kind[1]) or f"{name}s"], kind)
        go = inner.add("Identity", [f"{name}c"], (BOOL, ()))
        ports = [tensor(f"{name}k", [], INT64), tensor(f"{name}c", [], BOOL), tensor(f"{name}s", kind[1], kind[0])]
        body = helper.make_graph(inner.nodes, "inner", ports, [tensor(go, [], BOOL), tensor(end, kind[1], kind[0])])
        count = self.pick(INT64, ())  # may be an index from hundreds of iterations of an outer loop, or its square
        count = self.add("Min", [count, "five"], (INT64, ())) if count else "five"
        self.add("Loop", [count, "", x], kind, body=body)

    def outputs(self, states: list[Kind], gathered: int) -> list[onnx.ValueInfoProto]:
        """Return the body's outputs: values of the states' kinds, possibly the states themselves, and some others."""
        own = [n.output[0] for n in self.nodes]
        names = [self.pick(*kind) or f"s{number}" for number, kind in enumerate(states)]
        names += [str(self.rng.choice(own or ["half"])) for _ in range(gathered)]
        ends = list[str]()
        for name in names:  # an output is declared once and computed within
            fits = name in own and name not in ends and self.rng.random() < 0.7
            ends.append(name if fits else self.add("Identity", [name], self.values[name]))
        return [tensor(n, *self.values[n][::-1]) for n in ends]


@dataclass
class RandomLoop:
    """A model and its inputs."""

    proto: onnx.ModelProto
    ports: dict[str, Kind]
    most: int

    def feeds(self, rng: np.random.Generator) -> Feeds:
        """Draw the inputs of one run."""
        made = {n: random_values(rng, kind) for n, kind in self.ports.items()}
        return made | ({"trips": np.array(int(rng.integers(0, self.most)))} if "trips" in made else {})


def drawn(rng: np.random.Generator, most: int = 14) -> RandomLoop:
    """Draw a model of one Loop or Scan of fewer than ``most`` iterations, and an operator after it."""
    kinds = [(int(rng.choice([FLOAT, FLOAT, INT64, BOOL])), SHAPES[rng.integers(len(SHAPES))]) for _ in range(rng.integers(1, 4))]
    ports = {f"x{i}": kind for i, kind in enumerate(kinds)} | {"outside": (FLOAT, (3,)), "flag": (BOOL, ()), "limit": (INT64, ())}
    body = RandomBody(rng, "v", {n: (helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in CONSTANTS.items()})
    body.values |= {n: ports[n] for n in ("outside", "flag", "limit")} | {f"s{i}": kind for i, kind in enumerate(kinds)}
    make = _loop if rng.random() < 0.65 else _scan
    node, scanned = make(rng, body, kinds, most)
    ports |= scanned
    after = [helper.make_node("Identity", [o], [f"y{i}"]) for i, o in enumerate(node.output)]
    inputs = [tensor(n, list(shape), dtype) for n, (dtype, shape) in ports.items()]
    proto = model([node, *after], inputs, [f"y{i}" for i in range(len(after))], opset=18, constants=CONSTANTS)
    return RandomLoop(proto, ports, most)


def _loop(rng: np.random.Generator, body: RandomBody, kinds: list[Kind], most: int) -> tuple[onnx.NodeProto, dict[str, Kind]]:
    body.values["i"] = (INT64, ())
    _steps(rng, body)
    gathered = int(rng.integers(0, 3))
    ends = body.outputs(kinds, gathered)
    how = rng.choice(["same", "constant", "index", "data", "never"], p=[0.3, 0.15, 0.25, 0.25, 0.05])
    match how:
        case "same":
            go = body.add("Identity", ["c"], (BOOL, ()))
        case "constant" | "never":
            go = body.add("Identity", ["yes" if how == "constant" else "no"], (BOOL, ()))
        case "index":
            go = body.add("Less", ["i", "limit"], (BOOL, ()))
        case _:
            go = body.add("Or", [body.pick(BOOL, ()) or "flag", body.add("Less", ["i", "five"], (BOOL, ()))], (BOOL, ()))
    ports = [tensor("i", [], INT64), tensor("c", [], BOOL), *(tensor(f"s{i}", s, d) for i, (d, s) in enumerate(kinds))]
    graph = helper.make_graph(body.nodes, "body", ports, [tensor(go, [], BOOL), *ends])
    trips = "" if how == "index" and rng.random() < 0.5 else "trips"
    first = str(rng.choice(["", "yes", "flag"]))
    results = [f"r{i}" for i in range(len(kinds) + gathered)]
    node = helper.make_node("Loop", [trips, first, *(f"x{i}" for i in range(len(kinds)))], results, body=graph)
    return node, {"trips": (INT64, ())} if trips else {}


def _scan(rng: np.random.Generator, body: RandomBody, kinds: list[Kind], most: int) -> tuple[onnx.NodeProto, dict[str, Kind]]:
    length, scanned, axes = int(rng.integers(1, most)), {}, []
    count = int(rng.integers(1, 3))
    for i in range(count):
        dtype, shape = int(rng.choice([FLOAT, INT64])), SHAPES[rng.integers(len(SHAPES))]
        axes.append(int(rng.integers(0, len(shape) + 1)))
        body.values[f"e{i}"] = (dtype, shape)
        scanned[f"xs{i}"] = (dtype, (*shape[: axes[-1]], length, *shape[axes[-1] :]))
    _steps(rng, body)
    gathered = int(rng.integers(0, 3))
    ends = body.outputs(kinds, gathered)
    ports = [tensor(f"s{i}", s, d) for i, (d, s) in enumerate(kinds)]
    ports += [tensor(f"e{i}", body.values[f"e{i}"][1], body.values[f"e{i}"][0]) for i in range(count)]
    directions = {"scan_input_directions": rng.integers(0, 2, count).tolist()}
    if gathered:
        directions["scan_output_directions"] = rng.integers(0, 2, gathered).tolist()
    inputs, results = [*(f"x{i}" for i in range(len(kinds))), *scanned], [f"r{i}" for i in range(len(kinds) + gathered)]
    graph = helper.make_graph(body.nodes, "body", ports, ends)
    attributes = {"num_scan_inputs": count, "scan_input_axes": axes, **directions}
    return helper.make_node("Scan", inputs, results, body=graph, **attributes), scanned


def _steps(rng: np.random.Generator, body: RandomBody) -> None:
    inside = int(rng.random() < 0.3)
    for _ in range(rng.integers(1, 7)):
        body.step(inside)


def random_values(rng: np.random.Generator, kind: Kind) -> np.ndarray:
    """Draw a value of a kind."""
    dtype, shape = kind
    if dtype == FLOAT:
        return rng.standard_normal(shape).astype(np.float32)
    return np.asarray(rng.integers(0, 2 if dtype == BOOL else 9, shape)).astype(DTYPES[dtype])

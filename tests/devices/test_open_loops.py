"""Random Loops and Scans whose steps are a length: one table of some steps for all lengths of a range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import BOOL, FLOAT, INT64, model, tensor
from random_loops import CONSTANTS, Feeds, Kind, RandomBody, random_values
from test_nested import scan

import rammer
from rammer.frontend.loops import loop_chunk
from rammer_testing.nonempty import some
from rammer_testing.peer_process import PeerSession

DEVICES = ["ipu_sim", "rocm", pytest.param("cuda", marks=pytest.mark.cuda)]
OPTIONS = {"ipu_sim": {"tiles": "16"}}
#: Shapes, none of them empty: ONNX Runtime divides by zero for empty scan outputs.
SHAPES = ((), (1,), (3,), (2, 3), (4,))
OUTER = {n: (helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in CONSTANTS.items()}


@dataclass
class OpenLoopModel:
    """A model with one Loop or Scan over ``seq`` steps, or a number derived from it. ``ports`` are by element type and shape,
    whose open dimensions have names. The greatest ``seq`` is ``most``."""

    proto: onnx.ModelProto
    inferred: bool  #: True if ONNX's inference determines all shapes, which fails for scan outputs of Loops.
    ports: dict[str, tuple[int, tuple[Any, ...]]]
    most: int

    def feeds(self, rng: np.random.Generator, point: dict[str, int]) -> Feeds:
        """Return inputs at these lengths."""
        return {n: random_values(rng, (d, tuple(point.get(e, e) for e in s))) for n, (d, s) in self.ports.items()}


def opened(shape: tuple[Any, ...], batch: bool) -> tuple[Any, ...]:
    """Return ``shape`` with 2 as an open dimension if ``batch``."""
    return tuple("b" if batch and n == 2 else n for n in shape)


class Drawing:
    """A model under construction."""

    def __init__(self, rng: np.random.Generator, batch: bool) -> None:
        self.rng, self.batch = rng, batch
        count = int(rng.integers(1, 4))
        self.kinds: list[Kind] = [
            (int(rng.choice([FLOAT, FLOAT, INT64, BOOL])), SHAPES[rng.integers(len(SHAPES))]) for _ in range(count)
        ]
        self.ports: dict[str, tuple[int, tuple[Any, ...]]] = {
            f"x{i}": (d, opened(s, batch)) for i, (d, s) in enumerate(self.kinds)
        }
        self.ports |= {"outside": (FLOAT, (3,)), "flag": (BOOL, ()), "limit": (INT64, ()), "all": (FLOAT, ("seq", 3))}
        self.body = RandomBody(
            rng, "v", OUTER | {n: (d, s) for n, (d, s) in self.ports.items() if n in ("outside", "flag", "limit")}
        )
        self.body.values |= {f"s{i}": kind for i, kind in enumerate(self.kinds)}
        self.before: list[onnx.NodeProto] = []

    def steps(self, loop: bool) -> None:
        """Add the operators of an iteration; some read all of ``all``, or its row of the iteration."""
        if self.rng.random() < 0.3:
            self.body.add("ReduceSum", ["all", "first"], (FLOAT, (3,)), keepdims=0)
        if loop and self.rng.random() < 0.5:
            self.body.add("Gather", ["all", self.body.add("Mod", ["i", "count"], (INT64, ()))], (FLOAT, (3,)))
        for _ in range(self.rng.integers(1, 7)):
            self.body.step(0)

    def port(self, name: str, kind: Kind) -> onnx.ValueInfoProto:
        """Return a port of the body; open shapes stay undeclared."""
        return tensor(name, None if self.batch and 2 in kind[1] else list(kind[1]), kind[0])

    def ends(self, gathered: int) -> list[onnx.ValueInfoProto]:
        made = self.body.outputs(self.kinds, gathered)
        return [self.port(v.name, self.body.values[v.name]) for v in made]

    def loop(self) -> onnx.NodeProto:
        """Return a Loop with as many iterations as ``all`` has rows, or some more or less."""
        body, gathered = self.body, int(self.rng.integers(0, 3))
        body.values["i"] = (INT64, ())
        self.steps(True)
        ends = self.ends(gathered)
        go = body.add("Identity", ["c" if self.rng.random() < 0.5 else "yes"], (BOOL, ()))
        ports = [tensor("i", [], INT64), tensor("c", [], BOOL), *(self.port(f"s{i}", k) for i, k in enumerate(self.kinds))]
        graph = helper.make_graph(body.nodes, "body", ports, [tensor(go, [], BOOL), *ends])
        self.before += [helper.make_node("Shape", ["all"], ["rows"], end=1), helper.make_node("Squeeze", ["rows"], ["count"])]
        how = [("Identity", "count"), ("Add", "count", "five"), ("Mul", "count", "two"), ("Sub", "count", "one")]
        op, *operands = how[self.rng.integers(4)]
        self.before.append(helper.make_node(op, operands, ["trips"]))
        results = [f"r{i}" for i in range(len(self.kinds) + gathered)]
        names = ["trips", str(self.rng.choice(["", "yes"])), *(f"x{i}" for i in range(len(self.kinds)))]
        return helper.make_node("Loop", names, results, body=graph)

    def scan(self) -> onnx.NodeProto:
        """Return a Scan over some sequences, along any axis and in either direction.

        Some sequences are computed before the Scan."""
        rng, body, axes, given = self.rng, self.body, list[int](), list[str]()
        for i in range(rng.integers(1, 3)):
            dtype, shape = int(rng.choice([FLOAT, INT64])), SHAPES[rng.integers(len(SHAPES))]
            axes.append(int(rng.integers(0, len(shape) + 1)))
            body.values[f"e{i}"] = (dtype, shape)
            whole = opened(shape, self.batch)
            self.ports[f"xs{i}"] = (dtype, (*whole[: axes[-1]], "seq", *whole[axes[-1] :]))
            given.append(f"xs{i}")
            if rng.random() < 0.3:
                self.before.append(helper.make_node("Neg", [given[-1]], [f"neg{i}"]))
                given[-1] = f"neg{i}"
        self.steps(False)
        gathered = int(rng.integers(0, 3))
        ends = self.ends(gathered)
        ports = [self.port(f"s{i}", kind) for i, kind in enumerate(self.kinds)]
        ports += [self.port(f"e{i}", body.values[f"e{i}"]) for i in range(len(given))]
        more: dict[str, Any] = {"scan_input_axes": axes, "scan_input_directions": rng.integers(0, 2, len(given)).tolist()}
        if gathered:
            more["scan_output_directions"] = rng.integers(0, 2, gathered).tolist()
            ranks = [len(body.values[v.name][1]) for v in ends[len(self.kinds) :]]
            more["scan_output_axes"] = [int(rng.integers(0, r + 1)) for r in ranks]
        inputs, results = [*(f"x{i}" for i in range(len(self.kinds))), *given], [f"r{i}" for i in range(len(ends))]
        graph = helper.make_graph(body.nodes, "body", ports, ends)
        return helper.make_node("Scan", inputs, results, body=graph, num_scan_inputs=len(given), **more)

    def model(self, most: int) -> OpenLoopModel:
        node = self.loop() if self.rng.random() < 0.5 else self.scan()
        after = [helper.make_node("Identity", [o], [f"y{i}"]) for i, o in enumerate(node.output)]
        after.append(helper.make_node("Tanh", ["all"], ["shown"]))
        outputs = [*(f"y{i}" for i in range(len(node.output))), "shown"]
        inputs = [tensor(n, list(shape), dtype) for n, (dtype, shape) in self.ports.items()]
        known = {**CONSTANTS, "first": np.array([0]), "one": np.array(1), "two": np.array(2)}
        proto = model([*self.before, node, *after], inputs, outputs, opset=18, constants=known)
        return OpenLoopModel(proto, node.op_type == "Scan", self.ports, most)


@pytest.mark.slow
@pytest.mark.sampled(2, of="device")
@pytest.mark.parametrize("number", range(200))
@pytest.mark.parametrize("device", DEVICES)
def test_random_loops_at_every_length(
    device: str, number: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check chunks of a few steps, at the edges of the range and of chunks."""
    monkeypatch.setattr(loop_chunk, "MOST_STEPS", int(rng.integers(1, 6)))
    batch, most = bool(rng.integers(2)), int(rng.integers(4, 12))
    drawn = Drawing(rng, batch).model(most)
    reference = PeerSession(drawn.proto)
    spans = {"seq": (1, most), **({"b": (1, 4)} if any("b" in s for _, s in drawn.ports.values()) else {})}
    exe = rammer.compile(drawn.proto, device, shapes=spans, options=OPTIONS.get(device))
    for steps in dict.fromkeys([most, 1, 2, *map(int, rng.integers(1, most + 1, 3))]):
        feeds = drawn.feeds(rng, {"seq": steps, "b": int(rng.integers(1, 5))})
        names = [o.name for o in reference.get_outputs()]
        found = exe.run(feeds)
        for name, want in some(dict(zip(names, reference.run(names, feeds), strict=True)).items()):
            assert (found[name].dtype, found[name].shape) == (want.dtype, want.shape), (name, steps)
            np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-5, err_msg=f"{name} at {steps} steps")
    ranged = [s for s in exe.cache.values() if s.compiled.ranged is not None and not s.host_nodes]
    alone = len(exe.cache) - len(ranged)  # of one step, if no other dimension is open
    assert alone <= (len(spans) == 1) or not drawn.inferred
    exe.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
def test_thousands_of_steps_are_a_table_of_some(device: str, rng: np.random.Generator) -> None:
    """Check also that zero steps leave the states unchanged."""
    proto = open_scan(rng)
    exe = rammer.compile(proto, device, shapes={"seq": (0, 5000)}, options=OPTIONS.get(device))
    session = PeerSession(proto)
    for steps in (0, 1, 129, 517) if device == "ipu_sim" else (0, 1, 700, 5000):
        inputs = {n: rng.uniform(-0.9, 0.9, (steps, 3) if n in ("x", "z") else 3).astype(np.float32) for n in "hgxzk"}
        found = exe.run(inputs)
        if not steps:
            assert found["y"].shape == (0, 3)
            np.testing.assert_array_equal([found["last"], found["end"]], [inputs["h"], inputs["g"]])
            continue
        for output, want in zip(session.get_outputs(), session.run(None, inputs), strict=True):
            np.testing.assert_allclose(found[output.name], want, atol=1e-5, err_msg=f"{output.name} at {steps} steps")
    for special in some(exe.cache.values()):
        (turn,) = (p for p in special.compiled.programs if p.repeat is not None)
        assert not special.host_nodes and turn.repeat.until is not None and turn.task_count <= 400
    exe.close()


def open_scan(rng: np.random.Generator) -> onnx.ModelProto:
    """Return two states with slices from either side."""
    proto = scan(5, rng, (0, 1, 1))
    for value in proto.graph.input:
        if value.name in ("x", "z"):
            value.type.tensor_type.shape.dim[0].dim_param = "seq"
    return proto

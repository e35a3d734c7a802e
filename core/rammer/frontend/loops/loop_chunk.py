"""Several iterations of a Loop or Scan as one model, so that the host evaluates the condition once for all of them.

The remaining trip count is an input, so one program serves any number of iterations up to ``count``. Iterations past it, or past
a false condition, re-execute with the inputs of the last iteration. The body thus never sees inputs that the original loop would
not have produced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, ValueInfoProto, helper, numpy_helper

from rammer.frontend.loops.control_operators import graph_of
from rammer.frontend.read import model_checks
from rammer.frontend.read import node_protos as nd
from rammer.frontend.read.node_protos import SubGraph
from rammer.frontend.read.reader import Model
from rammer.ir.port import ModelPort

#: Inputs of the programs besides states, slices and outer values: the index of the first iteration and the remaining trip count.
FIRST: Final = "first"
LEFT: Final = "left"


@dataclass(frozen=True)
class LoopChunk:
    """A chunk of ``count`` iterations of a ``body``, from a Loop or, if ``scanned`` is not 0, from a Scan. The last ``scanned``
    inputs of a Scan body are sliced. The condition of a ``steady`` loop never becomes false, so it is not computed."""

    body: SubGraph
    count: int
    scanned: int
    steady: bool

    @cached_property
    def graph(self) -> GraphProto:
        """The graph of the body."""
        return graph_of(self.body)

    @property
    def size(self) -> int:
        """The number of operators of one iteration, including those around the body."""
        return len(self._turn().node) + sum(len(g.node) for node in self.graph.node for g in model_checks.graphs_inside(node))

    @cached_property
    def states(self) -> list[str]:
        """The names of the states in the body."""
        return _value_names(self.graph.input)[: -self.scanned] if self.scanned else _value_names(self.graph.input)[2:]

    @cached_property
    def results(self) -> list[str]:
        """The names of the body's results: its states and the gathered values."""
        return _value_names(self.graph.output)[0 if self.scanned else 1 :]

    @cached_property
    def _unique_prefix(self) -> str:
        return model_checks.unused_prefix(self.graph, "turns")

    def name(self, what: str, index: int | str = "") -> str:
        """Return a name that is unused in the body. ``what`` is ``first``, ``left``, ``state`` or ``slices`` for inputs;
        ``after``, ``going`` or ``gathered`` for outputs."""
        return f"{self._unique_prefix}{what}{index}"

    def model(self, ports: Mapping[str, ModelPort], known: Mapping[str, np.ndarray]) -> Model:
        """Return all iterations as one model. ``ports`` maps names in the body to states, slices and outer values. ``known``
        holds the constant outer values."""
        own, scanned = (
            set(_value_names(self.graph.input)),
            _value_names(self.graph.input)[-self.scanned :] if self.scanned else [],
        )
        given = [replace(ports[n], name=self.name("state", i)) for i, n in enumerate(self.states)]
        given += [ModelPort(self.name("slices", i), ports[n].dtype, (self.count, *ports[n].shape)) for i, n in enumerate(scanned)]
        given += [ModelPort(self.name(n), "int64", ()) for n in ((LEFT,) if self.scanned else (FIRST, LEFT))]
        given += [p for n, p in ports.items() if n not in own and n not in known]
        opsets = dict(self.body.opsets)
        proto = ModelProto(opset_import=[OperatorSetIdProto(domain=d, version=v) for d, v in opsets.items()])
        proto.graph.node.extend([*self._before(), self._loop_node()])
        proto.graph.output.extend(ValueInfoProto(name=o) for o in self.outputs)
        title = f"{self.graph.name or 'body'}_{self.count}_turns"
        return Model(proto, None, title, tuple(given), tuple(self.outputs), opsets.get("", 0), known=known)

    @cached_property
    def outputs(self) -> list[str]:
        """The names of the last states, of the condition after each iteration (unless ``steady``) and of the gathered values."""
        after = [self.name("after", i) for i in range(len(self.states))]
        gathered = [self.name("gathered", i) for i in range(len(self.results) - len(self.states))]
        return [*after, *([] if self.steady else [self.name("going")]), *gathered]

    def _before(self) -> list[NodeProto]:
        """Return nodes that compute, for all iterations at once, their indices and two flags: it runs, and another follows."""
        places = np.arange(self.count)
        constants = {
            "places": places,
            "nexts": places + 1,
            "one": np.array(1),
            "yes": np.array(True),
            "count": np.array(self.count),
        }
        made = [helper.make_node("Constant", [], [self.name(n)], value=numpy_helper.from_array(a)) for n, a in constants.items()]
        made += [self._make_node("Less", ["places", LEFT], "are"), self._make_node("Less", ["nexts", LEFT], "more")]
        if not self.scanned:
            made += [self._make_node("Sub", [LEFT, "one"], "end"), self._make_node("Min", ["places", "end"], "at")]
            made += [self._make_node("Add", ["at", FIRST], "indices")]
        return made

    def _make_node(self, op: str, operands: Sequence[str], result: str) -> NodeProto:
        return helper.make_node(op, [self.name(n) for n in operands], [self.name(result)])

    def _loop_node(self) -> NodeProto:
        """Return a Loop of ``count`` iterations with all their results."""
        states, steady = range(len(self.states)), self.steady
        first = [*([] if steady else ["yes", FIRST]), *(f"state{i}" for i in states), *(f"state{i}" for i in states)]
        unread = [*([] if steady else ["last on", "last i"]), *(f"last given{i}" for i in states)]
        return helper.make_node(
            "Loop",
            [self.name(n) for n in ("count", "yes", *first)],
            [*map(self.name, unread), *self.outputs],
            name=self.name("all"),
            body=self._turn(),
        )

    def _turn(self) -> GraphProto:
        """Return the graph of one iteration. Past the last iteration it reuses that iteration's inputs."""
        states, own = range(len(self.states)), [] if self.steady else ["on", "i"]
        nodes, after = [*self._input_nodes(), *self.graph.node, self._make_node("Identity", ["c"], "go")], [self.name("go")]
        if not self.steady:
            nodes += [helper.make_node("And", [self.name("on"), self.graph.output[0].name], [self.name("goes")])]
            nodes += [self._make_node("Gather", ["more", "k"], "another"), self._make_node("And", ["another", "goes"], "next on")]
            after += [self.name("next on"), self.name("index")]
        after += [*self.states, *self.results[: len(states)], *([] if self.steady else [self.name("goes")])]
        after += self.results[len(states) :]
        for place, name in enumerate(after):  # ONNX's inference accepts each output name only once
            if name in after[:place]:
                after[place] = self.name("again", place)
                nodes.append(helper.make_node("Identity", [name], [after[place]]))
        before = ["k", "c", *own, *(f"was{i}" for i in states), *(f"is{i}" for i in states)]
        kinds = {"k": TensorProto.INT64, "i": TensorProto.INT64, "c": TensorProto.BOOL, "on": TensorProto.BOOL}
        typed = {n: helper.make_tensor_value_info(self.name(n), kind, []) for n, kind in kinds.items()}
        inputs = [typed.get(n, ValueInfoProto(name=self.name(n))) for n in before]
        return helper.make_graph(nodes, "turn", inputs, [ValueInfoProto(name=n) for n in after], self.graph.initializer)

    def _input_nodes(self) -> list[NodeProto]:
        """Return the nodes that compute the body's inputs in one iteration."""
        inputs, on = _value_names(self.graph.input), self.name("on")
        nodes = [self._make_node("Gather", ["are", "k"], "on")] if self.steady else []
        if not self.scanned:
            nodes += [self._make_node("Gather", ["indices", "k"], "index" if self.steady else "here")]
            nodes += [] if self.steady else [self._make_node("Where", ["on", "here", "i"], "index")]
            nodes += [helper.make_node("Identity", [self.name(n)], [o]) for n, o in zip(("index", "yes"), inputs, strict=False)]
        nodes += [
            helper.make_node("Where", [on, self.name("is", i), self.name("was", i)], [n]) for i, n in enumerate(self.states)
        ]
        slices = enumerate(inputs[len(self.states) :] if self.scanned else ())
        return nodes + [helper.make_node("Gather", [self.name("slices", i), self.name("k")], [n]) for i, n in slices]


def has_steady_condition(body: SubGraph) -> bool:
    """Return True if a Loop's condition depends only on its previous value and constants. If it holds after one iteration, it
    always holds."""
    graph = graph_of(body)
    makers = {o: n for n in graph.node for o in n.output}
    fixed, waiting = {graph.input[1].name, *(t.name for t in graph.initializer)}, [graph.output[0].name]
    while waiting:
        name = waiting.pop()
        if name in fixed:
            continue
        maker = makers.get(name)
        if maker is None or nd.is_random(maker):
            return False
        fixed.add(name)
        waiting += model_checks.node_reads(maker)
    return True


def _value_names(values: Any) -> list[str]:
    return [v.name for v in values]

"""Chunks of loops: the number of their steps, the body of a step with a masked tail, and many steps as one nested Scan.

A Loop is a Scan over its indices. Steps past the trip count, or past a false condition, keep the states, and their other results
are undefined. Devices compute all operators for all inputs, so steps without a use cannot fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isqrt
from typing import Any, Final

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, ValueInfoProto, helper, numpy_helper

from rammer.frontend.bind.bind_state import MOST_UNROLLED
from rammer.frontend.loops.control_operators import graph_of
from rammer.frontend.read import model_checks
from rammer.frontend.read import node_protos as nd
from rammer.frontend.read.node_protos import SubGraph
from rammer.frontend.read.reader import Model
from rammer.ir.port import ModelPort

#: Maximum steps of a chunk. Longer chunks save little.
MOST_STEPS: Final = 128
#: Recurrent operators -> number of states. Initial states start at input 5, last states at output 1.
STATES: Final[Mapping[str, int]] = {"LSTM": 2, "GRU": 1, "RNN": 1}
#: Number of operators that an operator with inner steps counts as.
HEAVY: Final = 32
#: Inputs of host chunks besides states, slices and outer values: the index of the first iteration and of the first masked one.
FIRST: Final = "first"
UNTIL: Final = "until"

# --- numbers of steps ---------------------------------------------------------------------------------


def most_steps(step: GraphProto, added: int = 0) -> int:
    """Return the maximum steps of a chunk that unrolls, by the operators of a ``step`` and ``added`` ones."""
    nodes = [n for g in model_checks.graphs_below([step]) for n in g.node]
    size = sum(HEAVY if n.op_type in (*STATES, "Loop", "Scan") else 1 for n in nodes) + added
    return max(min(MOST_STEPS, MOST_UNROLLED // max(size, 1)), 1)


def even_steps(steps: int, limit: int) -> int:
    """Return the steps of a chunk of ``steps``: ``limit``, or a number from half of it that divides ``steps``."""
    most = max(min(limit, steps // 2), 1)
    return next((n for n in range(most, most // 2, -1) if steps % n == 0), most)


def best_steps(limit: int, least: int, most: int, between: int) -> int:
    """Return the steps of a chunk, at most ``limit``, that minimise the time of loops of ``least`` to ``most`` steps, at their
    mean. A run computes whole chunks, so half a chunk is wasted on average. ``between`` is the cost between chunks, in steps."""
    steps = max(min(limit, isqrt(between * (max(least, 1) + most)), most), 1)
    return -(-most // -(-most // steps))


# --- bodies -------------------------------------------------------------------------------------------


def step_body(body: SubGraph, loop: bool, states: int, until: str = "", steady: bool = True) -> GraphProto:
    """Return the body of a Scan whose last input is the index of the step, from that of a Loop or Scan.

    With ``until``, an outer scalar, steps from that index on keep the states. Unless ``steady``, so do steps after a false
    condition of the Loop. The condition is then the first state, and the first of the gathered results."""
    made, prefix = GraphProto(), unused_prefix(body)
    made.CopyFrom(graph_of(body))
    formal, results = list(made.input)[2 if loop else 0 :], list(made.output)[1 if loop else 0 :]
    at = helper.make_tensor_value_info(made.input[0].name if loop else f"{prefix}at", TensorProto.INT64, [])
    on, here, going, goes, again = (f"{prefix}{n}" for n in ("on", "here", "going", "goes", "again"))
    nodes, ends = list(made.node), list[Any](results)
    if loop:
        nodes.insert(0, _make_constant(made.input[1].name, np.array(True)))
    if until:
        ahead = [helper.make_node("Less", [at.name, until], [on if steady else here])]
        nodes = [*ahead, *([] if steady else [helper.make_node("And", [here, going], [on])]), *nodes]
    for i, (old, new) in enumerate(zip(formal[:states], results[:states], strict=True) if until else ()):
        ends[i] = helper.make_empty_tensor_value_info(f"{prefix}state{i}")
        ends[i].type.CopyFrom(new.type)
        nodes.append(helper.make_node("Where", [on, new.name, old.name], [ends[i].name]))
    if not steady:
        nodes += [helper.make_node("And", [on, made.output[0].name], [goes]), helper.make_node("Identity", [goes], [again])]
        before, after, shown = (helper.make_tensor_value_info(n, TensorProto.BOOL, []) for n in (going, goes, again))
        formal, ends = [before, *formal], [after, *ends[:states], shown, *ends[states:]]
    return helper.make_graph(nodes, made.name or "body", [*formal, at], ends, made.initializer)


def unused_prefix(body: SubGraph) -> str:
    """Return the prefix of the names that ``step_body`` adds."""
    return model_checks.unused_prefix(graph_of(body), "open")


def nested_scan(body: GraphProto, name: str, attributes: Mapping[str, Any]) -> GraphProto:
    """Return the body of a chunk: a Scan over its steps with this ``body``."""
    given, made = (_numbered_ports(body, what, values) for what, values in (("in", body.input), ("out", body.output)))
    inner = helper.make_node("Scan", [v.name for v in given], [v.name for v in made], name, body=body, **attributes)
    return helper.make_graph([inner], f"{body.name}_turn", given, made)


def _numbered_ports(body: GraphProto, what: str, like: Sequence[ValueInfoProto]) -> list[ValueInfoProto]:
    found = [helper.make_empty_tensor_value_info(f"{body.name}.turn.{what}{i}") for i in range(len(like))]
    for value, port in zip(found, like, strict=True):
        value.type.tensor_type.elem_type = port.type.tensor_type.elem_type
    return found


def _make_constant(name: str, value: np.ndarray) -> NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))


def body_model(body: SubGraph, graph: GraphProto, ports: Sequence[ModelPort], known: Mapping[str, np.ndarray]) -> Model:
    """Return ``graph``, made from ``body``, as a model with these inputs. ``known`` are constant outer values."""
    opsets, outputs = dict(body.opsets), tuple(o.name for o in graph.output)
    imports = [OperatorSetIdProto(domain=d, version=v) for d, v in opsets.items()]
    proto, title = ModelProto(opset_import=imports, graph=graph), graph.name or "body"
    return Model(proto, None, title, tuple(ports), outputs, opsets.get("", 0), known=known)


# --- chunks that the host runs ------------------------------------------------------------------------


@dataclass(frozen=True)
class LoopChunk:
    """A chunk of ``count`` iterations of a ``body``, from a Loop or, if ``scanned`` is not 0, from a Scan. The last ``scanned``
    inputs of a Scan body are sliced. The condition of a ``steady`` loop never becomes false, so it is not computed.

    The trip count is an input, so one program serves any number of iterations up to ``count``, and the host evaluates the
    condition once for all of them."""

    body: SubGraph
    count: int
    scanned: int
    steady: bool

    @cached_property
    def states(self) -> list[str]:
        """The names of the states in the body."""
        names = [v.name for v in graph_of(self.body).input]
        return names[: -self.scanned] if self.scanned else names[2:]

    @cached_property
    def gathered(self) -> list[str]:
        """The names of the gathered results of the model."""
        results = len(graph_of(self.body).output) - (0 if self.scanned else 1)
        return [self.name("gathered", i) for i in range(results - len(self.states))]

    @cached_property
    def _prefix(self) -> str:
        return model_checks.unused_prefix(graph_of(self.body), "turns")

    def name(self, what: str, index: int | str = "") -> str:
        """Return a name that is unused in the body. ``what`` is ``first``, ``until``, ``state`` or ``slices`` for inputs;
        ``after``, ``going`` or ``gathered`` for outputs."""
        return f"{self._prefix}{what}{index}"

    def step(self) -> GraphProto:
        """Return the body of one iteration."""
        return step_body(self.body, not self.scanned, len(self.states), self.name(UNTIL), self.steady)

    def model(self, ports: Sequence[ModelPort], known: Mapping[str, np.ndarray]) -> Model:
        """Return all iterations as one model. ``ports`` are those of the body and of its outer values. ``known`` holds the
        constant outer values."""
        graph, of = graph_of(self.body), {p.name: p for p in ports}
        own, sliced = {v.name for v in graph.input}, [v.name for v in graph.input][-self.scanned :] if self.scanned else []
        states = [replace(of[n], name=self.name("state", i)) for i, n in enumerate(self.states)]
        slices = [ModelPort(self.name("slices", i), of[n].dtype, (self.count, *of[n].shape)) for i, n in enumerate(sliced)]
        scalars = [ModelPort(self.name(n), "int64", ()) for n in ((UNTIL,) if self.scanned else (FIRST, UNTIL))]
        given = [*states, *slices, *scalars, *(p for p in ports if p.name not in own)]
        places, indices, yes, going = map(self.name, ("places", "indices", "yes", "going"))
        nodes = [_make_constant(indices if self.scanned else places, np.arange(self.count))]
        nodes += [] if self.scanned else [helper.make_node("Add", [places, self.name(FIRST)], [indices])]
        nodes += [] if self.steady else [_make_constant(yes, np.array(True))]
        after = [self.name("after", i) for i in range(len(self.states))]
        outputs = [*after, *([] if self.steady else [going]), *self.gathered]
        first, last = ([], []) if self.steady else ([yes], [self.name("goes")])
        read = [*first, *(p.name for p in (*states, *slices)), indices]
        nodes.append(helper.make_node("Scan", read, [*last, *outputs], body=self.step(), num_scan_inputs=self.scanned + 1))
        title = f"{graph.name or 'body'}_{self.count}_turns"
        whole = helper.make_graph(nodes, title, [], [ValueInfoProto(name=o) for o in outputs])
        return body_model(self.body, whole, given, known)


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

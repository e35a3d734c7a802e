"""Operators without a tensor expression, run on the host by ``frontend.bind.evaluator``; they are always listed.

Their times are recorded by type in ``collect_host_times``; other runs have no overhead."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, OperatorSetIdProto

from rammer.device.custom_operators import CustomOperator, CustomOperators
from rammer.errors import BadInput, DeviceFailure
from rammer.frontend.bind.evaluator import Unjudged, evaluate_node
from rammer.frontend.loops.control_operators import BodyRunner
from rammer.frontend.read import external_data as external_files
from rammer.frontend.read import model_checks
from rammer.frontend.read.node_protos import (
    SubGraph,
    attribute_value,
    body_graphs,
    captured_names,
    carried_dtypes,
    first_line,
    node_proto,
)
from rammer.frontend.read.plugin_operators import NONE, find_custom_operator
from rammer.ir.formats import FORMATS
from rammer.ir.graph import Graph, Node
from rammer.ir.names import quote_text
from rammer.ir.types import TensorType
from rammer.ir.untrusted_json import load_json


@dataclass
class Spent:
    """Seconds and calls by type of operator. Time of an operator's bodies counts for their operators on the host, and for the
    operator itself on the device."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    inside: float = 0.0


_SPENT: Final[ContextVar[Spent | None]] = ContextVar("_SPENT", default=None)
_UNTIMED: Final = nullcontext()


@contextmanager
def collect_host_times() -> Iterator[Spent]:
    """Yield the clock of this thread's runs in the block."""
    spent = Spent()
    token = _SPENT.set(spent)
    try:
        yield spent
    finally:
        _SPENT.reset(token)


def time_operator(op: str) -> AbstractContextManager[None]:
    """Return a context that times one operator of type ``op``."""
    spent = _SPENT.get()
    return _UNTIMED if spent is None else _time_operator(spent, op)


@contextmanager
def _time_operator(spent: Spent, op: str) -> Iterator[None]:
    begin, before, spent.inside = time.perf_counter(), spent.inside, 0.0
    try:
        yield
    finally:
        whole = time.perf_counter() - begin
        spent.seconds[op] = spent.seconds.get(op, 0.0) + whole - spent.inside
        spent.calls[op] = spent.calls.get(op, 0) + 1
        spent.inside = before + whole


@dataclass(frozen=True)
class HostNode:
    """An operator and the static types of its outputs, by name."""

    node: Node
    types: Mapping[str, TensorType]
    #: A plugin's declaration of an operator that ONNX does not have.
    custom: CustomOperator | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.node.declared and (self.custom is None or self.custom.reference is None):
            owner = f"plugin {self.custom.plugin}" if self.custom is not None else "the plugin that declares it"
            raise BadInput(
                f"{self.node.op} cannot run: no lowering supports this use, and it has no reference",
                f"node {quote_text(self.node.name)} ({self.node.op})",
                f"ask {owner}: a lowering (hook rammer_lowerings) computes it on the device, a reference on the host",
            )

    @staticmethod
    def of(graph: Graph, node: Node, plugins: CustomOperators = NONE) -> HostNode:
        """Return the host operator for ``node`` of ``graph``. Raises BadInput for a plugin's operator without a reference."""
        return HostNode(node, {o: graph.types[o] for o in node.outputs if o}, plugins.get((node.domain, node.bare)))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values it reads (captures of its sub-graphs included), each once."""
        return tuple(dict.fromkeys(n for n in self.node.inputs if n))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values it computes."""
        return tuple(self.types)

    def __str__(self) -> str:
        types = ", ".join(map(str, self.types.values()))
        return f"host {types} {self.node}"

    def run(
        self, inputs: Mapping[str, np.ndarray], bodies: BodyRunner | None = None, constants: Collection[str] = ()
    ) -> dict[str, np.ndarray]:
        """Return the outputs by name. Raises BadInput as ``values`` does, and for another shape than the inferred one."""
        values = self.values(inputs, bodies, constants)
        return {name: self._check_output(name, values[name]) for name in self.types}

    @property
    def title(self) -> str:
        """The operator's name in messages."""
        return f"node {self.node.name} ({self.node.op})"

    def values(
        self, inputs: Mapping[str, np.ndarray], bodies: BodyRunner | None = None, constants: Collection[str] = ()
    ) -> dict[str, np.ndarray]:
        """Return the outputs by name, of any types and shapes. ``bodies`` runs those of control flow, ``constants`` are the
        inputs that every run has. Raises BadInput if the operator lacks a trusted implementation, or if that fails."""
        where = self.title
        try:
            with time_operator(self.node.op):
                if self.node.declared:
                    return self._run_reference(inputs)
                return evaluate_node(self.node, inputs, self.types, True, bodies, constants)
        except BadInput as problem:
            raise type(problem)(problem.what, where, problem.hint) from problem
        except DeviceFailure:
            raise
        except Unjudged as error:
            raise BadInput(str(error), where, "export the model without it") from error
        except NotImplementedError as error:
            raise BadInput(
                f"no device and no reference implementation runs {self.node.op}", where, "export the model without it"
            ) from error
        except Exception as error:
            raise BadInput(
                f"{self.node.op} fails on the host: {first_line(error)}", where, "check the operator's inputs"
            ) from error

    def _run_reference(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run the plugin's reference, whose failure is the plugin's fault."""
        assert self.custom is not None
        try:
            return self.custom.referred(self.node.attributes, self.node.inputs, self.node.outputs, inputs)
        except DeviceFailure as problem:
            raise DeviceFailure(problem.what, self.title, problem.hint) from problem

    def _check_output(self, name: str, value: np.ndarray) -> np.ndarray:
        declared = self.types[name]
        if value.shape != declared.shape:
            what = f"{self.node.op} gives {name!r} the shape {list(value.shape)} instead of {list(declared.shape)}"
            raise BadInput(what, self.title, "its shape was inferred wrongly: export the model with another opset")
        return np.asarray(value, dtype=declared.dtype, order="C")

    def to_bytes(self) -> bytes:
        """Return JSON around the operator's protobuf; ``from_bytes`` reads it back."""
        node = self.node
        opsets = next((body.opsets for body in body_graphs(node)), ())
        return json.dumps(
            {
                "proto": base64.b64encode(node_proto(node).SerializeToString()).decode(),
                "inputs": node.inputs,
                "captures": captured_names(node),
                "formats": carried_dtypes(node),
                "opsets": opsets,
                "version": node.version,
                "types": {name: str(kind) for name, kind in self.types.items()},
            }
        ).encode()

    @staticmethod
    def from_bytes(data: bytes, plugins: CustomOperators = NONE) -> HostNode:
        """Read the result of ``to_bytes``. Raises ValueError, KeyError or TypeError for anything else."""
        head: dict[str, Any] = load_json(data)
        try:
            proto = NodeProto.FromString(base64.b64decode(head["proto"]))
        except Exception as error:  # protobuf's DecodeError is in another module for each of its implementations
            raise ValueError(f"not an operator: {first_line(error)}") from error
        _check_node(proto, int(head["version"]), head["opsets"], plugins)
        custom = find_custom_operator(proto, plugins)
        outer = tuple(map(str, head["captures"]))
        opsets = tuple((str(domain), int(version)) for domain, version in head["opsets"])
        kinds = tuple(map(str, head["formats"]))
        if kinds and (len(kinds) != len(head["inputs"]) or not {*kinds} <= {"", *FORMATS}):
            raise ValueError("element types of the operator's inputs are malformed")
        context = SubGraph(b"", outer, opsets, kinds)
        values = {a.name: attribute_value(a) for a in proto.attribute}
        attributes = {n: replace(context, proto=v.proto) if isinstance(v, SubGraph) else v for n, v in values.items()}
        node = Node(
            custom.title if custom is not None else proto.op_type,
            tuple(map(str, head["inputs"])),
            tuple(proto.output),
            attributes,
            proto.name,
            proto.domain,
            int(head["version"]),
        )
        return HostNode(node, {str(n): TensorType.parse(t) for n, t in head["types"].items()}, custom)


def _check_node(proto: NodeProto, version: int, opsets: Any, plugins: CustomOperators) -> None:
    """Raise BadInput for an operator that neither ONNX nor a plugin defines, or one that reads other files."""
    graph = GraphProto(node=[proto])
    imports = {proto.domain: version, **{str(domain): int(v) for domain, v in opsets}}
    model = ModelProto(graph=graph, opset_import=[OperatorSetIdProto(domain=d, version=v) for d, v in imports.items()])
    model_checks.check_operators(model, plugins)
    external_files.check_external_data(model, None, "the compiled model")

"""Deferral of operators whose shapes depend on run-time data, and of all operators that read their results.

Some wait for operands that determine shapes (the target of a Reshape, the bounds of a Slice): their readers are compiled for the
values computed, as for shapes. Others determine the shapes of their results only when they run (NonZero): they run on the host,
and their readers are compiled for the resulting shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np
from onnx import ModelProto, NodeProto, TypeProto, defs

from rammer.errors import BadInput
from rammer.frontend import op_traits
from rammer.frontend.lower.contrib import FUNCTIONS
from rammer.frontend.read import model_checks
from rammer.frontend.read import node_protos as nd
from rammer.frontend.read.reader import Model
from rammer.ir.constants.mapped_files import in_memory
from rammer.ir.formats import name_of
from rammer.ir.graph import Node
from rammer.ir.port import MAP, OPTIONAL, SEQUENCE, STRING, ModelPort
from rammer.ir.types import KNOWN

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Maximum elements of an operand that determines shapes: each set of values is compiled separately. Operators need no more.
MOST_DECIDING: Final = 1024


class Unknown(BadInput):
    """Error for a result whose shape depends on run-time values."""


@dataclass(frozen=True)
class DeferredModel:
    """The deferred operators of a model.

    ``first`` run on the host before all others. ``inputs`` are values computed before, including the model's inputs; ``known``
    are constants. The rest is compiled for each set of values of ``deciding``. ``why`` is the first reason for deferral."""

    whole: Model
    proto: ModelProto = field(repr=False)
    first: tuple[Node, ...]
    inputs: tuple[str, ...]
    deciding: frozenset[str]
    known: Mapping[str, Array] = field(repr=False)
    why: Unknown

    def __str__(self) -> str:
        hosted = (
            f"{len(self.first)} operators ({', '.join(n.op for n in self.first)}) run on the host first; " if self.first else ""
        )
        decides = f", and for the values of {', '.join(sorted(self.deciding))}" if self.deciding else ""
        count = len(self.proto.graph.node)
        after = f"{count} operators are compiled when it is known, for the shapes found{decides}"
        return f"{self.why.what}: {hosted}{after if count else 'nothing follows'}"

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the model's outputs."""
        return self.whole.outputs

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The values that the operators after ``first`` read and do not compute."""
        nodes = self.proto.graph.node
        made = {o for node in nodes for o in node.output}
        return tuple(dict.fromkeys(n for node in nodes for n in model_checks.node_reads(node) if n not in made))

    def model(self, values: Mapping[str, Array]) -> Model:
        """Return the operators after ``first`` as a separate model, for the types, shapes and deciding values in ``values``.
        Raises BadInput if a deciding value is too large."""
        for name in self.deciding & values.keys():
            if np.size(values[name]) > MOST_DECIDING:
                raise BadInput(
                    f"{name!r} determines shapes by {values[name].size} values, more than {MOST_DECIDING}",
                    self.why.where,
                    "make it a constant of the model",
                )
        known = {n: values[n] if n in values else self.known[n] for n in self.reads if n in self.deciding or n in self.known}
        ports = tuple(port_of(n, values[n]) for n in self.reads if n not in known)
        outputs = tuple(v.name for v in self.proto.graph.output)
        return replace(self.whole, proto=self.proto, inputs=ports, outputs=outputs, known=known)


@dataclass
class Deferral:
    """The operators deferred during a walk, in order, and the values that wait for them. ``foreign`` are available values other
    than numeric tensors: their readers run on the host."""

    nodes: list[NodeProto] = field(default_factory=list)
    first: list[Node] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    deciding: set[str] = field(default_factory=set)
    foreign: Set[str] = frozenset()
    why: Unknown | None = None

    def __bool__(self) -> bool:
        return bool(self.names)

    def waits(self, proto: NodeProto, reads: Collection[str]) -> bool:
        """Defer an operator that reads deferred values. Returns True if it was deferred."""
        if self.names.isdisjoint(reads):
            return False
        self._put_off(proto)
        return True

    def blocked(self, proto: NodeProto, node: Node, known: Collection[str], why: Unknown) -> None:
        """Defer an operator with unknown shapes; ``node`` is its form for the host."""
        self.why = self.why or why
        unknown = [n for n in shape_operands(proto) if n not in known]
        if unknown:
            self.deciding.update(unknown)
            self._put_off(proto)
        else:
            self.first.append(node)
            self.names.update(filter(None, proto.output))

    def _put_off(self, proto: NodeProto) -> None:
        self.nodes.append(proto)
        self.names.update(filter(None, proto.output))

    def reads(self, outputs: Iterable[str]) -> list[str]:
        """Return the earlier values that deferred operators read, and model outputs computed before."""
        read = [n for node in self.nodes for n in model_checks.node_reads(node)]
        read += [n for node in self.first for n in node.inputs if n]
        return list(dict.fromkeys(n for n in (*read, *outputs) if n not in self.names))

    def rest(self, model: Model, known: Mapping[str, Array], inputs: Sequence[str]) -> DeferredModel:
        """Return the deferred model after the walk."""
        why = self.why or Unknown("an output is an input that no device supports", f"graph {model.name}")
        made = {o for node in self.nodes for o in node.output}
        hosted = {n for node in self.first for n in node.inputs}
        known = {n: in_memory(a) if n in hosted else a for n, a in known.items()}
        proto = ModelProto(ir_version=model.proto.ir_version, opset_import=model.proto.opset_import)
        proto.graph.name = model.proto.graph.name
        proto.graph.node.extend(self.nodes)
        proto.graph.output.extend(v for v in model.proto.graph.output if v.name in made)
        # Later shape operands are included if available already: one program less.
        decides = self.deciding | {n for node in self.nodes for n in shape_operands(node)}
        return DeferredModel(model, proto, tuple(self.first), tuple(inputs), frozenset(decides - made), known, why)


def check_decided(proto: NodeProto, known: Collection[str]) -> None:
    """Raise Unknown for an operator with a lowering unless all operands that determine its shape are ``known``."""
    for name in shape_operands(proto):
        if name not in known:
            what = f"{proto.op_type} is compiled for the value of {name!r}, which is run-time data"
            raise Unknown(what, nd.node_title(proto), "run the model as a whole, or make it a constant")


def shape_operands(proto: NodeProto) -> list[str]:
    """Return the names of the operands that determine shapes."""
    own = FUNCTIONS.get((proto.domain, proto.op_type))
    places = op_traits.shape_operands(proto.op_type) if proto.domain in ("", "ai.onnx") else own.deciding if own else ()
    return [proto.input[i] for i in places if i < len(proto.input) and proto.input[i]]


def port_of(name: str, value: Any) -> ModelPort:
    """Return the input port that matches ``value``."""
    if isinstance(value, np.ndarray) and name_of(value.dtype) in KNOWN:
        return ModelPort(name, name_of(value.dtype), value.shape)
    if isinstance(value, np.ndarray):
        return ModelPort(name, STRING, value.shape)
    if isinstance(value, Mapping):
        return ModelPort(name, MAP, ())
    return ModelPort(name, OPTIONAL if value is None else SEQUENCE, ())


def no_tensor(proto: NodeProto) -> Unknown:
    """Return the reason why an operator with non-numeric values runs on the host."""
    return Unknown(
        f"{proto.op_type} reads or computes values that are not numeric tensors", nd.node_title(proto), "run the model as a whole"
    )


def make_type_error(schema: defs.OpSchema, proto: NodeProto, output: str, inferred: TypeProto | None) -> BadInput:
    """Return the error for an output without a static type."""
    kind = inferred.WhichOneof("value") if inferred is not None else None
    dtype = nd.element_type(inferred.tensor_type.elem_type) if inferred is not None else "undefined"
    if kind not in (None, "tensor_type") or dtype == STRING:
        return no_tensor(proto)
    elif dtype not in (*KNOWN, "undefined"):
        what = f"{proto.op_type} gives {output!r} the element type {dtype}, which is not supported"
        hint = f"supported are tensors of {', '.join(KNOWN)}"
    elif not schema.has_type_and_shape_inference_function and (proto.domain, proto.op_type) not in FUNCTIONS:
        what = f"ONNX cannot infer the shape of {output!r}, the result of {proto.op_type}"
        hint = f"export the model without {proto.op_type}"
    else:
        what = f"the shape of {output!r} depends on run-time data"
        hint = f"run the model as a whole, cut it before {proto.op_type}, or make its shape operands constants"
        return Unknown(what, nd.node_title(proto), hint)
    return BadInput(what, nd.node_title(proto), hint)

"""Graph cases: small ONNX models as plain data with input values, and their JSON form."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
from onnx import (
    AttributeProto,
    FunctionProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    helper,
    numpy_helper,
    shape_inference,
)
from onnx.defs import onnx_opset_version

from rammer.frontend.read.model_checks import all_graphs
from rammer.frontend.read.onnx_inference_guards import declare_types

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: Domain of the local functions of a case.
LOCAL: Final = "local"
#: Float operands, by position, that an operator needs as constants.
STEERING: Final[Mapping[str, tuple[int, ...]]] = {
    "Resize": (1, 2, 3),
    "Upsample": (1,),
    "Range": (0, 1, 2),
    "OneHot": (1,),
    "Clip": (1, 2),
    "Pad": (2,),
    "Dropout": (1,),
}


@dataclass(frozen=True)
class Call:
    """A node. Attributes are Python values: numbers, strings, lists of these, arrays."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""

    def proto(self, name: str = "") -> NodeProto:
        """Return the node as a NodeProto."""
        node = NodeProto(op_type=self.op, domain=self.domain, name=name)
        node.input.extend(self.inputs)
        node.output.extend(self.outputs)
        node.attribute.extend(_attribute(k, v) for k, v in sorted(self.attributes.items()))
        return node

    def __str__(self) -> str:
        given = ", ".join(f"{k}={_shown(v)}" for k, v in sorted(self.attributes.items()))
        return f"{', '.join(self.outputs)} = {self.op}{f'<{given}>' if given else ''}({', '.join(self.inputs)})"


@dataclass(frozen=True)
class Function:
    """A local function of one node. Its attributes are the node's. Attributes in ``given`` have defaults; the caller must pass
    the others."""

    name: str
    body: Call
    given: tuple[str, ...] = ()

    def proto(self, opset: int) -> FunctionProto:
        """Return the function as a FunctionProto."""
        result = FunctionProto(name=self.name, domain=LOCAL)
        result.input.extend(n for n in self.body.inputs if n)
        result.output.extend(self.body.outputs)
        result.opset_import.append(helper.make_opsetid("", opset))
        node = replace(self.body, attributes={}).proto(self.name)
        for key, value in sorted(self.body.attributes.items()):
            made = _attribute(key, value)
            node.attribute.append(AttributeProto(name=key, ref_attr_name=key, type=made.type))
            if key in self.given:
                result.attribute_proto.append(made)
            else:
                result.attribute.append(key)
        result.node.append(node)
        return result


@dataclass(frozen=True)
class GraphCase:
    """A model and its input values. ``constants`` are initializers; those in ``sparse`` are stored sparse."""

    opset: int
    inputs: Mapping[str, Array]
    constants: Mapping[str, Array]
    nodes: tuple[Call, ...]
    outputs: tuple[str, ...]
    sparse: frozenset[str] = frozenset()
    functions: tuple[Function, ...] = ()
    name: str = "case"

    def __str__(self) -> str:
        kinds = [f"{n}: {_kind(a)}" for n, a in self.inputs.items()]
        lines = [f"opset {self.opset} ({', '.join(kinds)}) -> ({', '.join(self.outputs)})"]
        lines += [f"  constant {n}: {_shown(a)}{' (sparse)' if n in self.sparse else ''}" for n, a in self.constants.items()]
        lines += [f"  function {f.name}: {f.body} defaults {list(f.given)}" for f in self.functions]
        return "\n".join([*lines, *(f"  {n}" for n in self.nodes)])

    @property
    def reads(self) -> frozenset[str]:
        """All value names that a node reads."""
        return frozenset(n for call in self.nodes for n in call.inputs if n)

    def model(self) -> ModelProto:
        """Return the model as in a user's file: local functions, sparse initializers, types of inputs and outputs only."""
        dense = [numpy_helper.from_array(a, n) for n, a in self.constants.items() if n not in self.sparse]
        graph = helper.make_graph(
            [c.proto(f"n{i}") for i, c in enumerate(self.nodes)],
            self.name,
            [_port(n, a) for n, a in self.inputs.items()],
            [],
            dense,
        )
        graph.sparse_initializer.extend(_sparse(n, self.constants[n]) for n in sorted(self.sparse))
        for name in self.outputs:
            given = self.inputs.get(name, self.constants.get(name))
            graph.output.append(helper.make_empty_tensor_value_info(name) if given is None else _port(name, given))
        imports = [helper.make_opsetid("", self.opset)]
        if self.functions:
            imports.append(helper.make_opsetid(LOCAL, 1))
        model = helper.make_model(graph, opset_imports=imports, ir_version=ir_version(self.opset, bool(self.functions)))
        model.functions.extend(f.proto(self.opset) for f in self.functions)
        return model

    def plain(self) -> GraphCase:
        """Return the case without functions and sparse storage."""
        known = {f.name: f for f in self.functions}
        nodes = tuple(_inlined(c, known[c.op]) if c.domain == LOCAL else c for c in self.nodes)
        return replace(self, nodes=nodes, functions=(), sparse=frozenset())

    def unfolded(self) -> GraphCase:
        """Return the case with float data as inputs, so that nothing is folded and the oracle shares no folding faults."""
        plain = self.plain()
        steering = {n for c in plain.nodes for i, n in enumerate(c.inputs) if c.op in STEERING and i in STEERING[c.op]}
        given = {n: a for n, a in plain.constants.items() if a.dtype.kind == "f" and a.size and n not in steering}
        nodes = []
        for call in plain.nodes:
            value = call.attributes.get("value") if call.op == "Constant" else None
            if isinstance(value, np.ndarray) and value.dtype.kind == "f" and call.outputs[0] not in steering:
                given[call.outputs[0]] = value
            else:
                nodes.append(call)
        constants = {n: a for n, a in plain.constants.items() if n not in given}
        return replace(plain, inputs={**plain.inputs, **given}, constants=constants, nodes=tuple(nodes))

    def typed(self) -> ModelProto:
        """Return the plain model with inferred types, checked strictly by ONNX. The checker's exception is the verdict."""
        made = {*self.inputs, *self.constants, *(o for c in self.nodes for o in c.outputs)}
        if self.reads - made:  # ONNX's inference reads the type of some operands and ends the process if it is absent
            raise ValueError(f"nothing computes {', '.join(sorted(self.reads - made))}")
        inferred = self.inferred(check_type=True, strict_mode=True)
        onnx.checker.check_model(inferred, full_check=True)
        return inferred

    def inferred(self, **strictness: bool) -> ModelProto:
        """Return the plain model with the types that ONNX infers. Raises the exceptions of ONNX's C++ code."""
        model = self.plain().model()
        declare_types(all_graphs(model))
        return shape_inference.infer_shapes(model, data_prop=True, **strictness)

    def text(self, **extra: Any) -> str:
        """Return the JSON text; ``extra`` entries (settings, a signature) are stored with the model."""
        return _lines(self.data(**extra))

    def data(self, **extra: Any) -> dict[str, Any]:
        """Return the case as JSON data."""
        return {
            **extra,
            "opset": self.opset,
            "inputs": {n: _data(a) for n, a in self.inputs.items()},
            "constants": {n: _data(a) for n, a in self.constants.items()},
            "sparse": sorted(self.sparse),
            "functions": [{"name": f.name, "body": _call(f.body), "given": list(f.given)} for f in self.functions],
            "nodes": [_call(c) for c in self.nodes],
            "outputs": list(self.outputs),
            "name": self.name,
        }

    @staticmethod
    def parse(text: str) -> tuple[GraphCase, dict[str, Any]]:
        """Parse the result of ``text`` into the case and the extra entries."""
        data = json.loads(text)
        functions = tuple(Function(f["name"], _parsed(f["body"]), tuple(f["given"])) for f in data.pop("functions"))
        case = GraphCase(
            data.pop("opset"),
            {n: _array(d) for n, d in data.pop("inputs").items()},
            {n: _array(d) for n, d in data.pop("constants").items()},
            tuple(_parsed(c) for c in data.pop("nodes")),
            tuple(data.pop("outputs")),
            frozenset(data.pop("sparse")),
            functions,
            data.pop("name"),
        )
        return case, data

    @staticmethod
    def load(path: Path) -> tuple[GraphCase, dict[str, Any]]:
        """Read a file with ``parse``."""
        return GraphCase.parse(path.read_text())


def ir_version(opset: int, functions: bool = False) -> int:
    """Return the oldest IR version that supports the opset, functions and scalars."""
    known = {v[2]: v[1] for v in helper.VERSION_TABLE if v[2] <= onnx_opset_version()}
    return max(int(known.get(opset, 10)), 8 if functions else 4)


def _inlined(call: Call, function: Function) -> Call:
    """Return the node equivalent to a call of a local function."""
    return Call(function.body.op, call.inputs, call.outputs, {**function.body.attributes, **call.attributes})


def _port(name: str, value: Array) -> Any:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


def _sparse(name: str, value: Array) -> SparseTensorProto:
    flat = value.ravel()
    places = np.flatnonzero(flat).astype(np.int64)
    values = numpy_helper.from_array(flat[places], name)
    return helper.make_sparse_tensor(values, numpy_helper.from_array(places, f"{name}_places"), value.shape)


def _attribute(name: str, value: Any) -> AttributeProto:
    if isinstance(value, np.ndarray):
        return helper.make_attribute(name, numpy_helper.from_array(value))
    if isinstance(value, SparseTensorProto):
        return helper.make_attribute(name, value)
    if isinstance(value, (list, tuple)):
        return helper.make_attribute(name, list(value), attr_type=None if value else AttributeProto.INTS)
    return helper.make_attribute(name, value)


# Text ----------------------------------------------------------------------------------------------------------


def _kind(value: Array) -> str:
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{_kind(value)} {value.ravel().tolist()}" if value.size <= 8 else _kind(value)
    return repr(value)


def _data(value: Array) -> dict[str, Any]:
    values = value.astype(np.float64).ravel().tolist() if value.dtype.kind == "f" else value.ravel().tolist()
    return {"dtype": str(value.dtype), "shape": list(value.shape), "values": [plain(v) for v in values]}


def plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _array(data: Mapping[str, Any]) -> Array:
    values = [float(v) if isinstance(v, str) else v for v in data["values"]]
    return np.array(values, dtype=data["dtype"]).reshape(data["shape"])


def _call(call: Call) -> dict[str, Any]:
    attributes = {k: _data(v) if isinstance(v, np.ndarray) else v for k, v in call.attributes.items()}
    return {
        "op": call.op,
        "inputs": list(call.inputs),
        "outputs": list(call.outputs),
        "attributes": attributes,
        "domain": call.domain,
    }


def _parsed(data: Mapping[str, Any]) -> Call:
    attributes = {k: _array(v) if isinstance(v, dict) else v for k, v in data["attributes"].items()}
    return Call(data["op"], tuple(data["inputs"]), tuple(data["outputs"]), attributes, data["domain"])


def _lines(data: Mapping[str, Any]) -> str:
    """Format JSON with one line per entry, and per entry of nested lists and tables."""
    parts = []
    for key, value in data.items():
        if isinstance(value, dict) and value:
            inner = ",\n  ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            parts.append(f"{json.dumps(key)}: {{\n  {inner}}}")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            parts.append(f"{json.dumps(key)}: [\n  " + ",\n  ".join(map(json.dumps, value)) + "]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


__all__ = ["LOCAL", "Array", "Call", "Function", "GraphCase", "TensorProto", "ir_version"]

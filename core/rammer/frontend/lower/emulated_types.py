"""Emulation of element types without arithmetic (``ir.formats``): integers carry their codes, on every device, after binding.

Operators that only move elements move codes. All other operators get numbers in a wider type. Their results are rounded to the
format, operator by operator, as ONNX defines. A Cast is only this rounding. Later steps and devices see only types with
arithmetic; inputs and outputs of a model keep their formats (``Value.outside``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
import onnx

from rammer.errors import BadInput
from rammer.frontend.op_traits import Trait, operators
from rammer.frontend.read import node_protos as nd
from rammer.ir.formats import FORMATS, FloatFormat, IntegerFormat, carrier_dtype, to_carrier
from rammer.ir.graph import Graph, Node, Value
from rammer.ir.names import make_identifier
from rammer.ir.types import TensorType

#: The domain of Decode and Encode, which ``lower.operators.stored`` lowers; models cannot name it.
DOMAIN: Final = "rammer"
#: Attributes that name an element type.
_NAMING: Final = ("to", "dtype", "output_dtype", "precision", "stash_type", "softmax_precision")
_CODES: Final[Mapping[int, str]] = {
    code: name for code in onnx.TensorProto.DataType.values() if (name := nd.element_type(code)) in FORMATS
}
_Rule: TypeAlias = "Callable[[_Carrying, Node], None]"


def emulate_formats(graph: Graph) -> Graph:
    """Return ``graph`` without values of ``FORMATS``, unchanged if all its types are ordinary. Raise BadInput for an operator
    that does not support these formats."""
    if not any(t.dtype in FORMATS for t in graph.types.values()):
        return graph
    return _Carrying(graph).rewritten()


class _Carrying:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.types = {n: TensorType(carrier_dtype(t.dtype), t.shape) for n, t in graph.types.items()}
        self.constants = {n: to_carrier(a) for n, a in graph.constants.items()}
        self.taken = {*graph.types, *graph.constants}
        #: Value of a format -> its decoded numbers.
        self.numbers: dict[str, str] = {}
        self.nodes: list[Node] = []

    def rewritten(self) -> Graph:
        """Return the graph with carrier integers."""
        for node in self.graph.nodes:
            self._step(node)
        return replace(
            self.graph,
            inputs=tuple(map(self._carry_port, self.graph.inputs)),
            outputs=tuple(map(self._carry_port, self.graph.outputs)),
            nodes=tuple(self.nodes),
            types=self.types,
            constants=self.constants,
        )

    def _carry_port(self, value: Value) -> Value:
        kind = value.type.dtype
        return replace(value, type=self.types[value.name], outside=kind) if kind in FORMATS else value

    def format(self, name: str) -> str:
        """Return the format of a value, or "" if its type is ordinary."""
        dtype = self.graph.types[name].dtype if name else ""
        return dtype if dtype in FORMATS else ""

    def _step(self, node: Node) -> None:
        values = [n for n in (*node.inputs, *node.outputs) if n]
        if not any(map(self.format, values)):
            self.nodes.append(node)
            return
        if nd.body_graphs(node):
            formats = tuple(map(self.format, node.inputs))
            bodies = {k: replace(v, formats=formats) if isinstance(v, nd.SubGraph) else v for k, v in node.attributes.items()}
            self.nodes.append(replace(node, attributes=bodies))
            return
        if node.declared:
            kinds = ", ".join(dict.fromkeys(filter(None, map(self.format, values))))
            raise BadInput(
                f"{node.op} has operands of {kinds}, which a plugin's operator does not take",
                f"node {node.name} ({node.op})",
                "put a Cast to float32 before it",
            )
        rule = _RULES.get(node.op, _Carrying.compute) if not node.domain else _Carrying.compute
        rule(self, node)

    # --- helpers of the rules ------------------------------------------------------------------

    def add(self, op: str, inputs: Iterable[str], kind: TensorType, attributes: Mapping[str, Any], like: Node, **to: Any) -> str:
        """Add a node with one result and return the result's name: ``to["output"]``, or a name derived from ``like``."""
        inputs = tuple(inputs)
        result = str(to.get("output") or make_identifier(f"{next(o for o in like.outputs if o)}_{op.lower()}", self.taken))
        self.types[result] = kind
        domain, version = (DOMAIN, 1) if op in ("Decode", "Encode") else ("", int(to.get("version", 13)))
        self.nodes.append(Node(op, inputs, (result,), attributes, like.name, domain, version))
        return result

    def constant(self, value: np.ndarray, hint: str) -> str:
        """Add a constant and return its name."""
        name = make_identifier(hint, self.taken)
        self.constants[name], self.types[name] = value, TensorType(str(value.dtype), value.shape)
        return name

    def number(self, name: str, node: Node) -> str:
        """Return the decoded numbers of a value, decoded once."""
        kind = self.format(name)
        if not kind:
            return name
        if name not in self.numbers:
            wide = TensorType(FORMATS[kind].wide, self.types[name].shape)
            result = make_identifier(f"{name}_{wide.dtype}", self.taken)
            self.numbers[name] = self.add("Decode", (name,), wide, {"format": kind}, node, output=result)
        return self.numbers[name]

    def encode(self, value: str, result: str, node: Node, **attributes: Any) -> None:
        """Add a node that encodes numbers into ``result``."""
        kind = self.format(result)
        self.add("Encode", (value,), self.types[result], {"format": kind, **attributes}, node, output=result)

    # --- the rules ----------------------------------------------------------------------------

    def compute(self, node: Node) -> None:
        """Decode the inputs, compute, and encode the results."""
        inputs = tuple(self.number(n, node) for n in node.inputs)
        made = {o: self._numbers_of(o) for o in node.outputs if self.format(o)}
        attributes = {k: _widen_attribute(k, v) for k, v in node.attributes.items()}
        outputs = tuple(made.get(o, o) for o in node.outputs)
        self.nodes.append(replace(node, inputs=inputs, outputs=outputs, attributes=attributes))
        for result, value in made.items():
            self.encode(value, result, node)

    def _numbers_of(self, result: str) -> str:
        """Return a name for the numbers of a result before rounding."""
        wide = FORMATS[self.format(result)].wide
        name = make_identifier(f"{result}_{wide}", self.taken)
        self.types[name] = TensorType(wide, self.types[result].shape)
        return name

    def move(self, node: Node) -> None:
        """Move codes like any other elements."""
        attributes = {k: to_carrier(v) if isinstance(v, np.ndarray) else v for k, v in node.attributes.items()}
        self.nodes.append(replace(node, attributes=attributes))

    def cast(self, node: Node) -> None:
        """Round numbers of any type to the result's format."""
        source, result = self.number(node.inputs[0], node), node.outputs[0]
        if self.format(result):
            given = {k: v for k, v in node.attributes.items() if k in ("saturate", "round_mode")}
            self.encode(source, result, node, **given)
            return
        target = nd.element_code(np.dtype(self.types[result].dtype))
        self.add("Cast", (source,), self.types[result], {"to": target}, node, output=result)

    def bitcast(self, node: Node) -> None:
        """Reinterpret bits: codes are the bits already."""
        target = nd.element_code(np.dtype(self.types[node.outputs[0]].dtype))
        self.nodes.append(replace(node, attributes={"to": target}))

    def quantize(self, node: Node) -> None:
        """Quantise: clip integers to fewer bits; round quotients of float formats."""
        x, scale = (self.number(n, node) for n in node.inputs[:2])
        zero = node.inputs[2] if len(node.inputs) > 2 else ""
        result = node.outputs[0]
        kind = FORMATS.get(self.format(result))
        if kind is None:
            self.compute(node)
        elif isinstance(kind, IntegerFormat):
            self._quantize_integer(node, (x, scale, self.number(zero, node)), kind)
        else:
            quotient = self._apply_scale("Div", x, scale, node)
            if zero and not self._is_zero(zero):
                spread = self._broadcast_scales(self.number(zero, node), quotient, node)
                quotient = self.add("Add", (quotient, spread), self.types[quotient], {}, node, version=14)
            self.encode(quotient, result, node, saturate=node.attributes.get("saturate", 1))

    def _quantize_integer(self, node: Node, operands: tuple[str, ...], kind: IntegerFormat) -> None:
        """Quantise to 8 bits, then clip: saturating twice equals saturating to fewer bits at once."""
        wide = np.dtype(kind.wide)
        attributes = {**node.attributes, "output_dtype": nd.element_code(wide)}
        attributes = {k: _widen_attribute(k, v) for k, v in attributes.items()}
        made = self._numbers_of(node.outputs[0])
        inputs = operands if operands[2] else operands[:2]
        self.nodes.append(replace(node, inputs=inputs, outputs=(made,), attributes=attributes))
        ends = [self.constant(np.asarray(end, wide), f"{made}_end") for end in kind.ends]
        cut = self.add("Clip", (made, *ends), self.types[made], {}, node)
        self.encode(cut, node.outputs[0], node)

    def dequantize(self, node: Node) -> None:
        """Dequantise integers like those of 8 bits; float formats by a product."""
        x, result = node.inputs[0], node.outputs[0]
        zero = node.inputs[2] if len(node.inputs) > 2 else ""
        if not isinstance(FORMATS.get(self.format(x)), FloatFormat):
            self.compute(node)
            return
        moved, scale = self.number(x, node), self.number(node.inputs[1], node)
        if zero and not self._is_zero(zero):
            spread = self._broadcast_scales(self.number(zero, node), moved, node)
            moved = self.add("Sub", (moved, spread), self.types[moved], {}, node, version=14)
        product = self._apply_scale("Mul", moved, scale, node)
        if self.format(result):
            self.encode(product, result, node)
        else:
            target = nd.element_code(np.dtype(self.types[result].dtype))
            self.add("Cast", (product,), self.types[result], {"to": target}, node, output=result)

    def _is_zero(self, name: str) -> bool:
        value = self.graph.constants.get(name)
        return value is not None and not np.any(value.astype(np.float32))

    def _apply_scale(self, op: str, x: str, scale: str, node: Node) -> str:
        """Return ``op(x, scale)`` in float32, with each element's block scale."""
        wide = TensorType("float32", self.types[x].shape)
        spread = self._broadcast_scales(scale, x, node)
        operands = [n if self.types[n].dtype == "float32" else self._cast_to_float32(n, node) for n in (x, spread)]
        return self.add(op, operands, wide, {}, node, version=14)

    def _cast_to_float32(self, name: str, node: Node) -> str:
        return self.add("Cast", (name,), TensorType("float32", self.types[name].shape), {"to": onnx.TensorProto.FLOAT}, node)

    def _broadcast_scales(self, values: str, x: str, node: Node) -> str:
        """Return scales or zero points (per tensor, per index of an axis or per block) broadcast to ``x``."""
        have, shape = self.types[values].shape, self.types[x].shape
        if not have or (have == (1,) and not node.attributes.get("block_size")):
            return self._add_shape_op("Reshape", values, (), node)
        axis, block = int(node.attributes.get("axis", 1)) % len(shape), int(node.attributes.get("block_size", 0))
        if not block:
            if have != (shape[axis],):
                raise self._make_shape_error(have, shape, node)
            return self._add_shape_op("Reshape", values, tuple(n if d == axis else 1 for d, n in enumerate(shape)), node)
        blocks = -(-shape[axis] // block)
        if have != (*shape[:axis], blocks, *shape[axis + 1 :]):
            raise self._make_shape_error(have, shape, node)
        expanded = self._add_shape_op("Reshape", values, (*have[: axis + 1], 1, *have[axis + 1 :]), node)
        repeated = self._add_shape_op("Expand", expanded, (*have[: axis + 1], block, *have[axis + 1 :]), node)
        whole = self._add_shape_op("Reshape", repeated, (*have[:axis], blocks * block, *have[axis + 1 :]), node)
        if blocks * block == shape[axis]:
            return whole
        ends = [self.constant(np.array([n], np.int64), f"{whole}_end") for n in (0, shape[axis], axis)]
        return self.add("Slice", (whole, *ends), TensorType(self.types[whole].dtype, shape), {}, node)

    def _add_shape_op(self, op: str, name: str, shape: tuple[int, ...], node: Node) -> str:
        target = self.constant(np.array(shape, np.int64), f"{name}_shape")
        return self.add(op, (name, target), TensorType(self.types[name].dtype, shape), {}, node)

    def _make_shape_error(self, have: tuple[int, ...], shape: tuple[int, ...], node: Node) -> BadInput:
        return BadInput(
            f"{node.op} of a tensor of {list(shape)} has scales or zero points of {list(have)}",
            f"node {node.name} ({node.op})",
            "check the model with onnx.checker, and the shapes given with --shape",
        )


def _widen_attribute(name: str, value: Any) -> Any:
    """Return an attribute that names a format as the wide type of that format."""
    if name not in _NAMING or value not in _CODES:
        return value
    return nd.element_code(np.dtype(FORMATS[_CODES[value]].wide))


_RULES: Final[Mapping[str, _Rule]] = {
    **dict.fromkeys(operators(Trait.MOVES | Trait.FILLS), _Carrying.move),
    "Cast": _Carrying.cast,
    "CastLike": _Carrying.cast,
    "BitCast": _Carrying.bitcast,
    "QuantizeLinear": _Carrying.quantize,
    "DequantizeLinear": _Carrying.dequantize,
}

"""Emulation of element types without arithmetic (``ir.formats``): integers carry their codes, on every device, after binding.

Operators that only move elements move codes. All other operators get numbers in a wider type. Their results are rounded to the
format, operator by operator, as ONNX defines. A Cast is only this rounding. Later steps and devices see only types with
arithmetic; inputs and outputs of a model keep their formats (``Value.outside``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
import onnx

from rammer.errors import BadInput
from rammer.frontend.op_traits import Trait, operators
from rammer.frontend.read import node_protos as nd
from rammer.ir.formats import FORMATS, FloatFormat, IntegerFormat, carrier_dtype, to_carrier
from rammer.ir.graph import Graph, Node
from rammer.ir.graph_rewriter import GraphRewriter
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


class _Carrying(GraphRewriter):
    """The rewriter of a graph to carriers. ``formats`` are the types before; ``numbers`` maps values of a format to their decoded
    numbers."""

    def __init__(self, graph: Graph) -> None:
        types = {n: TensorType(carrier_dtype(t.dtype), t.shape) for n, t in graph.types.items()}
        ports = [
            tuple(replace(v, type=types[v.name], outside=v.type.dtype) if v.type.dtype in FORMATS else v for v in side)
            for side in (graph.inputs, graph.outputs)
        ]
        constants = {n: to_carrier(a) for n, a in graph.constants.items()}
        super().__init__(replace(graph, inputs=ports[0], outputs=ports[1], types=types, constants=constants))
        self.formats, self.given, self.numbers = graph.types, graph.constants, dict[str, str]()

    def format(self, name: str) -> str:
        """Return the format of a value, or "" if its type is ordinary."""
        dtype = self.formats[name].dtype if name else ""
        return dtype if dtype in FORMATS else ""

    def rule(self, node: Node) -> bool:
        """Apply the operator's rule to a node with values of formats. Pass the formats to its bodies."""
        values = [n for n in (*node.inputs, *node.outputs) if n]
        if not any(map(self.format, values)):
            return False
        if nd.body_graphs(node):
            formats = tuple(map(self.format, node.inputs))
            bodies = {k: replace(v, formats=formats) if isinstance(v, nd.SubGraph) else v for k, v in node.attributes.items()}
            self.append(replace(node, attributes=bodies))
            return True
        if node.declared:
            kinds = ", ".join(dict.fromkeys(filter(None, map(self.format, values))))
            raise BadInput(
                f"{node.op} has operands of {kinds}, which a plugin's operator does not take",
                f"node {node.name} ({node.op})",
                "put a Cast to float32 before it",
            )
        rule = _RULES.get(node.op, _Carrying.compute) if not node.domain else _Carrying.compute
        rule(self, node)
        return True

    # --- helpers of the rules ------------------------------------------------------------------

    def add(self, op: str, inputs: Sequence[str], kind: TensorType, like: Node, result: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its result, by default derived from ``like``."""
        result = result or self.new_value(f"{next(o for o in like.outputs if o)}_{op.lower()}", kind)
        domain, version = (DOMAIN, 1) if op in ("Decode", "Encode") else ("", 14 if op in ("Add", "Sub", "Mul", "Div") else 13)
        self.append(Node(op, tuple(inputs), (result,), attributes, like.name, domain, version))
        return result

    def number(self, name: str, node: Node) -> str:
        """Return the decoded numbers of a value, decoded once."""
        kind = self.format(name)
        if not kind:
            return name
        if name not in self.numbers:
            result = self._numbers_of(name)
            self.numbers[name] = self.add("Decode", (name,), self.types[result], node, result, format=kind)
        return self.numbers[name]

    def encode(self, value: str, result: str, node: Node, **attributes: Any) -> None:
        """Add a node that encodes numbers into ``result``."""
        kind = self.format(result)
        self.add("Encode", (value,), self.types[result], node, result, format=kind, **attributes)

    # --- the rules ----------------------------------------------------------------------------

    def compute(self, node: Node) -> None:
        """Decode the inputs, compute, and encode the results."""
        inputs = tuple(self.number(n, node) for n in node.inputs)
        made = {o: self._numbers_of(o) for o in node.outputs if self.format(o)}
        attributes = {k: _widen_attribute(k, v) for k, v in node.attributes.items()}
        outputs = tuple(made.get(o, o) for o in node.outputs)
        self.append(replace(node, inputs=inputs, outputs=outputs, attributes=attributes))
        for result, value in made.items():
            self.encode(value, result, node)

    def _numbers_of(self, result: str) -> str:
        """Return a name for the numbers of a value of a format."""
        wide = FORMATS[self.format(result)].wide
        return self.new_value(f"{result}_{wide}", TensorType(wide, self.types[result].shape))

    def move(self, node: Node) -> None:
        """Move codes like any other elements."""
        attributes = {k: to_carrier(v) if isinstance(v, np.ndarray) else v for k, v in node.attributes.items()}
        self.append(replace(node, attributes=attributes))

    def cast(self, node: Node) -> None:
        """Round numbers of any type to the result's format."""
        source, result = self.number(node.inputs[0], node), node.outputs[0]
        if self.format(result):
            given = {k: v for k, v in node.attributes.items() if k in ("saturate", "round_mode")}
            self.encode(source, result, node, **given)
            return
        self._cast(source, node, result)

    def bitcast(self, node: Node) -> None:
        """Reinterpret bits: codes are the bits already."""
        target = nd.element_code(np.dtype(self.types[node.outputs[0]].dtype))
        self.append(replace(node, attributes={"to": target}))

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
                quotient = self.add("Add", (quotient, spread), self.types[quotient], node)
            self.encode(quotient, result, node, saturate=node.attributes.get("saturate", 1))

    def _quantize_integer(self, node: Node, operands: tuple[str, ...], kind: IntegerFormat) -> None:
        """Quantise to 8 bits, then clip: saturating twice equals saturating to fewer bits at once."""
        wide = np.dtype(kind.wide)
        attributes = {**node.attributes, "output_dtype": nd.element_code(wide)}
        attributes = {k: _widen_attribute(k, v) for k, v in attributes.items()}
        made = self._numbers_of(node.outputs[0])
        inputs = operands if operands[2] else operands[:2]
        self.append(replace(node, inputs=inputs, outputs=(made,), attributes=attributes))
        ends = [self.add_constant(f"{made}_end", np.asarray(end, wide)) for end in kind.ends]
        cut = self.add("Clip", (made, *ends), self.types[made], node)
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
            moved = self.add("Sub", (moved, spread), self.types[moved], node)
        product = self._apply_scale("Mul", moved, scale, node)
        if self.format(result):
            self.encode(product, result, node)
        else:
            self._cast(product, node, result)

    def _is_zero(self, name: str) -> bool:
        value = self.given.get(name)
        return value is not None and not np.any(value.astype(np.float32))

    def _apply_scale(self, op: str, x: str, scale: str, node: Node) -> str:
        """Return ``op(x, scale)`` in float32, with each element's block scale."""
        wide = TensorType("float32", self.types[x].shape)
        spread = self._broadcast_scales(scale, x, node)
        operands = [n if self.types[n].dtype == "float32" else self._cast(n, node) for n in (x, spread)]
        return self.add(op, operands, wide, node)

    def _cast(self, name: str, node: Node, result: str = "") -> str:
        """Cast to the type of ``result``, by default to float32."""
        kind = self.types[result] if result else TensorType("float32", self.types[name].shape)
        return self.add("Cast", (name,), kind, node, result, to=nd.element_code(np.dtype(kind.dtype)))

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
        ends = [self.add_constant(f"{whole}_end", np.array([n], np.int64)) for n in (0, shape[axis], axis)]
        return self.add("Slice", (whole, *ends), TensorType(self.types[whole].dtype, shape), node)

    def _add_shape_op(self, op: str, name: str, shape: tuple[int, ...], node: Node) -> str:
        target = self.add_constant(f"{name}_shape", np.array(shape, np.int64))
        return self.add(op, (name, target), TensorType(self.types[name].dtype, shape), node)

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

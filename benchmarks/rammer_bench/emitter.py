"""Translation of a PeerGraph to a torch module: a traversal of its operators that tracks shapes. The translations of the
operators are in ``layers`` and ``to_torch``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from rammer.errors import BadInput, DeviceUnavailable
from rammer_bench.graph import Array, PeerGraph, PeerNode, evaluated

#: A function that emits one operator: a value, or one for each output.
Emit: TypeAlias = "Callable[[Emitter, PeerNode], Any]"


def load_torch() -> Any:
    """Return the torch package. Raises DeviceUnavailable if it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError as problem:
        raise DeviceUnavailable("torch is not installed", hint="pip install torch") from problem


class Emitter:
    """An emitter of operators by the entries of ``table``, which also runs the calls on meta tensors (shapes only)."""

    def __init__(self, source: PeerGraph, inputs: Mapping[str, tuple[str, tuple[int, ...]]], table: Mapping[str, Emit]) -> None:
        self.torch = load_torch()
        self.fx = importlib.import_module("torch.fx")
        self.F = importlib.import_module("torch.nn.functional")
        self.source, self.inputs, self.table = source, inputs, table
        self.root = self.torch.nn.Module()
        self.graph = self.fx.Graph()
        self.values: dict[str, Any] = {}
        self.metas: dict[Any, Any] = {}
        self.kept: dict[tuple[str, bool], Any] = {}

    def module(self) -> Any:
        """Emit all operators and compile them to Python."""
        torch = self.torch
        for number, name in enumerate(self.source.inputs):
            dtype, shape = self.inputs[name]
            node = self.graph.placeholder(f"input_{number}")
            self.metas[node] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            self.values[name] = node
        for node in self.source.nodes:
            if self._folded(node):
                continue
            emit = self.table.get(node.op)
            if emit is None:
                raise BadInput(f"the torch peer has no translation of {node.op}", where=f"value {node.outputs[0]}")
            result = emit(self, node)
            names = [o for o in node.outputs if o]
            if isinstance(result, tuple):
                self.values.update(zip(names, result, strict=True))
            else:  # Dropout's mask is the one output that the peers do not compute
                self.values[names[0]] = result
        self.graph.output(tuple(self.value(name) for name in self.source.outputs))
        made = self.fx.GraphModule(self.root, self.graph, "Peer")
        return made.eval().requires_grad_(False)

    def _folded(self, node: PeerNode) -> bool:
        """Return True if the operator depends only on static shapes; its results become constants."""
        known = self.source.constants
        if node.op == "Shape" and node.inputs[0] not in known:
            extents = self.shape(self.values[node.inputs[0]])[node.attr("start", 0) : node.attr("end")]
            known[node.outputs[0]] = np.array(extents, np.int64)
        elif node.inputs and all(n in known for n in node.inputs if n):
            known.update(evaluated(node, known, self.source.opset))
        else:
            return False
        return True

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Emit a call of ``function`` on values."""
        node = self.graph.call_function(function, args, options)
        self.metas[node] = function(*map(self._meta, args), **options)
        return node

    def _meta(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._meta(v) for v in value)
        return self.metas.get(value, value) if isinstance(value, self.fx.Node) else value

    def shape(self, value: Any) -> tuple[int, ...]:
        """Return the static shape of a value."""
        return tuple(self.metas[value].shape)

    def value(self, name: str) -> Any:
        """Return a tensor, a weight, or a Python number for a float constant of rank 0."""
        if name in self.values:
            return self.values[name]
        array = self.source.constants[name]
        if array.ndim == 0 and array.dtype.kind == "f":
            return float(array)
        return self.weight(array, name)

    def tensor(self, name: str) -> Any:
        """Return a tensor or a weight of any rank."""
        return self.values[name] if name in self.values else self.weight(self.source.constants[name], name)

    def weight(self, array: Array, name: str, transposed: bool = False) -> Any:
        """Return the buffer of a weight, created once."""
        key = (name, transposed)
        if key not in self.kept:
            attribute = f"w{len(self.kept)}"
            tensor = self.torch.from_numpy(np.require(array.T if transposed else array, requirements=("C", "W")))
            self.root.register_buffer(attribute, tensor)
            self.kept[key] = self.graph.get_attr(attribute)
            self.metas[self.kept[key]] = tensor.to("meta")
        return self.kept[key]

    def static(self, node: PeerNode, index: int) -> list[int] | None:
        """Return an integer operand that must be constant, or None if it is absent."""
        if len(node.inputs) <= index or not node.inputs[index]:
            return None
        if node.inputs[index] not in self.source.constants:
            raise BadInput(f"the torch peer needs a constant operand {index} of {node.op}", where=node.outputs[0])
        return [int(v) for v in np.atleast_1d(self.source.constants[node.inputs[index]])]


def operands(e: Emitter, node: PeerNode) -> list[Any]:
    """Return the operands as values; None for those that are omitted."""
    return [e.value(n) if n else None for n in node.inputs]

"""The open models of the zoo as torch modules with dynamic lengths, for ``torch.compile(dynamic=True)``.

``rammer_bench.to_torch`` writes straight-line code for fixed shapes. This module interprets the nodes in every call, with torch's
sizes, so that a tracer treats them as symbols. The nodes are those of the peer graph, fused by hand as far as torch has the fused
operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import onnx

from rammer.errors import BadInput
from rammer_bench.graph import PeerNode, peer_graph
from rammer_bench.to_torch import load_torch

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Emit: TypeAlias = "Callable[[Any, PeerNode, list[Any]], Any]"


def open_module(model: onnx.ModelProto) -> Any:
    """Return a torch module with the model's inputs in order. Raises BadInput for an uncovered operator."""
    torch, graph = load_torch(), peer_graph(model)
    missing = sorted({n.op for n in graph.nodes} - {*_EMIT})
    if missing:
        raise BadInput(f"the open torch peer has no {', '.join(missing)}", where=graph.name)
    floating = {n: a for n, a in graph.constants.items() if np.issubdtype(a.dtype, np.floating)}
    numbers = {n: a.tolist() for n, a in graph.constants.items() if n not in floating}
    names = {n: f"c{i}" for i, n in enumerate(floating)}

    class Open(torch.nn.Module):  # type: ignore[misc]
        """A module that interprets the nodes."""

        def __init__(self) -> None:
            super().__init__()
            for name, array in floating.items():
                self.register_buffer(names[name], torch.from_numpy(np.array(array)))

        def forward(self, *inputs: Any) -> tuple[Any, ...]:
            values: dict[str, Any] = {**numbers, **{n: getattr(self, b) for n, b in names.items()}}
            values.update(zip(graph.inputs, inputs, strict=True))
            for node in graph.nodes:
                made = _EMIT[node.op](torch, node, [values[i] if i else None for i in node.inputs])
                outputs = made if isinstance(made, tuple) else (made,)
                values.update(zip(node.outputs, outputs, strict=False))
            return tuple(values[o] for o in graph.outputs)

    return Open()


def feeds_of(model: onnx.ModelProto, inputs: Mapping[str, Array], place: Any) -> list[Any]:
    """Return ``inputs`` in the model's order on a torch device."""
    torch = load_torch()
    return [torch.from_numpy(np.ascontiguousarray(inputs[i.name])).to(place) for i in model.graph.input]


def _gather(torch: Any, node: PeerNode, x: list[Any]) -> Any:
    table, index = x
    if isinstance(index, list):  # a length in a list of sizes
        return table.narrow(node.attr("axis", 0), index[0], 1)
    return torch.nn.functional.embedding(index, table)


def _shape(torch: Any, node: PeerNode, x: list[Any]) -> list[Any]:
    return list(x[0].shape)[node.attr("start", 0) : node.attr("end")]


def _range(torch: Any, node: PeerNode, x: list[Any]) -> Any:
    return torch.arange(*x, device="cuda" if torch.cuda.is_available() else "cpu")


def _reshape(torch: Any, node: PeerNode, x: list[Any]) -> Any:
    return x[0].reshape([x[0].shape[i] if n == 0 else n for i, n in enumerate(x[1])])


def _split(torch: Any, node: PeerNode, x: list[Any]) -> tuple[Any, ...]:
    return tuple(x[0].chunk(len(node.outputs), node.attr("axis", 0)))


def _layer_norm(torch: Any, node: PeerNode, x: list[Any]) -> Any:
    return torch.nn.functional.layer_norm(x[0], x[1].shape, x[1], x[2], node.attr("epsilon", 1e-5))


def _attention(torch: Any, node: PeerNode, x: list[Any]) -> Any:
    q, k, v = x
    return torch.nn.functional.scaled_dot_product_attention(q, k.transpose(-1, -2), v, scale=node.attr("scale"))


def _conv(torch: Any, node: PeerNode, x: list[Any]) -> Any:
    strides, pads = list(node.attr("strides", [1, 1])), list(node.attr("pads", [0] * 4))
    return torch.nn.functional.conv2d(*x, strides, pads[:2], 1, node.attr("group", 1))


def _pool(torch: Any, node: PeerNode, x: list[Any]) -> Any:
    kernel, strides, pads = (list(node.attr(n)) for n in ("kernel_shape", "strides", "pads"))
    return torch.nn.functional.max_pool2d(x[0], kernel, strides, pads[:2])


def _gelu(torch: Any, node: PeerNode, x: list[Any]) -> Any:
    form = node.attr("approximate", b"none")
    return torch.nn.functional.gelu(x[0], approximate=form.decode() if isinstance(form, bytes) else form)


_EMIT: Final[dict[str, Emit]] = {
    "Add": lambda torch, node, x: x[0] + x[1],
    "Attention": _attention,
    "Concat": lambda torch, node, x: torch.cat(x, node.attr("axis")),
    "Conv": _conv,
    "Flatten": lambda torch, node, x: torch.flatten(x[0], node.attr("axis", 1)),
    "Gather": _gather,
    "Gelu": _gelu,
    "Gemm": lambda torch, node, x: torch.nn.functional.linear(x[0], x[1], x[2]),  # transB = 1, as the zoo writes it
    "GlobalAveragePool": lambda torch, node, x: x[0].mean((2, 3), keepdim=True),
    "LayerNormalization": _layer_norm,
    "Linear": lambda torch, node, x: torch.nn.functional.linear(x[0], x[1].t(), x[2]),
    "MatMul": lambda torch, node, x: x[0] @ x[1],
    "MaxPool": _pool,
    "Mul": lambda torch, node, x: x[0] * x[1],
    "Range": _range,
    "Relu": lambda torch, node, x: x[0].relu(),
    "Reshape": _reshape,
    "Shape": _shape,
    "Split": _split,
    "Squeeze": lambda torch, node, x: x[0][0] if isinstance(x[0], list) else x[0].squeeze(),
    "Transpose": lambda torch, node, x: x[0].permute(node.attr("perm")),
}

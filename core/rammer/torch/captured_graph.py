"""The backend ``rammer`` of ``torch.compile``: it compiles each graph that torch's dynamo captures.

Dynamo passes parameters and buffers as inputs of a graph. They become constants. A graph whose parameters are replaced or
written to is compiled again for the new values."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from rammer.errors import BadInput
from rammer.torch.compiled_module import request_of
from rammer.torch.onnx_form import export_module, to_onnx, written_buffers, written_inputs
from rammer.torch.tensor_calls import TensorProgram, device_for

#: Sets of parameters with a program for one graph: a graph may serve several equal layers.
MOST_SETS: Final = 64


def capture(graph: Any, examples: Sequence[Any], options: dict[str, Any]) -> CapturedGraph:
    """Compile a graph for its example inputs; see ``rammer.torch.backend``."""
    given = [v for v in examples if isinstance(v, torch.Tensor)]
    if torch.is_grad_enabled() and any(v.requires_grad for v in given):
        raise BadInput("rammer compiles for inference, but torch records gradients", hint="call the module under torch.no_grad()")
    device = options.pop("device", "")
    request_of(options, {})
    return CapturedGraph(graph, examples, device or device_for(given), options)


class CapturedGraph:
    """A graph of dynamo: called with its inputs, it runs the program for its parameters."""

    def __init__(self, graph: Any, examples: Sequence[Any], device: str, options: Mapping[str, Any]) -> None:
        self.graph, self.device, self.options = graph, device, options
        holders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        self._holders = {n.name: at for at, n in enumerate(holders)}
        self._frozen = [at for at, n in enumerate(holders) if _is_parameter(n, examples[at])]
        self._programs: OrderedDict[Any, tuple[Callable[..., Any], Any]] = OrderedDict()
        self._program_for(examples)

    def __call__(self, *inputs: Any) -> Any:
        """Return the outputs of the graph."""
        return self._program_for(inputs)(*inputs)

    def _program_for(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the program for the parameters in ``inputs``, compiled if their tensors or contents are new."""
        found = self._programs.get(self._key(inputs))
        if found is None:
            made = self._compile(inputs)
            # Holds the parameters, so that their ids stay valid. Compiling may find that some are none.
            found = self._programs[self._key(inputs)] = made, [inputs[at] for at in self._frozen]
            while len(self._programs) > MOST_SETS:
                self._programs.popitem(last=False)
        return found[0]

    def _key(self, inputs: Sequence[Any]) -> tuple[tuple[int, int], ...]:
        """Return the identities and versions of the parameters in ``inputs``. Tensors of inference mode have no version."""
        parameters = [inputs[at] for at in self._frozen]
        return tuple([(id(p), 0 if p.is_inference() else p._version) for p in parameters])

    def _compile(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the compiled graph, or the graph itself if an operator is refused."""
        written = list[int]()
        try:
            while True:
                module, live = self._with_constants(inputs, written)
                program = export_module(module, tuple(inputs[at] for at in live), {}, self._dynamic_shapes(live))
                found = {self._holders[n] for n in written_buffers(program)} | {live[at] for at in written_inputs(program)}
                if found <= {*written}:
                    break
                written = sorted({*written, *found})  # these become inputs, and their new contents outputs
                self._frozen = [at for at in self._frozen if at not in found]
            form = to_onnx(program)
            values = [inputs[at] for at in live]
            made = TensorProgram.open(form, self.device, request_of(self.options, form.ranges), values)
        except BadInput as problem:
            text = f"rammer leaves a graph of {len(self.graph.graph.nodes)} nodes to torch: {problem}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return self.graph.forward  # type: ignore[no-any-return]

        def run(*given: Any) -> tuple[Any, ...]:
            outputs = made([given[at] for at in live])
            for at, content in zip(reversed(written), reversed(outputs), strict=False):
                given[at].copy_(content)
            return tuple(outputs[: len(outputs) - len(written)])

        return run

    def _with_constants(self, inputs: Sequence[Any], written: Sequence[int]) -> tuple[Any, list[int]]:
        """Return the graph as a module with parameters as buffers, and the positions of its other inputs. Sizes that dynamo
        passes as numbers are read from the tensors that have them. The inputs in ``written`` are outputs, too."""
        graph = copy.deepcopy(self.graph.graph)
        module = torch.fx.GraphModule(self.graph, graph)
        holders, live = [n for n in graph.nodes if n.op == "placeholder"], list[int]()
        sizes = _find_sizes(holders)
        first = next(n for n in graph.nodes if n.op != "placeholder")
        graph.output_node().args = ((*graph.output_node().args[0], *(holders[at] for at in written)),)
        for at, node in enumerate(holders):
            if at in self._frozen:
                module.register_buffer(node.name, inputs[at])
                with graph.inserting_before(first):
                    node.replace_all_uses_with(graph.get_attr(node.name))
            elif isinstance(node.meta.get("example_value"), torch.SymInt):
                symbol = str(node.meta["example_value"].node.expr)
                if node.users:
                    if symbol not in sizes:
                        raise BadInput(f"the number {node.name} of the graph is not the extent of an input")
                    tensor, axis = sizes[symbol]
                    with graph.inserting_before(first):
                        node.replace_all_uses_with(graph.call_function(torch.ops.aten.sym_size.int, (tensor, axis)))
            else:
                live.append(at)
                continue
            graph.erase_node(node)
        module.recompile()
        return module, live

    def _dynamic_shapes(self, live: Sequence[int]) -> Any:
        """Return the open extents of the inputs for ``torch.export.export``, with the bounds that dynamo knows."""
        holders = [n for n in self.graph.graph.nodes if n.op == "placeholder"]
        found = list[Any]()
        for at in live:
            value = holders[at].meta.get("example_value")
            dims = value.shape if isinstance(value, torch.Tensor) else ()
            found.append({axis: _open_extent(d) for axis, d in enumerate(dims) if isinstance(d, torch.SymInt)} or None)
        return tuple(found) if any(found) else None


def _is_parameter(node: Any, value: Any) -> bool:
    """Return True if an input of a graph is a parameter, a buffer or another tensor of a module."""
    static = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")
    return isinstance(value, torch.nn.Parameter) or static == "unguarded"


def _find_sizes(holders: Sequence[Any]) -> dict[str, tuple[Any, int]]:
    """Return a tensor and an axis with each symbolic extent."""
    found = dict[str, tuple[Any, int]]()
    for node in holders:
        value = node.meta.get("example_value")
        for axis, extent in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(extent, torch.SymInt):
                found.setdefault(str(extent.node.expr), (node, axis))
    return found


def _open_extent(extent: Any) -> Any:
    """Return the extent as an open dimension with the bounds of its symbol."""
    bounds = extent.node.shape_env.bound_sympy(extent.node.expr)
    low, high = (int(b) if getattr(b, "is_Integer", False) else None for b in (bounds.lower, bounds.upper))
    return torch.export.Dim.AUTO(min=low, max=high)

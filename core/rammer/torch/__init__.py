"""Models from PyTorch: ``torch.compile(module, backend="rammer")`` and ``rammer.torch.compile``.

Both compile for inference: parameters are constants, and a call that torch would record gradients for is refused. They need
torch and onnxscript (the extra ``rammer-core[torch]``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rammer.errors import MissingDependency

if TYPE_CHECKING:
    from rammer.torch.compiled_module import CompiledModule

__all__ = ["backend", "compile"]


def compile(
    module: Any,
    example_inputs: tuple[Any, ...],
    device: str = "",
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    **options: Any,
) -> CompiledModule:
    """Compile a torch module for inference on ``device``, by default the one that holds the tensors.

    ``example_inputs`` and ``example_kwargs`` are arguments of the module; extents and values that are not tensors are fixed by
    them. ``dynamic_shapes`` opens extents as in ``torch.export.export``: a ``torch.export.Dim("batch", min=1, max=64)`` becomes
    the range 1 to 64. Dimensions without a greatest length get programs as runs need them. ``options`` are those of
    ``rammer.compile`` but ``shapes``.

    The result is called as the module and returns what the module returns. Its ``executable`` is the model on the device, and
    ``close`` frees it.

    Raises BadInput for a module in training mode, for one that writes to its inputs or buffers, and with the names of operators
    that torch's exporter or rammer does not support."""
    _require_torch()
    from rammer.torch.compiled_module import compile_module

    return compile_module(module, tuple(example_inputs), dict(example_kwargs or {}), device, dynamic_shapes, options)


def backend(graph: Any, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Compile a graph that torch's dynamo captured: ``torch.compile(module, backend="rammer", options={...})`` calls it.

    ``options`` are those of ``rammer.compile`` and ``device``. A graph with an operator that torch's exporter or rammer refuses
    is left to torch, with a warning that names the operator. Raises BadInput for a graph that records gradients."""
    _require_torch()
    from rammer.torch.captured_graph import capture

    return capture(graph, example_inputs, dict(options or {}))


def _require_torch() -> None:
    """Raise MissingDependency if torch or its exporter's package is not installed."""
    for name in ("torch", "onnxscript"):
        if find_spec(name) is None:
            raise MissingDependency(name, "pip install rammer-core[torch]")

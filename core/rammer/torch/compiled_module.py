"""``rammer.torch.compile``: one torch module, exported as a whole, as a callable on a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rammer.compile_options import Request, parameter_of
from rammer.errors import BadInput
from rammer.ir.extent import GivenLength
from rammer.runtime.executable import Executable
from rammer.torch.onnx_form import export_module, to_onnx, written_buffers, written_inputs
from rammer.torch.tensor_calls import TensorProgram, device_for


class CompiledModule:
    """A torch module on a device. It is called as the module, with tensors of the exported shapes and ranges, and returns what
    the module returns. Parameters have the values that they had when it was compiled. Any thread may call it."""

    def __init__(self, program: TensorProgram, in_spec: Any, out_spec: Any) -> None:
        self._program, self._in_spec, self._out_spec = program, in_spec, out_spec

    @property
    def executable(self) -> Executable:
        """The model on the device."""
        return self._program.executable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's result. Raises BadInput for arguments of another structure, type or fixed extent."""
        values, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._in_spec:
            raise BadInput(f"the arguments have the structure {spec}, the module was exported with {self._in_spec}")
        if torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values):
            raise BadInput("an input requires its gradient, and rammer computes none", hint="call it under torch.no_grad()")
        return pytree.tree_unflatten(self._program(values), self._out_spec)

    def close(self) -> None:
        """Free the device; later calls raise DeviceFailure."""
        self._program.close()


def compile_module(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str, dynamic_shapes: Any, options: Mapping[str, Any]
) -> CompiledModule:
    """Compile a module for inference; see ``rammer.torch.compile``."""
    if module.training:
        raise BadInput("the module is in training mode, and rammer compiles for inference", hint="call module.eval() first")
    program = export_module(module, args, kwargs, dynamic_shapes)
    if written_buffers(program) or written_inputs(program):
        what = ", ".join(written_buffers(program)) or "its inputs"
        raise BadInput(f"the module writes to {what}", hint='torch.compile(module, backend="rammer") supports it')
    form = to_onnx(program)
    values, in_spec = pytree.tree_flatten((args, kwargs))
    made = TensorProgram.open(form, device or device_for(values), request_of(options, form.ranges), values)
    return CompiledModule(made, in_spec, program.call_spec.out_spec)


def request_of(options: Mapping[str, Any], ranges: Mapping[str, GivenLength]) -> Request:
    """Return the request for options of ``rammer.compile`` and ranges. Raises BadInput for an unknown option."""
    known = [name for name in map(parameter_of, Request.__dataclass_fields__.values()) if name != "shapes"]
    for name in options:
        if name not in known:
            raise BadInput(f"unknown option {name!r}", hint=f"the options are: device, {', '.join(known)}")
    return Request.from_parameters({**options, "shapes": ranges})

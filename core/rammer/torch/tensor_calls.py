"""Calls of an executable with torch tensors: in host memory through NumPy's arrays, on a GPU through bound calls.

Tensors share their memory with rammer's arrays. On a GPU, inputs that come in the same memory again are bound in place; other
inputs are copied on the device, since a bound call has fixed addresses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from rammer.compile_options import Request
from rammer.device.loader import Registry
from rammer.ir.formats import FORMATS, carrier_dtype, name_of, numpy_type, to_carrier
from rammer.jit.onnx_source import open_source
from rammer.jit.session import open_executable
from rammer.runtime.bound_call import BoundCall
from rammer.runtime.executable import Executable
from rammer.torch.onnx_form import OnnxForm

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Sets of input addresses of one shape that are bound in place. Inputs at further addresses are copied.
IN_PLACE: Final = 2
#: Sets of shapes and addresses with a bound call; the least recently used is closed for a new one.
MOST_BOUND: Final = 16


def to_array(tensor: Any) -> Array:
    """Return a tensor as a NumPy array, which shares its memory if that is the host's."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name in FORMATS:
        bits = tensor.detach().contiguous().view(getattr(torch, carrier_dtype(name)))
        return np.asarray(bits.numpy(force=True)).view(numpy_type(name))
    return np.asarray(tensor.numpy(force=True))


def to_tensor(array: Array) -> Any:
    """Return a NumPy array as a tensor in the same memory."""
    name = name_of(array.dtype)
    if name in FORMATS:
        return torch.from_numpy(to_carrier(array)).view(getattr(torch, name))
    return torch.from_numpy(array)


def device_for(tensors: Sequence[Any]) -> str:
    """Return the name of the device that holds the tensors' memory, or "" for the default device. Tensors in host memory are
    those of a device that computes on the CPU."""
    places = [t.device for t in tensors if isinstance(t, torch.Tensor)]
    apart = next((p for p in places if p.type != "cpu"), None)  # memory that the host does not read
    for status in Registry().statuses():
        for unit in status.hardware if status.state == "ok" else ():
            is_cpu = unit.kind == "cpu"
            if is_cpu if apart is None else not is_cpu and unit.kind != "simulator" and unit.index == (apart.index or 0):
                return f"{status.name}:{unit.index}"
    return ""


@dataclass
class TensorProgram:
    """An exported program on a device, called with the flattened user inputs."""

    form: OnnxForm
    executable: Executable
    _bound: OrderedDict[Any, DeviceCall] = field(default_factory=OrderedDict, repr=False)
    _lock: Any = field(default_factory=RLock, repr=False)

    @staticmethod
    def open(form: OnnxForm, device: str, request: Request, examples: Sequence[Any]) -> TensorProgram:
        """Open ``form`` on a device and compile it for the shapes of ``examples``, so that refused operators are found. Raises
        the errors of ``rammer.compile``."""
        registry = Registry()
        source = open_source(form.proto, registry.operators, form.weights)
        executable = open_executable(source, device, request, registry=registry)
        try:
            executable.specialise({form.inputs[at]: tuple(np.shape(examples[at])) for at in form.inputs})
        except BaseException:
            executable.close()
            raise
        return TensorProgram(form, executable)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Return the outputs for the user inputs: tensors, numbers and constants. Raises BadInput for an input that differs from
        the exported program in type or in a fixed extent."""
        given = {name: values[at] for at, name in self.form.inputs.items()}
        apart = next((t for t in given.values() if isinstance(t, torch.Tensor) and t.device.type != "cpu"), None)
        found = self._run_on_host(given) if apart is None else self._run_on_device(given, apart.device)
        outputs = list[Any]()
        for role in self.form.outputs:
            if not role.name:
                outputs.append(role.constant)
            elif role.number:
                outputs.append(int(found[role.name]))
            else:
                tensor = found[role.name]
                outputs.append(tensor if role.device in (None, tensor.device) else tensor.to(role.device))
        return outputs

    def _run_on_host(self, given: Mapping[str, Any]) -> dict[str, Any]:
        arrays = {n: to_array(v) if isinstance(v, torch.Tensor) else np.asarray(v) for n, v in given.items()}
        return {name: to_tensor(array) for name, array in self.executable.run(arrays).items()}

    def _run_on_device(self, given: Mapping[str, Any], device: Any) -> dict[str, Any]:
        stream = getattr(torch, device.type).current_stream(device)
        tensors = {n: _as_bits(v) if isinstance(v, torch.Tensor) else torch.tensor(v, device=device) for n, v in given.items()}
        shapes = tuple((n, tuple(t.shape)) for n, t in tensors.items())
        where = tuple((t.data_ptr(), t.stride()) for t in tensors.values())
        with self._lock:
            key: tuple[Any, ...] = (shapes, stream.stream_id, where)
            call = self._bound.get(key)
            if call is None and sum(k[:2] == key[:2] and k[2] is not None for k in self._bound) >= IN_PLACE:
                key = (shapes, stream.stream_id, None)
                call = self._bound.get(key)
            if call is None:
                call = self._bound[key] = DeviceCall.bind(self.executable, tensors, stream, in_place=key[2] is not None)
                while len(self._bound) > MOST_BOUND:
                    self._bound.popitem(last=False)[1].bound.close()
            self._bound.move_to_end(key)
            return call.run(tensors)

    def close(self) -> None:
        """Free the device; later calls raise DeviceFailure."""
        self.executable.close()


def _as_bits(tensor: Any) -> Any:
    """Return a tensor of a type that libraries exchange by its bits as such, in the same memory."""
    name = str(tensor.dtype).removeprefix("torch.")
    return tensor.detach().view(getattr(torch, carrier_dtype(name))) if name in FORMATS else tensor.detach()


@dataclass
class DeviceCall:
    """A bound call on arrays of the device. ``copies`` are tensors for inputs that are not bound in place."""

    bound: BoundCall
    outputs: Mapping[str, Any]
    copies: Mapping[str, Any]

    @staticmethod
    def bind(executable: Executable, tensors: Mapping[str, Any], stream: Any, in_place: bool) -> DeviceCall:
        """Bind these tensors, or copies of them, on a stream."""
        copies = {} if in_place else {n: t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
        bound = executable.bind(copies or tensors, stream=stream)
        kinds = {v.external or v.name: v.port.dtype for v in bound.graph.outputs}
        outputs = {n: torch.from_dlpack(a) for n, a in bound.outputs.items()}
        outputs |= {n: outputs[n].view(getattr(torch, kind)) for n, kind in kinds.items() if kind in FORMATS}
        return DeviceCall(bound, outputs, copies)

    def run(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Queue one run on the stream, and return copies of the outputs, which the next run overwrites."""
        for name, tensor in self.copies.items():
            tensor.copy_(tensors[name])
        self.bound.run()
        return {name: tensor.clone() for name, tensor in self.outputs.items()}

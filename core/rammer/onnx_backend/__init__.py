"""ONNX's backend interface (``onnx.backend.base``) over rammer's devices::

    import rammer.onnx_backend as backend

    outputs = backend.prepare(model, "rocm").run([x])

A device is ``NAME[:INDEX]`` as in all of rammer, or in upper case as in ONNX. ``CPU`` is the first working unit of the kind
``cpu``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import helper
from onnx.backend.base import Backend, BackendRep

import rammer
from rammer.device.loader import Registry
from rammer.errors import DeviceUnavailable, RammerError
from rammer.runtime.executable import Executable

__all__ = ["RammerBackend", "RammerRep", "devices", "is_compatible", "prepare", "run_model", "run_node", "supports_device"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


class RammerRep(BackendRep):  # type: ignore[misc]  # onnx has no types
    """A model prepared for a device. Each new set of input shapes is compiled at its first run."""

    def __init__(self, executable: Executable) -> None:
        self.executable = executable

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the outputs in the model's order, for ``inputs`` in its order (or by name, or one array)."""
        head = self.executable.head
        if not isinstance(inputs, Mapping):
            given = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
            inputs = dict(zip((p.name for p in head.inputs), given, strict=True))
        found = self.executable.run({n: np.asarray(a) for n, a in inputs.items()})
        return tuple(found[n] for n in head.output_names)


class RammerBackend(Backend):  # type: ignore[misc]  # onnx has no types
    """The ONNX backend: ``prepare``, ``run_model`` and ``run_node`` accept the options of ``rammer.compile``."""

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Return True if the device is present and works."""
        try:
            spec_of(device)
        except RammerError:
            return False
        return True

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Return True if ``prepare`` accepts the model; operators are checked later, when shapes are bound."""
        try:
            cls.prepare(model, device, **kwargs).executable.close()
        except RammerError:
            return False
        return True

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> RammerRep:
        """Prepare the model on a device. Raises the errors of ``rammer.compile``."""
        return RammerRep(rammer.compile(model, spec_of(device), **kwargs))

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype[Any], tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one node as a model; ``opset_version`` defaults to the newest that ONNX has."""
        version = kwargs.pop("opset_version", onnx.defs.onnx_opset_version())
        given = [np.asarray(a) for a in (inputs if isinstance(inputs, (list, tuple)) else [inputs])]
        ports = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in zip(filter(None, node.input), given, strict=True)
        ]
        outputs = [onnx.ValueInfoProto(name=n) for n in node.output if n]
        graph = helper.make_graph([node], "node", ports, outputs)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid(node.domain, version)])
        rep = cls.prepare(model, device, **kwargs)
        try:
            return rep.run(given)
        finally:
            rep.executable.close()


def spec_of(device: str) -> str:
    """Return rammer's name of an ONNX or rammer device. Raises DeviceUnavailable if it does not exist."""
    registry = Registry()
    if device.upper() == "CPU":
        for status in registry.statuses():
            for unit in status.hardware:
                if unit.kind == "cpu":
                    return f"{status.name}:{unit.index}"
        raise DeviceUnavailable("no device computes on the CPU", hint="`rammer devices` lists the devices")
    name = device.lower() if device.isupper() else device
    status = registry.status(name.partition(":")[0])
    if not status.hardware:
        raise DeviceUnavailable(f"device {status.name} is not available: {status.reason}")
    return name


def devices() -> Iterator[str]:
    """Yield the names of the devices that work."""
    return (s.name for s in Registry().statuses() if s.hardware)


is_compatible = RammerBackend.is_compatible
prepare = RammerBackend.prepare
run_model = RammerBackend.run_model
run_node = RammerBackend.run_node
supports_device = RammerBackend.supports_device

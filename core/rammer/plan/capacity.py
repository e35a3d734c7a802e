"""Whether a model can fit a device at all, asked before anything of its size is allocated."""

from __future__ import annotations

from collections.abc import Iterable

from rammer.errors import DeviceFailure
from rammer.ir.device import VDevice
from rammer.ir.types import itemsize
from rammer.plan.build import Storages
from rammer.plan.room import room


def check_capacity(name: str, plan: Storages, kept: Iterable[str], device: VDevice) -> None:
    """DeviceFailure when the tensors in ``kept`` (inputs, outputs, constants: there all the time) and the largest
    other buffer exceed the device's lowest memory layer. Capacity 0 means that it is not modelled: it is this machine's."""
    layer = device.layers[0]
    capacity = layer.capacity or room()
    sizes = {buffer: size * itemsize(dtype) for buffer, (dtype, size) in plan.buffers.items()}
    permanent = {plan.storages[tensor].buffer for tensor in kept if tensor in plan.storages}
    others = [n for buffer, n in sizes.items() if buffer not in permanent]
    need = sum(sizes[buffer] for buffer in permanent) + max(others, default=0)
    if need > capacity:
        raise DeviceFailure(
            f"out of memory: {name} needs at least {need} bytes of {layer.name}, {device.name} has {capacity}",
            hint="use a smaller batch or input, or a device with more memory",
        )

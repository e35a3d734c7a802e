"""What a device may offer for operators that run side by side: kernels that keep little of it busy."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

__all__ = ["Thrifty"]


@runtime_checkable
class Thrifty(Protocol):
    """A Backend may also name a kernel for an operator beside others, which its fastest candidates need not hold: those are the
    fastest with the device to themselves, and so fill it (Rammer, section 4.2: resource-efficient rTasks)."""

    def lean(self, operator: ROperator, binding: Binding) -> ROperator | None:
        """The operator tiled so that its tasks take least time of vEUs in all, of what is predicted to take not much longer than
        the best alone; None where no other kernel is known."""
        ...

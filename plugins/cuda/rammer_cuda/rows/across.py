"""Matrices whose neighbouring results lie together, as an attention's values do for one token: a load has four results' weights
of one product, not four products' of one result."""

from __future__ import annotations

from rammer.device.manifest import Binding
from rammer.ir.compute import Compute
from rammer.ir.expr import Load

from rammer_cuda.kernels.frame import VECTOR, steps_of


def lies_across(load: Load, main: Compute, innermost: int, binding: Binding) -> bool:
    """Whether the matrix ``load`` of ``main``, which is no constant (those are packed), has four neighbours along axis
    ``innermost`` of the results in every 16 aligned bytes, and products apart from each other."""
    storage, axis = binding.storages[load.tensor], main.axes[innermost]
    found = None if load.tensor in binding.constants else steps_of(load, storage.strides)
    if found is None or axis.extent % VECTOR or found[0].get(axis.name) != 1:
        return False
    over = [found[0].get(r.name, 0) for r in main.reduce if r.extent > 1]
    others = [step for name, step in found[0].items() if name != axis.name]
    return over[-1:] != [1] and all(n % VECTOR == 0 for n in (storage.offset, found[1], *others))

"""The prices of groups of Computes, in seconds with one launch: by the traffic model, and by the device's predicted kernels.

Both are in one scale. The traffic model is fast, and right for maps that a group reads element by element. All other decisions
ask the device, whose kernels may be far from its peak; predictions differ from measured times by ``VDevice.doubt``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rammer.device.manifest import FUSED_FORMS, Binding, FusedForm
from rammer.fusion.tile_search import ranked_tiles
from rammer.fusion.tile_traffic import task_cost
from rammer.ir.compute import ComputeGraph
from rammer.ir.device import VDevice
from rammer.ir.operator import RKernel, ROperator

__all__ = ["CostModel", "GroupPrices"]

#: Kinds of Computes that add products or elements.
_SUMS: Final = ("contraction", "window", "reduction")


def static_operator(operator: ROperator) -> ROperator:
    """Return ``operator`` unchanged: a program for one length has no masked tasks."""
    return operator


def peak_rate(operator: ROperator) -> float:
    """Return the rate of a device whose kernels are equally good for all operators."""
    return 1.0


@dataclass(frozen=True)
class CostModel:
    """The inputs of prices besides the device's figures.

    ``kernel`` returns the device's predicted kernel of an untiled operator, None if it has none; without it, the traffic model
    prices everything. ``rate`` is the fraction of the peak that the device can reach for several sums in one task, a quick answer
    that saves asking for kernels (``Backend.rate``). ``binding`` defaults to types and constants. ``ended`` adds endings to
    operators of a ranged program, which are priced at several lengths. ``doubt`` replaces the device's, to fuse more or less.
    ``forms`` are the forms of fusion that some kernel family has, and ``bare`` the families without trailing maps."""

    kernel: Callable[[ROperator], RKernel | None] | None = None
    rate: Callable[[ROperator], float] = peak_rate
    binding: Binding | None = None
    ended: Callable[[ROperator], ROperator] = static_operator
    doubt: float | None = None
    forms: frozenset[FusedForm] = FUSED_FORMS
    bare: frozenset[str] = frozenset()


#: The cost model of a device that is not asked for kernels.
TRAFFIC: Final = CostModel()


class GroupPrices:
    """The prices of operators on one device; operators of equal keys share them."""

    def __init__(self, device: VDevice, binding: Binding, model: CostModel = TRAFFIC) -> None:
        self.device, self.binding, self.model = device, binding, model
        self.doubt = device.doubt if model.doubt is None else model.doubt
        self._modelled: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._rates: dict[str, float] = {}
        self._keys: dict[int, tuple[ROperator, str]] = {}  #: By identity: a group is priced many times while it grows.

    @classmethod
    def of(cls, graph: ComputeGraph, device: VDevice, model: CostModel = TRAFFIC) -> GroupPrices:
        """Return the prices of operators of ``graph``."""
        return cls(device, model.binding or Binding(graph.types, {}, frozenset(graph.constants)), model)

    def modelled(self, operator: ROperator) -> float:
        """Return seconds with the best tile by the traffic model, infinite if none fits."""
        key = self._key(operator)
        if key not in self._modelled:
            ended = self.model.ended(operator)
            ranked = ranked_tiles(ended, self.binding.types, self.device, storages=self.binding.storages)
            self._modelled[key] = ranked[0][0] if ranked else math.inf
        return self._modelled[key]

    def asked(self, operator: ROperator, below: float = math.inf) -> float:
        """Return seconds of the device's predicted kernel, at least those that its layers on chip need; infinite without a
        kernel. The device is not asked if the traffic model, at the rate of its kernels, already exceeds ``below``."""
        key, least = self._key(operator), self.least(operator)
        if self.model.kernel is None or (least > below and key not in self._asked):
            return least
        if key not in self._asked:
            kernel = self.kernel(operator) if least < math.inf else None
            self._asked[key] = math.inf if kernel is None else self._kernel_seconds(kernel)
        return self._asked[key]

    def kernel(self, operator: ROperator) -> RKernel | None:
        """Return the device's predicted kernel, or None without one."""
        return self.model.kernel(self.model.ended(operator)) if self.model.kernel is not None else None

    def takes_maps(self, operator: ROperator) -> bool:
        """Return True if the device's kernel family for ``operator`` also computes the maps that follow."""
        if not self.model.bare or all(c.combiner is None for c in operator.computes):
            return True
        kernel = self.kernel(operator)
        return kernel is None or kernel.operator.family not in self.model.bare

    def least(self, operator: ROperator) -> float:
        """Return seconds by the traffic model, with products at the rate of the device's kernels."""
        return max(self.modelled(operator), self._product_seconds(operator))

    def _product_seconds(self, operator: ROperator) -> float:
        """Return the seconds of the products of an operator with sums of sums, at the device's rate; 0 for any other. Independent
        products, as in a recurrent cell, are computed like each alone."""
        work = sum(c.flops for c in operator.computes if c.kind == "contraction")
        if not work or not operator.has_chain(_SUMS):
            return 0.0
        key = self._key(operator)
        if key not in self._rates:
            self._rates[key] = self.model.rate(operator)
        return work / (self.device.flops * self.device.veus * self._rates[key])

    def _kernel_seconds(self, kernel: RKernel) -> float:
        """Return the seconds of a kernel on all vEUs, with its launch."""
        cost = task_cost(kernel.operator, self.binding.types, self.device, self.binding.storages)
        rounds = -(-kernel.operator.task_count // self.device.veus)
        return max(kernel.operator_time(self.device.veus), rounds * cost.on_chip) + self.device.launch

    def _key(self, operator: ROperator) -> str:
        known = self._keys.get(id(operator))
        if known is None or known[0] is not operator:
            known = self._keys[id(operator)] = (operator, self.binding.key(self.model.ended(operator)))
        return known[1]

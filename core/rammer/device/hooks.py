"""Hook specifications: every extension point of a plugin, and the manifest field that each one feeds.

Entry points in group ``rammer.devices`` name a module (or object) that implements any of these with
``@rammer.device.hooks.hookimpl``. Hooks find and compose; the hot path is the protocols of ``rammer.device.manifest``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from rammer.device.custom_operators import CustomOperator
    from rammer.device.manifest import Binding, Device
    from rammer.distributed.transport.protocol import Transport
    from rammer.frontend.lower.lowering_registry import LoweringFn
    from rammer.fusion.fusion_rules import FusionRule
    from rammer.ir.operator import ROperator
    from rammer.passes.pass_pipeline import AnyPass
    from rammer.schedule.policy import Policy

__all__ = ["Hooks", "hookimpl"]

PROJECT = "rammer"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """The hook specifications. All return lists or mappings, which are concatenated over plugins.

    ``device`` is the name of the device that a model is compiled for, such as ``rocm``, or "" if none is chosen yet. A plugin
    that contributes for one device only returns nothing for the others. An implementation may leave the parameter out."""

    @hookspec
    def rammer_devices(self) -> Sequence[Device]:  # type: ignore[empty-body]
        """Return device manifests. Memory layers: ``Backend.vdevice.layers``; kernel generation: ``Backend.candidates`` and
        ``Backend.kernel``; profiling: ``Backend.profiler``; launch: ``Backend.load``."""

    @hookspec
    def rammer_policies(self, device: str) -> Sequence[Policy]:  # type: ignore[empty-body]
        """Return scheduling policies for ``--policy``. ``auto`` tries those with ``Policy.in_auto``."""

    @hookspec
    def rammer_passes(self, device: str) -> Sequence[AnyPass]:  # type: ignore[empty-body]
        """Return passes of graphs (``Pass``), run after the built-in ones, or of tensor expressions (``ComputePass``), run before
        products are batched."""

    @hookspec
    def rammer_operators(self) -> Sequence[CustomOperator]:  # type: ignore[empty-body]
        """Return operators of domains outside ONNX, with the types of their results. ``rammer_lowerings`` defines their
        computation."""

    @hookspec
    def rammer_lowerings(self, device: str) -> Mapping[tuple[str, str], LoweringFn]:  # type: ignore[empty-body]
        """Return lowerings by (domain, operator); they take precedence over the built-in ones."""

    @hookspec
    def rammer_kernels(self, device: str, operator: ROperator, binding: Binding) -> Sequence[ROperator]:  # type: ignore[empty-body]
        """Return additional tile and family candidates for ``operator`` on another plugin's device, tried first."""

    @hookspec
    def rammer_fusion_rules(self, device: str) -> Sequence[FusionRule]:  # type: ignore[empty-body]
        """Return rules that propose groups of operators, which are accepted where they are faster."""

    @hookspec
    def rammer_transports(self) -> Sequence[Transport]:  # type: ignore[empty-body]
        """Return transports that carry tensors between devices, in addition to those of the core
        (``rammer.distributed.transport.transport_registry``)."""

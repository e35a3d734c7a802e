"""Hook specifications: every seam that a plugin can fill, and the manifest field each one feeds.

Entry points in group ``rammer.devices`` name a module (or object) that implements any of these with
``@rammer.device.hooks.hookimpl``. Hooks find and compose; the hot path is the protocols of
``rammer.device.manifest``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from rammer.device.custom_operators import CustomOperator
    from rammer.device.manifest import Binding, Device
    from rammer.distributed.transport.protocol import Transport
    from rammer.frontend.lower.lowering_registry import LoweringFn
    from rammer.ir.operator import ROperator
    from rammer.passes.pass_pipeline import Pass
    from rammer.schedule.policy import Policy

__all__ = ["Hooks", "hookimpl"]

PROJECT = "rammer"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """The specifications. All return lists or mappings, which are concatenated over plugins."""

    @hookspec
    def rammer_devices(self) -> Sequence[Device]:  # type: ignore[empty-body]
        """Device manifests. Memory layers: ``Backend.vdevice.layers``; kernel generation:
        ``Backend.candidates`` and ``Backend.kernel``; profiling: ``Backend.profiler``; launch: ``Backend.load``."""

    @hookspec
    def rammer_policies(self) -> Sequence[Policy]:  # type: ignore[empty-body]
        """Scheduling policies for ``--policy``."""

    @hookspec
    def rammer_passes(self) -> Sequence[Pass]:  # type: ignore[empty-body]
        """Graph passes, run after the built-in ones."""

    @hookspec
    def rammer_operators(self) -> Sequence[CustomOperator]:  # type: ignore[empty-body]
        """Operators of domains that ONNX does not have, with the types of their results. How they are computed says
        ``rammer_lowerings``."""

    @hookspec
    def rammer_lowerings(self) -> Mapping[tuple[str, str], LoweringFn]:  # type: ignore[empty-body]
        """Lowerings by (domain, operator); they take precedence over the built-in ones."""

    @hookspec
    def rammer_kernels(self, device: str, operator: ROperator, binding: Binding) -> Sequence[ROperator]:  # type: ignore[empty-body]
        """More tile and family candidates for ``operator`` on somebody else's device, tried first. ``device`` is
        its name, such as ``rocm``."""

    @hookspec
    def rammer_transports(self) -> Sequence[Transport]:  # type: ignore[empty-body]
        """Ways by which tensors cross from device to device, besides ``local`` and ``mpi``
        (``rammer.distributed.transport.protocol``)."""

"""Compilation while an executable runs: of programs for new shapes, of control-flow bodies and of deferred parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rammer.jit import operator_check
from rammer.jit.continuation import Continuation
from rammer.jit.control_flow import BodyPrograms
from rammer.runtime.loaded_programs import LoadedPrograms
from rammer.runtime.specialiser import CompileSite

if TYPE_CHECKING:
    from rammer.compiler.compiler import Compiler
    from rammer.frontend.bind.deferred import DeferredModel
    from rammer.frontend.read.reader import Model


@dataclass
class ModelSpecialiser:
    """A ``Specialiser`` by the compiler. The compiler, and ONNX with it, is imported when something must be compiled."""

    site: CompileSite

    @cached_property
    def compiler(self) -> Compiler:
        """The compiler."""
        from rammer.compiler.compiler import Compiler
        from rammer.tuning.kernel_store import KernelStore

        site = self.site
        store, name = site.store or KernelStore.default(), site.device.partition(":")[0]
        made = Compiler(site.backend, site.options, store, site.registry, site.progress, name)
        made.tuner.arrangements = site.arrangements
        return made

    @cached_property
    def bodies(self) -> BodyPrograms:
        """The bodies of control flow on the device."""
        return BodyPrograms(self.site.load, self.site.bodies, self.site.is_cached)

    def hosted(self, operators: list[str]) -> list[str]:
        """Return the operators that the host has computed, given those that it ran."""
        return self.bodies.hosted(operators)

    def continuation(self, rest: DeferredModel) -> Continuation:
        """Return the deferred part of a model on the device."""
        programs = LoadedPrograms[Any](self.site.bodies.name, self.site.bodies.limit)
        return Continuation(rest, self.site.load, self.site.load_open, programs, self.bodies)

    def with_results(self, model: Model) -> Model:
        """Return ``model`` with the results of all operators as additional outputs."""
        return operator_check.with_results(model)

    def check_values(self, model: Model, values: Mapping[str, Any]) -> None:
        """Raise BadInput for the first operator with an index out of range or a new NaN or infinity."""
        operator_check.check_values(model, values)

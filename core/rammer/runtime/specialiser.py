"""The interface between an executable, which loads and runs programs, and the compiler, which adds programs at run time.

An executable that has all of its programs, such as that of a compiled file without control flow on the host, creates no
specialiser. Neither the compiler nor ONNX is then imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from rammer.compile_options import CompileOptions, Progress
from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer.device.shared_constants import LoadedArrangements
from rammer.runtime.loaded_model import Continuation, LoadedModel
from rammer.runtime.loaded_programs import LoadedPrograms
from rammer.runtime.shape_buckets import Lengths, Shapes, Span

if TYPE_CHECKING:
    from rammer.compiler.compiler import Compiler
    from rammer.frontend.bind.deferred import DeferredModel
    from rammer.frontend.loops.control_operators import BodyRunner
    from rammer.frontend.read.reader import Model
    from rammer.tuning.kernel_store import KernelStore


@dataclass(frozen=True)
class CompileSite:
    """The device and the settings that an executable compiles for.

    ``arrangements`` are those of the programs on the device; ``bodies`` are programs of control flow. ``load`` returns the loaded
    program of a model part with static shapes, and ``load_open`` that for a range. ``is_cached`` returns True if an earlier
    process compiled the part."""

    backend: Backend
    device: str
    options: CompileOptions
    registry: Registry | None
    progress: Progress
    store: KernelStore | None
    arrangements: LoadedArrangements
    bodies: LoadedPrograms[Any]
    load: Callable[[Model], LoadedModel]
    load_open: Callable[[Model, Shapes, Mapping[str, Span], Lengths], LoadedModel]
    is_cached: Callable[[Model], bool]


class Specialiser(Protocol):
    """The compiler of an executable's programs (``rammer.jit.model_specialiser``)."""

    @property
    def compiler(self) -> Compiler:
        """The compiler, imported on first use."""
        ...

    @property
    def bodies(self) -> BodyRunner:
        """The bodies of control flow on the device."""
        ...

    def hosted(self, operators: list[str]) -> list[str]:
        """Return the operators that the host has computed, given those that it ran: control flow only if it ran a body."""
        ...

    def continuation(self, rest: DeferredModel) -> Continuation:
        """Return the deferred part of a model on the device."""
        ...

    def with_results(self, model: Model) -> Model:
        """Return ``model`` with the results of all operators as additional outputs."""
        ...

    def check_values(self, model: Model, values: Mapping[str, Any]) -> None:
        """Raise BadInput for the first operator with an index out of range or a new NaN or infinity."""
        ...


#: Creates the specialiser of an executable.
SpecialiserFactory: TypeAlias = "Callable[[CompileSite], Specialiser]"

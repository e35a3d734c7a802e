"""Optional capabilities of devices: protocols for constants, length variants, small kernels and loops, and the list of all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

from rammer.device.in_place import InPlace
from rammer.device.manifest import (
    Array,
    Backend,
    Binding,
    Exhaustive,
    Families,
    Loaded,
    Poisoned,
    Preparing,
    PrologueRated,
    Rated,
    Tracer,
)
from rammer.errors import DeviceFailure
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram

#: Fraction of its predicted time that an operator may lose, so that its constants are on the device once.
WITHIN: Final = 0.02


@runtime_checkable
class Arranging(Protocol):
    """A Backend that reports the arrangements of constants that its kernels read (keys as in ``ConstantForm``)."""

    def arrangements(self, operator: ROperator, binding: Binding) -> frozenset[str]:
        """Return the arrangements of a tiled operator's kernel. Raises DeviceFailure without a kernel."""
        ...

    def same_packing(self, operator: ROperator, binding: Binding, held: Collection[str], within: float) -> ROperator | None:
        """Return the best choice of a tiled operator's family that needs only arrangements of ``held``, or None. It is predicted
        to take no more than 1 + ``within`` times as long as the family's best."""
        ...


@dataclass
class LoadedArrangements:
    """Programs on a device, by the arrangements that their kernels read, which are computed on demand."""

    backend: Backend
    waiting: list[tuple[RProgram, frozenset[str]]] = field(default_factory=list)
    held: set[str] = field(default_factory=set)

    def add(self, program: RProgram, constants: Collection[str]) -> None:
        """Add a program that is on the device now."""
        if isinstance(self.backend, Arranging):
            self.waiting.append((program, frozenset(constants)))

    def shared(self, operator: ROperator, binding: Binding) -> ROperator:
        """Return a tiled operator, or a hardly slower one whose constants are arranged as for programs on the device."""
        backend = self.backend
        if not isinstance(backend, Arranging) or not self._known(backend) or not binding.constants & {*operator.inputs}:
            return operator
        try:
            wanted = backend.arrangements(operator, binding)
        except DeviceFailure:
            return operator
        if wanted <= self.held:
            return operator
        return backend.same_packing(operator, binding, self.held, WITHIN) or operator

    def _known(self, backend: Arranging) -> set[str]:
        while self.waiting:
            program, constants = self.waiting.pop()
            binding = Binding.of(program, constants)
            for operator in program.operators:
                try:
                    self.held |= backend.arrangements(operator, binding)
                except DeviceFailure:  # for example a third party's kernel
                    continue
        return self.held


@runtime_checkable
class LengthVariants(Protocol):
    """A Backend that uses length variants of a ranged program, at most ``cases``."""

    @property
    def cases(self) -> int:
        """Maximum number of parts of a range with separate tables; 0 to disable them."""
        ...

    def retile_for(self, operator: ROperator, binding: Binding, within: float) -> ROperator:
        """Return the operator with the tile and kernel that are best at the lengths of ``binding``, with its constant
        arrangements. Returns the operator itself if no kernel is predicted to be faster by more than ``within``."""
        ...

    def load_case(self, program: RProgram, constants: Mapping[str, Array], first: Loaded) -> Loaded:
        """Load a table for other lengths than those of ``first``, with the same ports. The two never run at the same time, so it
        uses the memory of ``first`` as far as it fits."""
        ...


@runtime_checkable
class Thrifty(Protocol):
    """A Backend that names a resource-efficient kernel for an operator (Rammer, section 4.2: resource-efficient rTasks). The
    fastest candidates need not include it: they are the fastest with the device to themselves, and so fill it."""

    def smallest_kernel(self, operator: ROperator, binding: Binding) -> ROperator | None:
        """Return the operator tiled for the least vEU time of its tasks in all, or None without another kernel. It is predicted
        to take not much longer than the best alone."""
        ...


@dataclass(frozen=True, slots=True)
class Between:
    """The cost between two iterations: the number of steps that take as long.

    ``cells`` counts steps of recurrent layers, ``light`` those of a model's loops. Steps that a run does not need cost as much as
    others. The numbers are smaller if the device skips them."""

    cells: int = 2
    light: int = 32


@runtime_checkable
class Repeating(Protocol):
    """A Backend that runs programs with ``repeat``: the table in iterations, with moves between buffers around each. For a
    Backend without this the core runs the iterations from the host."""

    @property
    def repeats(self) -> bool:
        """Return True if the backend repeats programs."""
        ...


@runtime_checkable
class Seaming(Protocol):
    """A Backend that reports the cost between two iterations; the default is that of ``Between``."""

    @property
    def between(self) -> Between:
        """The cost between two iterations."""
        ...


def iteration_cost(backend: Backend) -> Between | None:
    """Return the cost between two iterations on a device, or None if it does not repeat programs."""
    if not can_repeat(backend):
        return None
    return backend.between if isinstance(backend, Seaming) else Between()


def can_repeat(backend: Backend) -> bool:
    """Return True if a device runs repeated programs."""
    return isinstance(backend, Repeating) and backend.repeats


@dataclass(frozen=True, slots=True)
class Capability:
    """An optional protocol, the kind of object that may implement it (Backend, Profiler, Loaded), and its meaning."""

    protocol: type[Any]
    owner: str
    meaning: str

    @property
    def name(self) -> str:
        """The name of the protocol."""
        return self.protocol.__name__

    @property
    def members(self) -> tuple[str, ...]:
        """The methods and properties of the protocol."""
        return tuple(name for name in vars(self.protocol) if not name.startswith("_"))

    @property
    def properties(self) -> tuple[str, ...]:
        """The properties of the protocol."""
        return tuple(name for name in self.members if isinstance(vars(self.protocol)[name], property))


#: All capabilities. The table of docs/device.md, the self-test and the conformance kit read this list.
CAPABILITIES: Final = (
    Capability(Rated, "Backend", "Rates kernels that keep an operand on chip; decides which operators are fused."),
    Capability(PrologueRated, "Backend", "Rates kernels with maps before a contraction; decides if the maps are fused with it."),
    Capability(Thrifty, "Backend", "Offers a kernel with the least vEU time, for operators that run concurrently."),
    Capability(
        Arranging, "Backend", "Reports the layouts of constants that kernels read, so that programs share packed constants."
    ),
    Capability(LengthVariants, "Backend", "Runs length variants of a ranged program, each with tiles for a part of the range."),
    Capability(Repeating, "Backend", "Runs loop programs: the table once per iteration, with moves between buffers around each."),
    Capability(Seaming, "Backend", "Reports the cost between two iterations; decides the number of steps per iteration."),
    Capability(InPlace, "Backend", "Reports the alignment and padding of host arrays that programs access in place."),
    Capability(Families, "Backend", "Lists kernel families and configurations, so that a file with unknown ones is rejected."),
    Capability(Exhaustive, "Backend", "Lists every candidate, for the search over kernels."),
    Capability(Tracer, "Backend", "Records when and where each task ran, for `rammer run --trace`."),
    Capability(Preparing, "Profiler", "Compiles several candidates concurrently before they are measured."),
    Capability(Poisoned, "Loaded", "Fills the memory of runs with NaN, for the search over kernels."),
)


def capabilities_of(thing: object) -> tuple[Capability, ...]:
    """Return the capabilities that an object of a plugin has, after reading their properties. Raises what a property raises."""
    found = tuple(c for c in CAPABILITIES if isinstance(thing, c.protocol))
    for name in (name for capability in found for name in capability.properties):
        getattr(thing, name)
    return found

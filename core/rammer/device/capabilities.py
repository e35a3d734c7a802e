"""Optional capabilities of a Backend, as protocols: arranged constants, tables by length, small kernels, repeated programs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from rammer.device.manifest import Array, Backend, Binding, Loaded
from rammer.errors import DeviceFailure
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram

#: Of its predicted time what an operator may take longer, so that its constants are on the device once.
WITHIN: Final = 0.02


@runtime_checkable
class Arranging(Protocol):
    """A Backend may also say which arrangements of constants its kernels want (keys as in ``ConstantForm``)."""

    def arrangements(self, operator: ROperator, binding: Binding) -> frozenset[str]:
        """Those of a tiled operator's kernel; DeviceFailure where it has none."""
        ...

    def alike(self, operator: ROperator, binding: Binding, held: Collection[str], within: float) -> ROperator | None:
        """The best choice of a tiled operator's family that wants only arrangements of ``held``, where that is predicted to take
        no more than 1 + ``within`` times as long as the family's best; None where there is none."""
        ...


@dataclass
class ProgramsBeside:
    """Programs on a device, by the arrangements that their kernels want, which are found when somebody asks."""

    backend: Backend
    waiting: list[tuple[RProgram, frozenset[str]]] = field(default_factory=list)
    held: set[str] = field(default_factory=set)

    def add(self, program: RProgram, constants: Collection[str]) -> None:
        """One that is on the device now."""
        if isinstance(self.backend, Arranging):
            self.waiting.append((program, frozenset(constants)))

    def shared(self, operator: ROperator, binding: Binding) -> ROperator:
        """A tiled operator, or one that takes hardly longer and wants its constants as programs on the device do."""
        backend = self.backend
        if not isinstance(backend, Arranging) or not self._known(backend) or not binding.constants & {*operator.inputs}:
            return operator
        try:
            wanted = backend.arrangements(operator, binding)
        except DeviceFailure:
            return operator
        if wanted <= self.held:
            return operator
        return backend.alike(operator, binding, self.held, WITHIN) or operator

    def _known(self, backend: Arranging) -> set[str]:
        while self.waiting:
            program, constants = self.waiting.pop()
            binding = Binding.of(program, constants)
            for operator in program.operators:
                try:
                    self.held |= backend.arrangements(operator, binding)
                except DeviceFailure:  # a third party's kernel, say
                    continue
        return self.held


@runtime_checkable
class Cased(Protocol):
    """A Backend may also want several tables for a range of lengths: another one for each of so many ``cases``."""

    @property
    def cases(self) -> int:
        """Parts of a range that get tables of their own, at most; 0 for none."""
        ...

    def recast(self, operator: ROperator, binding: Binding, within: float) -> ROperator:
        """What a tiled operator computes, with the tile and kernel that are best at the lengths of ``binding`` of those that want
        constants arranged as it does; itself where none is predicted to be faster by more than that part."""
        ...

    def load_case(self, program: RProgram, constants: Mapping[str, Array], first: Loaded) -> Loaded:
        """A table for other lengths than those of ``first``, of the same ports, which never runs at the same time: in its memory,
        as far as that fits."""
        ...


@runtime_checkable
class Thrifty(Protocol):
    """A Backend may also name a kernel for an operator beside others, which its fastest candidates need not hold: those are the
    fastest with the device to themselves, and so fill it (Rammer, section 4.2: resource-efficient rTasks)."""

    def lean(self, operator: ROperator, binding: Binding) -> ROperator | None:
        """The operator tiled so that its tasks take least time of vEUs in all, of what is predicted to take not much longer than
        the best alone; None where no other kernel is known."""
        ...


@dataclass(frozen=True, slots=True)
class Between:
    """What is between two turns: how many steps take as long, of recurrent layers (``cells``) and of a model's own loops
    (``light``). Steps that a run does not need cost as much as others, unless the device skips them: then these are less."""

    cells: int = 2
    light: int = 32


@runtime_checkable
class Repeating(Protocol):
    """A Backend may also run programs with ``repeat``: the table again and again, with moves between buffers before and after
    each turn. A Backend without this gets none: the core then runs the turns from the host."""

    @property
    def repeats(self) -> bool:
        """Whether it does."""
        ...


@runtime_checkable
class Seaming(Protocol):
    """A Backend may say what is between two turns; one that does not has what ``Between`` has."""

    @property
    def between(self) -> Between:
        """It."""
        ...


def iteration_cost(backend: Backend) -> Between | None:
    """What is between two turns of a device; None where it does not repeat programs."""
    if not can_repeat(backend):
        return None
    return backend.between if isinstance(backend, Seaming) else Between()


def can_repeat(backend: Backend) -> bool:
    """Whether a device runs repeated programs."""
    return isinstance(backend, Repeating) and backend.repeats

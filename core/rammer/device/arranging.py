"""Devices whose kernels want constants arranged: programs side by side had better want the same."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from rammer.device.manifest import Backend, Binding
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

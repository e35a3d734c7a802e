"""Constants on a device: one copy of each arrangement of each constant, shared by all programs that read it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from rammer.device.manifest import Array, Backend, Binding
from rammer.errors import DeviceFailure
from rammer.ir.constants.mapped_files import release_pages
from rammer.ir.constants.recipes import Part, as_array, content_of
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram

__all__ = ["ConstantForm", "SharedConstants", "Upload", "WantedForm", "form_of"]

#: Fraction of its predicted time that an operator may lose, so that its constants are on the device once.
WITHIN: Final = 0.02

Held = TypeVar("Held")
Result = TypeVar("Result")
Made = TypeVar("Made", covariant=True)


@dataclass(frozen=True, slots=True)
class ConstantForm:
    """The key of a constant in the arrangement that kernels read. ``content`` is its digest (``rammer.ir.constants.recipes``),
    ``arrangement`` the key of the arrangement, "" if unchanged, and ``nbytes`` its size on the device."""

    content: str
    arrangement: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class WantedForm:
    """A form, and the function that computes it from the constant's values, which are read-only. The function returns an array
    with the form's elements in row-major order, with any strides."""

    form: ConstantForm
    values: Part
    make: Callable[[Array], Array]

    def given(self, put: Callable[[Array], Result]) -> Result:
        """Return the result of ``put`` on the form, then release the constant's pages if it is mapped."""
        values = as_array(self.values)
        result = put(self.make(values))
        release_pages(values)
        return result

    def fill(self, target: Array) -> None:
        """Write the form's bytes into ``target``. Raises ValueError if the sizes differ."""

        def put(made: Array) -> None:
            target.view(made.dtype).reshape(made.shape)[...] = made

        self.given(put)


class Upload(Protocol[Made]):
    """A function that uploads forms to the device and returns objects that own the memory."""

    def __call__(self, wanted: Mapping[ConstantForm, WantedForm], /) -> Mapping[ConstantForm, Made]: ...


@dataclass
class SharedConstants(Generic[Held]):
    """The constants of a Backend on its device, as objects that own the memory. Each lives as long as a program holds it. One
    thread loads at a time; any thread may release."""

    held: WeakValueDictionary[ConstantForm, Held] = field(default_factory=WeakValueDictionary)

    def take(self, wanted: Mapping[ConstantForm, WantedForm], upload: Upload[Held]) -> dict[ConstantForm, Held]:
        """Return the object that holds each form; ``upload`` creates the missing ones."""
        found = {form: kept for form in wanted if (kept := self.held.get(form)) is not None}
        return {**found, **self.renew({form: how for form, how in wanted.items() if form not in found}, upload)}

    def renew(self, wanted: Mapping[ConstantForm, WantedForm], upload: Upload[Held]) -> dict[ConstantForm, Held]:
        """Upload the forms again and replace the cached ones for later callers."""
        made = dict(upload(wanted)) if wanted else {}
        self.held.update(made)
        return made

    def forget(self, forms: Iterable[ConstantForm]) -> None:
        """Remove forms whose upload failed; the next caller uploads them again."""
        for form in forms:
            self.held.pop(form, None)


def form_of(values: Part, arrangement: str, nbytes: int) -> ConstantForm:
    """Return the form of a constant with these values."""
    return ConstantForm(content_of(values), arrangement, nbytes)


@dataclass
class LoadedArrangements:
    """Programs on a device, by the arrangements that their kernels read, which are computed on demand."""

    backend: Backend
    waiting: list[tuple[RProgram, frozenset[str]]] = field(default_factory=list)
    held: set[str] = field(default_factory=set)

    def add(self, program: RProgram, constants: Collection[str]) -> None:
        """Add a program that is on the device now."""
        self.waiting.append((program, frozenset(constants)))

    def shared(self, operator: ROperator, binding: Binding) -> ROperator:
        """Return a tiled operator, or a hardly slower one whose constants are arranged as for programs on the device."""
        backend = self.backend
        if not (self.waiting or self.held) or not binding.constants & {*operator.inputs}:
            return operator
        try:
            wanted = backend.arrangements(operator, binding)
        except DeviceFailure:
            return operator
        if not wanted or not (held := self._known()) or wanted <= held:
            return operator
        return backend.same_packing(operator, binding, held, WITHIN) or operator

    def _known(self) -> set[str]:
        while self.waiting:
            program, constants = self.waiting.pop()
            binding = Binding.of(program, constants)
            for operator in program.operators:
                try:
                    self.held |= self.backend.arrangements(operator, binding)
                except DeviceFailure:  # for example a third party's kernel
                    continue
        return self.held

"""Constants on a device: each arrangement of each constant once, whichever programs read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from rammer.ir.constants.mapped_files import release_pages
from rammer.ir.constants.recipes import Part, as_array, content_of

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Held = TypeVar("Held")
Result = TypeVar("Result")
Made = TypeVar("Made", covariant=True)


@dataclass(frozen=True, slots=True)
class ConstantForm:
    """A constant as kernels read it: what it holds (``rammer.ir.constants.digest``), and the key of its arrangement, "" where it
    is as it was. ``nbytes`` on the device."""

    content: str
    arrangement: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class WantedForm:
    """A form, and how it is made of the constant's values, which are read-only: an array whose elements, row by row, are the
    form's, however they lie."""

    form: ConstantForm
    values: Part
    make: Callable[[Array], Array]

    def given(self, put: Callable[[Array], Result]) -> Result:
        """What ``put`` makes of the form; the constant then takes no memory if it is mapped, or was made of what is."""
        values = as_array(self.values)
        result = put(self.make(values))
        release_pages(values)
        return result

    def fill(self, target: Array) -> None:
        """Write the form's bytes into ``target``, as many bytes. ValueError where it is larger or smaller."""

        def put(made: Array) -> None:
            target.view(made.dtype).reshape(made.shape)[...] = made

        self.given(put)


class Upload(Protocol[Made]):
    """Puts forms on the device, in objects that hold the memory."""

    def __call__(self, wanted: Mapping[ConstantForm, WantedForm], /) -> Mapping[ConstantForm, Made]: ...


@dataclass
class SharedConstants(Generic[Held]):
    """What a Backend has on its device, as objects of its own that hold the memory: each lives as long as a program has it. One
    thread loads at a time, and any may let go."""

    held: WeakValueDictionary[ConstantForm, Held] = field(default_factory=WeakValueDictionary)

    def take(self, wanted: Mapping[ConstantForm, WantedForm], upload: Upload[Held]) -> dict[ConstantForm, Held]:
        """What holds each form; ``upload`` makes those that are not there."""
        found = {form: kept for form in wanted if (kept := self.held.get(form)) is not None}
        return {**found, **self.renew({form: how for form, how in wanted.items() if form not in found}, upload)}

    def renew(self, wanted: Mapping[ConstantForm, WantedForm], upload: Upload[Held]) -> dict[ConstantForm, Held]:
        """Forms made anew, which those who ask later get."""
        made = dict(upload(wanted)) if wanted else {}
        self.held.update(made)
        return made

    def forget(self, forms: Iterable[ConstantForm]) -> None:
        """Forms that could not be made: who asks later makes them."""
        for form in forms:
            self.held.pop(form, None)


def form_of(values: Part, arrangement: str, nbytes: int) -> ConstantForm:
    """The form of a constant with these values."""
    return ConstantForm(content_of(values), arrangement, nbytes)

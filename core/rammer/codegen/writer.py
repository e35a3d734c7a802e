"""Cache of kernels by the computation of their operator: each is written once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, replace
from importlib import import_module
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from rammer.codegen.task_parameters import Argument, Unsuited
from rammer.device.code_hash import code_hash
from rammer.device.manifest import Binding
from rammer.errors import DeviceFailure
from rammer.ir.operator import ROperator

__all__ = ["KernelWriter", "Named", "generator_hash", "kinds_of", "make_refusal", "rename_arguments", "tensor_renaming"]


class Named(Protocol):
    """A kernel in the cache: a dataclass whose ``arguments`` name tensors, as ``CFunction`` or a ``TaskCode``."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The tensors of its pointers, in order: each an Argument, or a tuple that begins with the tensor's name."""
        ...


Code = TypeVar("Code", bound=Named)

#: Maximum number of cached texts, of some 10 KB each.
MOST_KEPT = 2048


class KernelWriter(Generic[Code]):
    """Cache of kernels, each written once by ``write``. One entry has the refusal or the text and its memory needs. It serves all
    equal operators (an unrolled LSTM has thousands), the search and the loaded program."""

    def __init__(self, write: Callable[[ROperator, Binding], Code]) -> None:
        self._write = write
        self._known: OrderedDict[str, tuple[ROperator, Code | Unsuited]] = OrderedDict()

    def written(self, operator: ROperator, binding: Binding) -> Code:
        """Return the kernel of a tiled operator. Raises DeviceFailure if its family cannot compute it."""
        key = binding.key(operator)
        if key not in self._known:
            self._known[key] = operator, self._try_write(operator, binding)
            if len(self._known) > MOST_KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        first, made = self._known[key]
        if isinstance(made, Unsuited):
            raise make_refusal(operator, made) from made
        return (
            made
            if first is operator
            else replace(made, arguments=rename_arguments(made.arguments, tensor_renaming(first, operator)))
        )

    def all(self, operators: Iterable[ROperator], binding: Binding) -> dict[str, Code]:
        """Return the kernel of every operator by name."""
        return {o.name: self.written(o, binding) for o in operators}

    def _try_write(self, operator: ROperator, binding: Binding) -> Code | Unsuited:
        try:
            return self._write(operator, binding)
        except Unsuited as problem:
            return problem
        except DeviceFailure as problem:
            if isinstance(problem.__cause__, Unsuited):
                return problem.__cause__
            raise


def make_refusal(operator: ROperator, problem: Unsuited) -> DeviceFailure:
    """Return the error for an operator that its family cannot compute."""
    return DeviceFailure(
        f"operator {operator.name} is unsuited to family {operator.family}: {problem}",
        where=operator.anchor.origin,
        hint="choose another tile, or omit the family",
    )


def kinds_of(operators: Iterable[ROperator], binding: Binding) -> dict[str, int]:
    """Return a number for every operator by name, equal for operators whose kernels have equal texts."""
    numbers: dict[str, int] = {}
    return {o.name: numbers.setdefault(binding.key(o), len(numbers)) for o in operators}


def tensor_renaming(first: ROperator, operator: ROperator) -> dict[str, str]:
    """Map the tensors of the equal operator ``first`` to those of ``operator``."""
    of_first, own = ((*o.inputs, *o.lengths, *o.outputs) for o in (first, operator))
    return dict(zip(of_first, own, strict=True))


def rename_arguments(arguments: Iterable[Any], names: Mapping[str, str]) -> tuple[Any, ...]:
    """Return ``arguments`` of an equal operator, with this operator's tensors."""
    return tuple(
        [Argument(names[a.tensor], a.written, a.packing) if isinstance(a, Argument) else (names[a[0]], *a[1:]) for a in arguments]
    )


def generator_hash(plugin: str) -> str:
    """Return a content hash of everything that writes kernel text: the package ``plugin`` and the core's emitter."""
    for package in (plugin, "rammer.codegen"):
        import_module(package)
    return f"{code_hash(plugin)} {code_hash('rammer.codegen')}"

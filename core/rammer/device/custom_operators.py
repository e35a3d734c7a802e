"""Operators that ONNX does not define: a plugin declares them (hook ``rammer_operators``), and may lower them as any other."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from rammer.errors import BadInput, DeviceFailure, attribute_errors
from rammer.ir.operator_use import Use as Use
from rammer.ir.types import TensorType

__all__ = ["CustomOperator", "CustomOperators", "Use"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Types of an attribute: a number, a word, or several numbers.
_KINDS = (int, float, str, tuple)
#: Prefix of the domains that belong to ONNX.
_RESERVED = "ai.onnx"
_DOMAIN = re.compile(r"[A-Za-z0-9_.-]+")


def is_reserved_domain(domain: str) -> bool:
    """Return True if the domain belongs to ONNX."""
    return not domain or f"{domain}.".startswith(f"{_RESERVED}.")


@dataclass(frozen=True)
class CustomOperator:
    """An operator of ``domain``: its use, and the types of its results.

    ``infer`` returns the types of all outputs that the use could have (or of the first ones, as many as it asks for). It reads
    the operands' types (``use.inputs``), attributes (``use.attr``) and known values (``use.value``), and raises BadInput if they
    are inconsistent. ``inputs`` and ``outputs`` count operands and results: a number, or the least and the most. ``attributes``
    has the default of each attribute, or its type (int, float, str, tuple) if it is required. ``reference`` computes the outputs
    with NumPy from attributes and operands (None for an absent one). It serves ``rammer compare --against reference``, and uses
    without a lowering, which run on the host. ``since`` is the first version of the domain that has the operator. ``plugin`` is
    filled in when the declaration is collected.
    """

    domain: str
    name: str
    infer: Callable[[Use], Sequence[TensorType]]
    inputs: int | tuple[int, int] = 1
    outputs: int | tuple[int, int] = 1
    attributes: Mapping[str, Any] = field(default_factory=dict)
    reference: Callable[[Mapping[str, Any], Sequence[Array | None]], Sequence[Array]] | None = None
    since: int = 1
    plugin: str = ""

    def __post_init__(self) -> None:
        if is_reserved_domain(self.domain):
            raise ValueError(f"the domain {self.domain!r} of operator {self.name} belongs to ONNX, so no plugin declares it")
        if not _DOMAIN.fullmatch(self.domain):
            raise ValueError(f"domain {self.domain!r} is not made of letters, digits, '.', '_' and '-'")
        if not self.name.isidentifier():
            raise ValueError(f"operator name {self.name!r} is not an identifier")
        for what, low, high in (("inputs", *self.counted(self.inputs)), ("outputs", *self.counted(self.outputs))):
            if not (what == "outputs") <= low <= high:
                raise ValueError(f"{self.title} declares {low} to {high} {what}")
        for name, value in self.attributes.items():
            if (value if isinstance(value, type) else type(value)) not in _KINDS:
                raise ValueError(f"attribute {name} of {self.title} must be an int, float, str or tuple, or one of these types")

    @staticmethod
    def counted(count: int | tuple[int, int]) -> tuple[int, int]:
        """Return the least and the greatest number of operands or results."""
        return (count, count) if isinstance(count, int) else count

    @property
    def title(self) -> str:
        """The name in texts: ``domain.name``, which is also the ``Node.op`` of a use."""
        return f"{self.domain}.{self.name}"

    def types(self, use: Use) -> tuple[TensorType, ...]:
        """Return the types of the outputs that ``use`` asks for. Errors of ``infer`` pass; raises TypeError if its result is
        malformed."""
        wanted = len(use.wanted)
        with attribute_errors(self):
            found = self.infer(use)
            if not isinstance(found, (list, tuple)) or len(found) < wanted or not all(map(_is_type, found)):
                raise TypeError(f"infer of {self.title} gives {found!r}, not a TensorType for each of {wanted} outputs")
        return tuple(found[:wanted])

    def referred(
        self, attributes: Mapping[str, Any], inputs: Sequence[str], outputs: Sequence[str], values: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return the outputs by name, computed by ``reference``. Raises DeviceFailure naming the plugin if that fails; its
        BadInput passes."""
        try:
            assert self.reference is not None
            found = list(self.reference(attributes, [values[n] if n else None for n in inputs]))
            if len(found) < len(outputs):
                raise ValueError(f"it gives {len(found)} of {len(outputs)} outputs")
            return {o: np.asarray(a) for o, a in zip(outputs, found, strict=False) if o}
        except BadInput:
            raise
        except Exception as problem:
            raise DeviceFailure(
                f"plugin {self.plugin} fails: the reference of {self.title}: {type(problem).__name__}: {problem}",
                hint=f"leave it out: RAMMER_DISABLE={self.plugin}",
            ) from problem

    def owned(self, plugin: str) -> CustomOperator:
        """Return the declaration with its ``plugin`` set."""
        return replace(self, plugin=plugin)

    def check(self, where: str, inputs: Sequence[str], outputs: int, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return all attributes of a use, defaults included. ``where`` names the node.

        Raises BadInput if the number of operands or results is wrong, or if a required operand or attribute is missing. It is
        also raised for attributes that are undeclared or of another kind."""
        hint = f"{self.title} is declared by plugin {self.plugin}: see its documentation"
        for what, count, (low, high) in (
            ("inputs", len(inputs), self.counted(self.inputs)),
            ("outputs", outputs, self.counted(self.outputs)),
        ):
            if not low <= count <= high:
                wanted = f"{low}" if low == high else f"{low} to {high}"
                raise BadInput(f"{self.title} has {count} {what}, where it needs {wanted}", where, hint)
        if not all(inputs[: self.counted(self.inputs)[0]]):
            raise BadInput(f"{self.title} is not given its input {list(inputs).index('')}", where, hint)
        for name, value in attributes.items():
            if name not in self.attributes:
                raise BadInput(f"{self.title} has no attribute {name!r}", where, hint)
            declared = self.attributes[name]
            kind = declared if isinstance(declared, type) else type(declared)
            if type(value) is not kind:
                raise BadInput(f"attribute {name} of {self.title} is {type(value).__name__}, not {kind.__name__}", where, hint)
        lacking = [n for n, v in self.attributes.items() if isinstance(v, type) and n not in attributes]
        if lacking:
            raise BadInput(f"{self.title} lacks the attribute {lacking[0]}", where, hint)
        return {**self.attributes, **attributes}


def _is_type(found: object) -> bool:
    return (
        isinstance(found, TensorType) and isinstance(found.shape, tuple) and all(type(n) is int and n >= 0 for n in found.shape)
    )


#: Declarations by (domain, operator).
CustomOperators: TypeAlias = Mapping[tuple[str, str], CustomOperator]

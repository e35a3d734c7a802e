"""Checks of the values that plugins return from hooks. Each value gets a key that must be unique among plugins; the key None is
exempt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from rammer.device.custom_operators import CustomOperator, CustomOperators, is_reserved_domain
from rammer.ir.operator import ROperator

#: Converts a hook's result to keys and values. Raises TypeError if the result has the wrong type.
Checked: TypeAlias = Callable[[Any], list[tuple[Any, Any]]]

#: Methods of a Transport that the core calls.
TRANSPORT = ("probe", "connects", "open")


def check_policies(group: Any) -> list[tuple[Any, Any]]:
    """Return the policies by the names with which users choose them."""
    named = [(value.name, value) for _, value in check_passes(group)]
    for name, value in named:
        if not callable(getattr(value, "proposals", None)):
            raise TypeError(f"{name} is not a Policy (rammer.schedule.policy)")
    return named


def check_passes(group: Any) -> list[tuple[Any, Any]]:
    """Return the values after checking that each has a name and is callable."""
    for value in group:
        if not (callable(value) and isinstance(getattr(value, "name", None), str)):
            raise TypeError(f"{value!r} is not a callable with a name")
    return [(None, value) for value in group]


def check_transports(group: Any) -> list[tuple[Any, Any]]:
    """Return the transports by the names with which users choose them."""
    for value in group:
        if not (isinstance(getattr(value, "name", None), str) and all(callable(getattr(value, n, None)) for n in TRANSPORT)):
            raise TypeError(f"{value!r} is not a Transport (rammer.distributed.transport.protocol)")
    return [(value.name, value) for value in group]


def check_declarations(group: Any) -> list[tuple[Any, Any]]:
    """Return declarations of operators outside ONNX, by (domain, name)."""
    for value in group:
        if not isinstance(value, CustomOperator):
            raise TypeError(f"{value!r} is not a CustomOperator")
    keys = [(value.domain, value.name) for value in group]
    if len(set(keys)) < len(keys):
        raise ValueError(f"it declares {describe_key(next(k for k in keys if keys.count(k) > 1))} twice")
    return list(zip(keys, group, strict=True))


def check_lowerings(group: Any, declared: CustomOperators) -> list[tuple[Any, Any]]:
    """Return lowering functions by (domain, operator), for operators that ONNX has or a plugin declares."""
    if not isinstance(group, Mapping):
        raise TypeError(f"{group!r} is not a mapping of functions by (domain, operator)")
    for key, function in group.items():
        if not (isinstance(key, tuple) and [type(k) for k in key] == [str, str] and callable(function)):
            raise TypeError(f"{key!r}: {function!r} is not a function by (domain, operator)")
        if key not in declared and not is_reserved_domain(key[0]):
            raise TypeError(f"it lowers {describe_key(key)}, which no plugin declares (hook rammer_operators)")
    return list(group.items())


def check_candidates(group: Any, operator: ROperator) -> list[tuple[Any, Any]]:
    """Return the candidates after checking that they are ``operator`` with tiles and families."""
    for value in group:
        if not isinstance(value, ROperator):
            raise TypeError(f"{value!r} is not an ROperator")
        if replace(value, tile=operator.tile, family=operator.family, config=operator.config) != operator:
            raise ValueError(f"it offers another operator than the requested one: {value.head()}")
        if len(value.tile) != len(operator.anchor.axes) or any(type(n) is not int or n < 1 for n in value.tile):
            raise ValueError(f"it offers the tile {value.tile} for {len(operator.anchor.axes)} axes")
        if any(value.tile[d] < operator.anchor.axes[d].extent for d in operator.uncut):
            raise ValueError(f"it offers the tile {value.tile}, which cuts an axis that a result lacks")
    return [(None, value) for value in group]


def describe_key(key: Any) -> str:
    """Return the text by which messages name a key."""
    return ".".join(filter(None, key)) if isinstance(key, tuple) else repr(key)

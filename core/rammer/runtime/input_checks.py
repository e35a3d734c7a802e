"""Checks of user inputs to runs and bound calls against the inputs that a model declares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from rammer.device.arrays import as_numpy, by_name, check_mapping, check_names, on_host
from rammer.errors import BadInput
from rammer.ir.formats import from_file, name_of
from rammer.ir.port import MAP, OPTIONAL, SEQUENCE, STRING, ModelPort
from rammer.runtime.model_source import Head

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def name_inputs(ports: tuple[ModelPort, ...], given: Any) -> Mapping[str, Any]:
    """Return inputs by name, from a mapping, from a list or tuple in the model's order, or from the only input. Raises BadInput
    for another number of inputs."""
    if isinstance(given, Mapping):
        return given
    values = given if isinstance(given, list | tuple) else (given,)
    if len(values) != len(ports):
        names = ", ".join(p.name for p in ports)
        raise BadInput(f"{len(values)} inputs were given, the model has {len(ports)}", hint=f"in this order: {names}")
    return {p.name: value for p, value in zip(ports, values, strict=True)}


def is_host_value(value: Any) -> bool:
    """Return True unless ``value`` is an array in the memory of a device."""
    return isinstance(value, np.ndarray) or on_host(value) or not hasattr(value, "__dlpack_device__")


def check_inputs(ports: tuple[ModelPort, ...], given: Mapping[str, Any]) -> dict[str, Array]:
    """Return the inputs as arrays of exactly the declared types. Raises BadInput with the wrong input and the reason."""
    if _are_exact(ports, given):  # the checks took a fifth of a call of a small program
        return {p.name: given[p.name] for p in ports}
    given = check_mapping("input", given)
    hosted = {p.name: _on_host(p, given[p.name]) for p in ports if not p.numeric and p.name in given}
    others = by_name("input", {n: v for n, v in given.items() if n not in hosted})
    kinds = {p.name: p.dtype for p in ports}
    arrays = {n: from_file(as_numpy(f"input {n!r}", v), kinds.get(n, "")) for n, v in others.items()}
    check_ports(ports, {**dict.fromkeys(hosted, ("", ())), **{n: (name_of(a.dtype), a.shape) for n, a in arrays.items()}})
    return {p.name: hosted[p.name] if p.name in hosted else np.asarray(arrays[p.name], order="C") for p in ports}


def _are_exact(ports: tuple[ModelPort, ...], given: Mapping[str, Any]) -> bool:
    """Return True if ``given`` has a contiguous array of exactly the declared type and static shape for every port."""
    if type(given) is not dict or len(given) != len(ports):
        return False
    for port in ports:
        array = given.get(port.name)
        if type(array) is not np.ndarray or array.shape != port.shape or name_of(array.dtype) != port.dtype:
            return False
        if not array.flags.c_contiguous:
            return False
    return True


def _on_host(port: ModelPort, value: Any) -> Any:
    """Return the value of an input that devices do not support. Raises BadInput if its kind is wrong."""
    if port.dtype == SEQUENCE and isinstance(value, list | tuple):
        return [as_numpy(f"input {port.name!r}", v) for v in value]
    if port.dtype == OPTIONAL:
        if value is None or isinstance(value, list | tuple):
            return value
        return as_numpy(f"input {port.name!r}", value)
    if port.dtype == MAP and isinstance(value, Mapping) and _of_one_kind(value.keys()) and _of_one_kind(value.values()):
        return dict(value)
    array = as_numpy(f"input {port.name!r}", value)
    if port.dtype == STRING and array.dtype.kind in "OUST":
        return array.astype(object)
    wanted = {STRING: "an array of strings", SEQUENCE: "a list of arrays", MAP: "a dict of numbers or words"}[port.dtype]
    raise BadInput(f"input {port.name!r} is {array.dtype}{list(array.shape)}, the model declares {wanted}")


def _of_one_kind(values: Iterable[Any]) -> bool:
    """Return True if all values are numbers or all are strings."""
    kinds = {str if isinstance(v, str) else isinstance(v, int | float | np.number) for v in values}
    return kinds <= {str} or kinds <= {True}


def shapes_of(head: Head, values: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the inputs that a device supports."""
    return {p.name: values[p.name].shape for p in head.inputs if p.numeric}


def check_ports(ports: tuple[ModelPort, ...], given: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Raise BadInput unless ``given`` has the declared element type and shape for every port."""
    names = [p.name for p in ports]
    check_names("input", given, dict.fromkeys(names))
    for port in ports:
        if port.name not in given:
            raise BadInput(f"input {port.name!r} is missing", hint=f"the model needs: {', '.join(names)}")
        if port.numeric:
            _check_port(port, *given[port.name])
    _check_symbols([p for p in ports if p.numeric], {name: shape for name, (_, shape) in given.items()})


def _check_port(port: ModelPort, dtype: str, shape: tuple[int, ...]) -> None:
    if dtype == port.dtype and shape == port.shape:
        return
    declared, dims = port.declared, port.dims(len(shape))
    if dtype != port.dtype:
        raise BadInput(
            f"input {port.name!r} is {dtype}, the model declares {declared}", hint=f"convert it: array.astype({port.dtype!r})"
        )
    if len(shape) != len(dims):
        raise BadInput(f"input {port.name!r} has rank {len(shape)}, the model declares {declared}")
    for axis, (have, want) in enumerate(zip(shape, dims, strict=True)):
        if isinstance(want, int) and have != want:
            raise BadInput(f"input {port.name!r} has {have} elements along axis {axis}, the model declares {declared}")


def _check_symbols(ports: Sequence[ModelPort], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise BadInput if a named dimension has different extents."""
    known: dict[str, tuple[int, str]] = {}
    for port in ports:
        shape = shapes[port.name]
        for have, want in zip(shape, port.dims(len(shape)), strict=True):
            if isinstance(want, str):
                first, where = known.setdefault(want, (have, port.name))
                if first != have:
                    raise BadInput(f"dimension {want!r} is {first} in input {where!r} but {have} in {port.name!r}")

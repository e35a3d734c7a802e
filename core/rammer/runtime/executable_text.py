"""Descriptions of executables and bound calls: one line for a prompt, a table for a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from rammer.device.arrays import dtype_of, shape_of
from rammer.ir.port import ModelPort

if TYPE_CHECKING:
    from rammer.runtime.bound_call import BoundCall
    from rammer.runtime.executable import Executable

#: Maximum inputs or outputs that one line shows.
FEW = 4


def describe_executable(executable: Executable) -> str:
    """Return one line: the model, its device, precision, inputs, outputs and loaded programs."""
    head = executable.head
    inputs, outputs = (_join([_describe_port(p) for p in ports]) for ports in (head.inputs, head.outputs))
    return f"<Executable {head.name} on {_place(executable)}: ({inputs}) -> ({outputs}), {_state(executable)}>"


def describe_bound(bound: BoundCall) -> str:
    """Return one line: the arrays of a bound call."""
    inputs, outputs = (_join(_describe_arrays(arrays)) for arrays in (bound.inputs, bound.outputs))
    return f"<BoundCall {bound.graph.name}: ({inputs}) -> ({outputs}){', closed' if bound.closed else ''}>"


def executable_html(executable: Executable) -> str:
    """Return a table of an executable's inputs and outputs, with a caption of its state."""
    head = executable.head
    caption = f"<b>{escape(head.name)}</b> on {escape(_place(executable))}, {escape(_state(executable))}"
    rows = (
        f"<tr><td>{role}</td><td>{escape(p.name)}</td><td>{escape(_shown_type(p))}</td></tr>"
        for role, ports in (("input", head.inputs), ("output", head.outputs))
        for p in ports
    )
    return f"<table><caption>{caption}</caption><tr><th></th><th>name</th><th>type</th></tr>{''.join(rows)}</table>"


def _place(executable: Executable) -> str:
    return f"{executable.device} in {executable.options.precision}"


def _state(executable: Executable) -> str:
    if executable.closed:
        return "closed"
    count, seconds = len(executable.cache), executable.timing.total
    ran = f", last run {seconds * 1e3:.3g} ms" if seconds else ""
    return f"{count} program{'s' if count != 1 else ''} loaded{ran}"


def _describe_port(port: ModelPort) -> str:
    return f"{port.name}: {_shown_type(port)}"


def _shown_type(port: ModelPort) -> str:
    return port.container or (port.declared if port.dtype else "?")


def _describe_arrays(arrays: Mapping[str, Any]) -> Iterable[str]:
    return (f"{name}: {dtype_of(a)}{list(shape_of(a))}".replace(" ", "").replace(":", ": ") for name, a in arrays.items())


def _join(texts: Iterable[str]) -> str:
    found: Sequence[str] = list(texts)
    more = [f"and {len(found) - FEW} more"] if len(found) > FEW else []
    return ", ".join([*found[:FEW], *more])

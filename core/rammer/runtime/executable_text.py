"""Descriptions of executables and bound calls: one line for a prompt, a table for a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from rammer.device.arrays import dtype_of, shape_of
from rammer.ir.port import ModelPort

#: Maximum inputs or outputs that one line shows.
FEW = 4


def executable_line(place: str, inputs: Sequence[ModelPort], outputs: Sequence[ModelPort], state: str) -> str:
    """Return one line for an executable. ``place`` names the model and its device, ``state`` the loaded programs."""
    given, made = (_join([f"{p.name}: {_shown_type(p)}" for p in ports]) for ports in (inputs, outputs))
    return f"<Executable {place}: ({given}) -> ({made}), {state}>"


def executable_html(place: str, inputs: Sequence[ModelPort], outputs: Sequence[ModelPort], state: str) -> str:
    """Return a table of an executable's inputs and outputs, with a caption of its place and state."""
    rows = (
        f"<tr><td>{role}</td><td>{escape(p.name)}</td><td>{escape(_shown_type(p))}</td></tr>"
        for role, ports in (("input", inputs), ("output", outputs))
        for p in ports
    )
    caption = f"{escape(place)}, {escape(state)}"
    return f"<table><caption>{caption}</caption><tr><th></th><th>name</th><th>type</th></tr>{''.join(rows)}</table>"


def bound_line(name: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any], state: str) -> str:
    """Return one line for a bound call of the model ``name``."""
    given, made = (_join(_describe_arrays(arrays)) for arrays in (inputs, outputs))
    return f"<BoundCall {name}: ({given}) -> ({made}){state}>"


def programs_state(count: int, seconds: float) -> str:
    """Return the number of loaded programs, and the seconds of the last run if there was one."""
    ran = f", last run {seconds * 1e3:.3g} ms" if seconds else ""
    return f"{count} program{'s' if count != 1 else ''} loaded{ran}"


def _shown_type(port: ModelPort) -> str:
    return port.container or (port.declared if port.dtype else "?")


def _describe_arrays(arrays: Mapping[str, Any]) -> Iterable[str]:
    return (f"{name}: {dtype_of(a)}[{','.join(map(str, shape_of(a)))}]" for name, a in arrays.items())


def _join(texts: Iterable[str]) -> str:
    found: Sequence[str] = list(texts)
    more = [f"and {len(found) - FEW} more"] if len(found) > FEW else []
    return ", ".join([*found[:FEW], *more])

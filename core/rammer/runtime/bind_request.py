"""User requests to ``Executable.bind``: arrays, and outputs that alias inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rammer.device.arrays import by_name, check_mapping, dtype_of, shape_of
from rammer.errors import BadInput
from rammer.ir.formats import carrier_dtype
from rammer.ir.port import ModelPort
from rammer.runtime.auto_ranges import LengthHistory
from rammer.runtime.input_checks import check_ports
from rammer.runtime.model_source import Head
from rammer.runtime.shape_buckets import FIXED, Lengths, Shapes, Span


class BindRequest(NamedTuple):
    """A parsed bind request: arrays by name, the input that each output aliases, all input shapes, and the ranges. With ranges,
    shapes are those of the greatest lengths. ``found``: the ranges were inferred from runs, not specified."""

    inputs: dict[str, Any]
    outputs: dict[str, Any]
    kept: dict[str, str]
    shapes: Shapes
    lengths: Lengths
    found: bool = False

    @property
    def spans(self) -> Mapping[str, Span]:
        """Map from dimensions to their ranges."""
        return self.lengths.spans


def parse_bind_request(
    head: Head, lengths: Lengths, history: LengthHistory, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> BindRequest:
    """Return a parsed ``bind`` request. Raises BadInput for a wrong name, type or shape, and for an unknown shape."""
    arrays, outputs = by_name("input", inputs), check_mapping("output", outputs)
    kept = {o: i for o, i in outputs.items() if isinstance(i, str)}
    _check_kept(head, kept)
    shapes = {n: shape_of(a) for n, a in arrays.items()}
    found = not lengths.spans
    lengths = history.until(head.inputs, shapes) if found else lengths
    wholes = lengths.whole({name: span[1] for name, span in lengths.spans.items()})
    whole = bool(lengths.spans) and _are_whole(head, wholes, {n: s for n, s in shapes.items() if n not in kept.values()})
    ports = {p.name: p for p in head.inputs}
    for name in dict.fromkeys(kept.values()):
        shapes[name] = _state_shape(ports[name], head, shapes, wholes if whole else {})
    bits = {p.name: p.dtype for p in head.inputs if p.name in arrays and dtype_of(arrays[p.name]) == carrier_dtype(p.dtype)}
    kinds = {n: bits.get(n, dtype_of(arrays[n]) if n in arrays else ports[n].dtype) for n in shapes}
    check_ports(head.inputs, {n: (kinds[n], s) for n, s in shapes.items()})
    given = by_name("output", {o: a for o, a in outputs.items() if o not in kept})
    return BindRequest(arrays, given, kept, shapes, lengths if whole else FIXED, found)


def _check_kept(head: Head, kept: Mapping[str, str]) -> None:
    names = [p.name for p in head.inputs]
    for output, name in kept.items():
        if output not in head.output_names:
            raise BadInput(f"the model has no output {output!r}", hint=f"its outputs are: {', '.join(head.output_names)}")
        if name not in names:
            raise BadInput(f"output {output!r} is stored in input {name!r}, which the model does not have", hint=", ".join(names))
    if len({*kept.values()}) < len(kept):
        raise BadInput("two outputs are stored in one input", hint="give each output a separate input")


def _are_whole(head: Head, wholes: Mapping[str, int], shapes: Shapes) -> bool:
    """Return True if arrays have the greatest lengths of the range along all of its dimensions."""
    found = {(d, n) for p in head.inputs for d, n in zip(p.shape, shapes.get(p.name, ()), strict=False) if isinstance(d, str)}
    return all(wholes.get(d, n) == n for d, n in found)


def _state_shape(port: ModelPort, head: Head, shapes: Shapes, wholes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of an input that an output aliases, from other inputs' shapes and the greatest lengths."""
    others = {p.name: p for p in head.inputs if p.name in shapes}
    known = {d: n for p in others.values() for d, n in zip(p.shape, shapes[p.name], strict=False) if isinstance(d, str)}
    known |= wholes
    if not port.ranked:
        raise BadInput(f"the shape of input {port.name!r} is unknown", str(port), "give an array for it")
    found = tuple(d if isinstance(d, int) else known.get(d or "", -1) for d in port.shape)
    if -1 in found:
        dim = port.shape[found.index(-1)]
        raise BadInput(f"the extent of input {port.name!r} along {dim or 'an axis'} is unknown", hint="give an array for it")
    return found

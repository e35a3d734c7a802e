"""Static input shapes of a model: those of the file, completed by the user's."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from rammer.errors import BadInput
from rammer.frontend.read.reader import Model
from rammer.ir.port import ModelPort

#: Proposed extents in a hint for a dynamic image, by axis (batch, channels, height, width).
_IMAGE = (1, 3, 224, 224)
#: Proposed rank in a hint for an input without a declared shape.
_GUESSED_RANK = 2


def bound_shapes(model: Model, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the static shape of each numeric tensor input by name. A symbol has one extent wherever it occurs.

    Raises BadInput for an unknown input or a shape that contradicts the model. Also raises it for a dynamic dimension that no
    shape fixes; the hint then contains the option to type."""
    ports = {port.name: port for port in model.inputs}
    for name in shapes:
        if name not in ports:
            close = difflib.get_close_matches(name, ports, 1)
            known = f"did you mean {close[0]}?" if close else f"the inputs are {', '.join(ports)}"
            raise BadInput(f"the model has no input {name!r}", f"shape of {name}", known)
    symbols: dict[str, int] = {}
    for name, shape in shapes.items():
        _unify_shape(ports[name], tuple(shape), symbols)
    return {name: _port_shape(port, shapes.get(name), symbols, ports) for name, port in ports.items() if port.numeric}


def _unify_shape(port: ModelPort, shape: tuple[int, ...], symbols: dict[str, int]) -> None:
    """Check ``shape`` against ``port`` and record the extents of its symbols."""
    text = "x".join(map(str, shape))
    if any(extent < 0 for extent in shape):
        raise BadInput(f"shape {text} of input {port.name!r} has a negative extent", str(port), "extents start at 0")
    if not port.ranked:
        return
    if len(shape) != len(port.shape):
        raise BadInput(
            f"shape {text} of input {port.name!r} has rank {len(shape)}, the model declares rank {len(port.shape)}",
            str(port),
            shape_option(port, symbols),
        )
    for axis, (extent, declared) in enumerate(zip(shape, port.shape, strict=True)):
        wanted = symbols.setdefault(declared, extent) if isinstance(declared, str) else declared
        if wanted is not None and wanted != extent:
            symbol = f" ({declared})" if isinstance(declared, str) else ""
            raise BadInput(
                f"axis {axis} of input {port.name!r} is {extent}, the model declares {wanted}{symbol}",
                str(port),
                shape_option(port, symbols),
            )


def _port_shape(
    port: ModelPort, given: tuple[int, ...] | None, symbols: Mapping[str, int], ports: Mapping[str, ModelPort]
) -> tuple[int, ...]:
    if given is not None:
        return tuple(given)
    dims = [symbols.get(d) if isinstance(d, str) else d for d in port.shape]
    if None in dims or not port.ranked:
        missing = [p for p in ports.values() if not p.ranked or any(not isinstance(d, int) for d in p.shape)]
        hints = " ".join(shape_option(p, symbols) for p in missing)
        if not port.ranked:
            raise BadInput(f"input {port.name!r} declares no shape", str(port), f"give it, for example {hints}")
        raise BadInput(f"input {port.name!r} has a dynamic shape", str(port), f"give it, for example {hints}")
    return tuple(d for d in dims if d is not None)


def shape_option(port: ModelPort, symbols: Mapping[str, int]) -> str:
    """Return the command-line option that fixes the shape of ``port``, with likely values for unknown extents."""
    dims = port.dims(_GUESSED_RANK)
    likely = _IMAGE if len(dims) == len(_IMAGE) else (1, *[16] * len(dims))
    extents = []
    for declared, guess in zip(dims, likely, strict=False):
        known = symbols.get(declared) if isinstance(declared, str) else declared
        extents.append(guess if known is None else known)
    return f"--shape {port.name}:{'x'.join(map(str, extents))}"

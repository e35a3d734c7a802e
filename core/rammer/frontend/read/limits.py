"""Limits on the size of a model, checked by arithmetic on shapes and attributes before any allocation."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from onnx import AttributeProto, NodeProto

from rammer.errors import BadInput, TooLong
from rammer.frontend.op_traits import size_operands
from rammer.frontend.read.node_protos import node_title

#: Maximum number of axes of a tensor, and of elements along one axis. A Compute has reduction axes besides, and NumPy supports 32
#: axes in total. Element addresses fit in 64 bits.
MAX_RANK: Final = 24
MAX_EXTENT: Final = (1 << 31) - 1
#: Maximum number of elements of a tensor: 1 TiB if an element is a byte.
MAX_ELEMENTS: Final = 1 << 40
#: Maximum number of elements that are combined for one element of a result.
MAX_TAPS: Final = 1 << 28
#: Maximum number of positions along an axis that are computed individually (Resize), and of entries of a kernel's table.
MAX_POSITIONS: Final = 1 << 24
MAX_TABLE: Final = 1 << 18
#: Maximum bytes of a constant that a file describes without storing its values.
MAX_DESCRIBED_BYTES: Final = 1 << 30
#: Maximum bytes of a folded value: a few bytes in a file may fill 400 MB by ConstantOfShape. Larger values remain operators.
#: Values folded from large constants may have ``WIDENED`` times their bytes (int8 to float32).
MAX_FOLDED_BYTES: Final = 64 << 20
WIDENED: Final = 4
#: Maximum number of operators of a model.
MAX_NODES: Final = 100_000

#: Maximum nesting of bodies (of If, Loop, Scan) and depth of function calls. Protobuf and ONNX's inliner fail at slightly larger
#: depths.
MAX_NESTING: Final = 24
MAX_CALLS: Final = 100
#: Default CPU seconds of the bodies of one Loop or Scan on the host per run; ``HOST_SECONDS_VARIABLE`` overrides it.
HOST_SECONDS: Final = 10.0
HOST_SECONDS_VARIABLE: Final = "RAMMER_HOST_SECONDS"

_HINT: Final = "no device supports a tensor of this size: check the model's shapes and attributes"

#: Attributes that are sizes or element counts, with their least valid value.
_SIZES: Final[Mapping[str, int]] = {
    "kernel_shape": 1,
    "strides": 1,
    "dilations": 1,
    "pads": -MAX_EXTENT,
    "output_padding": 0,
    "output_shape": 0,
    "group": 1,
    "hidden_size": 1,
    "size": 1,
    "blocksize": 1,
    "num_outputs": 1,
    "num_groups": 1,
    "shape": -1,
    "sample_size": 1,
    "p": 1,
    "k": -MAX_EXTENT,
}


def check_shape(shape: Iterable[int], where: str) -> None:
    """Raise BadInput if an extent is negative or the shape exceeds the limits."""
    extents = tuple(shape)
    if len(extents) > MAX_RANK:
        raise BadInput(f"a tensor has {len(extents)} axes, more than {MAX_RANK}", where, "export the model with fewer axes")
    if any(n < 0 for n in extents):
        raise BadInput(f"a tensor has the negative extent {min(extents)}", where, "export the model again")
    if not is_allowed_shape(extents):
        shown = ",".join(map(str, extents[:8]))
        raise BadInput(
            f"a tensor of shape [{shown}] is beyond the limits of {MAX_EXTENT} elements along an axis and {MAX_ELEMENTS} in all",
            where,
            _HINT,
        )


def is_allowed_shape(shape: Iterable[int]) -> bool:
    """Return True if the known extents are within the limits."""
    extents = tuple(shape)
    return max(extents, default=0) <= MAX_EXTENT and math.prod(extents) <= MAX_ELEMENTS


def check_positions(count: int, what: str, most: int = MAX_POSITIONS) -> None:
    """Raise BadInput if ``what`` has more than ``most`` positions to compute one by one or to store in a table."""
    if count > most:
        raise BadInput(
            f"{what} over {count} positions along an axis has no simple form, and only {most} can be listed",
            what,
            "use whole-numbered scales, or fewer positions",
        )


def check_taps(count: int, where: str) -> None:
    """Raise BadInput if each element of a result combines more elements than the limit."""
    if count > MAX_TAPS:
        raise BadInput(f"every element of a result needs {count} elements, more than {MAX_TAPS}", where, _HINT)


def check_folded(nbytes: int, where: str) -> None:
    """Raise BadInput if a constant that the file describes in a few bytes exceeds the limit."""
    if nbytes > MAX_DESCRIBED_BYTES:
        raise BadInput(
            f"a constant of {nbytes} bytes is described by a few bytes; the limit is {MAX_DESCRIBED_BYTES}", where, _HINT
        )


def may_fold(nbytes: int, stored: int) -> bool:
    """Return True if a value of ``nbytes`` is folded in a model that stores ``stored`` bytes of constants."""
    return nbytes <= max(MAX_FOLDED_BYTES, WIDENED * stored)


def check_node_count(count: int, where: str) -> None:
    """Raise BadInput if the model has more operators than the limit."""
    if count > MAX_NODES:
        raise BadInput(
            f"the model has {count} operators, more than {MAX_NODES}",
            where,
            "split the model, or use Loop or Scan for repeated parts",
        )


def check_nesting(nodes: Iterable[NodeProto], where: str) -> None:
    """Raise BadInput if bodies are nested deeper than the limit."""
    level, depth = list(nodes), 0
    while level:
        if depth > MAX_NESTING:
            raise BadInput(
                f"bodies of If, Loop or Scan are nested more than {MAX_NESTING} deep", where, "export the model with less nesting"
            )
        level = [inner for n in level for a in n.attribute for g in (a.g, *a.graphs) for inner in g.node]
        depth += 1


def check_calls(depth: int, where: str) -> None:
    """Raise BadInput if function calls are nested deeper than the limit."""
    if depth > MAX_CALLS:
        raise BadInput(f"functions call functions more than {MAX_CALLS} deep", where, "export the model without functions")


def host_seconds() -> float:
    """Return the seconds that loops on the host may run, infinity if the user sets 0. Raises BadInput for an invalid setting."""
    text = os.environ.get(HOST_SECONDS_VARIABLE, "")
    try:
        seconds = float(text or HOST_SECONDS)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise BadInput(
            f"{HOST_SECONDS_VARIABLE} is {text!r}, which is not a number of seconds",
            HOST_SECONDS_VARIABLE,
            "give seconds, or 0 for no limit",
        )
    return seconds or math.inf


def check_loop(turns: Sequence[tuple[str, int]], spent: float, most: float) -> None:
    """Raise TooLong if loops on the host have used ``spent`` CPU seconds, more than ``most``. ``turns`` lists each loop with its
    finished iterations, outermost first."""
    if spent > most:
        (op, count), *inner = turns
        within = "".join(f", in it {name} after {number}" for name, number in inner)
        raise TooLong(
            f"{op} has not ended after {count} iterations and {most:g} s on the host{within}",
            op,
            f"set {HOST_SECONDS_VARIABLE} to more seconds, or to 0 for no limit, if the loop terminates",
        )


def check_sizes(node: NodeProto, operands: Mapping[str, np.ndarray]) -> None:
    """Raise BadInput if an attribute or a constant operand holds an impossible size."""
    for attribute in node.attribute:
        low = _SIZES.get(attribute.name)
        if low is not None and attribute.type in (AttributeProto.INT, AttributeProto.INTS):
            values = attribute.ints if attribute.type == AttributeProto.INTS else (attribute.i,)
            _check_values(f"attribute {attribute.name}", values, low, node)
    for place in size_operands(node.op_type) if not node.domain else ():
        value = operands.get(node.input[place]) if place < len(node.input) else None
        if value is not None and value.dtype.kind in "iu" and value.size <= 4096:
            low = 1 if node.op_type == "Resize" else -MAX_EXTENT
            _check_values(f"input {place}", value.ravel().tolist(), low, node)
    if node.op_type in ("Resize", "Upsample") and not node.domain:
        _check_scales(node, operands)
    if node.op_type == "Range" and not node.domain:
        _check_range(node, operands)


def _check_range(node: NodeProto, operands: Mapping[str, np.ndarray]) -> None:
    """Raise BadInput if Range has too many elements, ``max(ceil((limit - start) / delta), 0)``. ONNX's inference computes this
    number in 64 bits without checks."""
    known = [operands[n].item() for n in node.input if n in operands and operands[n].size == 1]
    if len(known) < 3:
        return
    start, limit, delta = known
    if not all(map(math.isfinite, known)) or delta == 0 or not (limit - start) / delta <= MAX_EXTENT:
        raise BadInput(
            f"Range from {start} to {limit} by {delta} has an undefined number of elements, or more than {MAX_EXTENT}",
            node_title(node),
            "give finite numbers that are closer together",
        )


def _check_scales(node: NodeProto, operands: Mapping[str, np.ndarray]) -> None:
    """Raise BadInput unless all scales are finite and greater than 0."""
    place = 2 if node.op_type == "Resize" and len(node.input) > 2 else 1
    known = operands.get(node.input[place]) if place < len(node.input) else None
    scales = [
        *(known.ravel().tolist() if known is not None else ()),
        *(f for a in node.attribute if a.name == "scales" for f in a.floats),
    ]
    if not all(0 < scale < math.inf for scale in scales):
        shown = ", ".join(f"{s:g}" for s in scales[:8])
        raise BadInput(
            f"the scales of {node.op_type} are {shown}, where numbers above 0 are needed",
            node_title(node),
            "export the model again",
        )


def _check_values(what: str, values: Iterable[int], low: int, node: NodeProto) -> None:
    for value in values:
        if not low <= value <= MAX_EXTENT:
            raise BadInput(
                f"{what} of {node.op_type} is {value}, where {low} to {MAX_EXTENT} is possible",
                node_title(node),
                "export the model again",
            )

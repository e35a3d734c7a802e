"""Operators that only bodies of functions hold, and their types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rammer.device.operators import CustomOperator, CustomOperators
from rammer.frontend.lowerings.stored import DOMAIN
from rammer.ir.types import TensorType
from rammer.ir.use import Use


def _walked(use: Use) -> Sequence[TensorType]:
    return [TensorType("int32", (use.shape(0)[0], use.attr("trees")))]


def _gathered(use: Use) -> Sequence[TensorType]:
    return [TensorType(use.dtype(1), (use.shape(0)[0], use.attr("targets")))]


_FLAG = {"padded": 0, "groups": 0}
#: By domain and name, as a plugin's are; no model can name them, since its operators are checked before.
INTERNAL: Final[CustomOperators] = {
    (o.domain, o.name): o
    for o in (
        CustomOperator(DOMAIN, "Walk", _walked, inputs=(3, 8), attributes={"padded": 0, "depth": int, "trees": int}),
        CustomOperator(DOMAIN, "Gathered", _gathered, inputs=2, attributes={**_FLAG, "targets": int, "how": "sum"}),
    )
}

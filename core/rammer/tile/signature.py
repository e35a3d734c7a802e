"""Signatures: equal operators on different tensors are analysed and tuned once (Welder's sub-graph cache)."""

from __future__ import annotations

from collections.abc import Mapping

from rammer.ir.operator import ROperator
from rammer.ir.program import Storage
from rammer.ir.types import TensorType


def signature(operator: ROperator, types: Mapping[str, TensorType],
              storages: Mapping[str, Storage] | None = None) -> str:  # fmt: skip
    """A text that is equal for operators that differ only in tensor names and ONNX origins.

    With ``storages``, strides of what is read and written count too (offsets do not): then equal
    signatures mean equal kernels.
    """
    stored = {*operator.inputs, *operator.outputs} if storages is not None else set()
    names: dict[str, str] = {}
    for name in (*operator.inputs, *(c.name for c in operator.computes)):
        names[name] = f"t{len(names)}"
    lines = [f"{new}: {types[old]}{_strides(old, storages) if old in stored else ''}" for old, new in names.items()]
    for c in operator.computes:
        lines.append(c.text_with(names))
    lines += [f"{names[c.producer]} <{c.layer}> {names[c.consumer]}" for c in operator.connections]
    lines.append(f"writes {' '.join(names[o] for o in operator.outputs)}")
    lines.append(f"tile {operator.tile} {operator.family} {operator.config}")
    return "\n".join(lines)


def _strides(name: str, storages: Mapping[str, Storage] | None) -> str:
    if storages is None or name not in storages:
        return " interior"
    return f" strides {list(storages[name].strides)}"

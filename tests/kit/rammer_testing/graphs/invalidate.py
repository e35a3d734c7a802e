"""Invalid models: a valid case changed in one place until ONNX's checker rejects it. Rammer must refuse it, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from rammer_testing.graphs.case import Array, GraphCase

#: Changes that may leave the case valid before it is abandoned.
TRIES: Final = 12
#: The checker's messages if only its inference failed.
OWN: Final = ("is required but missing", "Inference error(s)")


def spoiled(case: GraphCase, rng: np.random.Generator) -> tuple[GraphCase, str] | None:
    """Return ``case`` with one invalid change and the checker's message; None if all attempted changes left it valid."""
    ways: tuple[Callable[[GraphCase, np.random.Generator], GraphCase | None], ...] = (
        _attribute,
        _attribute,
        _operand,
        _constant,
        _input,
    )
    plain = case.plain()
    for _ in range(TRIES):
        made = ways[int(rng.integers(len(ways)))](plain, rng)
        if made is None:
            continue
        try:
            made.typed()
        except Exception as error:  # the checker raises several types
            said = str(error).strip().splitlines()[0]
            if not any(own in said for own in OWN):
                return made, said
    return None


def _one(rng: np.random.Generator, options: list[Any]) -> Any:
    return options[int(rng.integers(len(options)))]


def _attribute(case: GraphCase, rng: np.random.Generator) -> GraphCase | None:
    """Change an attribute: a number out of its range, or a list of another length."""
    # A wrong num_outputs of Split or batch_dims of GatherND ends the process in ONNX's inference; tests of misuse cover them.
    places = [
        (i, k)
        for i, c in enumerate(case.nodes)
        for k, v in c.attributes.items()
        if isinstance(v, int | list) and k not in ("num_outputs", "batch_dims")
    ]
    if not places:
        return None
    place, key = _one(rng, places)
    call = case.nodes[place]
    value = call.attributes[key]
    numbers = value if isinstance(value, list) else [value]
    if not all(isinstance(n, int) for n in numbers):
        return None
    at = int(rng.integers(len(numbers))) if numbers else 0
    changed: list[int] = [_one(rng, [0, -1, n - 1, n + 1, 1000, -1000, 2**40]) if i == at else n for i, n in enumerate(numbers)]
    if isinstance(value, list) and rng.random() < 0.4:
        changed = numbers[:-1] if rng.random() < 0.5 else [*numbers, 1]
    made: Any = changed if isinstance(value, list) else changed[0]
    node = replace(call, attributes={**call.attributes, key: made})
    return replace(case, nodes=(*case.nodes[:place], node, *case.nodes[place + 1 :]))


def _operand(case: GraphCase, rng: np.random.Generator) -> GraphCase | None:
    """Change an operand: omit it, exchange it, or use an undefined name."""
    place = int(rng.integers(len(case.nodes)))
    call = case.nodes[place]
    if not call.inputs:
        return None
    at = int(rng.integers(len(call.inputs)))
    others = [n for n in (*case.inputs, *case.constants) if n != call.inputs[at]]
    new = _one(rng, ["", "nowhere", *others[:6]])
    inputs = call.inputs[:at] if rng.random() < 0.3 else (*call.inputs[:at], new, *call.inputs[at + 1 :])
    return replace(case, nodes=(*case.nodes[:place], replace(call, inputs=inputs), *case.nodes[place + 1 :]))


def _changed(array: Array, rng: np.random.Generator) -> Array:
    """Return the array with another rank, extent or element type, or other numbers."""
    roll = rng.random()
    if roll < 0.25:
        return array[None] if rng.random() < 0.5 or not array.ndim else array.reshape(-1)[:1].reshape(())
    if roll < 0.5 and array.ndim:
        return np.concatenate([array, array[:1]]) if array.shape[0] else array
    if roll < 0.75:
        return array.astype(_one(rng, ["float32", "float64", "int64", "int32", "bool", "uint8"]))
    if array.dtype.kind == "i" and array.size:
        return np.where(rng.random(array.shape) < 0.5, np.asarray(_one(rng, [-1, 0, 1000, -1000])).astype(array.dtype), array)
    return array


def _constant(case: GraphCase, rng: np.random.Generator) -> GraphCase | None:
    names = [n for n in case.constants if n in case.reads and case.constants[n].size]
    if not names:
        return None
    name = _one(rng, names)
    return replace(case, constants={**case.constants, name: _changed(case.constants[name], rng)})


def _input(case: GraphCase, rng: np.random.Generator) -> GraphCase | None:
    names = [n for n in case.inputs if n in case.reads and case.inputs[n].size]
    if not names:
        return None
    name = _one(rng, names)
    return replace(case, inputs={**case.inputs, name: _changed(case.inputs[name], rng)})

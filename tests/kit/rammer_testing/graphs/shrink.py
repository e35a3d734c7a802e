"""Shrinking: fewer nodes, smaller extents, fewer attributes, simpler values and settings, while the same fault persists."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rammer.frontend.read.reader import read_model
from rammer_testing.graphs.case import LOCAL, Array, Call, GraphCase
from rammer_testing.graphs.generate import tidied
from rammer_testing.graphs.judge import Setting, Verdict
from rammer_testing.graphs.perturbed_reference import tracker

#: A function that judges a case.
Ask = Callable[[GraphCase, Setting], Verdict]


@dataclass
class Shrinker:
    """A shrinker of one fault for at most ``seconds``. ``valid`` False (for invalid models) skips the checker."""

    ask: Ask
    seconds: float = 60.0
    valid: bool = True
    asked: int = 0
    end: float = field(default=0.0, init=False)

    def __call__(self, case: GraphCase, setting: Setting, verdict: Verdict) -> tuple[GraphCase, Setting, Verdict]:
        """Return the smallest case with its setting and verdict."""
        self.end = time.monotonic() + self.seconds
        best = case, setting, verdict
        while time.monotonic() < self.end:
            found = next(self._failing(best), None)
            if found is None:
                break
            best = found
        return best

    def _failing(self, best: tuple[GraphCase, Setting, Verdict]) -> Iterator[tuple[GraphCase, Setting, Verdict]]:
        case, setting, verdict = best
        for simpler in simpler_settings(setting):
            yield from self._tried(case, simpler, verdict)
        for smaller in smaller_cases(case):
            yield from self._tried(smaller, setting, verdict)

    def _tried(self, case: GraphCase, setting: Setting, verdict: Verdict) -> Iterator[tuple[GraphCase, Setting, Verdict]]:
        if time.monotonic() > self.end or not any(c.op != "Constant" for c in case.nodes):
            return
        if self.valid:
            try:
                case.typed()
            except Exception:  # not a legal model any more
                return
        self.asked += 1
        found = self.ask(case, setting)
        if found.key == verdict.key:
            yield case, setting, found


def simpler_settings(setting: Setting) -> Iterator[Setting]:
    """Yield settings with defaults in place of the chosen values."""
    plain = Setting(setting.device)
    for simpler in (
        replace(setting, options=()),
        replace(setting, precision=plain.precision),
        replace(setting, layout=plain.layout),
        replace(setting, policy=plain.policy),
        replace(setting, form=plain.form),
    ):
        if simpler != setting:
            yield simpler


def smaller_cases(case: GraphCase) -> Iterator[GraphCase]:
    """Yield cases with less content, the largest reductions first."""
    if len(case.outputs) > 1:
        for half in (case.outputs[: len(case.outputs) // 2], case.outputs[len(case.outputs) // 2 :]):
            yield tidied(replace(case, outputs=half))
        for name in case.outputs:
            yield tidied(replace(case, outputs=(name,)))
        for name in case.outputs:
            yield tidied(replace(case, outputs=tuple(n for n in case.outputs if n != name)))
    if case.functions or case.sparse:
        yield tidied(replace(case, sparse=frozenset()))
        yield case.plain()
    values = inner_values(case)
    yield from _cut_below(case)
    yield from _cut_above(case, values)
    yield from _fewer_operands(case)
    yield from _fewer_attributes(case)
    yield from _smaller_extents(case)
    yield from _simpler_values(case)
    unread = [n for n in case.inputs if n not in case.reads and n not in case.outputs]
    if unread:
        yield tidied(case)


def inner_values(case: GraphCase) -> dict[str, Array]:
    """Return the results of all nodes that rammer's evaluation can compute."""
    made: dict[str, Array] = {}
    try:
        names = tuple(o for c in case.nodes for o in c.outputs if o)
        wide = read_model(replace(case.plain(), outputs=names).model())
        for name, value in tracker(wide, case.inputs, np.random.default_rng(0), trajectories=0).run(case.inputs).items():
            made[name] = value.value
    except Exception:  # the fault may be in the evaluation itself: zeros are used then
        pass
    kinds = _types(case)
    zeros = {n: np.zeros(shape, dtype) for n, (dtype, shape) in kinds.items()}
    return {n: made[n].astype(z.dtype) if n in made and made[n].shape == z.shape else z for n, z in zeros.items()}


def _types(case: GraphCase) -> dict[str, tuple[Any, tuple[int, ...]]]:
    from onnx import helper

    result = {}
    try:
        graph = case.inferred().graph
    except Exception:  # ONNX's C++ raises several types
        return {}
    for value in (*graph.value_info, *graph.output):
        kind = value.type.tensor_type
        if kind.HasField("shape") and all(d.HasField("dim_value") for d in kind.shape.dim):
            dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
            # Inference does not check that a window fits: its extents may be negative.
            result[value.name] = (dtype, tuple(max(d.dim_value, 0) for d in kind.shape.dim))
    return result


def _cut_below(case: GraphCase) -> Iterator[GraphCase]:
    """Use an inner value as the only output and remove everything after it."""
    made = [o for c in case.nodes if c.op != "Constant" for o in c.outputs if o]
    for name in _halving(made):
        if (name,) != case.outputs:
            cut = tidied(replace(case, outputs=(name,)))
            if len(cut.nodes) < len(case.nodes):
                yield cut


def _cut_above(case: GraphCase, values: Mapping[str, Array]) -> Iterator[GraphCase]:
    """Replace an inner value by an input or a constant and remove everything before it."""
    order = [(i, c) for i, c in enumerate(case.nodes) if all(o in values for o in c.outputs if o)]
    for _, call in reversed(order):
        rest = tuple(c for c in case.nodes if c is not call)
        made = {o: values[o] for o in call.outputs if o}
        if set(made) & set(case.outputs) or not rest:
            continue
        as_input = tidied(replace(case, nodes=rest, inputs={**case.inputs, **made}))
        if call.op != "Constant":
            yield as_input
        yield tidied(replace(case, nodes=rest, constants={**case.constants, **made}))


def _halving(names: list[str]) -> list[str]:
    """Return names in bisection order: the middle first, then the quarters, and so on."""
    order, ranges = list[str](), [(0, len(names))]
    while ranges:
        low, high = ranges.pop(0)
        if low < high:
            middle = (low + high) // 2
            order.append(names[middle])
            ranges += [(low, middle), (middle + 1, high)]
    return order


def _with(case: GraphCase, place: int, call: Call) -> GraphCase:
    return tidied(replace(case, nodes=(*case.nodes[:place], call, *case.nodes[place + 1 :])))


def _fewer_operands(case: GraphCase) -> Iterator[GraphCase]:
    for place, call in enumerate(case.nodes):
        for i in range(len(call.inputs) - 1, -1, -1):
            if len(call.inputs) > 1:
                yield _with(case, place, replace(call, inputs=call.inputs[:i] + call.inputs[i + 1 :]))
            if call.inputs[i] and i < len(call.inputs) - 1:
                yield _with(case, place, replace(call, inputs=(*call.inputs[:i], "", *call.inputs[i + 1 :])))
        for i in range(1, len(call.outputs)):
            if call.outputs[i] and call.outputs[i] not in case.outputs:
                yield _with(case, place, replace(call, outputs=call.outputs[:i]))


def _fewer_attributes(case: GraphCase) -> Iterator[GraphCase]:
    for place, call in enumerate(case.nodes):
        if call.domain == LOCAL:
            continue
        for key, value in call.attributes.items():
            rest = {k: v for k, v in call.attributes.items() if k != key}
            yield _with(case, place, replace(call, attributes=rest))
            if isinstance(value, list) and any(v > 1 for v in value if isinstance(v, int)):
                ones = [min(v, 1) if isinstance(v, int) else v for v in value]
                yield _with(case, place, replace(call, attributes={**rest, key: ones}))


def _smaller_extents(case: GraphCase) -> Iterator[GraphCase]:
    """Reduce one extent everywhere, including shapes in constants; then in one tensor only."""
    tables = {**case.inputs, **case.constants}
    found = sorted({n for a in tables.values() for n in a.shape if n > 1}, reverse=True)
    for extent in found:
        for small in dict.fromkeys((1, 2, extent // 2, extent - 1)):
            if 0 < small < extent:
                yield _resized(case, extent, small, True)
                yield _resized(case, extent, small, False)
    for name, array in tables.items():
        for axis, extent in enumerate(array.shape):
            for small in dict.fromkeys((1, extent // 2, extent - 1)):
                if 0 < small < extent:
                    yield _replaced(case, name, np.take(array, range(small), axis))


def _resized(case: GraphCase, extent: int, small: int, shapes_too: bool) -> GraphCase:
    def cut(array: Array) -> Array:
        for axis, n in enumerate(array.shape):
            if n == extent and not (shapes_too and array.dtype == np.int64 and array.ndim == 1):
                array = np.take(array, range(small), axis)
        if shapes_too and array.dtype == np.int64 and array.ndim == 1:
            array = np.where(array == extent, small, array)
        return array

    return replace(
        case, inputs={n: cut(a) for n, a in case.inputs.items()}, constants={n: cut(a) for n, a in case.constants.items()}
    )


def _replaced(case: GraphCase, name: str, array: Array) -> GraphCase:
    return replace(
        case,
        inputs={n: array if n == name else a for n, a in case.inputs.items()},
        constants={n: array if n == name else a for n, a in case.constants.items()},
    )


def _simpler_values(case: GraphCase) -> Iterator[GraphCase]:
    """Simplify values: zeros, ones, small whole numbers; constants become inputs."""
    for name, array in {**case.inputs, **case.constants}.items():
        if not array.size or name not in case.reads:
            continue
        options = [np.zeros_like(array), np.ones_like(array)]
        if array.dtype.kind == "f":
            options += [np.nan_to_num(np.round(array)), (np.arange(array.size).reshape(array.shape) % 7).astype(array.dtype)]
        at = next(i for i in range(len(options) + 1) if i == len(options) or np.array_equal(options[i], array))
        for made in options[:at]:
            yield _replaced(case, name, made)

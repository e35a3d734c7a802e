"""Models with wrong types: bad input, tested with ONNX's own tests and random changes of types and attributes."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, GraphProto, ModelProto, numpy_helper

import rammer
from rammer.errors import BadInput
from rammer.frontend.read.model_checks import all_graphs
from rammer_testing.suite.cases import SuiteCase, load, names

#: Element types of ONNX, one undefined type and two nonexistent types.
TYPES = (*range(0, 27), 99)
NUMBERS = (-(2**31), -1, 0, 1, 2, 7, 99, 2**31, 2**62)


def of_port(graph: GraphProto, draw: random.Random) -> None:
    """Change the type of an input, an output or an intermediate value."""
    ports = [*graph.input, *graph.output, *graph.value_info]
    if ports:
        kind = draw.choice(ports).type
        if kind.WhichOneof("value") == "tensor_type" and draw.random() < 0.85:
            kind.tensor_type.elem_type = draw.choice(TYPES)
        elif draw.random() < 0.5:
            kind.sequence_type.elem_type.tensor_type.elem_type = draw.choice(TYPES)
        else:
            kind.optional_type.elem_type.tensor_type.elem_type = draw.choice(TYPES)


def of_constant(graph: GraphProto, draw: random.Random) -> None:
    """Change the type of a constant: its name only, or its numbers as well."""
    if graph.initializer:
        tensor = draw.choice(list(graph.initializer))
        kind = draw.choice((None, np.float16, np.float64, np.int32, np.int64, np.uint8, bool))
        if kind is None or tensor.data_type == onnx.TensorProto.STRING:
            tensor.data_type = draw.choice(TYPES)
        else:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(kind), tensor.name))


def of_attribute(graph: GraphProto, draw: random.Random) -> None:
    """Change the value or the type of an attribute."""
    given = [a for node in graph.node for a in node.attribute if a.type != AttributeProto.GRAPH]
    if not given:
        return
    attribute = draw.choice(given)
    if attribute.type == AttributeProto.INT and draw.random() < 0.6:
        attribute.i = draw.choice(NUMBERS)
    elif attribute.type == AttributeProto.TENSOR and draw.random() < 0.6:
        attribute.t.data_type = draw.choice(TYPES)
    else:
        value = draw.choice(
            (3, 2.5, float("nan"), "s", [1, 2], [1.0, 2.0], ["a"], numpy_helper.from_array(np.ones(2, np.float32)))
        )
        attribute.CopyFrom(onnx.helper.make_attribute(attribute.name, value))


CHANGES: tuple[Callable[[GraphProto, random.Random], None], ...] = (of_port, of_port, of_constant, of_attribute)


def changed(case: SuiteCase, draw: random.Random) -> ModelProto:
    """Return the model of a case with one to three changes."""
    model = ModelProto()
    model.CopyFrom(case.model)
    graphs = list(all_graphs(model))
    for _ in range(draw.choice((1, 1, 2, 3))):
        draw.choice(CHANGES)(draw.choice(graphs), draw)
    return model


def fitting(dtype: str, value: object) -> object:
    """Convert a value to the type of the changed model if NumPy has that type."""
    numbers = isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and dtype in np.sctypeDict
    return value.astype(dtype) if isinstance(value, np.ndarray) and numbers else value


def outcome(case: SuiteCase, model: ModelProto) -> str:
    """Return the outcome of a model; exceptions other than BadInput propagate."""
    try:
        exe = rammer.compile(model, "toy")
    except BadInput:
        return "refused"
    try:
        given = dict(zip(exe.head.inputs, case.sets[0][0], strict=False))
        exe.run({port.name: fitting(port.dtype, value) for port, value in given.items()})
    except BadInput:
        return "refused"
    finally:
        exe.close()
    return "ran"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [30, pytest.param(3000, marks=pytest.mark.large)])
def test_models_of_other_types_run_or_are_refused(count: int, seed: int) -> None:
    draw, seen = random.Random(seed), Counter[str]()
    known = names()
    for _ in range(count):
        name = draw.choice(known)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case = load(name)
            model = changed(case, draw)
            try:
                seen[outcome(case, model)] += 1
            except Exception as problem:
                raise AssertionError(f"{name}, changed: {type(problem).__name__}: {problem}") from problem
    assert seen["refused"] > count // 4 and seen["ran"] > 0, seen

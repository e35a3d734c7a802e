"""Tests of the onnx package: single operators, small models and old PyTorch exports."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests

from rammer.frontend.read.model_checks import all_graphs
from rammer.frontend.read.node_protos import is_random
from rammer_testing.suite.nodes import node_tests

#: A value of a test: an array, a list of values (a sequence), or None (an empty optional).
Value: TypeAlias = Any
#: The kinds of onnx tests; "real" are networks whose weights are generated at run time ("light").
KINDS: Final = ("node", "simple", "pytorch-converted", "pytorch-operator", "real")


@dataclass(frozen=True)
class SuiteCase:
    """A model, input sets with their expected outputs, and tolerances (as for ``assert_allclose``)."""

    name: str
    model: onnx.ModelProto
    sets: Sequence[tuple[Sequence[Value], Sequence[Value]]]
    rtol: float
    atol: float

    @property
    def random(self) -> bool:
        """Return True if an operator draws random numbers, for which ONNX specifies only types and shapes."""
        return any(is_random(node) for graph in all_graphs(self.model) for node in graph.node)

    @property
    def float32(self) -> bool:
        """Return True if a result is float32 and no body of If, Loop, Scan or SequenceMap runs."""
        bodies = any(node.op_type in ("If", "Loop", "Scan", "SequenceMap") for g in all_graphs(self.model) for node in g.node)
        return not bodies and any(_of_float32(v.type) for v in self.model.graph.output)


def _of_float32(kind: onnx.TypeProto) -> bool:
    inner = {"sequence_type": kind.sequence_type.elem_type, "optional_type": kind.optional_type.elem_type}
    held = inner.get(kind.WhichOneof("value") or "")
    return kind.tensor_type.elem_type == onnx.TensorProto.FLOAT if held is None else _of_float32(held)


def names(pattern: str = "") -> list[str]:
    """Return the sorted names of the tests in which ``pattern`` (a regular expression) is found."""
    return sorted(n for n in _tests() if re.search(pattern, n))


def load(name: str) -> SuiteCase:
    """Return a test with its data."""
    test = _tests()[name]
    if test.model is not None:
        sets = [([_value(v) for v in a], [_value(v) for v in b]) for a, b in test.data_sets or ()]
        return SuiteCase(name, test.model, sets, test.rtol, test.atol)
    if test.model_dir is None:
        return _light(test)
    folder = Path(str(test.model_dir))
    model = onnx.load(folder / "model.onnx")
    known = {i.name for i in model.graph.initializer}
    inputs = [i.type for i in model.graph.input if i.name not in known]
    outputs = [o.type for o in model.graph.output]
    folders = sorted(folder.glob("test_data_set_*"))
    sets = [(list(_stored(at, "input", inputs)), list(_stored(at, "output", outputs))) for at in folders]
    if not sets:
        raise FileNotFoundError(f"{folder} holds no test_data_set_*")
    return SuiteCase(name, model, sets, test.rtol, test.atol)


def _light(test: TestCase) -> SuiteCase:
    """Return a network with the input of onnx's runner (a ramp from 0 to 1) and the stored output."""
    path = Path(onnx.__file__).parents[1] / str(test.url)
    model = onnx.load(path)
    known = {i.name for i in model.graph.initializer}
    (port,) = [i for i in model.graph.input if i.name not in known]
    shape = [d.dim_value or 1 for d in port.type.tensor_type.shape.dim]
    ramp = (np.arange(np.prod(shape)).reshape(shape) / np.prod(shape)).astype(np.float32)
    output = onnx.load_tensor(path.with_name(f"{path.stem}_output_0.pb"))
    return SuiteCase(test.name, model, [([ramp], [_value(output)])], test.rtol, test.atol)


@cache
def _tests() -> dict[str, TestCase]:
    return {t.name: t for kind in KINDS for t in (node_tests() if kind == "node" else load_model_tests(kind=kind))}


def _stored(folder: Path, what: str, types: Sequence[onnx.TypeProto]) -> Iterator[Value]:
    for number, kind in enumerate(types):
        proto: Any = {
            "sequence_type": onnx.SequenceProto,
            "optional_type": onnx.OptionalProto,
        }.get(kind.WhichOneof("value") or "", onnx.TensorProto)()
        proto.ParseFromString((folder / f"{what}_{number}.pb").read_bytes())
        yield _value(proto)


def _value(value: Any) -> Value:
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, onnx.SequenceProto):
        return numpy_helper.to_list(value)
    if isinstance(value, onnx.OptionalProto):
        return numpy_helper.to_optional(value)
    return value

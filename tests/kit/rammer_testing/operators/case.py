"""Cases of one operator with operands and attributes, and the registry of their generators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import ModelProto, defs, helper, numpy_helper

from rammer.frontend.read import schemas
from rammer.frontend.spec_rulings.operator_questions import Use
from rammer.ir.types import SHORT, TensorType

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Versions of domains other than ONNX's default domain.
VERSIONS = {"com.microsoft": 1, "ai.onnx.ml": 3, "ai.onnx.ml.TreeEnsemble": 5}


@dataclass(frozen=True)
class OperatorCase:
    """A model of one node. Operands that are None are absent; ``static`` are the positions of constants. ``op`` includes its
    domain if that is not the default (``com.microsoft.Gelu``); ``absent`` are omitted outputs."""

    op: str
    opset: int
    operands: tuple[Array | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    static: frozenset[int] = frozenset()
    absent: frozenset[int] = frozenset()
    #: Element types of the outputs, by NumPy's names, if only attributes determine them.
    made: tuple[str, ...] = ()

    @property
    def domain(self) -> str:
        """The domain of the operator."""
        return self.op.rpartition(".")[0]

    @property
    def version(self) -> int:
        """The version of the operator's domain."""
        return VERSIONS.get(self.op) or VERSIONS.get(self.domain) or self.opset

    @property
    def results(self) -> list[str]:
        """The names of the outputs."""
        return [f"y{i}" for i in range(self.outputs) if i not in self.absent]

    @property
    def schema(self) -> defs.OpSchema:
        """The operator's schema at the case's opset."""
        return schemas.get_schema(self.op.rpartition(".")[2], self.version, self.domain)

    @property
    def kinds(self) -> list[int]:
        """The element types of the outputs by the schema: fixed, or those of an operand."""
        if self.made:
            return [helper.np_dtype_to_tensor_dtype(np.dtype(kind)) for kind in self.made]
        schema = self.schema
        last = len(schema.inputs) - 1
        bound = {schema.inputs[min(i, last)].type_str: a.dtype for i, a in enumerate(self.operands) if a is not None}
        alone = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
        made = []
        for name in self.results:
            kind = schema.outputs[int(name[1:])].type_str
            texts = alone.get(kind, [kind])
            text = next((t for t in texts if t != "tensor(string)"), texts[0])[7:-1]
            code = getattr(onnx.TensorProto, text.upper())
            made.append(helper.np_dtype_to_tensor_dtype(bound[kind]) if kind in bound else code)
        return made

    @property
    def feeds(self) -> dict[str, Array]:
        """The inputs of a run of the model."""
        return {f"x{i}": a for i, a in enumerate(self.operands) if a is not None and i not in self.static}

    @property
    def use(self) -> Use:
        """The operator use that decisions on references refer to."""
        version = self.schema.since_version
        types = [None if a is None else TensorType(str(a.dtype), a.shape) for a in self.operands]
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in self.attributes.items() if v is not None}
        return Use(self.op, version, given, types, (True,) * self.outputs, self.operands)

    def folded(self) -> OperatorCase:
        """Return the case with every operand a constant."""
        return OperatorCase(
            self.op,
            self.opset,
            self.operands,
            self.attributes,
            self.outputs,
            frozenset(range(len(self.operands))),
            self.absent,
            self.made,
        )

    def model(self) -> ModelProto:
        """Return the model; its outputs have the types that ONNX infers, without shapes."""
        names = [f"x{i}" if a is not None else "" for i, a in enumerate(self.operands)]
        while names and not names[-1]:
            names.pop()
        given = {k: v for k, v in self.attributes.items() if v is not None}
        attributes = {k: numpy_helper.from_array(v, k) if isinstance(v, np.ndarray) else v for k, v in given.items()}
        made = [f"y{i}" if i not in self.absent else "" for i in range(self.outputs)]
        node = helper.make_node(
            self.op.rpartition(".")[2], names, made, name="node", domain=self.domain or None, **attributes
        )  # fmt: skip
        ports, constants = [], []
        for i, operand in enumerate(self.operands):
            if operand is None:
                continue
            if i in self.static:
                constants.append(numpy_helper.from_array(operand, f"x{i}"))
            else:
                code = helper.np_dtype_to_tensor_dtype(operand.dtype)
                ports.append(helper.make_tensor_value_info(f"x{i}", code, operand.shape))
        results = [onnx.ValueInfoProto(name=name) for name in self.results]
        graph = helper.make_graph([node], "case", ports, results, constants)
        # Older opsets need an older IR version, in which initializers are inputs, too.
        imports = [
            helper.make_opsetid("", self.opset),
            *([helper.make_opsetid(self.domain, self.version)] if self.domain else ()),
        ]
        return helper.make_model(graph, opset_imports=imports, ir_version=8)

    def __str__(self) -> str:
        operands = ", ".join(
            "-" if a is None else f"{SHORT.get(str(a.dtype), a.dtype)}{list(a.shape)}" + ("*" if i in self.static else "")
            for i, a in enumerate(self.operands)
        )
        attributes = " ".join(f"{k}={v}" for k, v in self.attributes.items() if v is not None)
        return f"{self.op}-{self.opset}({operands}) {attributes}".rstrip()

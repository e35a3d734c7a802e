"""Cases of one operator with operands and attributes, and the registry of their generators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import ModelProto, defs, helper, numpy_helper

from rammer.frontend.read import schemas
from rammer.frontend.spec_rulings.operator_questions import Use
from rammer.ir.types import SHORT, TensorType

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Values at which formulas break: zeros of both signs, tiny, large and huge values, infinities and NaN.
SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    1.5,
    2.5,
    -2.5,
    1e-8,
    -1e-8,
    1e-4,
    6.0,
    -6.0,
    20.0,
    -20.0,
    50.0,
    -50.0,
    88.0,
    -104.0,
    710.0,
    -750.0,
    6e4,
    1e30,
    -1e30,
    np.inf,
    -np.inf,
    np.nan,
)


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


Maker: TypeAlias = Callable[["OperandDraw"], "OperatorCase"]
#: Generators of cases by operator.
FAMILIES: dict[str, Maker] = {}


def family(*ops: str) -> Callable[[Callable[[OperandDraw, str], OperatorCase]], Callable[[OperandDraw, str], OperatorCase]]:
    """Return a decorator that registers a generator for each of ``ops``."""

    def register(make: Callable[[OperandDraw, str], OperatorCase]) -> Callable[[OperandDraw, str], OperatorCase]:
        for op in ops:
            FAMILIES[op] = lambda draw, op=op: make(draw, op)  # type: ignore[misc]
        return make

    return register


def drawn(op: str, seed: int, number: int) -> OperatorCase:
    """Return case ``number`` of a family, determined by the arguments."""
    return FAMILIES[op](OperandDraw(Random(f"{op}:{seed}:{number}")))


@dataclass(frozen=True)
class OperandDraw:
    """The random choices of a generator."""

    random: Random

    def pick(self, *options: Any) -> Any:
        """Return a random element of ``options``."""
        return self.random.choice(options)

    def chance(self, share: float = 0.5) -> bool:
        """Return True in ``share`` of the draws."""
        return self.random.random() < share

    def size(self, low: int = 1, high: int = 6) -> int:
        """Return a random extent, often a small one."""
        return self.random.randint(low, self.pick(min(low + 1, high), high))

    def shape(self, low: int = 0, high: int = 4, least: int = 1) -> tuple[int, ...]:
        """Return a random shape with a rank within these bounds."""
        return tuple(self.size(least) for _ in range(self.random.randint(low, high)))

    def opset(self, op: str, low: int = 7, high: int = 26) -> int:
        """Return an opset with a non-deprecated version of the operator; its revisions are equally likely."""
        versions = sorted({max(v, low) for v in _history()[op] if v <= high})
        chosen = self.random.choice(versions)
        later = [v for v in versions if v > chosen]
        last = min(later) - 1 if later else high
        gone = defs.get_schema(op, last, "").deprecated
        return int(chosen if gone else self.random.randint(chosen, last))

    def dtype(self, op: str, opset: int, position: int = 0, narrow: bool = True) -> str:
        """Return an element type that operand ``position`` accepts, float32 in half of the draws."""
        kinds = accepted(op, opset, position)
        if "float32" in kinds and self.chance():
            return "float32"
        return str(self.random.choice(kinds or ["float32"]))

    def array(
        self, shape: tuple[int, ...], dtype: str = "float32", special: float = 0.0, low: float = -3, high: float = 3
    ) -> Array:
        """Return values of ``dtype``: floats within bounds, a share of them SPECIAL, or integers of all sizes."""
        rng = np.random.default_rng(self.random.getrandbits(63))
        if dtype == "bool":
            return np.asarray(rng.integers(0, 2, shape).astype(bool))
        if not dtype.startswith("float"):
            bounds = np.iinfo(dtype)
            small = rng.integers(max(int(low), int(bounds.min)), int(high) + 1, shape).astype(dtype)
            edge = rng.choice(np.array([bounds.min, bounds.max, bounds.max - 1], dtype), shape)
            return np.asarray(np.where(rng.random(shape) < special, edge, small), dtype)
        values = rng.uniform(low, high, shape)
        values = np.where(rng.random(shape) < special, rng.choice(SPECIAL, shape), values)
        with np.errstate(over="ignore"):
            return np.asarray(values, dtype)

    def ints(self, count: int, low: int, high: int) -> list[int]:
        """Return random integers within bounds."""
        return [self.random.randint(low, high) for _ in range(count)]


@cache
def _history() -> dict[str, list[int]]:
    """Return the versions of every operator, by its name."""
    versions: dict[str, list[int]] = {}
    for schema in defs.get_all_schemas_with_history():
        if schema.domain == "" and not schema.deprecated:
            versions.setdefault(schema.name, []).append(schema.since_version)
    return versions


def accepted(op: str, opset: int, position: int = 0) -> list[str]:
    """Return rammer's element types that operand ``position`` of the operator accepts."""
    schema = defs.get_schema(op, opset, "")
    formal = schema.inputs[min(position, len(schema.inputs) - 1)]
    texts = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}.get(formal.type_str, [formal.type_str])
    names = {"float": "float32", "double": "float64"}
    plain = [t[7:-1] for t in texts if t.startswith("tensor(")]
    return sorted(n for n in (names.get(t, t) for t in plain) if n in SHORT)

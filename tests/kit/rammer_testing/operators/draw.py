"""The drawing context of operator descriptions: earlier values, fresh inputs and constants, ranges, sizes, types.

In a graph, ONNX's inference types every node when it is added, and ``onnx.reference`` computes it if it can. The result only
steers the drawing (values that are small enough for Exp, positive values); it judges nothing. A single operator is neither typed
nor computed, so it may be invalid, and its operands hold special values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from onnx import GraphProto, NodeProto, TypeProto, ValueInfoProto, defs, helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

from rammer.ir.types import SHORT, is_float
from rammer_testing.graphs.case import Array, Call, Function, GraphCase
from rammer_testing.operators.case import OperatorCase

T = TypeVar("T")
Kind: TypeAlias = "tuple[str, tuple[int, ...]]"
FLOATS: Final = ("float32", "float16", "float64")
SIGNED: Final = ("int32", "int64", "int8", "int16")
UNSIGNED: Final = ("uint8", "uint16", "uint32", "uint64")
INTEGERS: Final = (*SIGNED, *UNSIGNED)
NUMBERS: Final = (*FLOATS, *INTEGERS)
#: ONNX type names that differ from NumPy's.
_SPELLED: Final = {"float": "float32", "double": "float64"}
#: Relative frequency of each element type.
WEIGHT: Final = {"float32": 24, "float16": 4, "float64": 3, "int64": 4, "int32": 4, "bool": 3, "uint8": 2, "int8": 2}
#: Most elements of a tensor, and of all operands and results of one node.
MOST: Final = 4096
#: Values at which formulas break: zeros of both signs, tiny, large and huge values, infinities and NaN.
SPECIAL: Final = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 1e-8, -1e-8, 1e-4, 6.0, -6.0, 20.0, -20.0, 50.0, -50.0),
    *(88.0, -104.0, 710.0, -750.0, 6e4, 1e30, -1e30, np.inf, -np.inf, np.nan),
)


class Reject(Exception):
    """An operator that cannot be added here: no value fits, or ONNX rejects it."""


@dataclass(frozen=True)
class DrawnValue:
    """A value of the graph: its type, a flag for constants, and its elements if they could be computed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    known: bool = False
    array: Array | None = field(default=None, compare=False, repr=False)

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def within(self, low: float, high: float) -> bool:
        """Return True if all elements are computed and in [low, high]."""
        if self.array is None:
            return False
        return self.array.size == 0 or bool((self.array >= low).all() and (self.array <= high).all())


@dataclass
class Draw:
    """A graph under construction. ``empty`` is the frequency of extents of 0, ``prime`` that of primes from 7 to 31, ``renew``
    that of fresh operands. ``level`` draws all element types equally often. ``alone`` names a single operator, which is drawn
    without the restrictions that keep the values of a graph in range."""

    rng: np.random.Generator
    opset: int
    empty: float = 0.0
    largest: int = 8
    prime: float = 0.0
    level: bool = False
    renew: float = 0.25
    alone: str = ""
    values: list[DrawnValue] = field(default_factory=list)
    inputs: dict[str, Array] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    sparse: set[str] = field(default_factory=set)
    nodes: list[Call] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)

    # Chance -----------------------------------------------------------------------------------------------------

    def chance(self, share: float = 0.5) -> bool:
        """Return True for this share of calls."""
        return bool(self.rng.random() < share)

    def integer(self, low: int, high: int) -> int:
        """Return a uniform integer in low..high, both included."""
        return int(self.rng.integers(low, high + 1))

    def real(self, low: float, high: float) -> float:
        """Return a short decimal number in [low, high], exact in float32 after rounding to 1/64."""
        return round(float(self.rng.uniform(low, high)) * 64) / 64

    def uniform(self, low: float, high: float) -> float:
        """Return a uniform number."""
        return float(self.rng.uniform(low, high))

    def ints(self, count: int, low: int, high: int) -> list[int]:
        """Return uniform integers in low..high."""
        return [self.integer(low, high) for _ in range(count)]

    def either(self, *options: Any) -> Any:
        """Return one of the arguments."""
        return self.one(options)

    def size(self, low: int = 1, high: int = 6) -> int:
        """Return an extent in low..high, ``low`` and the next more often."""
        return self.integer(low, self.either(min(low + 1, high), high))

    def one(self, options: Sequence[T]) -> T:
        """Return a random element of ``options``."""
        return options[int(self.rng.integers(len(options)))]

    def extent(self) -> int:
        """Return the size of an axis: often 1 or small, sometimes odd beyond a vector's width, 0 if the graph permits it."""
        if self.chance(self.empty):
            return 0
        if self.chance(self.prime):
            return self.one((7, 11, 13, 17, 31))
        roll = self.rng.random()
        if roll < 0.2:
            return 1
        return self.integer(2, 5) if roll < 0.75 else self.integer(2, max(self.largest, 6))

    def shape(self, low: int = 0, high: int = 4) -> tuple[int, ...]:
        """Return a shape with a rank in these bounds and a bounded number of elements."""
        rank = self.integer(low, high)
        shape = [self.extent() for _ in range(rank)]
        while np.prod(shape, dtype=np.int64) > MOST // 4:
            shape[int(np.argmax(shape))] //= 2
        return tuple(shape)

    # Schemas ----------------------------------------------------------------------------------------------------

    def schema(self, op: str) -> Any:
        """Return the operator's schema at this opset. Raises Reject if it is missing or deprecated."""
        found = schema_of(op, self.opset)
        if found is None:
            raise Reject(f"{op} is not in opset {self.opset}")
        return found

    def takes(self, op: str, attribute: str) -> bool:
        """Return True if the operator has the attribute at this opset."""
        return attribute in self.schema(op).attributes

    def since(self, op: str) -> int:
        """Return the version of the operator at this opset."""
        return int(self.schema(op).since_version)

    def types(self, op: str, index: int = 0) -> tuple[str, ...]:
        """Return the supported element types that ONNX allows for an input."""
        return allowed(op, self.opset, index)

    def dtype(self, options: Sequence[str]) -> str:
        """Return a random type of ``options``, float32 most often."""
        if not options:
            raise Reject("no element type fits")
        weights = np.array([1 if self.level else WEIGHT.get(o, 1) for o in options], float)
        return str(self.rng.choice(list(options), p=weights / weights.sum()))

    # Values -----------------------------------------------------------------------------------------------------

    def pick(
        self,
        dtypes: Sequence[str],
        rank: tuple[int, int] = (0, 5),
        where: Callable[[DrawnValue], bool] | None = None,
        special: float = 0.0,
    ) -> DrawnValue:
        """Return a graph value of one of these types, later values more often, or a fresh one (``special`` as in ``fresh``)."""
        fits = [v for v in self.values if v.dtype in dtypes and rank[0] <= v.rank <= rank[1] and (where is None or where(v))]
        if fits and not self.chance(self.renew):
            weights = np.arange(1, len(fits) + 1, dtype=float)
            return fits[int(self.rng.choice(len(fits), p=weights / weights.sum()))]
        for _ in range(8):
            made = self._drawn(self.dtype(dtypes), self.shape(*rank), -3.0, 3.0, None)
            if where is None or where(made):
                return self._keep(self._made_special(made, special))
        raise Reject("no value fits")

    def fresh(
        self,
        dtype: str,
        shape: Sequence[int],
        low: float = -3.0,
        high: float = 3.0,
        constant: bool | None = None,
        special: float = 0.0,
    ) -> DrawnValue:
        """Return a new input or constant with elements in [low, high]. Of a single operator, some operands have a share of
        ``special`` elements: values of SPECIAL, or the least and largest integers (not below ``low`` if that is positive)."""
        return self._keep(self._made_special(self._drawn(dtype, shape, low, high, constant), special, low))

    def _drawn(self, dtype: str, shape: Sequence[int], low: float, high: float, constant: bool | None) -> DrawnValue:
        """Return a new value that is not part of the graph."""
        array = self.elements(dtype, tuple(shape), low, high)
        known = self.chance(0.4) if constant is None else constant
        return DrawnValue(self._free_name(known), dtype, tuple(shape), known, array)

    def _made_special(self, made: DrawnValue, share: float, low: float = 0.0) -> DrawnValue:
        if not self.alone or made.array is None or made.dtype == "bool" or not self.chance(0.5 if share else 0.0):
            return made
        if is_float(made.dtype):
            values: Array = np.asarray(SPECIAL)
        else:
            bounds = np.iinfo(made.dtype)
            values = np.array([n for n in (bounds.min, bounds.max, bounds.max - 1) if low <= 0 or n >= low], made.dtype)
        with np.errstate(over="ignore"):
            mixed = np.where(self.rng.random(made.shape) < share, self.rng.choice(values, made.shape), made.array)
            return replace(made, array=np.asarray(mixed, made.dtype))

    def _free_name(self, known: bool) -> str:
        return f"{'c' if known else 'x'}{len(self.inputs) + len(self.constants)}"

    def _keep(self, made: DrawnValue) -> DrawnValue:
        if made.array is None or made.name in self.inputs or made.name in self.constants:
            return made
        if not made.known:
            self.inputs[made.name] = made.array
        elif not self.alone and self.chance(0.15) and made.size and (self.opset >= 9 or is_float(made.dtype)):
            return self._constant_node(made)
        else:
            self.constants[made.name] = made.array
            if not self.alone and made.rank and made.dtype in ("float32", "int64") and self.opset >= 11 and self.chance(0.05):
                self.sparse.add(made.name)
        self.values.append(made)
        return made

    def _constant_node(self, made: DrawnValue) -> DrawnValue:
        assert made.array is not None
        attributes: dict[str, Any] = {"value": made.array}
        if self.opset >= 12 and made.dtype in ("float32", "int64") and made.rank <= 1 and self.chance(0.5):
            key = ("value_int" if made.dtype == "int64" else "value_float") + "s" * made.rank
            attributes = {key: made.array.tolist()}
        name = f"k{len(self.nodes)}_{made.name}"
        self.nodes.append(Call("Constant", (), (name,), attributes))
        kept = DrawnValue(name, made.dtype, made.shape, True, made.array)
        self.values.append(kept)
        return kept

    def elements(self, dtype: str, shape: tuple[int, ...], low: float, high: float) -> Array:
        """Return random elements: normal, uniform, or on a coarse grid with exact ties."""
        if dtype == "bool":
            return np.asarray(self.rng.random(shape) < 0.5)
        if not is_float(dtype):
            least = int(np.ceil(max(low, 0 if dtype.startswith("u") else -100)))
            return np.asarray(self.rng.integers(least, max(int(high), least) + 1, shape)).astype(dtype)
        kind = self.rng.random()
        if kind < 0.25:
            step = (high - low) / 16
            values = low + step * self.rng.integers(0, 17, shape)
        elif kind < 0.6:
            values = np.clip(self.rng.standard_normal(shape) * (high - low) / 6 + (high + low) / 2, low, high)
        else:
            values = self.rng.uniform(low, high, shape)
        return np.asarray(values, np.float64).astype(dtype)

    def array(
        self, shape: tuple[int, ...], dtype: str = "float32", special: float = 0.0, low: float = -3, high: float = 3
    ) -> Array:
        """Return uniform elements of a single operator in [low, high]; ``special`` as in ``fresh``."""
        values: Array = self.rng.uniform(low, high, shape)
        if dtype == "bool":
            values = values < (low + high) / 2
        elif not is_float(dtype):
            bounds = np.iinfo(dtype)
            values = self.rng.integers(max(int(low), int(bounds.min)), min(int(high), int(bounds.max)) + 1, shape)
        array = self._made_special(DrawnValue("", dtype, shape, False, np.asarray(values, dtype)), special).array
        assert array is not None
        return array

    def static(self, values: Sequence[int] | Array, dtype: str = "int64") -> str:
        """Return an operand that ONNX needs at compile time (axes, shapes, pads): a constant or a foldable expression."""
        array = np.asarray(values, dtype)
        if self.alone:
            return self.plain(array)
        made = DrawnValue(f"s{len(self.nodes)}_{len(self.constants)}_{len(self.inputs)}", dtype, array.shape, True, array)
        if array.ndim == 1 and array.size > 1 and self.chance(0.1):
            at = self.integer(1, array.size - 1)
            return self.add("Concat", [self.plain(array[:at]), self.plain(array[at:])], axis=0).name
        if self.chance(0.15) and self.opset >= 9:
            return self._constant_node(made).name
        return self.plain(array)

    def plain(self, array: Array) -> str:
        """Return a constant that is not a candidate for other operands."""
        name = f"s{len(self.constants)}_{len(self.nodes)}"
        self.constants[name] = array
        return name

    def bounded(self, value: DrawnValue, low: float, high: float) -> DrawnValue:
        """Return ``value``, or a value computed from it, with elements in [low, high]."""
        if value.within(low, high) or self.chance(0.5 if self.alone else 0.03 if is_float(value.dtype) else 0.0):
            return value
        if self.alone or not is_float(value.dtype):
            return self.fresh(value.dtype, value.shape, low, high)
        if value.dtype not in self.types("Sigmoid") or value.dtype not in self.types("Mul"):
            raise Reject("no bound for this type")
        made = self.add("Sigmoid", [value.name])
        span = min(high, 1e3) - max(low, -1e3)
        if span != 1:
            made = self.add("Mul", [made.name, self.scalar(made.dtype, span)])
        return made if low == 0 else self.add("Add", [made.name, self.scalar(made.dtype, max(low, -1e3))])

    def with_elements(self, array: Array) -> DrawnValue:
        """Return a new input or constant with these elements."""
        known = self.chance(0.4)
        made = DrawnValue(self._free_name(known), str(array.dtype), array.shape, known, array)
        return self._keep(made)

    def scalar(self, dtype: str, value: float) -> str:
        """Return a scalar constant of rank 0."""
        return self.plain(np.asarray(value, dtype))

    # Nodes ------------------------------------------------------------------------------------------------------

    def add(self, op: str, inputs: Sequence[str], wanted: Sequence[bool] = (True,), /, **attributes: Any) -> DrawnValue:
        """Append a node and return its first wanted output. Raises Reject if ONNX rejects the node."""
        schema = self.schema(op)
        inputs = list(inputs)
        while inputs and not inputs[-1]:
            inputs.pop()
        given = {k: _exact(schema, k, v) for k, v in attributes.items() if v is not None}
        names = tuple(f"v{len(self.nodes)}{'abcdef'[i] if i else ''}" if w else "" for i, w in enumerate(wanted))
        call = Call(op, tuple(inputs), names, given)
        if op == self.alone:
            self.nodes.append(call)
            return DrawnValue(names[0], "", ())
        operands = {n: self.value(n) for n in inputs if n}
        types = _inferred(schema, call.proto(), operands, self.opset)
        arrays = _computed(call.proto(), operands, self.opset) if all(v.array is not None for v in operands.values()) else {}
        known = all(v.known for v in operands.values())
        made = []
        for name in filter(None, names):
            dtype, shape = types[name]
            if np.prod(shape, dtype=np.int64) > MOST:
                raise Reject(f"{op} gives {shape}")
            array = arrays.get(name)
            good = array is not None and array.shape == shape and str(array.dtype) == dtype
            made.append(DrawnValue(name, dtype, shape, known, array if good else None))
        self.nodes.append(call)
        self.values += made
        return made[0]

    def value(self, name: str) -> DrawnValue:
        """Return the value of this name, including constants that are not candidates for operands."""
        found = next((v for v in reversed(self.values) if v.name == name), None)
        if found is not None:
            return found
        array = self.constants[name]
        return DrawnValue(name, str(array.dtype), array.shape, True, array)

    def use(self) -> OperatorCase:
        """Return the last node as a case of a single operator. Constants are its static operands."""
        call = self.nodes[-1]
        values = [self.value(name) if name else None for name in call.inputs]
        if any(v is not None and v.array is None for v in values):
            raise Reject("an operand could not be computed")
        operands = tuple(None if v is None else v.array for v in values)
        static = frozenset(i for i, name in enumerate(call.inputs) if name in self.constants)
        absent = frozenset(i for i, name in enumerate(call.outputs) if not name)
        return OperatorCase(call.op, self.opset, operands, call.attributes, len(call.outputs), static, absent)

    def case(self, outputs: Sequence[str], name: str) -> GraphCase:
        """Return the current graph with these outputs."""
        given, known = dict(self.inputs), dict(self.constants)
        stored, functions = frozenset(self.sparse), tuple(self.functions)
        return GraphCase(self.opset, given, known, tuple(self.nodes), tuple(outputs), stored, functions, name)


@lru_cache(8192)
def schema_of(op: str, opset: int) -> Any:
    """Return the schema of an operator of ONNX's default domain at ``opset``; None if missing or deprecated."""
    if not defs.has(op, opset, ""):
        return None
    schema = defs.get_schema(op, opset, "")
    return None if schema.deprecated else schema


@lru_cache(8192)
def allowed(op: str, opset: int, index: int = 0) -> tuple[str, ...]:
    """Return the supported element types that ONNX allows for input ``index`` (the last input if variadic)."""
    schema = schema_of(op, opset)
    if schema is None or not schema.inputs:
        return ()
    formal = schema.inputs[: index + 1][-1]
    spelled = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}.get(formal.type_str, [formal.type_str])
    names = {_SPELLED.get(s[7:-1], s[7:-1]) for s in spelled if s.startswith("tensor(")}
    return tuple(n for n in SHORT if n in names)


def _exact(schema: Any, key: str, value: Any) -> Any:
    if key not in schema.attributes:
        raise Reject(f"{schema.name} has no attribute {key}")
    kind = schema.attributes[key].type
    if kind == defs.OpSchema.AttrType.FLOAT:
        return float(value)
    if kind == defs.OpSchema.AttrType.FLOATS:
        return [float(v) for v in value]
    if kind == defs.OpSchema.AttrType.INT:
        return int(value)
    return [int(v) for v in value] if kind == defs.OpSchema.AttrType.INTS else value


def _inferred(schema: Any, proto: NodeProto, operands: dict[str, DrawnValue], opset: int) -> dict[str, Kind]:
    types = {
        n: helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(np.dtype(v.dtype)), v.shape) for n, v in operands.items()
    }
    data = {n: numpy_helper.from_array(v.array) for n, v in operands.items() if v.known and v.array is not None and v.size <= 64}
    try:
        found = shape_inference.infer_node_outputs(schema, proto, types, data, opset_imports=[helper.make_opsetid("", opset)])
    except Exception as error:  # ONNX raises InferenceError, ValueError or RuntimeError: each is a rejection
        raise Reject(str(error)) from error
    if any(not found.get(o, TypeProto()).tensor_type.HasField("shape") for o in proto.output if o):
        found = _by_body(proto, types, opset)
    result = {}
    for name in filter(None, proto.output):
        kind = found.get(name, TypeProto()).tensor_type
        if not kind.HasField("shape") or any(not d.HasField("dim_value") for d in kind.shape.dim):
            raise Reject(f"{proto.op_type} has no static shape")
        dtype = str(np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type)))
        if dtype not in SHORT:
            raise Reject(f"{proto.op_type} gives {dtype}")
        result[name] = (dtype, tuple(d.dim_value for d in kind.shape.dim))
        if any(n < 0 for n in result[name][1]):
            raise Reject(f"{proto.op_type} gives a negative extent")
    return result


def _by_body(proto: NodeProto, types: dict[str, TypeProto], opset: int) -> dict[str, TypeProto]:
    """Return the types of an operator without inference but with a body; whole-model inference reads the body."""
    graph = GraphProto(name="one", node=[proto])
    graph.input.extend(ValueInfoProto(name=n, type=t) for n, t in types.items())
    graph.output.extend(ValueInfoProto(name=n) for n in proto.output if n)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    found = {v.name: v.type for v in shape_inference.infer_shapes(model, data_prop=True).graph.output}
    if proto.op_type == "GroupNormalization":  # its body depends on the context, which ONNX's inference does not read
        found[proto.output[0]] = types[proto.input[0]]
    return found


def _computed(proto: NodeProto, operands: dict[str, DrawnValue], opset: int) -> dict[str, Array]:
    """Compute the outputs with ``onnx.reference``; {} if it fails."""
    graph = GraphProto(name="one", node=[proto])
    graph.input.extend(ValueInfoProto(name=n) for n in operands)
    names = [o for o in proto.output if o]
    graph.output.extend(ValueInfoProto(name=n) for n in names)
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = ReferenceEvaluator(graph, opsets={"": opset}).run(None, {n: v.array for n, v in operands.items()})
        return {n: np.asarray(r) for n, r in zip(names, results, strict=True)}
    except Exception:  # it raises any exception of NumPy; drawing continues without these values
        return {}

"""Operator facts, derived again from ONNX's schemas, from shape inference and from the lowerings of ONNX's node tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from harness import case_array, with_static_inputs
from onnx import defs, numpy_helper, shape_inference

import rammer
from rammer.errors import BadInput
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower_node
from rammer.frontend.lower.lowering_registry import REGISTRY, CannotLower, Lowering
from rammer.frontend.op_traits import TABLE, Trait, has_trait, moved_operands, operators, shape_operands, size_operands
from rammer.frontend.read.reader import read_model
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.expr import Const, Expr, Load, Op, Ref
from rammer.ir.graph import Graph, Node
from rammer.ir.names import Names
from rammer_testing.nonempty import some
from rammer_testing.suite.nodes import node_tests

#: Operations that are undefined for some divisors, shifts or exponents if they are integers.
DIVISIONS = ("div", "floordiv", "mod", "fmod", "pow", "shl", "shr")
#: Operators of the table.
NAMES = [op for ops, _, _ in TABLE for op in ops.split()]


@cache
def lowered() -> dict[str, list[tuple[Graph, Node, Lowering]]]:
    """Return the lowerings of all node tests of one operator, by operator."""
    found = defaultdict[str, list[tuple[Graph, Node, Lowering]]](list)
    for test in node_tests():
        if len(test.model.graph.node) != 1:
            continue
        op = test.model.graph.node[0].op_type
        try:
            inputs = {v.name: case_array(a) for v, a in zip(test.model.graph.input, test.data_sets[0][0], strict=True)}
            read = read_model(with_static_inputs(test.model, inputs))
            graph = bind(read, {p.name: inputs[p.name].shape for p in read.inputs})
            for node in graph.nodes:
                if node.op == op and not node.domain:
                    made = lower_node(graph, node, Names(graph.types))
                    found[op].append((graph, node, made))
        except (BadInput, CannotLower, NotImplementedError, pytest.skip.Exception):
            continue
    return dict(found)


def having(traits: Trait) -> set[str]:
    """Return the operators with one of ``traits`` that node tests lower."""
    return {op for op in operators(traits) if op in lowered()}


# --- the table ---------------------------------------------------------------------------------


def test_each_operator_has_one_row_and_exists() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for op in some(NAMES):
        assert defs.has(op, "") or op == "Upsample", op  # Upsample is deprecated
    assert not has_trait(Node("Add", ("a", "b"), ("c",), domain="acme"), Trait.ELEMENTWISE)


def test_operands_with_roles_exist_and_sizes_are_integers() -> None:
    for ops, _, roles in some(TABLE):
        for op in ops.split():
            formal = defs.get_schema(op, 9 if op == "Upsample" else defs.onnx_opset_version(), "").inputs
            assert len(roles) <= len(formal) and not set(roles) - set("xsa."), op
            for place in size_operands(op):
                assert {"tensor(int64)", "tensor(int32)"} & set(formal[place].types), (op, place)


def test_no_other_module_has_a_list_of_these_facts() -> None:
    """Check that no collection of names in the core equals a trait. Names in a rule or pattern of one module are few."""
    import ast

    traits = {t.name: set(operators(t)) for t in Trait if len(operators(t)) > 2}
    for path in some(sorted(Path(rammer.__file__).parent.rglob("*.py"))):
        if path.name == "op_traits.py":
            continue
        for part in ast.walk(ast.parse(path.read_text())):
            items = part.elts if isinstance(part, ast.Tuple | ast.List | ast.Set) else ()
            names = {e.value for e in items if isinstance(e, ast.Constant)}
            assert names not in traits.values(), f"{path}:{part.lineno} is {[n for n, t in traits.items() if t == names]}"


# --- facts from lowerings ----------------------------------------------------------------------


def is_elementwise(node: Node, lowering: Lowering) -> bool:
    """Return True if all Computes are maps that read every operand at the index of the result, broadcast, and nothing else."""
    read = {load.tensor for c in lowering.computes for load in c.loads}
    if len(node.outputs) != 1 or any(i and i not in read for i in node.inputs):
        return False
    return all(c.combiner is None and all(is_broadcast(i, c, lowering) for i in parts(c.body)) for c in lowering.computes)


def parts(e: Expr) -> Iterator[Expr]:
    """Yield the loads of an expression, and its references to axes outside of loads."""
    if isinstance(e, Load | Ref):
        yield e
    else:
        for child in ex.children(e):
            yield from parts(child)


def is_broadcast(e: Expr, c: Compute, lowering: Lowering) -> bool:
    if not isinstance(e, Load) or e.fill is not None:
        return False
    shape = lowering.type(e.tensor).shape
    axes = c.axes[len(c.axes) - len(shape) :] if len(shape) <= len(c.axes) else ()
    return len(axes) == len(shape) and all(
        i == Ref(a.name) or (n == 1 and isinstance(i, Const)) for n, a, i in zip(shape, axes, e.indices, strict=True)
    )


def test_elementwise_operators_are_maps_of_the_same_index() -> None:
    found = {op for op, cases in lowered().items() if all(is_elementwise(node, made) for _, node, made in cases)}
    assert found == having(Trait.ELEMENTWISE)
    assert len(found) > 60


def is_moved(e: Expr, sources: set[str], fills: bool) -> bool:
    """Return True if the value of ``e`` is an element of ``sources``, or, with ``fills``, any other load or constant."""
    match e:
        case Load():
            return (e.tensor in sources and (fills or e.fill in (None, 0))) or fills
        case Const():
            return fills
        case Op("where", (_, first, second)):
            return is_moved(first, sources, fills) and is_moved(second, sources, fills)
    return False


def test_movers_only_load_moved_operands() -> None:
    for op in some(sorted(having(Trait.MOVES | Trait.FILLS) - {"MaxUnpool"})):  # MaxUnpool is a sum of one term
        for _, node, made in some(lowered()[op]):
            sources = {node.inputs[i] for i in moved_operands(node)} | {c.name for c in made.computes}
            fills = op in operators(Trait.FILLS)
            assert all(c.combiner is None and is_moved(c.body, sources, fills) for c in made.computes), node


def test_operators_that_only_load_are_movers() -> None:
    """Check the reverse: an operator whose lowerings are only loads has the trait, unless its attributes decide."""
    found = set()
    for op, cases in lowered().items():
        sources = [{i for i in node.inputs if i} | {c.name for c in made.computes} for _, node, made in cases]
        plain = (
            all(c.combiner is None and is_moved(c.body, s, False) for c in made.computes)
            for s, (_, _, made) in zip(sources, cases, strict=True)
        )
        found |= {op} if all(plain) else set()
    decided = {"Dropout"}  # in training, it scales
    assert found - decided <= set(operators(Trait.MOVES | Trait.FILLS)), found
    assert len(found) > 15


def test_reshapes_keep_the_order_of_elements() -> None:
    for op in some(sorted(having(Trait.RESHAPES))):
        for graph, node, made in some(lowered()[op]):
            kind = graph.types[node.inputs[0]]
            values: dict[str, Any] = {node.inputs[0]: np.arange(kind.size).reshape(kind.shape).astype(kind.dtype)}
            for c in made.computes:
                values[c.name] = evaluate_compute(c, values)
            assert np.array_equal(values[node.outputs[0]].reshape(-1), values[node.inputs[0]].reshape(-1)), node


def test_commutative_operators_keep_every_bit(rng: np.random.Generator) -> None:
    """Check all element-wise operators of two operands with numbers whose order decides in Max, Min, Sub and the like."""
    found, special = set(), np.array([0.0, -0.0, 1.5, -2.0, np.inf, 3.0], np.float32)
    for op in some(sorted(having(Trait.ELEMENTWISE))):
        cases = [
            (graph, node, made)
            for graph, node, made in lowered()[op]
            if len(node.inputs) == 2 and graph.types[node.inputs[0]] == graph.types[node.inputs[1]]
        ]
        for graph, node, made in cases[:1]:
            kind = graph.types[node.inputs[0]]
            a, b = (rng.choice(special, kind.shape) if kind.dtype == "float32" else rng.integers(0, 2, kind.shape) for _ in "ab")
            both = [a.astype(kind.dtype), b.astype(kind.dtype)]
            results = []
            for operands in (both, both[::-1]):
                values = dict(zip(node.inputs, operands, strict=True))
                with np.errstate(all="ignore"):
                    for c in made.computes:
                        values[c.name] = evaluate_compute(c, values)
                results.append(np.asarray(values[node.outputs[0]]).tobytes())
            found |= {op} if results[0] == results[1] else set()
    assert found - {"Max", "Min"} == having(Trait.COMMUTATIVE)


def test_total_operators_have_no_index_and_no_divisor_from_data() -> None:
    for op in some(sorted(having(Trait.TOTAL))):
        for graph, node, made in some(lowered()[op]):
            for c in made.computes:
                assert not any(ex.has_loads(i) for load in c.loads for i in load.indices) or op == "OneHot", node
                whole = not graph.types[node.inputs[0]].dtype.startswith("float")
                operations = [e for e in ex.walk(c.body) if isinstance(e, Op)]
                assert not (whole and any(e.fn in DIVISIONS and ex.has_loads(e.args[1]) for e in operations)), node
    assert not set(operators(Trait.TOTAL)) & set(operators(Trait.TOTAL_OF_FLOATS))


def test_reductions_combine_along_the_axes_of_an_operand() -> None:
    assert set(operators(Trait.REDUCTION)) == {s.name for s in defs.get_all_schemas() if s.name.startswith("Reduce")}
    for op in some(sorted(having(Trait.REDUCTION))):
        assert any(c.combiner for _, _, made in lowered()[op] for c in made.computes)
        assert defs.get_schema(op).inputs[1].name == "axes"


# --- facts from inference ----------------------------------------------------------------------


@cache
def inferred() -> dict[str, set[int]]:
    """Return the operands without whose value inference finds no shape, by operator."""
    found = defaultdict[str, set[int]](set)
    for test in node_tests():
        if len(test.model.graph.node) != 1 or any(not hasattr(a, "shape") for a in map(_tensor, test.data_sets[0][0])):
            continue
        node = test.model.graph.node[0]
        if node.domain or ("", node.op_type) not in REGISTRY:
            continue
        arrays = dict(zip((v.name for v in test.model.graph.input), map(_tensor, test.data_sets[0][0]), strict=True))
        every = {n: a for n, a in arrays.items() if n in node.input}
        if not is_inferred(test.model, every):
            continue
        for place, name in enumerate(node.input):
            if name in every and not is_inferred(test.model, {n: a for n, a in every.items() if n != name}):
                found[node.op_type].add(place)
    return dict(found)


def test_operands_that_decide_shapes_are_in_the_table() -> None:
    for op, places in some(inferred().items()):
        assert places <= set(shape_operands(op)), (op, places)
    assert len(inferred()) > 10


def _tensor(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def is_inferred(model: onnx.ModelProto, constants: dict[str, Any]) -> bool:
    """Return True if ONNX infers the static shape of every result from the types of inputs and these constants."""
    known = onnx.ModelProto()
    known.CopyFrom(model)
    known.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in constants.items())
    for value in known.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        done = shape_inference.infer_shapes(known, data_prop=False)
    except Exception:  # ONNX raises several types
        return False
    shapes = [v.type.tensor_type for v in done.graph.output]
    return all(s.HasField("shape") and all(d.HasField("dim_value") for d in s.shape.dim) for s in shapes)


def test_operands_in_the_table_decide() -> None:
    """Check that each operand of the table is needed: by inference, or by the lowering."""
    missing = set[str]()
    for op, cases in some(lowered().items()):
        for graph, node, _ in cases:
            for place in shape_operands(op):
                name = node.inputs[place] if place < len(node.inputs) else ""
                if name not in graph.constants or place in inferred().get(op, ()):
                    continue
                try:
                    lower_node(replace(graph, constants={n: a for n, a in graph.constants.items() if n != name}), node, Names())
                    missing.add(f"{op} {place}")
                except CannotLower:
                    pass
    assert not missing

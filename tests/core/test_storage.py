"""The storage pass: results through planned storages equal the logical ones, and copies are removed where possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from rammer.frontend.lower.graph_lowering import lower
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute, ComputeGraph
from rammer.ir.evaluate import evaluate_compute, run_graph
from rammer.ir.expr import Load, Op, Ref
from rammer.ir.graph import Graph, Node, Value
from rammer.ir.piecewise import make_piecewise
from rammer.ir.program import Storage
from rammer.ir.types import TensorType
from rammer.plan.load_addresses import load_address
from rammer.plan.storage import StoragePlan, assign_storage
from rammer_testing.nonempty import some

Array = np.ndarray[Any, np.dtype[Any]]


class Builder:
    """Builder of a Graph, node by node; shapes come from running each node on zeros with NumPy."""

    def __init__(self, **inputs: tuple[int, ...]) -> None:
        self.types = {n: TensorType("float32", s) for n, s in inputs.items()}
        self.inputs = [Value(n, t, n) for n, t in self.types.items()]
        self.nodes: list[Node] = []
        self.constants: dict[str, Array] = {}

    def node(self, op: str, inputs: Sequence[str], shape: Sequence[int], **attributes: Any) -> str:
        return self.nodes_of(op, inputs, [shape], **attributes)[0]

    def nodes_of(self, op: str, inputs: Sequence[str], shapes: Sequence[Sequence[int]], **attributes: Any) -> list[str]:
        names = [f"v{len(self.types) + i}" for i in range(len(shapes))]
        self.types |= {n: TensorType("float32", tuple(s)) for n, s in zip(names, shapes, strict=True)}
        self.nodes.append(Node(op, tuple(inputs), tuple(names), attributes, f"{op}_{names[0]}"))
        return names

    def ints(self, *values: int) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = np.array(values, np.int64)
        self.types[name] = TensorType("int64", (len(values),))
        return name

    def shape(self, name: str) -> tuple[int, ...]:
        return self.types[name].shape

    def relu(self, x: str) -> str:
        return self.node("Relu", [x], self.shape(x))

    def concat(self, parts: Sequence[str], axis: int) -> str:
        shape = list(self.shape(parts[0]))
        shape[axis] = sum(self.shape(p)[axis] for p in parts)
        return self.node("Concat", parts, shape, axis=axis)

    def reshape(self, x: str, *shape: int) -> str:
        return self.node("Reshape", [x, self.ints(*shape)], shape)

    def transpose(self, x: str, *perm: int) -> str:
        return self.node("Transpose", [x], [self.shape(x)[p] for p in perm], perm=perm)

    def graph(self, *outputs: str) -> ComputeGraph:
        ports = tuple(Value(o, self.types[o], o) for o in outputs)
        return lower(Graph("g", tuple(self.inputs), ports, tuple(self.nodes), self.types, self.constants))


def through_storages(plan: StoragePlan, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Run the remaining computes on flat buffers; every element may be written once and starts as garbage."""
    memory = {b: np.full(size, 77, dtype=dtype) for b, (dtype, size) in plan.buffers.items()}
    written = {b: np.zeros(size, np.int64) for b, (_, size) in plan.buffers.items()}

    def view(flat: Array, storage: Storage) -> Array:
        low, high = storage.span()
        assert low >= 0 and high <= flat.size, f"{storage} leaves its buffer of {flat.size}"
        if 0 in storage.shape:
            return np.empty(storage.shape, flat.dtype)
        return as_strided(flat[storage.offset :], storage.shape, [s * flat.itemsize for s in storage.strides])

    def write(name: str, value: Array) -> None:
        storage = plan.storages[name]
        view(memory[storage.buffer], storage)[...] = value
        marks = view(written[storage.buffer], storage)
        assert not marks.any(), f"{name} overwrites an element"
        marks[...] = 1

    for name, value in {**plan.graph.constants, **inputs}.items():
        write(name, value)
    for compute in some(plan.graph.computes):
        for name in compute.reads:
            assert view(written[plan.storages[name].buffer], plan.storages[name]).all(), f"{name} is read too early"
        tensors = {n: view(memory[plan.storages[n].buffer], plan.storages[n]).copy() for n in compute.reads}
        write(compute.name, evaluate_compute(compute, tensors))
    return {n: view(memory[s.buffer], s).copy() for n, s in plan.storages.items()}


def check(rng: np.random.Generator, graph: ComputeGraph) -> StoragePlan:
    """Check the values of every tensor of ``graph`` that is left, and that outputs are dense in separate buffers. Inputs are
    integers, since a product of another shape adds in another order, which rounds no sum of integers."""
    inputs = {n: rng.integers(-99, 100, graph.types[n].shape).astype(np.float32) for n in graph.inputs}
    expected = run_graph(graph, inputs, precise=False)
    plan = assign_storage(graph)
    actual = through_storages(plan, inputs)
    for name in (*graph.inputs, *(c.name for c in graph.computes if c.name in plan.graph.types)):
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)
    for name in some(graph.outputs):
        assert plan.buffers[name] == (graph.types[name].dtype, graph.types[name].size)
        dense = TensorType("float32", graph.types[name].shape)
        assert plan.storages[name].offset == 0 and plan.storages[name].shape == dense.shape
    return plan


def names(plan: StoragePlan) -> list[str]:
    return [c.name for c in plan.graph.computes]


def test_concat_parts_are_written_in_place(rng: np.random.Generator) -> None:
    b = Builder(x=(2, 3, 4), y=(2, 5, 4))
    p, q = b.relu("x"), b.relu("y")
    c = b.concat([p, q], 1)
    out = b.relu(c)
    plan = check(rng, b.graph(out))
    assert names(plan) == [p, q, out]
    assert plan.storages[q] == Storage(q, c, 12, (2, 5, 4), (32, 4, 1))


def test_concat_is_the_output(rng: np.random.Generator) -> None:
    b = Builder(x=(2, 3), y=(2, 5))
    p, q = b.relu("x"), b.relu("y")
    c = b.concat([p, q], 1)
    assert names(check(rng, b.graph(c))) == [p, q]


def test_inputs_and_repeated_parts_are_copied(rng: np.random.Generator) -> None:
    b = Builder(x=(2, 3), y=(2, 5))
    p = b.relu("y")
    c = b.concat([p, "x", p], 1)
    plan = check(rng, b.graph(c))
    assert names(plan) == [p, "x_copy", f"{p}_copy"]


def test_concat_of_inputs_stays_one_compute(rng: np.random.Generator) -> None:
    b = Builder(x=(2, 3), y=(2, 5))
    assert len(names(check(rng, b.graph(b.concat(["x", "y"], 1))))) == 1


def test_nested_concats_compose(rng: np.random.Generator) -> None:
    """Check DenseNet as a chain: every concat is the first part of the next one."""
    b = Builder(x=(1, 4, 3, 3))
    total = b.relu("x")
    parts = [total]
    for _ in range(4):
        parts.append(b.relu(b.node("Slice", [total, b.ints(0), b.ints(2), b.ints(1)], (1, 2, 3, 3))))
        total = b.concat([total, parts[-1]], 1)
    out = b.relu(total)
    plan = check(rng, b.graph(out))
    assert names(plan) == [*parts, out]


def test_prefix_concats_are_views_of_the_largest(rng: np.random.Generator) -> None:
    """Check DenseNet as torchvision writes it: each layer concatenates all earlier features again."""
    b = Builder(x=(2, 4, 3))
    features = [b.relu("x")]
    for _ in range(4):
        joined = b.concat(features, 1) if len(features) > 1 else features[0]
        features.append(b.relu(b.node("Slice", [joined, b.ints(0), b.ints(2), b.ints(1)], (2, 2, 3))))
    out = b.relu(b.concat(features, 1))
    plan = check(rng, b.graph(out))
    assert names(plan) == [*features, out]


def test_part_of_two_different_concats_is_copied_once(rng: np.random.Generator) -> None:
    b = Builder(x=(2, 3), y=(2, 5), z=(2, 9))
    p, q, r = b.relu("x"), b.relu("y"), b.relu("z")
    big, small = b.concat([p, r], 1), b.concat([q, p], 1)
    outs = [b.relu(big), b.relu(small)]
    plan = check(rng, b.graph(*outs))
    assert names(plan) == [p, q, r, f"{p}_copy", *outs]
    assert plan.storages[p].buffer == big


def test_output_reshape_lets_the_producer_write_into_it(rng: np.random.Generator) -> None:
    b = Builder(x=(2, 3, 4))
    p = b.relu("x")
    out = b.reshape(p, 6, 4)
    plan = check(rng, b.graph(out))
    assert names(plan) == [p] and plan.storages[p].buffer == out


def test_output_view_of_input_or_of_output_is_a_copy(rng: np.random.Generator) -> None:
    b = Builder(x=(2, 3, 4))
    first = b.relu("x")
    outs = [b.reshape("x", 24), first, b.reshape(first, 24)]
    plan = check(rng, b.graph(*outs))
    assert sorted(names(plan)) == sorted([first, outs[0], outs[2]])


def test_transposed_output_is_not_written_with_strides(rng: np.random.Generator) -> None:
    b = Builder(x=(4, 5))
    p = b.relu("x")
    out = b.transpose(p, 1, 0)
    assert names(check(rng, b.graph(out))) == [p, out]


def test_transposition_of_outer_axes_is_written_through(rng: np.random.Generator) -> None:
    b = Builder(x=(4, 5, 3))
    p = b.relu("x")
    out = b.transpose(p, 1, 0, 2)
    plan = check(rng, b.graph(out))
    assert names(plan) == [p]
    assert plan.storages[p] == Storage(p, out, 0, (4, 5, 3), (3, 12, 1))


def attention(b: Builder) -> tuple[str, str, str]:
    """Return the heads of ``x``, their scaled values, and the merged heads."""
    heads = b.transpose(b.reshape(b.relu("x"), 2, 6, 2, 4), 0, 2, 1, 3)
    scaled = b.relu(heads)
    return heads, scaled, b.reshape(b.transpose(scaled, 0, 2, 1, 3), 2, 6, 8)


def test_attention_heads_are_views_and_written_where_they_are_merged(rng: np.random.Generator) -> None:
    b = Builder(x=(2, 6, 8))
    heads, scaled, merged = attention(b)
    plan = check(rng, b.graph(b.relu(merged)))
    assert heads not in names(plan) and merged not in names(plan)
    assert plan.storages[scaled] == Storage(scaled, merged, 0, (2, 2, 6, 4), (48, 4, 8, 1))


def test_heads_that_others_read_too_are_merged_by_a_copy(rng: np.random.Generator) -> None:
    """Check that merging copies: the heads' elements are separated by a whole sequence, so no single stride fits. The other
    reader keeps the heads in place."""
    b = Builder(x=(2, 6, 8))
    _, scaled, merged = attention(b)
    plan = check(rng, b.graph(b.concat([b.relu(merged), b.reshape(b.relu(scaled), 2, 6, 8)], 1)))
    assert merged in names(plan) and plan.storages[scaled].buffer == scaled


@pytest.mark.parametrize("alone", [True, False])
def test_heads_of_a_product_are_computed_next_to_past_ones(alone: bool, rng: np.random.Generator) -> None:
    """Check that a product of one token is of heads and columns, which no strides of its row express. A second reader of the row
    keeps it, and the heads are copied."""
    b = Builder(x=(1, 1, 6), w=(6, 8), past=(1, 2, 3, 4))
    row = b.node("MatMul", ["x", "w"], (1, 1, 8))
    heads = b.reshape(row, 1, 1, 2, 4)
    joined = b.concat([b.relu("past"), b.transpose(heads, 0, 2, 1, 3)], 2)
    outputs = [b.relu(joined), *([] if alone else [b.relu(row)])]
    plan = check(rng, b.graph(*outputs))
    made = plan.graph.producers[heads]
    assert plan.storages[heads].buffer == joined and made.kind == ("contraction" if alone else "map")
    assert (row in names(plan)) is not alone
    turned = assign_storage(b.graph(*outputs), turn=False)
    assert row in names(turned)


def test_reshape_and_unsqueeze_before_a_concat_are_written_through(rng: np.random.Generator) -> None:
    b = Builder(x=(2, 12), y=(2, 12))
    p, q = b.relu("x"), b.relu("y")
    parts = [b.reshape(p, 2, 1, 3, 4), b.reshape(q, 2, 1, 3, 4)]
    out = b.relu(b.concat(parts, 1))
    assert names(check(rng, b.graph(out))) == [p, q, out]


def test_all_slices_of_a_tensor_side_by_side_are_that_tensor(rng: np.random.Generator) -> None:
    """Check YOLO's C2f block: the concatenation of both halves of a split and results of one of them."""
    b = Builder(x=(2, 6, 4))
    whole = b.relu("x")
    halves = b.nodes_of("Split", [whole, b.ints(3, 3)], [(2, 3, 4), (2, 3, 4)], axis=1)
    more = b.relu(halves[1])
    out = b.relu(b.concat([*halves, more], 1))
    assert names(check(rng, b.graph(out))) == [whole, more, out]
    swapped = Builder(x=(2, 6, 4))
    whole = swapped.relu("x")
    halves = swapped.nodes_of("Split", [whole, swapped.ints(3, 3)], [(2, 3, 4), (2, 3, 4)], axis=1)
    out = swapped.relu(swapped.concat(halves[::-1], 1))
    assert names(check(rng, swapped.graph(out))) == [whole, *halves, out]


def test_negative_and_zero_strides_are_views(rng: np.random.Generator) -> None:
    b = Builder(x=(2, 5))
    backwards = b.node("Slice", ["x", b.ints(-1), b.ints(-(1 << 40)), b.ints(1), b.ints(-2)], (2, 3))
    wide = b.node("Expand", [b.reshape(backwards, 2, 1, 3), b.ints(2, 4, 3)], (2, 4, 3))
    out = b.relu(wide)
    plan = check(rng, b.graph(out))
    assert names(plan) == [out]
    assert plan.storages[wide] == Storage(wide, "x", 4, (2, 4, 3), (5, 0, -2))


def test_piecewise_without_room_for_views_falls_back_to_copies(rng: np.random.Generator) -> None:
    """Check a piece that broadcasts, and one that reads only a part of its tensor."""
    kinds = {n: TensorType("float32", s) for n, s in {"x": (3,), "p": (3,), "q": (4, 3), "y": (4, 3)}.items()}
    axes = (Axis("i", 4), Axis("j", 3))
    p = Compute("p", "float32", (Axis("j", 3),), Op("neg", (Load("x", (Ref("j"),)),)))
    q = Compute("q", "float32", axes, Load("p", (Ref("j"),)))
    y = Compute("y", "float32", axes, make_piecewise("i", [2, 2], [Load("p", (Ref("j"),)), Load("q", (Ref("i"), Ref("j")))]))
    graph = ComputeGraph("g", ("x",), ("y",), (p, q, y), kinds)
    check(rng, graph)


def test_addresses_are_decided_exactly() -> None:
    storage = Storage("t", "t", 7, (3, 4), (4, 1))
    assert load_address((ex.make_floordiv("i", 4), ex.make_mod("i", 4)), (Axis("i", 12),), storage) == (7, (1,))
    gap = Storage("t", "t", 7, (3, 4), (5, 1))
    assert load_address((ex.make_floordiv("i", 4), ex.make_mod("i", 4)), (Axis("i", 12),), gap) is None
    assert load_address((ex.make_floordiv("i", 4), ex.make_mod("i", 4)), (Axis("i", 4),), gap) == (7, (1,))


@st.composite
def chains(draw: st.DrawFn) -> ComputeGraph:
    """Draw random shape operators, element-wise operators and concatenations over a pool of tensors."""

    def dims() -> tuple[int, ...]:
        return tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3)))

    b = Builder(x=dims(), y=dims())
    pool = ["x", "y", b.relu("x")]
    for _ in range(draw(st.integers(2, 9))):
        source = draw(st.sampled_from(pool))
        grow = draw(st.sampled_from([_relu, _reshape, _transpose, _slice, _split, _expand, _concat, _concat]))
        made = grow(draw, b, pool, source)
        pool += [m for m in made if np.prod(b.shape(m)) <= 600]
    outputs = draw(st.lists(st.sampled_from([n for n in b.types if n.startswith("v")]), min_size=1, max_size=3))
    return b.graph(*dict.fromkeys(outputs))


def _relu(draw: st.DrawFn, b: Builder, pool: list[str], x: str) -> list[str]:
    return [b.relu(x)]


def _reshape(draw: st.DrawFn, b: Builder, pool: list[str], x: str) -> list[str]:
    size, shape = int(np.prod(b.shape(x))), []
    while size > 1 and len(shape) < 3:
        shape.append(draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0])))
        size //= shape[-1]
    return [b.reshape(x, *shape, size)]


def _transpose(draw: st.DrawFn, b: Builder, pool: list[str], x: str) -> list[str]:
    return [b.transpose(x, *draw(st.permutations(range(len(b.shape(x))))))]


def _slice(draw: st.DrawFn, b: Builder, pool: list[str], x: str) -> list[str]:
    dim = draw(st.integers(0, len(b.shape(x)) - 1))
    extent = b.shape(x)[dim]
    start, end, step = draw(st.integers(-5, 5)), draw(st.integers(-5, 5)), draw(st.sampled_from([-2, -1, 1, 2]))
    length = len(range(*slice(start, end, step).indices(extent)))
    shape = [*b.shape(x)[:dim], length, *b.shape(x)[dim + 1 :]]
    return [b.node("Slice", [x, b.ints(start), b.ints(end), b.ints(dim), b.ints(step)], shape)] if length else []


def _split(draw: st.DrawFn, b: Builder, pool: list[str], x: str) -> list[str]:
    dim = draw(st.integers(0, len(b.shape(x)) - 1))
    extent = b.shape(x)[dim]
    if extent < 2:
        return []
    first = draw(st.integers(1, extent - 1))
    shapes = [[*b.shape(x)[:dim], n, *b.shape(x)[dim + 1 :]] for n in (first, extent - first)]
    return b.nodes_of("Split", [x, b.ints(first, extent - first)], shapes, axis=dim)


def _expand(draw: st.DrawFn, b: Builder, pool: list[str], x: str) -> list[str]:
    shape = [draw(st.integers(1, 3)) if n == 1 else n for n in b.shape(x)]
    return [b.node("Expand", [x, b.ints(*shape)], shape)]


def _concat(draw: st.DrawFn, b: Builder, pool: list[str], x: str) -> list[str]:
    dim = draw(st.integers(0, len(b.shape(x)) - 1))

    def rest(name: str) -> tuple[int, ...]:
        return (*b.shape(name)[:dim], *b.shape(name)[dim + 1 :]) if len(b.shape(name)) > dim else (-1,)

    fitting = [n for n in pool if len(b.shape(n)) == len(b.shape(x)) and rest(n) == rest(x)]
    others = draw(st.lists(st.sampled_from(fitting), min_size=1, max_size=3))
    return [b.concat([x, *others], dim)]


@pytest.mark.slow
@settings(max_examples=250)
@given(graph=chains(), rng=st.integers(0, 2**32 - 1).map(np.random.default_rng))
def test_random_chains_keep_their_results(graph: ComputeGraph, rng: np.random.Generator) -> None:
    check(rng, graph)

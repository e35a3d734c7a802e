"""Results of several shapes in one operator: rows stored together with their reductions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
from stitched_graphs import device, graph_of, stitched
from task_oracle import dropped_waits, is_legal, lost_and_doubled, moved_buffers, narrowed_counters, rejected, swapped_neighbours

from rammer.codegen.dialects import C99
from rammer.device.hook_results import check_candidates
from rammer.device.manifest import Binding
from rammer.fusion.tile_search import ranked_tiles
from rammer.ir.compute import Compute
from rammer.ir.operator import Connection, ROperator, shared_axes
from rammer.ir.program import RProgram
from rammer.ir.types import TensorType
from rammer.runtime.host_memory import evaluate_task
from rammer.schedule.baselines import Sequential
from rammer.schedule.policy_registry import list_policies, parse_policy
from rammer.verify.verifier import VerifyError, verify
from rammer_testing.host_c import THREADED, HostCase, check
from rammer_testing.nonempty import some
from rammer_testing.programs import TaskNet, adding, summing
from rammer_testing.small_models import SmallModel

ROWS = "float[128,192] x"
#: Models by name, and their number of operators before stitching into one.
KEPT = {
    "map with two reductions": (
        f"""({ROWS}) => (float[128,192] e, float[128] p, float[128,1] q) <int64[1] along = {{1}}> {{
            e = Exp(x)
            p = ReduceSum<keepdims=0>(e, along)
            q = ReduceMax(e, along)
        }}""",
        3,
    ),
    "map beside a reduction": (
        f"""({ROWS}) => (float[128,192] e, float[128] p) <int64[1] along = {{1}}> {{
            e = Tanh(x)
            p = ReduceMax<keepdims=0>(x, along)
        }}""",
        2,
    ),
    "norm, its rows and their maximum": (
        f"""({ROWS}, float[128,192] r, float[192] w_g, float[192] w_b) => (float[128,192] y, float[128,192] s, float[128] m)
        <int64[1] along = {{1}}> {{
            s = Add(x, r)
            y = LayerNormalization<axis=-1>(s, w_g, w_b)
            m = ReduceMax<keepdims=0>(s, along)
        }}""",
        3,
    ),
    "columns and what is left of them": (
        """(float[512,64] x) => (float[512,64] d, float[1,64] mean, float[1,64] high) <int64[1] along = {0}> {
            mean = ReduceMean(x, along)
            d = Sub(x, mean)
            high = ReduceMax(d, along)
        }""",
        3,
    ),
    "three depths": (
        """(float[6,20,30] x) => (float[6,20,30] e, float[6,20] p, float[6] q) <int64[1] last = {2}, int64[1] along = {1}> {
            e = Tanh(x)
            p = ReduceSum<keepdims=0>(e, last)
            q = ReduceMax<keepdims=0>(p, along)
        }""",
        3,
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_rows_and_what_they_are_reduced_to_become_one_operator(name: str, rng: np.random.Generator) -> None:
    text, apart = KEPT[name]
    graph = graph_of(SmallModel("kept", text), rng)
    before, after = stitched(graph, device())
    (operator,) = after.operators
    assert len(before.operators) == apart
    assert not operator.even and {*operator.outputs} == {*graph.outputs}
    for _, tile, _ in some(ranked_tiles(operator, graph.types, device())):
        assert {d: n for d, n in enumerate(tile) if d in operator.uncut}.items() <= dict(enumerate(operator.anchor.shape)).items()
        assert tiles_partition(operator.tiled(tile))


@pytest.mark.parametrize("target", [C99, THREADED, replace(C99, name="rereads", rereads=True)], ids=lambda t: t.name)
@pytest.mark.parametrize("name", KEPT)
def test_kept_rows_are_right_in_any_tile(name: str, target: object, seed: int, rng: np.random.Generator) -> None:
    """Check also tiles that do not divide the rows; no other task of the same results may write a task's rows."""
    graph, random = graph_of(SmallModel("kept", KEPT[name][0]), rng), Random(seed)
    (operator,) = stitched(graph, device())[1].operators
    values = {n: rng.standard_normal(graph.types[n].shape).astype(np.float32) for n in operator.inputs}
    tile = random_tile(operator, random)
    check(HostCase(operator.tiled(tile), Binding(graph.types, {}).types, {}, values), target)  # type: ignore[arg-type]
    tiled, whole = operator.tiled(tile), operator.tiled(operator.anchor.shape)
    wanted = evaluate_task(whole, 0, values)
    for task in some(random.sample(range(tiled.task_count), min(3, tiled.task_count))):
        for output, (box, have) in evaluate_task(tiled, task, values).items():
            assert box == tiled.part(output, tiled.task_box(task))
            np.testing.assert_allclose(have, wanted[output][1][tuple(slice(*b) for b in box)], rtol=1e-5, atol=1e-6)


def random_tile(operator: ROperator, random: Random) -> tuple[int, ...]:
    return tuple(n if d in operator.uncut else random.randint(1, n) for d, n in enumerate(operator.anchor.shape))


def tiles_partition(operator: ROperator) -> bool:
    """Return True if every element of every output belongs to one task."""
    for c in (c for c in operator.computes if c.name in operator.outputs):
        counts = np.zeros(c.shape, np.int64)
        for task in range(operator.task_count):
            counts[tuple(slice(low, high) for low, high in operator.part(c.name, operator.task_box(task)))] += 1
        if not (counts == 1).all():
            return False
    return True


# --- the verifier ---------------------------------------------------------------------------------


def row_operator(name: str, read: str, rows: int, tile: int, reduced: bool, width: int = 3) -> ROperator:
    """Make ``name_e[i, j] = read[i] + j``, stored, and ``name[i]``. ``name[i]`` is the sum of its rows and has the task grid, or
    (not ``reduced``) is a map."""
    kept = Compute.parse(f"{name}_e: f32[i:{rows}, j:{width}] = {read}[i] + cast(float32, j)")
    total = Compute.parse(f"{name}: f32[i:{rows}] = sum[k:{width}] {name}_e[i, k]")
    beside = Compute.parse(f"{name}: f32[i:{rows}] = {read}[i] * 2.0")
    if reduced:
        return ROperator(name, (kept, total), (Connection(kept.name, name, "veu"),), (kept.name, name), (tile,))
    return ROperator(f"{name}_e", (beside, kept), (), (kept.name, name), (tile, width))


def flattening(name: str, read: str, rows: int, tile: int, width: int = 3) -> ROperator:
    """Make ``name[i]``: the sum of row ``i`` of a stored map."""
    return ROperator(name, (Compute.parse(f"{name}: f32[i:{rows}] = sum[k:{width}] {read}[i, k]"),), (), (name,), (tile,))


def kept_net(random: Random, operators: int, rows: int) -> TaskNet:
    """Make a random DAG over vectors; some operators also write rows, which others read."""
    net, names, maps = TaskNet().tensor("x", rows), ["x"], list[str]()
    for i in range(operators):
        tile, kind = random.randint(1, rows), random.random()
        if kind < 0.5:
            net.add(row_operator(f"t{i}", random.choice(names), rows, tile, random.random() < 0.5))
            maps.append(f"t{i}_e")
        elif kind < 0.8 and maps:
            net.add(flattening(f"t{i}", random.choice(maps), rows, tile))
        else:
            net.add(summing(f"t{i}", rows, random.choice(names), tile, rows))
        names.append(f"t{i}")
    net.add(row_operator("u", names[-1], rows, random.randint(1, rows), random.random() < 0.5)).add(
        flattening("v", "u_e", rows, 1)
    )
    return net.add(adding("y", rows, [*names[1:], "u", "v"], random.randint(1, rows)))


def recut(program: RProgram) -> Iterator[RProgram]:
    """Yield programs with a tile that splits the grid along an axis that another result lacks."""
    for i, o in enumerate(program.operators):
        for d in o.uncut if o.anchor.shape[-1] > 1 else ():
            cut = replace(o, tile=tuple(1 if k == d else t for k, t in enumerate(o.tile)))
            yield replace(program, operators=(*program.operators[:i], cut, *program.operators[i + 1 :]))


EDITS = (dropped_waits, swapped_neighbours, moved_buffers, lost_and_doubled, narrowed_counters, recut)


@pytest.mark.slow
@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", range(200))
def test_no_illegal_program_with_kept_rows_passes(case: int, seed: int) -> None:
    """Check random graphs, devices and policies: their programs are legal, and the verifier rejects every illegal edit."""
    random = Random(f"{seed} {case}")
    net = kept_net(random, random.randint(1, 5), random.choice([4, 7, 9]))
    policy, veus = random.choice(sorted(list_policies())), random.randint(1, 5)
    program = net.program(parse_policy(policy), veus)
    assert is_legal(program)
    assert not all(o.even for o in program.operators)
    for edit in EDITS:
        for wrong in edit(program):
            assert rejected(wrong) or is_legal(wrong), f"{edit.__name__} for {veus} vEUs by {policy}\n{wrong}"


def test_a_tile_that_would_write_a_result_twice_is_refused() -> None:
    operator = row_operator("t", "x", 6, 2, reduced=False)
    program = TaskNet().tensor("x", 6).add(operator).program(Sequential(), 2, ("t_e", "t"))
    (wrong,) = recut(program)
    assert verify(program).tasks == 3
    with pytest.raises(VerifyError, match=r"tile \(2, 1\) cuts the task grid \(6, 3\) where t of another shape"):
        verify(wrong)


def test_a_plugin_may_offer_no_tile_that_cuts_an_axis_which_a_result_has_not() -> None:
    operator = row_operator("t", "x", 6, 2, reduced=False)
    assert check_candidates([operator.tiled((4, 3))], operator)
    with pytest.raises(ValueError, match=r"it offers the tile \(2, 2\), which cuts an axis that a result lacks"):
        check_candidates([operator.tiled((2, 2))], operator)


@pytest.mark.parametrize(
    ("shape", "anchor", "wanted"),
    [
        ((4, 5), (4, 5), (0, 1)),
        ((4, 1), (4, 5), (0, None)),
        ((1, 5), (4, 5), (None, 1)),
        ((4,), (4, 5), (0,)),
        ((5,), (4, 5), (None,)),
        ((4, 5, 6), (4, 5), (0, 1, None)),
        ((4, 6, 5), (4, 5), (0, None, None)),
        ((), (4,), ()),
        ((1, 1), (4, 5), (None, None)),
    ],
)
def test_which_axes_results_have_in_common(shape: Sequence[int], anchor: Sequence[int], wanted: Sequence[int | None]) -> None:
    assert shared_axes(tuple(shape), tuple(anchor)) == wanted


def test_parts_are_those_of_every_shape(seed: int) -> None:
    """Check random results of one operator: tasks partition all of them if no tile splits an axis that one of them lacks."""
    random, seen = Random(seed), set[bool]()
    while seen != {True, False}:
        shapes = [tuple(random.randint(1, 3) for _ in range(random.randint(0, 3))) for _ in range(random.randint(2, 4))]
        computes = []
        for i, shape in enumerate(shapes):
            axes = ", ".join(f"i{d}:{n}" for d, n in enumerate(shape))
            computes.append(Compute.parse(f"t{i}: f32[{axes}] = 1.0"))
        operator = ROperator(computes[-1].name, tuple(computes), (), tuple(c.name for c in computes))
        for tile in product(*(range(1, n + 1) for n in operator.anchor.shape)):
            tiled = operator.tiled(tile)
            allowed = all(tile[d] == n for d, n in enumerate(operator.anchor.shape) if d in operator.uncut)
            assert tiles_partition(tiled) == allowed, (shapes, tile)
            seen.add(allowed)
            boxes = tiled.boxes(tiled.task_box(0), {c.name: TensorType("float32", c.shape) for c in computes})
            assert all(boxes[n] == tiled.part(n, tiled.task_box(0)) for n in some(operator.outputs))

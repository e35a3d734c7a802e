"""The simulator's numerics: any tiling, placement and kind of load, against float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from chip_operators import Array, make_operator, make_program, reference_values, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram, Task, Wait
from rammer.ir.types import TensorType
from rammer_testing.cases import NetCase
from rammer_testing.search import Search

from rammer_ipu_sim.chip import configure_chip
from rammer_ipu_sim.executor import LoadedProgram

CHIP = configure_chip({"tiles": "8", "sram": "65536"})
CONV = "conv: f32[n:1, m:6, h:9, w:7] = sum[c:3, r:3, s:3] pad(x[n, c, h * 2 + r + -1, w + s + -1], 0.0) * k[m, c, r, s]"
BIAS = "bias: f32[n:1, m:6, h:9, w:7] = conv[n, m, h, w] + b[m]"
RELU = "y: f32[n:1, m:6, h:9, w:7] = max(bias[n, m, h, w], 0.0)"
POOL = "z: f32[n:1, m:6, h:9, w:7] = max[r:3, s:3] pad(y[n, m, h + r + -1, w + s + -1], -inf)"


def floats(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def types(values: Mapping[str, Array]) -> dict[str, TensorType]:
    return {n: TensorType(v.dtype.name, v.shape) for n, v in values.items()}


def simulate(
    operators: Sequence[ROperator],
    inputs: Mapping[str, Array],
    constants: Mapping[str, Array],
    output: str,
    veus: int = 5,
    reuse: bool = False,
) -> tuple[Array, RProgram]:
    p = make_program(operators, types(inputs), types(constants), [output], veus, reuse)
    loaded = LoadedProgram(RProgram.parse(str(p)), constants, CHIP)
    return loaded.run(inputs).outputs[output], p


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tile", [(1, 6, 9, 7), (1, 2, 4, 7), (1, 4, 1, 3), (1, 1, 1, 1)])
def test_convolution_with_padding_and_a_pool_in_any_tiling(rng: np.random.Generator, tile: tuple[int, ...], fused: bool) -> None:
    inputs = {"x": floats(rng, 1, 3, 17, 7)}
    constants = {"k": floats(rng, 6, 3, 3, 3), "b": floats(rng, 6)}
    chain = [make_operator("A", [CONV, BIAS, RELU], tile), make_operator("B", [POOL], (1, 4, 5, 3))]
    operators = [make_operator("A", [CONV, BIAS, RELU, POOL], tile)] if fused else chain
    have, _ = simulate(operators, inputs, constants, "z")
    assert relative_error(have, reference_values(operators, {**inputs, **constants})["z"]) <= 1e-5


@settings(max_examples=40)
@given(
    tile=st.tuples(st.just(1), st.integers(1, 6), st.integers(1, 9), st.integers(1, 7)),
    pool=st.tuples(st.just(1), st.integers(1, 6), st.integers(1, 9), st.integers(1, 7)),
    veus=st.integers(1, 8),
    seed=st.integers(0, 1 << 30),
)
def test_any_tiles_on_any_rows_in_any_order(tile: tuple[int, ...], pool: tuple[int, ...], veus: int, seed: int) -> None:
    rng, random = np.random.default_rng(seed), Random(seed)
    inputs = {"x": floats(rng, 1, 3, 17, 7)}
    constants = {"k": floats(rng, 6, 3, 3, 3), "b": floats(rng, 6)}
    operators = [make_operator("A", [CONV, BIAS, RELU], tile), make_operator("B", [POOL], pool)]
    p = make_program(operators, types(inputs), types(constants), ["z"], veus)
    rows: list[list[Task]] = [[] for _ in range(veus)]
    for o in operators:
        for index in random.sample(range(o.task_count), o.task_count):
            waits = (Wait("c_A", operators[0].task_count),) if o.name == "B" else ()
            random.choice(rows).append(Task(o.name, index, waits))
    p = replace(p, rows=tuple(tuple(r) for r in rows))
    have = LoadedProgram(p, constants, CHIP).run(inputs).outputs["z"]
    assert relative_error(have, reference_values(operators, {**inputs, **constants})["z"]) <= 1e-5


def test_softmax_held_in_local_memory(rng: np.random.Generator) -> None:
    lines = [
        "top: f32[i:13] = max[k:20] x[i, k]",
        "e: f32[i:13, j:20] = exp(x[i, j] - top[i])",
        "total: f32[i:13] = sum[k:20] e[i, k]",
        "y: f32[i:13, j:20] = e[i, j] / total[i]",
    ]
    operators = [make_operator("S", lines, (3, 20))]
    inputs = {"x": floats(rng, 13, 20)}
    have, _ = simulate(operators, inputs, {}, "y")
    assert relative_error(have, reference_values(operators, inputs)["y"]) <= 1e-5
    assert np.allclose(have.sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("tile", [(2, 3), (1, 5), (4, 5)])
def test_gather_by_data_reads_the_whole_axis(rng: np.random.Generator, tile: tuple[int, int]) -> None:
    line = "y: f32[i:4, j:5] = x[where(lt(ids[i], 0), ids[i] + 9, ids[i]), j]"
    operators = [make_operator("G", [line], tile)]
    inputs = {"x": floats(rng, 9, 5), "ids": rng.integers(-9, 9, 4)}
    have, _ = simulate(operators, inputs, {}, "y")
    assert np.array_equal(have, inputs["x"][inputs["ids"]])


def test_integers_axis_values_and_booleans(rng: np.random.Generator) -> None:
    operators = [
        make_operator("M", ["m: i32[i:7] = max[k:11] x[i, k]"], (3,)),
        make_operator("A", ["y: i64[i:7] = min[k:11] where(eq(x[i, k], m[i]), k, 99)"], (2,)),
        make_operator("B", ["z: b1[i:7] = lt(y[i], i)"], (4,)),
    ]
    inputs = {"x": rng.integers(-50, 50, (7, 11)).astype(np.int32)}
    have, _ = simulate(operators[:2], inputs, {}, "y")
    assert np.array_equal(have, inputs["x"].argmax(axis=1))
    flags, _ = simulate(operators, inputs, {}, "z")
    assert flags.dtype == np.bool_
    assert np.array_equal(flags, have < np.arange(7))


@pytest.mark.parametrize("tile", [(1,), (4,), (5,), (24,)])
def test_quotients_remainders_and_tables(rng: np.random.Generator, tile: tuple[int]) -> None:
    rows = [int(v) for v in rng.integers(0, 6, 24)]
    operators = [
        make_operator("Q", ["q: f32[i:24] = x[i // 4, i % 4] * 2.0"], tile),
        make_operator("T", [f"y: f32[i:24] = q[i] + x[table(int64, {rows}, i), i % 4]"], tile),
    ]
    inputs = {"x": floats(rng, 6, 4)}
    have, _ = simulate(operators, inputs, {}, "y", reuse=True)
    assert relative_error(have, reference_values(operators, inputs)["y"]) <= 1e-5


@pytest.mark.parametrize("tile", [(2, 5), (4, 5), (8, 2), (3, 4), (5, 5)])
def test_groups_whether_tiles_follow_them_or_not(rng: np.random.Generator, tile: tuple[int, int]) -> None:
    line = "y: f32[m:8, h:5] = sum[c:3, r:3] pad(x[m // 4 * 3 + c, h + r + -1], 0.0) * k[m, c, r]"
    operators = [make_operator("G", [line], tile)]
    inputs, constants = {"x": floats(rng, 6, 5)}, {"k": floats(rng, 8, 3, 3)}
    have, _ = simulate(operators, inputs, constants, "y")
    assert relative_error(have, reference_values(operators, {**inputs, **constants})["y"]) <= 1e-5


@pytest.mark.parametrize("tile", [(3, 4), (1, 1), (5, 6)])
def test_flattened_operands_of_a_contraction(rng: np.random.Generator, tile: tuple[int, int]) -> None:
    operators = [make_operator("F", ["y: f32[i:5, m:6] = sum[k:12] x[i, k // 4, k % 4] * w[m, k]"], tile)]
    inputs, constants = {"x": floats(rng, 5, 3, 4)}, {"w": floats(rng, 6, 12)}
    have, _ = simulate(operators, inputs, constants, "y")
    assert relative_error(have, reference_values(operators, {**inputs, **constants})["y"]) <= 1e-5


def test_outputs_that_are_also_read_inside(rng: np.random.Generator) -> None:
    lines = ["a: f32[i:19] = x[i] * 3.0", "b: f32[i:19] = pad(a[i + -1], 7.0) + pad(a[i + 2], 5.0)"]
    operators = [
        make_operator("O", lines, (4,), ("a", "b")),
        make_operator("S", ["y: f32[i:19] = a[i] + b[18 - i]"], (5,)),
    ]
    inputs = {"x": floats(rng, 19)}
    have, _ = simulate(operators, inputs, {}, "y")
    assert relative_error(have, reference_values(operators, inputs)["y"]) <= 1e-5


def test_scalars_and_empty_tensors(rng: np.random.Generator) -> None:
    operators = [
        make_operator("S", ["s: f32[] = sum[k:9] x[k]"], ()),
        make_operator("Y", ["y: f32[] = s[()] * 2.0"], ()),
    ]
    inputs = {"x": floats(rng, 9)}
    have, _ = simulate(operators, inputs, {}, "y")
    assert have.shape == ()
    assert relative_error(have, reference_values(operators, inputs)["y"]) <= 1e-5
    empty = [make_operator("E", ["y: f32[i:0, j:3] = x[i, j]"], (1, 3))]
    have, _ = simulate(empty, {"x": floats(rng, 0, 3)}, {}, "y")
    assert have.shape == (0, 3)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint64"])
def test_element_types(rng: np.random.Generator, dtype: str) -> None:
    short = {"float16": "f16", "float64": "f64", "int8": "i8", "uint64": "u64"}[dtype]
    operators = [make_operator("D", [f"y: {short}[i:33] = x[32 - i] + x[i]"], (4,))]
    inputs = {"x": rng.integers(0, 50, 33).astype(dtype)}
    have, _ = simulate(operators, inputs, {}, "y")
    assert have.dtype == np.dtype(dtype)
    assert np.array_equal(have, inputs["x"][::-1] + inputs["x"])


def test_tasks_of_one_row_see_their_predecessors_without_waits(rng: np.random.Generator) -> None:
    chain = [make_operator(f"O{i}", [f"t{i + 1}: f32[i:8] = t{i}[i] + 1.0"], (8,)) for i in range(4)]
    inputs = {"t0": floats(rng, 8)}
    p = make_program(chain, types(inputs), {}, ["t4"], 1)
    rows = tuple(tuple(type(t)(t.operator, t.index) for t in row) for row in p.rows)
    bare = RProgram(p.name, p.policy, p.inputs, p.outputs, p.buffers, p.storages, p.operators, p.counters, rows)
    loaded = LoadedProgram(bare, {}, CHIP)
    assert loaded.kernels == 4
    assert relative_error(loaded.run(inputs).outputs["t4"], inputs["t0"] + 4) <= 1e-6


def test_repeated_runs_and_cycles_are_identical(rng: np.random.Generator) -> None:
    inputs = {"x": floats(rng, 1, 3, 17, 7)}
    constants = {"k": floats(rng, 6, 3, 3, 3), "b": floats(rng, 6)}
    operators = [make_operator("A", [CONV, BIAS, RELU], (1, 2, 4, 7)), make_operator("B", [POOL], (1, 4, 5, 3))]
    p = make_program(operators, types(inputs), types(constants), ["z"], 5)
    one, two = (LoadedProgram(p, constants, CHIP) for _ in range(2))
    first, again, other = one.run(inputs), one.run(inputs), two.run(inputs)
    assert np.array_equal(first.outputs["z"], again.outputs["z"])
    assert np.array_equal(first.outputs["z"], other.outputs["z"])
    assert first.seconds == again.seconds == other.seconds > 0
    assert "simulated" in first.notes[0]
    assert one.report() == two.report()
    assert one.report().splitlines()[-1].endswith("simulated")


def test_an_interior_tensor_is_padded_where_groups_read_it() -> None:
    """Check a cast fused before a padded, grouped convolution: its channel index is not affine."""
    text = "conv n=1 c=1 m=2 h=1 w=3 k=3 s=1 d=1 p=2 q=-1 g=2 off=1 @float16 seed=271716 pick=generic:1x4x1x4:"
    assert Search("ipu_sim", {}, 1).problem(NetCase.parse(text)) == ""

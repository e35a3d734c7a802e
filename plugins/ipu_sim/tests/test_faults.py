"""Fault detection: lost transfers, wrong waits, insufficient memory."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from chip_operators import Array, make_operator, make_program, reference_values, relative_error, without_waits
from shadow_replay import find_races

from rammer.errors import BadInput, DeviceFailure
from rammer.ir.operator import ROperator
from rammer.ir.program import Buffer, RProgram
from rammer.ir.types import TensorType
from rammer.schedule.policy_registry import parse_policy
from rammer.verify.verifier import VerifyError, verify
from rammer_testing.nonempty import some
from rammer_testing.programs import random_net

from rammer_ipu_sim.chip import Chip, configure_chip
from rammer_ipu_sim.executor import Drop, LoadedProgram
from rammer_ipu_sim.memory import HomeMemory, peak_tile_bytes, plan_homes, poison_value

CHIP = configure_chip({"tiles": "8", "sram": "65536"})
SHAPE = (12, 10)


def two_steps() -> list[ROperator]:
    lines = ["a: f32[i:12, j:10] = sum[k:10] x[i, k] * w[k, j]"]
    return [
        make_operator("A", lines, (3, 10)),
        make_operator("B", ["y: f32[i:12, j:10] = pad(a[i + -1, j], 0.0) + a[i, j]"], (2, 10)),
    ]


def data(rng: np.random.Generator) -> tuple[dict[str, Array], dict[str, Array]]:
    inputs = {"x": rng.standard_normal(SHAPE).astype(np.float32)}
    return inputs, {"w": rng.standard_normal((10, 10)).astype(np.float32)}


def build(veus: int = 4, reuse: bool = False) -> RProgram:
    kind = TensorType("float32", SHAPE)
    return make_program(two_steps(), {"x": kind}, {"w": TensorType("float32", (10, 10))}, ["y"], veus, reuse)


@pytest.mark.parametrize(("step", "name", "task", "load"), [(0, "A", 2, 0), (0, "A", 0, 1), (1, "B", 5, 1)])
def test_a_lost_transfer_shows(step: int, name: str, task: int, load: int, rng: np.random.Generator) -> None:
    inputs, constants = data(rng)
    want = reference_values(two_steps(), {**inputs, **constants})["y"]
    assert relative_error(LoadedProgram(build(), constants, CHIP).run(inputs).outputs["y"], want) <= 1e-5
    faulty = LoadedProgram(build(), constants, CHIP, drop_transfer=Drop(step, name, task, load))
    have = faulty.run(inputs).outputs["y"]
    assert not relative_error(have, want) <= 1e-5
    lost = np.isnan(have)
    # Only the rows that this one task feeds are lost.
    rows = {"A": range(task * 3, min(task * 3 + 4, 12)), "B": range(task * 2, task * 2 + 2)}[name]
    assert sorted(set(np.nonzero(lost)[0])) == list(rows)


def test_a_transfer_that_does_not_exist_is_an_error(rng: np.random.Generator) -> None:
    with pytest.raises(BadInput, match="is not a transfer"):
        LoadedProgram(build(), data(rng)[1], CHIP, drop_transfer=Drop(0, "B", 0, 0))


def test_missing_waits_give_nan(rng: np.random.Generator) -> None:
    inputs, constants = data(rng)
    program_ = without_waits(build(8), "B")
    assert np.isnan(LoadedProgram(program_, constants, CHIP).run(inputs).outputs["y"]).any()
    assert any("before it is written" in line for line in find_races(program_))


def test_memory_taken_too_early_shows() -> None:
    """Check the fourth value stored over the first in the arena, although the last operator still reads the first."""
    kind = TensorType("float32", (8,))
    chain = [make_operator(f"O{i}", [f"t{i + 1}: f32[i:8] = t{i}[i] + 1.0"], (4,)) for i in range(4)]
    last = make_operator("L", ["y: f32[i:8] = t4[i] + t1[i]"], (4,))
    p = make_program([*chain, last], {"t0": kind}, {}, ["y"], 2, reuse=True)
    have = LoadedProgram(p, {}, CHIP).run({"t0": np.zeros(8, np.float32)}).outputs["y"]
    # t1's place holds t4 by then: 4 + 4, not 4 + 1.
    assert not relative_error(have, np.full(8, 5.0)) <= 1e-5
    roomy = make_program([*chain, last], {"t0": kind}, {}, ["y"], 2)
    assert np.array_equal(LoadedProgram(roomy, {}, CHIP).run({"t0": np.zeros(8, np.float32)}).outputs["y"], np.full(8, 5.0))


def test_the_arena_is_poisoned_after_its_last_reader(rng: np.random.Generator) -> None:
    inputs, constants = data(rng)
    loaded = LoadedProgram(build(), constants, CHIP)
    loaded.run(inputs)
    assert np.isnan(loaded.memory.read("b_a")).all()
    assert not np.isnan(loaded.memory.read("b_w")).any()


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("policy", ["sequential", "wavefront"])
@pytest.mark.parametrize("seed", range(6))
def test_oracle_and_verifier_agree_about_planted_faults(policy: str, seed: int, rng: np.random.Generator) -> None:
    random = Random(f"{policy} {seed}")
    net = random_net(random, 7)
    p = net.program(parse_policy(policy), random.randint(1, 5))
    assert find_races(p) == []
    x = rng.standard_normal(24).astype(np.float32)
    run = LoadedProgram(p, {}, CHIP).run({"x": x})
    assert relative_error(run.outputs["y"], reference_values(net.operators, {"x": x})["y"]) <= 1e-5
    for v, row in some(enumerate(p.rows)):
        for place, task in enumerate(row):
            for wait in task.waits:
                fewer = replace(task, waits=tuple(w for w in task.waits if w != wait))
                rows = (*p.rows[:v], (*row[:place], fewer, *row[place + 1 :]), *p.rows[v + 1 :])
                verdict, found = complaint(replace(p, rows=rows)), find_races(replace(p, rows=rows))
                # The verifier requires order between whole operators that reuse arena bytes.
                assert bool(verdict) == bool(found) or (not found and "arena bytes" in verdict)


def complaint(p: RProgram) -> str:
    try:
        verify(p)
    except VerifyError as problem:
        return str(problem)
    return ""


def test_homes_of_disjoint_buffers_are_disjoint(seed: int) -> None:
    random = Random(seed)
    for _ in range(30):
        buffers = [
            Buffer(
                f"b{i}", random.choice(["float32", "int64", "bool"]), random.randint(0, 400), "arena", 64 * random.randint(0, 40)
            )
            for i in range(12)
        ]
        tiles = random.randint(1, 9)
        homes = plan_homes(buffers, tiles)
        for a in buffers:
            for b in buffers:
                disjoint = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
                if a is not b and a.size and b.size and disjoint:
                    p, q = homes[a.name], homes[b.name]
                    assert p.offset + p.nbytes <= q.offset or q.offset + q.nbytes <= p.offset


def test_memory_returns_what_was_written() -> None:
    buffers = [
        Buffer("a", "float32", 37, "input"),
        Buffer("b", "int8", 5, "input"),
        Buffer("c", "float16", 0, "input"),
    ]
    homes = plan_homes(buffers, 4)
    memory = HomeMemory(replace(CHIP, tiles=4), homes)
    assert np.isnan(memory.read("a")).all()
    values: dict[str, Array] = {
        "a": np.arange(37, dtype=np.float32),
        "b": np.arange(5, dtype=np.int8),
        "c": np.zeros(0, np.float16),
    }
    for name, value in values.items():
        memory.write(name, value)
    assert all(np.array_equal(memory.read(n), v) for n, v in values.items())
    memory.poison("a")
    assert np.isnan(memory.read("a")).all()
    assert np.array_equal(memory.read("b"), values["b"])
    assert peak_tile_bytes(homes) <= 8 * 6 + 8 + 8


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_poison_is_nan(dtype: str) -> None:
    assert np.isnan(poison_value(dtype))


def test_poisoned_integers_are_implausible() -> None:
    assert poison_value("int64") == 0x7FF57FF57FF57FF5


def chip(sram: int) -> Chip:
    return replace(CHIP, sram=sram)


def test_a_task_that_does_not_fit_is_named(rng: np.random.Generator) -> None:
    # A's task: 3x10 of x, 10x10 of w, 3x10 of a, all float32.
    need = 4 * (30 + 100 + 30)
    with pytest.raises(DeviceFailure, match=rf"out of memory: task A\[0\] on tile 0 needs {need} bytes.*limit is 512"):
        LoadedProgram(build(), data(rng)[1], chip(512))


def test_constants_stream_when_the_chip_is_full(rng: np.random.Generator) -> None:
    inputs, constants = data(rng)
    loaded = LoadedProgram(build(), constants, chip(848))
    result = loaded.run(inputs)
    assert relative_error(result.outputs["y"], reference_values(two_steps(), {**inputs, **constants})["y"]) <= 1e-5
    assert any("streamed 400 bytes" in note for note in result.notes)
    roomy = LoadedProgram(build(), constants, CHIP).run(inputs)
    assert not any("streamed" in note for note in some(roomy.notes))
    assert result.seconds > roomy.seconds
    with pytest.raises(DeviceFailure, match="out of memory") as failure:
        LoadedProgram(build(), constants, chip(848), stream=False)
    assert "streaming" in failure.value.hint


def test_tasks_that_do_not_fit_together_take_rounds(rng: np.random.Generator) -> None:
    inputs, constants = data(rng)
    p = build(1)
    tight, roomy = LoadedProgram(p, constants, chip(2048)), LoadedProgram(p, constants, CHIP)
    assert sum(c.rounds for c in tight.cycles) > sum(c.rounds for c in roomy.cycles)
    assert np.array_equal(tight.run(inputs).outputs["y"], roomy.run(inputs).outputs["y"])


def test_more_rows_than_tiles_is_an_error(rng: np.random.Generator) -> None:
    with pytest.raises(DeviceFailure, match="9 rows, the chip 8 tiles"):
        LoadedProgram(build(9), data(rng)[1], CHIP)

"""The search over kernels: its cases, error bounds, detected faults and sampler."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import onnx
import pytest

from rammer.device.manifest import Binding
from rammer.ir.compute import Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.operator import ROperator
from rammer.ir.program import Storage, dense
from rammer.ir.types import TensorType
from rammer.verify.verifier import verify
from rammer_testing.bounds import Bounded, bounded_results
from rammer_testing.cases import NetCase, Sampler, pick_of, picked, smaller
from rammer_testing.coverage import features, ways
from rammer_testing.nets import KINDS, model_of
from rammer_testing.single import GUARD, UntiledOperator, differences, images, judge, moved, placed


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_cases_are_legal_models_and_read_back(kind: str, seed: int) -> None:
    sampler = Sampler(Random(seed), 50_000, ("float32", "float16"), (kind,))
    for _ in range(5):
        case = sampler.next()
        assert NetCase.parse(str(case)) == case
        onnx.checker.check_model(model_of(case.kind, case.sizes, case.tags, case.seed), full_check=True)
        assert all(KINDS[kind].legal(c.sizes) for c in smaller(case))


def test_candidates_are_written_as_one_word() -> None:
    compute = Compute.parse("y: f32[i:20, j:9] = x[i, j] + 1.0")
    tiled = ROperator("y", (compute,), (), ("y",), (8, 9), "rowwise", (("lanes", 4), ("vector", 1)))
    assert pick_of(tiled) == "rowwise:8x9:lanes=4,vector=1"
    assert picked(replace(tiled, tile=(), family="", config=()), pick_of(tiled)) == tiled
    small = ROperator("y", (Compute.parse("y: f32[i:5, j:9] = x[i, j] + 1.0"),), (), ("y",))
    assert picked(small, pick_of(tiled)).tile == (5, 9)


def product(depth: int, dtype: str = "f32") -> tuple[ROperator, Binding]:
    full = {"f32": "float32", "f16": "float16"}[dtype]
    main = Compute.parse(f"y: {dtype}[i:4, j:3] = sum[k:{depth}] x[i, k] * w[k, j]")
    types = {"x": TensorType(full, (4, depth)), "w": TensorType(full, (depth, 3)), "y": TensorType(full, (4, 3))}
    return ROperator("y", (main,), (), ("y",)), Binding(types, {n: dense(n, f"b_{n}", t.shape) for n, t in types.items()})


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_whole_numbers_leave_no_room(dtype: str, rng: np.random.Generator) -> None:
    """Check that a product of integers that is off by one in 1,000 is detected; fractions get a bound for float32 sums."""
    operator, _ = product(1000, dtype)
    kind = {"f32": np.float32, "f16": np.float16}[dtype]
    whole = {n: rng.integers(-2, 3, s).astype(kind) for n, s in (("x", (4, 1000)), ("w", (1000, 3)))}
    whole["x"][0, 77], whole["w"][77, 0] = 1, 1
    want = bounded_results(operator, whole)["y"]
    right = whole["x"].astype(np.float32) @ whole["w"].astype(np.float32)
    assert differences(right.astype(kind), want) == ""
    right[0, 0] -= 1.0
    assert "1 of 12 wrong" in differences(right.astype(kind), want)
    real = {n: rng.standard_normal(v.shape, np.float32).astype(kind) for n, v in whole.items()}
    want = bounded_results(operator, real)["y"]
    assert want.error is not None and want.error.max() < {"f32": 0.2, "f16": 0.3}[dtype]
    have = real["x"].astype(np.float32) @ real["w"].astype(np.float32)
    assert differences(have.astype(kind), want) == ""


def test_nan_and_infinity_are_compared() -> None:
    want = Bounded(np.array([np.nan, 1.0, np.inf, 2.0]), np.full(4, 0.1))
    assert differences(np.array([np.nan, 1.05, np.inf, 2.0], np.float32), want) == ""
    for place, value in ((0, 1.0), (1, np.nan), (2, -np.inf), (2, 1e30), (3, 2.2)):
        have = np.array([np.nan, 1.05, np.inf, 2.0], np.float32)
        have[place] = value
        assert "1 of 4 wrong" in differences(have, want), (place, value)


def test_an_unsure_comparison_is_not_judged_and_a_sure_one_is() -> None:
    texts = ["s: f32[i:2] = sum[k:3] x[i, k] * w[k]", "y: f32[i:2] = where(lt(s[i], 0.0), 1.0, 5.0)"]
    operator = ROperator("y", tuple(Compute.parse(t) for t in texts), (), ("y",))
    x = np.array([[0.1, 0.2, -0.3], [1.0, 1.0, 1.0]], np.float32)
    want = bounded_results(operator, {"x": x, "w": np.array([1.1, 1.1, 1.1], np.float32)})["y"]
    assert want.error is not None and np.isinf(want.error[0]) and want.error[1] == 0


def test_what_has_moved_is_rounded_though_the_format_holds_the_true_value() -> None:
    """Check the rounding error of 1 + 2^-11 in float16, which propagates to a result of 2. The intermediate rounds to 1 or the
    next number, although float16 holds 2."""
    texts = [f"t: f16[i:1] = x[i] + {2.0**-11!r}", f"y: f16[i:1] = t[i] + {1 - 2.0**-11!r}"]
    operator = ROperator("y", tuple(Compute.parse(t) for t in texts), (), ("y",))
    want = bounded_results(operator, {"x": np.ones(1, np.float16)})["y"]
    assert want.value[0] == 2 and want.error is not None
    assert want.error[0] >= 2.0**-11 + 2.0**-10  # half the spacing of numbers at 1, and at 2


@pytest.mark.parametrize("late", ["", "all", "each", "1", "2"])
def test_operands_lie_between_guards_as_they_were_placed(late: str) -> None:
    operator, binding = product(8)
    binding = replace(
        binding,
        storages={**binding.storages, "x": Storage("x", "b", 131, (4, 8), (11, 1)), "y": Storage("y", "c", 7, (4, 3), (1, 5))},
    )
    tiled = replace(operator, tile=(2, 3))
    place = placed(tiled, binding, {}, 4, late)
    verify(replace(place.program, outputs=()))  # its ports include unwritten outputs
    assert place.program.storage["x"].offset % 64 == 131 % 64
    given = images(place, {"x": np.ones((4, 8), np.float32), "w": np.ones((8, 3), np.float32)})
    assert set(given) == ({"together"} if late == "all" else {"x", "w"})
    assert sum(int((~np.isnan(image)).sum()) for image in given.values()) == 32 + 24
    assert all(np.isnan(image[:GUARD]).all() for image in given.values())
    written = [o.name for o in place.program.operators[:-1]]
    assert written == {"": [], "all": ["held_together"], "each": ["held_x", "held_w"], "1": ["held_x"], "2": ["held_w"]}[late]
    result = np.full(place.program.buffer["b_y"].size, np.nan, np.float32)
    want = {"y": Bounded(np.zeros((4, 3)))}
    first = place.program.storage["y"].offset
    for i, j in np.ndindex(4, 3):
        result[first + i + 5 * j] = 0.0
    assert judge(place, {"y": result}, want) == ""
    result[first + 4] = 0.0
    assert "1 elements outside were written, at [4]" in judge(place, {"y": result}, want)


def test_slow_copies_keep_every_value(rng: np.random.Generator) -> None:
    """Check a delayed operand: its copy reads each element many times and preserves NaN and infinities."""
    operator, binding = product(8)
    copy = placed(replace(operator, tile=(2, 3)), binding, {}, 4, "1").program.operators[0].computes[0]
    assert copy.reduce and copy.combiner == "max"
    x = rng.standard_normal(copy.shape).astype(np.float32)
    x[:3] = np.nan, np.inf, -np.inf
    assert np.array_equal(evaluate_compute(copy, {copy.reads[0]: x}), x, equal_nan=True)


def test_views_move_what_is_no_constant() -> None:
    operator, binding = product(8)
    moved_ = moved(operator, replace(binding, constants=frozenset("w")), "16")
    assert (moved_.storages["x"].offset, moved_.storages["x"].strides) == (1, (8, 1))
    assert (moved_.storages["y"].offset, moved_.storages["y"].strides) == (0, (5, 1))
    assert moved_.storages["w"] == binding.storages["w"]
    tiled = replace(operator, tile=(3, 3))
    subject = UntiledOperator(operator, moved_, {})
    assert {"offset", "ragged", "strided", "placed", "partial", "bare", "constant"} <= features(tiled, subject)
    assert "free" in features(tiled, replace(subject, binding=binding))
    assert list(ways(replace(subject, binding=binding))) == ["free all", "free each", "free 1", "free 2", "free direct"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_with_little_work_ends(kind: str, seed: int) -> None:
    """Check a limit below the least even sizes of a recurrent net (20,480 products): other sizes are drawn."""
    sampler = Sampler(Random(seed), 20_000, ("float32",), (kind,))
    assert all(KINDS[kind].work(sampler.next().sizes) <= 20_000 for _ in range(20))

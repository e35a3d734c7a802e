"""Maps that read across their output axes, such as transpositions: squares of vectors, wherever a square fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rammer.codegen.dialects import C99
from rammer.codegen.vector_text import WIDTHS
from rammer.ir.program import Storage
from rammer_testing.host_c import Array, HostCase, case, check_all

#: Shapes and tiles: squares that fill both axes, squares shifted back at an end or in a partial task, and outer axes.
SHAPES = (
    ((1, 16, 16), (1, 16, 16)),
    ((2, 19, 37), (1, 19, 37)),
    ((3, 49, 70), (2, 49, 35)),
    ((1, 24, 10), (1, 8, 10)),
    ((5, 8, 9), (5, 8, 9)),
)


def values_of(rng: np.random.Generator, *shape: int, kind: str = "float32") -> Array:
    return rng.standard_normal(shape).astype(kind)


def turned(item: HostCase) -> bool:
    """Return True if the text transposes squares, after checking its results with and without vectors."""
    function = check_all((item,), C99)[0]
    check_all((item,), replace(C99, name="c99_scalar", vectors=()))
    return "rm_turn" in function.text


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "tile"), SHAPES)
def test_transpositions_are_of_squares(rng: np.random.Generator, shape: tuple[int, int, int], tile: tuple[int, ...]) -> None:
    n, rows, columns = shape
    text = f"y: f32[n:{n}, i:{rows}, j:{columns}] = x[n, j, i] * 2.0 + z[n, i, j]"
    values = {"x": values_of(rng, n, columns, rows), "z": values_of(rng, n, rows, columns)}
    assert turned(case([text], values, tile))


def test_squares_of_halves_and_of_strided_rows(rng: np.random.Generator) -> None:
    text = "y: f16[i:21, j:33] = x[j, i]"
    storages = {"x": Storage("x", "bx", 3, (33, 21), (40, 1))}
    assert turned(case([text], {"x": values_of(rng, 33, 21, kind="float16")}, (21, 33), storages=storages))


def test_two_operands_of_which_both_lie_across(rng: np.random.Generator) -> None:
    text = "y: f32[i:20, j:18] = x[j, i] - z[j, i + 3]"
    assert turned(case([text], {"x": values_of(rng, 18, 20), "z": values_of(rng, 18, 23)}, (20, 18)))


@pytest.mark.parametrize(
    ("text", "shape"),
    [("y: f32[i:3, j:40] = x[j, i]", (40, 3)), ("y: f32[i:20, j:18] = pad(x[j, i - 1], 0.0)", (18, 20))],
    ids=["too narrow", "padded"],
)
def test_what_is_no_square_is_read_lane_by_lane(rng: np.random.Generator, text: str, shape: tuple[int, int]) -> None:
    item = case([text], {"x": values_of(rng, *shape)}, (3, 40) if "i:3" in text else (20, 18))
    assert not turned(item) and min(WIDTHS) > 3

"""Constants assembled from other arrays: represented by their pieces, which stay in the model's file, on disk and in memory."""

from __future__ import annotations

import copy
import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rammer.cache.cached_constants import DEEPEST, JOINED, LARGE, SCALED, STRIDED, ConstantCache, Row
from rammer.ir.constants.digest import digest_array
from rammer.ir.constants.mapped_files import Mapped, is_mapped
from rammer.ir.constants.recipes import (
    ArrayRecipe,
    Constants,
    Contents,
    as_array,
    content_of,
    recipe_of,
    scale_array,
    side_by_side,
)
from rammer_testing.cache_files import entries

WIDE = 192  # a float32 square is larger than the constants stored in a program


def filed(path: Path, rng: np.random.Generator, count: int, dtype: str = "float32") -> tuple[Mapped, list[np.ndarray[Any, Any]]]:
    """Write a file of square matrices; return it and the matrices, some transposed."""
    path.write_bytes(rng.standard_normal((count, WIDE, WIDE), np.float32).astype(dtype).tobytes())
    file = Mapped.of(path)
    arrays = np.frombuffer(file.data, dtype).reshape(count, WIDE, WIDE)
    return file, [a.T if rng.random() < 0.3 else a for a in arrays]


def read(kept: ConstantCache, row: Row, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return as_array(kept.get(row, str(like.dtype), like.shape))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", range(40))
def test_pieces_stay_where_they_are(number: int, rng: np.random.Generator, tmp_path: Path) -> None:
    """Check concatenation and stacking, also of assembled pieces, and of one piece without a file."""
    file, pieces = filed(tmp_path / "m.onnx", rng, int(rng.integers(2, 5)))
    own = rng.random() < 0.5
    if own:
        pieces[0] = rng.standard_normal((WIDE, WIDE), np.float32)
    want = pieces
    for _ in range(int(rng.integers(1, 3))):
        new, axis = bool(rng.integers(2)), int(rng.integers(pieces[0].ndim))
        want = [(np.stack if new else np.concatenate)(want, axis)] * 2
        pieces = [side_by_side(pieces, axis, new)] * 2
    made = pieces[0]
    np.testing.assert_array_equal(made, want[0])
    recipe = recipe_of(made)
    assert recipe.shape == made.shape if recipe is not None else is_mapped(made)  # contiguous pieces of the file are a view
    assert not made.flags.writeable
    kept = ConstantCache(tmp_path / "kept", tmp_path, {"m.onnx": file})
    row = kept.put(made, (file,))
    beside = [f.stat().st_size for f in entries(tmp_path / "kept")]
    assert beside == [WIDE * WIDE * 4] * own
    del made, pieces, recipe
    again = read(kept, row, want[0])
    np.testing.assert_array_equal(again, want[0])
    assert (recipe_of(again) is not None or is_mapped(again)) and digest_array(again) == digest_array(want[0])


def times(values: np.ndarray[Any, Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Draw factors along some axes of ``values``, or one for all."""
    of = rng.random(values.ndim) < 0.5
    of[int(rng.integers(values.ndim))] = False  # otherwise there would be one factor per value
    return rng.standard_normal([n if there else 1 for n, there in zip(values.shape, of, strict=True)])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", range(40))
def test_what_was_scaled_is_known_by_its_factors(number: int, rng: np.random.Generator, tmp_path: Path) -> None:
    """Check one or more scalings, before or after concatenation; each rounding is reproduced to the last bit."""
    dtype = ("float32", "float16")[number % 2]
    file, pieces = filed(tmp_path / "m.onnx", rng, 2, dtype)
    want = list(pieces)
    for _ in range(int(rng.integers(1, 4))):
        if rng.random() < 0.3:
            want, pieces = [np.concatenate(want)] * 2, [side_by_side(pieces, 0, False)] * 2
        factors = times(pieces[0], rng)
        with np.errstate(all="ignore"):
            want = [(w.astype(np.float64) * factors).astype(dtype) for w in want]
        pieces = [scale_array(p, factors) for p in pieces]
    made = pieces[0]
    np.testing.assert_array_equal(made, want[0])
    assert recipe_of(made) is not None and not made.flags.writeable
    kept = ConstantCache(tmp_path / "kept", tmp_path, {"m.onnx": file})
    row = json.loads(json.dumps(kept.put(made, (file,))))
    assert not [*tmp_path.glob("kept/*")]
    del made, pieces
    part = kept.get(row, dtype, want[0].shape)
    assert isinstance(part, ArrayRecipe) and part.dtype == dtype and not part.alive
    assert content_of(part) == digest_array(want[0]) and not part.alive, "nobody need make it to know what it holds"
    np.testing.assert_array_equal(as_array(part), want[0])


def test_many_factors_are_no_recipe(rng: np.random.Generator, tmp_path: Path) -> None:
    _, pieces = filed(tmp_path / "m.onnx", rng, 1)
    made = scale_array(pieces[0], rng.standard_normal((WIDE, WIDE)))
    assert recipe_of(made) is None and not made.flags.writeable
    assert recipe_of(scale_array(np.array(pieces[0]), np.ones((1, 1)))) is None, "values of no file"


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("new", [False, True])
def test_blocks_of_one_matrix_are_a_view_of_it(axis: int, new: bool, rng: np.random.Generator, tmp_path: Path) -> None:
    """Check that concatenating the blocks copies nothing, in memory or on disk. Reordered or partial blocks refer to the file,
    too."""
    file, _ = filed(tmp_path / "m.onnx", rng, 1)
    whole = np.frombuffer(file.data, np.float32).reshape(WIDE, WIDE)
    kept = ConstantCache(tmp_path / "kept", tmp_path, {"m.onnx": file})
    blocks = np.split(whole, 4, axis)
    for chosen in (blocks, blocks[:3], blocks[::-1]):
        made = side_by_side(chosen, axis, new)
        want = (np.stack if new else np.concatenate)(chosen, axis)
        np.testing.assert_array_equal(made, want)
        assert np.shares_memory(made, whole) or chosen is not blocks
        row = kept.put(made, (file,))
        np.testing.assert_array_equal(as_array(read(kept, row, want)), want)
    assert not [*(tmp_path / "kept").glob("*")]
    row = kept.put(whole[:, 8:16], (file,))
    assert row[0] == STRIDED
    for odd in (row[2] + (WIDE * WIDE * 4), row[2] + 4 * (WIDE - 15)):
        with pytest.raises(ValueError, match="exceeds its file"):
            kept.get([*row[:2], odd, *row[3:]], "float32", (WIDE, 8))


def test_what_no_file_has_is_an_array(rng: np.random.Generator, tmp_path: Path) -> None:
    """Check small arrays, too: a program stores them directly."""
    arrays = [rng.standard_normal((WIDE, WIDE), np.float32) for _ in range(2)]
    assert recipe_of(side_by_side(arrays, 0, True)) is None
    file, mapped = filed(tmp_path / "m.onnx", rng, 1)
    assert mapped[0].nbytes > LARGE and file.data
    assert recipe_of(side_by_side([mapped[0][:2], mapped[0][2:4]], 0, False)) is None


def test_values_live_as_long_as_somebody_has_them(rng: np.random.Generator, tmp_path: Path) -> None:
    _, pieces = filed(tmp_path / "m.onnx", rng, 3)
    pieces = pieces[::-1]  # in file order and all transposed, they would form a view
    contents, made = Contents(), side_by_side(pieces, 1, False)
    first = contents.of({"a": made, "b": pieces[0]})
    second = contents.of(Constants({"c": recipe_of(side_by_side(pieces, 1, False)) or made}))
    want, recipe = made.copy(), recipe_of(made)
    assert recipe is not None and second.parts["c"] is recipe and first["a"] is made and first["b"] is not None
    del made
    gc.collect()
    assert not recipe.alive
    again = first["a"]
    assert again is second["c"] and recipe_of(again) is recipe and digest_array(again) == digest_array(want)
    np.testing.assert_array_equal(again, want)
    assert [*first] == ["a", "b"] and len(first) == 2 and "a" in first and "c" not in first


def test_rows_that_nobody_wrote_are_refused(rng: np.random.Generator, tmp_path: Path) -> None:
    """Check each part of a row replaced by another value: ValueError, or the same values."""
    file, pieces = filed(tmp_path / "m.onnx", rng, 3)
    some = scale_array(side_by_side(pieces[:2], 0, False), times(pieces[0], rng)[:1])
    made = side_by_side([some, side_by_side(pieces[1:], 0, False)], 1, True)
    kept = ConstantCache(tmp_path / "kept", tmp_path, {"m.onnx": file})
    row = kept.put(made, (file,))
    assert row[0] == JOINED
    places = list(_places(row, ()))
    odd = [None, "", -1, 3, True, 2.5, [], {}, [[]], 1 << 40, [JOINED], row]
    refused = 0
    for _ in range(300):
        spoiled: Any = copy.deepcopy(row)
        place = places[int(rng.integers(len(places)))]
        inner = spoiled
        for at in place[:-1]:
            inner = inner[at]
        inner[place[-1]] = odd[int(rng.integers(len(odd)))]
        try:
            found = read(kept, spoiled, made)
        except (ValueError, OSError):
            refused += 1
        else:
            assert found.shape == made.shape
    assert refused > 150
    deep: Any = row
    for _ in range(DEEPEST):
        deep = [JOINED, False, 0, "x", [[list(made.shape), deep]]]
    with pytest.raises(ValueError, match="are malformed"):
        read(kept, deep, made)
    for factors in ("", "AAAA", 8, "AAAAAAAA8D8", "AAAAAAAA8D8=" * 2, "\u00e4AAAAAAA8D8="):
        with pytest.raises(ValueError):
            read(kept, [SCALED, [1, 1, 1], factors, "x", row], made)
    assert read(kept, [SCALED, [1, 1, 1], "AAAAAAAA8D8=", "x", row], made).tobytes() == made.tobytes()


def _places(row: Any, before: tuple[int, ...]) -> Any:
    for at, part in enumerate(row):
        yield (*before, at)
        if isinstance(part, list):
            yield from _places(part, (*before, at))

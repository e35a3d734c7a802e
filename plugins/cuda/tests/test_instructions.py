"""Building blocks of cuda's products, checked by enumeration: fragments of instructions, and shared-memory arrangements."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from rammer.codegen.products.packing import Arrangement, Cores, Rows, Turned
from rammer_testing.nonempty import some

from rammer_cuda.contraction import warpgroup
from rammer_cuda.contraction.instruction import MMA_TF32, RESULTS, RING, Fragment

#: Arrangements of constants, with the elements that one index addresses.
PACKED: list[tuple[Arrangement, type, int]] = [
    (Rows(), np.float32, 1),
    (Rows(True), np.float32, 1),
    (Rows(True), np.float16, 1),
    (Turned(4), np.float32, 1),
    (Cores(4), np.float32, 4),
    (Cores(8), np.float16, 8),
]
#: Arrangements for copies alone, with the products and elements that one index addresses.
COPIED: list[tuple[Arrangement, int, int]] = [
    *((a, lot, 1) for a, _, lot in PACKED),
    (Rows(least=4), 1, 1),
    (Turned(8), 8, 1),
    (Cores(8, across=True), 1, 8),
]


def place(arrangement: Arrangement, k: int, e: int, unit: int, block: int) -> int:
    """Return the index as the kernel's text computes it."""
    return int(eval(arrangement.place(str(k), str(e), unit, block).replace("/", "//")))


@pytest.mark.parametrize("arrangement, dtype, lot", PACKED)
@pytest.mark.parametrize("unit, block", [(8, 16), (24, 32), (56, 8), (128, 64)])
def test_constants_lie_where_kernels_read_them(arrangement: Arrangement, dtype: type, lot: int, unit: int, block: int) -> None:
    values = np.arange(1, 2 * block * unit + 1).reshape(2, block, unit).astype(dtype) % 2039
    packed = arrangement.packed(values).reshape(2, -1)
    assert packed.dtype == dtype and packed.shape[1] == arrangement.size(unit, block)
    for k in range(0, block, lot):
        for e in range(unit):
            at = place(arrangement, k, e, unit, block)
            assert np.array_equal(packed[:, at : at + lot], values[:, k : k + lot, e]), (k, e)
    assert np.count_nonzero(packed) == np.count_nonzero(values), "padding is zero"


@pytest.mark.parametrize("arrangement, products, elements", COPIED)
@pytest.mark.parametrize("unit, block", [(8, 16), (24, 32), (128, 64)])
def test_copies_fill_a_block_and_none_meets_another(
    arrangement: Arrangement, products: int, elements: int, unit: int, block: int
) -> None:
    lots = [(k, e) for k in range(0, block, products) for e in range(0, unit, elements)]
    places = {place(arrangement, k, e, unit, block) + i for k, e in lots for i in range(products * elements)}
    assert len(places) == block * unit and max(places) < arrangement.size(unit, block)


@pytest.mark.parametrize("arrangement, products, elements", COPIED)
@pytest.mark.parametrize("unit, block", [(8, 16), (24, 32), (128, 64)])
def test_what_is_ahead_is_ahead_of_every_place(
    arrangement: Arrangement, products: int, elements: int, unit: int, block: int
) -> None:
    lots, units = range(0, block, products), range(0, unit, elements)
    places = np.array([[place(arrangement, k, e, unit, block) for e in units] for k in lots])
    constants = 0
    for k, e in some((k, e) for k in lots for e in units):
        ahead = arrangement.ahead(k, e, unit, block)
        gaps = places[k // products :, e // elements :] - places[: len(lots) - k // products, : len(units) - e // elements]
        assert (gaps == ahead).all() if ahead is not None else isinstance(arrangement, Cores) and arrangement.across
        constants += ahead is not None
    assert constants >= places.size // 8


def test_rows_that_lanes_read_together_lie_in_different_banks() -> None:
    for unit in range(8, 136, 8):
        assert Rows(True).pitch(unit, 16) % 16 == 8, "four products of float32 by eight elements, or eight rows of ldmatrix"
    for block in (16, 32, 64):
        assert {Turned(4).pitch(8, block) % 8, Turned(8).pitch(8, block) // 2 % 8} == {4}, "an odd number of 16 bytes"
    assert re.fullmatch(r"a \* 24 \+ b", Rows(True).place("a", "b", 16, 8))


def test_a_fragment_that_leaves_an_element_out_cannot_be_made() -> None:
    twice = Fragment(("lg", "e % 2 * 8"), ("lt", "e / 2 * 2"), 4)
    for wrong in ({"a": twice}, {"c": replace(RESULTS, elements=2)}, {"k": 16}, {"threads": 64}, {"n": 16}):
        with pytest.raises(ValueError, match="once"):
            replace(MMA_TF32.form, **wrong)  # type: ignore[arg-type]


def test_results_of_a_thread_are_neighbours_two_by_two() -> None:
    """Check the pairs that ``Mma.leave`` stores as float2: elements 2 h and 2 h + 1 at row 8 h."""
    for i in some(RING.values()):
        held = {(thread, e): (row, column) for thread, e, row, column in i.form.c.places(i.form.threads)}
        for (thread, e), (row, column) in held.items():
            if i.form.threads > 1:
                assert row == thread // 4 + e // 2 * 8 and column == thread % 4 * 2 + e % 2


def test_a_chain_reads_results_as_operands() -> None:
    """Check that the result columns of a thread are, in ``RESULT_ORDER``, the products that it needs of the next operand."""
    results = {(thread, e): (row, column) for thread, e, row, column in warpgroup.RESULTS.places(128)}
    for thread, e, row, k in some(warpgroup.WORDS_A.places(128)):
        assert results[thread, e // 2 + e % 2 * 2] == (row, warpgroup.RESULT_ORDER[k])

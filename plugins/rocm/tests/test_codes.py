"""Products with weights that stay codes: their words, the offered kernels, and candidates with every register tile."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from rammer.device.manifest import OpenOptions
from rammer.passes.graph.weight_only_quant import pack_codes
from rammer_testing.cases import NetCase, pick_of
from rammer_testing.single import UntiledOperator, check, subjects, trial_of

pytest.importorskip("pyopencl")
from rammer_rocm.codes.choose import ROWS, VECTORS
from rammer_rocm.codes.kernel import Words
from rammer_rocm.plugin import DEVICE

if not DEVICE.probe():
    pytest.skip("no OpenCL unit", allow_module_level=True)


@pytest.fixture(scope="module")
def backend() -> Any:
    made = DEVICE.open(OpenOptions())
    if made.vdevice.threads > 1:
        pytest.skip("this unit has no such kernels")
    return made


def product(backend: Any, text: str) -> UntiledOperator:
    """Return the operator with the product of a case."""
    return next(s for s in subjects(NetCase.parse(text), backend) if s.operator.main.decoded is not None)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("signed", [False, True])
def test_words_hold_every_code_at_its_place(bits: int, signed: bool, rng: np.random.Generator) -> None:
    for _ in range(20):
        each = 8 // bits
        depth, columns = int(rng.integers(1, 60)) * each, int(rng.integers(1, 5))
        block = int(rng.integers(1, depth + 9))
        low = -(1 << bits - 1) if signed else 0
        codes = rng.integers(low, low + (1 << bits), (columns, depth)).astype(np.int8 if signed else np.uint8)
        blocks = -(-depth // block)
        words = Words(bits, 1 << bits - 1 if signed else 0, min(block, depth), blocks, depth - (blocks - 1) * min(block, depth))
        made = words.packed(pack_codes(codes, bits))
        assert made.shape == (columns, words.line)
        for k in range(depth):
            group, place = divmod(k, words.block)
            word = made[:, group * words.words + place // words.each]
            have = (word >> np.uint32(place % words.each * bits)) & np.uint32((1 << bits) - 1)
            np.testing.assert_array_equal(have.astype(int) - words.bias, codes[:, k], err_msg=f"{words} {k}")


@pytest.mark.parametrize("rows", [1, 8, 128])
@pytest.mark.parametrize("tags", ["", "+half", "+moved +signed +add"])
def test_codes_are_what_is_offered_first(backend: Any, rows: int, tags: str) -> None:
    """Check against the generic kernel, which is 20 times slower, with the epilogue of the product."""
    one = product(backend, f"stored b=1 m={rows} depth=512 width=512 bits=4 block=32 off=1 {tags}")  # half: and a Cast
    assert next(iter(backend.candidates(one.operator, one.binding))).family == "codes"
    assert len(one.operator.computes) == (2 if tags else 1)


#: Codes that fill no word, blocks that fill no word, a shorter last block, columns that fill no vector.
EDGES = (
    "b=1 m=13 depth=130 width=77 bits=4 block=33 off=1 +moved +signed +relu",
    "b=1 m=5 depth=96 width=81 bits=2 block=20 off=1 +moved +half",
    "b=2 m=3 depth=100 width=65 bits=8 block=32 off=3 +signed +moved +turnb +slice +concat",
    "b=1 m=16 depth=256 width=48 bits=4 block=64 off=1 +column +half +add",
)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", EDGES)
def test_register_tiles_are_right(backend: Any, text: str, seed: int) -> None:
    """Check rows and vectors at random; the tuner would try the best few."""
    random = Random(f"{seed} {text}")
    one = product(backend, f"stored {text}")
    tiles = [o for o in backend.all_candidates(one.operator, one.binding) if o.family == "codes"]
    assert tiles
    for mr in (random.randint(1, 4), random.randint(5, max(ROWS))):
        tiled = replace(random.choice(tiles), config=(("mr", mr), ("nv", random.choice(VECTORS))))
        problem = check(backend, tiled, trial_of(one, random.randrange(1 << 20)))
        assert problem == "", f"{seed}: {text} {pick_of(tiled)}: {problem}"

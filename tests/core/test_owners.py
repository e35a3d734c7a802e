"""The writers of a buffer's elements, compared with an enumeration of addresses."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from rammer.ir.program import Storage
from rammer.verify.writers import Owners, Write, WrittenTwice
from rammer_testing.nonempty import some


def addresses(storage: Storage) -> list[int]:
    """Return the address of every element, as often as it occurs."""
    index = product(*(range(n) for n in storage.shape))
    return [storage.offset + sum(i * s for i, s in zip(at, storage.strides, strict=True)) for at in index]


def drawn(random: Random, size: int) -> Storage | None:
    """Draw a row-major or arbitrarily strided tensor in a buffer, None if it does not fit."""
    shape = tuple(random.choice((1, 1, 2, 3, 4, 6)) for _ in range(random.randint(0, 3)))
    strides, step = list[int](), 1
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= extent
    if random.random() < 0.4:
        strides = [random.choice((-6, -2, -1, 0, 1, 1, 2, 3, 4, 6, 12)) for _ in shape]
    storage = Storage("t", "b", random.randint(0, size), shape, tuple(strides))
    low, high = storage.span()
    return storage if low >= 0 and high <= size else None


def pieces(random: Random, size: int) -> list[Storage]:
    """Make a concatenation: adjacent ranges in any order, sometimes with gaps between them."""
    result, at = list[Storage](), 0
    while at < size:
        length = min(random.randint(1, 5), size - at)
        if random.random() < 0.9:
            result.append(Storage("t", "b", at, (length,), (1,)))
        at += length
    random.shuffle(result)
    return result


@pytest.mark.parametrize("seed", range(4))
def test_owners_are_those_of_each_address(seed: int) -> None:
    random, told = Random(seed), {"twice": 0, "whole": 0, "several": 0, "part": 0}
    for _ in range(400):
        size = random.choice((6, 12, 24, 40))
        storages = pieces(random, size) if random.random() < 0.5 else [drawn(random, size) for _ in range(random.randint(0, 4))]
        writes = [Write(f"o{i}", s) for i, s in enumerate(storages) if s is not None]
        written = [a for w in writes for a in addresses(w.storage)]
        try:
            owners = Owners(size, writes)
        except WrittenTwice:  # strides must be provably disjoint: some that are disjoint by chance are refused as well
            told["twice"] += 1
            continue
        assert len(written) == len({*written})
        by = {a: w.operator for w in writes for a in addresses(w.storage)}
        for _ in range(6):
            read = drawn(random, size)
            if read is None:
                continue
            wanted = {a for a in addresses(read)}
            names, whole = owners.of(read)
            assert whole == (wanted <= by.keys())
            exact = {by[a] for a in wanted & by.keys()}
            assert exact == {*names} if whole or len(writes) > 1 else exact <= {*names}
            told["whole" if whole else "part"] += 1
            told["several"] += whole and len(names) > 1
    assert min(told.values()) > 20, told


def test_ranges_that_meet_are_told() -> None:
    for order in some(((0, 1, 2), (2, 1, 0), (1, 2, 0))):
        three = [Storage("t", "b", at, (4,), (1,)) for at in (0, 4, 7)]
        with pytest.raises(WrittenTwice) as twice:
            Owners(12, [Write(f"o{i}", three[i]) for i in order])
        assert {twice.value.first, twice.value.second} == {"o1", "o2"}

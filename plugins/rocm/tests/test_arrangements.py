"""Arrangements of constants: programs share those with one key, so equal arrangements have one key."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from families import CASES as OTHERS
from products import CASES as PRODUCTS

from rammer.codegen.task_parameters import Packing, Unsuited
from rammer.device.manifest import Binding
from rammer.device.shared_constants import WITHIN, LoadedArrangements
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.operator import ROperator
from rammer_testing.nonempty import some

from rammer_rocm.families import OpenClKernels

LAYERS = (
    MemoryLayer("dram", "device", 16 << 30, 47e9, 64),
    MemoryLayer("cache", "veu", 1 << 20, 768e9, 64),
    MemoryLayer("register", "thread", 2048, 1536e9, 64),
)
CPU = VDevice("opencl_cpu", "two cores", 2, LAYERS, flops=96e9, launch=3e-6, vector=16, resident=2)
CASES = {**OTHERS, **PRODUCTS}


def packings(backend: OpenClKernels, operator: ROperator, binding: Binding) -> dict[str, list[Packing]]:
    """Return the packings of each constant by the offered kernels."""
    found = defaultdict[str, list[Packing]](list)
    for family in backend.usable:
        for _, tiled in list(family.candidates(operator, binding, backend.unit))[:12]:
            try:
                arguments = family.kernel(tiled, binding).arguments
            except Unsuited:
                continue
            for argument in arguments:
                if argument.packing is not None:
                    found[argument.tensor].append(argument.packing)
    return found


@pytest.mark.slow
def test_constants_that_are_arranged_alike_have_one_key(rng: np.random.Generator) -> None:
    """Check that a key identifies one arrangement for all tiles."""
    backend, shared, keys = OpenClKernels(CPU), 0, 0
    for name, (operator, binding) in some(CASES.items()):
        for tensor, found in packings(backend, operator, binding).items():
            kind = binding.types[tensor]
            values = rng.integers(1, 100, kind.shape).astype(kind.dtype)
            made = {p.key: (p.make(values).tobytes(), p.size) for p in found}
            for packing in found:
                assert (packing.make(values).tobytes(), packing.size) == made[packing.key], name
            alike = defaultdict[tuple[bytes, int], set[str]](set)
            for key, of in made.items():
                alike[of].add(key)
            assert all(len(k) == 1 for k in alike.values()), (name, tensor)
            shared, keys = shared + len(found), keys + len(made)
    assert keys and shared > 2 * keys


def test_programs_want_constants_as_those_on_the_device_do(rng: np.random.Generator) -> None:
    """Check that an operator's best kernel is replaced only by one that is hardly slower."""
    backend, moved, stayed = OpenClKernels(CPU), 0, 0
    for operator, binding in some(CASES.values()):
        for family in (f for f in backend.usable if not f.is_fallback):
            choices = list(backend.choices(operator, binding, family))[:24]
            wanted = [backend.arrangements(c.operator, binding) for c in choices]
            if len({*wanted}) < 2:
                continue
            for number in some(rng.integers(1, len(choices), 5)):
                arrangements = LoadedArrangements(backend)  # type: ignore[arg-type]
                assert arrangements.shared(choices[0].operator, binding) is choices[0].operator
                arrangements.held |= wanted[number]
                found = arrangements.shared(choices[0].operator, binding)
                first = next(c for c, w in zip(choices, wanted, strict=True) if w <= wanted[number])
                near = first.seconds <= choices[0].seconds * (1 + WITHIN)
                assert found == (first.operator if near else choices[0].operator)
                moved, stayed = moved + (near and first is not choices[0]), stayed + (not near)
    assert moved + stayed

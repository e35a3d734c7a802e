"""Sums of many floats: every kernel family of a device is nearly as accurate as pairwise summation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from random import Random

import numpy as np
import pytest

from rammer.codegen.partial_sums import LONGEST_SUM, block_sizes
from rammer.device.loader import Registry
from rammer.device.manifest import Array, Backend
from rammer.errors import DeviceFailure
from rammer.ir.operator import ROperator
from rammer.ir.types import is_float
from rammer.runtime.host_memory import storage_view
from rammer_testing.bounds import bounded_results
from rammer_testing.cases import NetCase, pick_of
from rammer_testing.search import Search
from rammer_testing.single import UntiledOperator, images, placed, subjects

#: Terms of a sum; the small extents around it make one case for each order of summation.
DEPTH = 40_000
#: Number of OTHERS in a run, besides ALWAYS.
SAMPLE = 3
ALWAYS = (
    f"conv n=1 c={DEPTH} m=16 h=7 w=7 k=1 s=1 d=1 p=0 q=-1 g=1 off=1",
    f"conv n=1 c={DEPTH // 9} m=9 h=4 w=9 k=3 s=1 d=1 p=1 q=-1 g=1 off=1",
    f"stored b=1 m=5 depth={DEPTH} width=20 bits=8 block=32 off=1 +column +signed",
)
OTHERS = (
    f"matmul b=1 m=5 depth={DEPTH} width=20 off=1 +free",
    f"matmul b=1 m=1 depth={DEPTH} width=17 off=1",
    f"matmul b=1 m=3 depth={DEPTH} width=9 off=1 +turnb +free",
    f"matmul b=2 m=9 depth={DEPTH} width=3 off=1 +turn +free",
    f"conv n=1 c={DEPTH} m=9 h=3 w=11 k=1 s=1 d=1 p=0 q=-1 g=1 off=1",
    f"conv n=1 c={DEPTH // 9} m=5 h=7 w=7 k=3 s=1 d=1 p=1 q=-1 g=1 off=1",
    f"conv n=1 c={DEPTH // 9} m=3 h=5 w=9 k=3 s=2 d=1 p=1 q=-1 g=1 off=1",
    "conv n=1 c=1 m=2 h=250 w=250 k=245 s=1 d=1 p=0 q=-1 g=1 off=1",
    f"transposed n=1 c={DEPTH} m=2 h=2 w=3 k=1 s=1 p=0 off=1",
    "depthwise n=1 c=3 h=250 w=250 k=247 s=1 d=1 p=0 q=-1 off=1",
    "pool n=1 c=3 h=250 w=248 k=246 s=1 p=0 q=-1 off=1 +average",
    f"stored b=1 m=2 depth={DEPTH} width=20 bits=4 block=32 off=1",
    f"stored b=1 m=9 depth={DEPTH} width=20 bits=4 block=32 off=1 +moved",
    f"stored b=1 m=2 depth={DEPTH} width=20 bits=8 block=32 off=1 +column +signed",
    f"attention n=1 heads=1 m=3 keys={DEPTH} depth=4 width=4 off=1",
    f"rows b=1 m=3 depth={DEPTH} t=1 off=1 +norm",
    f"rows b=1 m=3 depth={DEPTH} t=1 off=1",
    f"rows b=1 m={DEPTH} depth=5 t=1 off=1 +across",
    f"rows b=1 m={DEPTH} depth=20 t=2 off=1 +mean",
    f"rows b=1 m=3 depth={DEPTH} t=1 off=1 +mean",
    f"stitched b=1 m=3 depth={DEPTH} t=2 off=1 +var +sum +square +less",
    f"stitched b=1 m={DEPTH} depth=20 t=1 off=1 +var +sum",
    f"stitched b={DEPTH} m=1 depth=17 t=0 off=1 +sum +square",
)
#: Largest root mean square of errors, in units of the last place of float32. Pairwise summation of this many numbers is off by
#: one or two, a chain of additions by 50 and more.
MOST = 12.0
UNIT = 2.0**-24


def values_of(subject: UntiledOperator, rng: np.random.Generator) -> dict[str, Array]:
    """Return positive floats for all operands, so that sums only grow; other constants are the model's."""
    found = dict[str, Array]()
    for name in subject.operator.inputs:
        kind, known = subject.binding.types[name], subject.constants.get(name)
        if is_float(kind.dtype) and (known is None or known.size > 1):
            found[name] = rng.uniform(0.25, 1.0, kind.shape).astype(kind.dtype)
        elif known is not None:
            found[name] = np.asarray(known).reshape(kind.shape)
        else:
            found[name] = rng.integers(0, 2, kind.shape).astype(kind.dtype)
    return found


def results_of(backend: Backend, tiled: ROperator, subject: UntiledOperator, values: dict[str, Array]) -> dict[str, Array]:
    """Return the outputs of a tiled operator on the device."""
    binding = subject.binding
    fixed = {n: v for n, v in values.items() if n in binding.constants and binding.storages[n].row_major}
    place = placed(tiled, binding, fixed, backend.vdevice.veus)
    loaded = backend.load(place.program, fixed)
    try:
        have = loaded.run(images(place, values)).outputs
        return {n: np.array(storage_view(np.array(have[n]), place.program.storage[n])) for n in tiled.outputs}
    finally:
        loaded.close()


def errors_of(search: Search, case: NetCase, rng: np.random.Generator) -> Iterator[tuple[ROperator, float]]:
    """Yield candidates of each family for the operators of a case that sum, with the errors of their results. Errors are in units
    of the last place."""
    for subject in subjects(case, search.backend):
        if not any(c.combiner == "sum" for c in subject.operator.computes):
            continue
        values = values_of(subject, rng)
        wanted = {n: b.value for n, b in bounded_results(subject.operator, values).items()}
        for tiled in search.candidates(subject, Random(case.seed)):
            if search.possible(tiled, subject):
                have = results_of(search.backend, tiled, subject, values)
                yield tiled, max(error(have[n], want) for n, want in wanted.items())


def error(have: Array, want: Array) -> float:
    """Return the root mean square of the errors. It is in units of the last place of the largest result's mean size."""
    size = np.sqrt(np.mean(np.square(want.astype(np.float64))))
    return float(np.sqrt(np.mean(np.square(have.astype(np.float64) - want))) / size / UNIT)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_long_sums_are_nearly_as_accurate_as_pairwise_ones(device: str, rng: np.random.Generator, seed: int) -> None:
    """Check every order of summation, some cases in each run."""
    status = Registry().status(device)
    if status.state != "ok":
        pytest.skip(status.reason or status.state)
    search, wrong, seen = Search(device, {}, 2), list[str](), set[str]()
    for text in (*ALWAYS, *Random(seed).sample(OTHERS, SAMPLE)):
        case = NetCase.parse(f"{text} @float32 seed={seed % 1000}")
        try:
            for tiled, off in errors_of(search, case, rng):
                seen.add(tiled.family)
                if not off <= MOST:
                    wrong.append(f"{off:.0f} units: {pick_of(tiled)} of {text}")
        except DeviceFailure as problem:
            assert "no tile" in problem.what, problem
    assert not wrong, "\n".join(wrong)
    families = search.backend.families or {}
    assert seen >= ({"panel", "codes"} & set(families) or {""}), "families were not run"


def test_no_chain_of_additions_is_long() -> None:
    for iterations, terms in product((2, 7, 256, 257, 4096, 65_536, 10**6, 10**8), (1, 3, 9, 256, 1000)):
        sizes = block_sizes(iterations, terms)
        chains = [-(-whole // part) for whole, part in pairwise((iterations, *sizes))]
        assert all(n <= LONGEST_SUM for n in chains)
        assert ((iterations, *sizes)[-1] - 1) * terms < LONGEST_SUM or iterations * terms <= LONGEST_SUM

"""The kernel that is offered beside the fastest: it keeps least of the GPU busy of what takes not much longer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("cuda.bindings")

from families import CASES as OTHERS
from products import CASES as PRODUCTS

from rammer.codegen.search import SLOWER
from rammer.device.manifest import Binding, OpenOptions
from rammer.device.thrift import Thrifty
from rammer.ir.operator import RKernel, ROperator
from rammer.profile.store import KernelStore
from rammer.profile.tune import Tuner

from rammer_cuda.backend import CudaBackend, open_backend

#: A third of them, beginning with each: a search of the same over and over would find nothing new.
PARTS = 3


def target(name: str) -> CudaBackend:
    found = open_backend(OpenOptions(target=name))
    assert isinstance(found, CudaBackend)
    return found


def priced(backend: CudaBackend, operator: ROperator, binding: Binding) -> Iterator[RKernel]:
    """Every choice of the families that stand beside others, whatever its prediction."""
    for family in backend.usable:
        if family.first is None and not family.last:
            for choice in family.candidates(replace(operator, tile=(), family="", config=()), binding, backend.gpu):
                yield backend.kernel(choice.operator, binding)


@pytest.mark.parametrize("name", ["sm_90a", "sm_80", "sm_75"])
@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_that_is_nearly_as_fast_keeps_less_of_a_gpu_busy(name: str, part: int) -> None:
    backend, leaner, launch = target(name), 0, target(name).gpu.launch
    assert isinstance(backend, Thrifty)
    for operator, binding in [*PRODUCTS.values(), *OTHERS.values()][part::PARTS]:
        best = next(iter(backend.candidates(operator, binding)), None)
        lean = backend.lean(best, binding) if best is not None else None
        if best is None or lean is None:
            continue
        everything = list(priced(backend, operator, binding))
        fastest = min(k.operator_time(backend.veus) for k in everything) + launch
        found = backend.kernel(lean, binding)
        assert backend.fits(lean, binding)
        assert found.operator_time(backend.veus) + launch <= SLOWER * fastest * (1 + 1e-9), lean.head()
        for k in everything:
            if k.operator_time(backend.veus) + launch <= SLOWER * fastest and backend.fits(k.operator, binding):
                # A launch counts as time of the vEUs, too, while they wait for it.
                waits = [x.shares / -(-x.shares // backend.veus) * launch for x in (k, found)]
                assert found.busy_time() + waits[1] <= (k.busy_time() + waits[0]) * (1 + 1e-9), (lean.head(), k.operator.head())
        leaner += found.busy_time() < 0.8 * backend.kernel(best, binding).busy_time()
    assert leaner > 3, "else nothing would be gained"


def test_a_schedule_may_choose_it() -> None:
    """Where nothing is measured, the fastest and the leanest are what a policy sees, and no more."""
    backend, both = target("sm_90a"), 0
    for operator, binding in [*PRODUCTS.values(), *OTHERS.values()][::5]:
        best = next(iter(backend.candidates(operator, binding)), None)
        if best is None:
            continue
        kernels, lean = Tuner(backend, KernelStore(None)).kernels(operator, binding), backend.lean(best, binding)
        assert len(kernels) <= 2
        assert kernels[0].operator.tile == best.tile
        assert lean is None or kernels[-1].busy_time() <= backend.kernel(lean, binding).busy_time()
        both += len(kernels) == 2
    assert both > 3

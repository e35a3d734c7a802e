"""The resource-efficient kernel: an alternative to the fastest that occupies the least of the GPU in slightly more time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("cuda.bindings")

from families import CASES as OTHERS
from products import CASES as PRODUCTS
from tables.scheduling import POLICIES
from zoo import SEED, ZOO, find

from rammer.codegen.family_backend import SLOWER
from rammer.codegen.kernel_family import KernelFamily
from rammer.compile_options import CompileOptions
from rammer.compiled.segments import Compiled, ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.device.manifest import Binding, OpenOptions
from rammer.frontend.read.reader import read_model
from rammer.ir.operator import RKernel, ROperator
from rammer.tuning.kernel_store import KernelStore
from rammer.tuning.tuner import Tuner
from rammer_testing.nonempty import some

from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.family import Held
from rammer_cuda.gpu import Gpu
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.source import Writer

#: Parts into which all operators are divided.
PARTS = 3


def target(name: str) -> CudaBackend:
    found = open_backend(OpenOptions(target=name))
    assert isinstance(found, CudaBackend)
    return found


def priced(backend: CudaBackend, operator: ROperator, binding: Binding) -> Iterator[RKernel]:
    """Yield every choice of the alternative families for any prediction."""
    for family in backend.usable:
        if family.exclusive is None and not family.is_fallback:
            for choice in family.candidates(replace(operator, tile=(), family="", config=()), binding, backend.gpu):
                yield backend.kernel(choice.operator, binding)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["sm_90a", "sm_80", "sm_75"])
@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_that_is_nearly_as_fast_keeps_less_of_a_gpu_busy(name: str, part: int) -> None:
    backend, leaner, launch = target(name), 0, target(name).gpu.launch
    for operator, binding in some([*PRODUCTS.values(), *OTHERS.values()][part::PARTS]):
        best = next(iter(backend.candidates(operator, binding)), None)
        lean = backend.smallest_kernel(best, binding) if best is not None else None
        if best is None or lean is None:
            continue
        everything = list(priced(backend, operator, binding))
        fastest = min(k.operator_time(backend.veus) for k in everything) + launch
        found = backend.kernel(lean, binding)
        assert backend.fits(lean, binding)
        assert found.operator_time(backend.veus) + launch <= SLOWER * fastest * (1 + 1e-9), lean.head()
        for k in some(everything):
            if k.operator_time(backend.veus) + launch <= SLOWER * fastest and backend.fits(k.operator, binding):
                # A launch also counts as time of the vEUs, which wait for it.
                waits = [x.shares / -(-x.shares // backend.veus) * launch for x in (k, found)]
                assert found.busy_time() + waits[1] <= (k.busy_time() + waits[0]) * (1 + 1e-9), (lean.head(), k.operator.head())
        leaner += found.busy_time() < 0.8 * backend.kernel(best, binding).busy_time()
    assert leaner > 3, "else nothing would be gained"


def test_a_schedule_may_choose_it() -> None:
    """Check that a policy sees only the fastest and the leanest kernel if nothing is measured."""
    backend, both = target("sm_90a"), 0
    for operator, binding in some([*PRODUCTS.values(), *OTHERS.values()][::5]):
        best = next(iter(backend.candidates(operator, binding)), None)
        if best is None:
            continue
        kernels, lean = Tuner(backend, KernelStore(None)).kernels(operator, binding), backend.smallest_kernel(best, binding)
        assert len(kernels) <= 2
        assert kernels[0].operator.tile == best.tile
        assert lean is None or kernels[-1].busy_time() <= backend.kernel(lean, binding).busy_time()
        both += len(kernels) == 2
    assert both > 3


def test_the_fastest_and_the_leanest_are_found_in_one_search() -> None:
    backend, asked = target("sm_90a"), list[str]()
    operator, binding = next(c for c in PRODUCTS.values() if backend.smallest_kernel(next(iter(backend.candidates(*c))), c[1]))

    def noting(family: KernelFamily[Gpu, TaskKernel, Held]) -> KernelFamily[Gpu, TaskKernel, Held]:
        return replace(family, candidates=lambda *of: asked.append(family.name) or family.candidates(*of))

    fresh = target("sm_90a")
    fresh.usable = tuple(map(noting, fresh.usable))
    fresh.kinds = {f.name: f for f in fresh.usable}
    best = next(iter(fresh.candidates(operator, binding)))
    assert fresh.smallest_kernel(best, binding) is not None
    assert len(asked) == len(set(asked)) > 1


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("key", ["dien", "seq2seq", *(k for k in ZOO if k not in ("dien", "seq2seq"))])
def test_every_operator_of_a_program_has_a_kernel(key: str, policy: str) -> None:
    """Check that programs contain no predicted choices without a kernel."""
    compiled = compiled_small(key, policy)
    for segment in some([s for s in compiled.segments if isinstance(s, ProgramSegment)]):
        binding, writer = Binding.of(segment.program, segment.constants), Writer()
        for operator in some(segment.program.operators):
            assert writer.written(operator, binding).text


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("key", ["dien", "seq2seq"])
def test_what_cannot_be_written_is_nobodys_choice(key: str) -> None:
    """Check unwritable choices: a recurrent layer's product has no warpgroup-compatible operand, which only the tiled operator
    shows."""
    compiled, backend, refused = compiled_small(key, "sequential"), target("sm_90a"), 0
    for segment in some([s for s in compiled.segments if isinstance(s, ProgramSegment)]):
        binding = Binding.of(segment.program, segment.constants)
        for operator in some(segment.program.operators):
            refused += refusals(backend, operator, binding)
            lean = backend.smallest_kernel(operator, binding)
            assert lean is None or backend.fits(lean, binding)
    assert refused


def refusals(backend: CudaBackend, operator: ROperator, binding: Binding) -> int:
    """Return the number of product choices without a kernel."""
    products = [f for f in backend.usable if f.product]
    if operator.family not in {f.name for f in products}:
        return 0
    untiled = replace(operator, tile=(), family="", config=())
    return sum(not backend.fits(c.operator, binding) for f in products for c in f.candidates(untiled, binding, backend.gpu))


def compiled_small(key: str, policy: str) -> Compiled:
    """Return the small form of a zoo model, compiled for an H200."""
    model = find(f"{key}:small").build(SEED)
    compiler = Compiler(target("sm_90a"), CompileOptions(policy), KernelStore(None), Registry(), device="cuda")
    return compiler.compile_model(read_model(model), {})

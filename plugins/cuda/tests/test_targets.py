"""Target compatibility: offered kernels compile for the GPU's architecture and fit its SMs. NVRTC needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from random import Random

import pytest

from rammer.codegen.kernel_family import KernelFamily
from rammer.device.manifest import OpenOptions
from rammer.errors import DeviceFailure
from rammer.ir.operator import ROperator
from rammer_testing.cases import NetCase
from rammer_testing.nonempty import some
from rammer_testing.single import UntiledOperator, subjects

pytest.importorskip("cuda.bindings")

from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.compile import compile_cubin
from rammer_cuda.families import FAMILIES, family_of
from rammer_cuda.gpu import TARGETS, Gpu
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.source import task_kernel, translation_unit

#: Operators that cover the families: each is supported by some of them.
SAMPLE = (
    "conv n=1 c=35 h=14 w=14 m=48 k=3 s=1 d=1 g=1 p=1 q=1 off=1 +bias +relu @float32 seed=1",
    "matmul b=1 m=130 depth=256 width=264 off=8 +relu @float16 seed=1",
    "matmul b=1 m=130 depth=256 width=264 off=0 +bias @tf32 seed=1",
    "matmul b=1 m=130 depth=256 width=264 off=0 @bfloat16 seed=1",
    "attention n=1 heads=2 m=64 keys=64 depth=64 width=64 off=0 +mask @float32 seed=1",
    "gemv t=2 depth=256 width=100 off=3 +sigmoid @float32 seed=1",
    "depthwise n=1 c=13 h=12 w=13 k=3 s=1 d=1 p=1 q=1 off=4 +relu @float32 seed=1",
    "rows b=3 m=17 depth=96 off=0 @float32 seed=1",
    "chain rows=1000 first=64 wide=64 last=64 layers=3 off=0 +fuse @float32 seed=1",
    "imatmul b=1 m=128 depth=256 width=96 off=0 +codes @float32 seed=1",
    "stored b=1 m=2 depth=256 width=96 bits=4 block=32 off=0 +moved @float32 seed=1",
)
#: Threads of a block on any GPU (CUDA C++ programming guide, "Compute Capabilities").
MOST_THREADS = 1024


@cache
def backend_of(target: str) -> CudaBackend:
    backend = open_backend(OpenOptions(target=target))
    assert isinstance(backend, CudaBackend)
    return backend


@cache
def operators(target: str) -> list[UntiledOperator]:
    """Return the sample's operators in the precisions of the target."""
    backend = backend_of(target)
    cases = [NetCase.parse(text) for text in SAMPLE]
    return [s for case in cases if case.precision in backend.vdevice.precisions for s in subjects(case, backend)]


def choices(target: str, family: KernelFamily[Gpu, TaskKernel, object], gpu: Gpu) -> Iterator[tuple[ROperator, UntiledOperator]]:
    """Yield candidates of a family for ``gpu``, of operators of a target that supports the family."""
    for subject in operators(target):
        yield from ((c.operator, subject) for c in family.candidates(subject.operator, subject.binding, gpu))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", TARGETS)
def test_a_family_is_offered_where_its_kernels_compile(target: str) -> None:
    """Check that the compiler also refuses families for which a GPU lacks instructions."""
    backend, compiled = backend_of(target), 0
    for family, unit in zip(FAMILIES, units(), strict=True):
        if family in backend.usable:
            compile_cubin(unit, target)
            compiled += 1
            continue
        with pytest.raises(DeviceFailure, match="NVRTC"):
            compile_cubin(unit, target)
    assert compiled == len(backend.usable) >= 5


@cache
def units() -> list[str]:
    """Return the translation units of each family, equal for every target."""
    found = [(f, *next(choices("sm_90a", f, TARGETS["sm_90a"]))) for f in FAMILIES]
    return [translation_unit([task_kernel(writable(f, s, tiled), s.binding)]) for f, tiled, s in found]


def writable(family: KernelFamily[Gpu, TaskKernel, object], subject: UntiledOperator, tiled: ROperator) -> ROperator:
    """Return the first candidate that can be written, without a cluster."""
    backend = backend_of("sm_90a")
    found = family.candidates(subject.operator, subject.binding, backend.gpu)
    whole = (c.operator for c in found if dict(c.operator.config).get("split_k", 1) == 1)
    return next((o for o in whole if backend.fits(o, subject.binding)), tiled)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("target", TARGETS)
def test_every_offer_fits_its_gpu(target: str, seed: int) -> None:
    """Check shared memory and threads of the offers for sampled operators, and registers of one per family by ptxas."""
    backend, random = backend_of(target), Random(seed)
    seen = dict[str, list[tuple[ROperator, UntiledOperator]]]()
    for subject in some(operators(target)):
        offered = list(backend.candidates(subject.operator, subject.binding))
        assert offered, subject.operator.head()
        for tiled in offered:
            kernel = backend.writer.written(tiled, subject.binding)
            assert kernel.shared <= backend.gpu.shared and kernel.threads <= MOST_THREADS, tiled.head()
            assert kernel.blocks == 1 or backend.gpu.clusters, tiled.head()
            seen.setdefault(family_of(tiled).name, []).append((tiled, subject))
    assert len(seen) > 3 and {*seen} <= {f.name for f in backend.usable}
    for options in seen.values():
        tiled, subject = random.choice(options)
        used = backend.resources(tiled, subject.binding)
        assert used.threads * used.registers <= backend.gpu.registers, tiled.head()
        assert used.local_bytes <= backend.gpu.shared, tiled.head()

"""The launches of a program and their kernels, written by the kernel families."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rammer.device.manifest import Binding
from rammer.ir.launches import Launch, make_launches
from rammer.ir.program import RProgram

from rammer_cuda.compile import compile_all
from rammer_cuda.gpu import Gpu
from rammer_cuda.horizontal_fusion import fuse_launches
from rammer_cuda.kernel_cache import cached_kernels
from rammer_cuda.kernels.lengths import ended
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.launch_cache import cached_launches
from rammer_cuda.source import Writer, translation_unit


def plan_launches(
    program: RProgram, binding: Binding, gpu: Gpu, writer: Writer, kept: bool
) -> tuple[Sequence[Launch], dict[str, TaskKernel]]:
    """Return a program's launches in order, and their kernels by operator, ready to compile. With ``kept``, both are read from
    and stored in the cache."""
    kernels = cached_kernels(program, binding, writer) if kept else writer.all(program.operators, binding)
    ends = {o.name: ended(o, kernels[o.name], binding) for o in program.operators}
    plan, made = fuse_launches(cached_launches(program) if kept else make_launches(program), ends, program, binding, gpu)
    return plan, {x.operator: made[x.operator] for x in plan}


def compile_kernels(kernels: Iterable[TaskKernel], gpu: Gpu) -> dict[str, bytes]:
    """Return machine code by entry point; every distinct kernel is compiled separately, in parallel."""
    distinct = {k.entry: k for k in kernels}
    return {e: c.code for e, c in compile_all({e: translation_unit([k]) for e, k in distinct.items()}, gpu.architecture).items()}

"""Kernels of ``cases.txt``: texts, launch shapes, arguments, times predicted for an H200, and machine code.

A line of ``cases.txt`` is a case of ``rammer_testing.families`` with its operator and its candidate. Neither ranking nor a cost
model can therefore change the kernel. A word before the case requests more than the kernel alone:

    traced        the same kernel as it records times
    persistent    the one kernel of the whole program, values sent as words if possible, with its task table
    counters      the same without words
    recorded      the persistent kernel as it records times
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from golden_cubin import code_digest
from golden_text import digest, digits, text_digest

from rammer.codegen.task_parameters import Argument
from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions
from rammer.errors import DeviceFailure
from rammer.frontend.read.reader import read_model
from rammer.plan.arena import with_private_buffers
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.cases import NetCase, picked
from rammer_testing.nets import model_of
from rammer_testing.single import UntiledOperator, subjects

from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.compile import compile_cubin
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.persistent.bodies import operator_bodies
from rammer_cuda.persistent.dataflow import as_planned, plan_words
from rammer_cuda.persistent.kernel_text import kernel_text
from rammer_cuda.persistent.task_table import make_table
from rammer_cuda.source import task_kernel, translation_unit

LIST = Path(__file__).with_name("cases.txt")
#: Architectures that every text is compiled for, and the architecture of the cases' operators and candidates.
ARCHITECTURES, HOME = ("sm_80", "sm_90", "sm_90a"), "sm_90a"
#: Whole-program options by word: (send values as words, record times).
WHOLE = {"persistent": (True, False), "counters": (False, False), "recorded": (True, True)}
#: Common text before all kernels of a translation unit.
FRAME = "frame"
#: Cases whose code is not compared: NVRTC 13.0.88 randomly produces one of two codes from one text, for the first case in 3 of 24
#: compilations. For recurrent cells, two hosts produced different codes. Registers are compared.
VARYING = frozenset(
    {
        "conv n=2 c=15 m=200 h=16 w=28 k=1 s=3 d=1 p=0 q=1 g=1 off=5 +relu +bn +bias +free @float32 layout=nhwc seed=82434 op=0 "
        "pick=gemm:1x56x2x10:tm=8,tn=4,bk=16,split_k=1,slice_k=2,stages=4",
        "depthwise n=8 c=13 h=1 w=13 k=3 s=3 d=1 p=1 q=-1 off=4 +relu +slice +fuse @tf32 layout=nhwc seed=217287 op=1 "
        "pick=gemm:8x1x1x5:tm=8,tn=4,bk=16,split_k=1,slice_k=2,stages=4",
        "conv n=1 c=32 m=15 h=33 w=8 k=2 s=1 d=2 p=1 q=1 g=1 off=2 +add +concat @float32 seed=471008 op=0 "
        "pick=gemm:1x15x9x8:tm=4,tn=4,bk=16,split_k=4,slice_k=2,stages=4",
        "persistent recurrent t=2 b=2 depth=256 width=64 +gru @float32 seed=1",
        "persistent recurrent t=3 b=1 depth=128 width=128 @float32 seed=1",
        "persistent recurrent t=3 b=4 depth=256 width=128 @float32 seed=1",
        "recorded recurrent t=3 b=1 depth=128 width=128 @float32 seed=1",
    }
)
#: Operators of cases by text.
_KNOWN: dict[str, list[UntiledOperator]] = {}


@dataclass(frozen=True)
class Written:
    """A case with its text, the translation unit, and the other frozen facts."""

    case: str
    text: str
    unit: str
    entry: str
    facts: Mapping[str, str]

    def record(self) -> dict[str, str]:
        """Return the facts that are frozen without a compiler."""
        return {"case": self.case, "text": text_digest(self.text), **self.facts}

    def code(self) -> dict[str, str]:
        """Return the facts of the machine code by architecture."""
        return {"case": self.case, **{arch: self._code(arch) for arch in ARCHITECTURES}}

    def _code(self, arch: str) -> str:
        try:
            cubin = compile_cubin(self.unit, arch)
        except DeviceFailure:
            return "no such instructions"
        used = cubin.resources[self.entry]
        code = "one of several" if self.case in VARYING else code_digest(cubin.code)
        return f"{code}, {used.registers} registers, {used.spills} spilled"


def listed() -> list[str]:
    """Return the cases in the order of the list."""
    lines = (line.strip() for line in LIST.read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


@cache
def _home() -> CudaBackend:
    backend = open_backend(OpenOptions(target=HOME))
    assert isinstance(backend, CudaBackend)
    return backend


def _subjects(case: NetCase) -> list[UntiledOperator]:
    """Return the operators of a case, cached because several lines may share a case."""
    if str(case) not in _KNOWN:
        _KNOWN[str(case)] = subjects(case, _home())
    return _KNOWN[str(case)]


def written(line: str) -> Written:
    """Return the kernel of one line of the list, or the common frame. Raise ValueError if the line names no kernel."""
    if line == FRAME:
        unit = translation_unit([])
        return Written(FRAME, unit, unit + 'extern "C" __global__ void k() { rm_after(); }', "k", {})
    how, _, text = line.partition(" ")
    if how in WHOLE:
        return _walk(line, NetCase.parse(text), *WHOLE[how])
    case = NetCase.parse(text if how == "traced" else line)
    subject = _subjects(replace(case, operator=-1, pick=""))[case.operator]
    tiled = picked(subject.operator, case.pick)
    kernel = task_kernel(tiled, subject.binding)
    if how == "traced":
        kernel = replace(kernel, traced=True)
        return Written(line, kernel.text, translation_unit([kernel]), kernel.entry, _facts(kernel, subject.binding))
    seconds = _home().kernel(tiled, subject.binding).operator_time(_home().vdevice.veus)
    facts = {**_facts(kernel, subject.binding), "microseconds": digits(seconds)}
    return Written(line, kernel.text, translation_unit([kernel]), kernel.entry, facts)


def kernels() -> Iterator[Written]:
    """Yield the kernels of all lines."""
    yield from map(written, (FRAME, *listed()))


def _facts(kernel: TaskKernel, binding: Binding) -> dict[str, str]:
    launch = f"{kernel.threads} threads, {kernel.shared} bytes, {kernel.dynamic} dynamic, {kernel.blocks} blocks"
    return {"launch": launch, "arguments": ", ".join(_argument(a, binding) for a in kernel.arguments)}


def _argument(argument: Argument, binding: Binding) -> str:
    """Return the tensor with ``*`` if it is written, or the hash of fixed values packed as the kernel reads them."""
    if argument.packing is None:
        return argument.tensor + "*" * argument.written
    kind = binding.types[argument.tensor]
    values = ((np.arange(np.prod(kind.shape, dtype=int)) * 37 % 509 - 254) / 64).reshape(kind.shape).astype(kind.dtype)
    packed = np.ascontiguousarray(argument.packing.make(values))
    return f"{argument.tensor} packed {packed.dtype} {packed.size} {digest(packed.tobytes())}"


def _walk(line: str, case: NetCase, words: bool, recorded: bool) -> Written:
    """Return the persistent kernel of a case's program, and its table with placeholder addresses."""
    compiler = Compiler(_home(), CompileOptions(precision=case.precision), KernelStore(None))
    (segment,) = compiler.compile_model(read_model(model_of(case.kind, case.sizes, case.tags, case.seed)), {}).segments
    assert isinstance(segment, ProgramSegment)
    binding = Binding.of(segment.program, segment.constants)
    program = with_private_buffers(segment.program)  # as the core plans programs of rows that hold constants
    flow = plan_words(program, binding) if words else as_planned(program, binding)
    parts = operator_bodies(flow, binding)
    places = {n: range(1000 * i, 1000 * i + len(a) + len(parts.words[n])) for i, (n, a) in enumerate(parts.arguments.items())}
    table = make_table(flow.program, parts.number, places, parts.held())
    text = kernel_text(parts.bodies, table.form, parts.threads, recorded)
    packed = (_argument(a, binding) for arguments in parts.arguments.values() for a in arguments if a.packing is not None)
    facts = {
        "launch": f"{parts.threads} threads, {parts.shared} bytes",
        "arguments": ", ".join(dict.fromkeys(packed)),
        "table": digest(b"".join(a.tobytes() for a in (table.entries, table.runs, table.first))),
    }
    return Written(line, text, text, "rm_persistent", facts)

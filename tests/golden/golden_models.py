"""Zoo models compiled for described devices: the chosen kernel of each operator, and the programs.

Nothing is measured, opened or read from a cache, and no value depends on this machine. cuda and ipu_sim are targets. toy gets its
memory as an option, and rocm's backend a VDevice instead of an OpenCL unit."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from golden_text import digest, digits

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import Compiled, ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Backend, Binding, Hardware, OpenOptions
from rammer.errors import RammerError
from rammer.frontend.bind.binder import bind
from rammer.frontend.read.reader import read_model
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.graph import Graph
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.cases import pick_of

from rammer_cuda.backend import open_backend
from rammer_ipu_sim.device import SimulatorBackend
from rammer_rocm.backend import OpenClBackend
from rammer_rocm.families import OpenClKernels
from rammer_rocm.launch_forms import WAVES
from rammer_rocm.offline import CARDS
from rammer_toy import ToyBackend

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from zoo import FROZEN, ZOO

#: An example CPU: eight cores of 3 GHz with 16 lanes and 1 MiB of L2 each.
CPU = VDevice(
    "opencl_cpu",
    "eight cores",
    8,
    (
        MemoryLayer("dram", "device", 16 << 30, 47e9, 64),
        MemoryLayer("cache", "veu", 1 << 20, 768e9, 64),
        MemoryLayer("register", "thread", 2048, 1536e9, 64),
    ),
    flops=96e9,
    launch=3e-6,
    vector=16,
    resident=8,
    precisions=("float32", "float16"),
)


class Described(OpenClBackend):
    """The rocm backend for a VDevice: its search and its kernels, without OpenCL."""

    def __init__(self, vdevice: VDevice) -> None:
        OpenClKernels.__init__(self, vdevice)
        self.forms = (WAVES,)
        self.hardware = Hardware(0, vdevice.description, "described", 0, {"platform_version": "", "driver": ""})


#: Devices by name, with the precisions in which their kernels and programs are frozen.
DEVICES: Mapping[str, tuple[Callable[[], Backend], tuple[str, ...]]] = {
    "cuda sm_90a": (lambda: open_backend(OpenOptions(target="sm_90a")), ("float32", "tf32", "float16")),
    "cuda sm_80": (lambda: open_backend(OpenOptions(target="sm_80")), ("float32",)),
    "rocm cpu": (lambda: Described(CPU), ("float32", "float16")),
    "rocm gfx90a": (lambda: Described(CARDS["gfx90a"].vdevice("gfx90a")), ("float32",)),
    "ipu_sim": (lambda: SimulatorBackend(OpenOptions()), ("float32",)),
    "toy": (lambda: ToyBackend(OpenOptions(options={"memory": str(16 << 30)})), ("float32",)),
}
#: Frozen models: the zoo models of the tables that were measured on an H200.
MODELS = FROZEN
#: Models that change with the batch size.
BATCHED = ("lstm_tc_bs4",)
#: Devices whose chosen kernels are frozen: those with device-specific kernel families.
RANKED = tuple(name for name in DEVICES if name.split()[0] in ("cuda", "rocm"))


@dataclass(frozen=True, order=True)
class Job:
    """A model to compile for one device and precision."""

    device: str
    precision: str
    model: str


@dataclass(frozen=True)
class Outcome:
    """The frozen facts of one compilation: a record of its programs, and the operators of each chosen kernel. ``text`` is the
    text of the programs, and ``ranked`` lists all candidates of each operator. Both are for readers."""

    program: dict[str, Any]
    kernels: dict[str, str]
    text: str = ""
    ranked: tuple[str, ...] = ()


def jobs(models: Collection[str] = MODELS) -> list[Job]:
    """Return all compilations of the models, grouped by model. Other batch sizes are compiled only in the devices' first
    precision."""
    return [
        Job(device, p, model)
        for model in models
        for device, (_, precisions) in DEVICES.items()
        for p in (precisions[:1] if model in BATCHED else precisions)
    ]


@lru_cache(1)
def _graph(model: str) -> Graph:
    return bind(read_model(ZOO[model].build()), {})


def outcome(job: Job) -> Outcome:
    """Compile a job and record the candidates of the search."""
    backend: Any = DEVICES[job.device][0]()
    asked: dict[str, tuple[ROperator, Binding, Sequence[ROperator]]] = {}
    search = backend.candidates

    def candidates(operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        found = list(search(operator, binding))
        asked.setdefault(binding.key(operator), (operator, binding, found))
        return found

    backend.candidates = candidates
    compiler = Compiler(backend, CompileOptions(precision=job.precision), KernelStore(None))
    try:
        compiled = compiler.compile(_graph(job.model))
        programs = compiled.programs
    except RammerError as problem:
        return Outcome({**vars(job), "refused": str(problem).splitlines()[0]}, {})
    chosen, lines = defaultdict[str, list[str]](list), list[str]()
    used = _keys(compiled)  # the search also queries alternatives that are priced and rejected
    for operator, _, found in [a for k, a in asked.items() if k in used] if job.device in RANKED else ():
        picks = [pick_of(o) for o in found]
        chosen[picks[0]].append(operator.name)
        lines += [operator.name, *(f"  {pick}" for pick in picks)]
    kernels = {pick: " ".join(sorted(names)) for pick, names in sorted(chosen.items())}
    return Outcome({**vars(job), **program_record(programs)}, kernels, "".join(map(str, programs)), tuple(lines))


def _keys(compiled: Compiled) -> set[str]:
    """Return the keys of all operators as they were before tiles were chosen."""
    segments = [s for s in compiled.segments if isinstance(s, ProgramSegment)]
    found = ((Binding.of(s.program, s.constants), o) for s in segments for o in s.program.operators)
    return {binding.key(replace(o, tile=(), family="", config=())) for binding, o in found}


#: Parts of a program's text by the first word of their lines.
PARTS = {
    "memory": ("input", "output", "buffer", "storage"),
    "operators": ("operator", "compute", "connect", "writes"),
    "schedule": ("form", "counter", "row"),
}


def program_record(programs: Sequence[RProgram]) -> dict[str, Any]:
    """Return digests of the parts of a model's programs, and figures that describe changes."""
    words = {word: part for part, words in PARTS.items() for word in words}
    texts: dict[str, list[str]] = {part: [] for part in PARTS}
    for program in programs:
        for line in str(program).splitlines()[1:]:  # the first line is the prediction with more digits
            texts[words[line.split(maxsplit=1)[0]]].append(line)
    operators = [o for p in programs for o in p.operators]
    families = Counter(o.family or "generic" for o in operators)
    return {
        "programs": len(programs),
        "families": dict(sorted(families.items())),
        "tasks": sum(p.task_count for p in programs),
        "vEUs": max((p.veus for p in programs), default=0),
        "arena": sum(p.arena_bytes for p in programs),
        "microseconds": " ".join(digits(p.predicted) for p in programs),
        **{part: digest("\n".join(lines)) for part, lines in texts.items()},
    }

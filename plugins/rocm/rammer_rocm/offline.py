"""Compilation for AMD targets without the card: clang compiles the same OpenCL C and reports each kernel's resources.

Debian's ``clang-19``, ``lld-19`` and ``rocm-device-libs`` suffice. The device libraries have one file for each target, whose only
content is the target's number. It is generated for targets that are newer than the libraries (5.2.3 lacks gfx942 and gfx1100)."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from rammer.child_processes import find_program, run_program
from rammer.codegen.writer import generator_hash
from rammer.device.manifest import Array, Backend, Binding, Hardware, Loaded, MachineCode, OpenOptions, Profiler
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.operator import Resources, RKernel
from rammer.ir.program import RProgram

from rammer_rocm.build import ROUNDED
from rammer_rocm.code_object import target_code
from rammer_rocm.dialect import GPU_DIALECT
from rammer_rocm.families import OpenClKernels
from rammer_rocm.launch_forms import WAVES
from rammer_rocm.source import LaunchPart, launch_text
from rammer_rocm.units import GPU_LAUNCH, GPU_THREADS, PRECISIONS, amd_code_target, device_name, lower_precisions

#: clang releases that are tried, newest first; older releases lack the option that reports resources.
CLANGS = ("clang-20", "clang-19", "clang-18", "clang-17", "clang-16", "clang")
#: Paths of the device libraries' bitcode in distributions.
BITCODE = (
    "/usr/lib/x86_64-linux-gnu/amdgcn/bitcode",
    "/usr/lib/amdgcn/bitcode",
    "/opt/rocm/amdgcn/bitcode",
    "/opt/rocm/lib/llvm/lib/clang/*/lib/amdgcn/bitcode",
)
#: The file of a target in the device libraries, as LLVM IR.
_VERSION = """target triple = "amdgcn-amd-amdhsa"
@__oclc_ISA_version = linkonce_odr protected local_unnamed_addr addrspace(4) constant i32 {number}, align 4
"""
#: The version of code objects: drivers since ROCm 5.5 load it. Newer compilers write newer ones by default.
CODE_OBJECT = "-mcode-object-version=5"
PACKAGES = "on Debian or Ubuntu: apt install clang-19 lld-19 rocm-device-libs"


@dataclass(frozen=True, slots=True)
class Card:
    """The representative card of a target: compute units, Hz, bytes of memory, bytes/s, bytes of LDS per unit."""

    description: str
    units: int
    clock: float
    memory: int
    bandwidth: float
    source: str
    lds: int = 64 << 10

    def vdevice(self, target: str) -> VDevice:
        """Return a device with one vEU per compute unit; 64 fp32 lanes each (GCN, CDNA and RDNA instruction set manuals)."""
        layers = (
            MemoryLayer("vram", "device", self.memory, self.bandwidth, 64, self.source),
            # 32 LDS banks of 4 bytes per cycle and unit (the same manuals).
            MemoryLayer("lds", "veu", self.lds, 128.0 * self.clock * self.units, 4, "32 banks of 4 bytes"),
            MemoryLayer("register", "thread", 255 * 4, 768.0 * self.clock * self.units, 4, "256 VGPRs a work-item"),
        )
        return VDevice(
            name=device_name(target),
            description=f"{target}: {self.description}",
            veus=self.units,
            layers=layers,
            flops=2.0 * 64 * self.clock,
            launch=GPU_LAUNCH,
            threads=GPU_THREADS,
            vector=1,
            resident=self.units,
            source=self.source,
            precisions=PRECISIONS + lower_precisions(device_name(target)),
        )


GIB = 1 << 30
#: Card by target name. Figures are AMD's published specifications.
CARDS: dict[str, Card] = {
    "gfx900": Card("Radeon Vega 64", 64, 1.546e9, 8 * GIB, 484e9, "AMD Radeon RX Vega 64 specifications"),
    "gfx906": Card("Instinct MI50", 60, 1.725e9, 16 * GIB, 1024e9, "AMD Instinct MI50 datasheet"),
    "gfx908": Card("Instinct MI100", 120, 1.502e9, 32 * GIB, 1228.8e9, "AMD Instinct MI100 datasheet"),
    "gfx90a": Card("Instinct MI250X, one of two dies", 110, 1.7e9, 64 * GIB, 1638.4e9, "AMD Instinct MI250X datasheet"),
    "gfx942": Card("Instinct MI300X", 304, 2.1e9, 192 * GIB, 5300e9, "AMD Instinct MI300X datasheet"),
    "gfx1030": Card("Radeon RX 6900 XT", 80, 2.25e9, 16 * GIB, 512e9, "AMD Radeon RX 6900 XT specifications"),
    "gfx1100": Card("Radeon RX 7900 XTX", 96, 2.5e9, 24 * GIB, 960e9, "AMD Radeon RX 7900 XTX specifications"),
}


def open_target(options: OpenOptions) -> Backend:
    """Open a backend that only compiles. Raises BadInput for an unknown target, DeviceUnavailable without the tools."""
    if options.target not in CARDS:
        raise BadInput(f"unknown target {options.target!r} of device rocm", hint=f"known: {', '.join(CARDS)}")
    if options.require:
        raise DeviceUnavailable(
            f"--target {options.target} compiles without hardware, so there is no {options.require} to require",
            hint="leave out one of the two options",
        )
    if options.options:
        raise BadInput(f"target {options.target} has no option {min(options.options)!r}")
    return OfflineBackend(options.target, Toolchain.find(options.target))


@dataclass(frozen=True)
class Toolchain:
    """The clang toolchain with the device libraries of one target; resources of compiled sources are cached."""

    clang: str
    bitcode: Path
    target: str
    known: dict[str, Resources] = field(default_factory=dict)

    @staticmethod
    def find(target: str) -> Toolchain:
        """Find the installed tools. Raises DeviceUnavailable with the missing tool and how to install it."""
        clang = next((path for name in CLANGS if (path := find_program(name))), None)
        if clang is None:
            raise DeviceUnavailable(f"compiling for {target} needs clang 16 or newer", hint=PACKAGES)
        suffix = Path(clang).name.removeprefix("clang")
        if find_program(f"ld.lld{suffix}") is None and find_program("ld.lld") is None:
            raise DeviceUnavailable(f"compiling for {target} needs the linker lld{suffix}", hint=PACKAGES)
        folders = (path for pattern in BITCODE for path in sorted(Path("/").glob(pattern[1:])))
        bitcode = next((path for path in folders if (path / "ockl.bc").is_file()), None)
        if bitcode is None:
            raise DeviceUnavailable(f"compiling for {target} needs AMD's device libraries", hint=PACKAGES)
        return Toolchain(clang, bitcode, target)

    @cached_property
    def version(self) -> str:
        """The first line of ``clang --version``."""
        done = run_program([self.clang, "--version"])
        done.check_returncode()
        return done.stdout.splitlines()[0]

    def compile(self, text: str) -> Resources:
        """Return the resources of the single kernel in ``text``. Raises DeviceFailure with the compiler's first errors."""
        if text not in self.known:
            self.known[text] = resources_in(self._run_clang(text, "-Rpass-analysis=kernel-resource-usage")[1])
        return self.known[text]

    def code_object(self, text: str) -> bytes:
        """Return the code object of ``text``, which a card's driver loads. Raises DeviceFailure with the compiler's first
        errors."""
        return self._run_clang(text, CODE_OBJECT)[0]

    def assembly(self, text: str) -> str:
        """Return the assembly of ``text``. Raises DeviceFailure with the compiler's first errors."""
        return self._run_clang(text, "-S")[0].decode()

    def _run_clang(self, text: str, option: str) -> tuple[bytes, str]:
        """Compile OpenCL C. Return the output file, and the compiler's messages."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            source, made = folder / "kernel.cl", folder / "kernel.out"
            source.write_text(text)
            language = ["-x", "cl", "-cl-std=CL2.0", *ROUNDED, "-O3", "-target", "amdgcn-amd-amdhsa", f"-mcpu={self.target}"]
            libraries = f"--rocm-device-lib-path={self._find_libraries(folder)}"
            done = run_program([self.clang, *language, libraries, option, str(source), "-o", str(made)])
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if "error" in line][:8]
                raise DeviceFailure(f"a kernel does not compile for {self.target}", where="\n      ".join(errors))
            return made.read_bytes(), done.stderr

    def _find_libraries(self, folder: Path) -> Path:
        """Return the folder of the device libraries; in ``folder``, with the target's file, if they lack it."""
        name = f"oclc_isa_version_{self.target.removeprefix('gfx')}"
        if (self.bitcode / f"{name}.bc").is_file():
            return self.bitcode
        for file in self.bitcode.glob("*.bc"):
            (folder / file.name).symlink_to(file)
        source = folder / f"{name}.ll"
        source.write_text(_VERSION.format(number=isa_number(self.target)))
        run_program(
            [self.clang, "-x", "ir", "-c", "-emit-llvm", str(source), "-o", str(source.with_suffix(".bc"))]
        ).check_returncode()
        return folder


def isa_number(target: str) -> int:
    """Return the device libraries' number of a target: 9010 for gfx90a, 11000 for gfx1100."""
    digits = target.removeprefix("gfx")
    return 1000 * int(digits[:-2]) + 100 * int(digits[-2], 16) + int(digits[-1], 16)


def resources_in(remarks: str) -> Resources:
    """Parse the resources in clang's remarks: VGPRs (and AGPRs), SGPRs, LDS bytes, spilled registers. Scratch memory beyond the
    spills (private arrays) also counts as spills, at 4 bytes per register: the traffic is the same."""

    def figure(name: str) -> int:
        match = re.search(rf"remark:\s+{re.escape(name)}: (\d+)", remarks)
        return int(match.group(1)) if match else 0

    if "Function Name" not in remarks:
        raise DeviceFailure("the compiler reports no resources", hint="clang 16 or newer is needed")
    spills = figure("VGPRs Spill") + figure("SGPRs Spill")
    return Resources(
        threads=GPU_THREADS,
        registers=figure("VGPRs") + figure("AGPRs"),
        local_bytes=figure("LDS Size [bytes/block]"),
        spills=max(spills, figure("ScratchSize [bytes/lane]") // 4),
        scalar_registers=max(figure("SGPRs"), figure("TotalSGPRs")),
    )


class OfflineProfiler(Profiler):
    """A profiler of resources only: without a card, time cannot be measured."""

    def __init__(self, tools: Toolchain, kernels: OpenClKernels) -> None:
        self.tools, self.kernels = tools, kernels

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        """Raise DeviceUnavailable, because time cannot be measured."""
        raise self._make_refusal("tune (use --tune off)")

    def program_time(self, program: RProgram, constants: Mapping[str, Array], iterations: int = 10) -> float:
        """Raise DeviceUnavailable, because time cannot be measured."""
        raise self._make_refusal("measure")

    def resources(self, kernel: RKernel, binding: Binding) -> Resources:
        """Return the compiler's resource report for a launch of only this operator's tasks."""
        function = self.kernels.writer.written(kernel.operator, binding)
        return replace(self.tools.compile(launch_text([(LaunchPart(function),)], GPU_DIALECT)), threads=function.threads)

    def _make_refusal(self, what: str) -> DeviceUnavailable:
        return DeviceUnavailable(f"{self.tools.target} is compiled without the card: nothing to {what}")


class OfflineBackend(OpenClKernels):
    """A backend that compiles for an AMD target, and writes machine code for it, but cannot load programs."""

    def __init__(self, target: str, tools: Toolchain) -> None:
        card = CARDS[target]
        self.tools = tools
        super().__init__(card.vdevice(target))
        detail = {"compiler": tools.version, "device_libraries": str(tools.bitcode), "source": card.source}
        self.hardware: Hardware = Hardware(0, f"{target} (compile only)", "offline", card.memory, detail)
        self.profiler: OfflineProfiler = OfflineProfiler(tools, self)

    @property
    def fingerprint(self) -> str:
        """A hash key of target, compiler and kernel generators."""
        return f"rocm {self.tools.target} {self.tools.version} {generator_hash('rammer_rocm')}"

    @cached_property
    def code_target(self) -> str:
        """The target of any card of this architecture that runs programs as launches."""
        return amd_code_target(self.tools.target, f"{WAVES.name} {GPU_THREADS}")

    def export_code(self, program: RProgram, constants: Mapping[str, Array]) -> MachineCode:
        """Return the launches of a program and its code object."""
        return target_code(self, self.tools.code_object, self.code_target, program, constants)

    def load(self, program: RProgram, constants: Mapping[str, Array]) -> Loaded:
        """Raise DeviceUnavailable, because programs cannot be loaded."""
        raise DeviceUnavailable(
            f"{self.tools.target} is compiled without the card: the program cannot run here",
            hint="rammer run without --target uses the OpenCL unit of this machine",
        )

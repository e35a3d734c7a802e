"""Machine code for AMD targets without a card: code objects, their metadata, and the recorded launches, which a CPU executes."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from click.testing import CliRunner
from onnx.reference import ReferenceEvaluator

import rammer
from rammer.cli.main import cli
from rammer.compiled.artifact import save_artifact
from rammer.compiled.segments import Compiled, ProgramSegment
from rammer.device.manifest import MachineCode
from rammer.errors import BadInput, DeviceUnavailable
from rammer_testing.c_runtime import COMPILERS, build_example, run_example, start
from rammer_testing.nonempty import some
from rammer_testing.small_models import MODELS

from rammer_rocm.build import build_program
from rammer_rocm.code_object import target_code
from rammer_rocm.constants import DeviceConstants
from rammer_rocm.icd import SUPPORT_PACKAGE, installed_file
from rammer_rocm.launch_executor import LaunchProgram
from rammer_rocm.offline import CARDS, OfflineBackend, Toolchain
from rammer_rocm.opencl_runtime import import_opencl, kind_of
from rammer_rocm.opened_unit import OpenClUnit
from rammer_rocm.planned_program import BINARY, PlannedLaunches
from rammer_rocm.shipped_kernels import shipped_kernels
from rammer_rocm.units import amd_code_target

#: The number of each architecture in an ELF header (LLVM's AMDGPUUsage, "AMDGPU ELF Header Machine Architectures").
NUMBERS: Final = {"gfx90a": 0x3F, "gfx942": 0x4C, "gfx1100": 0x41}
#: Both settings of XNACK and of SRAMECC (``EF_AMDGPU_FEATURE_*_ANY_V4``), on the architectures that have them.
ANY: Final = {"gfx90a": 0x500, "gfx942": 0x500, "gfx1100": 0}


@pytest.fixture(autouse=True, scope="module")
def tools() -> None:
    try:
        Toolchain.find("gfx942")
    except DeviceUnavailable as problem:
        pytest.skip(str(problem))


def compiled_for(model: bytes, target: str, **options: Any) -> tuple[rammer.Executable, Compiled]:
    exe = rammer.compile(model, "rocm", target=target, **options)
    return exe, exe.with_code(exe.compile_whole({}))


def code_of(compiled: Compiled) -> tuple[ProgramSegment, MachineCode]:
    (segment,) = compiled.segments
    assert isinstance(segment, ProgramSegment)
    return segment, segment.code[0]


def read_pack(data: bytes, at: int) -> tuple[Any, int]:
    """Return a value of MessagePack, and the place after it: the kinds that code objects contain."""
    head = data[at]
    at += 1
    if head < 0x80:
        return head, at
    if head in (0xC2, 0xC3):
        return head == 0xC3, at
    sizes = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD9: 1, 0xDA: 2, 0xDC: 2, 0xDE: 2}
    if head in sizes:
        number, at = int.from_bytes(data[at : at + sizes[head]], "big"), at + sizes[head]
        if head < 0xD0:
            return number, at
        kind = "text" if head < 0xDC else "list" if head == 0xDC else "map"
    else:
        number, kind = (head & 31, "text") if head >= 0xA0 else (head & 15, "list" if head >= 0x90 else "map")
    if kind == "text":
        return data[at : at + number].decode(), at + number
    values = list[Any]()
    for _ in range(number * (2 if kind == "map" else 1)):
        value, at = read_pack(data, at)
        values.append(value)
    return (values if kind == "list" else dict(zip(values[::2], values[1::2], strict=True))), at


def metadata(binary: bytes) -> dict[str, dict[str, Any]]:
    """Return the kernels in the metadata of a code object, by name."""
    value, _ = read_pack(binary, binary.index(b"\xaeamdhsa.kernels") - 1)
    return {kernel[".name"]: kernel for kernel in value["amdhsa.kernels"]}


@pytest.mark.parametrize("target", NUMBERS)
@pytest.mark.parametrize(("name", "precision"), [("branches", "float32"), ("images", "float16")])
def test_kernels_take_the_arguments_that_are_recorded(target: str, name: str, precision: str) -> None:
    """Check a code object against the recorded launches: architecture, symbols, work-items and parameters."""
    exe, compiled = compiled_for(MODELS[name].build(np.random.default_rng(1)).SerializeToString(), target, precision=precision)
    exe.close()
    _, code = code_of(compiled)
    binary, calls = code.arrays[BINARY].tobytes(), code.record["calls"]
    assert code.target == f"{target} waves 256"
    kind, machine, flags = *struct.unpack_from("<HH", binary, 16), *struct.unpack_from("<I", binary, 48)
    assert binary[:4] == b"\x7fELF" and binary[8] == 3, "code object version 5"
    assert (kind, machine) == (3, 224), "a shared object for AMDGPU"
    assert flags == NUMBERS[target] | ANY[target]
    kernels, shapes = metadata(binary), {"buffer": ("global_buffer", 8), "int64": ("by_value", 8), "int32": ("by_value", 4)}
    assert kernels.keys() == {entry for _, entry, _ in calls["kernels"]}
    for number, groups, threads, arguments in some(calls["launches"]):
        kernel = kernels[calls["kernels"][number][1]]
        explicit = [a for a in kernel[".args"] if not a[".value_kind"].startswith("hidden_")]
        assert [(a[".value_kind"], a[".size"]) for a in explicit] == [shapes[kind] for kind, *_ in arguments]
        assert kernel[".reqd_workgroup_size"] == [threads, 1, 1] and groups > 0
        assert kernel[".group_segment_fixed_size"] <= CARDS[target].lds and kernel[".symbol"].encode() in binary


class Reopened(PlannedLaunches):
    """A program planned from the record of a file."""

    def __init__(self, like: LaunchProgram) -> None:
        self.program, self.functions, self.memory, self.constants = like.program, like.functions, like.memory, like.constants


@pytest.fixture(scope="module")
def cpu() -> OpenClUnit:
    backend = rammer.compile(MODELS["branches"].build(np.random.default_rng(1)).SerializeToString(), "rocm").backend
    unit = getattr(backend, "inner", backend)
    if kind_of(unit.device) != "cpu":
        pytest.skip("needs OpenCL's CPU")
    return unit  # type: ignore[no-any-return]


def opencl_libraries() -> dict[str, str]:
    """Return the environment in which a program that is not Python finds the OpenCL runtime of the test environment."""
    support = installed_file(SUPPORT_PACKAGE, "libimf.so")
    return {"LD_LIBRARY_PATH": str(support.parent)} if support is not None else {}


@pytest.mark.parametrize("name", ["branches", "images", "normalisation"])
def test_recorded_launches_compute_the_model(name: str, cpu: OpenClUnit, tmp_path: Path, rng: np.random.Generator) -> None:
    """Build the text of a target's kernels for the CPU, and run the recorded launches there, in Python and in C."""
    model = MODELS[name].build(rng)
    inputs = MODELS[name].inputs(rng, {})
    exe, compiled = compiled_for(model.SerializeToString(), "gfx942")
    segment, shipped = code_of(compiled)

    def compile_text(text: str) -> bytes:
        built = build_program(cpu.context, text, cpu.builder.options)
        return bytes(built.get_info(import_opencl().program_info.BINARIES)[0])

    backend = OfflineBackend("gfx942", Toolchain.find("gfx942"))
    code = target_code(backend, compile_text, cpu.code_target, segment.program, segment.constants)
    assert code.record == shipped.record and code.arrays.keys() == shipped.arrays.keys()

    kernels = shipped_kernels(code, segment.program, replace(cpu.vdevice, veus=2, threads=256), cpu.context, cpu.builder.options)
    loaded = LaunchProgram(kernels, DeviceConstants(cpu.queue, False), segment.program, segment.constants)
    feeds = {p.external: inputs[p.external] for p in segment.program.inputs}
    have = loaded.run(feeds).outputs
    for port, want in some(list(zip(model.graph.output, ReferenceEvaluator(model).run(None, inputs), strict=True))):
        np.testing.assert_allclose(have[port.name], want, rtol=1e-4, atol=1e-5)
    again = Reopened(loaded)
    again.plan_launches(kernels.vdevice.veus)
    assert [again.entry_of(again.parts_of(joined)) for joined in again.plan] == [
        shipped.record["calls"]["kernels"][number][1] for number, *_ in shipped.record["calls"]["launches"]
    ]
    if not all(COMPILERS.values()):
        return
    artifact = exe.artifact(replace(compiled, segments=(replace(segment, code=(code,)),)))
    save_artifact(tmp_path / "m.rammer", replace(artifact, code_target=cpu.code_target))
    outputs = {p.external: have[p.external] for p in segment.program.outputs}
    found = run_example(build_example("c", tmp_path), tmp_path / "m.rammer", feeds, outputs, opencl_libraries())
    assert all(found[n].tobytes() == outputs[n].tobytes() for n in some(outputs))
    loaded.close()
    exe.close()


def test_names_of_cards_are_targets() -> None:
    assert amd_code_target("gfx942:sramecc+:xnack-", "waves 256") == amd_code_target("gfx942", "waves 256") == "gfx942 waves 256"
    assert amd_code_target("gfx1100", "single 256") == "gfx1100 single 256"
    assert not amd_code_target("NVIDIA H200", "waves 256") and not amd_code_target("gfx", "waves 256")


def test_another_device_refuses_the_file(tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(MODELS["branches"].build(rng).SerializeToString())
    words = ["compile", str(path), "--device", "rocm", "--target", "gfx942", "-o", str(tmp_path / "m.rammer")]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0 and "machine code for gfx942" in done.output, done.output
    with pytest.raises(BadInput, match=r"does not fit .*: operator ra is of family ring, which the device does not have"):
        rammer.compile(tmp_path / "m.rammer", trust=True)
    assert "was compiled for target gfx942" in caplog.text
    if all(COMPILERS.values()):
        refused = start(build_example("c", tmp_path), tmp_path / "m.rammer", tmp_path, env=opencl_libraries())
        assert "no OpenCL device here runs the machine code for gfx942 waves 256" in refused.stderr

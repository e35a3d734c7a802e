"""AMD targets without the card: resources by clang, and clear messages if tools are missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rammer.device.manifest import Binding, OpenOptions
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable
from rammer.ir.compute import Compute
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import RProgram, dense

from rammer_rocm import offline
from rammer_rocm.offline import CARDS, OfflineBackend, Toolchain, isa_number, resources_in
from rammer_rocm.plugin import DEVICE
from rammer_rocm.resources import of_code_object, of_log

REMARKS = """k.cl:5:1: remark: Function Name: wave_0 [-Rpass-analysis=kernel-resource-usage]
k.cl:5:1: remark:     SGPRs: 70 [-Rpass-analysis=kernel-resource-usage]
k.cl:5:1: remark:     VGPRs: 64 [-Rpass-analysis=kernel-resource-usage]
k.cl:5:1: remark:     AGPRs: 38 [-Rpass-analysis=kernel-resource-usage]
k.cl:5:1: remark:     ScratchSize [bytes/lane]: 68 [-Rpass-analysis=kernel-resource-usage]
k.cl:5:1: remark:     SGPRs Spill: 1 [-Rpass-analysis=kernel-resource-usage]
k.cl:5:1: remark:     VGPRs Spill: 2 [-Rpass-analysis=kernel-resource-usage]
k.cl:5:1: remark:     LDS Size [bytes/block]: 4096 [-Rpass-analysis=kernel-resource-usage]
"""


def tools(target: str) -> Toolchain:
    try:
        return Toolchain.find(target)
    except DeviceUnavailable as problem:
        pytest.skip(str(problem))


def test_remarks_are_read() -> None:
    found = resources_in(REMARKS)
    assert (found.registers, found.scalar_registers, found.local_bytes, found.spills) == (102, 70, 4096, 17)
    with pytest.raises(DeviceFailure, match="reports no resources"):
        resources_in("")


def test_reports_of_runtimes_are_read() -> None:
    """Check NVIDIA's log and the MessagePack of AMD's code objects: numbers of one, two and three bytes."""
    log = """ptxas info    : Compiling entry function 'wave_0' for 'sm_90'
    32 bytes stack frame, 24 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, 4096 bytes smem"""
    assert of_log(log) == (168, 6, -1) and of_log("a banner") is None
    notes = b"\xab.vgpr_count\xcc\x80\xb1.vgpr_spill_count\x02\xab.sgpr_count\x46\xbb.private_segment_fixed_size\xcd\x01\x10"
    assert of_code_object(b"\x7fELF" + notes) == (128, 68, 70)
    assert of_code_object(b"\x7fELF of another") is None


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gfx906", "gfx90a", "gfx942", "gfx1100"])
def test_softmax_compiles_with_real_figures(target: str) -> None:
    tools(target)
    backend = DEVICE.open(OpenOptions(target=target))
    lines = [
        "m: f32[i:64] = max[j:100] x[i, j]",
        "e: f32[i:64, j:100] = exp(x[i, j] - m[i])",
        "s: f32[i:64] = sum[j:100] e[i, j]",
        "y: f32[i:64, j:100] = e[i, j] / s[i]",
    ]
    computes = tuple(Compute.parse(line) for line in lines)
    inside = {c.name for c in computes}
    edges = tuple(Connection(p, c.name, "veu") for c in computes for p in c.reads if p in inside)
    operator = ROperator("A", computes, edges, ("y",), (2, 100))
    shape = (64, 100)
    types = {c.name: c.type for c in computes} | {"x": computes[-1].type}
    binding = Binding(types, {"x": dense("x", "x", shape), "y": dense("y", "y", shape)})
    found = backend.profiler.resources(backend.kernel(operator, binding), binding)
    assert 0 < found.registers <= 256 and 0 < found.scalar_registers <= 128
    assert found.local_bytes >= 2 * 100 * 4 and found.spills == 0
    with pytest.raises(DeviceUnavailable, match="without the card"):
        backend.load(RProgram("p", "p", (), (), (), (), (), (), ()), {})
    with pytest.raises(DeviceUnavailable, match="without the card"):
        backend.profiler.task_time(backend.kernel(operator, binding), binding)
    assert backend.vdevice.veus == CARDS[target].units and backend.hardware.kind == "offline"


def test_wrong_text_names_the_error() -> None:
    backend = OfflineBackend("gfx906", tools("gfx906"))
    with pytest.raises(DeviceFailure, match="does not compile for gfx906") as caught:
        backend.tools.compile("__kernel void f(__global float *x) { x[0] = nonsense; }")
    assert "nonsense" in caught.value.where


def test_unknown_target_and_contradictions() -> None:
    assert set(DEVICE.targets) == set(CARDS)
    with pytest.raises(BadInput, match="unknown target 'gfx1'"):
        DEVICE.open(OpenOptions(target="gfx1"))
    with pytest.raises(DeviceUnavailable, match="compiles without hardware"):
        DEVICE.open(OpenOptions(target="gfx906", require="gpu"))


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(DeviceUnavailable, match="needs clang") as caught:
        Toolchain.find("gfx906")
    assert "apt install clang-19 lld-19 rocm-device-libs" in caught.value.hint
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "clang-19" else None)
    with pytest.raises(DeviceUnavailable, match="needs the linker lld-19"):
        Toolchain.find("gfx906")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(offline, "BITCODE", (f"{tmp_path}/none",))
    with pytest.raises(DeviceUnavailable, match="device libraries"):
        Toolchain.find("gfx906")


@pytest.mark.parametrize("target", ["gfx90a", "gfx942", "gfx1100"])
def test_device_libraries_know_the_number_of_newer_targets(target: str) -> None:
    """Check the generated numbers by those of the installed libraries, and that a newer target compiles."""
    known = {"gfx906": 9006, "gfx90a": 9010, "gfx942": 9402, "gfx1030": 10300, "gfx1100": 11000}
    assert {t: isa_number(t) for t in known} == known
    text = "__kernel void f(__global float *x) { x[get_global_id(0)] = exp(x[0]); }"
    assert f'amdhsa--{target}"' in tools(target).assembly(text)

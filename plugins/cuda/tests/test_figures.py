"""Figures of a GPU: defined once, by the driver or in ``gpu.py``, and never inside a family."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")

from rammer.device.manifest import Hardware

from rammer_cuda import gpu, hardware
from rammer_cuda.gpu import TARGETS, Gpu

#: An architecture's name, or an SM's shared memory or registers.
FIGURE = re.compile(r'"sm_\d|\b(?:163|164|227|228|64) << 10|\b65_?536\b')
#: The properties of an H200, and of a current GPU that has no target.
H200 = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "CLOCK_RATE": 1_980_000,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 << 10,
    "L2_CACHE_SIZE": 50 << 20,
    "MEMORY_CLOCK_RATE": 3_125_000,
    "GLOBAL_MEMORY_BUS_WIDTH": 6144,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 64 << 10,
    "MAX_THREADS_PER_MULTIPROCESSOR": 2048,
}
ADA = {"COMPUTE_CAPABILITY_MINOR": 9, "COMPUTE_CAPABILITY_MAJOR": 8, "MAX_THREADS_PER_MULTIPROCESSOR": 1536}


def asked(answers: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(hardware, "device_attribute", lambda index, name: answers[name])
    unit = Hardware(0, "H200 SXM", "gpu", 141 * 10**9, {"architecture": hardware.device_architecture(0)})
    return hardware.gpu_of(unit)


def test_the_driver_and_the_target_describe_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(H200, monkeypatch)
    assert replace(found, source=TARGETS["sm_90a"].source) == TARGETS["sm_90a"]
    other = asked({**H200, **ADA}, monkeypatch)
    assert (other.architecture, other.threads, other.lanes) == ("sm_89", 1536, 128)


@pytest.mark.parametrize(
    ("architecture", "has"),
    [
        ("sm_75", ""),
        ("sm_80", "copies tf32"),
        ("sm_89", "copies tf32"),
        ("sm_90", "copies tf32 clusters dependents"),
        ("sm_90a", "copies tf32 clusters dependents warpgroups"),
        ("sm_100a", "copies tf32 clusters dependents"),
        ("sm_120a", "copies tf32 clusters dependents"),
    ],
)
def test_what_an_architecture_has(architecture: str, has: str) -> None:
    unit = replace(TARGETS["sm_80"], architecture=architecture)
    features = ("copies", "tf32", "clusters", "dependents", "warpgroups")
    assert [n for n in features if getattr(unit, n)] == has.split()
    assert ("tf32" in unit.vdevice.precisions) == unit.tf32


def test_no_family_has_figures_of_its_own() -> None:
    folder = Path(gpu.__file__).parent
    files = [p for p in sorted(folder.rglob("*.py")) if p.name != "gpu.py"]
    assert len(files) > 40
    found = [
        f"{p.relative_to(folder)}: {line.strip()}" for p in files for line in p.read_text().splitlines() if FIGURE.search(line)
    ]
    assert found == ['chain/kernel.py: SM = TARGETS["sm_90a"]'], "what chains are written for is looked up"

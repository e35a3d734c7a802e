"""The shared folder of OpenCL drivers: several processes may create it at once."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rammer_rocm.icd")

from rammer_rocm.icd import CONFIG_PREFIX, VENDORS_VARIABLE


def prepared() -> Path:
    """Return the folder that another process would prepare."""
    spec = importlib.util.find_spec("rammer_rocm.icd")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    report: Any = module.prepare_icd()
    if report.embedded is None:
        pytest.skip(report.why)
    return Path(report.vendors_dir)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(VENDORS_VARIABLE, raising=False)
    return prepared()


def test_a_folder_that_another_process_made_meanwhile_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Check that the folder is kept: its removal, even for a moment, would leave a reading process without a driver."""
    monkeypatch.delenv(VENDORS_VARIABLE)
    others, make = folder.rename(tmp_path / "others"), tempfile.mkdtemp
    inode = others.stat().st_ino

    def meanwhile(*words: Any, **named: Any) -> str:
        others.rename(folder)
        return make(*words, **named)

    monkeypatch.setattr(tempfile, "mkdtemp", meanwhile)
    assert prepared() == folder and folder.stat().st_ino == inode
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_a_folder_that_somebody_changed_is_made_again(folder: Path) -> None:
    kept = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert kept
    next(folder.iterdir()).write_text("/nowhere\n")
    (folder / "more.icd").write_text("/nowhere\n")
    assert prepared() == folder and {p.name: p.read_bytes() for p in folder.iterdir()} == kept


def test_a_folder_that_others_may_write_is_made_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check a folder writable by others: its files name libraries that are executed."""
    for change in (lambda: folder.chmod(0o777), lambda: next(folder.iterdir()).chmod(0o666)):
        before = folder.stat().st_ino
        change()
        assert prepared() == folder and folder.stat().st_ino != before and not folder.stat().st_mode & 0o022
        assert f"cached file {folder} is not used" in capsys.readouterr().err


#: The minimum and maximum of integers beside a bitwise NOT, in a loop that the compiler unrolls without vectors.
MEETING = """
__attribute__((noinline)) void meet{n}(__global const {t} *restrict a, __global const {t} *restrict b, __global {t} *restrict o,
    int n) {{
  for (int i = 2 * n; i < 2 * min(n + 4, 5); ++i)
    for (int k = 0; k < 19; ++k) {{ const {t} x = a[19 * i + k], y = b[19 * i + k]; o[19 * i + k] = {of}; }}
}}
__kernel void f{n}(__global {t} *a, __global {t} *b, __global {t} *o, int n) {{ meet{n}(a, b, o, n); }}
"""
TYPES, FORMS = ("int", "long", "uint", "ulong"), ("max(x, ~y)", "min(~x, y)", "~max(x, y)")
#: EVEX-encoded vpcmpeqd and vpcmpeqq of 128 bits, register to register.
COMPARISON = re.compile(rb"\x62(.)[\x00-\xff][\x00\x08](?:\x76|\x29)[\xc0-\xff]", re.DOTALL)
BUILD = """
import sys
from rammer_rocm.opencl_runtime import import_opencl
from rammer_rocm.build import build_program
cl = import_opencl()
devices = [d for p in cl.get_platforms() for d in p.get_devices() if "Intel" in p.name and d.type == cl.device_type.CPU]
program = devices and build_program(cl.Context(devices[:1]), sys.stdin.read(), ("-cl-std=CL3.0",))
sys.stdout.buffer.write(program.get_info(cl.program_info.BINARIES)[0] if program else b"")
"""


def built_for_avx512(source: str, cache: Path, **environment: str) -> bytes:
    """Return the machine code of ``source`` for a server CPU with AVX-512, which this machine need not be."""
    given = {n: v for n, v in os.environ.items() if not n.startswith(CONFIG_PREFIX)}
    given |= {"RAMMER_CACHE": str(cache), f"{CONFIG_PREFIX}CPU_TARGET_ARCH": "skx", **environment}
    said = subprocess.run([sys.executable, "-c", BUILD], input=source.encode(), env=given, capture_output=True, check=True)
    return said.stdout


def wrong_comparisons(code: bytes) -> int:
    """Count comparisons that write to a mask register beyond the eighth: no CPU has one."""
    return sum(found[1][0] & 0x90 != 0x90 for found in COMPARISON.finditer(code))


def test_a_minimum_beside_a_not_is_valid_code_with_avx512(tmp_path: Path) -> None:
    forms = [(t, of) for t in TYPES for of in FORMS]
    source = "".join(MEETING.format(n=n, t=t, of=of) for n, (t, of) in enumerate(forms))
    wrong = built_for_avx512(source, tmp_path / "wrong", CL_CONFIG_LLVM_OPTIONS="-disable-x86-scalar-to-vector=false")
    if not wrong:
        pytest.skip("Intel's OpenCL runtime for CPUs is not installed")
    assert wrong_comparisons(wrong) >= len(forms), "this compiler no longer has the fault: the option that avoids it can go"
    assert wrong_comparisons(built_for_avx512(source, tmp_path / "right")) == 0

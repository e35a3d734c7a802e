"""Function cache: each model's functions are written once for all processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from zoo import find

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions
from rammer.frontend.read.reader import read_model
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.cache_files import entries

pytest.importorskip("pyopencl")

from rammer_rocm import families
from rammer_rocm.build import build_program
from rammer_rocm.families import OpenClKernels
from rammer_rocm.kernel_writing import task_functions
from rammer_rocm.kernels.task import TaskFunction
from rammer_rocm.plugin import DEVICE

if not DEVICE.probe():
    pytest.skip("no OpenCL device", allow_module_level=True)


@pytest.fixture(scope="module")
def program() -> tuple[OpenClKernels, RProgram, Binding]:
    backend = DEVICE.open(OpenOptions())
    assert isinstance(backend, OpenClKernels)
    compiler = Compiler(backend, CompileOptions(), KernelStore(None))
    (segment,) = compiler.compile_model(read_model(find("alexnet:small").build(3)), {}).segments
    assert isinstance(segment, ProgramSegment)
    return backend, segment.program, Binding.of(segment.program, segment.constants)


def told(functions: dict[str, TaskFunction]) -> dict[str, object]:
    """Return all properties except the packing of constants, which is a function."""
    arguments = {n: [(a.tensor, a.written, a.packing and a.packing.key) for a in f.arguments] for n, f in functions.items()}
    return {n: (f.entry, f.text, f.types, f.scratch, f.helpers, f.stops, f.inner, arguments[n]) for n, f in functions.items()}


def test_functions_are_cached_but_those_that_pack_constants(
    program: tuple[OpenClKernels, RProgram, Binding], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend, table, binding = program
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path))
    noted, real = list[str](), families.task_function

    def noting(operator: ROperator, *more: object) -> TaskFunction:
        noted.append(operator.name)
        return real(operator, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(families, "task_function", noting)
    first = task_functions(OpenClKernels(backend.vdevice), table, binding)
    assert {f.entry for f in first.values()} == {first[n].entry for n in noted}
    (file,) = entries(tmp_path, "rocm-kernels")
    whole = file.read_text()
    packed = {f.entry for f in first.values() if any(a.packing for a in f.arguments)}
    noted.clear()
    assert told(task_functions(OpenClKernels(backend.vdevice), table, binding)) == told(first)
    assert {first[n].entry for n in noted} == packed != {f.entry for f in first.values()}
    file.write_text(whole.replace('"types"', '"type"', 1))
    assert told(task_functions(OpenClKernels(backend.vdevice), table, binding)) == told(first) and file.read_text() == whole


def test_binaries_are_cached(
    program: tuple[OpenClKernels, RProgram, Binding],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Check that a source is compiled once, that other options are another entry, and that a damaged binary is compiled again."""
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path))
    context, source = program[0].context, "__kernel void f(__global float *x) { x[0] += TWICE; }"  # type: ignore[attr-defined]
    for number in (1, 1, 2, 1):
        assert build_program(context, source, (f"-DTWICE={number}",)).kernel_names == "f"
    paths = entries(tmp_path, "rocm-binaries")
    assert len(paths) == 2
    for junk in (b"", paths[0].read_bytes()[:-1], paths[1].read_bytes()):
        paths[0].write_bytes(junk)
        for number in (1, 2):
            assert build_program(context, source, (f"-DTWICE={number}",)).kernel_names == "f"
        assert capsys.readouterr().err.count(f"cached file {paths[0]} is not used: it is damaged") == 1

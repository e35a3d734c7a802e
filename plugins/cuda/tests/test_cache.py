"""Program analyses that the cuda plugin caches for the next process."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from zoo.nasnet import nasnet_cifar
from zoo.sequence import lstm_tc

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions
from rammer.errors import DeviceFailure
from rammer.frontend.read.reader import read_model
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.cache_files import content, entries, store
from rammer_testing.nonempty import some

pytest.importorskip("cuda.bindings")

from .cuda_on_host import told
from rammer_cuda import compile, kernel_cache, launch_cache
from rammer_cuda.backend import open_backend
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.persistent import dataflow
from rammer_cuda.persistent.dataflow import cached_words, plan_words
from rammer_cuda.source import Writer


@functools.cache
def small_nasnet() -> tuple[RProgram, Binding]:
    """Return a program with many window kernels, and products that pack their weights."""
    return compiled(nasnet_cifar(0, cells=1, filters=16))


def compiled(model: onnx.ModelProto) -> tuple[RProgram, Binding]:
    compiler = Compiler(open_backend(OpenOptions(target="sm_90a")), CompileOptions(), KernelStore(None))
    segment = compiler.compile_model(read_model(model), {}).segments[0]
    assert isinstance(segment, ProgramSegment)
    program = RProgram.parse(str(segment.program))
    return program, Binding(program.types, program.storage, frozenset(segment.constants))


@pytest.mark.slow
def test_kernels_are_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path))
    program, binding = small_nasnet()
    made = told(Writer().all(program.operators, binding))
    assert told(kernel_cache.cached_kernels(program, binding, Writer())) == made
    assert len(entries(tmp_path, "cuda-kernels")) == 1

    emitted: list[str] = []

    class Noting(Writer):
        def written(self, operator: ROperator, binding: Binding) -> TaskKernel:
            emitted.append(operator.name)
            return super().written(operator, binding)

        def all(self, operators: object, binding: Binding) -> dict[str, TaskKernel]:
            pytest.fail("written again")

    again = kernel_cache.cached_kernels(program, binding, Noting())
    assert told(again) == made
    packed = {k.entry for k in again.values() if any(a.packing for a in k.arguments)}
    plain = {k.entry for k in again.values()} - packed
    assert len(plain) > 5 and len(packed) > 2
    assert {again[name].entry for name in emitted} == packed


@pytest.mark.slow
def test_other_constants_are_another_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path))
    program, binding = small_nasnet()
    kernel_cache.cached_kernels(program, binding, Writer())
    fewer = fewer_constants(program, binding)
    assert told(kernel_cache.cached_kernels(program, fewer, Writer())) == told(Writer().all(program.operators, fewer))
    assert packed(kernel_cache.cached_kernels(program, fewer, Writer())) < packed(
        kernel_cache.cached_kernels(program, binding, Writer())
    )


def fewer_constants(program: RProgram, binding: Binding) -> Binding:
    """Return the binding without constants, except for operators whose kernels require constant weights."""
    none = replace(binding, constants=frozenset())
    kept = frozenset[str]()
    for operator in some(program.operators):
        try:
            Writer().written(operator, none)
        except DeviceFailure:
            kept |= binding.constants & {*operator.inputs}
    return replace(binding, constants=kept)


def packed(kernels: Mapping[str, TaskKernel]) -> set[str]:
    """Return the names of operators whose kernels need a packed constant."""
    return {name for name, kernel in kernels.items() if any(a.packing for a in kernel.arguments)}


@pytest.mark.slow
def test_a_damaged_record_is_written_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path))
    program, binding = small_nasnet()
    made = told(kernel_cache.cached_kernels(program, binding, Writer()))
    (file,) = entries(tmp_path, "cuda-kernels")
    whole = file.read_text()
    for junk in (
        "",
        "null",
        "[]",
        '{"kernels": []}',
        '{"kernels": [], "operators": {}}',
        '{"kernels": [{"like": "nobody"}], "operators": {}}',
        whole.replace('"threads"', '"thread"', 1),
    ):
        file.write_text(junk)
        assert told(kernel_cache.cached_kernels(program, binding, Writer())) == made, junk[:60]
        assert file.read_text() == whole


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
def test_the_plan_of_words_is_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, batch: int) -> None:
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path))
    program, binding = compiled(lstm_tc(0, batch=batch, layers=3, steps=5))
    plan = plan_words(program, binding)
    assert plan.words and any(t.waits for row in plan.program.rows for t in row)
    assert cached_words(program, binding) == plan
    monkeypatch.setattr(dataflow, "plan_words", lambda program, binding: pytest.fail("planned again"))
    assert cached_words(RProgram.parse(str(program)), binding) == plan


def test_a_program_without_words_stays_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path))
    program, binding = small_nasnet()
    plan = cached_words(program, binding)
    assert plan.program is program and not plan.words
    assert cached_words(program, binding) == plan


@pytest.mark.slow
def test_a_record_that_no_process_of_ours_wrote_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Check malformed records with a valid checksum: kernels of other tensors, invalid names, unbounded sizes and counts."""
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path))
    monkeypatch.setattr(launch_cache, "CACHED_FROM", 1)
    program, binding = small_nasnet()
    made, plan = told(kernel_cache.cached_kernels(program, binding, Writer())), launch_cache.cached_launches(program)
    files = {p.parts[-3].removeprefix("cuda-"): p for p in entries(tmp_path)}
    for what, changes in {
        "kernels": (
            ('"entry": "', '"entry": "evil();'),
            ('"body": "', '"body": 1, "text": "'),
            ('"parameters": ["', '"parameters": [1, "'),
            ('"threads": ', '"threads": 9999999'),
            ('"stops": false', '"stops": 0'),
            ('"written": [false', '"written": [true'),
            ('"operators": {', '"operator": {'),
        ),
        "launches": (("[0, ", "[0, 99999999"), ("[0, ", "[1, "), ("[[", "[[1, 2, 3], [")),
    }.items():
        text = content(files[what])
        for change in changes:
            assert change[0] in text
            store(files[what], text.replace(*change, 1))
            assert told(kernel_cache.cached_kernels(program, binding, Writer())) == made, change
            assert launch_cache.cached_launches(program) == plan, change
            assert content(files[what]) == text, change


def test_damaged_machine_code_is_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built: list[str] = []

    def build(source: str, arch: str) -> tuple[bytes, str]:
        built.append(source)
        return b"code of " + source.encode(), "Compiling entry function 'k'\nUsed 7 registers"

    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path))
    monkeypatch.setattr(compile, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(compile, "_compile_source", build)
    first = compile.compile_cubin("a", "sm_90a")
    assert compile.compile_cubin("a", "sm_90a") == first and len(built) == 1
    compile.compile_cubin("b", "sm_90a")
    cubins = entries(tmp_path, "cuda-cubins")
    others = [p.read_bytes() for p in cubins]
    for number, junk in enumerate((b"", b"junk", b"")):
        for path, other in zip(cubins, reversed(others), strict=True):
            path.write_bytes(junk if number < 2 else other)  # or another kernel's record
        assert compile.compile_cubin("a", "sm_90a") == first and len(built) == 3 + 2 * number
        compile.compile_cubin("b", "sm_90a")
    for text in ("", "x\nUsed 0 registers"):  # under a valid checksum
        store(cubins[0], text)
        compile.compile_cubin("a", "sm_90a"), compile.compile_cubin("b", "sm_90a")
    assert len(built) == 10

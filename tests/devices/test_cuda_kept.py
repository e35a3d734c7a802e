"""Kernels that the cuda plugin keeps for the next process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from zoo.nasnet import nasnet_cifar

from rammer.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions
from rammer.frontend.reader import read_model
from rammer.ir.program import RProgram
from rammer.profile.store import KernelStore
from rammer.runtime.options import CompileOptions
from rammer.runtime.segments import ProgramSegment

pytest.importorskip("cuda.bindings")

from rammer_cuda import kept
from rammer_cuda.backend import open_backend
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.source import task_kernels


def small_nasnet() -> tuple[RProgram, Binding]:
    """A program with many window kernels, and products that pack their weights."""
    compiler = Compiler(open_backend(OpenOptions(target="sm_90a")), CompileOptions(), KernelStore(None))
    segment = compiler.compile_model(read_model(nasnet_cifar(0, cells=3, filters=16)), {}).segments[0]
    assert isinstance(segment, ProgramSegment)
    program = RProgram.parse(str(segment.program))
    return program, Binding(program.types, program.storage, frozenset(segment.constants))


def launched(kernels: dict[str, TaskKernel]) -> list[tuple[object, ...]]:
    """All that a launch needs of every kernel; how an argument is packed by the key that stands for it."""
    return [(n, k.entry, k.text, k.threads, k.shared, k.dynamic, k.blocks,
             [(a.tensor, a.written, a.packing and a.packing.key) for a in k.arguments]) for n, k in kernels.items()]  # fmt: skip


def test_kernels_are_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rammer_cuda.remember.cache_folder", lambda: tmp_path)
    program, binding = small_nasnet()
    made = launched(task_kernels(program.operators, binding))
    assert launched(kept.kept_kernels(program, binding)) == made
    assert len(list((tmp_path / "binaries" / "cuda").iterdir())) == 1

    emitted: list[str] = []
    monkeypatch.setattr(kept, "task_kernels", lambda operators, binding: pytest.fail("written again"))
    write = kept.task_kernel
    monkeypatch.setattr(kept, "task_kernel", lambda o, b: emitted.append(o.name) or write(o, b))
    again = kept.kept_kernels(program, binding)
    assert launched(again) == made
    packed = {k.entry for k in again.values() if any(a.packing for a in k.arguments)}
    plain = {k.entry for k in again.values()} - packed
    assert len(plain) > 5 and len(packed) > 2
    assert {again[name].entry for name in emitted} == packed


def test_other_constants_are_another_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rammer_cuda.remember.cache_folder", lambda: tmp_path)
    program, binding = small_nasnet()
    kept.kept_kernels(program, binding)
    none = Binding(binding.types, binding.storages, frozenset())
    seen: list[Any] = []
    monkeypatch.setattr(kept, "task_kernels", lambda operators, binding: seen.append(binding) or {})
    kept.kept_kernels(program, none)
    assert seen == [none]


def test_a_damaged_record_is_written_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rammer_cuda.remember.cache_folder", lambda: tmp_path)
    program, binding = small_nasnet()
    made = launched(kept.kept_kernels(program, binding))
    (file,) = (tmp_path / "binaries" / "cuda").iterdir()
    whole = file.read_text()
    for junk in ("", "null", "[]", '{"kernels": []}', '{"kernels": [], "operators": {}}', '{"kernels": [{"like": "nobody"}], '
                 '"operators": {}}', whole.replace('"threads"', '"thread"', 1)):  # fmt: skip
        file.write_text(junk)
        assert launched(kept.kept_kernels(program, binding)) == made, junk[:60]
        assert file.read_text() == whole

"""The cuda plugin without a GPU: NVRTC compiles for real architectures."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import OpenOptions
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable
from rammer.ir.program import Port, RProgram
from rammer.jit.self_test import tiny_graph
from rammer.plan.waits import find_dependences
from rammer.schedule.wavefront import Wavefront
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.cache_files import entries
from rammer_testing.nonempty import some
from rammer_testing.programs import random_net

pytest.importorskip("cuda.bindings")

from rammer.ir.launches import first_consecutive, make_launches

from rammer_cuda import launch_cache as planning
from rammer_cuda.backend import open_backend
from rammer_cuda.compile import compile_cubin, parse_ptxas
from rammer_cuda.gpu import TARGETS


def compiled(target: str, policy: str = "wavefront") -> tuple[Compiler, ProgramSegment]:
    compiler = Compiler(open_backend(OpenOptions(target=target)), CompileOptions(policy), KernelStore(None))
    return compiler, compiler.program(tiny_graph(0), (Port("x", "x"),), (Port("y", "y"),))


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_kernel_compiles_for_every_target(target: str) -> None:
    compiler, segment = compiled(target)
    for operator in some(segment.program.operators):
        found = compiler.backend.kernel(operator, _binding(segment))
        resources = compiler.backend.profiler.resources(found, _binding(segment))
        assert 8 <= resources.registers <= 255
        assert resources.spills == 0


def test_running_without_the_gpu_is_refused() -> None:
    compiler, segment = compiled("sm_90a")
    with pytest.raises(DeviceUnavailable, match="no GPU of this target"):
        compiler.backend.load(segment.program, segment.constants)


def test_unknown_target_names_the_known_ones() -> None:
    with pytest.raises(BadInput) as caught:
        open_backend(OpenOptions(target="sm_1"))
    assert str(caught.value) == "unknown CUDA target 'sm_1'\n  hint: one of: sm_75, sm_80, sm_86, sm_89, sm_90, sm_90a"


def test_rejected_source_shows_the_compilers_error() -> None:
    with pytest.raises(DeviceFailure, match="undefined_thing"):
        compile_cubin('extern "C" __global__ void k() { undefined_thing(); }', "sm_90a")


def test_ptxas_report_is_read_per_kernel() -> None:
    log = (
        "ptxas info : Compiling entry function 'k_a' for 'sm_90a'\n"
        "    0 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info : Used 40 registers, used 1 barriers, 16 bytes smem\n"
        "ptxas info : Compiling entry function 'k_b' for 'sm_90a'\n"
        "ptxas info : Used 7 registers\n"
    )
    found = parse_ptxas(log)
    assert (found["k_a"].registers, found["k_a"].shared, found["k_a"].spills) == (40, 16, 12)
    assert (found["k_b"].registers, found["k_b"].shared, found["k_b"].spills) == (7, 0, 0)


def test_launches_cover_every_task_once_in_a_legal_order() -> None:
    _, segment = compiled("sm_90a", "sequential")
    plan = make_launches(segment.program)
    seen = [(launch.operator, t) for launch in plan for t in launch.tasks]
    assert len(seen) == len(set(seen)) == segment.program.task_count
    assert all(p < i for i, launch in some(enumerate(plan)) for p in launch.after)


@pytest.mark.parametrize("seed", range(20))
def test_launches_follow_what_they_read_where_rows_need_no_wait(seed: int) -> None:
    """Check that the graph has edges for dependences that rows satisfy by their order alone."""
    program = random_net(Random(seed), 12).program(Wavefront(), 1 + seed % 6)
    before: list[set[int]] = []
    at: dict[str, list[int]] = {}
    for number, launch in enumerate(make_launches(program)):
        before.append({*launch.after, *(p for a in launch.after for p in before[a])})
        at.setdefault(launch.operator, []).append(number)
    for reader, writers in some(find_dependences(program.operators, program.storage).items()):
        for writer in writers:
            assert all(set(at[writer]) <= before[number] for number in at[reader]), (writer, reader)


def test_consecutive_finds_gaps() -> None:
    assert first_consecutive([4, 5, 6]) == 4
    assert first_consecutive([4, 6]) is None


def _binding(segment: ProgramSegment):  # type: ignore[no-untyped-def]
    from rammer.device.manifest import Binding

    return Binding(segment.program.types, segment.program.storage, frozenset(segment.constants))


def test_launches_are_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path))
    monkeypatch.setattr(planning, "CACHED_FROM", 1)
    _, segment = compiled("sm_90a", "sequential")
    plan = planning.cached_launches(segment.program)
    assert plan == make_launches(segment.program) and len(entries(tmp_path, "cuda-launches")) == 1
    again = RProgram.parse(str(segment.program))
    monkeypatch.setattr(planning, "make_launches", lambda program: pytest.fail("planned again"))
    assert planning.cached_launches(again) == plan
    monkeypatch.undo()
    gaps = [planning.Launch("o", (1, 2, 5), (0,)), planning.Launch("p", (3, 4), ())]
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(planning, "CACHED_FROM", 1)
    monkeypatch.setattr(planning, "make_launches", lambda program: gaps)
    assert planning.cached_launches(again) == planning.cached_launches(again) == gaps
    (file,) = entries(tmp_path / "other", "cuda-launches")
    for junk in ("", "null", "7", "{}x", '{"a": 1}', "[[]]", '[["o", [], []]]', '[["o", 3, []]]'):
        file.write_text(junk)
        assert planning.cached_launches(again) == gaps, junk

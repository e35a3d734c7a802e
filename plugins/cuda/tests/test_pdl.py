"""Early starts: a switch in every kernel, measured choices; on a GPU, the same bits for any switches."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions
from rammer.ir.program import Port
from rammer.jit.self_test import tiny_graph
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some

pytest.importorskip("cuda.bindings")

from rammer_cuda.backend import open_backend
from rammer_cuda.compile import compile_cubin
from rammer_cuda.pdl import Switches
from rammer_cuda.source import Writer, translation_unit


class Counted(Switches):
    """Switches without kernels that only record their state."""

    def __init__(self) -> None:
        self.on = frozenset()
        self.tried: list[frozenset[str]] = []

    def set(self, entries: Iterable[str]) -> None:
        self.on = frozenset(entries)
        self.tried.append(self.on)


@pytest.mark.parametrize("wanted", [set(), {"a"}, {"b", "c"}, {"a", "b", "c"}])
def test_the_fastest_setting_is_found_where_kernels_do_not_meet(wanted: set[str]) -> None:
    switches = Counted()

    def replay() -> float:
        return 1.0 + 0.1 * len(switches.on ^ wanted)

    best = switches.choose(["a", "b", "a", "c"], replay)
    assert switches.on == wanted
    assert best == replay() == 1.0
    assert switches.tried[0] == frozenset("abc"), "all of them at once, before any alone"


def test_noise_changes_nothing() -> None:
    switches = Counted()
    switches.choose(["a", "b"], lambda: 1.0 - 0.001 * len(switches.on))
    assert switches.on == frozenset()


def test_every_kernel_has_the_switch() -> None:
    backend = open_backend(OpenOptions(target="sm_90a"))
    segment = Compiler(backend, CompileOptions(), KernelStore(None)).program(tiny_graph(1), (Port("x", "x"),), (Port("y", "y"),))
    binding = Binding(segment.program.types, segment.program.storage, frozenset(segment.constants))
    for kernel in some(Writer().all(segment.program.operators, binding).values()):
        assert kernel.text.count("rm_after();") == 1, "the switch is read there"
        assert b"rm_pdl" in compile_cubin(translation_unit([kernel]), "sm_90a").code


@pytest.mark.cuda
def test_results_do_not_depend_on_the_switches(rng: np.random.Generator) -> None:
    backend = open_backend(OpenOptions())
    segment = Compiler(backend, CompileOptions(), KernelStore(None)).program(tiny_graph(1), (Port("x", "x"),), (Port("y", "y"),))
    from rammer_cuda.executor import CudaProgram

    loaded = backend.load(segment.program, segment.constants)
    if not isinstance(loaded, CudaProgram):
        pytest.skip("another executor was chosen")
    x = rng.standard_normal((5, 9, 10)).astype(np.float32)
    switches = loaded.resident.switches(loaded.recipe.functions)
    found = []
    for on in (loaded.recipe.functions, (), loaded.recipe.functions):
        switches.set(on)
        found.append(loaded.run({"x": x}).outputs["y"].tobytes())
    assert len(set(found)) == 1
    loaded.close()

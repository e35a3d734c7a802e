"""What a program took of a GPU it gives back when nobody holds it any more, closed or not, by a driver that only takes notes."""

from __future__ import annotations

import gc
from dataclasses import replace
from unittest.mock import MagicMock

import pytest

pytest.importorskip("cuda.bindings")

from products import CASES

from rammer_cuda import executor, hardware, resident
from rammer_cuda.executor import CapturedGraph
from rammer_cuda.gpu import TARGETS
from rammer_cuda.profiler import whole_program
from rammer_cuda.resident import Resident


class Notes:
    """What the driver was asked to free, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.freed: list[str] = []
        cupy, api = MagicMock(), MagicMock()
        cupy.cuda.runtime.memGetInfo.return_value = (1 << 40, 1 << 40)
        self.index = cupy.cuda.runtime.setDevice
        api.cuModuleLoadData.side_effect = lambda code: (0, code)
        api.cuModuleGetFunction.return_value = (0, "function")
        api.cuModuleUnload.side_effect = self._free
        api.cuGraphExecDestroy.side_effect = self._free
        for module in (resident, hardware):
            monkeypatch.setattr(module, "cupy", lambda: cupy)
        for module in (resident, executor):
            monkeypatch.setattr(module, "driver", lambda: api)

    def _free(self, what: str) -> tuple[int]:
        self.freed.append(what)
        return (0,)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    return Notes(monkeypatch)


def resident_with(*modules: str) -> Resident:
    operator, binding = CASES["matmul"]
    program, constants = whole_program(replace(operator, tile=operator.anchor.shape), binding)
    made = Resident(program, constants, TARGETS["sm_90a"], 1)
    for name in modules:
        made.function(name, "entry", 0)  # type: ignore[arg-type]
    return made


def test_modules_of_a_dropped_program_are_unloaded(notes: Notes) -> None:
    made = resident_with("one", "two")
    other = made.with_buffers({})
    del other
    gc.collect()
    assert notes.freed == []
    notes.index.reset_mock()
    del made
    gc.collect()
    assert sorted(notes.freed) == ["one", "two"]
    assert notes.index.call_args_list[0].args == (1,), "on the program's GPU"


def test_closing_unloads_them_once(notes: Notes) -> None:
    made = resident_with("one")
    made.close()
    made.close()
    assert notes.freed == ["one"]
    del made
    gc.collect()
    assert notes.freed == ["one"]


def test_a_graph_is_freed_before_its_kernels(notes: Notes) -> None:
    graph = CapturedGraph("graph", resident_with("one"))
    gc.collect()
    assert notes.freed == []
    del graph
    gc.collect()
    assert notes.freed == ["graph", "one"]

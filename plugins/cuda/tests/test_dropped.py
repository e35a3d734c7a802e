"""Release of GPU resources when a program is no longer referenced, closed or not, checked with a recording driver."""

from __future__ import annotations

import gc
from dataclasses import replace
from unittest.mock import MagicMock

import pytest

pytest.importorskip("cuda.bindings")

from products import CASES

from rammer.ir.program import Buffer, RProgram
from rammer_testing.nonempty import some

from rammer_cuda import executor, hardware, resident
from rammer_cuda.backend import whole_program
from rammer_cuda.executor import CapturedGraph
from rammer_cuda.gpu import TARGETS
from rammer_cuda.resident import Resident


class Bytes:
    """A fake allocation without content."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.data = nbytes, MagicMock()

    def __getitem__(self, part: slice) -> tuple[Bytes, slice]:
        return self, part


class Notes:
    """The frees that the driver received, in order."""

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
            monkeypatch.setattr(module, "import_cupy", lambda: cupy)
        for module in (resident, executor):
            monkeypatch.setattr(module, "import_driver", lambda: api)

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


def test_a_table_for_other_lengths_lies_in_its_programs_memory(notes: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the shared ports, arena, stream and run order. An arena that is too small is not shared."""
    operator, binding = CASES["matmul"]
    program, constants = whole_program(replace(operator, tile=operator.anchor.shape), binding)

    def sized(count: int) -> RProgram:
        return replace(program, buffers=(*program.buffers, Buffer("between", "float32", count, "arena", 0)))

    monkeypatch.setattr(resident.import_cupy(), "empty", lambda nbytes, dtype: Bytes(nbytes))
    first = Resident(sized(1024), constants, TARGETS["sm_90a"], 1)
    for count in (1, 1024, 2048):
        other = Resident(sized(count), constants, TARGETS["sm_90a"], 1, None, first)
        assert other.stream is first.stream and other.order is first.order
        ports = [b.name for b in program.buffers if b.kind in ("input", "output")]
        assert all(other.buffers[name] is first.buffers[name] for name in some(ports))
        assert (other.arena is first.arena) == (count <= 1024) and other.arena.nbytes >= 4 * count
        elsewhere = MagicMock(ptr=77)
        other.follow(elsewhere)
        assert first.order.last is elsewhere
        first.leave(elsewhere)
        assert other.order.last is first.stream
        other.close()
        assert first.buffers and first.arena is not None

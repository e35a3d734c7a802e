"""Shared host memory of programs on a CPU: host reads and writes equal queued copies."""

from __future__ import annotations

import numpy as np
import pytest

from rammer.device.manifest import OpenOptions
from rammer.ir.compute import Compute
from rammer.ir.operator import ROperator
from rammer.ir.program import Buffer, Port, RProgram, Storage, Task, dense

pytest.importorskip("pyopencl")
from rammer_rocm.backend import OpenClBackend
from rammer_rocm.memory import fine_grained, lay_out
from rammer_rocm.plugin import DEVICE
from rammer_rocm.table_executor import TableProgram

if not DEVICE.probe() or DEVICE.probe()[0].kind != "cpu":
    pytest.skip("no OpenCL unit that is a CPU", allow_module_level=True)


def program() -> RProgram:
    """Return y = 2x, where y is every other element of its buffer."""
    double = ROperator("Y", (Compute.parse("y: f32[i:5] = x[i] * 2.0"),), (), ("y",), (5,))
    strided = Storage("y", "b_y", 1, (5,), (2,))
    buffers = Buffer("b_x", "float32", 5, "input", 0), Buffer("b_y", "float32", 12, "output", 0)
    ports, storages = ((Port("X", "x"),), (Port("OUT", "y"),)), (dense("x", "b_x", (5,)), strided)
    return RProgram("shared", "test", *ports, buffers, storages, (double,), (), ((Task("Y", 0),),))


def loaded(**options: str) -> TableProgram:
    """Return the loaded program with its unit opened."""
    backend = DEVICE.open(OpenOptions(options=options))
    assert isinstance(backend, OpenClBackend)
    made = backend.load(program(), {})
    assert isinstance(made, TableProgram)
    return made


def test_the_host_sees_what_kernels_see() -> None:
    seeing, blind = loaded(), loaded(executor="waves")
    fine = seeing.single and fine_grained(seeing.queue.device)
    assert (seeing.seen("x") is not None) == fine and blind.seen("x") is None  # queued runs may not have ended
    first = np.arange(5, dtype=np.float32)
    for made in (seeing, blind):
        made.poison()
        one = made.run({"X": first}).outputs["OUT"]
        two = made.run({"X": np.flip(first)}).outputs["OUT"]  # not a dense array
        np.testing.assert_array_equal(one, first * 2)  # and the next run did not change it
        np.testing.assert_array_equal(two, np.flip(first) * 2)
        assert one.flags.c_contiguous
        whole = made.flat("b_y")
        assert np.isnan(whole[::2]).all() and np.isnan(whole[11]), "written beside its elements"
        made.close()
        assert not made.views


def test_bound_arrays_are_copied_where_the_host_sees_them() -> None:
    made = loaded()
    x, wide = np.ones(5, np.float32), np.zeros(10, np.float32)
    bound = made.bind({"X": x}, {"OUT": wide[::2]})
    for value in (1, 3):
        x[...] = value
        bound.run()
        bound.synchronize()
        np.testing.assert_array_equal(wide, [2 * value, 0] * 5)
    made.close()


def test_tensors_that_are_read_and_written_together_lie_a_page_from_an_even_distance() -> None:
    """Check whole pages of input and output: one page more than necessary separates them."""
    made = program()
    (first, second) = sorted(place for name, place in lay_out(made).buffers.items() if made.buffer[name].kind != "arena")[-2:]
    (size,) = {b.nbytes for b in made.buffers if b.kind == "input"}
    assert second - first == -(-size // 4096) * 4096 + 4096

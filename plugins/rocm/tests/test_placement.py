"""Kernels on host arrays in place: results equal those of copies, surrounding bytes are unchanged, and no copy occurs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from recurrent_models import Net

import rammer
from rammer.device.arrays import HostRoom
from rammer.device.manifest import OpenOptions
from rammer.errors import RammerError
from rammer.passes.loops.chunk_recurrent import ChunkRecurrent
from rammer.passes.pass_pipeline import default_passes
from rammer.runtime.executable import Executable
from rammer_testing.graphs.generate import graph
from rammer_testing.nonempty import some

pytest.importorskip("pyopencl")
from rammer_rocm.backend import OpenClBackend
from rammer_rocm.memory import system_wide
from rammer_rocm.placement import ROOM
from rammer_rocm.plugin import DEVICE

if not DEVICE.probe() or DEVICE.probe()[0].kind != "cpu":
    pytest.skip("no OpenCL unit that is a CPU", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def able() -> None:
    backend = DEVICE.open(OpenOptions())
    assert isinstance(backend, OpenClBackend)
    if not (backend.single and system_wide(backend.context.devices[0])):
        pytest.skip("this unit does not see the host's memory")


def with_room(values: np.ndarray, off: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return an aligned array of these values, shifted by ``off`` elements, and its enclosing bytes with all other bits set."""
    whole = np.full(values.nbytes + 2 * ROOM.aligned + ROOM.beyond + off * values.itemsize, 255, np.uint8)
    start = -whole.ctypes.data % ROOM.aligned + off * values.itemsize
    array = whole[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    array[...] = values
    return array, whole


def untouched(array: np.ndarray, whole: np.ndarray) -> bool:
    """Return True if all bytes around ``array`` are unchanged since ``with_room``."""
    start = array.ctypes.data - whole.ctypes.data
    return bool((whole[:start] == 255).all() and (whole[start + array.nbytes :] == 255).all())


def check(exe: Executable, inputs: dict[str, np.ndarray], off: int = 0) -> tuple[str, ...]:
    """Check a bound call on arrays with room against a plain run, and return its notes."""
    want = exe.run(inputs)
    given = {n: with_room(v, off) for n, v in inputs.items()}
    made = {n: with_room(np.zeros_like(v), off) for n, v in want.items()}
    bound = exe.bind({n: a for n, (a, _) in given.items()}, {n: a for n, (a, _) in made.items()})
    for _ in range(2):
        bound.run()
        bound.synchronize()
        for name, (array, whole) in some(made.items()):
            np.testing.assert_array_equal(array, want[name])
            assert untouched(array, whole)
            array[...] = 0
    notes = bound.notes
    bound.close()
    return notes


def drawn(seed: int) -> Iterator[tuple[Executable, dict[str, np.ndarray]]]:
    for index in range(10**6):
        case = graph(seed, index, longest=8)
        if case is None or not all(isinstance(v, np.ndarray) and v.size for v in case.inputs.values()):
            continue
        exe = rammer.compile(case.model(), "rocm")
        try:
            inputs = {**case.inputs}
            exe.run(inputs)
            if not exe.hosted and all(s.compiled.rest is None for s in exe.cache.values()):
                yield exe, inputs
        except RammerError:
            continue
        finally:
            exe.close()


@pytest.mark.slow
def test_random_models_on_arrays_where_they_are(seed: int) -> None:
    placed = copied = 0
    cases = drawn(seed)
    for _ in range(5):
        exe, inputs = next(cases)
        copied += "copied" in "".join(check(exe, inputs, off=1))  # constant outputs are not copied
        placed += "copied" not in "".join(check(exe, inputs))
    assert placed and copied


@pytest.mark.slow
def test_turns_move_between_arrays_where_they_are(rng: np.random.Generator, seed: int) -> None:
    net = Net.random(rng, steps := int(rng.integers(8, 40)))
    exe = rammer.compile(net.model(np.random.default_rng(seed)), "rocm")
    chunks = ChunkRecurrent(int(rng.integers(2, steps)), int(rng.integers(2, 9)))
    exe.compiler.passes = tuple(chunks if isinstance(p, ChunkRecurrent) else p for p in default_passes())
    assert not check(exe, net.inputs(rng))
    (special,) = exe.cache.values()
    assert any(p.repeat for p in special.compiled.programs)
    exe.close()


def test_room_is_what_an_array_has(rng: np.random.Generator) -> None:
    room, size, tail = HostRoom(64, 128), int(rng.integers(2, 300)), int(rng.integers(100, 160))
    memory = np.frombuffer(bytearray(size + tail + 64), np.uint8)
    start = -memory.ctypes.data % 64
    known = memory.nbytes - start - size
    assert room.has(memory[start : start + size]) == (known >= 128)
    assert not room.has(memory[start + 1 : start + size + 1]) and not room.has(memory[start : start + size : 2][:0])
    assert HostRoom(1, known).has(memory[start : start + size]) and not HostRoom(1, known + 1).has(memory[start : start + size])
    made = room.zeros((3, size), "int16")
    assert room.has(made) and not room.has(made.T) and not room.has(np.zeros(size, "int16"))

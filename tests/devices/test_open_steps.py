"""Recurrent layers with a dynamic number of steps: the table of one chunk runs as often as the run's length requires."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from recurrent_models import Net

import rammer
from rammer.compiled.artifact import save_artifact
from rammer.compiled.segments import Compiled
from rammer.frontend.loops.loop_chunk import best_steps
from rammer.ir.extent import AffineExtent
from rammer.ir.parts import Move, Repeat
from rammer.ir.program import RProgram
from rammer.passes.loops.chunk_recurrent import MOST_TURN
from rammer.verify.verifier import VerifyError, verify
from rammer_testing.host_c import COMPILER
from rammer_testing.nonempty import some
from rammer_testing.peer_process import PeerSession

from rammer_cuda.bound import BITS, RepeatedLaunch, make_move_table
from rammer_cuda.device import device_source

DEVICES = ["ipu_sim", "rocm", pytest.param("cuda", marks=pytest.mark.cuda)]
OPTIONS = {"ipu_sim": {"tiles": "16"}}


def opened(net: Net, batch: bool, plain: bool = False) -> onnx.ModelProto:
    """Return a net whose steps, and perhaps batch, are open."""
    proto = net.model(np.random.default_rng(3), plain)
    for value in proto.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name == "x":
            dims[net.layout].dim_param = "seq"
        if batch:
            dims[1 - net.layout if value.name == "x" else 0 if net.layout or value.name == "lens" else 1].dim_param = "batch"
    return proto


def session(proto: onnx.ModelProto) -> PeerSession:
    return PeerSession(proto)


def agree(found: dict[str, np.ndarray], reference: PeerSession, inputs: dict[str, np.ndarray], what: object) -> None:
    for output, want in zip(reference.get_outputs(), reference.run(None, inputs), strict=True):
        np.testing.assert_allclose(found[output.name], want, atol=3e-5, err_msg=f"{output.name} of {what}")


def turning(compiled: Compiled) -> RProgram:
    return next(p for p in compiled.programs if p.repeat is not None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
def test_random_layers_at_random_lengths(device: str, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]) -> None:
    """Check a few ranges, each compiled once, with a variable batch in some cases."""
    net, batch = Net.random(rng, 1), bool(rng.integers(2))
    low, high = 1, int(rng.integers(9, 17))
    spans: dict[str, tuple[int, int]] = {"seq": (low, high), **({"batch": (1, 3)} if batch else {})}
    exe = rammer.compile(opened(net, batch), device, shapes=spans, options=OPTIONS.get(device))
    reference = session(opened(net, batch, plain=True))
    for steps in (high, low, *rng.integers(high // 2 + 1, high + 1, 4)):
        drawn = replace(net, steps=int(steps), batch=int(rng.integers(2, 4)) if batch else net.batch)
        inputs = drawn.inputs(rng)
        agree(exe.run(inputs), reference, inputs, drawn)
    assert 2 <= len(exe.cache) <= 3 and not capsys.readouterr().err
    for special in some([s for s in exe.cache.values() if s.compiled.ranged is not None]):  # one step alone needs no range
        assert not special.host_nodes and turning(special.compiled).repeat.until is not None
    exe.close()


@pytest.mark.slow
def test_every_length_of_a_small_range_meets_no_poison(rng: np.random.Generator) -> None:
    """Check on the simulator, where elements past the length and elements that were not moved are NaN."""
    net = Net("GRU", 1, direction="bidirectional", layers=1, lens=True, states=True)
    exe = rammer.compile(opened(net, True), "ipu_sim", shapes={"seq": (7, 12), "batch": (1, 3)}, options=OPTIONS["ipu_sim"])
    reference = session(opened(net, True))
    for steps in range(7, 13):
        for batch in (1, 2, 3):
            inputs = replace(net, steps=steps, batch=batch).inputs(rng)
            agree(exe.run(inputs), reference, inputs, (steps, batch))
    (special,) = exe.cache.values()
    assert turning(special.compiled).repeat.count > 1
    exe.close()


@pytest.mark.slow
@pytest.mark.parametrize("most", [30, pytest.param(5000, marks=pytest.mark.large)])
def test_many_lengths_are_few_programs(most: int, rng: np.random.Generator) -> None:
    """Check that the longest program is not larger than others: a chunk has at most 64 steps."""
    net = Net("LSTM", 1)
    exe, reference = rammer.compile(opened(net, False), "rocm", shapes={"seq": (1, most)}), session(opened(net, False))
    for steps in (1, most, *rng.integers(1, most + 1, 20 if most < 100 else 100)):
        inputs = replace(net, steps=int(steps)).inputs(rng)
        agree(exe.run(inputs), reference, inputs, steps)
    assert len(exe.cache) <= 5
    ranged = [s.compiled for s in exe.cache.values() if s.compiled.ranged is not None]  # one step alone needs no range
    assert max(turning(c).task_count for c in ranged) <= 64 * 3
    assert all(c.programs[0].repeat is not None for c in some(ranged)), "a turn counts its steps itself"
    exe.close()


def test_lengths_that_nobody_gave_are_found(rng: np.random.Generator) -> None:
    net = Net("RNN", 1)
    exe, reference = rammer.compile(opened(net, False), "rocm"), session(opened(net, False))
    for steps in (9, 11, 14, 17, 12):
        inputs = replace(net, steps=steps).inputs(rng)
        agree(exe.run(inputs), reference, inputs, steps)
    assert [s.compiled.ranged is None for s in exe.cache.values()].count(False) == 1 and len(exe.cache) == 2
    exe.close()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_bound_calls_and_files(device: str, rng: np.random.Generator, tmp_path: Path) -> None:
    net = Net("LSTM", 1, direction="reverse", states=True)
    exe, reference = rammer.compile(opened(net, False), device, shapes={"seq": (1, 14)}), session(opened(net, False))
    save_artifact(tmp_path / "net.rammer", exe.artifact(exe.compile_whole({})))
    exe.close()
    exe = rammer.compile(tmp_path / "net.rammer", device)
    whole = replace(net, steps=14).inputs(rng)
    bound = exe.bind(whole)
    for steps in (14, 3, 9):
        inputs = replace(net, steps=steps).inputs(rng)
        agree(exe.run(inputs), reference, inputs, steps)
        bound.write(inputs)
        bound.run(seq=steps)
        agree(bound.to_host(), reference, inputs, steps)
    bound.close()
    exe.close()


@pytest.fixture(scope="module")
def program() -> RProgram:
    """Return a layer in reverse direction, up to 11 steps."""
    net = Net("LSTM", 1, direction="reverse", states=True)
    exe = rammer.compile(opened(net, False), "ipu_sim", shapes={"seq": (6, 11)}, options=OPTIONS["ipu_sim"])
    return turning(exe.compile_only({}))


def test_the_text_tells_until_when(program: RProgram) -> None:
    repeat = program.repeat
    assert RProgram.parse(str(program)) == program
    assert f"\n  repeat {repeat.count} iterations of {repeat.step} until length_seq\n" in str(program)
    turns = [program.turns_at(lambda _, n=n: n) for n in (-5, 0, 1, repeat.step, repeat.step + 1, 11, 10**9)]
    assert turns == [1, 1, 1, 1, 2, repeat.count, repeat.count]


def test_faults_of_open_turns_are_found(program: RProgram) -> None:
    """Check a chunk more or less, other steps, an invalid length, and slices of the whole that omit elements."""
    verify(program)
    repeat = program.repeat
    faults = [replace(repeat, count=n) for n in (0, repeat.count - 1, repeat.count + 1)]
    faults += [replace(repeat, step=n) for n in (0, repeat.step - 1, repeat.step + 1)]
    faults += [replace(repeat, until=None), replace(repeat, until=AffineExtent((("x", 1),), 0))]
    faults.append(replace(repeat, until=AffineExtent((("length_seq", 1 << 60),), 0)))
    moved = [(i, m) for i, m in enumerate(repeat.moves) if m.target_by or m.source_by]
    assert len(moved) > 2
    for i, move in moved:
        wrong = [replace(move, size=move.size - 1), replace(move, source_first=move.source_first + 10**6)]
        wrong += [replace(move, target_first=move.target_first + 1)]
        faults += [replace(repeat, moves=(*repeat.moves[:i], w, *repeat.moves[i + 1 :])) for w in wrong]
    for fault in faults:
        with pytest.raises(VerifyError):
            verify(replace(program, repeat=fault))


def test_turns_leave_out_what_is_beyond() -> None:
    """Check that slices of whole chunks, from either side, are the first ones in memory.

    The last slice may end with its buffer."""
    ahead, back = Move("before", "t", 0, 0, "x", 0, 4, 4), Move("before", "t", 0, 0, "x", 8, -4, 4)
    for turns in (1, 2, 3):
        skipped = 3 - turns
        begins = [(m.part(k, skipped, 4, 10)[1:]) for m in (ahead, back) for k in range(turns)]
        want = [(4 * k, min(4, 10 - 4 * k)) for k in range(turns)]
        assert begins == want + want[::-1]


@pytest.mark.parametrize("between", [2, 4])
def test_turns_have_as_many_steps_as_pay(between: int) -> None:
    for least, most in ((1, 1), (1, 8), (5, 9), (33, 64), (313, 625), (2501, 5000), (1, 10**6)):
        turn = best_steps(MOST_TURN, least, most, between)
        assert 1 <= turn <= min(64, most) and -(-most // turn) * turn < most + turn
    assert best_steps(MOST_TURN, 2501, 5000, 2) == 64 and best_steps(MOST_TURN, 1, 8, 2) < 8


class OnHost(RepeatedLaunch):
    """A cuda device's launches with the kernel of moves run on the host: ``seen`` is each chunk's buffer."""

    def __init__(self, program: RProgram, buffers: dict[str, np.ndarray], run: Callable[..., None]) -> None:
        placed = {n: SimpleNamespace(data=SimpleNamespace(ptr=a.ctypes.data)) for n, a in buffers.items()}
        self.inner, self.resident = SimpleNamespace(launch=self._turn), SimpleNamespace(program=program, buffers=placed)
        self.rows, self.run, self.buffers = make_move_table(self.resident)[0], run, buffers
        self.seen = list[list[float]]()

    def length(self, tensor: str, stream: int) -> int:
        return int(self.buffers[tensor][0])

    def _turn(self, stream: int) -> None:
        self.seen.append(self.buffers["t"].tolist())
        self.buffers["u"][:] = self.buffers["t"] * 2

    def move(self, turn: int, whens: int, stream: int) -> None:
        for row in range(len(self.rows)):
            self.run(self.rows.ctypes.data, row, turn, whens, self.skipped)


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_cuda_moves_the_same(tmp_path: Path) -> None:
    """Check the kernel of moves on the host, launched for 3 chunks of 4 elements, of which 10 exist."""
    shim = """#include <algorithm>
#define __global__
#define __device__
#define __forceinline__ inline
using std::min;
struct int4 { int a[4]; };
struct Place { unsigned x = 0, y = 0; } blockIdx, blockDim, threadIdx, gridDim;
"""
    entry = """extern "C" void entry(const RmMove *table, int row, int turn, int whens, int skipped) {
  blockIdx.y = row; blockDim.x = gridDim.x = 1;
  rm_moves(table, turn, whens, skipped);
}
"""
    kernel = device_source("moves").replace("min(move.bytes", "min<long long>(move.bytes")
    (tmp_path / "moves.cpp").write_text(shim + kernel + entry)
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", "-o", tmp_path / "moves.so", tmp_path / "moves.cpp"], check=True)
    run = ctypes.CDLL(str(tmp_path / "moves.so")).entry
    run.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 4]
    for by, first in ((4, 0), (-4, 8)):
        moves = (Move("before", "t", 0, 0, "x", first, by, 4), Move("after", "y", first, by, "u", 0, 0, 4))
        buffers = {"t": 4, "u": 4, "x": 10, "y": 10, "n": 1}
        program = SimpleNamespace(
            repeat=Repeat(3, moves, AffineExtent((("n", 1),), 0), 4),
            buffer={n: SimpleNamespace(size=size, dtype="float32") for n, size in buffers.items()},
            turns=3,
        )
        program.turns_at = program.repeat.turns
        for length in (10, 8, 5, 1):
            held = {n: np.zeros(size, np.float32) for n, size in buffers.items()}
            held["x"][:], held["n"][:] = np.arange(10), length
            launches = OnHost(program, held, run)
            launches.launch(0)
            turns = -(-length // 4)
            want = held["x"][: 4 * turns] * 2
            np.testing.assert_array_equal(held["y"], np.concatenate([want, np.zeros(10 - len(want), np.float32)]))
            assert len(launches.seen) == turns and BITS["before"]

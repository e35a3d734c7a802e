"""Loop programs: long recurrences on every device, the proof of the seam between iterations, and its faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recurrent_models import Net

import rammer
from rammer.compiled.artifact import save_artifact
from rammer.compiled.segments import Compiled, ProgramSegment
from rammer.errors import DeviceFailure
from rammer.ir.program import Move, Repeat, RProgram
from rammer.passes.loops.chunk_recurrent import ChunkRecurrent
from rammer.passes.pass_pipeline import default_passes
from rammer.runtime.executable import Executable
from rammer.runtime.loaded_model import load_segments
from rammer.verify.verifier import VerifyError, verify
from rammer_testing.nonempty import some
from rammer_testing.peer_process import PeerSession

from rammer_ipu_sim.chip import configure_chip
from rammer_ipu_sim.executor import LoadedProgram

DEVICES = ["ipu_sim", "rocm", "toy", pytest.param("cuda", marks=pytest.mark.cuda)]
OPTIONS = {"ipu_sim": {"tiles": "16"}}


def opened(net: Net, seed: int, device: str, most: int, turn: int) -> Executable:
    """Return a net whose layers become loops already at short lengths."""
    exe = rammer.compile(net.model(np.random.default_rng(seed)), device, options=OPTIONS.get(device))
    exe.compiler.passes = tuple(ChunkRecurrent(most, turn) if isinstance(p, ChunkRecurrent) else p for p in default_passes())
    return exe


def agree(net: Net, seed: int, inputs: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> None:
    """Compare the results with ONNX Runtime."""
    proto = net.model(np.random.default_rng(seed), plain=True)
    session = PeerSession(proto)
    for output, want in zip(proto.graph.output, session.run(None, inputs), strict=True):
        np.testing.assert_allclose(found[output.name], want, atol=3e-5, err_msg=f"{output.name} of {net}")


def repeating(compiled: Compiled) -> list[ProgramSegment]:
    return [s for s in compiled.segments if isinstance(s, ProgramSegment) and s.program.repeat is not None]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
def test_random_layers_in_random_turns(device: str, rng: np.random.Generator, seed: int) -> None:
    """Check devices that repeat programs, and one whose iterations the host runs."""
    net = Net.random(rng, steps := int(rng.integers(8, 40)))
    exe = opened(net, seed, device, int(rng.integers(2, steps)), int(rng.integers(2, 9)))
    for _ in range(2):
        inputs = net.inputs(rng)
        agree(net, seed, inputs, exe.run(inputs))
    (special,) = exe.cache.values()
    assert bool(repeating(special.compiled)) == (device != "toy") and (device == "toy") == bool(special.host_nodes)
    exe.close()


@pytest.fixture(scope="module")
def rolled() -> ProgramSegment:
    """Return two layers of LSTM, 24 steps in 4 chunks of 6."""
    net = Net("LSTM", 24, layers=2, states=True, direction="reverse")
    exe = opened(net, 0, "ipu_sim", 12, 6)
    (found,) = repeating(exe.compile_only({}))
    return found


def test_the_text_tells_all(rolled: ProgramSegment) -> None:
    program = rolled.program
    again = RProgram.parse(str(program))
    assert again == program and again.digest == program.digest and "\n  repeat 4 iterations\n" in str(program)
    assert replace(program, repeat=None).digest != program.digest
    assert {m.when for m in program.repeat.moves} == {"first", "before", "after", "last"}


def changed(move: Move) -> list[Move]:
    """Return the move with one fault, for every kind of fault."""
    result = [replace(move, size=move.size - 1), replace(move, target_first=move.target_first + 1)]
    result += [replace(move, source_first=move.source_first + 10**6), replace(move, target=move.source)]
    result += [replace(move, source_by=move.source_by + 10**6), replace(move, source="nothing")]
    result += [replace(move, target_by=move.target_by + (1 if move.target_by else move.size))]
    if move.when in ("before", "after"):
        result += [replace(move, when="last" if move.when == "before" else "before")]
    return result


def test_faults_at_the_seam_are_found(rolled: ProgramSegment) -> None:
    """Check every move omitted, repeated or with one fault, and one iteration more or less."""
    program, moves = rolled.program, rolled.program.repeat.moves
    verify(program)
    faults = [Repeat(n, moves) for n in (0, 3, 5)]
    for i, move in enumerate(moves):
        faults.append(Repeat(4, (*moves[:i], *moves[i + 1 :])))
        faults.append(Repeat(4, (*moves, move)))
        faults += [Repeat(4, (*moves[:i], wrong, *moves[i + 1 :])) for wrong in changed(move)]
    for fault in faults:
        with pytest.raises(VerifyError):
            verify(replace(program, repeat=fault))
    assert len(faults) > 90


@pytest.mark.slow
def test_what_is_not_moved_shows_as_nan(rolled: ProgramSegment, rng: np.random.Generator) -> None:
    """Check that the simulator detects the same faults as the verifier: one move of each phase is omitted."""
    program, moves = rolled.program, rolled.program.repeat.moves
    inputs = {p.external: rng.standard_normal(program.types[p.tensor].shape).astype(np.float32) for p in program.inputs}
    chip = configure_chip({"tiles": "16"})
    whole = LoadedProgram(program, rolled.constants, chip).run(inputs).outputs
    assert not any(np.isnan(a).any() for a in some(whole.values()))
    for left_out in some({m.when: m for m in moves}.values()):
        less = replace(program, repeat=Repeat(4, tuple(m for m in moves if m is not left_out)))
        found = LoadedProgram(less, rolled.constants, chip).run(inputs).outputs
        assert any(np.isnan(a).any() for a in found.values()), left_out


@pytest.mark.slow
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_bound_calls_and_files(device: str, rng: np.random.Generator, tmp_path: Path) -> None:
    net = Net("GRU", 26, layers=2, states=True)  # 26 steps leave 2 over
    exe = opened(net, 5, device, 12, 8)
    compiled = exe.compile_only({})
    assert repeating(compiled)
    exe.adopt(compiled)
    inputs = net.inputs(rng)
    bound = exe.bind(inputs)
    for _ in range(2):
        bound.write(inputs := net.inputs(rng))
        bound.run()
        agree(net, 5, inputs, bound.to_host())
    bound.close()
    exe.close()
    save_artifact(tmp_path / "gru.rammer", exe.artifact(compiled))
    again = rammer.compile(tmp_path / "gru.rammer", device, options=OPTIONS.get(device))
    agree(net, 5, inputs, again.run(inputs))
    again.close()


def test_devices_that_do_not_repeat_are_told(rolled: ProgramSegment) -> None:
    exe = rammer.compile(Net("RNN", 3).model(np.random.default_rng(0)), "toy")
    with pytest.raises(DeviceFailure, match="is a loop program"):
        load_segments(exe.backend, Compiled(exe.compile_only({}).graph, (rolled,)))
    exe.close()

"""Ranges of lengths on the command line, and their programs on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from command import Command
from ranged_models import RANGED

from rammer import compile as open_model
from rammer.compiler.compiler import Compiler
from rammer.errors import BadInput
from rammer.ir.program import RProgram
from rammer_testing.cache_files import entries
from rammer_testing.nonempty import some

Array = np.ndarray


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(RANGED["causal"](np.random.default_rng(3)).proto, tmp_path / "causal.onnx")
    return tmp_path / "causal.onnx"


def test_commands_take_ranges(model: Path, rammer: Command) -> None:
    for command in (
        ["run", model, "--device", "toy", "--shape", "seq=1..9"],
        ["run", model, "--device", "toy", "--shape", "seq=1..9", "--shape", "x:2x7x3"],
        ["compare", model, "--device", "toy", "--shape", "seq=1..9", "--shape", "x:2x5x3"],
        ["bench", model, "--device", "toy", "--shape", "seq=1..9", "--shape", "x:2x6x3", "--duration", "0", "--iterations", "1"],
        ["compile", model, "--device", "toy", "--shape", "seq=1..9"],
    ):
        done = rammer(*command)
        assert done.code == 0, done.err
    done = rammer("inspect", model, "--device", "ipu_sim", "--stage", "program", "--shape", "seq=1..9")
    assert done.code == 0, done.err
    assert "skip" in done.out
    assert done.out.startswith("# length_seq is seq: seq=6..9 of seq=1..9, which takes 3 programs\n")
    (line,) = RProgram.parse(done.out).inputs[-1:]
    assert line.tensor == "length_seq"


@pytest.mark.parametrize(
    "said", ["seq=9..1", "seq=x+1", "other=1..9", "seq=1...9", "seq=a..b", "seq=-1..9", "=1..9", "seq=1..99999999999999999999"]
)
def test_what_is_no_range_is_bad_input(model: Path, said: str, rammer: Command) -> None:
    done = rammer("run", model, "--device", "toy", "--shape", said)
    assert done.code == 2, done.err
    assert "Traceback" not in done.err


def test_a_file_has_one_program_for_the_range(model: Path, tmp_path: Path, rammer: Command, rng: np.random.Generator) -> None:
    """Check runs and bound calls of the file: all lengths of the range, no others, and any values past the length."""
    path = tmp_path / "out.rammer"
    assert rammer("compile", model, "--device", "toy", "--shape", "seq=1..9", "-o", path).code == 0
    assert rammer("run", path, "--shape", "x:2x4x3").code == 0
    plain, exe = open_model(model, "toy"), open_model(path)
    assert [p.shape for p in exe.head.inputs] == [(2, "seq", 3)]
    bound = exe.bind({"x": np.full((2, 9, 3), np.nan, np.float32)})
    for length in (1, 4, 9):
        x = rng.standard_normal((2, length, 3)).astype(np.float32)
        expected = plain.run({"x": x})
        bound.write({"x": np.concatenate([x, np.full((2, 9 - length, 3), np.nan, np.float32)], 1)})
        bound.run(seq=length)
        for got in (exe.run({"x": x}), bound.to_host()):
            for name in some(expected):
                np.testing.assert_allclose(got[name], expected[name], 1e-5, 1e-6)
    assert len(exe.cache) == 1
    with pytest.raises(BadInput, match=r"seq=1\.\.9"):
        exe.run({"x": np.zeros((2, 10, 3), np.float32)})
    exe.close()
    plain.close()


def test_kept_programs_are_no_files_of_ones_own(model: Path, rammer: Command, own_cache: Path) -> None:
    assert rammer("run", model, "--device", "toy", "--shape", "seq=1..9").code == 0
    for kept in some(entries(own_cache, "programs")):
        done = rammer("run", kept)
        assert done.code == 2, done.err
        assert "range" in done.err


def test_programs_of_ranges_are_kept(
    model: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Check that a second process compiles nothing unless its range differs, and that a damaged file is rewritten."""
    x = rng.standard_normal((2, 7, 3)).astype(np.float32)
    compiled = list[object]()
    honest = Compiler.compile_range
    monkeypatch.setattr(Compiler, "compile_range", lambda *given, **named: compiled.append(given) or honest(*given, **named))

    def run(shapes: dict[str, tuple[int, int]]) -> Array:
        exe = open_model(model, "toy", shapes=shapes)
        result = exe.run({"x": x})["sums"]
        exe.close()
        return result

    first = run({"seq": (1, 9)})
    assert len(compiled) == 1
    np.testing.assert_array_equal(run({"seq": (1, 9)}), first)
    assert len(compiled) == 1
    run({"seq": (1, 8)})
    assert len(compiled) == 2
    for path in some(entries(own_cache, "programs")):
        data = path.read_bytes()
        path.write_bytes(data.replace(b'"ranged"', b'"RANGED"'))
    np.testing.assert_array_equal(run({"seq": (1, 9)}), first)
    assert len(compiled) == 3

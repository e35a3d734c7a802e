"""Loop programs in a single launch: all iterations, and tasks that copy after the last step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import rammer
from rammer.codegen.skip_unchanged import rest_of
from rammer.ir.program import RProgram
from rammer_testing.nonempty import some
from rammer_testing.peer_process import PeerSession

from rammer_rocm import source
from rammer_rocm.repeat import MOVE_WORDS, TIMES, Seam, move_table

UNITS, BATCH = 6, 3


def layers(kind: str, both: bool, lens: bool) -> onnx.ModelProto:
    """Return a layer of ``kind`` over ``seq`` steps. With ``lens``, each sequence has a separate length."""
    gates, ways = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], 1 + both
    draw = np.random.default_rng(1)
    shapes = {"w": (ways, gates * UNITS, UNITS), "r": (ways, gates * UNITS, UNITS), "b": (ways, 2 * gates * UNITS)}
    known = [numpy_helper.from_array((draw.standard_normal(s) / 2).astype(np.float32), n) for n, s in shapes.items()]
    ports = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["seq", BATCH, UNITS])]
    ports += [helper.make_tensor_value_info("lens", TensorProto.INT32, [BATCH])] * lens
    ends = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["seq", ways, BATCH, UNITS])]
    ends += [helper.make_tensor_value_info("h", TensorProto.FLOAT, [ways, BATCH, UNITS])]
    more = {"linear_before_reset": 1} if kind == "GRU" else {}
    direction = "bidirectional" if both else "forward"
    inputs = ["x", "w", "r", "b", "lens" if lens else ""]
    node = helper.make_node(kind, inputs, ["y", "h"], hidden_size=UNITS, direction=direction, **more)
    graph = helper.make_graph([node], "layers", ports, ends, known)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def inputs_of(rng: np.random.Generator, steps: int, lens: bool) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {"x": rng.standard_normal((steps, BATCH, UNITS)).astype(np.float32)}
    return {**found, "lens": rng.integers(1, steps + 1, BATCH).astype(np.int32)} if lens else found


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("executor", ["single", "waves"])
@pytest.mark.parametrize(("kind", "both", "lens"), [("LSTM", False, True), ("GRU", True, False), ("RNN", True, True)])
def test_every_length_by_one_launch(
    kind: str, both: bool, lens: bool, executor: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check also groups that exit instead of waiting, after which the host relaunches at the stopped iteration. Previous memory
    content does not matter."""

    if rng.integers(2):
        monkeypatch.setattr(source, "PATIENCE", int(rng.integers(3)))
    model, most = layers(kind, both, lens), 11
    exe = rammer.compile(model, "rocm", shapes={"seq": (5, most)}, options={"executor": executor})
    reference = PeerSession(model)
    for steps in (*rng.permutation(np.arange(5, most + 1)), most):
        given = inputs_of(rng, int(steps), lens)
        (loaded,) = (p for p in exe.prepare(given).loaded.values() if p.program.repeat is not None)
        loaded.poison()
        for want, have in zip(reference.run(None, given), exe.run(given).values(), strict=True):
            np.testing.assert_allclose(have, want, atol=2e-5, err_msg=f"{kind} of {steps} steps")
    assert (loaded.kernels == 1) == (executor == "single") and loaded.program.turns > 1
    exe.close()


def turn_of(kind: str, both: bool) -> RProgram:
    exe = rammer.compile(layers(kind, both, False), "rocm", shapes={"seq": (5, 40)})
    compiled = exe.compile_only({})
    (found,) = (p for p in compiled.programs if p.repeat is not None)
    exe.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_steps_that_are_not_left_copy(kind: str) -> None:
    """Check that each step of an iteration is one kernel, which can rest. Fixed numbers of steps always compute."""
    program = turn_of(kind, True)
    cells = [o for o in program.operators if rest_of(o) is not None]
    assert len(cells) == 2 * program.repeat.step
    assert len({o.connections[0].layer for o in some(cells)}) == 1
    bodies = {str(replace(c, name="c", body=rest_of(o).test)) for o in cells for c in o.computes[-1:]}
    assert len(bodies) == len(cells), "each asks about its own step"
    exe = rammer.compile(layers(kind, True, False), "rocm")
    static = exe.compile_only({"x": (9, BATCH, UNITS)})
    assert not any(rest_of(o) for p in some(static.programs) for o in p.operators)
    exe.close()


def test_a_table_of_moves_is_what_the_host_would_copy(rng: np.random.Generator) -> None:
    """Check every iteration of every trip count, where slices run backwards and end with their buffers."""
    program = turn_of("LSTM", True)
    places = {b.name: int(n) for n, b in zip(1000 * rng.permutation(len(program.buffers)), program.buffers, strict=True)}
    table, most = move_table(program, places), program.turns
    starts, rows = table[: len(TIMES) + 1], table[len(TIMES) + 1 :].reshape(-1, MOVE_WORDS)
    for when, (first, last) in some(list(zip(TIMES, pairwise(starts), strict=True))):
        for count in range(1, most + 1):
            for turn in range(count):
                found = [in_kernel(row, turn, most - count) for row in rows[first:last]]
                copies = Seam(program, places).copies(when, turn, count)
                want = [(to + turn * on, source + turn * by, size) for to, source, on, by, size in copies]
                if when in ("once", "first", "last"):
                    want = [(to, begin, size) for to, begin, _, _, size in copies]
                assert [f for f in found if f[2] > 0] == want, (when, turn, count)


def in_kernel(row: np.ndarray, turn: int, skipped: int) -> tuple[int, int, int]:
    """Return the copy of ``rm_move``: destination, source and number of bytes."""
    to, on, begin, by, size, to_end, end = (int(n) for n in row)
    to, begin = to + (turn + (on < 0) * skipped) * on, begin + (turn + (by < 0) * skipped) * by
    return to, begin, min(size, to_end - to, end - begin)

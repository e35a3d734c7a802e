"""Single-operator programs for measuring: constants stay constant, and rows are long enough for the clock."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from rammer.device.manifest import Array, Binding, RunResult
from rammer.ir.compute import Axis, Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.expr import Load, Op, Ref
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram, Storage
from rammer.ir.types import TensorType
from rammer.runtime.host_memory import HostMemory, buffer_image, is_whole_buffer, storage_view
from rammer.tuning.kernel_probe import LONGEST_ROW, SPAN, probe_program, random_inputs, task_times
from rammer_testing.nonempty import some

#: A constant that is a transposed view with offset 11.
TURNED = Storage("w", "all", 11, (4, 6), (1, 4))


def scaled() -> tuple[ROperator, Binding]:
    """Make ``y = x * w`` over 4 x 6, one row per task."""
    axes, point = (Axis("i", 4), Axis("j", 6)), (Ref("i"), Ref("j"))
    y = Compute("y", "float32", axes, Op("mul", (Load("x", point), Load("w", point))))
    kinds = dict.fromkeys("xwy", TensorType("float32", (4, 6)))
    places = {n: Storage(n, n, 0, (4, 6), (6, 1)) for n in "xy"} | {"w": TURNED}
    return ROperator("y", (y,), (), ("y",), (1, 6)), Binding(kinds, places, frozenset("w"))


class Clocked:
    """A program whose tasks each take ``seconds`` by its clock."""

    def __init__(self, program: RProgram, seconds: float) -> None:
        self.longest, self.seconds = max(len(row) for row in program.rows), seconds

    def run(self, inputs: Mapping[str, Array]) -> RunResult:
        return RunResult({}, self.longest * self.seconds)

    def close(self) -> None:
        pass


def test_a_strided_constant_is_a_constant(rng: np.random.Generator) -> None:
    operator, binding = scaled()
    program, constants = probe_program(operator, binding, 4)
    assert {b.name: b.kind for b in program.buffers} == {"b_x": "input", "b_w": "constant", "b_y": "output"}
    assert constants.keys() == {"w"} and program.storage["w"].strides == TURNED.strides
    assert Binding.of(program, constants).key(operator) == binding.key(operator)
    memory, inputs = HostMemory(program, constants), random_inputs(program, rng)
    memory.write_inputs(inputs)
    for index in range(4):
        memory.run_task(operator, index)
    want = evaluate_compute(operator.anchor, {"x": inputs["x"], "w": constants["w"]})
    np.testing.assert_array_equal(memory.read_outputs()["y"], want)


def test_a_buffer_has_the_values_where_the_tensor_is() -> None:
    operator, binding = scaled()
    program, constants = probe_program(operator, binding, 4)
    for name, dense in (("w", False), ("x", True)):
        storage = program.storage[name]
        buffer = program.buffer[storage.buffer]
        values = constants["w"] if name == "w" else np.arange(24, dtype=np.float32).reshape(4, 6)
        assert is_whole_buffer(storage, buffer) == dense
        flat = buffer_image(storage, buffer, values)
        assert flat.shape == (buffer.size,)
        np.testing.assert_array_equal(storage_view(flat, storage), values)
        assert np.count_nonzero(flat) == np.count_nonzero(values), "nothing between the elements"


@pytest.mark.parametrize("seconds", [1e-8, 3e-6, 1e-3])
def test_rows_are_long_enough_for_a_clock(seconds: float) -> None:
    operator, binding = scaled()
    loaded = list[RProgram]()

    def load(program: RProgram, constants: Mapping[str, Array]) -> Clocked:
        assert constants.keys() == {"w"}
        loaded.append(program)
        return Clocked(program, seconds)

    assert task_times(load, operator, binding, 8) == pytest.approx((seconds, seconds))  # type: ignore[arg-type]
    busy = [sum(bool(row) for row in p.rows) for p in loaded]
    assert set(busy) == {1, 8} and all(len(p.rows) == 8 for p in some(loaded))
    for rows in (1, 8):
        longest = max(len(p.rows[0]) for p, n in zip(loaded, busy, strict=True) if n == rows)
        assert longest * seconds >= SPAN * 0.999 or longest == LONGEST_ROW
    (whole,) = (p for p, n in zip(loaded, busy, strict=True) if n == 1 and len(p.rows[0]) == 4)
    assert [t.index for t in whole.rows[0]] == [0, 1, 2, 3], "all tasks, before any again"


def test_an_operator_without_tasks_is_measured_without_any() -> None:
    axes = (Axis("i", 0),)
    y = Compute("y", "float32", axes, Load("x", (Ref("i"),)))
    binding = Binding(dict.fromkeys("xy", TensorType("float32", (0,))), {n: Storage(n, n, 0, (0,), (1,)) for n in "xy"})
    program, _ = probe_program(ROperator("y", (y,), (), ("y",), (1,)), binding, 2)
    assert program.rows == ((), ())

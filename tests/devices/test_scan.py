"""Long running sums on every device: cut in blocks, with a minimal number of operations, and right."""

from __future__ import annotations

import math

import numpy as np
import pytest
from onnx import parser

import rammer
from rammer_testing.net import Net
from rammer_testing.nonempty import some

DEVICES = ["ipu_sim", "rocm", "toy", pytest.param("cuda", marks=pytest.mark.cuda)]
SHAPES = [((3, 1009), 1), ((130, 5), 0), ((2, 96, 7), 1)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
def test_long_running_sums_are_right_and_not_quadratic(device: str, rng: np.random.Generator) -> None:
    net, expected, inputs = Net((), rng), {}, {}
    for shape, axis in SHAPES:
        for reverse in (0, 1):
            exclusive = int(rng.integers(2))
            x = net.input(*shape)
            y = net.node("CumSum", x, net.constant(np.array(axis, np.int64)), reverse=reverse, exclusive=exclusive)
            net.outputs.append(y)
            inputs[x] = rng.standard_normal(shape).astype(np.float32)
            row = np.flip(inputs[x], axis) if reverse else inputs[x]
            total = np.cumsum(row.astype(np.float64), axis)
            total = total - row if exclusive else total
            expected[y] = np.flip(total, axis) if reverse else total
    exe = rammer.compile(net.model(net.node("Neg", next(iter(expected)))), device)
    found = exe.run(inputs)
    for name, total in some(expected.items()):
        assert np.linalg.norm(found[name] - total) <= 1e-5 * np.linalg.norm(total), name
    (special,) = exe.cache.values()
    programs = [s.program for s in special.compiled.segments]
    points = sum(c.points for p in programs for o in p.operators for c in o.computes)
    assert points < 2 * 60 * sum(math.prod(shape) for shape, _ in SHAPES)  # a row of 1009 alone would be 1009 times as many


@pytest.mark.slow
@pytest.mark.sampled(1, of="device")
@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("device", DEVICES)
def test_running_sums_of_open_rows_are_right_and_not_quadratic(device: str, number: int, rng: np.random.Generator) -> None:
    """Check sums over computed values, with any data past the length, and with a sum of the result."""
    rank, most = int(rng.integers(1, 4)), int(rng.integers(200, 400))
    axis, op = int(rng.integers(0, rank)), str(rng.choice(["CumSum", "CumProd"]))
    reverse, exclusive = (bool(n) for n in rng.integers(0, 2, 2))
    shape = [int(n) for n in rng.integers(1, 4, rank)]
    dims = ["n" if d == axis else str(extent) for d, extent in enumerate(shape)]
    proto = parser.parse_model(f"""<ir_version: 11, opset_import: ["" : 26]>
        running (float[{", ".join(dims)}] x) => (float[{", ".join(dims)}] y, float[{", ".join(dims)}] z, float s) {{
            axis = Constant <value_int = {axis}> ()
            e = Exp (x)  y = {op} <reverse = {int(reverse)}, exclusive = {int(exclusive)}> (e, axis)
            z = Tanh (y)  s = ReduceSum <keepdims = 0> (y)
        }}""")
    exe = rammer.compile(proto, device, shapes={"n": (1, most)}, options={"tiles": "16"} if device == "ipu_sim" else {})
    for steps in (most, 1, int(rng.integers(2, most))):
        x = rng.uniform(-0.01, 0.01, [steps if d == axis else n for d, n in enumerate(shape)]).astype(np.float32)
        row = np.moveaxis(np.flip(np.exp(x), axis) if reverse else np.exp(x), axis, 0).astype(np.float64)
        first = np.full_like(row[:1], op == "CumProd")
        row = np.concatenate([first, row[:-1]]) if exclusive else row
        want = np.moveaxis(np.cumsum(row, 0) if op == "CumSum" else np.cumprod(row, 0), 0, axis)
        want = np.flip(want, axis) if reverse else want
        found = exe.run({"x": x})
        np.testing.assert_allclose(found["y"], want, 1e-4, 1e-5)
        np.testing.assert_allclose(found["z"], np.tanh(want), 1e-4, 1e-5)
        np.testing.assert_allclose(found["s"], want.sum(), 1e-4)
    for special in some(exe.cache.values()):
        assert special.compiled.ranged is not None
        high = special.compiled.ranged.spans["n"][1]
        points = sum(c.points for p in special.compiled.programs for o in p.operators for c in o.computes)
        assert points < 80 * high * math.prod(shape) / shape[axis]
    exe.close()

"""Random small models of data-movement operators: views of views, of constants and of inputs, shared by their readers."""

from __future__ import annotations

import math
import sys
import time
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import model, tensor

from rammer.compile_options import CompileOptions
from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer.frontend.read.reader import read_model
from rammer.jit.onnx_source import open_source
from rammer.reference.outputs import expected_outputs
from rammer.runtime.executable import Executable
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.accuracy import TOLERANCE

Shape = tuple[int, ...]


class ViewModel:
    """A model that is built node by node. Values are float32 with at most ``LARGEST`` elements and four axes."""

    LARGEST = 400

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.shapes: dict[str, Shape] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self.inputs: list[str] = []
        for _ in range(rng.randint(1, 2)):
            self.inputs.append(self.named(self.some_shape()))
        for _ in range(rng.randint(0, 2)):
            self.constant(np.random.default_rng(rng.randrange(1 << 30)).standard_normal(self.some_shape()).astype(np.float32))

    def some_shape(self) -> Shape:
        return tuple(self.rng.choice((1, 1, 2, 3, 4)) for _ in range(self.rng.randint(1, 4)))

    def named(self, shape: Shape) -> str:
        name = f"v{len(self.shapes)}"
        self.shapes[name] = shape
        return name

    def constant(self, value: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        if value.dtype == np.float32:
            self.shapes[name] = value.shape
        return name

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def add(self, op: str, inputs: list[str], *shapes: Shape, **attributes: Any) -> list[str]:
        names = [self.named(s) for s in shapes]
        self.nodes.append(helper.make_node(op, inputs, names, name=f"node{len(self.nodes)}", **attributes))
        return names

    def step(self) -> None:
        """Append one node that fits the existing values."""
        x = self.rng.choice(list(self.shapes))
        kinds = (
            self.expand,
            self.slice,
            self.transpose,
            self.reshape,
            self.concat,
            self.split,
            self.unsqueeze,
            self.squeeze,
            self.gather,
            self.map,
            self.pair,
            self.product,
            self.reduce,
            self.pad,
            self.lstm,
            self.tile,
        )
        self.rng.choice(kinds)(x, self.shapes[x])

    def expand(self, x: str, shape: Shape) -> None:
        front = (self.rng.choice((2, 3)),) if len(shape) < 4 and self.rng.random() < 0.5 else ()
        target = (*front, *(self.rng.choice((1, 2, 3)) if n == 1 else n for n in shape))
        if math.prod(target) <= self.LARGEST:
            self.add("Expand", [x, self.ints(*target)], target)

    def slice(self, x: str, shape: Shape) -> None:
        axis = self.rng.randrange(len(shape))
        n, step = shape[axis], self.rng.choice((1, 1, 2, -1))
        low = self.rng.randrange(n)
        high = self.rng.randint(low + 1, n)
        span = range(low, high, step) if step > 0 else range(high - 1, low - 1, -1)
        start, end = (low, high) if step > 0 else (high - 1, low - 1 if low else -n - 1)
        target = (*shape[:axis], len(span), *shape[axis + 1 :])
        self.add("Slice", [x, self.ints(start), self.ints(end), self.ints(axis), self.ints(step)], target)

    def transpose(self, x: str, shape: Shape) -> None:
        perm = self.rng.sample(range(len(shape)), len(shape))
        self.add("Transpose", [x], tuple(shape[p] for p in perm), perm=perm)

    def reshape(self, x: str, shape: Shape) -> None:
        left, target = math.prod(shape), list[int]()
        while left > 1 and len(target) < 3:
            part = self.rng.choice([d for d in range(1, left + 1) if left % d == 0])
            target.append(part)
            left //= part
        target.append(left)
        self.add("Reshape", [x, self.ints(*target)], tuple(target))

    def concat(self, x: str, shape: Shape) -> None:
        axis = self.rng.randrange(len(shape))
        fitting = [
            n
            for n, s in self.shapes.items()
            if len(s) == len(shape) and all(a == b for d, (a, b) in enumerate(zip(s, shape, strict=True)) if d != axis)
        ]
        parts = [x, *self.rng.choices(fitting, k=self.rng.randint(1, 2))]
        self.rng.shuffle(parts)
        target = (*shape[:axis], sum(self.shapes[p][axis] for p in parts), *shape[axis + 1 :])
        if math.prod(target) <= self.LARGEST:
            self.add("Concat", parts, target, axis=axis)

    def split(self, x: str, shape: Shape) -> None:
        axis = self.rng.randrange(len(shape))
        if shape[axis] > 1:
            cut = self.rng.randrange(1, shape[axis])
            parts = [(*shape[:axis], n, *shape[axis + 1 :]) for n in (cut, shape[axis] - cut)]
            self.add("Split", [x, self.ints(cut, shape[axis] - cut)], *parts, axis=axis)

    def unsqueeze(self, x: str, shape: Shape) -> None:
        if len(shape) < 4:
            axis = self.rng.randint(0, len(shape))
            self.add("Unsqueeze", [x, self.ints(axis)], (*shape[:axis], 1, *shape[axis:]))

    def squeeze(self, x: str, shape: Shape) -> None:
        single = [d for d, n in enumerate(shape) if n == 1]
        if single and len(shape) > 1:
            axis = self.rng.choice(single)
            self.add("Squeeze", [x, self.ints(axis)], (*shape[:axis], *shape[axis + 1 :]))

    def gather(self, x: str, shape: Shape) -> None:
        axis = self.rng.randrange(len(shape))
        count = self.rng.randint(1, 3)
        picked = self.ints(*(self.rng.randrange(shape[axis]) for _ in range(count)))
        self.add("Gather", [x, picked], (*shape[:axis], count, *shape[axis + 1 :]), axis=axis)

    def map(self, x: str, shape: Shape) -> None:
        self.add(self.rng.choice(("Tanh", "Abs", "Identity", "Neg")), [x], shape)

    def pair(self, x: str, shape: Shape) -> None:
        fitting = [n for n, s in self.shapes.items() if s == shape or math.prod(s) == 1]
        y = self.rng.choice(fitting)
        self.add(self.rng.choice(("Add", "Mul", "Sub")), [x, y], np.broadcast_shapes(shape, self.shapes[y]))

    def product(self, x: str, shape: Shape) -> None:
        fitting = [n for n, s in self.shapes.items() if len(s) == 2 and s[0] == shape[-1]]
        if len(shape) >= 2 and fitting:
            y = self.rng.choice(fitting)
            self.add("MatMul", [x, y], (*shape[:-1], self.shapes[y][1]))

    def reduce(self, x: str, shape: Shape) -> None:
        axis, keep = self.rng.randrange(len(shape)), self.rng.random() < 0.5 or len(shape) == 1
        target = (*shape[:axis], *((1,) if keep else ()), *shape[axis + 1 :])
        self.add(self.rng.choice(("ReduceSum", "ReduceMax")), [x, self.ints(axis)], target, keepdims=int(keep))

    def pad(self, x: str, shape: Shape) -> None:
        axis, before, after = self.rng.randrange(len(shape)), self.rng.randint(0, 1), self.rng.randint(0, 1)
        pads = [0] * (2 * len(shape))
        pads[axis], pads[len(shape) + axis] = before, after
        self.add("Pad", [x, self.ints(*pads)], (*shape[:axis], shape[axis] + before + after, *shape[axis + 1 :]))

    def lstm(self, x: str, shape: Shape) -> None:
        """Append an LSTM that starts from an existing value of matching shape, if any: a slice, an expansion or an output."""
        if len(shape) != 3 or math.prod(shape) > 60:
            return
        steps, batch, features = shape
        states = [n for n, s in self.shapes.items() if s == (1, batch, 3)]
        if not states:
            zero = self.constant(np.full((1, 1, 1), 0.5, np.float32))
            states = self.add("Expand", [zero, self.ints(1, batch, 3)], (1, batch, 3))
        rng = np.random.default_rng(self.rng.randrange(1 << 30))
        w, r = (self.constant(rng.standard_normal((1, 12, n)).astype(np.float32)) for n in (features, 3))
        given = [x, w, r, "", "", self.rng.choice(states), self.rng.choice(states)]
        self.add("LSTM", given, (steps, 1, batch, 3), (1, batch, 3), (1, batch, 3), hidden_size=3)

    def tile(self, x: str, shape: Shape) -> None:
        times = [self.rng.choice((1, 1, 2)) for _ in shape]
        target = tuple(n * t for n, t in zip(shape, times, strict=True))
        if math.prod(target) <= self.LARGEST:
            self.add("Tile", [x, self.ints(*times)], target)


def view_model(seed: int) -> onnx.ModelProto:
    """Return a model of 2 to 14 nodes, some of whose values are outputs."""
    rng = Random(seed)
    made = ViewModel(rng)
    count = rng.randint(2, 14)
    while len(made.nodes) < count:
        made.step()
    values = [o for n in made.nodes for o in n.output]
    used = {i for n in made.nodes for i in n.input}
    ends = [v for v in values if v not in used] + [v for v in values if v in used and rng.random() < 0.15]
    inputs = [tensor(i, made.shapes[i]) for i in made.inputs]
    return model(made.nodes, inputs, ends, constants=made.constants)


@lru_cache
def opened(device: str) -> Backend:
    """Return the opened device. Skip the test if the device does not work."""
    registry = Registry()
    if device not in registry.devices or registry.status(device).state != "ok":
        pytest.skip(f"{device} does not work here")
    return registry.open(device, options={"tiles": "16"} if device == "ipu_sim" else {})


def failure(
    backend: Backend, device: str, seed: int, proto: onnx.ModelProto | None = None, options: CompileOptions | None = None
) -> str:
    """Return the failure of the model of ``seed`` (or ``proto``) on inputs of ``seed``, or "" if results agree."""
    proto, rng = proto or view_model(seed), np.random.default_rng(seed)
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in proto.graph.input}
    inputs = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    want = expected_outputs(read_model(proto), "onnxruntime", inputs)
    options = options or CompileOptions(layout=Random(seed).choice(("keep", "nhwc")))
    exe = Executable(open_source(proto), backend, device, options, Registry(), store=KernelStore(None))
    try:
        have = exe.run(inputs)
    except Exception as problem:  # a search reports every exception
        return f"{type(problem).__name__}: {problem}"
    finally:
        exe.close()
    for name, value in want.items():
        error = np.linalg.norm(have[name].astype(np.float64) - value) / max(float(np.linalg.norm(value)), 1e-3)
        if have[name].shape != value.shape or not error <= TOLERANCE:
            return f"output {name}: relative L2 error {error:.1e}"
    return ""


def main(device: str, seconds: float, seed: int) -> int:
    """Try models for ``seconds`` and print every failure."""
    end, tried, failed = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end:
        if found := failure(opened(device), device, seed + tried):
            failed += 1
            print(f"seed {seed + tried}: {found}")
        tried += 1
    print(f"{device}: {tried} models from seed {seed} on, {failed} failed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else Random().randrange(1 << 30)))

"""Search for wrong ranges: random graphs with strides over one or two open dimensions, at many lengths, against ONNX Runtime.

``python -m rammer_testing.strided_ranges --device rocm --seconds 60 --seed 1`` prints every graph whose result is wrong or whose
run fails, and counts of programs and of the reasons why a graph has no range. ONNX Runtime runs in a child process."""

from __future__ import annotations

import io
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import click
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import rammer
from rammer.errors import DeviceFailure, RammerError
from rammer_testing.peer_process import PeerCrashed, PeerRefused, PeerSession

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
#: Relative to the largest value of an output: float32, with sums in another order.
TOLERANCE: Final = 1e-4
#: Lengths at which a graph runs, and the most layers of it.
LENGTHS: Final = 10
MOST_LAYERS: Final = 7


@dataclass
class Drawing:
    """A graph under construction. ``value`` is the current tensor with ``channels``; it has ``open_axes`` after the channels."""

    rng: np.random.Generator
    open_axes: int
    channels: int = 4
    value: str = "x"
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def node(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Append a node and return its first output."""
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, **attributes))
        return names[0]

    def constant(self, values: Any) -> str:
        """Add an initializer."""
        self.constants.append(numpy_helper.from_array(np.asarray(values), f"c{len(self.constants)}"))
        return f"c{len(self.constants) - 1}"

    def weight(self, *shape: int) -> str:
        """Add random weights that keep the scale of values."""
        scale = np.sqrt(np.prod(shape[1:], dtype=int))
        return self.constant((self.rng.standard_normal(shape) / scale).astype(np.float32))

    def whole(self, low: int, high: int) -> int:
        """Draw a number from ``low`` to ``high``, inclusive."""
        return int(self.rng.integers(low, high + 1))

    def each(self, low: int, high: int) -> list[int]:
        """Draw a number for each open axis."""
        return [self.whole(low, high) for _ in range(self.open_axes)]

    def window(self) -> dict[str, Any]:
        """Draw kernel, strides and padding of a window."""
        kernel = self.each(1, 4)
        pads = [self.whole(0, (k - 1) // 2 + (k > 1)) for k in kernel * 2]
        pads = [min(p, k - 1) for p, k in zip(pads, kernel * 2, strict=True)]
        return {"kernel_shape": kernel, "strides": self.each(1, 3), "pads": pads}


def convolution(d: Drawing) -> str:
    """Append a convolution, possibly of two groups or dilated, and sometimes an activation."""
    made, groups, out = d.window(), 1 + (d.whole(0, 4) == 0), 2 * d.whole(1, 4)
    dilations = d.each(1, 2) if d.whole(0, 3) == 0 else [1] * d.open_axes
    weight = d.weight(out, d.channels // groups, *made["kernel_shape"])
    value = d.node("Conv", d.value, weight, d.weight(out), group=groups, dilations=dilations, **made)
    d.channels = out
    return d.node("Relu", value) if d.whole(0, 1) else value


def max_pool(d: Drawing) -> str:
    """Append a maximum over windows."""
    return d.node("MaxPool", d.value, ceil_mode=d.whole(0, 1), **d.window())


def average_pool(d: Drawing) -> str:
    """Append a mean over windows, of which some elements are padding."""
    return d.node("AveragePool", d.value, count_include_pad=d.whole(0, 1), **d.window())


def every_few(d: Drawing) -> str:
    """Append a slice with steps, from a start to an end that is counted from the end."""
    axes = list(range(2, 2 + d.open_axes))
    ends = [-d.whole(1, 2) if d.whole(0, 1) else 1 << 40 for _ in axes]
    return d.node("Slice", d.value, *(d.constant(np.array(n)) for n in (d.each(0, 2), ends, axes, d.each(1, 3))))


def resize(d: Drawing) -> str:
    """Append a resize by a fixed scale, or to the extents of the input."""
    mode, coordinates = ("nearest", "linear")[d.whole(0, 1)], ("asymmetric", "half_pixel")[d.whole(0, 1)]
    if mode == "linear" and d.whole(0, 1):
        coordinates = (coordinates, "align_corners", "pytorch_half_pixel")[d.whole(0, 2)]
        sizes = d.node("Concat", d.constant(np.array([1, d.channels])), d.node("Shape", "x", start=2), axis=0)
        return d.node("Resize", d.value, "", "", sizes, mode=mode, coordinate_transformation_mode=coordinates)
    scale = float(d.rng.choice([0.5, 2.0, 3.0]))
    scales = d.constant(np.array([1.0, 1.0, *[scale] * d.open_axes], np.float32))
    return d.node("Resize", d.value, "", scales, mode=mode, coordinate_transformation_mode=coordinates)


def transposed(d: Drawing) -> str:
    """Append a transposed convolution."""
    kernel, out = d.each(2, 4), 2 * d.whole(1, 3)
    value = d.node("ConvTranspose", d.value, d.weight(d.channels, out, *kernel), kernel_shape=kernel, strides=d.each(1, 2))
    d.channels = out
    return value


def padded(d: Drawing) -> str:
    """Append padding of the open axes."""
    pads = [0, 0, *d.each(0, 2), 0, 0, *d.each(0, 2)]
    return d.node("Pad", d.value, d.constant(np.array(pads)), mode=("constant", "reflect")[d.whole(0, 3) == 0])


def residual(d: Drawing) -> str:
    """Append a branch of equal extents and its sum with the value."""
    branch = d.node("Conv", d.value, d.weight(d.channels, d.channels, *[3] * d.open_axes), pads=[1] * 2 * d.open_axes)
    return d.node("Add", d.node("Sigmoid", branch), d.value)


def joined(d: Drawing) -> str:
    """Append a concatenation with a strided part of the value along an open axis."""
    if d.open_axes > 1:
        return residual(d)
    part = d.node("MaxPool", d.value, kernel_shape=[2], strides=[2])
    return d.node("Concat", d.value, part, axis=2)


def normalised(d: Drawing) -> str:
    """Append a normalisation over the open axes."""
    return d.node("InstanceNormalization", d.value, d.weight(d.channels), d.weight(d.channels))


def folded(d: Drawing) -> str:
    """Append a reshape that moves pairs of positions to the channels. The last one of an odd number is left out."""
    if d.open_axes > 1:
        return normalised(d)
    half = d.node("MaxPool", d.value, kernel_shape=[2], strides=[2])
    twice = d.node("Resize", half, "", d.constant(np.array([1, 1, 2], np.float32)), mode="nearest")
    turned = d.node("Transpose", twice, perm=[0, 2, 1])
    pairs = d.node("Reshape", turned, d.constant(np.array([1, -1, 2 * d.channels])))
    d.channels *= 2
    return d.node("Transpose", pairs, perm=[0, 2, 1])


def pooled(d: Drawing) -> str:
    """End with the mean."""
    return d.node("GlobalAveragePool", d.value)


def attention(d: Drawing) -> str:
    """End with attention of all positions."""
    tokens = d.node("Transpose", flattened(d), perm=[0, 2, 1])
    scores = d.node("MatMul", tokens, d.node("Transpose", tokens, perm=[0, 2, 1]))
    return d.node("MatMul", d.node("Softmax", d.node("Div", scores, d.constant(np.float32(4))), axis=-1), tokens)


def flattened(d: Drawing) -> str:
    """End with all positions along one axis."""
    return d.node("Reshape", d.value, d.constant(np.array([0, 0, -1])))


def reduced(d: Drawing) -> str:
    """End with a product of the mean over the last axis."""
    axis = d.constant(np.array([-1]))
    return d.node(("ReduceMean", "ReduceMax", "ReduceSum", "ReduceL2")[d.whole(0, 3)], d.value, axis, keepdims=d.whole(0, 1))


LAYERS: Final[tuple[Callable[[Drawing], str], ...]] = (
    convolution,
    convolution,
    convolution,
    max_pool,
    average_pool,
    every_few,
    resize,
    transposed,
    padded,
    residual,
    joined,
    normalised,
    folded,
)
ENDS: Final[tuple[Callable[[Drawing], str], ...]] = (pooled, attention, flattened, reduced, residual)


@dataclass(frozen=True)
class StridedGraph:
    """A random graph with its ranges: least and greatest length, and step, by dimension."""

    proto: onnx.ModelProto
    spans: Mapping[str, tuple[int, int, int]]
    layers: tuple[str, ...]

    @staticmethod
    def draw(seed: int) -> StridedGraph:
        """Draw the graph of ``seed``."""
        rng = np.random.default_rng(seed)
        d, layers = Drawing(rng, 1 + int(rng.integers(0, 3) == 0)), list[str]()
        for _ in range(d.whole(1, MOST_LAYERS - 2 * (d.open_axes - 1))):
            layer = LAYERS[d.whole(0, len(LAYERS) - 1)]
            layers.append(layer.__name__)
            d.value = layer(d)
        end = ENDS[d.whole(0, len(ENDS) - 1)]
        end = flattened if end is attention and d.open_axes > 1 else end  # its scores would take gigabytes
        y = end(d)
        spans = {}
        for name in ("h", "w")[: d.open_axes]:
            step = int(rng.choice([1, 1, 1, 4, 8, 32]))
            low = d.whole(40, 80) if d.open_axes == 1 else d.whole(24, 40)
            spans[name] = (low, low + step * d.whole(4, 8) + d.whole(20, 90) // d.open_axes, step)
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, *spans])
        graph = helper.make_graph(d.nodes, "strided", [x], [onnx.ValueInfoProto(name=y)], d.constants)
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        return StridedGraph(proto, spans, (*layers, end.__name__))

    def points(self, rng: np.random.Generator) -> list[tuple[int, ...]]:
        """Draw lengths of the range, with both ends."""
        every = [range(low, high + 1, step) for low, high, step in self.spans.values()]
        drawn = [tuple(int(rng.choice(lengths)) for lengths in every) for _ in range(LENGTHS - 2)]
        return list(dict.fromkeys([tuple(r[-1] for r in every), *drawn, tuple(r[0] for r in every)]))


@dataclass
class Tally:
    """Counts of a search: graphs, runs, graphs with one program for the range, and reasons for others; and the faults."""

    graphs: int = 0
    runs: int = 0
    ranged: int = 0
    declined: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def try_graph(self, seed: int, device: str, options: Mapping[str, str] | None = None) -> None:
        """Run the graph of ``seed`` at its lengths."""
        drawn, rng = StridedGraph.draw(seed), np.random.default_rng(seed)
        try:
            reference = PeerSession(drawn.proto.SerializeToString(), optimised=False)
        except PeerRefused:
            return
        log, exe = io.StringIO(), None
        where = f"seed {seed} on {device}: {drawn.layers} {dict(drawn.spans)}"
        self.graphs += 1
        try:
            with redirect_stderr(log):
                exe = rammer.compile(drawn.proto, device, shapes={**drawn.spans}, options=dict(options or {}))
                exe.lengths, exe.cache_root = replace(exe.lengths, buckets=1), None
                for point in drawn.points(rng):
                    x = rng.standard_normal((1, 4, *point)).astype(np.float32)
                    try:
                        expected = reference.run(None, {"x": x})
                    except PeerRefused:  # a length is too short for the graph
                        continue
                    got = list(exe.run({"x": x}).values())
                    self.runs += 1
                    error = error_of(got[0], expected[0])
                    if error > TOLERANCE:
                        self.faults.append(f"{where} at {point}: error {error:.1e}")
                        break
                    if not exe.lengths.spans:
                        break
        except DeviceFailure as problem:  # the memory of a simulated chip
            self.declined[f"no memory: {problem.where}"] += 1
        except RammerError as problem:
            self.faults.append(f"{where}: {type(problem).__name__}: {problem}")
        except PeerCrashed:
            return
        finally:
            if exe is not None:
                self.ranged += bool(exe.lengths.spans)
                exe.close()
        if "warning" in log.getvalue():
            self.declined[log.getvalue().splitlines()[0][:140]] += 1


def error_of(got: Array, expected: Array) -> float:
    """Return the largest error relative to the largest value, or infinity for another shape."""
    if got.shape != expected.shape:
        return float("inf")
    return float(np.max(np.abs(got - expected), initial=0.0) / max(float(np.max(np.abs(expected), initial=0.0)), 1.0))


@click.command()
@click.option("--device", default="rocm", help="Device to search.")
@click.option("--seconds", default=60.0, help="Time limit.")
@click.option("--seed", default=0, help="First graph.")
@click.option("--graphs", default=1_000_000, help="Most graphs.")
@click.option("--option", "options", multiple=True, help="Option of the device, KEY=VALUE.")
def main(device: str, seconds: float, seed: int, graphs: int, options: tuple[str, ...]) -> None:
    """Search random graphs for a time."""
    tally, end, number = Tally(), time.monotonic() + seconds, seed
    given = dict(o.split("=", 1) for o in options)
    while time.monotonic() < end and number < seed + graphs:
        known = len(tally.faults)
        tally.try_graph(number, device, given)
        for fault in tally.faults[known:]:
            print(fault, flush=True)
        number += 1
    print(f"{tally.graphs} graphs, {tally.runs} runs, {tally.ranged} with a range, {len(tally.faults)} faults")
    for reason, count in tally.declined.most_common():
        print(f"{count:4} {reason}")
    sys.exit(bool(tally.faults))


if __name__ == "__main__":
    main()

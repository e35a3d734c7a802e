"""Checks of fusion decisions: do the device's layers decide, has every edge a reason, is a fused model never slower, and are
predictions right (Welder, OSDI'23).

``python -m rammer_testing.fusion`` prints one line for each check. Models are given as ONNX files; without any, ``BLOCKS`` of the
papers' models are compiled. ``--device`` and ``--tune`` as for ``rammer compile``; a device may be given several times."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from rammer.compile_options import FUSION, MEASURED, CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer.frontend.read.reader import Model, read_model
from rammer.fusion.tile_graph import ConnectionTrial
from rammer.ir.device import VDevice
from rammer.tuning.fastest_program import RACE, program_opener
from rammer.tuning.interleaved_timing import time_interleaved
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.net import Net
from rammer_testing.small_models import SmallModel

#: Maximum time of a fused graph, as a multiple of the best of the same graph without fusion and with element-wise fusion.
SLOWER: Final = 1.03
#: Maximum ratio of predicted and counted time, either way, for a prediction to be right.
NEAR: Final = 1.25
#: Shapes of random memory-bound graphs: rows and columns.
ROWS, COLUMNS = (1, 4, 48, 197, 1024), (3, 16, 96, 384, 1000)

_NORM: Final = """{out} = LayerNormalization<axis=-1>({x}, w_s, w_b)"""

#: The blocks of which Welder's models consist, in sizes that compile in about a second.
BLOCKS: Final = (
    SmallModel(
        "inverted_residual",
        """(float[1,16,28,28] x, float[96,16,1,1] w_e, float[96,1,3,3] w_d, float[16,96,1,1] w_p) => (float[1,16,28,28] y) {
        e = Conv(x, w_e)
        er = Relu(e)
        d = Conv<group=96, pads=[1,1,1,1]>(er, w_d)
        dr = Relu(d)
        p = Conv(dr, w_p)
        y = Add(p, x)
    }""",
    ),
    SmallModel(
        "product_then_norm",
        f"""(float[128,256] x, float[256,256] w_1, float[256] w_c, float[256] w_s, float[256] w_b, float[128,256] z)
        => (float[128,256] y) {{
        m = MatMul(x, w_1)
        c = Add(m, w_c)
        r = Add(c, z)
        {_NORM.format(out="y", x="r")}
    }}""",
    ),
    SmallModel(
        "gelu_residual_norm",
        f"""(float[128,768] x, float[768] w_c, float[768] w_s, float[768] w_b, float[128,768] z) => (float[128,768] y) {{
        c = Add(x, w_c)
        g = Gelu(c)
        r = Add(g, z)
        {_NORM.format(out="y", x="r")}
    }}""",
    ),
    SmallModel(
        "attention",
        """(float[4,64,32] q, float[4,32,64] k, float[4,64,32] v) => (float[4,64,32] y) {
        s = MatMul(q, k)
        p = Softmax(s)
        y = MatMul(p, v)
    }""",
    ),
    SmallModel(
        "feed_forward",
        """(float[128,64] x, float[64,256] w_1, float[256] w_a, float[256,64] w_2, float[64] w_b) => (float[128,64] y) {
        m = MatMul(x, w_1)
        a = Add(m, w_a)
        g = Gelu(a)
        n = MatMul(g, w_2)
        b = Add(n, w_b)
        y = Add(b, x)
    }""",
    ),
    SmallModel(
        "radiance_layers",
        """(float[4096,64] x, float[64,64] w_1, float[64,64] w_2, float[64,64] w_3) => (float[4096,64] y) {
        a = MatMul(x, w_1)
        ar = Relu(a)
        b = MatMul(ar, w_2)
        br = Relu(b)
        c = MatMul(br, w_3)
        y = Relu(c)
    }""",
    ),
    SmallModel(
        "convolution_then_pool",
        """(float[1,8,32,32] x, float[16,8,3,3] w_c, float[16] w_b) => (float[1,16,16,16] y) {
        c = Conv<pads=[1,1,1,1]>(x, w_c, w_b)
        r = Relu(c)
        y = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)
    }""",
    ),
    SmallModel(
        "simple_gate",
        """(float[1,16,32,32] x, float[32,16,1,1] w_e, float[32,1,3,3] w_d) => (float[1,16,32,32] y) {
        e = Conv(x, w_e)
        d = Conv<group=32, pads=[1,1,1,1]>(e, w_d)
        a, b = Split<axis=1, num_outputs=2>(d)
        y = Mul(a, b)
    }""",
    ),
    SmallModel(
        "channel_attention",
        """(float[1,32,24,24] x, float[32,32,1,1] w_c) => (float[1,32,24,24] y) {
        p = GlobalAveragePool(x)
        c = Conv(p, w_c)
        s = Sigmoid(c)
        y = Mul(x, s)
    }""",
    ),
    SmallModel(
        "siblings",
        """(float[256,96] x, float[96] w_c) => (float[256,1] m, float[256,1] v, float[256,96] y) {
        b = Add(x, w_c)
        m = ReduceMean<keepdims=1>(b, axes)
        q = Mul(b, b)
        v = ReduceMean<keepdims=1>(q, axes)
        y = Relu(b)
    }""".replace("{\n        b = Add", "{\n        axes = Constant<value_ints=[1]>()\n        b = Add"),
    ),
    SmallModel(
        "turned_rows",
        """(float[8,48,64] x, float[48] w_s, float[48] w_b) => (float[8,64,48] y) {
        t = Transpose<perm=[0,2,1]>(x)
        r = Relu(t)
        y = LayerNormalization<axis=-1>(r, w_s, w_b)
    }""",
    ),
    SmallModel(
        "two_layers_by_halo",
        """(float[1,8,32,32] x, float[8,8,3,3] w_1, float[8,8,3,3] w_2) => (float[1,8,32,32] y) {
        a = Conv<pads=[1,1,1,1]>(x, w_1)
        r = Relu(a)
        b = Conv<pads=[1,1,1,1]>(r, w_2)
        y = Relu(b)
    }""",
    ),
)


def random_graph(seed: int) -> onnx.ModelProto:
    """Return a random graph of maps, reductions along rows, transpositions and broadcasts, with one or two outputs."""
    rng = np.random.default_rng(seed)
    net = Net((), rng)
    rows, columns = int(rng.choice(ROWS)), int(rng.choice(COLUMNS))
    kept = [(net.input(rows, columns), rows, columns) for _ in range(int(rng.integers(1, 3)))]
    for _ in range(int(rng.integers(3, 14))):
        x, r, c = kept[int(rng.integers(max(0, len(kept) - 4), len(kept)))]
        kind = rng.random()
        if kind < 0.3:
            kept.append((net.node(str(rng.choice(["Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Gelu"])), x), r, c))
        elif kind < 0.6:
            others = [n for n, *shape in kept if shape in ([r, c], [r, 1], [1, c], [1, 1])]
            kept.append((net.node(str(rng.choice(["Add", "Mul", "Sub", "Max"])), x, str(rng.choice(others))), r, c))
        elif kind < 0.75:
            axis = int(rng.integers(2)) if rng.random() < 0.3 else 1
            axes = net.constant(np.array([axis], np.int64))
            made = net.node(str(rng.choice(["ReduceSum", "ReduceMean", "ReduceMax"])), x, axes, keepdims=1)
            kept.append((made, r if axis else 1, 1 if axis else c))
        elif kind < 0.85:
            kept.append((net.node("Softmax", x), r, c))
        elif kind < 0.93:
            kept.append((net.node("LayerNormalization", x, net.some(c), net.some(c)), r, c))
        else:
            kept.append((net.node("Transpose", x, perm=[1, 0]), c, r))
    read = {n for node in net.nodes for n in node.input}
    last = [n for n, *_ in kept if n not in read and not n.startswith("x")] or [kept[-1][0]]
    net.outputs += last[:-1]
    return net.model(last[-1])


@dataclass(frozen=True)
class Subject:
    """A device on which decisions are checked; ``changed`` alters what its plugin reports of it, and ``tune`` is the option."""

    device: str
    target: str = ""
    tune: str = "off"
    changed: Callable[[VDevice], VDevice] = lambda device: device

    def compile(self, model: Model, fusion: str = "full") -> list[tuple[Backend, ProgramSegment]]:
        """Return the programs of ``model`` with the opened device."""
        registry = Registry()
        backend: Any = registry.open(self.device, target=self.target)
        backend.plain.vdevice = self.changed(backend.vdevice)
        compiler = Compiler(
            backend, CompileOptions(fusion=fusion, tune=self.tune), KernelStore(None), registry, device=self.device
        )
        made = compiler.compile_model(model, {v.name: tuple(int(n) for n in v.shape if n is not None) for v in model.inputs})
        return [(backend, s) for s in made.segments if isinstance(s, ProgramSegment)]

    def altered(self, scope: str, **values: Any) -> Subject:
        """Return the device with other figures of its memory layers of ``scope``."""

        def change(device: VDevice) -> VDevice:
            layers = (replace(layer, **values) if layer.scope == scope else layer for layer in device.layers)
            return replace(device, layers=tuple(layers))

        return replace(self, changed=change)


def decisions(found: Sequence[tuple[Backend, ProgramSegment]]) -> list[tuple[object, ...]]:
    """Return the operators with their tiles, kernels and layers of connection: what a change of the device may change."""
    return [(o.name, o.tile, o.family, o.config, o.connections) for _, s in found for o in s.program.operators]


def deciding_layers(subjects: Sequence[Subject], models: Sequence[Model]) -> dict[str, int]:
    """Return how many compilations change when on-chip bandwidth is 1 B/s, and when registers hold 1 byte."""
    changed = dict.fromkeys(("on-chip bandwidth of 1 B/s", "registers of 1 byte"), 0)
    for subject in subjects:
        for model in models:
            usual = decisions(subject.compile(model))
            others = subject.altered("veu", bandwidth=1.0), subject.altered("thread", capacity=1)
            for name, other in zip(changed, others, strict=True):
                changed[name] += decisions(other.compile(model)) != usual
    return changed


def price_ratios(subject: Subject, model: Model) -> Iterator[tuple[str, float]]:
    """Yield the fused operators of a model, each with the predicted seconds that decided it over those of its best kernel."""
    for backend, segment in subject.compile(model):
        assert segment.tile is not None and segment.kernels is not None
        device = backend.vdevice
        logged = {d.subject: d.together for d in segment.tile.decisions if isinstance(d, ConnectionTrial) and d.kept}
        for o in segment.tile.operators:
            together = logged.get(" + ".join(c.name for c in o.computes))
            if together is not None:
                yield o.name, together / (segment.kernels[o.name][0].operator_time(device.veus) + device.launch)


def right_prices(subject: Subject, models: Sequence[Model]) -> str:
    """Return the share of fused operators whose price is right, and the worst."""
    found = [ratio for model in models for _, ratio in price_ratios(subject, model)]
    near = sum(1 / NEAR <= ratio <= NEAR for ratio in found)
    worst = max(found, key=lambda ratio: abs(math.log(ratio)), default=1.0)
    return f"{near} of {len(found)} groups predicted within {NEAR}x on {subject.device}, worst {worst:.2f}x"


def slowdown(subject: Subject, model: Model) -> float:
    """Return the time of a whole model with full fusion over the best with less fusion, by interleaved runs on the device."""
    clocks = dict[str, Callable[[], float]]()
    with ExitStack() as stack:
        for fusion in FUSION:
            made = subject.compile(model, fusion)
            openers = [(program_opener(b, dict.fromkeys([s.program], s.constants).__getitem__), s.program) for b, s in made]
            runs = [stack.enter_context(opened(program)) for opened, program in openers]
            clocks[fusion] = partial(_run_all, runs)
        seconds = time_interleaved(clocks, RACE).all_run().best
    return seconds.pop("full") / min(seconds.values())


def _run_all(runs: Sequence[Callable[[], float]]) -> float:
    return sum(run() for run in runs)


def slower_graphs(subject: Subject, seeds: Sequence[int]) -> str:
    """Return the random memory-bound graphs that full fusion slows down."""
    found = {seed: slowdown(subject, read_model(random_graph(seed))) for seed in seeds}
    slow = {seed: ratio for seed, ratio in found.items() if ratio > SLOWER}
    mean = math.exp(sum(map(math.log, found.values())) / max(len(found), 1))
    named = ", ".join(f"{seed}: {ratio:.2f}x" for seed, ratio in sorted(slow.items(), key=lambda item: -item[1])[:20])
    return f"{len(slow)} of {len(found)} random graphs over {SLOWER}x on {subject.device}, mean {mean:.3f}x  {named}"


def unexplained_edges(subjects: Sequence[Subject], models: Sequence[Model]) -> str:
    """Return the number of edges without an outcome, and of those that were tried at one layer only though it was refused."""
    edges = silent = once = several = 0
    for subject in subjects:
        for model in models:
            for _, segment in subject.compile(model):
                assert segment.tile is not None
                for tried in segment.tile.outcomes.values():
                    edges += 1
                    silent += not tried or not all(t.why for t in tried)
                    once += len(tried) == 1 and not tried[0].kept
                    several += len(tried) > 1
    return f"{silent} of {edges} edges without a reason; {several} tried at several layers, {once} refused at one only"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m rammer_testing.fusion", description=__doc__)
    parser.add_argument("check", nargs="*", choices=["layers", "edges", "prices", "graphs", []], help="all unless given")
    parser.add_argument("--device", action="append", default=[], metavar="NAME[=TARGET]")
    parser.add_argument("--model", action="append", default=[], type=Path, help="ONNX files instead of the built-in blocks")
    parser.add_argument("--tune", default="off", choices=MEASURED)
    parser.add_argument("--seed", type=int, default=0, help="the first random graph")
    parser.add_argument("--graphs", type=int, default=60, help="the number of random graphs")
    given = parser.parse_args(arguments)
    rng = np.random.default_rng(given.seed)
    models = [read_model(path) for path in given.model] or [read_model(block.build(rng)) for block in BLOCKS]
    subjects = [replace(Subject(*name.split("=", 1)), tune=given.tune) for name in given.device or ["ipu_sim"]]
    seeds = range(given.seed, given.seed + given.graphs)
    checks: Mapping[str, Callable[[], str]] = {
        "layers": lambda: f"of {len(subjects) * len(models)} change with {deciding_layers(subjects, models)}",
        "edges": lambda: unexplained_edges(subjects, models),
        "prices": lambda: "\n".join(right_prices(s, models) for s in subjects),
        "graphs": lambda: "\n".join(slower_graphs(s, seeds) for s in subjects),
    }
    for name in given.check or checks:
        print(checks[name](), flush=True)


if __name__ == "__main__":
    main()

"""Predicted and simulated time over many chips: a pipeline of layers, and one large product split by columns or by its sum.

python benchmarks/scaling.py --chips 2,4,8,16,32,64 --markdown scaling.md     (about two minutes of one core)

What is predicted follows from the programs' predicted times and the links between chips; what is simulated, from every chip's
supersteps, counted tile by tile, and its transfers on the hops of their routes. ``interval`` is the time between results of eight
runs in flight.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import onnx
from onnx import helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from facts import environment_of, section

from rammer.compiled.options import CompileOptions
from rammer.compiler import Compiler
from rammer.device.loader import Registry
from rammer.errors import DeviceFailure
from rammer.frontend.reader import read_model
from rammer.ir.spread import Spread
from rammer.place.spreading import compile_spread
from rammer.plan.join import joined_constants
from rammer.profile.store import KernelStore
from rammer.report.table import markdown
from rammer_testing.spreads import whole_inputs

from rammer_ipu_sim.executor import LoadedProgram
from rammer_ipu_sim.links import links

#: Predicted over simulated time may differ by this much.
WITHIN = 0.15
#: Runs in flight.
RUNS = 8
#: Tiles of a chip.
TILES = 32

F32 = onnx.TensorProto.FLOAT


def model_of(
    name: str, nodes: Sequence[onnx.NodeProto], shapes: dict[str, list[int]], weights: dict[str, np.ndarray]
) -> onnx.ModelProto:
    """With input ``x`` and output ``y``."""
    ports = [helper.make_tensor_value_info(n, F32, shapes[n]) for n in ("x", "y")]
    given = [numpy_helper.from_array(v, n) for n, v in weights.items()]
    graph = helper.make_graph(list(nodes), name, ports[:1], ports[1:], given)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def layers(chips: int, width: int = 128, rows: int = 16, count: int = 128) -> tuple[onnx.ModelProto, str]:
    """Dense layers one behind the other, as many on each chip."""
    rng, nodes, weights = np.random.default_rng(0), list[onnx.NodeProto](), dict[str, np.ndarray]()
    for k in range(count):
        weights[f"w{k}"] = rng.standard_normal((width, width)).astype(np.float32) / math.sqrt(width)
        nodes.append(helper.make_node("MatMul", [f"h{k - 1}" if k else "x", f"w{k}"], [f"m{k}"]))
        nodes.append(helper.make_node("Tanh", [f"m{k}"], [f"h{k}" if k < count - 1 else "y"]))
    place = [f"m{k} {k * chips // count}" for k in range(count)] + [f"h{k} {k * chips // count}" for k in range(count - 1)]
    return model_of("layers", nodes, {"x": [rows, width], "y": [rows, width]}, weights), "\n".join([*place, f"y {chips - 1}"])


def columns(chips: int, depth: int = 256, width: int = 8192, rows: int = 16) -> tuple[onnx.ModelProto, str]:
    """A product whose columns are split: every chip makes some, the first one gathers them."""
    rng, share = np.random.default_rng(0), width // chips
    weights = {f"w{k}": rng.standard_normal((depth, share)).astype(np.float32) / math.sqrt(depth) for k in range(chips)}
    nodes = [helper.make_node("MatMul", ["x", f"w{k}"], [f"part{k}"]) for k in range(chips)]
    nodes += [
        helper.make_node("Concat", [f"part{k}" for k in range(chips)], ["all"], axis=1),
        helper.make_node("Relu", ["all"], ["y"]),
    ]
    place = [f"part{k} {k}" for k in range(chips)] + ["all 0", "y 0"]
    return model_of("columns", nodes, {"x": [rows, depth], "y": [rows, width]}, weights), "\n".join(place)


def sums(chips: int, depth: int = 4096, width: int = 512, rows: int = 16) -> tuple[onnx.ModelProto, str]:
    """A product whose sum is split: every chip adds up a part, and pairs of chips add theirs until one has all."""
    rng, share = np.random.default_rng(0), depth // chips
    weights: dict[str, np.ndarray] = {
        f"w{k}": rng.standard_normal((share, width)).astype(np.float32) / math.sqrt(depth) for k in range(chips)
    }
    nodes, place = list[onnx.NodeProto](), list[str]()
    for k in range(chips):
        ends = {f"{n}{k}": np.array([v], np.int64) for n, v in (("from", k * share), ("to", (k + 1) * share))}
        weights |= ends
        nodes.append(helper.make_node("Slice", ["x", *ends, "axis"], [f"x{k}"]))
        nodes.append(helper.make_node("MatMul", [f"x{k}", f"w{k}"], [f"sum{k}_1"]))
        place += [f"sum{k}_1 {k}"]
    weights["axis"] = np.array([1], np.int64)
    step = 1
    while step < chips:
        for k in range(0, chips, 2 * step):
            nodes.append(helper.make_node("Add", [f"sum{k}_{step}", f"sum{k + step}_{step}"], [f"sum{k}_{2 * step}"]))
            place.append(f"sum{k}_{2 * step} {k}")
        step *= 2
    nodes.append(helper.make_node("Relu", [f"sum0_{chips}"], ["y"]))
    return model_of("sums", nodes, {"x": [rows, depth], "y": [rows, width]}, weights), "\n".join([*place, "y 0"])


CASES = {"pipeline": layers, "columns": columns, "sum": sums}


def line(case: str, chips: int) -> tuple[list[str], bool]:
    """A line of the table, and whether what was predicted is near enough."""
    proto, place = CASES[case](chips)
    registry = Registry()
    backend = registry.open("ipu_sim", options={"tiles": str(TILES), "chips": str(chips)})
    made = Compiler(backend, CompileOptions(), KernelStore(None), registry, device="ipu_sim")
    model = read_model(proto)
    shapes = {p.name: tuple(int(d or 0) for d in p.shape) for p in model.inputs}
    names = [(f"ipu_sim:{k}", made) for k in range(chips)]
    spread: Spread = compile_spread(names, model, shapes, links(backend.chip), place=place)
    loaded = LoadedProgram(spread.whole, joined_constants(spread.parts), backend.chip)
    inputs = {n: np.random.default_rng(1).standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    found = loaded.run(whole_inputs(spread, inputs))
    check(proto, inputs, found.outputs["y"])
    several = loaded.played(runs=RUNS)
    interval = (several.whole - found.seconds) / (RUNS - 1)
    pairs = [(spread.predicted.latency, found.seconds), (spread.predicted.interval, interval)]
    figures = [f"{v * 1e6:.2f}" for pair in pairs for v in pair]
    off = [p / s - 1 for p, s in pairs]
    alone = spread.predicted.alone[0] if spread.predicted.alone else 0.0
    told = f"{alone * 1e6:.2f}" if alone else "does not fit"
    return [case, str(chips), told, *figures[:2], f"{off[0]:+.1%}", *figures[2:], f"{off[1]:+.1%}"], max(map(abs, off)) <= WITHIN


def check(proto: onnx.ModelProto, inputs: dict[str, np.ndarray], found: np.ndarray) -> None:
    """AssertionError where a program is wrong."""
    from onnx.reference import ReferenceEvaluator

    np.testing.assert_allclose(found, ReferenceEvaluator(proto).run(None, inputs)[0], rtol=1e-3, atol=1e-4)


HEADERS = (
    "model",
    "chips",
    "one chip us",
    "latency predicted us",
    "simulated us",
    "off",
    "interval predicted us",
    "simulated us ",
    "off ",
)


@click.command()
@click.option("--chips", default="2,4,8,16,32,64", show_default=True)
@click.option("--models", default=",".join(CASES), show_default=True)
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the table.")
def main(chips: str, models: str, markdown_file: Path | None) -> None:
    """Print the table; exit with 1 where a prediction is further off than 15%."""
    rows, good = [], True
    for case in models.split(","):
        for number in map(int, chips.split(",")):
            row, near = line(case, number)
            rows.append(row)
            good = good and near
            click.echo(" | ".join(row), err=True)
    text = markdown(rows, HEADERS)
    click.echo(text)
    if markdown_file:
        about = (
            f"Chips of {TILES} tiles, joined as a ladder of cards; made by `python -m benchmarks scaling`. {RUNS} runs in flight."
        )
        markdown_file.write_text(
            f"# Many simulated chips: predicted and simulated\n\n{about}\n\n{text}\n\n{section(environment_of(gpu=False))}"
        )
    if not good:
        raise DeviceFailure(f"a prediction is off by more than {WITHIN:.0%}")


if __name__ == "__main__":
    run(main)

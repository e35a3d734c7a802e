"""Whether models are faster with channels last: whole ones by ``--layout``, and each convolution as NCHW and as NHWC.

``python benchmarks/layouts.py --models resnet50,inception_v3 --precision tf32 --markdown layouts.md``: medians of the bound
call in the three layouts, and the measured microseconds of the best kernel of each layout (a link of a chain of
launches, on random values) for every distinct operator with a contraction over images, with the sum over the model. There a
change of layout between two operators costs nothing, so the sum of each operator's better one is a bound.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from facts import environment_of, section
from measuring import Settings, Way, measured, subject
from zoo import SEED, find

from rammer.compiled.options import LAYOUTS, PRECISIONS, CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler import Compiler
from rammer.device.loader import Registry
from rammer.device.manifest import Backend, Binding
from rammer.frontend.reader import read_model
from rammer.ir.operator import ROperator
from rammer.ir.parts import Storage
from rammer.plan.layouts import channels_last
from rammer.profile.store import KernelStore
from rammer.profile.tune import Tuner
from rammer.report.table import markdown

WHOLE = ("layout", "buffers channels last", "launches", "median us", "keep / this", "rel. L2 to keep")
HEADERS = ("output", "summed", "times", "NCHW us", "kernel", "NHWC us", "kernel", "NCHW / NHWC")


@dataclass
class Layer:
    """An operator with how often the model has an equal one, and by layout the seconds and family of its best kernel."""

    operator: ROperator
    times: int
    found: list[tuple[float, str]]

    def row(self) -> list[str]:
        """One line of the table."""
        main, (have, family), (last, other) = self.operator.main, *self.found
        return [
            str(list(main.shape)),
            str([r.extent for r in main.reduce]),
            str(self.times),
            f"{have * 1e6:.2f}",
            family,
            f"{last * 1e6:.2f}",
            other,
            f"{have / last:.2f}",
        ]


def whole(key: str, device: str, precision: str, tune: str) -> list[list[str]]:
    """A row for each layout of the whole model; they take turns."""
    model, ways = subject(key, SEED, checked=False), [Way(layout, {"layout": layout}) for layout in LAYOUTS]
    found = measured(model.path, model.feeds, ways, Settings((device,), (), tune, precision))
    return [
        [
            m.way.name,
            str(m.moved),
            str(m.kernels),
            f"{m.seconds * 1e6:.1f}",
            f"{found[0].seconds / m.seconds:.2f}" if m.seconds else m.failure,
            f"{m.error:.1e}",
        ]
        for m in found
    ]


def _last(storage: Storage) -> Storage:
    """A dense NHWC storage in the place of a rank-4 one; others as they are."""
    return replace(storage, strides=channels_last(storage.shape)) if len(storage.shape) == 4 else storage


def layers(key: str, backend: Backend, device: str, precision: str, tune: str) -> list[Layer]:
    """Every distinct operator of a model with a contraction over images, tuned in both layouts."""
    registry = Registry()
    compiler = Compiler(backend, CompileOptions(precision=precision), KernelStore(None), registry, device=device)
    segment = compiler.compile_model(read_model(find(key).build(SEED)), {}).segments[0]
    assert isinstance(segment, ProgramSegment)
    program, constants = segment.program, frozenset(segment.constants)
    first = Binding.of(program, constants)
    moved = {n: s if n in constants else _last(s) for n, s in program.storage.items()}
    found: dict[str, Layer] = {}
    for operator in program.operators:
        if operator.main.kind == "contraction" and len(operator.main.shape) == 4:
            bare = replace(operator, tile=(), family="", config=())
            layer = found.setdefault(first.key(bare), Layer(bare, 0, []))
            layer.times += 1
    for binding in (first, replace(first, storages=moved)):
        tuner = Tuner(backend, KernelStore(None), tune)
        tuner.prepare([layer.operator for layer in found.values()], binding)
        for layer in found.values():
            best = tuner.kernels(layer.operator, binding)[0]
            layer.found.append((best.operator_time(backend.vdevice.veus), best.operator.family or "generic"))
    return list(found.values())


def summary(found: list[Layer]) -> str:
    """Microseconds of all layers by layout."""
    first, last, better = (
        sum(s.times * pick(s.found) * 1e6 for s in found) for pick in (lambda f: f[0][0], lambda f: f[1][0], lambda f: min(f)[0])
    )
    return f"All layers: {first:.0f} us as NCHW, {last:.0f} as NHWC, {better:.0f} with the better of the two for each."


@click.command()
@click.option("--models", default="resnet50,inception_v3", show_default=True, help="Keys of the zoo, with commas.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--precision", default="tf32", show_default=True, type=click.Choice(PRECISIONS))
@click.option("--tune", default="quick", show_default=True, type=click.Choice(["quick", "full"]))
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the tables.")
def main(models: str, device: str, precision: str, tune: str, markdown_file: Path | None) -> None:
    """Measure and print."""
    backend = Registry().open(device)
    parts = [f"# NCHW and NHWC, {precision}, --tune {tune}\n\n{backend.hardware.name}\n"]
    for key in models.split(","):
        table = markdown(whole(key, device, precision, tune), WHOLE)
        found = layers(key, backend, device, precision, tune)
        parts.append(f"## {key}\n\n{table}\n\n{markdown([s.row() for s in found], HEADERS)}\n\n{summary(found)}\n")
        click.echo(parts[-1])
        if markdown_file is not None:  # after every model: tuning takes minutes
            markdown_file.write_text("\n".join((*parts, section(environment_of(device == "cuda")))))


if __name__ == "__main__":
    run(main)

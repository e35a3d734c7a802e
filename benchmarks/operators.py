"""Single-operator models on a CPU, compared with ONNX Runtime on the same cores: the worst ratios first.

    python benchmarks/operators.py --kinds conv,pool --count 40 --seed 1 --out rows.jsonl
    python benchmarks/operators.py --case conv:1:17
    python benchmarks/operators.py --count 0 --rows rows.jsonl --markdown cpu_operators.md

Runs of both alternate in one process in short bursts, so that other load affects both. The ratios compare the medians over
bursts. Rammer's time is that of runs on inputs already in place, minus that of an empty program. A launch and the copies between
a caller's arrays and the program's memory cost as much as a small operator. In a larger model they are shared by all operators.
``--whole`` includes them. ONNX Runtime's whole call is counted. A rammer time below one microsecond counts as one microsecond.
The floor is the time of the graph's operations and bytes at the device's peak.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from facts import environment_of, section
from operator_space import KINDS, SHARES, Case, drawn

import rammer
from rammer.errors import DeviceUnavailable, RammerError
from rammer.report.bench import bound_call
from rammer.report.text_table import markdown_table, plain_table
from rammer.tuning.interleaved_timing import Rounds, time_interleaved
from rammer_bench.graph import Array
from rammer_bench.prepare import delay, relative_error
from rammer_testing.net import Net

#: Seconds of a burst, and bursts per runtime.
BURST, BURSTS = 0.02, 7
#: Lower limit of rammer's time in seconds: subtracted launch times vary by about this much.
LEAST = 1e-6
#: Ratios up to which cases are counted, and the number of worst rows in a result file.
STEPS, WORST = (1.0, 1.5, 2.0, 3.0), 30
#: The largest relative error against ONNX Runtime's result that counts as correct.
WRONG = 1e-3
HEADERS = ["ratio", "us", "ONNX Runtime", "floor", "case", "drawn", "kernels"]


@dataclass(frozen=True)
class Row:
    """One case: seconds of rammer, ONNX Runtime and the floor; kernel families and tiles; ``error`` against ONNX Runtime."""

    case: str
    what: str
    ours: float
    theirs: float
    floor: float
    kernels: str
    error: float
    compile: float

    @property
    def ratio(self) -> float:
        """Rammer's time relative to ONNX Runtime's."""
        return self.ours / self.theirs


def inputs_of(model: onnx.ModelProto, rng: np.random.Generator) -> dict[str, Array]:
    """Return random positive inputs, so that every operator stays in its domain."""
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    return {name: rng.uniform(0.25, 1.75, shape).astype(np.float32) for name, shape in shapes.items()}


def their_call(model: onnx.ModelProto, inputs: dict[str, Array], threads: int) -> tuple[Callable[[], float], dict[str, Array]]:
    """Return a timed run of ONNX Runtime with fixed arrays, and its results."""
    try:
        import onnxruntime
    except ImportError as problem:
        raise DeviceUnavailable("onnxruntime is not installed", hint="pip install onnxruntime") from problem
    runtime: Any = onnxruntime
    options = runtime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, threads
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_cpu_input(name, array)
    for output in session.get_outputs():
        binding.bind_output(output.name, "cpu")
    session.run_with_iobinding(binding)
    names = [o.name for o in session.get_outputs()]
    results = dict(zip(names, (v.numpy().copy() for v in binding.get_outputs()), strict=True))

    def call() -> float:
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        return time.perf_counter() - start

    return call, results


def burst(call: Callable[[], float], cpu: bool) -> float:
    """Return the median of runs for ``BURST`` seconds after one warm-up run, or the mean CPU seconds of all threads."""
    call()
    seconds, start, end = list[float](), time.process_time(), time.perf_counter() + BURST
    while not seconds or time.perf_counter() < end:
        seconds.append(call())
    return (time.process_time() - start) / len(seconds) if cpu else statistics.median(seconds)


def alternated(calls: list[Callable[[], float]], cpu: bool = False) -> list[float]:
    """Return the median burst of each call."""
    times = time_interleaved({i: partial(burst, call, cpu) for i, call in enumerate(calls)}, Rounds.exactly(BURSTS))
    return [*times.all_run().medians.values()]


def our_call(exe: Any, special: Any, inputs: dict[str, Array], whole: bool) -> Callable[[], float]:
    """Return a timed run: of bound arrays, or of the programs alone."""
    if whole or special.compiled.host_nodes:
        return bound_call(exe.bind(inputs), [delay])
    programs = list(special.loaded.values())

    def call() -> float:
        start = time.perf_counter()
        for program in programs:
            program.queue_run()
            program.queue.finish()
        return time.perf_counter() - start

    return call


def launch_seconds(device: str, cpu: bool) -> float:
    """Return the seconds of a nearly empty program, measured as in ``our_call``."""
    net = Net((), np.random.default_rng(0))
    model = net.model(net.node("Neg", net.input(16)))
    inputs = inputs_of(model, net.rng)
    exe = rammer.compile(model, device=device)
    seconds = alternated([our_call(exe, exe.prepare(exe.checked(inputs)), inputs, False)], cpu)[0]
    exe.close()
    return seconds


@dataclass(frozen=True)
class How:
    """The device and the settings of a measurement; ``launch`` seconds are subtracted."""

    device: str
    threads: int
    cpu: bool
    whole: bool
    launch: float
    options: dict[str, Any]


def measured(case: Case, name: str, how: How) -> Row:
    """Return the row of a case. Raises RammerError if compilation fails."""
    inputs = inputs_of(case.model, np.random.default_rng(7))
    begin = time.perf_counter()
    exe = rammer.compile(case.model, device=how.device, **how.options)
    special = exe.prepare(exe.checked(inputs))
    compiled = time.perf_counter() - begin
    bound = exe.bind(inputs)
    bound.run()
    theirs, want = their_call(case.model, inputs, how.threads)
    ours, other = alternated([our_call(exe, special, inputs, how.whole), theirs], how.cpu)
    have = {k: np.asarray(v) for k, v in bound.to_host().items()}
    operators = [o for program in special.compiled.programs for o in program.operators]
    error = relative_error(have, {k: v.astype(np.float64) for k, v in want.items()})
    bound.close()
    flops = sum(c.flops for o in operators for c in o.computes)
    arrays = [*inputs.values(), *want.values(), *(onnx.numpy_helper.to_array(t) for t in case.model.graph.initializer)]
    unit = exe.backend.vdevice
    floor = max(flops / (unit.flops * unit.veus), sum(a.nbytes for a in arrays) / unit.layer("device").bandwidth)
    hosted = [f"host {n}" for n in special.host_nodes]
    texts = "; ".join([*hosted, *(f"{o.family or 'generic'}{list(o.tile)}{dict(o.config) or ''}" for o in operators)])
    exe.close()
    return Row(name, case.what, max(ours - how.launch, LEAST), other, floor, texts, error, compiled)


def names(kinds: str, seed: int, count: int, first: int) -> Iterator[tuple[str, int, int]]:
    """Yield kind, seed and number of each case: kinds in rotation by their frequency."""
    cycle = [k for k in kinds.split(",") for _ in range(SHARES.get(k, 1))]
    for number in range(first, first + count):
        yield cycle[number % len(cycle)], seed, number


def line(row: Row) -> list[str]:
    """Return a row of the table."""
    error = f" WRONG {row.error:.1e}" if not row.error < WRONG else ""
    times = [f"{s * 1e6:.0f}" for s in (row.ours, row.theirs, row.floor)]
    return [f"{row.ratio:.2f}", *times, row.case, row.what + error, row.kernels[:150]]


def kept(path: Path) -> list[Row]:
    """Return the rows that ``--out`` wrote."""
    names_of = {f.name for f in fields(Row)}
    return [Row(**{k: v for k, v in json.loads(text).items() if k in names_of}) for text in path.read_text().splitlines()]


def spread(name: str, rows: list[Row]) -> list[str]:
    """Return a table row with the distribution of some ratios."""
    ratios = np.array([r.ratio for r in rows])
    counts = [str(int((ratios <= step).sum())) for step in STEPS]
    found = [np.exp(np.log(ratios).mean()), np.median(ratios), ratios.max()]
    return [name, str(len(rows)), *(f"{v:.2f}" for v in found), *counts]


def document(rows: list[Row]) -> str:
    """Return the result file: distributions of the ratios by kind, and the worst rows."""
    kinds = {kind: [r for r in rows if r.case.split(":")[0] == kind] for kind in KINDS}
    table = [spread(kind, found) for kind, found in kinds.items() if found] + [spread("all", rows)]
    heads = ["kind", "cases", "geometric mean", "median", "worst", *(f"to {step:g}" for step in STEPS)]
    worst = sorted(rows, key=lambda r: -r.ratio)[:WORST]
    wrong = [r.case for r in rows if not r.error < WRONG]
    parts = ["# Single operators on a CPU beside ONNX Runtime", __doc__ or "", "## Ratios of times, ours over theirs"]
    parts += [markdown_table(table, heads), f"Results that differ by more than {WRONG:g}: {', '.join(wrong) or 'none'}."]
    parts += ["## The worst", markdown_table([line(r) for r in worst], HEADERS), section(environment_of(gpu=False))]
    return "\n\n".join(parts)


@click.command(help=__doc__)
@click.option("--device", default="rocm")
@click.option("--kinds", default=",".join(KINDS), help="With commas.")
@click.option("--count", default=40, help="Cases.")
@click.option("--first", default=0, help="The first case's number.")
@click.option("--seed", default=1)
@click.option("--case", "one", default="", help="One case again, as KIND:SEED:NUMBER.")
@click.option("--threads", default=0, help="Of ONNX Runtime; 0: as many as cores.")
@click.option("--cpu", is_flag=True, help="Judge by CPU seconds of all threads: of one core (taskset -c 0), however busy.")
@click.option("--whole", is_flag=True, help="Count launches and copies between arrays and the program's memory.")
@click.option("--tune", default="off")
@click.option("--layout", default="")
@click.option("--show", default=30, help="Rows that are printed.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Where rows are kept, one JSON object a line.")
@click.option("--rows", "old", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Kept before.")
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False, path_type=Path), help="Where the result file goes.")
def main(
    device: str, kinds: str, count: int, first: int, seed: int, one: str, threads: int, cpu: bool, whole: bool, tune: str,
    layout: str, show: int, out: Path | None, old: tuple[Path, ...], markdown_file: Path | None,
) -> None:  # fmt: skip
    options: dict[str, Any] = {"tune": tune, **({"layout": layout} if layout else {})}
    how = How(device, threads, cpu, whole, 0.0 if whole else launch_seconds(device, cpu), options)
    wanted = [(k, int(s), int(n)) for k, s, n in [one.split(":")]] if one else list(names(kinds, seed, count, first))
    rows = []
    for kind, number_of_seed, number in wanted:
        case, name = drawn(kind, number_of_seed, number), f"{kind}:{number_of_seed}:{number}"
        try:
            row = measured(case, name, how)
        except RammerError as problem:
            click.echo(f"{name} {case.what}: {problem}", err=True)
            continue
        rows.append(row)
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps({**asdict(row), "ratio": row.ratio}) + "\n")
    rows += [row for path in old for row in kept(path)]
    rows.sort(key=lambda r: -r.ratio)
    click.echo(plain_table([line(r) for r in rows[:show]], HEADERS))
    if markdown_file is not None:
        markdown_file.write_text(document(rows))
    ratios = np.array([r.ratio for r in rows]) if rows else np.ones(1)
    click.echo(f"{len(rows)} cases, geometric mean {np.exp(np.log(ratios).mean()):.2f}, over 1.5: {(ratios > 1.5).sum()}")


if __name__ == "__main__":
    run(main)

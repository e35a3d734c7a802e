"""Weights of 4 bits on a CPU beside ONNX Runtime: matrix products, and decoders like Llama with random weights.

    taskset -c 0 python benchmarks/four_bits.py --threads 1 --markdown cpu_four_bits.md

Both runtimes use the same cores; ``--threads`` is what ONNX Runtime is told. Milliseconds are of the processor (with one core: of
one run), the least of many runs that take turns, so that what else a machine does counts little. ONNX Runtime's accuracy level
4 rounds what the weights multiply to bytes; 0 does not, and neither does rammer. ``error`` is the largest difference from ONNX
Runtime's level 0, as a share of the largest result; behind it that of level 4. The floor is the bytes of the packed weights at 47
GB/s, or the multiplications at one for each of 16 lanes and cycle of ``--clock``, whichever takes longer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent))

from entry import run
from facts import environment_of, section

import rammer
from rammer.report.table import markdown
from rammer_testing.decoder import Decoder

#: Rows, depth, columns, block, whether there are zero points, and the type of the rows.
PRODUCTS = [
    *((1, 4096, n, block, moved, "float32") for n in (4096, 11008) for block in (32, 128) for moved in (False, True)),
    *((m, 4096, 4096, 32, moved, "float32") for m in (8, 128) for moved in (False, True)),
    *((m, 4096, 4096, 32, False, "float16") for m in (1, 8, 128)),
]
SMALL = Decoder(layers=4, hidden=512, heads=8, shared=2, inner=1408, words=4000)
LARGE = Decoder(layers=4, hidden=1024, heads=16, shared=4, inner=2816, words=4000)
DECODERS = [
    *(replace(d, tokens=tokens, past=past) for d in (SMALL, LARGE) for tokens, past in ((1, 63), (32, 0), (128, 0))),
    replace(LARGE, block=128, moved=True),
]
HEADERS = ("model", "floor ms", "rammer ms", "level 0 ms", "level 4 ms", "to level 0", "to level 4", "error", "level 4's error")
#: Bytes a second of the memory, and lanes of a vector.
MEMORY, LANES = 47e9, 16


def product(rows: int, depth: int, columns: int, block: int, moved: bool, kind: str, level: int) -> onnx.ModelProto:
    """One MatMulNBits of 4 bits with random weights."""
    rng, blocks = np.random.default_rng(0), depth // block
    given: dict[str, Any] = {"w": rng.integers(0, 256, (columns, blocks, block // 2)).astype(np.uint8)}
    given["s"] = rng.uniform(0.01, 0.1, (columns, blocks)).astype(kind)
    if moved:
        given["z"] = rng.integers(0, 256, (columns, blocks // 2)).astype(np.uint8)
    sizes = {"K": depth, "N": columns, "bits": 4, "block_size": block, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", ["x", *given], ["y"], domain="com.microsoft", **sizes)
    t = TensorProto.FLOAT if kind == "float32" else TensorProto.FLOAT16
    x, y = (helper.make_tensor_value_info(n, t, [rows, d]) for n, d in (("x", depth), ("y", columns)))
    graph = helper.make_graph([node], "product", [x], [y], [numpy_helper.from_array(v, n) for n, v in given.items()])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def least(calls: list[Callable[[], Any]], seconds: float) -> list[float]:
    """Milliseconds of the processor that each call takes at least."""
    best = [float("inf")] * len(calls)
    for call in calls:
        call()
    for _ in range(8):
        for i, call in enumerate(calls):
            end = time.perf_counter() + seconds / 8
            while time.perf_counter() < end:
                start = time.process_time()
                call()
                best[i] = min(best[i], time.process_time() - start)
    return [1e3 * b for b in best]


def row(name: str, models: list[onnx.ModelProto], feeds: dict[str, Any], floor: float, threads: int, seconds: float) -> list[str]:
    """A line of the table: ``models`` at level 0 and 4."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    sessions = [ort.InferenceSession(m.SerializeToString(), options, providers=["CPUExecutionProvider"]) for m in models]
    names = [v.name for v in sessions[0].get_outputs()]
    exe = rammer.compile(models[0], device="rocm")
    try:
        calls = [lambda: exe.run(feeds), *(lambda s=s: s.run(names, feeds) for s in sessions)]  # type: ignore[misc]
        have, want, rounded = exe.run(feeds), *(s.run(names, feeds) for s in sessions)
        times = least(calls, seconds)
    finally:
        exe.close()
    apart = [max(_apart(a, b) for a, b in zip(found, want, strict=True)) for found in ([have[n] for n in names], rounded)]
    shares = [f"{times[0] / t:.2f}" for t in times[1:]]
    return [name, f"{floor:.2f}", *(f"{t:.2f}" for t in times), *shares, *(f"{e:.1e}" for e in apart)]


def _apart(have: Any, want: Any) -> float:
    gap = np.abs(have.astype(np.float64) - want.astype(np.float64)).max() / np.abs(want.astype(np.float64)).max()
    return float(gap) if np.isfinite(gap) else float("inf")


def floor_of(rows: int, weights: float, block: int, moved: bool, clock: float) -> float:
    """Milliseconds: the bytes of codes, scales and zero points, or the multiplications of one core."""
    size = weights * (0.5 + (4 + 0.5 * moved) / block)
    return 1e3 * max(size / MEMORY, rows * weights / (LANES * clock * 1e9))


def weights_of(d: Decoder) -> int:
    """Weights of a decoder's products."""
    layer = d.hidden * d.hidden * 2 + d.hidden * d.width * d.shared * 2 + 3 * d.hidden * d.inner
    return d.layers * layer + d.hidden * d.words


@click.command(help=__doc__)
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Of ONNX Runtime.")
@click.option("--seconds", default=3.0, show_default=True, help="For each model and runtime.")
@click.option("--clock", default=3.2, show_default=True, help="GHz, for the floor.")
@click.option("--markdown", "out", type=click.Path(path_type=Path, dir_okay=False), help="Write the table there.")
def main(threads: int, seconds: float, clock: float, out: Path | None) -> None:
    """Measure, print the table."""
    rows = []
    for m, k, n, block, moved, kind in PRODUCTS:
        models = [product(m, k, n, block, moved, kind, level) for level in (0, 4)]
        feeds = {"x": np.random.default_rng(1).standard_normal((m, k)).astype(kind)}
        name = f"{m}x{k}x{n} block {block}{' zero points' if moved else ''} {kind}"
        rows.append(row(name, models, feeds, floor_of(m, k * n, block, moved, clock), threads, seconds))
        click.echo(" ".join(rows[-1]), err=True)
    for d in DECODERS:
        models = [replace(d, accuracy=level).model() for level in (0, 4)]
        name = f"decoder hidden {d.hidden} block {d.block}{' zero points' if d.moved else ''}, {d.tokens} behind {d.past}"
        floor = floor_of(d.tokens, weights_of(d), d.block, d.moved, clock)
        rows.append(row(name, models, d.feeds(1), floor, threads, seconds))
        click.echo(" ".join(rows[-1]), err=True)
    table = markdown(rows, HEADERS)
    click.echo(table)
    if out is not None:
        title = "# Weights of 4 bits on a CPU\n\n" + (__doc__ or "")
        out.write_text(f"{title}\n{table}\n\n{section(environment_of(gpu=False))}")


if __name__ == "__main__":
    run(main)

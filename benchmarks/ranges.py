"""Lengths of a range: the time of one program for all of them against programs for each length alone, and against ONNX Runtime.

    python benchmarks/ranges.py --device rocm --hidden 256 --layers 2 --lengths 16
    python benchmarks/ranges.py --device ipu_sim --hidden 64 --layers 1 --most 64 --lengths 12

An encoder and a decoding step with BERT's and GPT-2's operators and random weights. Lengths are drawn from the whole range.
Times are what the devices report (ipu_sim: simulated), at the first tenth of runs that take turns: a busy machine disturbs the
others. Ratios are of the program of the range to the one for the length, so that less is better, and to ONNX Runtime, so
that more is better.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

import rammer
from rammer.errors import RammerError
from rammer.runtime.executable import Executable

Array = np.ndarray

_LAYER = """
 q{i}a = MatMul({x}, wq{i})  q{i}b = Add(q{i}a, bq{i})  q{i}c = Reshape(q{i}b, split)  q{i} = Transpose<perm=[0,2,1,3]>(q{i}c)
 k{i}a = MatMul({x}, wk{i})  k{i}b = Add(k{i}a, bk{i})  k{i}c = Reshape(k{i}b, split)  k{i} = Transpose<perm=[0,2,1,3]>(k{i}c)
 v{i}a = MatMul({x}, wv{i})  v{i}b = Add(v{i}a, bv{i})  v{i}c = Reshape(v{i}b, split)  v{i} = Transpose<perm=[0,2,1,3]>(v{i}c)
 {cache}
 k{i}t = Transpose<perm=[0,1,3,2]>(k{i}k)  s{i}a = MatMul(q{i}, k{i}t)  s{i}b = Div(s{i}a, scale)  s{i}c = Add(s{i}b, bias)
 p{i} = Softmax<axis=-1>(s{i}c)  o{i}a = MatMul(p{i}, v{i}v)  o{i}b = Transpose<perm=[0,2,1,3]>(o{i}a)
 o{i}c = Reshape(o{i}b, join)  o{i}d = MatMul(o{i}c, wo{i})  o{i}e = Add(o{i}d, bo{i})  a{i}a = Add(o{i}e, {x})
 a{i} = LayerNormalization<axis=-1>(a{i}a, ga{i}, ba{i})
 f{i}a = MatMul(a{i}, w1{i})  f{i}b = Add(f{i}a, b1{i})  f{i}c = Div(f{i}b, root)  f{i}d = Erf(f{i}c)  f{i}e = Add(f{i}d, one)
 f{i}f = Mul(f{i}b, f{i}e)  f{i}g = Mul(f{i}f, half)  f{i}h = MatMul(f{i}g, w2{i})  f{i}i = Add(f{i}h, b2{i})
 h{i}a = Add(f{i}i, a{i})  h{i} = LayerNormalization<axis=-1>(h{i}a, gb{i}, bb{i})
"""


@dataclass(frozen=True)
class Size:
    """Of a model: width, layers, heads, and the greatest length."""

    hidden: int
    layers: int
    heads: int
    most: int


def encoder(size: Size, rng: np.random.Generator) -> onnx.ModelProto:
    """BERT's: tokens and a mask, of ``seq`` each."""
    text = f"""encoder (int64[1, seq] ids, int64[1, seq] mask) => (float[1, seq, {size.hidden}] y) {{
        e = Gather(words, ids)  n = Shape<start=1, end=2>(ids)  w = Slice(positions, zero, n, zero)  x = Add(e, w)
        m = Cast<to=1>(mask)  h = Sub(one, m)  l = Mul(h, least)  bias = Unsqueeze(l, places)"""
    for i in range(size.layers):
        text += _LAYER.format(i=i, x="x" if not i else f"h{i - 1}", cache=f"k{i}k = Identity(k{i})  v{i}v = Identity(v{i})")
    return _model(f"{text} y = Identity(h{size.layers - 1}) }}", size, rng)


def decoder(size: Size, rng: np.random.Generator) -> onnx.ModelProto:
    """A step of GPT-2: one token, and keys and values of the ``past``."""
    each, depth = range(size.layers), size.hidden // size.heads
    old = ", ".join(f"float[1, {size.heads}, past, {depth}] {n}{i}p" for i in each for n in "kv")
    new = ", ".join(f"float[1, {size.heads}, all, {depth}] {n}{i}{n}" for i in each for n in "kv")
    text = f"""decoder (int64[1, 1] ids, {old}) => (float[1, 1, {size.hidden}] y, {new}) {{
        e = Gather(words, ids)  n = Shape<start=2, end=3>(k0p)  w = Gather(positions, n)  x = Add(e, w)  bias = Identity(none)"""
    for i in each:
        joined = "  ".join(f"{n}{i}{n} = Concat<axis=2>({n}{i}p, {n}{i})" for n in "kv")
        text += _LAYER.format(i=i, x="x" if not i else f"h{i - 1}", cache=joined)
    return _model(f"{text} y = Identity(h{size.layers - 1}) }}", size, rng)


def _model(text: str, size: Size, rng: np.random.Generator) -> onnx.ModelProto:
    wide, depth = size.hidden, size.hidden // size.heads
    proto = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    known: dict[str, Array] = {
        "words": rng.standard_normal((1000, wide)),
        "positions": rng.standard_normal((size.most + 1, wide)),
        **{n: np.array(v) for n, v in {"one": 1.0, "half": 0.5, "root": 2**0.5, "least": -10000.0, "none": 0.0}.items()},
        "scale": np.array(depth**0.5),
    }
    for i in range(size.layers):
        for n, shape in {
            **dict.fromkeys(("wq", "wk", "wv", "wo"), (wide, wide)),
            "w1": (wide, 4 * wide),
            "w2": (4 * wide, wide),
        }.items():
            known[f"{n}{i}"] = rng.standard_normal(shape) / shape[0] ** 0.5
        for n in ("bq", "bk", "bv", "bo", "b2", "ga", "ba", "gb", "bb"):
            known[f"{n}{i}"] = rng.standard_normal(wide)
        known[f"b1{i}"] = rng.standard_normal(4 * wide)
    numbers = {n: a.astype(np.float32) for n, a in known.items()}
    shapes = {"split": [0, 0, size.heads, depth], "join": [0, 0, wide], "zero": [0], "places": [1, 2]}
    numbers |= {n: np.array(v, np.int64) for n, v in shapes.items()}
    read = {i for node in proto.graph.node for i in node.input}
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in numbers.items() if n in read)
    return proto


def inputs_at(proto: onnx.ModelProto, length: int, rng: np.random.Generator) -> dict[str, Array]:
    """Fresh inputs with this length."""
    made: dict[str, Array] = {}
    for value in proto.graph.input:
        shape = [length if d.dim_param else d.dim_value for d in value.type.tensor_type.shape.dim]
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            made[value.name] = rng.standard_normal(shape).astype(np.float32)
        else:
            made[value.name] = rng.integers(0, 1000, shape) if value.name == "ids" else np.ones(shape, np.int64)
    return made


@dataclass(frozen=True)
class Row:
    """Seconds at a length: of the range's program, of the one for this length, and of ONNX Runtime (nan: not asked)."""

    length: int
    ranged: float
    exact: float
    peer: float


def measure(proto: onnx.ModelProto, lengths: Sequence[int], span: tuple[int, int], args: argparse.Namespace) -> list[Row]:
    """A row for every length; results are compared with ONNX Runtime's, or with those of the other program."""
    rng, symbol = np.random.default_rng(args.seed), "seq" if span[0] else "past"
    options = dict(o.split("=", 1) for o in args.option)
    ranged = rammer.compile(proto, args.device, shapes={symbol: span}, options=options, resident=8)
    peer = _peer(proto, args.threads) if args.peer else None
    rows = list[Row]()
    for length in lengths:
        inputs = inputs_at(proto, length, rng)
        exact = rammer.compile(proto, args.device, options=options)
        calls: list[Callable[[], float]] = [_timed(ranged, inputs), _timed(exact, inputs)]
        expected = exact.run(inputs) if peer is None else peer[0](inputs)
        for name, value in ranged.run(inputs).items():
            np.testing.assert_allclose(value, expected[name], 1e-3, 1e-3)
        if peer is not None:
            calls.append(lambda given=inputs: peer[1](given))  # type: ignore[misc]
        times = [list[float]() for _ in calls]
        begin = time.perf_counter()
        while len(times[0]) < args.least or (time.perf_counter() - begin < args.seconds and len(times[0]) < args.runs):
            for taken, call in zip(times, calls, strict=True):
                taken.append(call())
        found = [sorted(t)[len(t) // 10] for t in times]
        rows.append(Row(length, found[0], found[1], found[2] if peer else math.nan))
        exact.close()
        print(f"{length:5d} {' '.join(f'{t * 1e3:9.3f}' for t in found)} ms", file=sys.stderr, flush=True)
    print(f"{len(ranged.cache)} programs", file=sys.stderr)
    ranged.close()
    return rows


def _timed(exe: Executable, inputs: dict[str, Array]) -> Callable[[], float]:
    def call() -> float:
        exe.run(inputs)
        return exe.timing.device

    return call


def _peer(proto: onnx.ModelProto, threads: int) -> tuple[Callable[..., dict[str, Array]], Callable[..., float]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]

    def timed(inputs: dict[str, Array]) -> float:
        start = time.perf_counter()
        session.run(None, inputs)
        return time.perf_counter() - start

    return lambda inputs: dict(zip(names, session.run(None, inputs), strict=True)), timed


def mean(values: Sequence[float]) -> float:
    """Geometric."""
    return math.exp(statistics.fmean(map(math.log, values)))


def table(title: str, rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [f"### {title}", "", "| length | range, ms | alone, ms | ratio | ONNX Runtime, ms |", "|---:|---:|---:|---:|---:|"]
    for r in rows:
        other = "" if math.isnan(r.peer) else f"{r.peer * 1e3:.3f}"
        lines.append(f"| {r.length} | {r.ranged * 1e3:.3f} | {r.exact * 1e3:.3f} | {r.ranged / r.exact:.2f} | {other} |")
    said = f"Geometric means: {mean([r.ranged / r.exact for r in rows]):.3f} times the program for the length"
    if not math.isnan(rows[0].peer):
        said += f"; {mean([r.peer / r.ranged for r in rows]):.2f} times as fast as ONNX Runtime"
    return "\n".join([*lines, "", f"{said}."])


def main() -> int:
    """Entry point."""
    wanted = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wanted.add_argument("--device", default="rocm")
    wanted.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    for name, value in {"hidden": 256, "layers": 2, "heads": 4, "most": 512, "lengths": 16, "seed": 0, "threads": 2}.items():
        wanted.add_argument(f"--{name}", type=int, default=value)
    wanted.add_argument("--least", type=int, default=5, help="runs of each program at a length, at least")
    wanted.add_argument("--runs", type=int, default=200)
    wanted.add_argument("--seconds", type=float, default=1.0)
    wanted.add_argument("--peer", action="store_true", help="compare with ONNX Runtime")
    wanted.add_argument("--model", choices=("encoder", "decoder"), action="append")
    wanted.add_argument("--out", type=Path)
    args = wanted.parse_args()
    rng, size, tables = np.random.default_rng(args.seed), Size(args.hidden, args.layers, args.heads, args.most), list[str]()
    for name in args.model or ("encoder", "decoder"):
        low, make = (1, encoder) if name == "encoder" else (0, decoder)
        high = args.most - (name == "decoder")
        lengths = sorted(int(n) for n in rng.choice(np.arange(low, high + 1), min(args.lengths, high), replace=False))
        title = f"{name}, hidden {size.hidden}, layers {size.layers}, heads {size.heads}, {low}..{high}, {args.device}"
        try:
            tables.append(table(title, measure(make(size, rng), lengths, (low, high), args)))
        except RammerError as problem:
            print(f"ranges: {problem}", file=sys.stderr)
            return 1
    print("\n\n".join(tables))
    if args.out:
        args.out.write_text("\n\n".join(tables) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

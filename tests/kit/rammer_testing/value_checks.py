"""Conformance of arithmetic by element: functions where approximations fail, integers, conversions, float16. The error bounds are
those of ``bounds``: the limits that the OpenCL and CUDA standards set for a function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from rammer.ir.compute import Compute, ComputeGraph
from rammer.ir.evaluate import run_graph
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import Buffer, Port, RProgram, Storage, Task, dense
from rammer.verify.verifier import verify
from rammer_testing.bounds import bounded_results
from rammer_testing.samples import Sample, check_samples, refusal
from rammer_testing.single import differences
from rammer_testing.subject import Subject

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Elements of every map, rows, and the depth of a sum.
LENGTH, ROWS, DEPTH = 96, 8, 512
#: Functions of any float, of positive floats, and of floats between -1 and 1.
ANYWHERE = ("exp", "expm1", "tanh", "erf", "atan", "sinh", "cosh", "asinh", "sin", "cos", "abs", "sign", "floor", "ceil", "round")
POSITIVE, INSIDE = ("log", "sqrt", "log1p"), ("asin", "acos", "atanh", "tan")
#: Integers: ``a`` and ``b`` have 64 bits, ``c`` and ``d`` have 32; ``b`` and ``d`` are small and nonzero.
INTEGERS = (
    "i64 a[i] + b[i]",
    "i64 a[i] - b[i]",
    "i64 a[i] * 3",
    "i64 a[i] / b[i]",
    "i64 a[i] // b[i]",
    "i64 a[i] % b[i]",
    "i64 fmod(a[i], b[i])",
    "i64 max(a[i], b[i])",
    "i64 abs(a[i])",
    "i64 where(lt(a[i], b[i]), a[i], b[i])",
    "u8 e[i] + f[i]",
    "u16 g[i] + g[i]",
    "u32 h[i] + h[i]",
    "i8 s[i] - 1",
    "i64 table(int64, [5, -3, 7, 11], i % 4) * b[i]",
    "i32 c[i] / d[i]",
    "i32 c[i] // d[i]",
    "i32 c[i] % d[i]",
    "i32 fmod(c[i], d[i])",
    "i32 min(c[i], d[i])",
    "b1 le(a[i], b[i])",
)
#: Conversions; ``x`` are floats with fractions below 10,000.
CASTS = (
    "i32 cast(int32, x[i])",
    "i64 cast(int64, x[i])",
    "f32 cast(float32, c[i])",
    "i32 cast(int32, b[i])",
    "b1 cast(bool, c[i] % 2)",
    "i64 cast(int64, c[i])",
    "u8 cast(uint8, abs(b[i]))",
    "f32 cast(float32, i) * x[i]",
    "i64 cast(int64, e[i])",
)


def check_functions(device: Subject) -> None:
    """Check float functions against float64 within the standards' bounds: near 0, for large values, and between."""
    rng = device.rng
    signs = rng.choice((-1.0, 1.0), LENGTH)
    anywhere = signs * 10.0 ** rng.uniform(-6, 1.3, LENGTH)
    anywhere[:6] = (-2.5, -1.5, -0.5, 0.5, 1.5, 2.5)  # values to be rounded, and ties
    given = {
        "x": anywhere,
        "p": 10.0 ** rng.uniform(-6, 6, LENGTH),
        "u": signs * rng.uniform(1e-6, 0.99, LENGTH),
        "n": rng.integers(-3, 4, LENGTH),
    }
    values = {n: a.astype(np.float32) for n, a in given.items()} | {"w": rng.standard_normal(LENGTH)}
    lines = [f"f32 {fn}({name}[i])" for fns, name in ((ANYWHERE, "x"), (POSITIVE, "p"), (INSIDE, "u")) for fn in fns]
    _judge(device, [*lines, "f32 pow(x[i], n[i])", "f32 pow(p[i], u[i])", "f64 neg(w[i])"], values)


def check_integers(device: Subject) -> None:
    """Check signed integers, values beyond 32 bits where the type has them, and conversions towards zero."""
    rng = device.rng
    small = rng.integers(1, 60, (2, LENGTH)) * rng.choice((-1, 1), (2, LENGTH))
    given = {
        "a": rng.integers(-(2**60), 2**60, LENGTH),
        "b": small[0],
        "c": rng.integers(-(2**30), 2**30, LENGTH, np.int32),
        "d": small[1].astype(np.int32),
        "x": (rng.uniform(-1e4, 1e4, LENGTH)).astype(np.float32),
    }
    for name, kind in (("e", "uint8"), ("f", "uint8"), ("g", "uint16"), ("h", "uint32"), ("s", "int8")):  # their sums wrap around
        given[name] = rng.integers(-100 if kind == "int8" else 0, np.iinfo(kind).max, LENGTH).astype(kind)
    given["a"][:4] = given["b"][:4] * np.array([1, -1, 5, -7])  # divides without remainder
    given["x"][:4] = (-2.5, -0.75, 0.75, 2.5)
    _judge(device, [*INTEGERS, *CASTS], given)


def check_half(device: Subject) -> None:
    """Check that float16 is rounded to nearest, ties to even, whether stored or read in place. This covers maps, conversions,
    sums and products. Sums are in float32."""
    rng = device.rng
    samples = [*_rounded(rng), *_halves(rng)]
    if "float16" not in device.backend.vdevice.precisions and (said := refusal(device, samples[:1])):
        return device.skip_whole(f"it has no precision float16 and refuses programs of it: {said}")
    check_samples(device, samples, "float16")
    a = rng.uniform(0.5, 1.5, (ROWS, DEPTH)).astype(np.float16)
    b = rng.uniform(0.5, 1.5, (DEPTH, ROWS)).astype(np.float16)
    for line in (f"y: f16[i:{ROWS}, j:{ROWS}] = sum[k:{DEPTH}] a[i, k] * b[k, j]", f"y: f16[i:{ROWS}] = sum[k:{DEPTH}] a[i, k]"):
        compute = Compute.parse(line)
        operator = ROperator("y", (compute,), (), ("y",), tuple(x.extent for x in compute.axes))
        _run(device, [operator], {n: v for n, v in (("a", a), ("b", b)) if n in operator.inputs})
    # Beyond 255.9 a square is infinite, both for its reader and in memory.
    _check_in_place(device, (rng.standard_normal(LENGTH) * 10.0 ** rng.uniform(-2, 4, LENGTH)).astype(np.float16))


def _check_in_place(device: Subject, h: Array) -> None:
    """Check that a square read in the operator that computes it has its stored value."""
    computes = [Compute.parse(f"{name}: f16[i:{LENGTH}] = {body}") for name, body in (("q", "h[i] * h[i]"), ("y", "q[i] + h[i]"))]
    operator = ROperator("y", tuple(computes), (Connection("q", "y", "thread"),), ("y",), (LENGTH // 2,))
    program = _program([operator], {"h": h})
    verify(program)
    loaded = device.backend.load(program, {})
    have = loaded.run({"h": h}).outputs["y"]
    loaded.close()
    want = run_graph(ComputeGraph("in_place", ("h",), ("y",), operator.computes, program.types), {"h": h}, precise=False)["y"]
    wrong = int((have != want).sum())
    device.expect(
        not wrong, f"{computes[1]}: {wrong} of {LENGTH} results read a float16 value that is not rounded as if it were stored"
    )


def _rounded(rng: np.random.Generator) -> Iterator[Sample]:
    """Yield conversions to float16 of intermediate values: ties, their neighbours, the smallest and the largest."""
    for length in (LENGTH, 33):
        below = rng.integers(0, 0x7BFF, length).astype(np.uint16).view(np.float16).astype(np.float64)
        step = np.nextafter(below.astype(np.float16), np.float16(np.inf)).astype(np.float64) - below
        ties = (below + step / 2).astype(np.float32)  # exact: a float16 has 11 bits, a tie 12
        near = np.nextafter(ties, rng.choice(np.array([-np.inf, np.inf], np.float32), length))
        inside = (below + step * rng.uniform(0, 1, length)).astype(np.float32)
        x = np.choose(rng.integers(0, 4, length), [ties, ties, near, inside]) * rng.choice(np.array([-1, 1], np.float32), length)
        # The largest value that rounds down to a finite number, the first beyond it, more beyond, and some of the smallest.
        x[:10] = (65519, 65520, 1e5, -2e6, 2.0**-24, -(2.0**-14) * 0.75, 2.0**-15, -(2.0**-20), 2.0**-25, 3 * 2.0**-25)
        yield Sample(f"y: f16[i:{length}] = cast(float16, x[i])", {"x": x.astype(np.float32)}, exact=True)
        yield Sample(f"y: f16[i:{length}] = x[i]", {"x": x.astype(np.float32)[::-1].copy()}, exact=True)


def _halves(rng: np.random.Generator) -> Iterator[Sample]:
    """Yield sums and products of float16 that are exact in float32, and thus rounded once."""
    wide = (rng.standard_normal(LENGTH) * 2.0 ** rng.uniform(-9, 9, LENGTH)).astype(np.float16)
    h, g = wide, rng.permutation(wide) * np.float16(0.7)
    for text in ("h[i] * g[i]", "h[i] + g[i]", "h[i] - g[i]", "h[i] * 0.0009765625"):
        inputs = {n: a for n, a in (("h", h), ("g", g)) if f"{n}[" in text}
        yield Sample(f"y: f16[i:{LENGTH}] = {text}", inputs, exact=True)
    yield Sample(f"y: f32[i:{LENGTH}] = cast(float32, h[i]) * 3.0", {"h": h}, exact=True)
    # Integers above 2,048: every second one is a tie; beyond 4,096 every fourth.
    a, b = rng.integers(20, 60, (9, 7)).astype(np.float16), rng.integers(1, 40, (7, 21)).astype(np.float16)
    yield Sample("y: f16[i:9, j:21] = sum[k:7] a[i, k] * b[k, j]", {"a": a, "b": b}, exact=True)
    c = rng.integers(300, 900, (33, 7)).astype(np.float16)
    yield Sample("y: f16[i:33] = sum[k:7] c[i, k]", {"c": c}, exact=True)
    yield Sample("y: f16[i:33] = sum[k:7] d[k, i]", {"d": np.ascontiguousarray(c.T)}, exact=True)


def check_subnormals(device: Subject) -> None:
    """Check that subnormal numbers are copied, compared, converted, added and multiplied. Functions and matrix products may flush
    them: matrix units split float32 into numbers of fewer bits."""
    rng, step = device.rng, 2.0**-149

    def small(*shape: int, most: int = 1 << 22) -> Array:
        return np.asarray(rng.integers(-most, most, shape) * step).astype(np.float32)

    x, y, normal = small(LENGTH), small(LENGTH), (rng.uniform(1, 2, LENGTH) * 2.0**-126).astype(np.float32)
    x[:4] = (step, -step, 2.0**-126 - step, -(2.0**-127))
    even = (rng.integers(-64, 64, LENGTH) * 2.0**-46).astype(np.float32)
    lines: tuple[tuple[str, dict[str, Array]], ...] = (
        ("x[i]", {"x": x}),
        ("abs(x[i])", {"x": x}),
        ("0.0 - x[i]", {"x": x}),
        ("x[i] + y[i]", {"x": x, "y": y}),
        ("x[i] - y[i]", {"x": normal, "y": np.sort(normal)}),
        ("x[i] * 8388608.0", {"x": x}),
        ("x[i] * 7.888609052210118e-31", {"x": even}),
        ("max(x[i], y[i])", {"x": x, "y": y}),
        ("where(lt(x[i], y[i]), x[i], y[i])", {"x": x, "y": y}),
        ("where(eq(x[i], 0.0), 1.0, x[i])", {"x": x}),
    )
    named = [(text.replace("y[", "z["), {"z" if n == "y" else n: a for n, a in given.items()}) for text, given in lines]
    samples = [Sample(f"y: f32[i:{LENGTH}] = {text}", given, exact=True) for text, given in named]
    rows = small(9, 33, most=1 << 15)
    samples.append(Sample("y: f32[i:9] = sum[k:33] x[i, k]", {"x": rows}, exact=True))
    samples.append(Sample("y: f32[i:9] = max[k:33] x[i, k]", {"x": -np.abs(rows)}, exact=True))
    check_samples(device, samples, "subnormal float32")
    half = (rng.integers(-1023, 1024, 33) * 2.0**-24).astype(np.float16)
    halves = [
        Sample("y: f32[i:33] = cast(float32, h[i])", {"h": half}, exact=True),
        Sample("y: f16[i:33] = h[i] + g[i]", {"h": half, "g": half[::-1].copy()}, exact=True),
        Sample("y: f16[i:33] = cast(float16, x[i])", {"x": half.astype(np.float32)}, exact=True),
        Sample("y: f16[i:33] = max(h[i], g[i])", {"h": half, "g": half[::-1].copy()}, exact=True),
    ]
    if said := refusal(device, halves):
        return device.skip(f"float16: it refuses programs of it: {said}")
    check_samples(device, halves, "subnormal float16")


def _judge(device: Subject, lines: Sequence[str], given: Mapping[str, Array]) -> None:
    """Check all of ``lines`` ("type body") over one axis as one program, one operator per line."""
    operators = []
    for number, line in enumerate(lines):
        kind, _, body = line.partition(" ")
        compute = Compute.parse(f"y{number}: {kind}[i:{LENGTH}] = {body}")
        operators.append(ROperator(compute.name, (compute,), (), (compute.name,), (LENGTH // 2,)))
    used = {n for o in operators for n in o.inputs}
    _run(device, operators, {n: a for n, a in given.items() if n in used})


def _run(device: Subject, operators: Sequence[ROperator], given: Mapping[str, Array]) -> None:
    program = _program(operators, given)
    verify(program)
    loaded = device.backend.load(program, {})
    have = loaded.run(given).outputs
    loaded.close()
    for operator in operators:
        want = bounded_results(operator, {n: given[n] for n in operator.inputs})[operator.name]
        problem = differences(have[operator.name], want)
        device.expect(not problem, f"{operator.computes[0]}: {problem}")


def _program(operators: Sequence[ROperator], given: Mapping[str, Array]) -> RProgram:
    """Return a program of operators that read only inputs, each with an output, in sequence in one row."""
    buffers = [Buffer(f"b_{n}", str(a.dtype), a.size, "input") for n, a in given.items()]
    buffers += [Buffer(f"b_{o.name}", o.anchor.dtype, o.anchor.type.size, "output") for o in operators]
    storages: list[Storage] = [dense(n, f"b_{n}", a.shape) for n, a in given.items()]
    storages += [dense(o.name, f"b_{o.name}", o.anchor.shape) for o in operators]
    tasks = tuple(Task(o.name, i) for o in operators for i in range(o.task_count))
    return RProgram(
        "values",
        "test",
        tuple(Port(n, n) for n in given),
        tuple(Port(o.name, o.name) for o in operators),
        tuple(buffers),
        tuple(storages),
        tuple(operators),
        (),
        (tasks,),
    )

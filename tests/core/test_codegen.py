"""The generic emitter compared with the float64 evaluation of the same Computes."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from rammer.codegen.c_target import CFunction
from rammer.codegen.dialects import C99
from rammer.codegen.emit import emit_operator, scratch_bytes
from rammer.ir.extent import AffineExtent, ReduceBound, SkipTasks
from rammer.ir.program import Storage, dense
from rammer_testing import host_c
from rammer_testing.host_c import THREADED, Array, HostCase, case

F = np.float32
#: One thread with vectors, one thread without, three threads.
DIALECTS = (C99, replace(C99, name="c99_scalar", vectors=()), THREADED)


def check(*items: HostCase, tolerance: float = 1e-5) -> CFunction:
    """Check operators in every host dialect; return the first one's function in the first dialect."""
    functions = [host_c.check_all(items, target, tolerance) for target in DIALECTS]
    return functions[0][0]


def rand(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(F)


CONV = "c: f32[n:2, m:6, h:9, w:11] = sum[q:4, r:3, s:3] pad(x[n, q, h + r - 1, w + s - 1], 0.0) * k[m, q, r, s]"
EPILOGUE = [
    "b: f32[n:2, m:6, h:9, w:11] = c[n, m, h, w] + bias[m]",
    "y: f32[n:2, m:6, h:9, w:11] = max(b[n, m, h, w], 0.0)",
]


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("tile", [(2, 6, 9, 11), (1, 2, 3, 11), (1, 4, 4, 5), (1, 1, 1, 1)])
@pytest.mark.parametrize("layer", ["thread", "veu"])
def test_conv_bias_relu(rng: np.random.Generator, tile: tuple[int, ...], layer: str) -> None:
    values = {"x": rand(rng, 2, 4, 9, 11), "k": rand(rng, 6, 4, 3, 3), "bias": rand(rng, 6)}
    check(case([CONV, *EPILOGUE], values, tile, layer))


def test_grouped_strided_dilated_conv(rng: np.random.Generator) -> None:
    values = {"x": rand(rng, 1, 6, 12, 13), "k": rand(rng, 8, 3, 3, 2)}
    text = (
        "y: f32[n:1, m:8, h:5, w:6] = sum[q:3, r:3, s:2] "
        "pad(x[n, m // 4 * 3 + q, h * 2 + r * 2 - 1, w * 2 + s * 3 - 2], 0.0) * k[m, q, r, s]"
    )
    for tile in ((1, 8, 5, 6), (1, 3, 2, 4)):
        check(case([text], values, tile))


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["thread", "veu"])
def test_conv_with_a_map_prologue(rng: np.random.Generator, layer: str) -> None:
    values = {"x0": rand(rng, 2, 4, 9, 11), "g": rand(rng, 4), "k": rand(rng, 6, 4, 3, 3)}
    prologue = "x: f32[n:2, q:4, h:9, w:11] = exp(x0[n, q, h, w]) + g[q]"
    check(case([prologue, CONV], {**values}, (1, 4, 3, 5), layer))


SOFTMAX = [
    "m: f32[i:7] = max[j:13] x[i, j]",
    "e: f32[i:7, j:13] = exp(x[i, j] - m[i])",
    "s: f32[i:7] = sum[j:13] e[i, j]",
    "y: f32[i:7, j:13] = e[i, j] / s[i]",
]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("layer", ["thread", "veu"])
@pytest.mark.parametrize("tile", [(7, 13), (2, 13), (3, 5)])
def test_softmax_as_one_operator(rng: np.random.Generator, layer: str, tile: tuple[int, ...]) -> None:
    item = case(SOFTMAX, {"x": rand(rng, 7, 13) * 10}, tile, layer)
    function = check(item)
    assert function.scratch == scratch_bytes(item.operator, item.binding)
    assert (function.scratch > 0) == (layer == "veu")


def test_layernorm_as_one_operator(rng: np.random.Generator) -> None:
    texts = [
        "t: f32[i:6] = sum[j:40] x[i, j]",
        "d: f32[i:6, j:40] = x[i, j] - t[i] * 0.025",
        "v: f32[i:6] = sum[j:40] d[i, j] * d[i, j]",
        "y: f32[i:6, j:40] = d[i, j] / sqrt(v[i] * 0.025 + 1e-05) * g[j] + b[j]",
    ]
    values = {"x": rand(rng, 6, 40) + 3, "g": rand(rng, 40), "b": rand(rng, 40)}
    check(case(texts, values, (4, 40), "veu"))
    check(case(texts, values, (4, 16), {("t", "d"): "veu", ("v", "y"): "veu"}))


def test_blocks_of_elements(rng: np.random.Generator) -> None:
    """Check tiles so large that even many threads compute several elements each."""
    product = "y: f32[i:64, j:48] = sum[k:21] a[i, k] * b[k, j]"
    window = "pad(x[n, q, h * 2 + r - 1, w + s - 1], 0.0)"
    conv = f"y: f32[n:1, m:8, h:12, w:24] = sum[q:3, r:3, s:3] {window} * k[m, q, r, s]"
    check(
        case([product], {"a": rand(rng, 64, 21), "b": rand(rng, 21, 48)}, (64, 48)),
        case(
            [product.replace("b[k, j]", "b[j, k]")],
            {"a": rand(rng, 64, 21), "b": rand(rng, 48, 21)},
            (32, 48),
        ),
        case([conv], {"x": rand(rng, 1, 3, 24, 24), "k": rand(rng, 8, 3, 3, 3)}, (1, 8, 12, 24)),
        case([conv], {"x": rand(rng, 1, 3, 24, 24), "k": rand(rng, 8, 3, 3, 3)}, (1, 8, 5, 24)),
        case(["y: f32[i:64, j:64] = x[j, i] * 2.0"], {"x": rand(rng, 64, 64)}, (32, 64)),
        case(
            ["y: f32[j:512] = sum[k:30] x[k] * w[k, j]"],
            {"x": rand(rng, 30), "w": rand(rng, 30, 512)},
            (256,),
        ),
    )


def test_max_pool_propagates_nan(rng: np.random.Generator) -> None:
    x = rand(rng, 1, 3, 10, 10)
    x[0, 1, 4, 4] = np.nan
    text = "y: f32[n:1, c:3, h:5, w:5] = max[r:3, s:3] pad(x[n, c, h * 2 + r - 1, w * 2 + s - 1], -inf)"
    check(case([text], {"x": x}, (1, 2, 2, 3)))


def test_global_average_pool(rng: np.random.Generator) -> None:
    texts = [
        "s: f32[n:2, c:5, i:1, j:1] = sum[h:7, w:9] x[n, c, h, w]",
        "y: f32[n:2, c:5, i:1, j:1] = s[n, c, i, j] * 0.015873016",
    ]
    check(case(texts, {"x": rand(rng, 2, 5, 7, 9)}, (1, 2, 1, 1)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "shape"),
    [
        ("y: f32[j:24] = sum[i:40003] x[i, j]", (40003, 24)),
        ("y: f32[j:5] = sum[i:30000] x[i, j * 2]", (30000, 10)),
        ("y: f32[c:16] = sum[h:200, w:160] x[h, w, c]", (200, 160, 16)),
        ("y: f32[j:9] = sum[q:5000, r:3, s:3] pad(x[q + r - 1, j + s - 1], 0.0)", (5000, 9)),
        ("y: f32[c:8] = sum[h:5, w:6000] x[w * 2, c] * z[h]", (12000, 8)),
    ],
)
def test_long_sums_keep_their_bits(rng: np.random.Generator, line: str, shape: tuple[int, ...]) -> None:
    """Check numbers of one sign, by the ten thousand: sequential sums are off by 1e-6 to 6e-6."""
    values = {"x": rng.random(shape).astype(F)} | ({"z": rng.random(5).astype(F)} if "z[" in line else {})
    extent = int(line.split("]")[0].split(":")[-1])
    check(case([line], values, (extent,)), tolerance=1e-6)


def test_resize_tables(rng: np.random.Generator) -> None:
    near = "u: f32[h:5, w:7] = x[table(int64, [0, 0, 1, 2, 2], h), table(int64, [0, 0, 1, 1, 2, 2, 3], w)]"
    blend = "y: f32[h:5, w:7] = u[h, w] * table(float32, [0.5, 0.25, 1.0, 0.0, 2.0], h)"
    check(case([near, blend], {"x": rand(rng, 3, 4)}, (2, 3), "thread"))
    scaled = "z: f32[h:5, w:7] = x[h, w] * 2.0"
    again = near.replace("= x[", "= z[")
    check(case([scaled, again, blend], {"x": rand(rng, 5, 7)}, (2, 3), {("z", "u"): "veu"}))


def test_gather_reads_data_dependent_rows(rng: np.random.Generator) -> None:
    text = "y: f32[i:5, j:6] = x[where(lt(k[i], 0), k[i] + 9, k[i]), j]"
    values = {"x": rand(rng, 9, 6), "k": np.array([0, -1, 8, 3, -9], dtype=np.int64)}
    check(case([text], values, (2, 4)))
    check(case(["z: f32[a:9, b:6] = x[a, b] * 3.0", text.replace("x[", "z[")], values, (2, 4), "veu"))
    check(case(["z: f32[a:9, b:6] = x[a, b] * 3.0", text.replace("x[", "z[")], values, (2, 4), "thread"))


def test_argmax(rng: np.random.Generator) -> None:
    texts = ["m: f32[i:6] = max[j:10] x[i, j]", "y: i64[i:6] = min[j:10] where(eq(x[i, j], m[i]), j, 9223372036854775807)"]
    for layer in ("thread", "veu"):
        check(case(texts, {"x": rand(rng, 6, 10)}, (4,), layer))


def test_piecewise_concat(rng: np.random.Generator) -> None:
    text = "y: f32[i:9, j:4] = where(lt(i, 4), pad(a[i, j], 0.0), pad(b[i - 4, j], 0.0))"
    values = {"a": rand(rng, 4, 4), "b": rand(rng, 5, 4)}
    check(case([text], values, (2, 3)))
    check(case(["a: f32[i:4, j:4] = exp(p[i, j])", text], {"p": values["a"], "b": values["b"]}, (2, 3)))
    check(case(["a: f32[i:4, j:4] = exp(p[i, j])", text], {"p": values["a"], "b": values["b"]}, (2, 3), "veu"))


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integer_operations_wrap_and_divide_as_numpy(rng: np.random.Generator, dtype: str) -> None:
    info = np.iinfo(dtype)
    a = rng.integers(info.min, info.max, 64, dtype=dtype, endpoint=True)
    b = rng.integers(max(info.min, -9), 9, 64, dtype=dtype)
    b[b == 0] = 1
    short = {
        "int8": "i8",
        "uint8": "u8",
        "int16": "i16",
        "uint16": "u16",
        "int32": "i32",
        "uint32": "u32",
        "int64": "i64",
        "uint64": "u64",
    }[dtype]
    small = rng.integers(0, 4, 64).astype(dtype)
    bodies = ["a[i] + b[i]", "a[i] - b[i]", "a[i] * b[i]", "a[i] % b[i]", "fmod(a[i], b[i])", "a[i] // b[i]"]
    bodies += ["max(a[i], b[i])", "min(a[i], b[i])", "and_(a[i], b[i])", "xor(a[i], b[i])", "pow(b[i], c[i])"]
    if dtype.startswith("u"):
        bodies.append("shr(shl(a[i], c[i]), c[i])")
    arrays = {"a": a, "b": b, "c": small}
    items = []
    for body in bodies:
        used = {n: v for n, v in arrays.items() if f"{n}[" in body}
        items.append(case([f"y: {short}[i:64] = {body}"], used, (16,)))
    tame = {"a": (a // 2).astype(dtype), "b": b}
    check(*items, case([f"y: {short}[i:64] = div(a[i], b[i])"], tame, (16,)))


def test_bool_operations(rng: np.random.Generator) -> None:
    a, b = rng.integers(0, 2, 20).astype(bool), rng.integers(0, 2, 20).astype(bool)
    items = []
    for body in (
        "and_(a[i], b[i])",
        "or_(a[i], b[i])",
        "xor(a[i], b[i])",
        "not_(a[i])",
        "where(a[i], b[i], True)",
    ):
        items.append(case([f"y: b1[i:20] = {body}"], {"a": a, "b": b}, (7,)))
    x = rand(rng, 20)
    items.append(case(["y: b1[i:20] = le(x[i], 0.1)"], {"x": x}, (7,)))
    items.append(case(["y: i64[i:20] = cast(int64, lt(x[i], 0.1)) * 3"], {"x": x}, (7,)))
    check(*items)


FLOATS = (
    "neg",
    "abs",
    "sign",
    "floor",
    "ceil",
    "round",
    "exp",
    "atan",
    "tanh",
    "sinh",
    "cosh",
    "asinh",
    "erf",
)


@pytest.mark.slow
def test_float_functions(rng: np.random.Generator) -> None:
    x = np.concatenate([rand(rng, 60) * 2, np.array([np.nan, np.inf, -np.inf, 0.5, 1.5, 2.5, -0.5, 0], F)])
    items = [case([f"y: f32[i:68] = {fn}(x[i])"], {"x": x}, (30,)) for fn in FLOATS]
    items += [case([f"y: b1[i:68] = {fn}(x[i])"], {"x": x}, (30,)) for fn in ("isnan", "isinf")]
    finite = {"x": np.where(np.isinf(x), F(1), x)}
    items += [case([f"y: f32[i:68] = {fn}(x[i])"], finite, (30,)) for fn in ("sin", "cos", "tan")]
    inner = {"x": np.tanh(rand(rng, 68))}
    items += [case([f"y: f32[i:68] = {fn}(x[i])"], inner, (30,)) for fn in ("asin", "acos", "atanh")]
    beyond = {"x": np.abs(x) + F(1.25)}
    items += [case([f"y: f32[i:68] = {fn}(x[i])"], beyond, (30,)) for fn in ("sqrt", "log", "acosh")]
    check(*items)


def test_float_pairs(rng: np.random.Generator) -> None:
    a, b = rand(rng, 50) * 5, rand(rng, 50) * 2
    a[3], b[4] = np.nan, np.nan
    bodies = ["max(a[i], b[i])", "min(a[i], b[i])", "max(a[i], 0.0)", "min(1.0, a[i])", "a[i] % b[i]"]
    bodies += ["fmod(a[i], b[i])", "a[i] // b[i]", "pow(abs(a[i]), b[i])", "a[i] / b[i]"]
    bodies += [
        "where(lt(a[i], b[i]), a[i], 2.0)",
        "where(and_(le(a[i], 1.0), not_(isnan(b[i]))), b[i], a[i])",
    ]
    items = []
    for body in bodies:
        used = {n: v for n, v in {"a": a, "b": b}.items() if f"{n}[" in body}
        items.append(case([f"y: f32[i:50] = {body}"], used, (16,)))
    check(*items)


def test_negative_indices_divide_downwards(rng: np.random.Generator) -> None:
    text = "y: f32[i:9] = pad(x[(i - 5) // 2 + 1], 7.0) + z[(i - 5) % 3]"
    check(case([text], {"x": rand(rng, 3), "z": rand(rng, 3)}, (2,)))


def test_strided_storages(rng: np.random.Generator) -> None:
    x, k = rand(rng, 2, 4, 9, 11), rand(rng, 6, 4, 3, 3)
    storages = {
        "x": Storage("x", "bx", 17, x.shape, (1, 2, 8 * 11, 8)),
        "c": Storage("c", "bc", 5, (2, 6, 9, 11), (2000, 150, 13, 1)),
    }
    item = case([CONV], {"x": x, "k": k}, (1, 4, 4, 5), storages=storages)
    check(item)


def test_broadcast_storage(rng: np.random.Generator) -> None:
    storages = {"x": Storage("x", "bx", 2, (3, 4), (0, 1))}
    x = np.broadcast_to(rand(rng, 4), (3, 4))
    check(case(["y: f32[i:3, j:4] = x[i, j] * 2.0"], {"x": x}, (2, 2), storages=storages))


@pytest.mark.slow
def test_several_outputs(rng: np.random.Generator) -> None:
    values = {"x": rand(rng, 2, 4, 9, 11), "k": rand(rng, 6, 4, 3, 3), "bias": rand(rng, 6)}
    function = check(case([CONV, *EPILOGUE], values, (1, 4, 4, 5), "thread", ("c", "b", "y")))
    assert function.text.count("for (") == case_loops(values)
    check(case([CONV, *EPILOGUE], values, (1, 4, 4, 5), "veu", ("c", "y")))


def case_loops(values: dict[str, Array]) -> int:
    item = case([CONV, *EPILOGUE], values, (1, 4, 4, 5), "thread")
    return emit_operator(item.operator, item.binding, C99).text.count("for (")


def test_an_output_read_with_a_halo_is_written_once_by_each_task(rng: np.random.Generator) -> None:
    texts = ["a: f32[i:20] = exp(x[i])", "y: f32[i:20] = pad(a[i - 1], 0.0) + pad(a[i + 2], 0.0)"]
    check(case(texts, {"x": rand(rng, 20)}, (6,), "veu", ("a", "y")))
    check(case(texts, {"x": rand(rng, 20)}, (6,), "thread", ("a", "y")))


def test_scalars_and_empty_tensors(rng: np.random.Generator) -> None:
    check(case(["s: f32[] = sum[i:30] x[i]", "y: f32[] = sqrt(s[()])"], {"x": rand(rng, 30) ** 2}))
    check(case(["y: f32[i:0] = x[i] * 2.0"], {"x": rand(rng, 0)}, (1,)))
    check(case(["y: f32[i:3] = sum[j:0] x[i, j]"], {"x": rand(rng, 3, 0)}, (2,)))


def test_float64_and_float16(rng: np.random.Generator) -> None:
    x = rng.standard_normal(40)
    check(case(["y: f64[i:40] = tanh(x[i]) * const(float64, 0.1)"], {"x": x}, (9,)), tolerance=1e-14)
    half = rand(rng, 40).astype(np.float16)
    check(case(["y: f16[i:40] = x[i] * x[i] + const(float16, 1.0)"], {"x": half}, (9,)), tolerance=1e-3)
    texts = ["z: f16[i:40] = x[i] * x[i]", "y: f32[i:40] = cast(float32, z[39 - i])"]
    check(case(texts, {"x": half}, (9,), "veu"), tolerance=1e-3)


def test_scratch_of_finished_tiles_is_reused(rng: np.random.Generator) -> None:
    texts = [f"t{k}: f32[i:64] = t{k - 1}[i] * 1.5" for k in range(1, 6)]
    item = case(texts, {"t0": rand(rng, 64)}, (32,), "veu")
    check(item)
    assert scratch_bytes(item.operator, item.binding) == 2 * 32 * 4


def test_text_does_not_depend_on_tensor_names(rng: np.random.Generator) -> None:
    x = {"x": rand(rng, 7, 13)}
    one = case(SOFTMAX, x, (2, 13), "veu")
    names = {"x": "u", "m": "top", "e": "power", "s": "total", "y": "out"}
    renamed = [re.sub(r"\b([xmesy])(\[|:)", lambda m: names[m[1]] + m[2], t) for t in SOFTMAX]
    two = case(renamed, {"u": x["x"]}, (2, 13), "veu")
    hashes = {emit_operator(i.operator, i.binding, C99).name for i in (one, two)}
    assert len(hashes) == 1


def test_a_length_keeps_blocks_and_vectors(rng: np.random.Generator) -> None:
    """Check that a product's blocks cover rows up to a length, and that a mask at it is a vector instead of a loop over lanes."""
    length = {"length": np.array(50)}
    values, storages = {"p": rand(rng, 99, 99), "v": rand(rng, 99, 8), **length}, {"length": dense("length", "length", ())}
    whole = case(["y: f32[m:99, n:8] = sum[k:99] p[m, k] * v[k, n]"], values, storages=storages)
    bound = ReduceBound("y", "k", AffineExtent.parse("length"))
    ranged = replace(whole.operator, skips=(SkipTasks.parse("m from length", 1),), reduce_bounds=(bound,))
    for operator in (whole.operator, ranged):
        assert "+= 3)" in emit_operator(operator, whole.binding, C99, within=True).text
    mask = case(["y: f32[m:9, n:99] = where(lt(n, length[()]), p[m, n] * 2.0, 0.0)"], values)
    assert "rm_within" in check(mask).text


def test_missing_connection_is_an_error(rng: np.random.Generator) -> None:
    item = case(SOFTMAX, {"x": rand(rng, 7, 13)}, (2, 13), "device")
    with pytest.raises(ValueError, match="meet at no layer"):
        emit_operator(item.operator, item.binding, C99)

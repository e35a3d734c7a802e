"""Warpgroup products with one instruction per product: layouts and synchronisation on host threads, machine code; on a GPU also
results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rammer.device.manifest import Array, Binding, OpenOptions
from rammer.ir.compute import Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.operator import ROperator
from rammer.ir.types import TensorType
from rammer_testing.nonempty import some

pytest.importorskip("cuda.bindings")

from families import operator as from_text
from products import CASES, conv, matmul

from rammer.codegen.contraction_form import product_of
from rammer.codegen.kernel_family import Choice
from rammer.codegen.products.packing import rounded_to_tf32, to_core_matrices
from rammer.codegen.task_parameters import Unsuited

from .cuda_choices import WARPGROUPS, choices
from .emulator.launch import COMPILER
from .host_wgmma import run_warpgroups
from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.compile import compile_cubin
from rammer_cuda.contraction.kernel import Contraction, Producers, contraction_kernel
from rammer_cuda.contraction.staging import HALF_CORES
from rammer_cuda.contraction.warpgroup import WGMMA_F16
from rammer_cuda.source import task_kernel, translation_unit

Case = tuple[ROperator, Binding]
FAMILY = {"float32": "gemm_wgmma3", "tf32": "gemm_wgmma1", "float16": "gemm_wgmma_f16"}


def half(texts: list[str], shapes: dict[str, tuple[int, ...]], constants: str = "") -> Case:
    """Return an operator on float16 tensors."""
    case, binding = from_text(texts, shapes, constants, "thread", dict.fromkeys(shapes, "float16"))
    return case, replace(binding, precision="float16")


TF32 = {
    **{n: CASES[n] for n in ("pointwise", "three by three", "grouped", "strided", "deep", "constant")},
    "padded": conv(32, 64, 16, 3),
    "halos": conv(24, 64, 7, 3),
    "groups": conv(64, 96, 12, 3, groups=2),
    "tokens": matmul(128, 256, 96, True),
    "crowded": conv(128, 128, 28, 3),
}
#: Both operands in both orders, constants on either side, ragged tiles and depths, a residual and an activation.
HALVES = {
    "linear": half(
        ["s: f16[i:128, j:96] = sum[k:392] x[i, k] * w[k, j]", "y: f16[i:128, j:96] = max(s[i, j] + b[j], 0.0)"],
        {"x": (128, 392), "w": (392, 96), "b": (96,)},
        "wb",
    ),
    "weights first": half(["y: f16[c:80, p:64] = sum[k:72] w[c, k] * x[k, p]"], {"w": (80, 72), "x": (72, 64)}, "w"),
    "scores": half(["y: f16[h:2, i:72, j:40] = sum[d:64] q[h, i, d] * k[h, j, d]"], {"q": (2, 72, 64), "k": (2, 40, 64)}),
    "context": half(["y: f16[h:2, i:72, j:64] = sum[k:120] p[h, i, k] * v[h, k, j]"], {"p": (2, 72, 120), "v": (2, 120, 64)}),
    "heads": half(["y: f16[h:2, i:64, j:48] = sum[k:64] p[h, i, k] * v[k, h, j]"], {"p": (2, 64, 64), "v": (64, 2, 48)}),
    "turned": half(["y: f16[i:64, j:136] = sum[k:40] x[k, i] * z[k, j]"], {"x": (40, 64), "z": (40, 136)}),
    "wide": half(["y: f16[i:256, j:192] = sum[k:256] x[k, i] * z[j, k]"], {"x": (256, 256), "z": (192, 256)}),
}
ALL = {("tf32", n): (o, replace(b, precision="tf32")) for n, (o, b) in TF32.items()}
ALL |= {("float16", n): c for n, c in HALVES.items()}


def backend() -> CudaBackend:
    found = open_backend(OpenOptions(target="sm_90a"))
    assert isinstance(found, CudaBackend)
    return found


def kinds(offered: list[Choice]) -> list[ROperator]:
    """Return one candidate of every kind: split or not, halos or not, rows or columns per warpgroup, warpgroups."""
    found: dict[tuple[object, ...], ROperator] = {}
    for c in offered:
        config = dict(c.operator.config)
        found.setdefault((config["split_k"] > 1, config["halo"], config.get("down"), config["bk"]), c.operator)
    return list(found.values())


def alone(choice: Choice) -> Choice:
    """Return the choice with the whole sum in one block and the fewest buffers, which are soon reused."""
    few = {"split_k": 1, "stages": 3, "producers": 1}
    config = tuple((n, few.get(n, v)) for n, v in choice.operator.config)
    return choice._replace(operator=replace(choice.operator, config=config))


def given(rng: np.random.Generator, tiled: ROperator, binding: Binding, positive: bool = False) -> dict[str, Array]:
    """Return random values of all inputs. With ``positive`` a biased rounding shows."""
    result = dict[str, Array]()
    for name in tiled.inputs:
        kind = binding.types[name]
        values = rng.random(kind.shape) if positive else rng.standard_normal(kind.shape)
        result[name] = values.astype(kind.dtype)
    return result


def reference(tiled: ROperator, values: dict[str, Array], precision: str) -> Array:
    """Return float64 results from the operands of the tensor cores."""
    main: Compute = tiled.computes[0]
    known = {n: v.astype(np.float64) for n, v in values.items()}
    rounded = {n: rounded_to_tf32(values[n]).astype(np.float64) for n in main.reads} if precision == "tf32" else known
    known[main.name] = evaluate_compute(main, rounded, precise=True)
    for c in tiled.computes[1:]:
        known[c.name] = evaluate_compute(c, known, precise=True)
    return known["y"]


#: Relative to the result's norm: float32 sums of exact products; half a unit of float16's last place.
TOLERANCE = {"float32": 5e-7, "tf32": 5e-7, "float16": 3.5e-4}


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
# Late products with the first kernel and late copies with the second; `make test-all` also runs the opposite assignment.
@pytest.mark.parametrize("late_copies", [(False, True), pytest.param((True, False), marks=pytest.mark.large)])
@pytest.mark.parametrize(
    "precision, case",
    [
        ("tf32", "three by three"),
        ("tf32", "halos"),
        ("tf32", "tokens"),
        ("float32", "halos"),
        ("float16", "linear"),
        ("float16", "weights first"),
        ("float16", "scores"),
        ("float16", "context"),
        ("float16", "heads"),
        ("float16", "turned"),
    ],
)
def test_kernels_on_host_threads(precision: str, case: str, late_copies: tuple[bool, bool], rng: np.random.Generator) -> None:
    operator, binding = TF32[case] if precision == "float32" else ALL[precision, case]
    found = kinds([alone(c) for c in choices(backend(), operator, binding, WARPGROUPS, 60)])
    assert found
    for tiled, late in zip((found[0], found[:2][-1]), late_copies, strict=True):
        kernel = task_kernel(tiled, binding)
        values = given(rng, tiled, binding)
        have = run_warpgroups(kernel, tiled, binding, values, late, not late)["y"]
        want = reference(tiled, values, precision)
        error = np.linalg.norm(have.astype(np.float64) - want) / np.linalg.norm(want)
        assert error <= TOLERANCE[precision], (error, tiled.head())


def test_core_matrices_of_float16_hold_eight_products_of_a_column() -> None:
    values = np.arange(32 * 24, dtype=np.float16).reshape(32, 24)
    packed = to_core_matrices(values)
    assert packed.dtype == np.float16 and packed.shape == (4, 1, 3, 8, 8)
    assert packed[3, 0, 2, 5, 6] == values[24 + 6, 16 + 5]
    # The index of Cores.place and of the descriptor: 16 bytes at product k of column n have number k / 8 * 24 + n.
    assert packed.reshape(-1)[(3 * 24 + 21) * 8 + 6] == values[24 + 6, 21]


@pytest.mark.parametrize(
    "case, turned",
    [
        ("linear", (False, False)),
        ("scores", (False, False)),
        ("context", (False, True)),
        ("turned", (True, True)),
        ("wide", (True, False)),
    ],
)
@pytest.mark.parametrize("down", [False, True])
def test_operands_stay_in_the_order_in_which_they_come(case: str, turned: tuple[bool, bool], down: bool) -> None:
    operator, binding = HALVES[case]
    found = next(c.operator for c in choices(backend(), operator, binding, WARPGROUPS) if dict(c.operator.config)["down"] == down)
    text = task_kernel(found, binding).text
    swapped = turned if down else turned[::-1]
    assert f"_{'nt'[swapped[0]]}{'nt'[swapped[1]]}<" in text


@pytest.mark.parametrize("deep", [False, True])
def test_neighbouring_threads_write_one_core_matrix(deep: bool) -> None:
    """Check that eight threads of a quarter warp write 128 consecutive bytes (every bank once) and all copies fill the block."""
    case = "scores" if deep else "turned"
    operator, binding = HALVES[case]
    found = next(c.operator for c in choices(backend(), operator, binding, WARPGROUPS) if dict(c.operator.config)["down"])
    product = product_of(found, binding, "float16")
    pipeline = Contraction(product, binding, WGMMA_F16, WGMMA_F16.block(product)).pipeline
    assert isinstance(pipeline, Producers)
    stage = pipeline.read
    assert stage.staging == HALF_CORES and stage.deep == deep
    words = list[list[int]]()
    for tid in range(128):
        mine = list[int]()
        if deep:
            across, step = stage._words(), stage._step()
            for i in range(-(-stage.unit // step)):
                k, j = tid // 8 % across * 8, tid // 8 // across * 8 + tid % 8 + i * step
                mine += [eval(stage.place(str(k), str(j))) // 8] if j < stage.unit else []
        else:
            across, rows, groups = stage._lanes()
            assert groups == 1
            for i in range(-(-stage.depth.block // rows)):
                k, j = tid // 8 // across * 8 + tid % 8 + i * rows, tid // 8 % across * 8
                mine += [eval(stage.place(str(k), str(j)).replace("/", "//")) // 8] if k < stage.depth.block else []
        words.append(mine)
    assert sorted(w for mine in words for w in mine) == list(range(stage.unit * stage.depth.block // 8))
    for first in range(0, 128, 8):
        for turn in zip(*words[first : first + 8], strict=True):
            assert sorted(w % 8 for w in turn) == list(range(8))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision, case", sorted(ALL))
def test_machine_code(precision: str, case: str) -> None:
    operator, binding = ALL[precision, case]
    device = backend()
    found = kinds(choices(device, operator, binding, WARPGROUPS, 60))
    assert found and {o.family for o in found} == {FAMILY[precision]}
    for tiled in found:
        resources = device.resources(tiled, binding)
        assert resources.spills == 0, tiled.head()
        assert resources.local_bytes <= device.gpu.shared
    made = task_kernel(found[0], binding)
    assert ("wgmma.mma_async" in made.text) and compile_cubin(translation_unit([made]), "sm_90a").code


def test_only_what_was_asked_for_is_offered() -> None:
    operator, binding = conv(512, 64, 32, 3)
    wide = {f.name for f in WARPGROUPS}
    for precision in ("float32", "tf32"):
        offered = {o.family for o in backend().candidates(operator, replace(binding, precision=precision))}
        assert offered & wide == {FAMILY[precision]}
    linear, bound = half(["y: f16[i:4096, j:4096] = sum[k:4096] x[k, i] * z[j, k]"], {"x": (4096, 4096), "z": (4096, 4096)})
    assert {o.family for o in backend().candidates(linear, bound)} & wide == {"gemm_wgmma_f16"}
    old = open_backend(OpenOptions(target="sm_80"))
    assert not {o.family for o in old.candidates(linear, bound)} & wide
    types = {n: TensorType("float32", t.shape) for n, t in bound.types.items()}
    single = replace(linear, computes=tuple(replace(c, dtype="float32") for c in linear.computes))
    assert not {o.family for o in backend().candidates(single, replace(bound, types=types))} & wide, "no constant operand"


def test_operands_without_16_bytes_together_are_refused() -> None:
    odd, binding = half(["y: f16[i:64, j:64] = sum[k:77] x[i, k] * z[j, k]"], {"x": (64, 77), "z": (64, 77)})
    assert not choices(backend(), odd, binding, WARPGROUPS, 4)
    tiled = replace(odd, tile=(64, 64), family="gemm_wgmma_f16", config=(("bk", 64), ("down", 1)))
    with pytest.raises(Unsuited, match="16 bytes"):
        contraction_kernel(tiled, binding)
    even, bound = HALVES["scores"]
    with pytest.raises(Unsuited, match="halos"):
        contraction_kernel(replace(even, tile=(1, 64, 40), family="gemm_wgmma_f16", config=(("bk", 64), ("halo", 1))), bound)


#: A register overwritten while products read it showed in "crowded" alone, and not in every run.
RUNS = 20


@pytest.mark.cuda
@pytest.mark.parametrize("precision, case", sorted(ALL))
def test_single_products_agree_with_float64(precision: str, case: str, rng: np.random.Generator) -> None:
    from rammer_cuda.backend import whole_program

    tolerance = {"tf32": 5e-6, "float16": 3.5e-4}[precision]
    operator, binding = ALL[precision, case]
    device = open_backend(OpenOptions())
    assert isinstance(device, CudaBackend)
    offered = choices(device, operator, binding, WARPGROUPS)
    drawn = [offered[int(i)].operator for i in rng.choice(len(offered), min(4, len(offered)), replace=False)]
    for tiled in some((*kinds(offered), *drawn)):
        program, constants = whole_program(tiled, binding)
        constants = {n: np.abs(v) for n, v in constants.items()}
        given_ = given(rng, tiled, binding, positive=True)
        inputs = {p.external: given_[p.tensor] for p in program.inputs}
        want = reference(tiled, constants | {p.tensor: inputs[p.external] for p in program.inputs}, precision)
        loaded = device.load(program, constants)
        have, *again = (loaded.run(inputs).outputs["y"] for _ in range(RUNS))
        loaded.close()
        error = np.linalg.norm(have.astype(np.float64) - want) / np.linalg.norm(want)
        assert error <= tolerance, (error, tiled.head())
        assert {have.tobytes()} == {a.tobytes() for a in again}, tiled.head()

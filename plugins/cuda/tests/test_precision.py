"""The tf32 and float16 families of the cuda plugin: candidates, machine code; on a GPU also results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from products import CASES, matmul

from rammer.device.manifest import Array, Binding, OpenOptions
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.operator import ROperator
from rammer.ir.types import TensorType
from rammer_testing.nonempty import some

pytest.importorskip("cuda.bindings")

from rammer.codegen.contraction_form import product_of
from rammer.codegen.products.packing import rounded_to_tf32
from rammer.codegen.task_parameters import Unsuited

from .cuda_choices import WARPS, choices
from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.cell.recognise import cell_candidates
from rammer_cuda.contraction.instruction import MMA_F16
from rammer_cuda.contraction.kernel import Contraction
from rammer_cuda.contraction.staging import HALVES
from rammer_cuda.gpu import TARGETS
from rammer_cuda.rows.gemv import GEMV
from rammer_cuda.source import task_kernel

#: The family for each requested precision.
NEW = {"tf32": "gemm_tf32", "float16": "gemm_f16", "bfloat16": "gemm_bf16"}
#: Operands for each way to copy float16 blocks: constants, rows and columns of 16 bytes, single elements.
MORE = {"long rows": matmul(40, 128, 72, False), "odd rows": matmul(33, 77, 51, False), "wide": matmul(128, 768, 256, True)}
ALL = CASES | MORE


def asked(case: str, precision: str) -> tuple[ROperator, Binding]:
    """Return a case as a model compiled in ``precision`` has it."""
    operator, binding = ALL[case]
    if precision != "float16":
        return operator, replace(binding, precision=precision)
    types = {n: TensorType("float16", t.shape) for n, t in binding.types.items()}
    return replace(operator, computes=tuple(replace(c, dtype="float16") for c in operator.computes)), replace(
        binding, types=types, precision=precision
    )


def chosen(backend: CudaBackend, case: str, precision: str, count: int = 80) -> tuple[list[ROperator], Binding]:
    """Return the first tiled candidates of the family that is new in ``precision``."""
    operator, binding = asked(case, precision)
    new = [f for f in WARPS if f.name == NEW[precision]]
    return [c.operator for c in choices(backend, operator, binding, new, count)], binding


@pytest.mark.sampled(1, of="target")
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("precision", sorted(NEW))
@pytest.mark.parametrize("case", ["three by three", "grouped", "matmul", "long rows", "wide"])
def test_machine_code(case: str, precision: str, target: str) -> None:
    backend = open_backend(OpenOptions(target=target))
    assert isinstance(backend, CudaBackend)
    found, binding = chosen(backend, case, precision)
    assert found
    for tiled in (found[0], found[-1], max(found, key=lambda o: dict(o.config)["tm"] * dict(o.config)["tn"])):
        assert task_kernel(tiled, binding).text.count("mma.sync") >= 1
        resources = backend.resources(tiled, binding)
        # ptxas sometimes spills a word or two of loop-invariant predicates (bounds checks of elements). Spilled accumulators
        # would be hundreds of bytes.
        assert resources.spills <= 16
        assert 16 <= resources.registers <= 255


@pytest.mark.slow
def test_tf32_is_never_offered_unasked() -> None:
    backend = open_backend(OpenOptions(target="sm_90a"))
    assert isinstance(backend, CudaBackend)
    operator, binding = CASES["three by three"]
    for precision, families in (
        ("float32", {"gemm", "gemm_tf32x3"}),
        ("tf32", {"gemm", "gemm_tf32"}),
        ("bfloat16", {"gemm", "gemm_tf32", "gemm_bf16"}),
    ):
        offered = choices(backend, operator, replace(binding, precision=precision), WARPS, 400)
        assert {c.operator.family for c in offered} == families
    assert "gemm_tf32" not in {o.family for o in backend.candidates(operator, binding)}


def test_families_refuse_other_element_types() -> None:
    operator, binding = asked("matmul", "float16")
    tiled = replace(operator, tile=(16, 16))
    with pytest.raises(Unsuited, match="operands are not float32"):
        product_of(tiled, binding)
    mixed = replace(binding, types={**binding.types, "x": TensorType("float32", binding.types["x"].shape)})
    for dtype in ("float16", "float32"):
        with pytest.raises(Unsuited, match=f"operands are not {dtype}"):
            product_of(tiled, mixed, dtype)
    double = replace(binding, types={**binding.types, "y": TensorType("float64", binding.types["y"].shape)})
    with pytest.raises(Unsuited, match="a mixture of float16, float64"):
        product_of(tiled, double, "float16")
    device = TARGETS["sm_90a"]
    row, halves = asked("row", "float16")
    assert GEMV.candidates(*CASES["row"], device) and GEMV.candidates(row, halves, device), "or the next lines say nothing"
    held = replace(halves, reused=frozenset(some(row.inputs)))
    assert cell_candidates(row, held, device) and not cell_candidates(row, halves, device)
    for name in some(row.computes[0].reads):
        mixed = replace(halves, types={**halves.types, name: CASES["row"][1].types[name]})
        assert not GEMV.candidates(row, mixed, device) and not cell_candidates(row, replace(mixed, reused=held.reused), device)


def test_rounding_to_tf32_is_to_nearest_halves_away() -> None:
    one = np.float32(1)
    step = np.float32(2.0**-10)
    values = np.array([one + step / 4, one + step / 2, one + step * 3 / 4, -one - step / 2, 0, np.inf, np.nan], np.float32)
    want = np.array([one, one + step, one + step, -one - step, 0, np.inf, np.nan], np.float32)
    assert np.array_equal(rounded_to_tf32(values), want, equal_nan=True)


@pytest.mark.parametrize("case, a, b", [("long rows", True, False), ("odd rows", False, False), ("wide", True, False)])
def test_blocks_are_copied_by_16_bytes_where_they_can_be(case: str, a: bool, b: bool) -> None:
    """Check copies of ``x``, contiguous along the reduction: 16 bytes for rows of 128 and 768 elements, single elements for rows
    of 77."""
    operator, binding = asked(case, "float16")
    config = (("tm", 1), ("tn", 2), ("bk", 32))
    product = product_of(replace(operator, tile=(16, 16), config=config), binding, "float16")
    kernel = Contraction(product, binding, MMA_F16, MMA_F16.block(product))
    assert kernel.a.staging == kernel.b.staging == HALVES
    assert (kernel.a.deep, kernel.b.deep) == (a, b)
    assert kernel.a.pitch % 16 == kernel.b.pitch % 16 == 8, "rows of an odd number of 16-byte words"
    assert kernel.b.packing is not None or kernel.b.vector == (8 if case == "long rows" else 1)


def rounded_to_bfloat16(values: Array) -> Array:
    """Return float32 values rounded to 7 bits of mantissa, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(np.float32)


ROUNDED = {"tf32": rounded_to_tf32, "bfloat16": rounded_to_bfloat16}


def _reference(operator: ROperator, values: dict[str, Array], precision: str) -> Array:
    """Return float64 results from the operands of the tensor cores. float16 values between computes are rounded as if stored."""
    main = operator.computes[0]
    known = {n: v.astype(np.float64) for n, v in values.items()}
    rounded = {n: ROUNDED[precision](values[n]).astype(np.float64) for n in main.reads} if precision in ROUNDED else known
    known[main.name] = evaluate_compute(main, rounded, precise=True)
    for c in operator.computes[1:]:
        known = {n: v.astype(np.float16).astype(np.float64) for n, v in known.items()} if precision == "float16" else known
        known[c.name] = evaluate_compute(c, known, precise=True)
    return known["y"]


@pytest.mark.cuda
@pytest.mark.parametrize("precision, tolerance", [("tf32", 5e-6), ("bfloat16", 5e-6), ("float16", 3.5e-4)])
@pytest.mark.parametrize("case", sorted(ALL))
def test_every_family_agrees_with_float64(case: str, precision: str, tolerance: float, rng: np.random.Generator) -> None:
    """Check tf32, where products of rounded operands are exact in float32 sums, and float16. The tolerance of float16 is half a
    unit of the result's last place."""
    from rammer_cuda.backend import whole_program

    backend = open_backend(OpenOptions())
    assert isinstance(backend, CudaBackend)
    found, binding = chosen(backend, case, precision)
    for i in some(rng.choice(len(found), min(8, len(found)), replace=False)):
        tiled = found[int(i)]
        program, constants = whole_program(tiled, binding)
        kind = np.float16 if precision == "float16" else np.float32
        inputs = {p.external: rng.random(binding.types[p.tensor].shape).astype(kind) for p in program.inputs}
        want = _reference(tiled, constants | inputs, precision)
        loaded = backend.load(program, constants)
        have, again = (loaded.run(inputs).outputs["y"] for _ in range(2))
        loaded.close()
        error = np.linalg.norm(have.astype(np.float64) - want) / np.linalg.norm(want)
        assert error <= tolerance, (error, tiled.head())
        assert have.tobytes() == again.tobytes()

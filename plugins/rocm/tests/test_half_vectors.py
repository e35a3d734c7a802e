"""Vector use on a CPU: float16 storage keeps the vectors of float32 tensors, and phases are products."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest

from rammer.device.manifest import Binding
from rammer.ir import expr as ex
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.expr import Cast, Expr
from rammer.ir.operator import ROperator
from rammer_testing.cases import NetCase, Sampler
from rammer_testing.nets import KINDS
from rammer_testing.single import UntiledOperator, subjects

from rammer_rocm.families import OpenClKernels

LAYERS = (
    MemoryLayer("dram", "device", 16 << 30, 47e9, 64),
    MemoryLayer("cache", "veu", 1 << 20, 768e9, 64),
    MemoryLayer("register", "thread", 2048, 1536e9, 64),
)
CPU = VDevice("opencl_cpu", "two cores", 2, LAYERS, 96e9, 3e-6, vector=16, resident=2, precisions=("float32", "float16"))
#: Vector loads or stores of any family.
VECTORS = re.compile(r"\b(?:rm_[vh](?:load|even|store)\d+|vload(?:_half)?\d+|vstore(?:_half)?\d+)\(")


class Described(OpenClKernels):
    """A backend that only compiles."""

    fingerprint, profiler = "described", None


def widened(subject: UntiledOperator) -> tuple[ROperator, Binding]:
    """Return the same operator with float32 in place of float16."""

    def rule(e: Expr) -> Expr | None:
        return replace(e, dtype="float32") if isinstance(e, Cast) and e.dtype == "float16" else None

    o, b = subject.operator, subject.binding
    wide = {n: replace(t, dtype="float32") if t.dtype == "float16" else t for n, t in b.types.items()}
    computes = tuple(replace(c, dtype=wide[c.name].dtype, body=ex.transform(c.body, rule)) for c in o.computes)
    return replace(o, computes=computes), replace(b, types=wide)


def vectors(backend: OpenClKernels, operator: ROperator, binding: Binding) -> tuple[str, int]:
    """Return the family of the best candidate, and the number of vector loads and stores in its text."""
    best = next(iter(backend.candidates(operator, binding)))
    return best.family, len(VECTORS.findall(backend.writer.written(best, binding).text))


def narrower(cases: list[NetCase]) -> tuple[list[str], int]:
    """Return the operators that lose their family or all their vectors in float16, and the number of checked operators."""
    backend, found, seen = Described(CPU), list[str](), 0
    for case in cases:
        for subject in subjects(case, backend):  # type: ignore[arg-type]
            half, whole = vectors(backend, subject.operator, subject.binding), vectors(backend, *widened(subject))
            names = (*subject.operator.inputs, *(c.name for c in subject.operator.computes))
            seen += "float16" in {subject.binding.types[n].dtype for n in names}
            if half[0] != whole[0] or bool(half[1]) != bool(whole[1]):
                found.append(f"{case} {subject.operator.name}: {half} in float16, {whole} in float32")
    return found, seen


def test_phases_of_a_transposed_convolution_are_products() -> None:
    """Check a row axis, phases that only the weights have, and columns. The generic kernel had 8 times ONNX Runtime's time."""
    backend = Described(CPU)
    for sizes in ("c=64 m=64 h=32 w=32 k=2 s=2 p=0", "c=256 m=128 h=16 w=16 k=4 s=2 p=1"):
        text = f"transposed n=1 {sizes} off=1 +bias"
        product = next(s for s in subjects(NetCase.parse(text), backend) if s.operator.main.reduce)  # type: ignore[arg-type]
        best = next(iter(backend.candidates(product.operator, product.binding)))
        assert best.family == "panel" and best.tile[1] > 8 and best.tile[-1] == 1


def sampled(kind: str, seed: int) -> Sampler:
    return Sampler(Random(seed), 100_000, ("float16",), (kind,))


def halved(kind: str) -> bool:
    """Return True if the kind has a float16 form. Sums with codes have only float32 forms."""
    return {case.precision for _, case in zip(range(3), sampled(kind, 0).first(), strict=False)} == {"float16"}


def test_only_sums_with_codes_have_no_form_of_their_own_in_float16() -> None:
    assert {k for k in KINDS if not halved(k)} == {"iconv", "imatmul", "stored"}


@pytest.mark.slow
@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "recurrent" and halved(k)])
def test_float16_keeps_every_vector(kind: str, seed: int) -> None:
    sampler = sampled(kind, seed)
    found, seen = narrower([case for _, case in zip(range(3), sampler.first(), strict=False)])
    assert seen
    assert not found, "\n".join(found)

"""Prologue maps of contractions in the cuda plugin's matrix products: forms, text, machine code; results
on the host and a GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from products import PROLOGUES

from rammer.codegen.contraction_form import product_of, roles_of
from rammer.codegen.task_parameters import Unsuited
from rammer.device.manifest import Binding, OpenOptions
from rammer.ir.compute import Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.operator import ROperator
from rammer.ir.program import Storage, dense
from rammer.ir.types import TensorType
from rammer_testing.nonempty import some

from .emulator.launch import COMPILER, HostKernel, run_on_host

pytest.importorskip("cuda.bindings")

from .cuda_choices import WARPGROUPS, WARPS, choices
from .host_wgmma import run_warpgroups
from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.device import device_source
from rammer_cuda.families import FAMILIES
from rammer_cuda.family import Family
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.source import task_kernel

#: The copies of the FFMA family. As on the device, a copy arrives no earlier than the wait for its group.
HOST = """
#define __forceinline__ inline
struct RmCopy { float *to; const float *from; int count; bool valid; };
typedef std::vector<RmCopy> RmCopies;
typedef std::deque<RmCopies> RmGroups;
RM_OWN(RmCopies, rm_open)
RM_OWN(RmGroups, rm_groups)
static void rm_copy4(float *to, const float *from, bool valid) { rm_open().push_back({to, from, 1, valid}); }
static void rm_copy16(float *to, const float *from, bool valid) { rm_open().push_back({to, from, 4, valid}); }
static void rm_commit() { rm_groups().push_back(rm_open()); rm_open().clear(); }
template <int N> static void rm_arrived() {
  for (; rm_groups().size() > N; rm_groups().pop_front())
    for (const RmCopy &c : rm_groups().front())
      for (int i = 0; i < c.count; ++i) c.to[i] = c.valid ? c.from[i] : 0.0f;
}
"""


def backend_of(target: str) -> CudaBackend:
    backend = open_backend(OpenOptions(target=target))
    assert isinstance(backend, CudaBackend)
    return backend


def choices_of(case: str, backend: CudaBackend) -> list[ROperator]:
    """Return tiled versions in every family that supports a prologue; wide families both with halos and without."""
    operator, binding = PROLOGUES[case]
    rounded = replace(binding, precision="tf32")
    found = choices(backend, operator, binding, WARPS, 200) + choices(backend, operator, rounded, WARPS, 60)
    if backend.gpu.warpgroups:
        found += choices(backend, operator, binding, WARPGROUPS, 40) + choices(backend, operator, rounded, WARPGROUPS, 40)
    return [c.operator for c in found]


def values_of(tiled: ROperator, binding: Binding, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return inputs and constants. ReLU does not clip the shifts, so padding before the maps would show."""
    given = {n: rng.standard_normal(binding.types[n].shape, np.float32) for n in tiled.inputs}
    return given | {"g": np.abs(given["g"]) + 0.5}


def everything(binding: Binding) -> dict[str, Storage]:
    """Return storages of all tensors, interior ones included, as in a model's plan."""
    return {n: dense(n, f"b_{n}", t.shape) for n, t in binding.types.items()}


def reference(tiled: ROperator, given: Mapping[str, np.ndarray]) -> np.ndarray:
    values = {n: v.astype(np.float64) for n, v in given.items()}
    for c in tiled.computes:
        values[c.name] = evaluate_compute(c, values, precise=True)
    return values["y"]


def test_the_operand_is_the_tensor_behind_the_maps() -> None:
    operator, binding = PROLOGUES["three by three"]
    roles = roles_of(operator, binding, prologue=True)
    assert (roles.a.tensor, roles.b.tensor, roles.changed) == ("w", "x", "b")
    assert roles.prologue is not None
    assert (roles.prologue.constants, roles.prologue.dimensions) == (("f", "g"), (1,))
    product = product_of(replace(operator, tile=(1, 20, 1, 13)), binding, prologue=True)
    assert product.a.prologue is None
    assert product.b.prologue is not None
    assert [g.extent for g in product.b.guards] == [13, 13], "the padding is that of the tensor"
    assert [c.name for c in product.after] == ["y"]


def test_families_that_know_no_maps_decline() -> None:
    operator, binding = PROLOGUES["pointwise"]
    with pytest.raises(Unsuited, match="maps before the contraction"):
        roles_of(operator, binding)
    several = [f for f in FAMILIES if f.name and not f.product]
    assert several and not choices(backend_of("sm_90a"), operator, binding, several, 1)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("x[n, c, h, w] * f[c]", "x[n, c, h, w] * x[n, c, 0, w]", "not element by element"),
        ("x[n, c, h, w] * f[c]", "x[n, c, h, w] * f[h]", "more than its reduction"),
        ("x[n, c, h, w] * f[c]", "x[n, c, h, w] * q[n, c, h, w]", "maps over 2 tensors"),
        ("t[n, m, h, w] + b[m]", "t[n, m, h, w] + v[n, m, h, w]", "not an operand of t only"),
    ],
)
def test_other_maps_are_declined(old: str, new: str, why: str) -> None:
    operator, binding = PROLOGUES["pointwise"]
    computes = tuple(Compute.parse(str(c).replace(old, new)) for c in operator.computes)
    types = dict(binding.types) | {"q": TensorType("float32", (1, 64, 12, 12))}
    changed = replace(operator, computes=computes)
    with pytest.raises(Unsuited, match=why):
        roles_of(changed, replace(binding, types=types), prologue=True)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("case", ["pointwise", "three by three", "first layer"])
def test_machine_code(case: str, target: str) -> None:
    backend, found = backend_of(target), dict[object, ROperator]()
    for tiled in choices_of(case, backend):
        config = dict(tiled.config)
        found.setdefault((tiled.family, config.get("split_k", 1) > 1, config.get("halo", 0)), tiled)
    families = {"gemm", "gemm_tf32x3", "gemm_tf32"} | ({"gemm_wgmma3", "gemm_wgmma1"} if target == "sm_90a" else set())
    assert {tiled.family for tiled in found.values()} == families
    for tiled in some(found.values()):
        resources = backend.resources(tiled, PROLOGUES[case][1])
        assert resources.spills == 0, tiled.head()


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", sorted(PROLOGUES))
def test_what_is_changed_is_what_was_copied(case: str) -> None:
    """Check that each thread applies the maps exactly to the words of shared memory that its copies fill."""
    for tiled in some(choices_of(case, backend_of("sm_90a"))):
        text = task_kernel(tiled, PROLOGUES[case][1]).text
        name = "a" if "auto aprologue" in text else "b"
        fetch, change = (re.search(rf"auto {name}{verb} = .*?\n  *}};\n", text, re.S) for verb in ("fetch", "prologue"))
        assert fetch is not None
        assert change is not None
        copied = re.findall(r"rm_copy(?:4|16)\((.*?), \w+at\w+(?: \+ [^,]*)?, (.*)\);", fetch[0])
        guards = [m[1] or "" for m in re.finditer(r"(?:if \((.*)\) )?rm_copy(?:4|16)\(", fetch[0])]
        changed = re.findall(r"float \*const to\d+ = (.*);", change[0])
        tests = re.findall(r"const bool ok\d+ = (.*);", change[0])
        assert changed == [target for target, _ in copied]
        assert tests == [f"{g} && {v}" if g else v for g, (_, v) in zip(guards, copied, strict=True)]


def ffma_on_host(kernel: TaskKernel) -> str:
    """Return the text of a ``gemm`` kernel with its copies emulated."""
    shared = f"alignas(16) static float shared[{kernel.shared // 4}];"
    text = kernel.text.replace(device_source("copies"), HOST)
    return text.replace("extern __shared__ __align__(16) float shared[];", shared)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", sorted(PROLOGUES))
def test_ffma_kernels_agree_with_float64_on_the_host(case: str, rng: np.random.Generator) -> None:
    operator, binding = PROLOGUES[case]
    found = [c.operator for c in choices(backend_of("sm_80"), operator, binding, WARPS)]
    found = [o for o in found if o.family == "gemm" and task_kernel(o, binding).threads <= 128]
    for i in some(rng.choice(len(found), min(3, len(found)), replace=False)):
        tiled = found[int(i)]
        given, kernel = values_of(tiled, binding, rng), task_kernel(tiled, binding)
        have = run_on_host(HostKernel.of(kernel, binding, given, ffma_on_host(kernel), tiled.task_count), given)["y"]
        want = reference(tiled, given)
        assert np.linalg.norm(have - want) <= 2e-6 * np.linalg.norm(want), tiled.head()


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("late_copies", "late_products"), [(False, True), (True, False)])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 2e-6), ("tf32", 2e-3)])
@pytest.mark.parametrize("case", ["strided", "three by three"])
def test_warpgroup_kernels_agree_with_float64_on_the_host(
    case: str, precision: str, tolerance: float, late_copies: bool, late_products: bool, rng: np.random.Generator
) -> None:
    """Check one and two copying warpgroups, with halos and without. Buffers are soon reused."""
    operator, binding = PROLOGUES[case]
    best = choices(backend_of("sm_90a"), operator, replace(binding, precision=precision), WARPGROUPS, 1)[0].operator
    for producers, halo in product((1, 2), (0, 1) if case == "three by three" else (0,)):
        other = {"split_k": 1, "stages": 2 + producers, "producers": producers, "halo": halo}
        tiled = replace(best, config=tuple((n, other.get(n, v)) for n, v in best.config))
        given, kernel = values_of(tiled, binding, rng), task_kernel(tiled, binding)
        have = run_warpgroups(kernel, tiled, binding, given, late_copies, late_products)["y"]
        want = reference(tiled, given)
        assert np.linalg.norm(have - want) <= tolerance * np.linalg.norm(want), tiled.head()


@pytest.mark.parametrize("families", [WARPS, WARPGROUPS])
def test_maps_cost_something(families: tuple[Family, ...]) -> None:
    backend, (operator, binding) = backend_of("sm_90a"), PROLOGUES["pointwise"]
    binding = replace(binding, storages=everything(binding))
    tiled = choices(backend, operator, binding, families, 1)[0].operator
    bare = replace(tiled, computes=tiled.computes[2:], connections=tiled.connections[2:])
    assert backend.kernel(bare, binding).crowded < backend.kernel(tiled, binding).crowded
    assert backend.kernel(tiled, binding).crowded < 1.5 * backend.kernel(bare, binding).crowded


@pytest.mark.cuda
@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", sorted(PROLOGUES))
def test_every_family_agrees_with_float64(case: str, rng: np.random.Generator) -> None:
    from rammer_cuda.backend import whole_program

    backend = open_backend(OpenOptions())
    assert isinstance(backend, CudaBackend)
    binding = PROLOGUES[case][1]
    kinds = dict[object, list[ROperator]]()
    for tiled in choices_of(case, backend):
        config = dict(tiled.config)
        key = tiled.family, config.get("split_k", 1) > 1, config.get("halo", 0), config.get("producers", 1)
        kinds.setdefault(key, []).append(tiled)
    for same in some(kinds.values()):
        for i in rng.choice(len(same), min(2, len(same)), replace=False):
            tiled = same[int(i)]
            program, constants = whole_program(tiled, binding)
            given = values_of(tiled, binding, rng)
            constants = {n: given[n] for n in constants}
            inputs = {p.external: given[p.external] for p in program.inputs}
            want = reference(tiled, given)
            loaded = backend.load(program, constants)
            have, again = (loaded.run(inputs).outputs["y"] for _ in range(2))
            loaded.close()
            limit = 2e-3 if tiled.family in ("gemm_tf32", "gemm_wgmma1") else 2e-6
            assert np.linalg.norm(have - want) <= limit * np.linalg.norm(want), tiled.head()
            assert have.tobytes() == again.tobytes()


@pytest.mark.cuda
def test_a_nan_stays_in_its_pixel(rng: np.random.Generator) -> None:
    """Check that NaN passes the maps and reaches only its readers. Padding and the ring's unused words stay 0."""
    from rammer_cuda.backend import whole_program

    backend = open_backend(OpenOptions())
    assert isinstance(backend, CudaBackend)
    binding = PROLOGUES["three by three"][1]
    for family in ("gemm", "gemm_tf32x3", "gemm_wgmma3", "gemm_wgmma1"):
        for tiled in [o for o in choices_of("three by three", backend) if o.family == family][:2]:
            program, constants = whole_program(tiled, binding)
            given = values_of(tiled, binding, rng)
            given["x"][0, 5, 6, 12] = np.nan
            loaded = backend.load(program, {n: given[n] for n in constants})
            have = loaded.run({p.external: given[p.external] for p in program.inputs}).outputs["y"]
            loaded.close()
            assert np.array_equal(np.isnan(have), np.isnan(reference(tiled, given))), tiled.head()
            assert not np.isnan(have).all()

"""Warpgroup products: supported operators, operand arrangements, machine code; on a GPU also results."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from rammer.device.manifest import Binding, OpenOptions
from rammer.ir.compute import Axis, Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.expr import Load, Op, Ref, integer
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import dense
from rammer.ir.types import TensorType
from rammer_testing.nonempty import some

pytest.importorskip("cuda.bindings")

from products import CASES, conv

from rammer.codegen.products.operand import Staged
from rammer.codegen.products.packing import to_core_matrices
from rammer.codegen.task_parameters import Unsuited

from .cuda_choices import WARPGROUPS, choices
from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.chain.kernel import CHAIN
from rammer_cuda.chain.recognise import chain_of
from rammer_cuda.contraction.halo import halo_of
from rammer_cuda.contraction.instruction import FFMA
from rammer_cuda.contraction.kernel import contraction_kernel
from rammer_cuda.contraction.warpgroup import RESULT_ORDER, split_tf32
from rammer_cuda.dialect import CUDA

WIDE = {
    **{n: CASES[n] for n in ("pointwise", "three by three", "grouped", "strided", "deep", "constant")},
    "padded": conv(32, 64, 16, 3),
    "halos": conv(64, 96, 12, 3, groups=2),
    "rows of 7": conv(24, 64, 7, 3),
}


def mlp(rows: int, widths: tuple[int, ...], residual: bool = False) -> tuple[ROperator, Binding]:
    """Return consecutive products of these widths, each with bias and ReLU. With ``residual`` the last adds a tensor."""
    computes, links, constants = list[Compute](), list[Connection](), set[str]()
    shapes: dict[str, tuple[int, ...]] = {"x": (rows, widths[0]), "z": (1,)}
    before = "x"
    for n, (deep, wide) in enumerate(pairwise(widths)):
        axes = (Axis("i", rows), Axis("j", wide))
        point = (Ref("i"), Ref("j"))
        body = Op("mul", (Load(before, (Ref("i"), Ref("k"))), Load(f"w{n}", (Ref("k"), Ref("j")))))
        computes.append(Compute(f"m{n}", "float32", axes, body, (Axis("k", deep),), "sum"))
        if n:
            links.append(Connection(before, f"m{n}", "veu"))
        biased = Op("add", (Load(f"m{n}", point), Load(f"b{n}", (Ref("j"),))))
        if residual and n == len(widths) - 2:
            biased = Op("add", (biased, Load("r", point)))
            shapes["r"] = (rows, wide)
        computes.append(Compute(f"y{n}", "float32", axes, Op("max", (biased, Load("z", (integer(0),))))))
        links.append(Connection(f"m{n}", f"y{n}", "thread"))
        shapes |= {f"w{n}": (deep, wide), f"b{n}": (wide,)}
        constants |= {f"w{n}", f"b{n}"}
        before = f"y{n}"
    operator = ROperator(before, tuple(computes), tuple(links), (before,))
    types = {n: TensorType("float32", s) for n, s in shapes.items()} | {c.name: c.type for c in computes}
    stored = (*operator.inputs, *operator.outputs)
    return operator, Binding(types, {n: dense(n, f"b_{n}", types[n].shape) for n in stored}, frozenset(constants))


CHAINS = {
    "square": mlp(300, (64, 64, 64, 64)),
    "ragged": mlp(130, (60, 40, 24, 4)),
    "residual": mlp(257, (16, 72, 8), True),
    "odd": mlp(64, (7, 33, 5)),
    "few rows": mlp(3, (32, 32, 32)),
    "deep": mlp(200, (64,) * 10),
}


def target(name: str = "sm_90a") -> CudaBackend:
    backend = open_backend(OpenOptions(target=name))
    assert isinstance(backend, CudaBackend)
    return backend


def test_halves_lose_nothing_but_a_last_bit(rng: np.random.Generator) -> None:
    values = rng.standard_normal(10_000).astype(np.float32)
    big, small = split_tf32(values)
    assert not np.any(big.view(np.uint32) & 0x1FFF), "tf32 has 10 bits behind the point"
    assert np.array_equal(big.astype(np.float64) + small, values)
    kept = (small.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    assert np.max(np.abs(kept - small) / np.abs(values)) < 2.0**-22


def test_core_matrices_are_eight_columns_of_sixteen_bytes() -> None:
    values = np.arange(2 * 16 * 24, dtype=np.float32).reshape(2, 16, 24)
    packed = to_core_matrices(values)
    assert packed.shape == (2, 2, 2, 3, 8, 4)
    assert packed[1, 1, 0, 2, 5, 3] == values[1, 8 + 3, 16 + 5]
    assert to_core_matrices(values, RESULT_ORDER)[1, 1, 1, 2, 5, 3] == values[1, 8 + RESULT_ORDER[4 + 3], 16 + 5]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", sorted(WIDE))
def test_machine_code_of_the_wide_family(case: str) -> None:
    backend, (operator, binding) = target(), WIDE[case]
    found = {}
    for choice in choices(backend, operator, binding, WARPGROUPS, 60):
        config = dict(choice.operator.config)
        found.setdefault((config["split_k"] > 1, config["halo"]), choice.operator)
    assert found
    for tiled in found.values():
        resources = backend.resources(tiled, binding)
        assert resources.spills <= 64
        assert resources.local_bytes <= backend.gpu.shared


def test_two_variable_operands_are_not_for_the_wide_family() -> None:
    operator, binding = CASES["matmul"]
    assert not choices(target(), operator, binding, WARPGROUPS, 4)
    with pytest.raises(Unsuited, match="constant"):
        contraction_kernel(replace(operator, tile=(37, 52), family="gemm_wgmma3"), binding)


def test_only_sm_90a_is_offered_warpgroup_products() -> None:
    operator, binding = conv(512, 64, 32, 3)
    families = {name: {o.family for o in target(name).candidates(operator, binding)} for name in ("sm_80", "sm_90", "sm_90a")}
    assert "gemm_wgmma3" in families["sm_90a"]
    assert "gemm_wgmma3" not in families["sm_80"] | families["sm_90"]
    chain, bound = mlp(65536, (64, 64, 64, 64))
    assert target().rate(chain, bound) > 0.5 > target("sm_80").rate(chain, bound)


def test_a_patch_covers_every_window_once() -> None:
    from rammer.codegen.contraction_form import product_of
    from rammer.codegen.products.depth import depth_of

    operator, binding = conv(32, 64, 16, 3, stride=2)
    product = product_of(replace(operator, tile=(1, 32, 4, 8)), binding)
    depth = depth_of(product.main.reduce, 32)
    halo = halo_of(Staged("b", product, product.b, product.columns, 32, depth, 128, FFMA.staged[1], CUDA), binding)
    assert halo.unit == (2 * 3 + 3) * (2 * 7 + 3)
    assert halo.pitch % 16 == 8
    place = {r: eval(halo.place(str(r)).replace("/", "//")) for r in range(32)}  # C division of positive numbers
    shift = {t: eval(halo.tap(str(t)).replace("/", "//")) for t in range(9)}
    for r, base in some(place.items()):
        for t, more in some(shift.items()):
            assert base + more == (r // 8 * 2 + t // 3) * 17 + r % 8 * 2 + t % 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", sorted(CHAINS))
def test_machine_code_of_chains(case: str) -> None:
    backend, (operator, binding) = target(), CHAINS[case]
    found = choices(backend, operator, binding, (CHAIN,))
    assert found
    resources = backend.resources(found[0].operator, binding)
    assert resources.spills <= 160
    assert resources.local_bytes <= backend.gpu.shared


def test_what_is_no_chain() -> None:
    operator, binding = CHAINS["square"]
    with pytest.raises(Unsuited, match="whole rows"):
        chain_of(replace(operator, tile=(64, 32)), binding)
    with pytest.raises(Unsuited, match="one constant"):
        chain_of(operator, replace(binding, constants=frozenset(("w0", "w1"))))
    single, bound = mlp(64, (32, 32))
    with pytest.raises(Unsuited, match="not a chain"):
        chain_of(single, bound)
    large, bound = mlp(64, (32, 256, 32))
    with pytest.raises(Unsuited, match="too large"):
        chain_of(large, bound)


def agrees(rng: np.random.Generator, operator: ROperator, binding: Binding, tolerance: float) -> None:
    from rammer_cuda.backend import whole_program

    backend = open_backend(OpenOptions())
    program, constants = whole_program(operator, binding)
    # Positive values of the order of one: a biased rounding shows only in sums of one sign.
    constants = {n: np.abs(v) / np.float32(v.shape[0]) for n, v in constants.items()}
    inputs = {p.external: rng.random(binding.types[p.tensor].shape, dtype=np.float32) for p in program.inputs}
    values = {n: v.astype(np.float64) for n, v in (constants | inputs).items()}
    for c in operator.computes:
        values[c.name] = evaluate_compute(c, values, precise=True)
    loaded = backend.load(program, constants)
    name = operator.anchor.name
    have, again = (loaded.run(inputs).outputs[name] for _ in range(2))
    loaded.close()
    assert np.linalg.norm(have - values[name]) <= tolerance * np.linalg.norm(values[name]), operator.head()
    assert have.tobytes() == again.tobytes()


@pytest.mark.cuda
@pytest.mark.parametrize("case", sorted(WIDE))
def test_the_wide_family_agrees_with_float64(case: str, rng: np.random.Generator) -> None:
    operator, binding = WIDE[case]
    found = choices(target(), operator, binding, WARPGROUPS)
    kinds = {(c.operator.config[2][1] > 1, c.operator.config[3][1]): c.operator for c in found}
    some = [found[int(i)].operator for i in rng.choice(len(found), min(6, len(found)), replace=False)]
    for tiled in (*kinds.values(), *some):
        agrees(rng, tiled, binding, 2e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("case", sorted(CHAINS))
def test_chains_agree_with_float64(case: str, rng: np.random.Generator) -> None:
    operator, binding = CHAINS[case]
    for _, tiled in choices(target(), operator, binding, (CHAIN,)):
        agrees(rng, tiled, binding, 3e-7 * len(operator.computes))

"""Matrix-product families of the cuda plugin: classification, packing, machine code; on a GPU also results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from products import CASES

from rammer.device.manifest import OpenOptions
from rammer.ir.compute import Compute
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.expr import Load
from rammer_testing.nonempty import some

pytest.importorskip("cuda.bindings")

from rammer.codegen.contraction_form import product_of, roles_of
from rammer.codegen.products.depth import depth_of
from rammer.codegen.products.packing import Arrangement, Blocks, Cores, Rows, common_order, pack_common, pack_operand
from rammer.codegen.task_parameters import Unsuited

from .cuda_choices import WARPS, choices
from rammer_cuda.backend import CudaBackend, open_backend


@pytest.mark.sampled(1, of="target")
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("case", ["three by three", "grouped", "matmul"])
def test_machine_code(case: str, target: str) -> None:
    backend = open_backend(OpenOptions(target=target))
    assert isinstance(backend, CudaBackend)
    operator, binding = CASES[case]
    found = {}
    for choice in choices(backend, operator, binding, WARPS):
        found.setdefault((choice.operator.family, dict(choice.operator.config)["split_k"] > 1), choice.operator)
    assert {family for family, _ in found} == {"gemm", "gemm_tf32x3"}
    assert target == "sm_90a" or not any(split for _, split in some(found)), "clusters need compute capability 9.0"
    best = {tiled.family: tiled for _, tiled in reversed(found.items())}.values()
    for tiled in some(found.values()):
        resources = backend.resources(tiled, binding)
        # The best of a family does not spill. For others, split or whole, ptxas may spill a word or two. Example: 56 registers a
        # thread and 8 bytes, where another split count has no spills. Spilled accumulators would be hundreds.
        assert resources.spills <= (0 if tiled in best else 16), tiled.head()
        assert 16 <= resources.registers <= 255


def test_groups_limit_the_row_tile() -> None:
    operator, binding = CASES["grouped"]
    assert roles_of(operator, binding).groups == frozenset((16,))
    product_of(replace(operator, tile=(1, 8, 1, 9)), binding)
    with pytest.raises(Unsuited, match="is not affine"):
        product_of(replace(operator, tile=(1, 32, 1, 9)), binding)


@pytest.mark.parametrize("block", [8, 16, 32])
def test_packing_holds_every_weight_once(block: int, rng: np.random.Generator) -> None:
    operator, binding = CASES["three by three"]
    product = product_of(replace(operator, tile=(1, 12, 2, 13)), binding)
    depth = depth_of(product.main.reduce, block)
    packing, _ = pack_operand(product, product.a, 1, Blocks(16, depth))
    weights = rng.standard_normal((20, 16, 3, 3), dtype=np.float32)
    weights[weights == 0] = 1  # one in ten million is zero; padding is counted as zeros below
    packed = packing.make(weights)
    assert packed.size == packing.size
    assert np.array_equal(np.sort(packed[packed != 0]), np.sort(weights.reshape(-1)))
    if depth.flat:
        assert np.array_equal(packed.reshape(2, -1, 16)[1, :144, 3], weights[15].reshape(-1))
        return
    taps = packed.reshape(2, 9, depth.padded, 16)
    assert np.array_equal(taps[1, 5, :16, 3], weights[15, :, 1, 2])


@pytest.mark.parametrize("order", [Rows(), Cores(4)])
@pytest.mark.parametrize("case", ["three by three", "matmul"])
def test_one_order_serves_all_tiles(order: Arrangement, case: str, rng: np.random.Generator) -> None:
    """Check that every block of every tile is contained in it, row after row."""
    operator, binding = CASES[case]
    keys = set[str]()
    for block, tile in ((8, 8), (32, 12), (64, 4)):
        sizes = tuple(tile if d == 1 else 1 for d in range(len(operator.anchor.shape)))
        product = product_of(replace(operator, tile=sizes), binding)
        operand = product.a if product.a.packable else product.b
        depth = depth_of(product.main.reduce, block)
        if depth.flat:
            continue
        blocks = Blocks(-(-tile // 4) * 4, depth, order)
        common = common_order(product, operand, 1, blocks)
        assert common is not None
        packing, fixed = pack_common(product, operand, 1, blocks, common)
        keys.add(packing.key)
        load = Compute("all", "float32", (product.main.axes[1], *depth.axes), Load("constant", operand.load.indices))
        shape = binding.types[operand.tensor].shape
        weights = rng.standard_normal(shape, dtype=np.float32)
        rows = packing.make(weights)[: common.size].reshape(-1, common.elements, common.wide)
        found = np.swapaxes(rows, 0, 1).reshape(common.elements, -1)
        expected = evaluate_compute(load, {"constant": weights})
        taps = expected.reshape(expected.shape[0], -1, expected.shape[-1])
        per = common.tap * common.wide or found.shape[1]
        for tap in range(taps.shape[1]):
            assert np.array_equal(found[: len(taps), tap * per : tap * per + taps.shape[2]], taps[:, tap])
        assert not fixed
    assert len(keys) == 1


@pytest.mark.cuda
@pytest.mark.parametrize("case", sorted(CASES))
def test_every_family_agrees_with_float64(case: str, rng: np.random.Generator) -> None:
    from rammer_cuda.backend import whole_program

    backend = open_backend(OpenOptions())
    assert isinstance(backend, CudaBackend)
    operator, binding = CASES[case]
    found = choices(backend, operator, binding, WARPS)
    for i in some(rng.choice(len(found), min(8, len(found)), replace=False)):
        tiled = found[int(i)].operator
        program, constants = whole_program(tiled, binding)
        # Positive values, as after a ReLU: a biased rounding shows only in sums of one sign.
        constants = {n: np.abs(v) for n, v in constants.items()}
        inputs = {p.external: rng.random(binding.types[p.tensor].shape, dtype=np.float32) for p in program.inputs}
        values = {n: v.astype(np.float64) for n, v in (constants | inputs).items()}
        for c in tiled.computes:
            values[c.name] = evaluate_compute(c, values, precise=True)
        loaded = backend.load(program, constants)
        have, again = (loaded.run(inputs).outputs["y"] for _ in range(2))
        loaded.close()
        assert np.linalg.norm(have - values["y"]) <= 2e-6 * np.linalg.norm(values["y"]), tiled.head()
        assert have.tobytes() == again.tobytes()

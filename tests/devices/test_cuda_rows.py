"""The cuda plugin's ``rows`` family: what it takes, machine code; on a GPU also results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from products import bound

from rammer.codegen.task import Unsuited
from rammer.device.manifest import Binding, OpenOptions
from rammer.ir.compute import Compute
from rammer.ir.evaluate import evaluate
from rammer.ir.operator import Connection, ROperator

pytest.importorskip("cuda.bindings")

from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.kernels.rowwise import row_candidates, rows


def chain(lines: list[str], shapes: dict[str, tuple[int, ...]]) -> tuple[ROperator, Binding]:
    """Computes that meet in a vEU; the last one is written."""
    computes = tuple(map(Compute.parse, lines))
    inside = {c.name for c in computes}
    links = tuple(Connection(p, c.name, "veu") for c in computes for p in c.reads if p in inside)
    return bound(ROperator(computes[-1].name, computes, links, (computes[-1].name,)), shapes, frozenset())


def softmax(outer: int, count: int, width: int) -> tuple[ROperator, Binding]:
    """Softmax along the last of three axes."""
    head, row = f"[h:{outer}, i:{count}", "[h, i]"
    return chain(
        [
            f"m: f32{head}] = max[j:{width}] x[h, i, j]",
            f"e: f32{head}, j:{width}] = exp(x[h, i, j] - m{row})",
            f"s: f32{head}] = sum[j:{width}] e[h, i, j]",
            f"y: f32{head}, j:{width}] = e[h, i, j] / s{row}",
        ],
        {"x": (outer, count, width)},
    )


def normalisation(count: int, width: int) -> tuple[ROperator, Binding]:
    """Layer normalisation of a sum, with scale and shift; values a row follow each other."""
    return chain(
        [
            f"t: f32[i:{count}, j:{width}] = x[i, j] + r[i, j]",
            f"a: f32[i:{count}] = sum[j:{width}] t[i, j]",
            f"m: f32[i:{count}] = a[i] / {width}.0",
            f"q: f32[i:{count}] = sum[k:{width}] (t[i, k] - m[i]) * (t[i, k] - m[i])",
            f"v: f32[i:{count}] = 1.0 / sqrt((q[i] / {width}.0) + 1e-5)",
            f"y: f32[i:{count}, j:{width}] = (((t[i, j] - m[i]) * v[i]) * w[j]) + b[j]",
        ],
        {"x": (count, width), "r": (count, width), "w": (width,), "b": (width,)},
    )


CASES = {
    "softmax": softmax(3, 40, 128), "odd": softmax(2, 7, 77), "one value": softmax(2, 3, 1), "long": softmax(1, 5, 1000),
    "norm": normalisation(128, 768), "odd norm": normalisation(13, 333), "one row": normalisation(1, 4096),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(CASES))
def test_machine_code(case: str) -> None:
    backend = open_backend(OpenOptions(target="sm_90a"))
    assert isinstance(backend, CudaBackend)
    operator, binding = CASES[case]
    found = row_candidates(operator, binding, backend.vdevice)
    assert found
    assert [s for s, _ in found] == sorted(s for s, _ in found)
    for _, tiled in (found[0], found[-1]):
        resources = backend.resources(tiled, binding)
        assert resources.spills == 0
        lanes = dict(tiled.config)["lanes"]
        assert resources.threads == lanes * tiled.tile[-2]
        assert (resources.local_bytes > 0) == (lanes > 32)


def test_only_chains_over_whole_rows() -> None:
    operator, binding = CASES["norm"]
    with pytest.raises(Unsuited, match="whole rows"):
        rows(replace(operator, tile=(1, 384), family="rows", config=(("lanes", 32),)), binding)
    turned = chain(
        ["m: f32[i:8] = max[j:8] x[i, j]", "y: f32[i:8, j:8] = x[i, j] - m[j]"], {"x": (8, 8)}
    )
    with pytest.raises(Unsuited, match="its own place"):
        rows(replace(turned[0], tile=(1, 8), family="rows", config=(("lanes", 32),)), turned[1])
    backend = open_backend(OpenOptions(target="sm_90a"))
    assert not row_candidates(*turned, backend.vdevice)


@pytest.mark.cuda
@pytest.mark.parametrize("case", sorted(CASES))
def test_results_agree_with_float64(case: str) -> None:
    from rammer_cuda.profiler import whole_program

    backend = open_backend(OpenOptions())
    operator, binding = CASES[case]
    rng = np.random.default_rng()
    for _, tiled in row_candidates(operator, binding, backend.vdevice):
        program, constants = whole_program(tiled, binding)
        inputs = {p.external: rng.standard_normal(binding.types[p.tensor].shape).astype(np.float32) for p in program.inputs}
        values = {n: v.astype(np.float64) for n, v in inputs.items()}
        for c in tiled.computes:
            values[c.name] = evaluate(c, values, precise=True)
        loaded = backend.load(program, constants)
        have, again = (loaded.run(inputs).outputs["y"] for _ in range(2))
        loaded.close()
        assert np.linalg.norm(have - values["y"]) <= 1e-6 * np.linalg.norm(values["y"]), tiled.head()
        assert have.tobytes() == again.tobytes()

"""Kernel families are values: what one says of itself is all that the plugin knows of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")

from families import CASES as OTHERS
from products import CASES as PRODUCTS
from test_cuda_attention import CASES as ATTENTIONS
from test_cuda_chain import CHAINS, mlp
from test_cuda_single import HALVES

from rammer.codegen.task import Unsuited
from rammer.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions
from rammer.ir.operator import ROperator
from rammer.ir.program import Port, dense
from rammer.profile.store import KernelStore
from rammer.runtime.options import CompileOptions
from rammer.testing.selftest import tiny_graph

from rammer_cuda import backend as module
from rammer_cuda import families
from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.families import FAMILIES, family_of
from rammer_cuda.family import Choice
from rammer_cuda.gpu import TARGETS
from rammer_cuda.kernels.task import TaskKernel

#: A family asked for by its name.
BY_NAME = re.compile(r'\.family (?:==|!=)|"(?:gemm_\w+|gemv|rowwise|window|cell|attention)"')


def target(name: str = "sm_90a") -> CudaBackend:
    found = open_backend(OpenOptions(target=name))
    assert isinstance(found, CudaBackend)
    return found


def cases() -> Iterator[tuple[ROperator, Binding]]:
    """Operators of every family, those of float32 also where tf32 is allowed."""
    for operator, binding in (*PRODUCTS.values(), *OTHERS.values(), *HALVES.values(), *CHAINS.values(), *ATTENTIONS.values()):
        yield operator, binding
        yield operator, replace(binding, precision="tf32")


def test_what_is_offered_is_what_is_predicted_and_may_be_loaded() -> None:
    """A choice is its family's, has configs that a file may have, and costs what the tiled operator is said to cost."""
    seen, gpu = set[str](), TARGETS["sm_90a"]
    for operator, binding in cases():
        for family in FAMILIES:
            for seconds, tiled in islice(family.candidates(operator, binding, gpu), 3):
                assert family_of(tiled) is family
                assert all(v in family.configs[n] for n, v in tiled.config), (family.name, tiled.config)
                again = family.seconds(tiled, binding, gpu) + gpu.launch
                assert seconds == pytest.approx(again, rel=1e-9), (family.name, tiled.head())
                rounds = -(-tiled.task_count // gpu.sms)
                assert family.round(tiled, binding, gpu)[1] * rounds == pytest.approx(again - gpu.launch, rel=1e-9)
                seen.add(family.name)
    assert seen == {f.name for f in FAMILIES}


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_cell_multiplies_no_results_of_its_own(rows: int) -> None:
    """Layers of one shape in a row look like a cell, whose kernel would read what it is about to write."""
    operator, binding = mlp(rows, (64, 64, 64))
    types = binding.types
    stored = replace(binding, storages={n: dense(n, f"b_{n}", types[n].shape) for n in types})
    assert [t.family for t in target().candidates(operator, stored)][:1] == ["gemm_chain"]
    with pytest.raises(Unsuited, match="itself computes"):
        families.CELL.kernel(replace(operator, tile=operator.anchor.shape, family="cell"), stored)


def test_what_a_gpu_lacks_is_not_offered() -> None:
    old, new = target("sm_80"), target()
    assert {f.name for f in new.usable} - {f.name for f in old.usable} == {
        "gemm_chain", "gemm_wgmma3", "gemm_wgmma1", "gemm_wgmma_f16"}  # fmt: skip
    for operator, binding in CHAINS.values():
        assert {o.family for o in old.offered(operator, binding)} <= {f.name for f in old.usable}
    assert old.families == new.families, "a file of another GPU is read, and refused when it is loaded"


def test_nobody_asks_for_a_family_by_its_name() -> None:
    """But the folder in which it lives."""
    root = Path(families.__file__).parent
    own = {"attention", "cell", "chain", "contraction", "generic", "rows", "window"}
    files = [p for p in sorted(root.rglob("*.py")) if p.parent.name not in own]
    assert len(files) > 30
    found = [f"{p.relative_to(root)}: {line.strip()}" for p in files for line in p.read_text().splitlines()
             if BY_NAME.search(line)]  # fmt: skip
    assert not found, found


def test_a_new_family_is_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is offered, chosen, predicted and written wherever it is the fastest, and a loaded file may name it."""
    generic = families.GENERIC

    def eager(operator: ROperator, binding: Binding, gpu: object) -> Iterator[Choice]:
        for seconds, tiled in generic.candidates(operator, binding, TARGETS["sm_90a"]):
            yield Choice(seconds / 1e3, replace(tiled, family="eager"))

    def refusing(operator: ROperator, binding: Binding, gpu: object) -> Iterator[Choice]:
        yield from (Choice(0.0, replace(c.operator, family="refusing")) for c in eager(operator, binding, gpu))

    def refuse(operator: ROperator, binding: Binding) -> TaskKernel:
        raise Unsuited("it never can")

    def small(operator: ROperator, binding: Binding, gpu: object) -> float:
        return 1e-9

    new = (replace(generic, name="refusing", candidates=refusing, seconds=small, kernel=refuse, times=None),
           replace(generic, name="eager", candidates=eager, seconds=small, times=None))  # fmt: skip
    monkeypatch.setattr(module, "FAMILIES", (*FAMILIES, *new))
    for family in new:
        monkeypatch.setitem(families._BY_NAME, family.name, family)
    backend = target()
    assert {*new[0].configs} == {*backend.families["eager"]}
    compiler = Compiler(backend, CompileOptions("wavefront"), KernelStore(None))
    program = compiler.program(tiny_graph(0), (Port("x", "x"),), (Port("y", "y"),)).program
    chosen = [o.family for o in program.operators]
    assert "eager" in chosen and "refusing" not in chosen

"""Kernel families as values: the plugin uses only the information in each value."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")

from families import CASES as OTHERS
from products import CASES as PRODUCTS

from rammer.codegen.kernel_family import Choice
from rammer.codegen.task_parameters import Unsuited
from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding, OpenOptions
from rammer.errors import DeviceFailure
from rammer.ir.expr import rename_tensors
from rammer.ir.operator import ROperator
from rammer.ir.program import Port, RProgram, dense
from rammer.jit.self_test import tiny_graph
from rammer.tuning.kernel_store import KernelStore
from rammer.tuning.tuner import KEPT
from rammer_testing.nonempty import some

from .test_attention import CASES as ATTENTIONS
from .test_bytes import CASES as BYTES
from .test_chain import CHAINS, mlp
from .test_codes import STORED
from .test_single import HALVES
from rammer_cuda import backend as module
from rammer_cuda import families, source
from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.contraction import choose as contraction
from rammer_cuda.families import FAMILIES, family_of
from rammer_cuda.gpu import TARGETS
from rammer_cuda.kernels.task import TaskKernel

#: A family selected by its name.
BY_NAME = re.compile(r'\.family (?:==|!=)|"(?:gemm_\w+|gemv|rowwise|window|cell|attention)"')


def target(name: str = "sm_90a") -> CudaBackend:
    found = open_backend(OpenOptions(target=name))
    assert isinstance(found, CudaBackend)
    return found


def cases() -> Iterator[tuple[ROperator, Binding]]:
    """Yield operators of every family, float32 ones also with bfloat16 and tf32."""
    for operator, binding in (
        *PRODUCTS.values(),
        *OTHERS.values(),
        *HALVES.values(),
        *CHAINS.values(),
        *ATTENTIONS.values(),
        *BYTES.values(),
        STORED,
    ):
        yield operator, binding
        yield operator, replace(binding, precision="bfloat16")


@pytest.mark.slow
def test_what_is_offered_is_what_is_predicted_and_may_be_loaded() -> None:
    """Check that a choice has its family's name, loadable configs, and the predicted cost of the tiled operator."""
    seen, gpu = set[str](), TARGETS["sm_90a"]
    for operator, binding in some(cases()):
        for family in some(FAMILIES):
            for seconds, tiled in islice(family.candidates(operator, binding, gpu), 3):
                assert family_of(tiled) is family
                assert all(v in family.configs[n] for n, v in tiled.config), (family.name, tiled.config)
                again = family.seconds(tiled, binding, gpu) + gpu.launch
                assert seconds == pytest.approx(again, rel=1e-9), (family.name, tiled.head())
                rounds = -(-tiled.task_count // gpu.sms)
                assert family.round(tiled, binding, gpu, gpu.sms)[1] * rounds == pytest.approx(again - gpu.launch, rel=1e-9)
                seen.add(family.name)
    assert seen == {f.name for f in FAMILIES}


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_cell_multiplies_no_results_of_its_own(rows: int) -> None:
    """Check that consecutive layers of one shape are not mistaken for a cell, whose kernel would read its pending results."""
    operator, binding = mlp(rows, (64, 64, 64))
    types = binding.types
    stored = replace(binding, storages={n: dense(n, f"b_{n}", types[n].shape) for n in types})
    assert [t.family for t in target().candidates(operator, stored)][:1] == ["gemm_chain"]
    with pytest.raises(Unsuited, match="own results"):
        families.CELL.kernel(replace(operator, tile=operator.anchor.shape, family="cell"), stored)


def test_what_a_gpu_lacks_is_not_offered() -> None:
    old, new = target("sm_80"), target()
    assert {f.name for f in new.usable} - {f.name for f in old.usable} == {
        "gemm_chain",
        "gemm_wgmma3",
        "gemm_wgmma1",
        "gemm_wgmma_f16",
        "gemm_wgmma_i8",
    }
    missing = {f.name for f in old.usable} - {f.name for f in target("sm_75").usable}
    assert missing == {"attention", "gemm", "gemm_tf32x3", "gemm_tf32", "gemm_f16", "gemm_bf16", "gemm_i8"}, (
        "copies are asynchronous there"
    )
    for operator, binding in some(CHAINS.values()):
        assert {o.family for o in old.all_candidates(operator, binding)} <= {f.name for f in old.usable}
    assert old.families == new.families, "a file of another GPU is read, and refused when it is loaded"


def test_nobody_asks_for_a_family_by_its_name() -> None:
    """Check that a family's name occurs only in its folder."""
    root = Path(families.__file__).parent
    own = {"attention", "cell", "chain", "contraction", "generic", "rows", "window"}
    files = [p for p in sorted(root.rglob("*.py")) if p.parent.name not in own]
    assert len(files) > 30
    found = [
        f"{p.relative_to(root)}: {line.strip()}" for p in files for line in p.read_text().splitlines() if BY_NAME.search(line)
    ]
    assert not found, found


def test_a_new_family_is_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a new family is offered, chosen, predicted and written if fastest, and that a loaded file may name it."""
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

    new = (
        replace(generic, name="refusing", candidates=refusing, seconds=small, kernel=refuse, times=None),
        replace(generic, name="eager", candidates=eager, seconds=small, times=None),
    )
    monkeypatch.setattr(module, "FAMILIES", (*FAMILIES, *new))
    for family in new:
        monkeypatch.setitem(families.BY_NAME, family.name, family)
    backend = target()
    assert {*new[0].configs} == {*backend.families["eager"]}
    compiler = Compiler(backend, CompileOptions("wavefront"), KernelStore(None))
    program = compiler.program(tiny_graph(0), (Port("x", "x"),), (Port("y", "y"),)).program
    chosen = [o.family for o in program.operators]
    assert "eager" in chosen and "refusing" not in chosen


def untiled(operator: ROperator) -> ROperator:
    """Return the operator without its tile and kernel, of one name."""
    return replace(operator, name="o", tile=(), family="", config=())


def noted(monkeypatch: pytest.MonkeyPatch, asked: Counter[ROperator] | None = None) -> list[str]:
    """Record the keys of the kernels that are written from now on, and count them by operator in ``asked``."""
    seen, honest = list[str](), source.task_kernel

    def noting(operator: ROperator, binding: Binding) -> TaskKernel:
        seen.append(binding.key(operator))
        if asked is not None:
            asked[untiled(operator)] += 1
        return honest(operator, binding)

    monkeypatch.setattr(source, "task_kernel", noting)
    return seen


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_every_text_is_written_once(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that fits, resources, tuning and loading (also from a file) share one text."""
    asked = Counter[ROperator]()
    written, backend = noted(monkeypatch, asked), target()
    compiler = Compiler(backend, CompileOptions("wavefront", precision=precision), KernelStore(None))
    segment = compiler.program(tiny_graph(0), (Port("x", "x"),), (Port("y", "y"),))
    program = RProgram.parse(str(segment.program))
    assert program == segment.program and program.precision == precision
    assert len(written) == len(set(written)) and asked.keys() >= set(map(untiled, program.operators))
    # The first offered choices, and the one that keeps the least of the GPU busy. Fusion also asks for parts of operators.
    assert max(asked.values()) <= KEPT + 1
    count, binding = len(written), Binding.of(program, segment.constants)
    for operator in program.operators:
        assert backend.kernel(operator, binding).source
        backend.resources(operator, binding)
    kernels = backend.writer.all(program.operators, binding)
    assert len(written) == count and len(kernels) == len(program.operators)
    assert [k.text for k in kernels.values()] == [source.task_kernel(o, binding).text for o in program.operators]


def test_equal_operators_share_a_text_and_have_their_own_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    written, (operator, binding) = noted(monkeypatch), PRODUCTS["three by three"]
    tiled = next(c.operator for c in target().choices(operator, binding, *contraction.PRODUCTS))
    names = {n: f"other_{n}" for n in binding.types}
    computes = tuple(replace(c, name=names[c.name], body=rename_tensors(c.body, names)) for c in tiled.computes)
    links = tuple(replace(e, producer=names[e.producer], consumer=names[e.consumer]) for e in tiled.connections)
    other = replace(tiled, computes=computes, connections=links, outputs=tuple(names[o] for o in tiled.outputs))
    both = replace(
        binding,
        types=binding.types | {names[n]: v for n, v in binding.types.items()},
        storages=binding.storages | {names[n]: v for n, v in binding.storages.items()},
        constants=binding.constants | {names[n] for n in binding.constants},
    )
    writer, count = source.Writer(), len(written)
    first, second = writer.written(tiled, both), writer.written(other, both)
    assert len(written) == count + 1 and first.text == second.text
    assert [names[a.tensor] for a in first.arguments] == [a.tensor for a in second.arguments]
    assert [a.tensor for a in second.arguments] == [a.tensor for a in source.task_kernel(other, both).arguments]


def test_a_family_that_cannot_compute_an_operator_says_so() -> None:
    """Check that prediction fails as writing does. A third party may offer any tile for any family."""
    refused = set[str]()
    for (operator, binding), family in product((PRODUCTS["matmul"], OTHERS["softmax"]), FAMILIES):
        try:
            target().kernel(replace(operator, tile=operator.anchor.shape, family=family.name), binding)
        except DeviceFailure as problem:
            assert "is unsuited to family" in str(problem), family.name
            refused.add(family.name)
    assert refused == {f.name for f in FAMILIES if f.name}


def test_a_refusal_is_remembered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    written, (operator, binding) = noted(monkeypatch), PRODUCTS["matmul"]
    wrong, writer = replace(operator, tile=operator.anchor.shape, family="window"), source.Writer()
    for name in ("one", "two"):
        with pytest.raises(DeviceFailure, match=f"operator {name} is unsuited to family window"):
            writer.written(replace(wrong, name=name), binding)
    assert len(written) == 1

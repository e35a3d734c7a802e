"""Models whose operators are fused on chip: right results on every device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fused_models import attention, block, mlp

import rammer
from rammer.compile_options import FUSION, CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.device.manifest import Binding
from rammer.frontend.read.reader import read_model
from rammer.ir.compute import Compute
from rammer.ir.expr import Load, Op, Ref
from rammer.ir.operator import Connection, ROperator
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.conformance import Subject, check_model
from rammer_testing.fusion import BLOCKS, deciding_layers
from rammer_testing.fusion import Subject as Altered
from rammer_testing.nonempty import some
from rammer_testing.small_models import MODELS, SmallModel


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model", [mlp(4), attention(), attention(kept=True)], ids=["chain", "attention", "kept"])
@pytest.mark.parametrize("name", ["rocm", "ipu_sim", "toy"])
def test_devices_compute_models_with_chains(name: str, model: SmallModel) -> None:
    check_model(Subject(name), model)


@pytest.mark.parametrize("name", ["rocm", "ipu_sim", "toy"])
@pytest.mark.parametrize("kernel", [1, 3])
def test_devices_compute_models_with_prologues(name: str, kernel: int) -> None:
    check_model(Subject(name), block(kernel))


@pytest.mark.slow
@pytest.mark.sampled(3, of="name")
@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize("shape", [(2, 6, 5, 7), (3, 6, 40), (1, 6, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("name", ["rocm", "ipu_sim"])
def test_a_normalisation_of_groups_is_one_operator(
    name: str, shape: tuple[int, ...], groups: int, rng: np.random.Generator
) -> None:
    """Check that the groups are rows of a view, and that the result is a view of theirs."""
    kind = f"float[{','.join(map(str, shape))}]"
    text = f"({kind} x, float[6] w_s, float[6] w_b) => ({kind} y) {{ y = GroupNormalization<num_groups={groups}>(x, w_s, w_b) }}"
    model = SmallModel("groups", text)
    check_model(Subject(name), model)
    exe = rammer.compile(model.build(rng), name)
    (segment,) = exe.compile_only({}).segments
    assert isinstance(segment, ProgramSegment) and len(segment.program.operators) == 1
    exe.close()


def test_statistics_of_a_normalisation_are_written_where_they_are_wanted(rng: np.random.Generator) -> None:
    """Check that Mean and InvStdDev are results of the normalising kernel, one for each row that it writes."""
    rows, wide = "float[2,9,1]", "float[2,9,40]"
    text = f"({wide} x, float[40] w) => ({wide} y, {rows} m, {rows} i) {{ y, m, i = LayerNormalization(x, w) }}"
    model = SmallModel("statistics", text)
    check_model(Subject("rocm"), model)
    exe = rammer.compile(model.build(rng), "rocm")
    (segment,) = exe.compile_only({}).segments
    assert isinstance(segment, ProgramSegment) and len(segment.program.operators) == 1
    exe.close()


@pytest.mark.parametrize("model", [mlp(2), attention()], ids=["chain", "attention"])
@pytest.mark.parametrize("name", ["rocm", "ipu_sim", "toy"])
def test_the_option_bounds_fusion(name: str, model: SmallModel, rng: np.random.Generator) -> None:
    made, inputs = model.build(rng), model.inputs(rng, {})
    results, sizes = list[dict[str, np.ndarray]](), list[int]()
    for fusion in some(FUSION):
        exe = rammer.compile(made, name, fusion=fusion)
        results.append(exe.run(inputs))
        (segment,) = exe.compile_only({n: a.shape for n, a in inputs.items()}).segments
        assert isinstance(segment, ProgramSegment)
        layers = {e.layer for o in segment.program.operators for e in o.connections}
        assert layers <= {"none": set(), "elementwise": {"thread"}}.get(fusion, {"thread", "veu"})
        sizes.append(len(segment.program.operators))
        exe.close()
    assert sizes[0] > sizes[1] >= sizes[2]
    for result in results[1:]:
        for output, value in results[0].items():
            np.testing.assert_allclose(result[output], value, rtol=1e-4, atol=1e-4)


def with_map(operator: ROperator, binding: Binding) -> tuple[ROperator, Binding]:
    """Return an untiled operator with a map of its last result, and its binding."""
    last = operator.anchor
    after = Compute(
        f"{last.name}_after", last.dtype, last.axes, Op("abs", (Load(last.name, tuple(Ref(a.name) for a in last.axes)),))
    )
    outputs = tuple(after.name if n == last.name else n for n in operator.outputs)
    links = (*operator.connections, Connection(last.name, after.name, "thread"))
    wide = ROperator(after.name, (*operator.computes, after), links, outputs)
    storages = {**binding.storages, after.name: replace(binding.storages[last.name], tensor=after.name)}
    return wide, replace(binding, types={**binding.types, after.name: binding.types[last.name]}, storages=storages)


@pytest.mark.parametrize(("name", "target"), [("rocm", ""), ("cuda", "sm_90a")])
def test_families_take_the_trailing_maps_that_they_declare(name: str, target: str, rng: np.random.Generator) -> None:
    registry, found = Registry(), set[str]()
    if name == "cuda":
        pytest.importorskip("cuda.bindings")
    backend = registry.open(name, target=target)
    for model in (mlp(3), attention(), block(3), *MODELS.values()):
        shapes = {n: a.shape for n, a in model.inputs(rng, model.shapes[0]).items()}
        compiler = Compiler(backend, CompileOptions(), KernelStore(None), registry, device=name)
        for segment in compiler.compile_model(read_model(model.build(rng)), shapes).segments:
            if not isinstance(segment, ProgramSegment):
                continue
            binding = Binding.of(segment.program, segment.constants)
            for operator in segment.program.operators:
                if (
                    not operator.family
                    or operator.family in found
                    or len(operator.outputs) > 1
                    or operator.anchor.dtype != "float32"
                ):
                    continue
                wide, known = with_map(operator, binding)
                offered = {o.family for o in backend.candidates(wide, known)}
                assert (operator.family in offered) == ("trailing maps" in backend.fused_forms[operator.family]), operator.head()
                found.add(operator.family)
    assert len(found) >= 2, found


def test_the_figures_of_memory_layers_decide() -> None:
    """Check the goals of Welder's hierarchy: a device with slow memory on chip, or with few registers, gets other operators."""
    for name in ("cuda.bindings", "pyopencl"):
        pytest.importorskip(name)
    subjects = [Altered("ipu_sim"), Altered("cuda", "sm_90"), Altered("rocm")]
    models = [read_model(block.build(np.random.default_rng(0))) for block in BLOCKS]
    slow, few = deciding_layers(subjects, models).values()
    assert slow >= 24 and few >= 12

"""Products by matrix instructions: right on an emulator with AMD's fragment layouts, and within the assumed resources offline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from random import Random
from typing import Any

import numpy as np
import pytest

from rammer.device.manifest import Binding, OpenOptions
from rammer.errors import DeviceUnavailable
from rammer.ir.compute import Compute
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import dense
from rammer.ir.types import TensorType
from rammer.plan.image_layout import channels_last

pytest.importorskip("pyopencl")
from rammer_testing.nonempty import some
from rammer_testing.single import UntiledOperator, check, trial_of

from .isa import MATRIX, MCA, cycles_of, inner_loop
from .matrix_emulator import emulated
from rammer_rocm import units
from rammer_rocm.dialect import GPU_DIALECT
from rammer_rocm.matrix.arrangement import LOT, Swizzled
from rammer_rocm.matrix.choose import make_matrix_families
from rammer_rocm.matrix.matrix_instruction import INSTRUCTIONS, ROUNDING
from rammer_rocm.matrix.shape import shape_of
from rammer_rocm.offline import CARDS, OfflineBackend, Toolchain
from rammer_rocm.plugin import DEVICE
from rammer_rocm.source import LaunchPart, launch_text

TARGETS, FAMILIES = tuple(INSTRUCTIONS), ("matrix", "matrix_bf16")
#: Products and convolutions with maps after them: the lines, and the shapes of the inputs. ``w`` is a constant.
CASES: Mapping[str, tuple[Sequence[str], Mapping[str, tuple[int, ...]]]] = {
    "packed": (
        ("p: f16[m:70, n:90] = sum[k:100] x[m, k] * w[k, n]", "y: f16[m:70, n:90] = max(p[m, n] + r[m, n], 0.0)"),
        {"x": (70, 100), "w": (100, 90), "r": (70, 90)},
    ),
    "keys": (("y: f16[h:3, m:33, n:57] = sum[k:64] x[h, m, k] * c[h, n, k]",), {"x": (3, 33, 64), "c": (3, 57, 64)}),
    "values": (("y: f32[h:2, m:40, n:64] = sum[k:57] x[h, m, k] * c[h, k, n]",), {"x": (2, 40, 57), "c": (2, 57, 64)}),
    "columns": (("y: f16[m:96, n:128] = sum[k:160] x[k, m] * c[k, n]",), {"x": (160, 96), "c": (160, 128)}),
    "fours": (("y: f16[m:50, n:36] = sum[k:76] x[m, k] * c[n, k]",), {"x": (50, 76), "c": (36, 76)}),
    "image": (
        (
            "p: f16[n:2, c:33, h:6, w:7] = sum[k:20, i:3, j:3] pad(x[n, k, h + i + -1, w + j + -1], 0.0) * w[c, k, i, j]",
            "y: f16[n:2, c:33, h:6, w:7] = max(p[n, c, h, w] + r[n, c, h, w], 0.0)",
        ),
        {"x": (2, 20, 6, 7), "w": (33, 20, 3, 3), "r": (2, 33, 6, 7)},
    ),
    "stride": (
        ("y: f16[n:2, c:40, h:5, w:6] = sum[k:64, i:3, j:3] pad(x[n, k, h * 2 + i + -1, w * 2 + j + -1], 0.0) * w[c, k, i, j]",),
        {"x": (2, 64, 10, 11), "w": (40, 64, 3, 3)},
    ),
}


def subject_of(name: str, rounded: bool = False) -> UntiledOperator:
    """Return the operator of a case, or the same in float32 that may be ``rounded`` to bfloat16. The images of convolutions are
    channels-last."""
    lines, shapes = CASES[name]
    computes = tuple(Compute.parse(line.replace("f16[", "f32[") if rounded else line) for line in lines)
    types = {n: TensorType("float32" if rounded else "float16", s) for n, s in shapes.items()} | {
        c.name: c.type for c in computes
    }
    inside = computes[0].name
    edges = (Connection(inside, computes[1].name, "veu"),) if len(computes) > 1 else ()
    operator = ROperator("A", computes, edges, ("y",), ())
    stored = {n: dense(n, n, types[n].shape) for n in (*shapes, "y")}
    if len(shapes["x"]) == 4:
        stored |= {n: replace(s, strides=channels_last(s.shape)) for n, s in stored.items() if n in ("x", "r", "y")}
    binding = Binding(types, stored, frozenset({"w"} & {*shapes}))
    return UntiledOperator(operator, replace(binding, precision="bfloat16" if rounded else "float32"), {})


def tools(target: str) -> Toolchain:
    try:
        return Toolchain.find(target)
    except DeviceUnavailable as problem:
        pytest.skip(str(problem))


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return an OpenCL device as a GPU of the target, whose matrix instructions are emulated."""
    if not DEVICE.probe():
        pytest.skip("no OpenCL unit")
    target = request.param
    for table in (INSTRUCTIONS, ROUNDING):
        monkeypatch.setitem(table, target, emulated(target, table[target]))
    monkeypatch.setattr(units, "device_name", lambda name: f"opencl_{target}")
    made = DEVICE.open(OpenOptions(options={"kernels": "gpu", "executor": "waves"}))
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", TARGETS, indirect=True)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_right_in_any_shape(backend: Any, name: str, family: str, seed: int) -> None:
    """Check every element of random tiles, shapes and splits within an error bound; memory is NaN before."""
    random = Random(seed)
    (offered,) = (f for f in backend.usable if f.name == family)
    one = subject_of(name, family != "matrix")

    def fitting(operators: Sequence[ROperator]) -> Iterator[ROperator]:
        return (o for o in operators if backend.fits(o, one.binding))

    choices = [c.operator for c in islice(offered.candidates(one.operator, one.binding, backend.unit), 4000)]
    split = [o for o in choices if dict(o.config)["split_k"] > 1]
    random.shuffle(choices)
    for operator in some([*islice(fitting(choices), 3), *islice(fitting(split), 1)]):
        problem = check(backend, operator, trial_of(one, random.randrange(1 << 20)))
        assert problem == "", f"{seed}: {operator.tile} {operator.config}: {problem}"


@pytest.mark.parametrize("block", INSTRUCTIONS["gfx90a"].blocks)
def test_packed_constants_have_the_order_of_the_kernels(block: int, rng: np.random.Generator) -> None:
    """Check that every element of a packed block is where the text of a copy places it."""
    unit, order = 64, Swizzled()
    values = rng.standard_normal((block, unit)).astype(np.float16)
    packed = order.packed(values[None]).reshape(-1)
    k, e = np.indices((block, unit))
    place = eval(order.place("k", "e", unit, block).replace("/", "//"), {}, {"k": k, "e": e})
    assert np.array_equal(packed[place], values) and sorted(place.reshape(-1)) == list(range(unit * block))


@pytest.mark.parametrize("block", INSTRUCTIONS["gfx90a"].blocks)
def test_eight_neighbouring_lanes_read_every_bank_once(block: int) -> None:
    """Check reads of 16 bytes: a wave is served eight lanes at a time, by 32 banks of four bytes."""
    order = Swizzled()
    for first in range(0, 64, LOT):
        for k in range(0, block, LOT):
            e = np.arange(first, first + LOT)
            place = eval(order.place("k", "e", 64, block).replace("/", "//"), {}, {"k": np.full(LOT, k), "e": e})
            assert len({int(p) * 2 // 16 % 8 for p in place}) == LOT


def product_of(target: str, packed: bool = True) -> tuple[OfflineBackend, ROperator, Binding]:
    """Return the first choice for a product of 1024 x 1024 x 1024 on the representative card of a target."""
    c = Compute.parse("y: f16[m:1024, n:1024] = sum[k:1024] x[m, k] * w[k, n]")
    types = {n: TensorType("float16", (1024, 1024)) for n in ("x", "w")} | {"y": c.type}
    binding = Binding(types, {n: dense(n, n, (1024, 1024)) for n in types}, frozenset({"w"} if packed else ()))
    return *first_choice(target, UntiledOperator(ROperator("A", (c,), (), ("y",), ()), binding, {})), binding


def first_choice(target: str, one: UntiledOperator) -> tuple[OfflineBackend, ROperator]:
    """Return the device's first choice for an operator, whose kernel must have matrix instructions."""
    backend = OfflineBackend(target, tools(target))
    operator = next(o for o in backend.candidates(one.operator, one.binding) if backend.fits(o, one.binding))
    assert operator.family in FAMILIES
    return backend, operator


def check_resources(backend: OfflineBackend, operator: ROperator, binding: Binding) -> str:
    """Check that a kernel has matrix instructions, spills nothing, and leaves room for the groups that its cost assumes. Return
    its text."""
    among = INSTRUCTIONS if operator.family == "matrix" else ROUNDING
    function, i = backend.writer.written(operator, binding), among[backend.tools.target]
    text = launch_text([(LaunchPart(function),)], GPU_DIALECT)
    found, p = backend.tools.compile(text), i.product(operator, binding)
    shape = shape_of(i, p.row_count, p.width, dict(operator.config))
    local = backend.vdevice.layer("veu").capacity
    groups = shape.resident(local)
    assert found.spills == 0 and groups * found.local_bytes <= local
    assert groups * -(-i.waves // i.simds) * found.registers <= i.registers, (groups, found, shape)
    return text


def test_instructions_are_chosen_by_the_name_of_a_driver() -> None:
    names = ("gfx90a:sramecc+:xnack-", "gfx1100", "gfx906:sramecc+", "NVIDIA H100")
    assert [units.device_name(n) for n in names] == ["opencl_gfx90a", "opencl_gfx1100", "opencl_gpu", "opencl_gpu"]


@pytest.mark.parametrize("target", TARGETS)
def test_shapes_of_a_single_launch_leave_room_for_two_groups(target: str) -> None:
    device, one = CARDS[target].vdevice(target), subject_of("packed")
    counts = list[set[int]]()
    for resident in (0, 2):
        family, _ = make_matrix_families(device, resident)
        found = [c.operator for c in family.candidates(one.operator, one.binding, device)]
        parts = [INSTRUCTIONS[target].product(o, one.binding) for o in found]
        shapes = [shape_of(INSTRUCTIONS[target], p.row_count, p.width, dict(p.operator.config)) for p in parts]
        counts.append({s.resident(device.layer("veu").capacity) for s in shapes})
    assert counts == [{1, 2}, {2}]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "rounded"), [*product(CASES, (False, True)), ("large", False)])
def test_every_product_has_matrix_instructions_and_no_spills(target: str, name: str, rounded: bool) -> None:
    if name == "large":
        backend, operator, binding = product_of(target, packed=False)
    else:
        one = subject_of(name, rounded)
        backend, operator = first_choice(target, one)
        binding = one.binding
    text = check_resources(backend, operator, binding)
    assert len(MATRIX.findall(backend.tools.assembly(text))) > 1


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_matrix_instructions_take_most_of_the_inner_loop(target: str) -> None:
    """Check the cycles of one wave, by llvm-mca. Other waves of the unit fill the rest."""
    if not MCA:
        pytest.skip("llvm-mca-19 is not installed")
    backend, operator, binding = product_of(target)
    text = check_resources(backend, operator, binding)
    cycles, matrix = cycles_of(target, INSTRUCTIONS[target], inner_loop(backend.tools.assembly(text)))
    print(f"{target}: {operator.tile} {dict(operator.config)}: {cycles:.0f} cycles, {matrix:.0f} of matrix instructions")
    assert matrix >= 0.5 * cycles

"""Predicted CPU core times of maps and reductions, which rank tiles and select the operators to stitch."""

from __future__ import annotations

import re
from itertools import pairwise
from random import Random

import numpy as np
import pytest

import rammer
from rammer.device.manifest import Binding
from rammer.fusion.tile_search import ranked_tiles
from rammer.ir.compute import Compute
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import dense
from rammer.ir.types import TensorType
from rammer_testing.cases import NetCase, Sampler
from rammer_testing.net import Net
from rammer_testing.nonempty import some
from rammer_testing.single import subjects

from rammer_rocm.dialect import CPU_DIALECT, OPENCL
from rammer_rocm.families import OpenClKernels
from rammer_rocm.generic.cost import PlainTasks, is_plain, task_seconds
from rammer_rocm.generic.kernel import generic_choices, write_generic_task
from rammer_rocm.generic.loop_counts import nests_of
from rammer_rocm.offline import CARDS
from rammer_rocm.panel.choose import GENERIC_RATE

CPU = VDevice(
    "cpu",
    "for tests",
    2,
    (
        MemoryLayer("dram", "device", 1 << 40, 47e9, 64),
        MemoryLayer("cache", "veu", 1 << 20, 166e9, 64),
        MemoryLayer("register", "thread", 2048, 332e9, 64),
    ),
    83e9,
    2e-6,
    vector=16,
)


def operator(*lines: str, outputs: tuple[str, ...] = (), layer: str = "veu") -> tuple[ROperator, Binding]:
    """Return consecutive Computes, each of which reads the preceding ones on chip."""
    computes = tuple(map(Compute.parse, lines))
    types = {c.name: c.type for c in computes} | {
        "x": TensorType("float32", (8, 64, 56, 56)),
        "z": TensorType("float32", (6144, 64)),
        "w": TensorType("float32", (768, 17)),
    }
    links = tuple(Connection(a.name, b.name, layer) for a, b in pairwise(computes) if a.name in b.reads)  # type: ignore[arg-type]
    return ROperator(computes[-1].name, computes, links, outputs or (computes[-1].name,)), Binding(types, {})


MAP = "y: f32[a:8, b:64, c:56, d:56] = tanh(x[a, b, c, d])"


def seconds(made: tuple[ROperator, Binding], tile: tuple[int, ...]) -> float:
    """Return the seconds of all tasks of a tile on one core."""
    tiled = made[0].tiled(tile)
    return task_seconds(tiled, made[1], CPU) * tiled.task_count


def test_rows_that_fill_no_vector_are_computed_in_short_ones_or_element_by_element() -> None:
    """Check rows that the core prices equally. Measured, rows of 14 in vectors of 8 were 4 times slower,
    rows of 3 slower still."""
    made = operator(MAP)
    whole, narrow, least = (seconds(made, tile) for tile in ((4, 64, 56, 56), (8, 64, 56, 14), (8, 64, 56, 3)))
    assert least > 1.2 * narrow > 1.7 * whole
    first = next(iter(generic_choices(*made, CPU)))
    assert first.operator.tile[-1] == 56


def test_rows_that_end_within_a_vector_cost_the_whole_vector() -> None:
    made = operator(MAP)
    assert seconds(made, (8, 64, 28, 28)) > 1.1 * seconds(made, (8, 64, 28, 56))


def test_what_a_task_keeps_costs_and_a_result_that_it_reads_again_does_not() -> None:
    lines = ("s: f32[a:768, b:64] = z[a, b] + 1.0", "m: f32[a:768] = max[k:64] s[a, k]")
    held, written = (operator(*lines, "y: f32[a:768, b:64] = s[a, b] - m[a]", outputs=o) for o in (("y",), ("s", "y")))
    assert seconds(written, (8, 64)) > seconds(held, (8, 64)) > seconds(operator(lines[0]), (8, 64))


def test_what_a_tile_leaves_over_is_not_computed_as_fast_as_the_tile() -> None:
    """Check rows of 17 in tiles of 16: every other task has columns of one, and whole rows were twice as fast."""
    made = operator("y: f32[a:768, b:17] = w[a, b] + 1.0")
    tile, kept = seconds(made, (768, 16)), seconds(operator("y: f32[a:768, b:16] = w[a, b] + 1.0"), (768, 16))
    assert tile > 1.15 * kept
    assert tile > 1.3 * seconds(made, (768, 17))


def test_reductions_in_one_loop_wait_together_where_steps_wait_at_all() -> None:
    """Check that a long loop waits only for its last step, with any number of reductions; short loops overlap with their
    successors."""
    gains = []
    for rows, depth in ((8, 768), (768, 8)):
        parts = [f"{n}: f32[a:{rows}, b:16] = {n}[k:{depth}] z[a * {depth} + k, b]" for n in ("max", "min")]
        separate = sum(seconds(operator(part), (rows, 16)) for part in parts)
        gains.append(separate / seconds(operator(*parts, outputs=("max", "min")), (rows, 16)))
    assert gains[0] > gains[1] * 1.1


def test_products_and_gpus_are_priced_by_the_core() -> None:
    product = operator("p: f32[a:768, b:768] = sum[k:64] z[a, k] * z[b, k]")
    assert not is_plain(product[0])
    card = CARDS["gfx90a"].vdevice("gfx90a")
    assert card.threads > 1
    ordered = [c.seconds for c in generic_choices(*operator(MAP), card)]
    assert ordered == sorted(ordered)


def test_products_of_the_generic_kernel_are_far_from_the_peak() -> None:
    found, binding = operator("p: f32[a:768, b:64] = sum[k:64] z[a, k] * z[b, k]")
    best = min(c.seconds for c in generic_choices(found, binding, CPU))
    assert best >= found.main.flops / (CPU.flops * CPU.veus * GENERIC_RATE)


@pytest.mark.parametrize("tile", [(1, 64, 56, 56), (8, 64, 56, 56)])
def test_twice_the_tasks_take_about_as_long(tile: tuple[int, ...]) -> None:
    made = operator(MAP)
    assert seconds(made, tile) == pytest.approx(seconds(made, (2, 64, 56, 56)), rel=0.05)


def test_a_softmax_of_rows_longer_than_a_cache_is_one_kernel(rng: np.random.Generator) -> None:
    net = Net((), rng)
    x = net.input(4, 262_144)
    exe = rammer.compile(net.model(net.node("Softmax", x, axis=-1)), "rocm")
    values = rng.standard_normal((4, 262_144)).astype(np.float32)
    (found,) = exe.run({x: values}).values()
    powers = np.exp(values.astype(np.float64))
    expected = powers / powers.sum(-1, keepdims=True)
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
    (special,) = exe.cache.values()
    assert [len(s.program.operators) for s in special.compiled.segments] == [1]


class Undriven(OpenClKernels):
    """A CPU that only compiles."""

    fingerprint, profiler = "undriven", None


#: Vector loads or stores in a text.
VECTORS = re.compile(r"rm_[vhusi](?:load|store|even)(\d+)\(")


def counted_widths(tiled: ROperator, binding: Binding) -> set[int]:
    """Return the vector widths that are counted for a task."""
    boxes, found = tiled.boxes(tiled.inner_box(), binding.types), set[int]()
    for nest in nests_of(tiled, binding, OPENCL):
        lanes = nest.lanes(nest.joined([high - low for low, high in boxes[nest.root.name]]))
        found |= {width for _, width in (lanes.columns or {}).values()} if lanes.axis < 0 else {lanes.width}
    return found


@pytest.mark.slow
def test_loops_are_counted_as_the_kernel_has_them(seed: int) -> None:
    """Check random operators and tiles: the counted vectors are those of the text in nearly all cases. Exceptions remain: values
    that a task keeps are counted with the strides of the whole tensor."""
    random, alike = Random(seed), list[bool]()
    sampler = Sampler(random, 400_000, ("float32", "float16"), ("stitched",))
    while len(alike) < 24:
        for subject in some(subjects(sampler.next(), Undriven(CPU))):  # type: ignore[arg-type]
            tiles = [tile for _, tile, _ in ranked_tiles(subject.operator, subject.binding.types, CPU)]
            tiled = subject.operator.tiled(random.choice(tiles))
            text = write_generic_task(tiled, subject.binding, CPU_DIALECT).text
            alike.append(counted_widths(tiled, subject.binding) == set(map(int, VECTORS.findall(text))))
    assert sum(alike) >= 0.75 * len(alike)


@pytest.mark.parametrize(("count", "tile", "together"), [(1024, 128, 8), (1024, 32, 2), (1000, 128, 1)])
def test_columns_that_are_summed_in_one_loop_come_to_fewer_pages(count: int, tile: int, together: int) -> None:
    """Check the number of pages against the kernel's loop, if all tasks are equally wide. Loads and operations still count."""
    operator = ROperator("y", (Compute.parse(f"y: f32[i:{count}] = sum[k:4096] x[k, i]"),), (), ("y",))
    types = {"x": TensorType("float32", (4096, count)), "y": TensorType("float32", (count,))}
    binding = Binding(types, {n: dense(n, n, t.shape) for n, t in types.items()})
    tasks, tiled = PlainTasks(operator, binding, CPU), operator.tiled((tile,))
    found = tasks.mean(tiled)
    vectors = found["load"] / 4096
    assert found.get("line", 0.0) + found.get("page", 0.0) == pytest.approx(4096 * vectors / together)
    assert write_generic_task(tiled, binding, CPU_DIALECT).text.count("rm_vload16") == together


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_columns_of_several_images_are_apart_unless_that_is_cheaper(groups: int) -> None:
    """Check products of little depth: storing sums of several images lane by lane had 7 times ONNX Runtime's time."""
    sizes = {
        "n": 8,
        "c": 8 // groups,
        "m": 64 // groups,
        "g": groups,
        "h": 56,
        "w": 56,
        "k": 1,
        "s": 1,
        "p": 0,
        "q": 0,
        "d": 1,
        "off": 0,
    }
    (subject,) = subjects(NetCase("conv", sizes, (), seed=1), Undriven(CPU))  # type: ignore[arg-type]
    best = next(iter(Undriven(CPU).candidates(subject.operator, subject.binding)))
    assert best.family != "panel" or best.tile[0] == 1

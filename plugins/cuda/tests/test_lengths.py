"""Programs for a range of lengths: kernels of every family stop at a length in device memory and keep the elements past it."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from rammer.device.manifest import OpenOptions
from rammer.ir.at_length import PARTS, ending_axes, part_of, shrink_to_parts
from rammer.ir.operator import ROperator
from rammer_testing.nonempty import some

from .emulator.launch import COMPILER
from .ranged_on_host import MODELS, RangedSearch, Step, lot_of, points, searched
from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.compile import compile_all
from rammer_cuda.families import family_of
from rammer_cuda.horizontal_fusion import combine_kernels
from rammer_cuda.kernels.lengths import ended
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.source import task_kernel, translation_unit

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
#: Families with length-bounded reductions, by model and precision.
STOPPED = {
    "products": {"gemm", "gemm_tf32x3", "rowwise", ""},
    "heads": {"attention", ""},
    "sums": {"gemv", "gemm", "gemm_tf32x3", ""},
    "rows": {"rowwise", ""},
    "deep": {"gemm", "gemm_tf32x3", ""},
    "products float16": {"gemm_f16", "gemm_wgmma_f16", "rowwise", ""},
    "heads float16": {"attention", ""},
    "products tf32": {"gemm_tf32", "gemm", "rowwise", ""},
    "products bfloat16": {"gemm_bf16", "gemm", "rowwise", ""},
}
CASES = [*STOPPED, "attention", "cache", "causal", "residual", "windows", "pooled", "halved", "strided", "flattened"]


def step_of(case: str, family: str, length: int, rng: np.random.Generator) -> tuple[RangedSearch, Step]:
    """Return an operator with stops that the family supports, at a length."""
    search = searched(case, rng)
    for step in search.steps({"seq": length}):
        if step.operator.reduce_bounds and any(t.family == family for t, _ in search.candidates(step)):
            return search, step
    raise AssertionError(f"no {family} in {case}")


@pytest.mark.slow
@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_a_kernel_of_each_family_ends_at_the_length(case: str, rng: np.random.Generator) -> None:
    """Check results at the length, with NaN wherever a kernel must not read. Tasks past the length keep the results."""
    search = searched(case, rng)
    found = list(islice(search.problems(points(search, rng)[int(rng.integers(3))], 1), 6))
    assert found
    assert [p for _, p in found if p] == []


@needs_compiler
@pytest.mark.large
@pytest.mark.parametrize("case", CASES)
def test_kernels_end_at_every_length_that_is_an_edge(case: str, rng: np.random.Generator) -> None:
    search = searched(case, rng)
    for point in some(points(search, rng)):
        assert [p for _, p in search.problems(point, 6) if p] == []


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", STOPPED)
def test_every_family_that_reduces_stops(case: str, rng: np.random.Generator) -> None:
    """Check that each candidate of each family reads the length (``candidates`` asserts it) and a static one does not."""
    search, seen = searched(case, rng), set[str]()
    for step in some(search.steps(points(search, rng)[0])):
        for tiled, kernel in search.candidates(step) if step.operator.reduce_bounds else ():
            seen.add(tiled.family)
            bare = replace(tiled, reduce_bounds=(), skips=())
            static = task_kernel(bare, step.binding)
            assert static.text != kernel.text
            assert ended(bare, static, step.binding) is static
    assert seen >= STOPPED[case]


@pytest.mark.slow
@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "family"),
    [("products", "gemm"), ("heads", "attention"), ("sums", "gemv"), ("rows", "rowwise"), ("deep", "gemm_tf32x3")],
)
def test_a_kernel_that_stops_elsewhere_is_found(case: str, family: str, rng: np.random.Generator) -> None:
    """Check planted stops: after an element or two, and at the maximal length. In a softmax where one element outweighs all
    others, a wrong stop may have no effect. Inputs are redrawn until it has, at most four times."""
    wanted = {"early", "at the bound"}
    for _ in range(4):
        search, step = step_of(case, family, 29, rng)
        tiled, kernel = next((t, k) for t, k in search.candidates(step) if t.family == family)
        lot = lot_of(tiled, step.binding)
        assert step.problem(kernel, tiled, lot) == ""
        moved = {s.extent: replace(s.extent, offset=s.extent.offset - 27) for s in tiled.reduce_bounds}
        early = replace(
            tiled,  # with masks of whole rows: a kernel with two different ends runs to the bound and is right
            reduce_bounds=tuple(replace(s, extent=moved[s.extent]) for s in tiled.reduce_bounds),
            skips=tuple(replace(e, extent=moved.get(e.extent, e.extent)) for e in tiled.skips),
        )
        for name, wrong in (("early", early), ("at the bound", replace(tiled, reduce_bounds=()))):
            if step.problem(task_kernel(wrong, step.binding), tiled, lot):
                wanted.discard(name)
        if family == "rowwise":  # its bodies mask elements past the length: at the bound it is right, and only reads more
            wanted.discard("at the bound")
        if not wanted:
            break
    assert not wanted


@pytest.mark.slow
def test_tasks_that_do_not_end_are_found(rng: np.random.Generator) -> None:
    """Check a planted kernel without the test at its beginning."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    search, step = step_of("heads", "attention", 20, rng)
    tiled, kernel = next((t, k) for t, k in search.candidates(step) if t.family == "attention")
    assert step.problem(kernel, tiled, 1) == ""
    late = replace(tiled, skips=tuple(replace(e, extent=replace(e.extent, offset=64)) for e in tiled.skips))
    assert "did not end" in step.problem(kernel, tiled, 1, late)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_machine_code(case: str, rng: np.random.Generator) -> None:
    """Check that a candidate of each family, clusters included, compiles after the length test, and so do two in one launch."""
    search = searched(case, rng)
    kinds: dict[tuple[str, bool, bool], list[tuple[ROperator, TaskKernel]]] = {}
    for step in (s for s in search.steps(points(search, rng)[0]) if s.operator.lengths):
        for tiled in some(search.backend.all_candidates(step.operator, step.binding)):
            if search.backend.fits(tiled, step.binding):
                kernel = task_kernel(tiled, step.binding)
                kinds.setdefault((tiled.family, kernel.blocks > 1, bool(tiled.skips)), []).append((tiled, kernel))
    chosen = [listed[int(rng.integers(len(listed)))] for listed in some(kinds.values())]
    made = [ended(tiled, kernel, search.binding) for tiled, kernel in chosen]
    alike = [k for t, k in chosen if family_of(t).packable and not (t.skips or k.dynamic or k.blocks > 1)]
    made += [combine_kernels([(k, (0,)), (alike[0], (0,))]) for k in alike]
    compile_all({k.entry: translation_unit([k]) for k in made}, "sm_90a")


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_choices_are_priced_over_the_range(case: str, rng: np.random.Generator) -> None:
    """Check mean prices over lengths. A price is at most that of the longest, and less if most tasks are masked. The first offer
    is at least as good over the range as the best at the maximal length."""
    search = searched(case, rng)
    backend, cheaper = search.backend, 0
    operators = [replace(o, tile=(), family="", config=()) for o in search.program.operators if o.lengths]
    for operator in some(o for o in operators if ending_axes(o)):
        static = replace(operator, skips=(), reduce_bounds=())
        for family in some(backend.usable):
            listed, bound = (list(family.candidates(o, search.binding, backend.gpu)) for o in (operator, static))
            priced = {(c.operator.tile, c.operator.config): c.seconds for c in listed}
            pairs = ((c.seconds, priced.get((c.operator.tile, c.operator.config))) for c in bound)
            known = [(alone, mean) for alone, mean in pairs if mean is not None]
            assert all(mean <= alone * 1.05 for alone, mean in known), family.name  # models are not quite monotone
            assert not known or not priced or min(priced.values()) <= known[0][1] * (1 + 1e-9)
            cheaper += sum(mean < alone * 0.999 for alone, mean in known)
    assert cheaper or case in ("cache", "attention", "residual")  # few tasks each


def test_an_operator_is_shorter_where_all_that_reads_it_ends() -> None:
    """Check that attention scores have fewer keys and rows, since all their readers stop or are masked there."""
    search = searched("heads", np.random.default_rng(0))
    (operator,) = search.program.operators
    first, *_, last = shrink_to_parts(operator)
    assert [c.shape for c in last.computes] == [c.shape for c in operator.computes]
    keys, scores = part_of(90, PARTS[0]), first.computes[0]
    assert scores.shape == (2, keys, keys)
    assert first.computes[-1].shape == (2, keys, 16)
    assert [r.extent for r in first.computes[-1].reduce] == [keys]
    assert not first.lengths


def test_axes_of_one_extent_end_apart() -> None:
    """Check scores whose rows and columns end at one length, each by its tile."""
    search = searched("heads", np.random.default_rng(0))
    (operator,) = search.program.operators
    scores = operator.computes[0]
    alone = replace(operator, computes=(scores,), connections=(), outputs=(scores.name,), reduce_bounds=(), tile=(1, 64, 56))
    ends = tuple(replace(operator.skips[0], axis=a.name) for a in scores.axes[1:])
    short = shrink_to_parts(replace(alone, skips=ends), (0.6,))[0]
    assert part_of(90, 0.6) == 64
    assert short.computes[0].shape == (2, 64, 90), "one tile of 64 rows, two of 56 columns"


@pytest.mark.slow
@needs_compiler
def test_tiles_of_a_range_want_constants_alike(rng: np.random.Generator) -> None:
    """Check that kernels of one family use one arrangement per constant for all tiles, which has every weight."""
    search = searched("products", rng)
    steps = [s for s in search.steps(points(search, rng)[0]) if s.operator.lengths]
    wanted = dict[tuple[str, str], set[str]]()
    for operator in search.program.operators:
        untiled = replace(operator, tile=(), family="", config=())
        for tiled in search.backend.all_candidates(untiled, search.binding) if operator.lengths else ():
            if tiled.family.startswith("gemm") and search.backend.fits(tiled, search.binding):
                for a in task_kernel(tiled, search.binding).arguments:
                    if a.packing is not None:
                        wanted.setdefault((a.tensor, tiled.family), set()).add(a.packing.key)
    assert steps and all(len(keys) <= 2 for keys in some(wanted.values())), wanted
    assert any(len(keys) == 1 for keys in wanted.values())


@pytest.mark.slow
@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["gemm", "gemm_tf32x3", "gemm_wgmma3"])
def test_constants_in_one_order_are_read_right(family: str, rng: np.random.Generator) -> None:
    """Check two random tiles of each operator, where constants fill no tile and no block."""
    search, drawn = searched("weights", rng), list[tuple[Step, ROperator, TaskKernel]]()
    for step in (s for s in search.steps(points(search, rng)[0]) if s.operator.lengths):
        found = [t for t in search.backend.all_candidates(step.operator, step.binding) if t.family == family]
        kernels = [(t, task_kernel(t, step.binding)) for t in found if search.backend.fits(t, step.binding)]
        listed = [(t, k) for t, k in kernels if k.blocks == 1]
        drawn += [(step, *listed[i]) for i in rng.permutation(len(listed))[:2]]
    for step, tiled, kernel in some(drawn):
        assert any(a.packing is not None for a in kernel.arguments)
        assert not step.problem(kernel, tiled, lot_of(tiled, step.binding)), tiled.head()


@pytest.mark.cuda
@pytest.mark.parametrize("case", CASES)
def test_candidates_end_at_the_length_on_a_gpu(case: str, rng: np.random.Generator) -> None:
    """Check two of each kind at each range end, clusters and warpgroups included, which share a sum with possibly empty parts."""
    backend, search = open_backend(OpenOptions()), searched(case, rng)
    assert isinstance(backend, CudaBackend)
    for point in some(points(search, rng)):
        for step in (s for s in search.steps(point) if s.operator.lengths):
            kinds: dict[tuple[str, bool], list[ROperator]] = {}
            for tiled in some(backend.all_candidates(step.operator, step.binding)):
                if backend.fits(tiled, step.binding):
                    blocks = task_kernel(tiled, step.binding).blocks
                    kinds.setdefault((tiled.family, blocks > 1), []).append(tiled)
            for tiled in some(k[int(i)] for k in kinds.values() for i in rng.permutation(len(k))[:2]):
                loaded = backend.load(*step.program(tiled))
                given = step.spoilt(lot_of(tiled, step.binding))
                have = loaded.run({n: v for n, v in given.items() if n not in step.constants}).outputs
                loaded.close()
                assert step.judged(tiled, have, left=False) == "", tiled.head()


def test_all_models_have_lengths(rng: np.random.Generator) -> None:
    assert {c.partition(" ")[0] for c in CASES} == {*MODELS} - {"weights"}

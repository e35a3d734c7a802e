"""Tasks past the length of a run are skipped: elements that they leave unwritten are not read, on any device."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from ranged_models import RANGED, RangedModel

import rammer
from rammer.compiled.segments import Compiled, ProgramSegment
from rammer.device.loader import Registry
from rammer.device.manifest import Binding
from rammer.ir.extent import AffineExtent, Ranged, ReduceBound, SkipTasks
from rammer.ir.fold_rows import fold
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram
from rammer.runtime.shape_buckets import crop_outputs, find_bucket, pad_inputs
from rammer.tuning.kernel_probe import USUAL, probe_program, random_inputs
from rammer.verify.verifier import VerifyError, verify
from rammer_testing.nonempty import some
from rammer_testing.peer_process import PeerSession

DEVICES = ["ipu_sim", "rocm", "toy", pytest.param("cuda", marks=pytest.mark.cuda)]
#: Tiles of a chip: enough that tasks are smaller than the lengths.
TILES = "64"


@cache
def made(name: str, maker: str) -> tuple[RangedModel, Compiled, list[dict[str, int]]]:
    """Return a model, its program for the bucket of the longest lengths, and every point of that bucket. On a simulated chip,
    tiles are small."""
    rng = np.random.default_rng(5)
    model = RANGED[name](rng)
    spans = {s: find_bucket(span, span[1]) for s, span in model.spans.items()}
    options = {"tiles": TILES} if maker == "ipu_sim" else None
    exe = rammer.compile(model.proto, maker, shapes=model.spans, options=options)
    exe.run(model.inputs({s: high for s, (_, high) in spans.items()}, rng))
    (special,) = exe.cache.values()
    points = [dict(zip(spans, p, strict=True)) for p in product(*(range(low, high + 1) for low, high in spans.values()))]
    exe.close()
    return model, special.compiled, points


def parts(name: str, maker: str = "ipu_sim") -> tuple[RangedModel, Compiled, ProgramSegment, Ranged, list[dict[str, int]]]:
    model, compiled, points = made(name, maker)
    (segment,) = compiled.segments
    assert isinstance(segment, ProgramSegment)
    assert compiled.ranged is not None
    return model, compiled, segment, compiled.ranged, points


def endings(program: RProgram) -> list[SkipTasks]:
    return [e for o in program.operators for e in o.skips]


def wrong_at(name: str, device: str, program: RProgram, rng: np.random.Generator, maker: str = "ipu_sim") -> list[dict[str, int]]:
    """Return the points at which ``program`` is wrong on ``device``. The memory holds NaN before each run."""
    model, compiled, segment, ranged, points = parts(name, maker)
    backend, found = Registry().open(device), list[dict[str, int]]()
    loaded = backend.load(fold(program, min(backend.vdevice.veus, 3)), segment.constants)
    session = PeerSession(model.proto)
    names = [o.name for o in session.get_outputs()]
    for place in some(rng.permutation(len(points))):
        inputs = model.inputs(points[place], rng)
        wide, point = pad_inputs(ranged, compiled.graph.inputs, inputs)
        loaded.poison()
        got = crop_outputs(ranged, compiled.graph.outputs, loaded.run(wide).outputs, point)
        expected = dict(zip(names, session.run(None, inputs), strict=True))
        if not all(np.allclose(got[n], v, 1e-4, 1e-5) for n, v in expected.items()):
            found.append(points[place])
    loaded.close()
    return found


@pytest.mark.slow
@pytest.mark.sampled(1, of="device")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RANGED)
def test_every_value_of_a_range_is_right(device: str, name: str, rng: np.random.Generator) -> None:
    program = parts(name)[2].program
    assert endings(program)
    assert wrong_at(name, device, RProgram.parse(str(program)), rng) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RANGED)
def test_kernels_that_stop_at_the_length_are_right(name: str, rng: np.random.Generator) -> None:
    """Check rocm's programs: products whose rows and columns end within a task."""
    program = parts(name, "rocm")[2].program
    assert name != "residual" or any(o.family == "panel" and o.skips for o in program.operators)
    assert wrong_at(name, "rocm", program, rng, "rocm") == []


@pytest.mark.slow
def test_tasks_that_end_are_dealt_in_turns() -> None:
    """Check that every row has an equal part of the shorter lengths' tasks."""
    program = fold(parts("attention")[2].program, 4)
    for operator in some(o for o in program.operators if o.skips and o.task_count >= 32):
        first = [
            {t.index for t in row if t.operator == operator.name and t.index < operator.task_count // 2} for row in program.rows
        ]
        assert max(map(len, first)) - min(map(len, first)) <= 1, operator.name


def shifted(program: RProgram, endings: int = 0, stops: int = 0) -> RProgram:
    """Return ``program`` whose tasks and reductions end this many elements late."""

    def late(e: AffineExtent, by: int) -> AffineExtent:
        return replace(e, offset=e.offset + by)

    def moved(o: ROperator) -> ROperator:
        ends = tuple(replace(e, extent=late(e.extent, endings)) for e in o.skips)
        return replace(o, skips=ends, reduce_bounds=tuple(replace(s, extent=late(s.extent, stops)) for s in o.reduce_bounds))

    return replace(program, operators=tuple(map(moved, program.operators)))


def silent(program: RProgram) -> RProgram:
    """Return ``program`` without fill values past the lengths, so that memory there is unchanged."""
    operators = (replace(o, skips=tuple(replace(e, fills=(None,) * len(e.fills)) for e in o.skips)) for o in program.operators)
    return replace(program, operators=tuple(operators))


@pytest.mark.sampled(1, of="device")
@pytest.mark.parametrize("device", ["ipu_sim", "rocm"])
@pytest.mark.parametrize("name", RANGED)
def test_reductions_stop_at_the_length(device: str, name: str, rng: np.random.Generator) -> None:
    """Check that nothing past the length is read if all kernels stop there. Memory past the length is NaN at every value of a
    range."""
    program = parts(name, device)[2].program
    assert name == "residual" or any(o.reduce_bounds for o in program.operators)
    assert (
        name != "products"
        or device != "rocm"
        or sum(o.family == "panel" and bool(o.reduce_bounds) for o in program.operators) == 2
    )
    assert wrong_at(name, device, silent(program), rng, device) == []


@pytest.mark.parametrize("name", ["attention", "products"])
def test_operators_of_a_range_are_measured_at_a_usual_length(name: str) -> None:
    """Check that lengths are inputs of the measured program, at a usual value, not 0, which would skip all tasks."""
    _, _, segment, _, points = parts(name, "rocm")
    backend, binding = Registry().open("rocm"), Binding.of(segment.program, segment.constants)
    for operator in some(o for o in segment.program.operators if o.lengths):
        program, constants = probe_program(operator, binding, operator.task_count)
        inputs = random_inputs(program, np.random.default_rng(0))
        most = {n: high for n, high in points[-1].items() if f"length_{n}" in operator.lengths}
        assert {n: int(inputs[f"length_{n}"]) for n in most} == {n: math.ceil(high * USUAL) for n, high in most.items()}
        loaded = backend.load(program, constants)
        loaded.run(inputs)
        loaded.close()


def test_products_that_become_one_end_as_each_did() -> None:
    """Check queries, keys and values: the fill value of the values applies to all three, so that their bodies are equal."""
    (whole,) = [o for o in parts("attention")[2].program.operators if o.anchor.name.endswith("_batch")]
    assert len(whole.computes) == 2
    assert [str(e) for e in whole.skips] == ["b0 from length_batch", "m from length_seq with 0.0"]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["ipu_sim", "rocm"])
def test_an_ending_that_comes_too_early_is_found(device: str, rng: np.random.Generator) -> None:
    """Check planted mistakes: tasks that end one element early, and missing zeros where reductions read past the length."""
    program = parts("attention")[2].program
    assert wrong_at("attention", device, shifted(program, endings=-1), rng)
    bare = replace(program, operators=tuple(replace(o, reduce_bounds=()) for o in program.operators))
    assert wrong_at("attention", device, silent(bare), rng)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["ipu_sim", "rocm"])
def test_a_reduction_that_stops_elsewhere_is_found(device: str, rng: np.random.Generator) -> None:
    """Check planted mistakes: a bound one element early, and one late where that element was not written."""
    name = ("attention", "products", "cache")[int(rng.integers(3))]
    program = parts(name, device)[2].program
    assert wrong_at(name, device, shifted(program, stops=-1), rng, device)
    assert wrong_at(name, device, shifted(silent(program), stops=1), rng, device)


def test_a_program_of_a_range_reads_back_equal() -> None:
    program = parts("attention")[2].program
    again = RProgram.parse(str(program))
    assert again == program
    assert str(again) == str(program)
    assert {e.writes for e in endings(program)} == {True, False}
    for kind in ("skips", "reduce_bounds"):
        bare = replace(program, operators=tuple(replace(o, **{kind: ()}) for o in program.operators))
        assert bare.digest != program.digest, kind


def test_what_is_no_ending_is_refused() -> None:
    program = parts("attention")[2].program
    place = next(i for i, o in enumerate(program.operators) if any(e.writes for e in o.skips))
    operator = program.operators[place]
    (ending, *_) = [e for e in operator.skips if e.writes]
    quiet = replace(ending, fills=(None,) * len(ending.fills))
    for wrong in (
        (replace(ending, axis="other"),),
        (replace(ending, fills=()),),
        (ending, quiet),
        (replace(ending, extent=AffineExtent(((operator.outputs[0], 1),), 0)),),
        (replace(ending, extent=AffineExtent((("nobody", 1),), 0)),),
        (replace(ending, extent=replace(ending.extent, terms=((ending.extent.terms[0][0], 1 << 40),))),),
    ):
        operators = (*program.operators[:place], replace(operator, skips=wrong), *program.operators[place + 1 :])
        with pytest.raises(VerifyError, match="skip"):
            verify(replace(program, operators=operators))
    place = next(i for i, o in enumerate(program.operators) if o.reduce_bounds)
    operator = program.operators[place]
    stop = operator.reduce_bounds[0]
    for bad in (
        replace(stop, axis="other"),
        replace(stop, compute="other"),
        replace(stop, axis=operator.anchor.axes[0].name),
        replace(stop, extent=AffineExtent((("nobody", 1),), 0)),
    ):
        operators = (*program.operators[:place], replace(operator, reduce_bounds=(bad,)), *program.operators[place + 1 :])
        with pytest.raises(VerifyError, match="reduce_bound"):
            verify(replace(program, operators=operators))
    for text in ("m", "m.k", "m.k at 3", "m at length_seq * 2"):
        with pytest.raises(ValueError, match="length"):
            ReduceBound.parse(text)
    for text in ("m", "m from ", "m from 3", "m from length_seq with x", "m from length_seq * 2"):
        with pytest.raises(ValueError, match=r"length|float"):
            SkipTasks.parse(text, 1)


def test_a_shorter_run_takes_fewer_cycles(rng: np.random.Generator) -> None:
    """Check that skipped tasks cost no cycles: a chip of few tiles has several tasks of each operator."""
    _, compiled, segment, ranged, points = parts("attention")
    loaded, seconds = Registry().open("ipu_sim").load(fold(segment.program, 2), segment.constants), []
    for point in (points[-1], points[0]):
        wide, _ = pad_inputs(ranged, compiled.graph.inputs, RANGED["attention"](rng).inputs(point, rng))
        seconds.append(loaded.run(wide).seconds)
    loaded.close()
    assert seconds[1] < 0.8 * seconds[0]

"""The contract of every device: the conformance kit, and one program text that runs unchanged on all of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from rammer.compiled.segments import ProgramSegment
from rammer.device.loader import Registry
from rammer.device.manifest import Array
from rammer.errors import BadInput
from rammer.ir.fold_rows import fold
from rammer.ir.program import RProgram
from rammer.verify.verifier import verify
from rammer_testing.conformance import (
    CHECKS,
    TIMED,
    TOLERANCE,
    ConformanceError,
    Subject,
    check_device,
    main,
    reference,
    relative_error,
    subject,
)
from rammer_testing.small_models import SmallModel

import rammer_toy

DEVICES = ("rocm", "ipu_sim", "toy", pytest.param("cuda", marks=pytest.mark.cuda))


@pytest.mark.slow
@pytest.mark.sampled(3, of="device")
@pytest.mark.parametrize("check", [pytest.param(c, marks=[pytest.mark.alone] if c in TIMED else []) for c in CHECKS])
@pytest.mark.parametrize("device", [d for d in DEVICES if d != "toy"])  # toy has separate tests
def test_conformance(device: str, check: str) -> None:
    with subject(device) as opened:
        CHECKS[check](opened)


# --- one program text for all devices -----------------------------------------------------------------

NET = SmallModel(
    "net",
    """(float[1,3,12,12] x, float[8,3,3,3] w_k, float[8] w_b, float[10,432] w_f, float[10] w_g)
    => (float[1,10] y) {
    c = Conv<pads=[1,1,1,1]>(x, w_k, w_b)
    r = Relu(c)
    p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)
    n = Neg(p)
    k = Concat<axis=1>(p, n)
    starts = Constant<value = int64[1] {2}>()
    ends = Constant<value = int64[1] {14}>()
    axes = Constant<value = int64[1] {1}>()
    middle = Slice(k, starts, ends, axes)
    flat = Flatten(middle)
    g = Gemm<transB=1>(flat, w_f, w_g)
    y = Softmax<axis=1>(g)
}""",
)


@cache
def neutral() -> tuple[str, ProgramSegment, dict[str, Array], Array]:
    """Return text, constants, inputs and float64 outputs of NET. Its tiles fit any device, and its operators have the generic
    kernel family."""
    maker = Subject("ipu_sim", options={"tiles": "24"})
    exe = maker.executable(NET)
    compiled = exe.compile_only({})
    (segment,) = compiled.segments
    assert isinstance(segment, ProgramSegment)
    plain = tuple(replace(o, family="", config=()) for o in segment.program.operators)
    text = str(replace(segment.program, operators=plain))
    inputs = NET.inputs(maker.rng, {})
    return text, segment, inputs, reference(compiled, inputs)["y"]


@pytest.mark.parametrize("folded", [False, True], ids=["unchanged", "folded"])
@pytest.mark.parametrize("device", DEVICES)
def test_one_program_text_runs_on_every_device(device: str, folded: bool) -> None:
    text, segment, inputs, want = neutral()
    program = RProgram.parse(text)
    assert str(program) == text
    assert program.veus == 24
    assert len(program.operators) >= 3
    backend = Registry().open(device)
    if folded:
        program = fold(program, min(backend.vdevice.veus, 3))
        assert program.veus <= backend.vdevice.veus
    verify(program, backend.vdevice)
    loaded = backend.load(program, segment.constants)
    try:
        have = loaded.run(inputs).outputs["y"]
    finally:
        loaded.close()
    assert relative_error(have, want) <= TOLERANCE


# --- the kit as one call ----------------------------------------------------------------------------------


def test_check_device_lists_every_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    for check in set(CHECKS) - {"manifest", "policies", "model product"}:  # test_conformance runs them all
        monkeypatch.delitem(CHECKS, check)
    check_device("toy")

    def fails(device: Subject) -> None:
        device.expect(float("nan") < 1, "planted")

    monkeypatch.setitem(CHECKS, "manifest", fails)
    monkeypatch.setitem(CHECKS, "policies", fails)
    text = r"2 of 3 checks failed\nmanifest: ConformanceError: toy \(seed \d+\): planted\npolicies: .*planted"
    with pytest.raises(ConformanceError, match=text):
        check_device("toy")
    with pytest.raises(BadInput, match="unknown device 'toi'"):
        check_device("toi")


def test_the_kit_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "toy", "--check", "names", "--check", "manifest"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[:2]] == [["manifest", "ok"], ["names", "ok"]]
    assert main(["--device", "toy", "--option", "memory=1000", "--check", "model product"]) == 1
    assert "1 of 1 checks failed" in capsys.readouterr().out
    for wrong, words in (
        (["--check", "nothing"], "no check 'nothing'"),
        (["--option", "memory"], "KEY=VALUE"),
        (["--option", "speed=1"], "no option 'speed'"),
    ):
        assert main(["--device", "toy", *wrong]) == 2
        assert words in capsys.readouterr().err


# --- the example plugin ---------------------------------------------------------------------------------


def test_the_toy_plugin_is_short_enough_to_quote() -> None:
    assert len(Path(rammer_toy.__file__).read_text().splitlines()) <= 150

"""The verdict of one test on a device."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

import rammer
from rammer.errors import RammerError
from rammer_testing.suite.cases import SuiteCase, Value
from rammer_testing.suite.wide import exactly, nearer, trusted_outputs

#: Verdicts, in order: correct on the device alone; correct with host operators; correct types and shapes of random numbers;
#: declined with a clear error; wrong numbers; any other failure; not run, because the run was stopped before.
PASSED, HOSTED, RANDOM = "passed", "passed with host operators", "random numbers"
DECLINED, WRONG, FAILED, UNRUN = "declined", "wrong", "failed", "not run"
VERDICTS: Final = (PASSED, HOSTED, RANDOM, DECLINED, WRONG, FAILED, UNRUN)
#: Two units in the last place of bfloat16, the tolerance of onnx's runner.
BFLOAT16: Final = 2.0**-6

#: Remark on a result that differs from the test's, if the test's rounding error against float64 is larger.
NEARER: Final = "nearer to float64 than the test's own numbers"
#: Remark on a result that differs from the test's because a decision trusts ONNX Runtime instead of the reference.
DECIDED: Final = "as ONNX Runtime computes it, where rammer follows it instead of the test"
#: Host operators without floating-point arithmetic: they move, select or compare elements or work on other types. All others
#: count as arithmetic.
MOVERS: Final = frozenset(
    {
        *("ArrayFeatureExtractor", "BitCast", "Compress", "Equal", "Identity", "ImageDecoder", "LabelEncoder", "MaxUnpool"),
        *("NonZero", "Optional", "OptionalGetElement", "OptionalHasElement", "RegexFullMatch", "TopK", "Unique"),
        *("ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert"),
        *("SequenceLength", "SplitToSequence", "ReverseSequence", "StringConcat", "StringNormalizer", "StringSplit"),
    }
)


@dataclass(frozen=True)
class Score:
    """The verdict on a test, its reason, and its host operators; ``float32``: it counts as float32 without control flow."""

    name: str
    verdict: str
    why: str = ""
    hosted: tuple[str, ...] = ()
    float32: bool = False

    @property
    def computed_aside(self) -> bool:
        """Return True if the test did not pass, or a host operator did floating-point arithmetic."""
        return self.verdict not in (PASSED, HOSTED, RANDOM) or any(op not in MOVERS for op in self.hosted)

    def listed(self) -> dict[str, Any]:
        """Return the score as JSON data."""
        return asdict(self)

    @staticmethod
    def of(listed: Mapping[str, Any]) -> Score:
        """Return the score from the output of ``listed``."""
        return Score(listed["name"], listed["verdict"], listed["why"], tuple(listed["hosted"]), listed["float32"])


def score(case: SuiteCase, device: str, options: Mapping[str, str]) -> Score:
    """Compile, run and compare every data set of a test."""
    try:
        exe = rammer.compile(case.model, device, options=options)
        try:
            difference, remark = _difference(case, exe)
            hosted = sorted(set(exe.hosted))
        finally:
            exe.close()
    except RammerError as problem:
        return Score(case.name, DECLINED, str(problem).splitlines()[0], (), case.float32)
    except Exception as problem:
        last = traceback.extract_tb(problem.__traceback__)[-1]
        return Score(case.name, FAILED, f"{type(problem).__name__}: {problem} ({last.name})".replace("\n", " "), (), case.float32)
    float32 = case.float32
    if difference:
        return Score(case.name, WRONG, difference, tuple(hosted), float32)
    verdict = RANDOM if case.random else HOSTED if hosted else PASSED
    return Score(case.name, verdict, remark, tuple(hosted), float32)


def _difference(case: SuiteCase, exe: Any) -> tuple[str, str]:
    """Return the difference of an output ("" if equal), and the remark if another judge accepted one."""
    remark = ""
    for inputs, wanted in case.sets:
        names = [p.name for p in exe.head.inputs]
        found = exe.run(dict(zip(names, inputs, strict=True)))
        for place, (name, want) in enumerate(zip(exe.head.output_names, wanted, strict=True)):
            said = differs(found[name], want, case.rtol, np.inf if case.random else case.atol)
            if not said:
                continue
            exact = exactly(case.model, inputs)
            if exact is not None and nearer(found[name], want, exact[place], case.rtol, case.atol):
                remark = NEARER
                continue
            trusted = trusted_outputs(case.model, inputs)
            if trusted is None or differs(found[name], trusted[place], case.rtol, case.atol):
                return f"{name}: {said}", ""
            remark = DECIDED
    return "", remark


def differs(have: Value, want: Value, rtol: float, atol: float) -> str:
    """Return the difference of a value in kind, shape, type or elements, or "" if it is within the tolerances."""
    if isinstance(want, (list, tuple)):
        if not isinstance(have, (list, tuple)) or len(have) != len(want):
            return f"{_kind(have)} for {_kind(want)}"
        return next(filter(None, (differs(h, w, rtol, atol) for h, w in zip(have, want, strict=True))), "")
    if want is None or have is None:
        return "" if want is have else f"{_kind(have)} for {_kind(want)}"
    have, want = np.asarray(have), np.asarray(want)
    if have.shape != want.shape or have.dtype != want.dtype:
        return f"{_kind(have)} for {_kind(want)}"
    if want.dtype.kind in "OUST":
        return "" if np.array_equal(have, want) else "other strings"
    if want.dtype.isbuiltin == 2:  # a type of ml_dtypes: bfloat16, float8, int4
        rtol = max(rtol, BFLOAT16) if want.dtype.name == "bfloat16" else rtol
        have, want = have.astype(np.float32), want.astype(np.float32)
    if np.isinf(atol):
        return ""
    try:
        np.testing.assert_allclose(have, want, rtol=rtol, atol=atol)
    except AssertionError as problem:
        lines = re.sub(r"\s+", " ", str(problem))
        return lines.partition("Mismatched elements:")[2].partition(" ACTUAL")[0].strip()[:160] or lines[:160]
    return ""


def _kind(value: Value) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (list, tuple)):
        return f"a sequence of {len(value)}"
    array = np.asarray(value)
    return f"{array.dtype}{list(array.shape)}"


def tally(scores: Sequence[Score]) -> dict[str, int]:
    """Return the number of tests for each verdict."""
    return {v: sum(s.verdict == v for s in scores) for v in VERDICTS}


def without_arithmetic(scores: Sequence[Score]) -> tuple[int, int]:
    """Count tests with a float32 result and no control flow: those that passed without floating-point host operators, and all."""
    counted = [s for s in scores if s.float32]
    return sum(not s.computed_aside for s in counted), len(counted)

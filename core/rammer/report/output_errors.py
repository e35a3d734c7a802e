"""Comparison of outputs with a reference: the three errors and a verdict. NaN never passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np

from rammer.ir.formats import from_file, to_readable

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True, slots=True)
class Difference:
    """Errors of an output. ``worst``: max |a-b|; ``relative``: max |a-b|/|b| where b is not 0; ``l2``: ||a-b||/||b||."""

    name: str
    worst: float
    relative: float
    l2: float
    good: bool
    why: str = ""


def as_record(difference: Difference) -> dict[str, Any]:
    """Return a difference as plain data for JSON, with None for errors that are not finite."""
    found = {**asdict(difference), "good": bool(difference.good)}
    return {name: None if isinstance(v, float) and not np.isfinite(v) else v for name, v in found.items()}


def compare_output(name: str, have: Array, want: Array, rtol: float, atol: float) -> Difference:
    """Return the difference, good if ``|a-b| <= atol + rtol*|b|`` everywhere or the relative L2 error is at most ``rtol``.

    Single elements near zero carry rounding errors of much larger terms, so the L2 error is the main criterion. Shape, type kind
    and NaN (unless the reference has NaN at the same index) always count."""
    have, want = to_readable(have), to_readable(from_file(want, str(have.dtype)))
    if have.shape != want.shape:
        return Difference(name, np.inf, np.inf, np.inf, False, f"shape {have.shape} instead of {want.shape}")
    if have.dtype.kind not in "biuf" or want.dtype.kind not in "biuf":
        same = bool(np.array_equal(have, want))
        return Difference(name, 0.0 if same else np.inf, 0.0, 0.0, same, "" if same else "values differ")
    a, b = have.astype(np.float64), want.astype(np.float64)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return Difference(name, np.nan, np.nan, np.nan, False, f"{int(np.isnan(a).sum())} NaN")
    with np.errstate(all="ignore"):
        gap = np.nan_to_num(np.abs(np.where(a == b, 0.0, a - b)), nan=0.0, posinf=np.inf)
    size = np.abs(np.where(np.isfinite(b), b, 0.0))
    worst = float(gap.max(initial=0.0))
    relative = float((gap[size > 0] / size[size > 0]).max(initial=0.0))
    norm = float(np.linalg.norm(size))
    l2 = float(np.linalg.norm(gap)) / norm if norm else (0.0 if worst == 0 else np.inf)
    good = bool((gap <= atol + rtol * size).all()) or l2 <= rtol
    return Difference(name, worst, relative, l2, good, "" if good else "differs")


def compare_outputs(have: Mapping[str, Array], want: Mapping[str, Array], rtol: float, atol: float) -> list[Difference]:
    """Return one Difference for each expected output; a missing output is a mismatch."""
    result = []
    for name, array in want.items():
        if name in have:
            result.append(compare_output(name, have[name], array, rtol, atol))
        else:
            result.append(Difference(name, np.inf, np.inf, np.inf, False, "missing"))
    return result


#: Relative rounding error of float16.
_UNIT: Final = 2.0**-11
#: Allowed multiple of a reference's change under errors of half precision.
_FACTOR: Final = 8.0
#: Largest finite float16.
_LARGEST: Final = 65504.0
#: Allowed relative L2 errors from which a comparison is meaningless.
_LOOSE: Final = 0.5


def perturb_inputs(inputs: Mapping[str, Array], seed: int) -> dict[str, Array]:
    """Return ``inputs`` with a relative error of half precision, at most, in every float."""
    rng = np.random.default_rng([seed, 2])

    def moved(x: Array) -> Array:
        return (x * (1 + _UNIT * np.asarray(rng.uniform(-1, 1, x.shape)))).astype(x.dtype) if x.dtype.kind == "f" else x

    return {name: moved(x) for name, x in inputs.items()}


def outlier_differences(
    have: Mapping[str, Array], want: Mapping[str, Array], moved: Mapping[str, Array], rtol: float, atol: float
) -> list[Difference]:
    """Return a Difference for each expected float output in half precision, where activations have outliers.

    Results that are not finite count where the reference is finite and within float16's range. Errors count as far as the
    reference itself is stable: ``moved`` are its outputs for ``perturb_inputs`` inputs."""
    result = list[Difference]()
    for name, array in want.items():
        label = f"{name}, outliers"
        if name not in have or array.dtype.kind != "f" or have[name].shape != array.shape:
            result += [compare_output(label, have[name], array, rtol, atol)] if name in have else []
            continue
        inside = np.isfinite(array) & (np.abs(array) <= _LARGEST)
        lost = int((~np.isfinite(have[name][inside])).sum())
        if lost:
            result.append(Difference(label, np.inf, np.inf, np.inf, False, f"{lost} not finite within float16's range"))
            continue
        known, own = np.where(inside, array, 0), np.where(inside, have[name], 0)
        movement = compare_output(label, np.where(inside, moved[name], 0), known, 0, 0).l2
        found = compare_output(label, own, known, rtol + _FACTOR * movement, atol)
        loose = not found.good and not rtol + _FACTOR * movement < _LOOSE
        result.append(replace(found, good=True, why="the reference is unstable") if loose else found)
    return result


def difference_rows(found: list[Difference]) -> list[list[str]]:
    """Return table rows: output, max abs, max rel, relative L2, verdict."""
    return [
        [
            d.name,
            f"{d.worst:.3g}",
            f"{d.relative:.3g}",
            f"{d.l2:.3g}",
            " ".join(filter(None, [verdict_word(d), d.why and f"({d.why})"])),
        ]
        for d in found
    ]


def verdict_word(found: Difference) -> str:
    """Return the verdict as one word."""
    return "ok" if found.good else "MISMATCH"


HEADERS = ["output", "max abs", "max rel", "rel L2", "verdict"]

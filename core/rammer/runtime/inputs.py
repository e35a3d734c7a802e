"""Inputs of a model: random by default, or from files."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import numpy as np

from rammer.errors import BadInput
from rammer.ir.formats import FORMATS, FloatFormat, numpy_type
from rammer.ir.names import shorten_name
from rammer.ir.port import ModelPort
from rammer.ir.types import itemsize
from rammer.process_memory import available_bytes
from rammer.runtime.model_source import Head

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Integer inputs without --range are uniform in [0, 2): a valid index into any axis of two or more.
DEFAULT_INTEGER_RANGE = (0.0, 2.0)
#: Largest magnitude in channels with outliers, which occur in language models.
OUTLIER: Final = 1e4
#: Bytes of a name in an .npz file, whose members are named by it and ``.npy``.
_LONGEST_NAME: Final = 65535 - len(".npy")


def load_npz(path: Path) -> dict[str, Array]:
    """Return all arrays of an .npz file. Raises BadInput if it is malformed."""
    try:
        with np.load(path, allow_pickle=False) as data:
            # Uses the members' names, since NumPy would find x for both x and x.npy.
            return {member.removesuffix(".npy"): data[member] for member in data.zip.namelist()}
    except (OSError, ValueError, zipfile.BadZipFile, AttributeError, TypeError) as problem:
        raise BadInput(f"{path} is not an .npz file of arrays: {problem}") from problem


def save_npz(file: BinaryIO, arrays: Mapping[str, Array]) -> None:
    """Write an .npz file of arrays with any names. ``np.savez`` passes names as keywords, which collide with ``file``. Raises
    BadInput for a name that the format does not support."""
    long = next((n for n in arrays if len(n.encode()) > _LONGEST_NAME), None)
    if long is not None:
        raise BadInput(f"{shorten_name(long)!r} is too long a name for an .npz file", hint=f"at most {_LONGEST_NAME} bytes")
    with zipfile.ZipFile(file, "w") as packed:
        for name, array in arrays.items():
            with packed.open(f"{name}.npy", "w", force_zip64=True) as member:
                kept = np.asanyarray(array)
                # NumPy's files do not support types of ml_dtypes: bytes are read back as the type of their input.
                kept = kept.view(f"V{kept.itemsize}") if str(kept.dtype) in FORMATS else kept
                np.lib.format.write_array(member, kept, allow_pickle=False)


def load_npy(path: Path) -> Array:
    """Return the array of a .npy file. Raises BadInput if it is malformed."""
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as problem:
        raise BadInput(f"{path} is not a .npy file: {problem}") from problem
    if not isinstance(array, np.ndarray):
        raise BadInput(f"{path} is not a .npy file", hint="for an .npz file use --inputs")
    return array


def static_shape(port: ModelPort, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the input's shape with --shape applied. Raises BadInput with the missing option if it stays dynamic, or for a
    non-tensor."""
    if not port.numeric:
        what = f"input {port.name!r} is of type {port.dtype}, which has no random values"
        raise BadInput(what, str(port), "run the model from Python: rammer.compile(model).run({...})")
    if not port.ranked and port.name not in shapes:
        raise BadInput(f"input {port.name!r} declares no shape", str(port), f"give it, for example --shape {port.name}:1x16")
    shape = shapes.get(port.name, tuple(port.shape))
    if any(not isinstance(d, int) for d in shape):
        declared = ",".join("?" if d is None else str(d) for d in port.shape)
        guess = "x".join(str(d) if isinstance(d, int) else "1" for d in port.shape)
        raise BadInput(
            f"input {port.name!r} has dynamic dimensions [{declared}]",
            hint=f"give its shape, for example --shape {port.name}:{guess}",
        )
    return tuple(int(d) for d in shape if isinstance(d, int))


def random_array(dtype: str, shape: tuple[int, ...], rng: np.random.Generator, span: tuple[float, float] | None = None) -> Array:
    """Return random values: floats N(0,1) or uniform in ``span``, integers uniform in ``span`` without its end, fair booleans.
    Raises BadInput for a span without an integer, or one that the type cannot hold."""
    kind, form = numpy_type(dtype), FORMATS.get(dtype)
    if kind == np.bool_:
        return rng.random(shape) < 0.5
    if isinstance(form, FloatFormat) or np.issubdtype(kind, np.floating):
        values = rng.standard_normal(shape) if span is None else rng.uniform(*span, shape)
        values = np.abs(values) if isinstance(form, FloatFormat) and not form.sign else values
        return np.asarray(values).astype(kind)
    low, high = (math.ceil(end) for end in span or DEFAULT_INTEGER_RANGE)
    least, most = form.ends if form is not None else (np.iinfo(kind).min, np.iinfo(kind).max)
    if not least <= low < high <= most + 1:
        raise BadInput(
            f"{kind} does not cover the range {low}..{high}", "--range", f"choose whole numbers from {least} to {most}"
        )
    return rng.integers(low, high, shape, dtype=form.wide if form is not None else kind).astype(kind, copy=False)


def scale_outlier_channels(x: Array, axis: int, rng: np.random.Generator) -> Array:
    """Return ``x`` where one in 64 channels along ``axis``, and at least one, has magnitudes of up to 10 to ``OUTLIER``."""
    if not x.size:
        return x
    channels = rng.choice(x.shape[axis], max(1, x.shape[axis] // 64), replace=False)
    factors = np.ones(x.shape[axis])
    factors[channels] = OUTLIER ** np.append(1, rng.uniform(0.25, 1, len(channels) - 1))
    factors[channels] /= max(1.0, float(np.abs(np.nan_to_num(x, posinf=0, neginf=0)).max()))
    return np.asarray(x * factors.reshape([-1 if d == axis else 1 for d in range(x.ndim)])).astype(x.dtype)


def with_outliers(model: Head, inputs: Mapping[str, Array], names: Collection[str], seed: int) -> dict[str, Array]:
    """Return ``inputs`` with outliers in floats among ``names``, along axis 1 of images or the last axis of other inputs."""
    rng, made = np.random.default_rng([seed, 1]), dict(inputs)
    for port in model.inputs:
        x = np.asarray(inputs[port.name])
        if port.name in names and x.dtype.kind == "f" and x.ndim:
            made[port.name] = scale_outlier_channels(x, 1 if x.ndim == 4 else x.ndim - 1, rng)
    return made


def make_inputs(
    model: Head,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    ranges: Mapping[str, tuple[float, float]],
    seed: int,
    given: Mapping[str, Array],
) -> dict[str, Array]:
    """Return an array for every input: from ``given`` if present, random otherwise."""
    names = {p.name for p in model.inputs}
    for what, keys in (("--shape", shapes), ("--range", ranges), ("--input", given)):
        unknown = sorted(set(keys) - names)
        if unknown:
            raise BadInput(
                f"{what} names {unknown[0]!r}, which is not an input of the model",
                hint=f"its inputs are: {', '.join(sorted(names))}",
            )
    rng = np.random.default_rng(seed)
    made = {p.name: static_shape(p, shapes) for p in model.inputs if p.name not in given}
    need = sum(math.prod(made[p.name]) * itemsize(p.dtype) for p in model.inputs if p.name in made)
    if need > available_bytes():
        raise BadInput(
            f"the inputs take {need} bytes, {available_bytes()} are available",
            "input " + ", ".join(made),
            "use a smaller batch or input",
        )
    return {
        p.name: given[p.name] if p.name in given else random_array(p.dtype, made[p.name], rng, ranges.get(p.name))
        for p in model.inputs
    }

"""Conformance of caller arrays: arbitrary strides in every call, contents read in every run, separate arrays per bound call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from rammer.device.manifest import Bound
from rammer.errors import BadInput
from rammer.runtime.executable import Executable
from rammer_testing.bound_checks import equal, opened
from rammer_testing.small_models import MODELS
from rammer_testing.subject import Subject
from rammer_testing.table_checks import program_of

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def placed_otherwise(values: Array) -> Iterator[tuple[str, Array]]:
    """Yield writable copies of ``values`` with other strides and memory offsets."""
    yield "with gaps", np.repeat(values, 2, axis=-1)[..., ::2]
    yield "with a stride of 3", np.repeat(values, 3, axis=-1)[..., 1::3]
    yield "backwards", np.ascontiguousarray(values[..., ::-1])[..., ::-1]
    yield "upside down", np.ascontiguousarray(values[::-1])[::-1]
    yield "transposed", np.asfortranarray(values)
    yield "in wider rows", np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, 3)])[..., : values.shape[-1]]
    room = np.zeros(values.nbytes + 1, np.uint8)[1:].view(values.dtype).reshape(values.shape)
    room[...] = values
    yield "at an odd address", room


def check_caller_arrays(device: Subject) -> None:
    """Check arrays of any strides as inputs and outputs of ``run`` and of bound calls. The strides do not decide if a run reads
    the current contents of the caller's array."""
    refused = list[str]()
    for name in ("product", "dynamic"):
        model = MODELS[name]
        with opened(device, model) as exe:
            first, other = (model.inputs(device.rng, model.shapes[0]) for _ in range(2))
            want = exe.run(first), exe.run(other)
            port, live = next(iter(first)), _is_live(device, exe, first, other, want)
            for how, array in placed_otherwise(first[port]):
                given = {**first, port: array}
                equal(device, f"{name}: run with an input {how}", exe.run(given), want[0])
                try:
                    bound = exe.bind({**{n: np.array(a) for n, a in first.items()}, port: array})
                except BadInput as problem:
                    refused.append(f"an input {how}: {problem}")
                else:
                    _follows(device, f"{name}: bound to an input {how}", bound, array, [(first, want[0]), (other, want[1])], live)
                    bound.close()
            refused += _outputs(device, exe, first, want[0])
    if refused:
        device.skip("bound calls refuse " + "; ".join(refused))


def _is_live(
    device: Subject, exe: Executable, first: Mapping[str, Array], other: Mapping[str, Array], want: tuple[Any, Any]
) -> bool:
    """Return True if a run of a bound call reads the current contents of the caller's dense array."""
    given = {n: np.array(a) for n, a in first.items()}
    bound = exe.bind(given)
    bound.run()
    bound.synchronize()
    for name, array in given.items():
        array[...] = other[name]
    bound.run()
    have = bound.to_host()
    bound.close()
    live = all(np.array_equal(have[n], want[1][n]) for n in have)
    stays = all(np.array_equal(have[n], want[0][n]) for n in have)
    device.expect(live or stays, "a bound run after its array was overwritten gives neither the old values nor the new ones")
    return live


def _follows(
    device: Subject,
    what: str,
    bound: Bound,
    array: Array,
    feeds: Sequence[tuple[Mapping[str, Array], Mapping[str, Array]]],
    live: bool,
) -> None:
    """Check that a bound call reads its array in every run, for every way to write it. ``feeds`` are pairs of inputs and expected
    outputs."""
    (first, other), want = [inputs for inputs, _ in feeds], [made for _, made in feeds]
    port = next(n for n, a in first.items() if a.shape == array.shape)
    bound.run()
    equal(device, what, bound.to_host(), want[0])
    bound.write({n: a for n, a in other.items() if n != port})
    bound.synchronize()
    array[...] = other[port]
    if not live:
        bound.write({port: other[port]})
    bound.run()
    equal(device, f"{what}, whose values have changed", bound.to_host(), want[1])
    bound.write(first)
    bound.run()
    equal(device, f"{what}, after a write", bound.to_host(), want[0])
    own = bound.inputs[port]
    if isinstance(own, np.ndarray):
        bound.synchronize()
        for name, values in other.items():
            bound.inputs[name][...] = values
        bound.run()
        equal(device, f"{what}, after its own arrays were overwritten", bound.to_host(), want[1])


def _outputs(device: Subject, exe: Executable, inputs: Mapping[str, Array], want: Mapping[str, Array]) -> list[str]:
    """Check that outputs of any strides are written in place, without writes to their gaps. Return the refusals."""
    refused = list[str]()
    port, values = next(iter(want.items()))
    for how, array in placed_otherwise(np.full_like(values, 77)):
        whole = array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        before, gaps = np.array(whole), np.ones(array.shape, bool)
        try:
            bound = exe.bind(inputs, {port: array})
        except BadInput as problem:
            refused.append(f"an output {how}: {problem}")
            continue
        bound.run()
        bound.synchronize()
        equal(device, f"an output {how}", {port: array}, {port: values})
        equal(device, f"an output {how}, read back", bound.to_host(), want)
        array[gaps] = 77
        device.expect(np.array_equal(before, whole), f"an output {how}: memory between its elements was written")
        bound.close()
    return refused


def check_two_bound(device: Subject) -> None:
    """Check two bound calls of one program with arrays of equal shapes: neither reads or writes the arrays of the second."""
    model = MODELS["product"]
    segment = program_of(device, model)
    loaded = device.backend.load(segment.program, segment.constants)
    given = [model.inputs(device.rng, {}) for _ in range(3)]
    want = [loaded.run(x).outputs for x in given]
    calls = [loaded.bind({n: np.array(a) for n, a in x.items()}, {}) for x in given[:2]]
    for order in ((0, 1), (1, 0)):
        for number in order:
            calls[number].run()
        for number in order:
            equal(device, "two bound calls of one program", calls[number].to_host(), want[number])
    calls[0].write(given[2])
    calls[1].run()
    equal(device, "a bound call after a write to another one", calls[1].to_host(), want[1])
    calls[0].run()
    equal(device, "a bound call after a run of another one", calls[0].to_host(), want[2])
    equal(device, "a bound call after a run of another one", calls[1].to_host(), want[1])
    third = loaded.bind({n: np.array(a) for n, a in given[0].items()}, {})
    calls[1].close()
    third.run()
    calls[0].run()
    equal(device, "a bound call made after others", third.to_host(), want[0])
    equal(device, "a bound call after another one was closed", calls[0].to_host(), want[2])
    for call in (calls[0], third):
        call.close()
    loaded.close()

"""Conformance of bound calls: results equal to ``run``, arrays that persist, and an error for every misuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from rammer.device.arrays import Array
from rammer.device.manifest import Bound
from rammer.errors import BadInput, DeviceFailure
from rammer.runtime.executable import Executable
from rammer_testing.small_models import MODELS, SmallModel
from rammer_testing.subject import Subject

#: A program, a host operator (determinants of more than 64 rows), and a program that reads both. The scale keeps the determinant
#: near 1: its logarithm is about the number of rows times that of the scale, the rows and one over e.
HOSTED = SmallModel(
    "hosted",
    """(float[65,65] x, float[65,65] w) => (float[65] s, float[65,65] y) {
    a = MatMul(x, w)
    scale = Constant<value = float {0.042}>()
    b = Mul(a, scale)
    d = Det(b)
    y = Mul(d, x)
    axis = Constant<value = int64[1] {0}>()
    s = ReduceSum<keepdims=0>(a, axis)
}""",
)


def check_bind(device: Subject) -> None:
    """Check bound calls on every kind of model: values, fresh inputs, other arrays, two calls of one program, misuse."""
    for name in ("product", "branches", "softmax"):
        model = MODELS[name]
        with opened(device, model) as exe:
            _values(device, model, exe)
    with opened(device, MODELS["product"]) as exe:
        _misuse(device, MODELS["product"], exe)
    with opened(device, HOSTED) as exe:
        _values(device, HOSTED, exe)
        inputs = HOSTED.inputs(device.rng, {})
        notes = exe.bind(inputs).notes
        device.expect(any("on the host" in n for n in notes), f"operators on the host are not told: {notes}")


@contextmanager
def opened(device: Subject, model: SmallModel) -> Iterator[Executable]:
    """Open ``model`` on the device and close it at exit."""
    exe = device.executable(model)
    try:
        yield exe
    finally:
        exe.close()


def _values(device: Subject, model: SmallModel, exe: Executable) -> None:
    """Check that bound runs equal ``run`` bit for bit, after writes to the inputs and with arrays of another call."""
    first, second = (model.inputs(device.rng, model.shapes[0]) for _ in range(2))
    bound = exe.bind(first)
    arrays = dict(bound.outputs)
    bound.run()
    bound.run()
    equal(device, f"{model.name}: bound", bound.to_host(), exe.run(first))
    bound.write(second)
    seconds = bound.seconds()
    device.expect(0 < seconds < 60 and bool(bound.clock), f"{model.name}: a run took {seconds} s by {bound.clock!r}")
    equal(device, f"{model.name}: written", bound.to_host(), exe.run(second))
    device.expect(all(bound.outputs[n] is a for n, a in arrays.items()), f"{model.name}: a run moved its outputs")
    # Another call can be bound to the device's own input and output arrays, without a copy through the host.
    other = exe.bind(bound.inputs, bound.outputs)
    same = all(other.outputs[n].shape == a.shape for n, a in arrays.items())
    device.expect(same, f"{model.name}: outputs of another shape than bound")
    bound.write(first)
    other.run()
    other.synchronize()
    equal(device, f"{model.name}: shared arrays", bound.to_host(), exe.run(first))
    bound.close()
    equal(device, f"{model.name}: after another call was closed", _again(other), exe.run(first))
    for call in (bound.run, bound.seconds, bound.to_host, lambda: bound.write(first)):
        fails(device, DeviceFailure, "closed", call)


def _again(bound: Bound) -> dict[str, Array]:
    bound.run()
    return bound.to_host()


def equal(device: Subject, what: str, have: Mapping[str, Array], want: Mapping[str, Array]) -> None:
    """Expect equal arrays bit for bit; ``what`` starts the message."""
    device.expect(set(have) == set(want), f"{what}: outputs {sorted(have)}, not {sorted(want)}")
    for name, array in want.items():
        good = have[name].dtype == array.dtype and np.array_equal(have[name], array)
        device.expect(good, f"{what}: output {name!r} differs from run's")


def _misuse(device: Subject, model: SmallModel, exe: Executable) -> None:
    """Check that each misuse by the caller raises BadInput with the cause."""
    inputs = model.inputs(device.rng, model.shapes[0])
    name, port = next(iter(inputs)), "y"
    bound = exe.bind(inputs)
    result = bound.outputs[port]
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("has no input 'nothing'", lambda: exe.bind({**inputs, "nothing": inputs[name]})),
        (f"input {name!r} is missing", lambda: exe.bind({n: a for n, a in inputs.items() if n != name})),
        (f"input {name!r} is float64", lambda: exe.bind({**inputs, name: inputs[name].astype(np.float64)})),
        (f"input {name!r} has", lambda: exe.bind({**inputs, name: inputs[name][1:]})),
        (f"input {name!r} cannot be read", lambda: exe.bind({**inputs, name: [[1.0], [1.0, 2.0]]})),
        (f"{len(inputs) + 1} inputs were given, the model has {len(inputs)}", lambda: exe.bind([*inputs.values(), result])),
        ("outputs are a list, not arrays by name", lambda: exe.bind(inputs, [result])),  # type: ignore[arg-type]
        ("has no output 'nothing'", lambda: exe.bind(inputs, {"nothing": result})),
        (f"output {port!r} is", lambda: exe.bind(inputs, {port: result[1:]})),
        (f"output {port!r} shares memory with input", lambda: exe.bind({**inputs, "z": result}, {port: result})),
        ("has no input 'nothing'", lambda: bound.write({"nothing": inputs[name]})),
        (f"input {name!r} is", lambda: bound.write({name: inputs[name][1:]})),
        (f"input {name!r} is", lambda: bound.write({name: [1.0]})),
        (f"input {name!r} cannot be read", lambda: bound.write({name: [[1.0], [1.0, 2.0]]})),
        ("inputs are a list, not arrays by name", lambda: bound.write([1.0])),  # type: ignore[arg-type]
        ("has no output 'nothing'", lambda: bound.to_host("nothing")),
        ("stream", lambda: exe.bind(inputs, stream="a word")),
    ]
    for text, call in wrong:
        fails(device, BadInput, text, call)
    exe.close()
    fails(device, DeviceFailure, "closed", bound.run)


def fails(device: Subject, kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    """Expect ``call`` to raise ``kind`` with ``text`` in its message."""
    try:
        call()
    except kind as problem:
        device.expect(text in str(problem), f"{kind.__name__} says {problem}, not {text!r}")
        return
    device.expect(False, f"no {kind.__name__} that says {text!r}")

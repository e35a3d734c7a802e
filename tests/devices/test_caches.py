"""Bound calls whose lengths change, and caches that grow in place: right at every step, on every device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator
from ranged_models import RANGED, RangedModel

import rammer
from rammer.compiled.artifact import save_artifact
from rammer.errors import BadInput
from rammer.ir.program import RProgram
from rammer.runtime.executable import Executable
from rammer.verify.verifier import VerifyError, verify
from rammer_testing.nonempty import some
from rammer_testing.peer_process import PeerSession

DEVICES = ["ipu_sim", "rocm", "toy", pytest.param("cuda", marks=pytest.mark.cuda)]
OPTIONS = {"ipu_sim": {"tiles": "16"}}
CORPUS = Path(__file__).parents[1] / "corpus" / "models"


def _whole(model: RangedModel, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return ``inputs`` in arrays of the greatest lengths, with NaN or invalid positions past the lengths."""
    high = model.inputs({s: most for s, (_, most) in model.spans.items()}, np.random.default_rng(0))
    for name, array in high.items():
        array[...] = np.nan if array.dtype.kind == "f" else 1 << 40
        array[tuple(map(slice, inputs[name].shape))] = inputs[name]
    return high


@pytest.mark.slow
@pytest.mark.sampled(1, of="device")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RANGED)
def test_bound_calls_take_every_length(device: str, name: str, rng: np.random.Generator) -> None:
    """Check one program for the whole range, for any data past the length."""
    model = RANGED[name](rng)
    exe, session = rammer.compile(model.proto, device, shapes=model.spans, options=OPTIONS.get(device)), _session(model.proto)
    bound = exe.bind(_whole(model, model.inputs({s: low for s, (low, _) in model.spans.items()}, rng)))
    points = [{s: int(rng.integers(low, high + 1)) for s, (low, high) in model.spans.items()} for _ in range(6)]
    for point in some([*points, {s: high for s, (_, high) in model.spans.items()}]):
        inputs = model.inputs(point, rng)
        bound.write(_whole(model, inputs))
        bound.run(**point)
        got = bound.to_host()
        for output, value in zip(session.get_outputs(), session.run(None, inputs), strict=True):
            assert got[output.name].shape == value.shape, point
            np.testing.assert_allclose(got[output.name], value, 1e-4, 1e-5, err_msg=f"{output.name} at {point}")
    assert len(exe.cache) == 1
    exe.close()


def _session(proto: onnx.ModelProto) -> PeerSession:
    return PeerSession(proto)


def _program(exe: Executable) -> RProgram:
    (special,) = exe.cache.values()
    (program,) = special.compiled.programs
    return program


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_grows_where_it_lies(device: str, rng: np.random.Generator) -> None:
    """Check two sequences in a row, the second one shorter, then one that continues an existing cache."""
    model = RANGED["cache"](rng)
    exe, session = rammer.compile(model.proto, device, shapes=model.spans, options=OPTIONS.get(device)), _session(model.proto)
    bound = exe.bind({"x": np.zeros((2, 1, 4), np.float32)}, {"present": "past"})
    assert "after every run" not in " ".join(bound.notes)
    assert [b.kind for b in _program(exe).buffers].count("state") == 1
    for begin, end in ((0, 10), (0, 4), (3, 7)):
        past = rng.standard_normal((2, begin, 4)).astype(np.float32)
        if begin:
            bound.write({"past": past})
        for length in range(begin, end):
            x = rng.standard_normal((2, 1, 4)).astype(np.float32)
            bound.write({"x": x})
            bound.run(past=length)
            y, past = session.run(None, {"x": x, "past": past})
            np.testing.assert_allclose(bound.to_host("y")["y"], y, 1e-4, 1e-5)
        np.testing.assert_array_equal(bound.to_host("present")["present"], past)
    bound.close()
    assert not exe.cache  # its memory was released with this call
    exe.close()


def test_a_step_writes_one_row(rng: np.random.Generator) -> None:
    """Check that tasks of the appending operator are one row each, and all but one are skipped."""
    model = RANGED["cache"](rng)
    exe = rammer.compile(model.proto, "ipu_sim", shapes={"past": (0, 63)}, options={"tiles": "8"})
    exe.bind({"x": np.zeros((2, 1, 4), np.float32)}, {"present": "past"})
    (operator,) = (o for o in _program(exe).operators if "present" in o.outputs)
    assert operator.tile[1] == 1
    assert [str(e) for e in operator.skips] == ["i1 from length_past + 1", "i1 before length_past"]
    exe.close()


@pytest.mark.slow
@pytest.mark.sampled(1, of="device")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("batch", "tokens", "mode"), [(1, 1, "linear"), (1, 3, "linear"), (2, 1, "circular"), (3, 2, "linear")])
def test_tensor_scatter_and_attention_stay(device: str, batch: int, tokens: int, mode: str, rng: np.random.Generator) -> None:
    """Check opset 24's caches of a fixed size, with the position as an input."""
    proto = parser.parse_model(f"""<ir_version: 11, opset_import: ["" : 24]>
        scatter (float[{batch}, 2, {tokens}, 4] q, float[{batch}, 2, {tokens}, 4] k, float[{batch}, 2, {tokens}, 4] v,
                 float[{batch}, 2, 12, 4] keys, float[{batch}, 2, 12, 4] values, int64[{batch}] at)
            => (float[{batch}, 2, {tokens}, 4] y, float[{batch}, 2, 12, 4] more_keys, float[{batch}, 2, 12, 4] more_values) {{
            more_keys = TensorScatter <axis = 2, mode = "{mode}"> (keys, k, at)
            more_values = TensorScatter <axis = 2, mode = "{mode}"> (values, v, at)
            y = Attention (q, more_keys, more_values)
        }}""")
    exe, reference = rammer.compile(proto, device, options=OPTIONS.get(device)), ReferenceEvaluator(proto)
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in proto.graph.input}
    state = {n: rng.standard_normal(shapes[n]).astype(np.float32) for n in ("keys", "values")}
    new = {n: rng.standard_normal(shapes[n]).astype(np.float32) for n in "qkv"}
    bound = exe.bind({**new, **state, "at": np.zeros(batch, np.int64)}, {"more_keys": "keys", "more_values": "values"})
    for step in range(0, 12 - tokens, tokens):
        at = np.arange(batch) % 2 + step
        new = {n: rng.standard_normal(shapes[n]).astype(np.float32) for n in "qkv"}
        bound.write({**new, "at": at})
        bound.run()
        y, *more = reference.run(None, {**new, **state, "at": at})
        state = dict(zip(state, more, strict=True))
        got = bound.to_host()
        for name, want in zip(("y", "more_keys", "more_values"), (y, *more), strict=True):
            np.testing.assert_allclose(got[name], want, 1e-4, 1e-5, err_msg=f"{name} at {at}")
    program = _program(exe)
    assert "all of output 'more_keys' is written" not in " ".join(bound.notes)
    assert [b.kind for b in program.buffers].count("state") == 2
    assert [e.window is not None for o in program.operators for e in o.skips if e.before] == [batch > 1] * 2
    exe.close()


@pytest.mark.sampled(4, of="device")
@pytest.mark.parametrize("number", range(40))
@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_each_sequence_are_all_that_is_written(device: str, number: int, rng: np.random.Generator) -> None:
    """Check caches of any rank, along any axis but the first, at positions that end with the cache or wrap around."""
    shape = tuple(int(n) for n in rng.integers(1, 6, rng.integers(2, 5)))
    axis, circular = int(rng.integers(1, len(shape))), bool(rng.integers(2))
    count = int(rng.integers(1, shape[axis] + 1))
    cut, mode = (*shape[:axis], count, *shape[axis + 1 :]), "circular" if circular else "linear"
    new, whole = (f"float[{', '.join(map(str, s))}]" for s in (cut, shape))
    proto = parser.parse_model(f"""<ir_version: 11, opset_import: ["" : 24]>
        scatter ({new} new, {whole} cache, int64[{shape[0]}] at) => ({whole} more) {{
            more = TensorScatter <axis = {axis}, mode = "{mode}"> (cache, new, at)
        }}""")
    exe, reference = rammer.compile(proto, device, options=OPTIONS.get(device)), ReferenceEvaluator(proto)
    cache = rng.standard_normal(shape).astype(np.float32)
    bound = exe.bind({"new": np.zeros(cut, np.float32), "cache": cache, "at": np.zeros(shape[0], np.int64)}, {"more": "cache"})
    for _ in range(4):
        at = rng.integers(0, shape[axis] if circular else shape[axis] - count + 1, shape[0])
        inputs = {"new": rng.standard_normal(cut).astype(np.float32), "at": at}
        bound.write(inputs)
        bound.run()
        (cache,) = reference.run(None, {**inputs, "cache": cache})
        np.testing.assert_array_equal(bound.to_host("more")["more"], cache)
    verify(RProgram.parse(str(_program(exe))))
    exe.close()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("outside at by i0 for 2 of 6", "outside at by i0 for 1 of 6"),
        ("outside at by i0 for 2 of 6", "outside at by i0 for 2"),
        ("outside at by i0 for 2 of 6", "outside at by i2 for 2 of 6"),
        ("outside at by i0 for 2 of 6", "outside at by i0 for 2 of 5"),
        ("outside at by", "outside other by"),
        ("i1 outside", "i2 outside"),
        ("lt((i1 - at[i0]) % 6, 2)", "lt((i1 - at[i0]) % 6, 3)"),
    ],
)
def test_the_verifier_refuses_rows_that_are_not_all(old: str, new: str) -> None:
    proto = parser.parse_model("""<ir_version: 11, opset_import: ["" : 24]>
        scatter (float[3, 2, 3] new, float[3, 6, 3] cache, int64[3] at, int64[3] other) => (float[3, 6, 3] more, int64[3] sum) {
            more = TensorScatter <axis = 1, mode = "circular"> (cache, new, at)  sum = Add (at, other)
        }""")
    exe = rammer.compile(proto, "toy")
    inputs = {"new": np.zeros((3, 2, 3), np.float32), "at": np.zeros(3, np.int64), "other": np.zeros(3, np.int64)}
    exe.bind({**inputs, "cache": np.zeros((3, 6, 3), np.float32)}, {"more": "cache"})
    text = str(_program(exe))
    verify(RProgram.parse(text))
    assert old in text, text
    with pytest.raises(VerifyError):
        verify(RProgram.parse(text.replace(old, new)))
    exe.close()


def _reopened(exe: Executable, path: Path, device: str) -> Executable:
    """Return the compiled file of a model, loaded."""
    save_artifact(path, exe.artifact(exe.compile_whole({})))
    exe.close()
    return rammer.compile(path, device, options=OPTIONS.get(device))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", DEVICES)
def test_states_of_a_compiled_file_are_copied(device: str, rng: np.random.Generator, tmp_path: Path) -> None:
    """Check bitwise equality with the model's states; two calls have separate states, and plain runs still work."""
    model = RANGED["cache"](rng)
    exe = rammer.compile(model.proto, device, shapes=model.spans, options=OPTIONS.get(device))
    exe, session = _reopened(exe, tmp_path / "cache.rammer", device), _session(model.proto)
    calls = [exe.bind({"x": np.zeros((2, 1, 4), np.float32)}, {"present": "past"}) for _ in range(2)]
    assert "output 'present' is copied into input 'past' after every run" in " ".join(calls[0].notes)
    for begin, end in ((0, 10), (0, 4), (3, 7)):
        pasts = [rng.standard_normal((2, begin, 4)).astype(np.float32) for _ in calls]
        for bound, past in zip(calls, pasts, strict=True):
            bound.write({"past": past} if begin else {})
        for length in range(begin, end):
            for number, bound in enumerate(calls):
                x = rng.standard_normal((2, 1, 4)).astype(np.float32)
                bound.write({"x": x})
                bound.run(past=length)
                y, pasts[number] = session.run(None, {"x": x, "past": pasts[number]})
                np.testing.assert_allclose(bound.to_host("y")["y"], y, 1e-4, 1e-5)
                np.testing.assert_array_equal(bound.to_host("present")["present"], pasts[number])
    past = rng.standard_normal((2, 5, 4)).astype(np.float32)
    np.testing.assert_allclose(exe.run({"x": x, "past": past})["y"], session.run(["y"], {"x": x, "past": past})[0], 1e-4, 1e-5)
    exe.close()


@pytest.mark.parametrize("device", DEVICES)
def test_states_of_fixed_shapes_of_a_compiled_file(device: str, rng: np.random.Generator, tmp_path: Path) -> None:
    proto = parser.parse_model("""<ir_version: 11, opset_import: ["" : 24]>
        scatter (float[2, 2, 3] new, float[2, 6, 3] cache, int64[2] at) => (float[2, 6, 3] more) {
            more = TensorScatter <axis = 1, mode = "circular"> (cache, new, at)
        }""")
    exe = _reopened(rammer.compile(proto, device, options=OPTIONS.get(device)), tmp_path / "scatter.rammer", device)
    reference, cache = ReferenceEvaluator(proto), rng.standard_normal((2, 6, 3)).astype(np.float32)
    bound = exe.bind({"new": np.zeros((2, 2, 3), np.float32), "cache": cache, "at": np.zeros(2, np.int64)}, {"more": "cache"})
    for at in ([0, 5], [2, 1], [5, 4]):
        new = rng.standard_normal((2, 2, 3)).astype(np.float32)
        bound.write({"new": new, "at": np.array(at)})
        bound.run()
        (cache,) = reference.run(None, {"new": new, "cache": cache, "at": np.array(at)})
        np.testing.assert_array_equal(bound.to_host("more")["more"], cache)
    exe.close()


@pytest.mark.parametrize("device", DEVICES)
def test_what_does_not_continue_its_input_is_copied(device: str, rng: np.random.Generator) -> None:
    """Check a state that every step recomputes from all of the old one."""
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        cell (float[3] x, float[3, 3] h) => (float[3, 3] next, float[3] y) {
            turned = Transpose (h)  sum = Add (turned, x)  next = Tanh (sum)  y = ReduceSum <keepdims = 0> (next, axis)
        }""")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "axis"))
    exe, session, h = rammer.compile(proto, device, options=OPTIONS.get(device)), _session(proto), np.zeros((3, 3), np.float32)
    bound = exe.bind({"x": np.zeros(3, np.float32)}, {"next": "h"})
    assert "after every run" in " ".join(bound.notes)
    for _ in range(4):
        x = rng.standard_normal(3).astype(np.float32)
        bound.write({"x": x})
        bound.run()
        h, y = session.run(None, {"x": x, "h": h})
        np.testing.assert_allclose(bound.to_host("y")["y"], y, 1e-4, 1e-5)
    exe.close()


def test_what_cannot_be_bound_is_refused(rng: np.random.Generator) -> None:
    model = RANGED["cache"](rng)
    exe, x = rammer.compile(model.proto, "toy", shapes=model.spans), np.zeros((2, 1, 4), np.float32)
    for outputs, why in (
        ({"other": "past"}, "no output"),
        ({"present": "other"}, "does not have"),
        ({"present": "past", "y": "past"}, "two outputs"),
    ):
        with pytest.raises(BadInput, match=why):
            exe.bind({"x": x}, outputs)
    with pytest.raises(BadInput, match="the state in input"):
        exe.bind({"x": x, "past": np.zeros((2, 11, 4), np.float32)}, {"present": "past"})
    bound = exe.bind({"x": x}, {"present": "past"})
    for lengths, why in (({"past": 10}, "range is past=0..9"), ({"past": 1.5}, "range"), ({"seq": 1}, "no length 'seq'")):
        with pytest.raises(BadInput, match=why):
            bound.run(**lengths)
    exe.close()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("past[i0, i1, i2], where", "past[i0, i1, i2] * 2.0, where"),  # another value where the old one stays
        ("past[i0, i1, i2], where", "past[i0, i1, 0], where"),  # another element
        ("lt(i1, length_past[()]), past", "lt(i1, length_past[()] + -1), past"),  # tasks that end too early
        ("skip i1 before length_past", "skip i1 before length_past + 1"),
        ("tnew[b0, m, k] *", "past[b0, k, k] *"),  # another reader of the old cache
        ("buffer present: f32 80 state", "buffer present: f32 80 output"),
    ],
)
def test_the_verifier_refuses_states_that_are_none(old: str, new: str, rng: np.random.Generator) -> None:
    model = RANGED["cache"](rng)
    exe = rammer.compile(model.proto, "toy", shapes=model.spans)
    exe.bind({"x": np.zeros((2, 1, 4), np.float32)}, {"present": "past"})
    text = str(_program(exe))
    verify(RProgram.parse(text))
    assert old in text
    with pytest.raises(VerifyError):
        verify(RProgram.parse(text.replace(old, new)))
    exe.close()


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("ipu_sim", marks=pytest.mark.large),
        "rocm",
        pytest.param("toy", marks=pytest.mark.large),
        pytest.param("cuda", marks=pytest.mark.cuda),
    ],
)
def test_the_loop_of_the_readme_decodes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that greedy decoding finds ONNX Runtime's tokens; with random weights, ties are very unlikely."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = (block for block in text.split("```") if "step.run" in block)
    assert len(code.strip().splitlines()) <= 11
    known = {"np": np, "rammer": rammer}
    monkeypatch.chdir(CORPUS)
    code = code.removeprefix("python").replace("gpt2.onnx", "gpt2_script.onnx")
    if device in OPTIONS:
        code = code.replace('"rocm"', f'"{device}", options={OPTIONS[device]}')
    exec(code.replace('"rocm"', f'"{device}"'), known)
    session = PeerSession("gpt2_script.onnx")
    state = {i.name: np.zeros((1, 4, 0, 4), np.float32) for i in session.get_inputs() if "past" in i.name}
    token, expected = 3, list[int]()
    for past in range(64):
        fixed = {"input_ids": np.array([[token]]), "attention_mask": np.ones((1, past + 1), np.int64)}
        logits, *more = session.run(None, {**fixed, **state})
        state, token = dict(zip(state, more, strict=True)), int(logits[0, -1].argmax())
        expected.append(token)
    assert known["tokens"] == expected
    known["exe"].close()

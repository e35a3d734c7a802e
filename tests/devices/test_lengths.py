"""Programs for a range of lengths, on devices: right at each length against ONNX Runtime, with a few programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from ranged_models import RANGED, UNRANGED, RangedModel, parsed

import rammer
from rammer.runtime.shape_buckets import BUCKETS, find_bucket
from rammer_testing.nonempty import some
from rammer_testing.peer_process import PeerSession

DEVICES = ["ipu_sim", "rocm", "toy", pytest.param("cuda", marks=pytest.mark.cuda)]
OPTIONS = {"ipu_sim": {"tiles": "16"}}


def _reference(model: RangedModel) -> PeerSession:
    return PeerSession(model.proto)


@pytest.mark.slow
@pytest.mark.sampled(2, of="device")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RANGED)
def test_every_length_is_right(device: str, name: str, rng: np.random.Generator) -> None:
    """Check the longest bucket's lengths in random order, and the shortest bucket's."""
    model = RANGED[name](rng)
    longest = {s: find_bucket(span, span[1]) for s, span in model.spans.items()}
    exe, reference = rammer.compile(model.proto, device, shapes=model.spans, options=OPTIONS.get(device)), _reference(model)
    points = [{s: int(rng.integers(low, high + 1)) for s, (low, high) in longest.items()} for _ in range(8)]
    points += [{s: high for s, (_, high) in longest.items()}, {s: low for s, (low, _) in model.spans.items()}]
    for point in some(points):
        inputs = model.inputs(point, rng)
        got, expected = exe.run(inputs), reference.run(None, inputs)
        for output, value in zip(reference.get_outputs(), expected, strict=True):
            assert got[output.name].shape == value.shape, point
            np.testing.assert_allclose(got[output.name], value, 1e-4, 1e-5, err_msg=f"{output.name} at {point}")
    assert len(exe.cache) == 2
    exe.close()


@pytest.mark.large
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["gpt2_script", "llama_script"])
def test_exported_decoders_grow_their_caches(device: str, name: str) -> None:
    """Check twelve tokens from an empty past, each chosen by the previous output."""
    path = Path(__file__).parents[1] / "corpus" / "models" / f"{name}.onnx"
    session = PeerSession(path)
    exe = rammer.compile(path, device, shapes={"past": (0, 24), "total": "past + 1"}, options=OPTIONS.get(device))
    fixed = {"batch": 1, "past": 0}
    cached = [i for i in session.get_inputs() if "past" in i.shape]
    state = {i.name: np.zeros([fixed.get(d, d) for d in i.shape], np.float32) for i in cached}
    outputs, token = [o.name for o in session.get_outputs()], 3
    for past in range(12):
        inputs = {"input_ids": np.array([[token]]), "attention_mask": np.ones((1, past + 1), np.int64), **state}
        got, expected = exe.run(inputs), dict(zip(outputs, session.run(None, inputs), strict=True))
        for output in some(outputs):
            np.testing.assert_allclose(got[output], expected[output], 1e-3, 1e-4, err_msg=f"{output} at {past}")
        token = int(expected[outputs[0]][0, -1].argmax())
        state = dict(zip(state, (expected[o] for o in outputs[1:]), strict=True))
    assert len(exe.cache) <= BUCKETS
    assert all(s.compiled.ranged is not None for s in some(exe.cache.values()))
    exe.close()


def test_a_range_takes_few_programs(rng: np.random.Generator) -> None:
    model = RANGED["causal"](rng)
    exe = rammer.compile(model.proto, "toy", shapes={"seq": (1, 16)})
    for length in range(1, 17):
        exe.run(model.inputs({"seq": length}, rng))
    assert 1 < len(exe.cache) <= BUCKETS
    exe.close()


def test_lengths_outside_the_range_are_compiled_on_their_own(rng: np.random.Generator) -> None:
    model = RANGED["causal"](rng)
    exe = rammer.compile(model.proto, "toy", shapes={"seq": (4, 8)})
    for length in (8, 5, 9, 2):
        exe.run(model.inputs({"seq": length}, rng))
    assert sorted(s.compiled.ranged is None for s in exe.cache.values()) == [False, True, True]
    exe.close()


@pytest.mark.parametrize("coordinates", ["half_pixel", "align_corners", "asymmetric"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_resize_has_another_ratio_at_each_length(device: str, coordinates: str, rng: np.random.Generator) -> None:
    """Check a strided image that is resized to the extents of the input, at drawn lengths of one program."""
    proto = parsed(
        """resized (float[1, 3, h, w] x) => (float[1, 3, h, w] y) {
            a = Conv<strides = [3, 3], pads = [1, 1, 1, 1]>(x, wa)  s = Shape(x)  y = Resize(a, , , s)
        }""",
        wa=rng.standard_normal((3, 3, 3, 3)).astype(np.float32),
    )
    attributes = {"mode": "linear", "coordinate_transformation_mode": coordinates}
    proto.graph.node[-1].attribute.extend(onnx.helper.make_attribute(n, v) for n, v in attributes.items())
    model = RangedModel(proto, {"h": (7, 20), "w": (8, 23)})
    reference = _reference(model)
    with rammer.compile(proto, device, shapes=model.spans, options=OPTIONS.get(device)) as exe:
        exe.lengths = replace(exe.lengths, buckets=1)
        for _ in range(6):
            inputs = model.inputs({n: int(rng.integers(low, high + 1)) for n, (low, high) in model.spans.items()}, rng)
            (expected,) = reference.run(None, inputs)
            np.testing.assert_allclose(exe.run(inputs)["y"], expected, 1e-4, 1e-5)
        assert len(exe.cache) == 1


# "recurrent" becomes a loop program; the buckets of "clipped" end where its slice does, so each has a program.
@pytest.mark.parametrize("name", [n for n in UNRANGED if n not in ("recurrent", "clipped")])
def test_what_is_no_one_program_is_compiled_for_each_shape(
    name: str, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    made, why = UNRANGED[name]
    proto = made()
    symbols = {d.dim_param: (1, 9) for i in proto.graph.input for d in i.type.tensor_type.shape.dim if d.dim_param}
    model = RangedModel(proto, symbols)
    exe, reference = rammer.compile(proto, "ipu_sim", shapes=symbols, options=OPTIONS["ipu_sim"]), _reference(model)
    for length in (6, 7):
        inputs = model.inputs(dict.fromkeys(symbols, length), rng)
        (expected,) = reference.run(None, inputs)
        np.testing.assert_allclose(exe.run(inputs)[reference.get_outputs()[0].name], expected, 1e-5, 1e-6)
    said = capsys.readouterr().err
    assert why in said
    assert said.count("each shape is compiled on its own") == 1
    assert all(s.compiled.ranged is None for s in some(exe.cache.values()))
    exe.close()


@pytest.mark.large
@pytest.mark.parametrize("name", ["gpt2_script", "llama_script", "roberta_script"])
def test_exported_models_take_a_range_of_batches(name: str, rng: np.random.Generator) -> None:
    path = Path(__file__).parents[1] / "corpus" / "models" / f"{name}.onnx"
    session = PeerSession(path)
    exe = rammer.compile(path, "rocm", shapes={"batch": (1, 32)})
    for batch in (15, 32, 1, 9):
        extents = {"batch": batch, "tokens": 4, "total": 7, "past": 3}
        inputs = {}
        for value in session.get_inputs():
            shape = [extents.get(d, d) for d in value.shape]
            inputs[value.name] = np.ones(shape, np.int64) if "mask" in value.name else rng.integers(0, 9, shape)
            if "float" in value.type:
                inputs[value.name] = rng.standard_normal(shape).astype(np.float32)
        got = exe.run(inputs)
        for output, want in zip(session.get_outputs(), session.run(None, inputs), strict=True):
            np.testing.assert_allclose(got[output.name], want, 1e-3, 1e-4, err_msg=f"{output.name} at {batch}")
    assert [s.compiled.ranged is None for s in exe.cache.values()].count(True) == 1, "one for a batch of 1 alone"
    exe.close()

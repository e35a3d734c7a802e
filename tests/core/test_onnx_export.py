"""A graph after all passes as an ONNX model: ONNX's checker accepts it, and its outputs are those of the original."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser
from onnxruntime import InferenceSession

import rammer
from rammer.errors import BadInput
from rammer.report import onnx_export
from rammer.report.onnx_export import to_onnx
from rammer_testing.nonempty import some

MODELS = {
    "folded": '{ c = Conv(x, w) b = BatchNormalization(c, s, s, s, s) "out/y" = Relu(b) "out/z" = Identity("out/y") }',
    "names of ports": '{ c = Conv(x, w) "out.y" = Relu(c) out_y = Neg("out.y") "out/y" = Abs(out_y) "out/z" = Sqrt("out/y") }',
    "an input that is an output": '{ t = Conv(x, w) "out/y" = Identity(x) "out/z" = Neg(t) }',
    "captures": """{ "a/b" = Conv(x, w)
        n = ReduceMax<keepdims = 0>("a/b") i = Cast<to = 7>(n) k = Clip(i, one, three) yes = Cast<to = 9>(one)
        "out/y" = Loop(k, yes, "a/b") <body = step (int64 t, bool go, float[1,2,4,4] h) => (bool on, float[1,2,4,4] g) {
            on = Identity(go) g = Add(h, "a/b") }>
        "out/z" = Tanh("a/b") }""",
}


def build(text: str, rng: np.random.Generator) -> onnx.ModelProto:
    made = parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 17]> m (float[1,2,4,4] x) => (float[1,2,4,4] "out/y", float[1,2,4,4] "out/z")
        <float[2,2,1,1] w, float[2] s = {{0.5, 2}}, int64 one = {{1}}, int64 three = {{3}}> {text}"""
    )
    weights = rng.standard_normal((2, 2, 1, 1)).astype(np.float32)
    made.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    return made


def outputs(model: bytes, x: np.ndarray) -> dict[str, np.ndarray]:
    session = InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(names, {"x": x}), strict=True))


@pytest.mark.parametrize("text", MODELS.values(), ids=MODELS)
def test_a_written_graph_computes_the_outputs_of_the_model(text: str, rng: np.random.Generator) -> None:
    proto, x = build(text, rng), np.abs(rng.standard_normal((1, 2, 4, 4))).astype(np.float32)
    exe = rammer.compile(proto.SerializeToString(), "toy")
    made = to_onnx(exe.compile_only({}).graph)
    exe.close()
    onnx.checker.check_model(made, full_check=True)
    assert "BatchNormalization" not in {n.op_type for n in made.graph.node}
    have, want = outputs(made.SerializeToString(), x), outputs(proto.SerializeToString(), x)
    assert have.keys() == want.keys()
    for name, array in some(want.items()):
        np.testing.assert_allclose(have[name], array, 1e-5, 1e-6)


def test_constants_that_do_not_fit_a_file_are_refused(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    exe = rammer.compile(build(MODELS["folded"], rng).SerializeToString(), "toy")
    graph = exe.compile_only({}).graph
    exe.close()
    monkeypatch.setattr(onnx_export, "MOST_BYTES", 8)
    with pytest.raises(BadInput, match="bytes of constants"):
        to_onnx(graph)

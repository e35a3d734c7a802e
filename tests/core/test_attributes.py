"""Invalid attributes and operands that ONNX's schemas allow and its documentation excludes: bad input, by name."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import AttributeProto, helper

from rammer.errors import BadInput
from rammer.frontend.bind.binder import bind
from rammer.frontend.lower.graph_lowering import lower
from rammer.frontend.read.reader import read_model


def model(text: str, opset: int = 21) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> m {text}')


def refusal(made: onnx.ModelProto) -> str:
    with pytest.raises(BadInput) as caught:
        lower(bind(read_model(made), {}))
    return caught.value.what


@pytest.mark.parametrize(
    "text, said",
    [
        # On this input, ONNX's version converter ends the process.
        (
            "(float[2,1] x, int64[2,1,1] i) => (float[2,1] y) { y = GatherND<batch_dims = -3>(x, i) }",
            "batch_dims of GatherND is -3",
        ),
        ("(float[2,3] x, int64[2,1] i) => (float[2] y) { y = GatherND<batch_dims = 2>(x, i) }", "batch_dims of GatherND is 2"),
        ("(float[2,5] x) => (int64[2] y) { y = ArgMax<axis = 1, keepdims = -1>(x) }", "keepdims of ArgMax is -1, where 0 to 1"),
        ("(float[2,5] x) => (float[2] y) { y = ReduceL2<keepdims = 2>(x) }", "keepdims of ReduceL2 is 2"),
        ("(float[2,5] x) => (int64[2] y) { y = ArgMax<axis = 9223372036854775807>(x) }", "axis of ArgMax is 9223372036854775807"),
        (
            '(uint8[2] x, uint8[2] s) => (uint8[2] y) { y = BitShift<direction = "UP">(x, s) }',
            "'UP', where ONNX defines LEFT, RIGHT",
        ),
        ('(float[1,4,1,1] x) => (float[1,1,2,2] y) { y = DepthToSpace<blocksize = 2, mode = "dcr">(x) }', "defines DCR, CRD"),
        ('(float[2] x) => (float[2] y) { y = Gelu<approximate = "">(x) }', "approximate of Gelu is ''"),
        (
            "(float[2,4,3,3] x, float[4] s, float[4] b) => (float[2,4,3,3] y)"
            " { y = GroupNormalization<num_groups = 3>(x, s, b) }",
            "4 channels in 3 groups",
        ),
        ("(float x, float[2] s, float[2] b) => (float y) { y = InstanceNormalization(x, s, b) }", "at least 2 axes"),
        (
            "(float[1,3,2] x, float[2] s, float[2] b) => (float[1,3,2] y) { y = InstanceNormalization(x, s, b) }",
            "3 elements, one",
        ),
        ("(float[2,2] x, int64[2] i) => (float[2] y) { y = GatherElements(x, i) }", "the 2 axes of input 0"),
        ("(float[1,2] x, int64[2,2] i) => (float[2,2] y) { y = GatherElements<axis = 1>(x, i) }", "reach beyond data"),
        (
            "(float[2,6] x, int64[2] n) => (float[2,6] y) { y = ReverseSequence<batch_axis = 5, time_axis = 1>(x, n) }",
            "batch_axis=5",
        ),
        (
            "(float[2,6] x, int64[3] n) => (float[2,6] y) { y = ReverseSequence<batch_axis = 0, time_axis = 1>(x, n) }",
            "[3] lengths",
        ),
        (
            "(float[1,2] x, int64[2,2] i, float[2,2] u) => (float[1,2] y) { y = ScatterElements<axis = 1>(x, i, u) }",
            "reach beyond",
        ),
        ("(float[2,2] x, int64[1,2] i, float[2] u) => (float[2,2] y) { y = ScatterND(x, i, u) }", "updates have the shape [2]"),
        ("(float[4] x, int64[3,2] i, float[3] u) => (float[4] y) { y = ScatterND(x, i, u) }", "name 2 axes of data [4]"),
        ("(float[2] x, float[2,2] s) => (float[2] y) { y = PRelu(x, s) }", "an operand of [2, 2] does not match"),
        ("(float x, int64 a) => (float y) { y = CumSum(x, a) }", "the shape [], where it needs at least 1 axes"),
        ("(float[2] x, float[2] m) => (float[2] y) { y = Clip(x, m) }", "the shape [2], where it needs one element"),
        (
            "(float[3,1,2] x, float[1,12,2] w, float r) => (float[3,1,1,3] y) { y = LSTM<hidden_size = 3>(x, w, r) }",
            "input 2 of LSTM has the shape [], where it needs 3 axes",
        ),
        (
            "(float[3,1,2] x, float[1,12,2] w, float[1,12,3] r) => (float[3,1,1,3] y) "
            '{ y = LSTM<hidden_size = 3, activations = ["Relu", "Relu"]>(x, w, r) }',
            "2 activations are given, where 3 a direction",
        ),
        (
            "(float[3,1,2] x, float[1,12,2] w, float[1,12,3] r, float[1,2,3] h) => (float[3,1,1,3] y) "
            "{ y = LSTM<hidden_size = 3>(x, w, r, , , h) }",
            "input 5 has the shape [1, 2, 3], not [1, 1, 3]",
        ),
    ],
)
def test_what_the_documentation_excludes(text: str, said: str) -> None:
    assert said in refusal(model(text, 21 if "Group" in text else 20))


def pooled(attribute: AttributeProto) -> onnx.ModelProto:
    made = model("(float[1,1,4] x) => (float[1,1,3] y) { y = MaxPool<kernel_shape = [2]>(x) }")
    made.graph.node[0].attribute.append(attribute)
    return made


def test_what_no_text_can_say() -> None:
    strange = AttributeProto(name="auto_pad", type=AttributeProto.STRING, s=b"\xff\xfe")
    assert "which is not UTF-8 text" in refusal(pooled(strange))
    reference = AttributeProto(name="auto_pad", type=AttributeProto.STRING, ref_attr_name="mode")
    assert "refers to an attribute of a function" in refusal(pooled(reference))


@pytest.mark.parametrize(
    "value",
    [
        helper.make_tensor("v", onnx.TensorProto.STRING, [1], [b"x"]),
        helper.make_tensor("v", onnx.TensorProto.COMPLEX64, [1], [1.0]),
    ],
)
def test_constants_of_other_types(value: onnx.TensorProto) -> None:
    made = model("(int64[1] s) => (y) { k = Constant<value = int64[1] {2}>() y = ConstantOfShape(k) }")
    made.graph.node[1].attribute.append(helper.make_attribute("value", value))
    assert "has element type" in refusal(made)


@pytest.mark.parametrize("equation", ["a b\n", "a.b", "a,->b,", "1", "a....", "a->b->c", "\u00e9"])
def test_equations(equation: str) -> None:
    """Check invalid equations; ONNX's inference does not terminate on the first one."""
    made = model('(float[1,4] x) => (float[4,1] y) { y = Einsum<equation = "ab->ba">(x) }', 14)
    made.graph.node[0].attribute[0].s = equation.encode()
    assert "terms are not letters" in refusal(made)


def test_functions_may_refer() -> None:
    text = """<ir_version: 8, opset_import: ["" : 21, "own" : 1]> m (float[1,1,4] x) => (float[1,1,3] y) {
        y = own.Pool<mode = "VALID">(x)
    }
    <domain: "own", opset_import: ["" : 21]> Pool <mode> (a) => (b) {
        b = MaxPool<kernel_shape = [2], auto_pad: string = @mode>(a)
    }"""
    graph = bind(read_model(onnx.parser.parse_model(text)), {})
    assert graph.nodes[0].attributes["auto_pad"] == "VALID" and np.prod(graph.outputs[0].type.shape) == 3

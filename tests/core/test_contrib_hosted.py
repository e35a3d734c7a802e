"""ONNX Runtime's contrib operators on the host, compared with ONNX Runtime, for strings and run-time values."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import rammer
from rammer.frontend.host.contrib_operators import tokenize_strings
from rammer.frontend.host.re2_patterns import PatternError, compiled_pattern
from rammer_testing.operators import drawn
from rammer_testing.operators.case import OperatorCase
from rammer_testing.operators.oracles import onnxruntime

MICROSOFT = "com.microsoft"
PATTERNS = (
    "a|ab", "a*?b", "a*", "[a-z]+", "[^ ]+", r"\w+", r"\d+|\w", "(?i)ab", "^a|b$", r"\bb\w*", "a.b", "(a|b){2,3}", "[a-c]*c",
    r"[\s,]+", "(?:ab)+|a", "[[:alpha:]]+", r"\p{L}+", r"[^\W_]+", "(?P<n>a)b", r"\x61+", r"a\b", "b+?", "é", r"[\]a-]+",
    "(?s).+", "(?m)^.", r"\Aab", r"b\z", "a{,2}", "a{1,}", r"\Qa.b\E", "[]a]", "()", "(|a)b", r"\141", r"[[:^alpha:]]+",
    "(?i)[a-c]+É", "a**", "(a", "a)", "[b-a]", r"\q", "a{1001}", "(?=a)", "*a",
)  # fmt: skip


def string_model(op: str, kind: int, shape: tuple[int, ...], **attributes: Any) -> onnx.ModelProto:
    """Make a model of one node that reads strings."""
    node = helper.make_node(op, ["x"], ["y"], domain=MICROSOFT, **attributes)
    ports = [helper.make_tensor_value_info("x", TensorProto.STRING, shape)], [helper.make_tensor_value_info("y", kind, None)]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(helper.make_graph([node], "g", *ports), opset_imports=imports, ir_version=8)


def theirs(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray | None:
    """Return ONNX Runtime's result, None if it refuses the model."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    except Exception:
        return None


def words(random: Random) -> np.ndarray:
    """Draw strings of one or two axes."""
    one = ["".join(random.choice("aabbcAB .,é日\n1_") for _ in range(random.randint(0, 8))) for _ in range(random.randint(1, 3))]
    return np.array([one, one[::-1]] if random.random() < 0.3 else one, object)


def test_tokens_are_those_of_onnx_runtime(seed: int) -> None:
    random, refused = Random(seed), 0
    for _ in range(400):
        attributes: dict[str, Any] = {"mark": random.randint(0, 1), "mincharnum": random.choice([1, 1, 2, 3]), "pad_value": "#"}
        if random.random() < 0.5:
            attributes["tokenexp"] = random.choice([*PATTERNS, "."])
        else:
            attributes["separators"] = [random.choice([*PATTERNS, ""]) for _ in range(random.randint(1, 2))]
        x = words(random)
        want = theirs(string_model("Tokenizer", TensorProto.STRING, x.shape, **attributes), x)
        try:
            (have,) = tokenize_strings(attributes, [x])
        except ValueError:
            refused += 1
            assert want is None, (attributes, x)
            continue
        assert want is not None, (attributes, x)
        assert have.shape == want.shape and (have == want).all(), (attributes, x)
    assert refused < 200


@pytest.mark.parametrize("device", ["toy"])
def test_a_compiled_model_cuts_strings(device: str) -> None:
    x = np.array(["good plot", "bad"], object)
    model = string_model("Tokenizer", TensorProto.STRING, (2,), mark=0, mincharnum=1, pad_value="#", tokenexp="[a-zA-Z0-9_]+")
    executable = rammer.compile(model, device=device)
    assert executable.run({"x": x})["y"].tolist() == [["good", "plot"], ["bad", "#"]]


def test_hashes_of_strings_are_those_of_onnx_runtime(seed: int) -> None:
    random = Random(seed)
    for positive, kind in ((1, TensorProto.UINT32), (0, TensorProto.INT32)):
        x = words(random)
        model = string_model("MurmurHash3", kind, x.shape, positive=positive, seed=random.randint(0, 9))
        have = rammer.compile(model, device="toy").run({"x": x})["y"]
        want = theirs(model, x)
        assert want is not None and have.dtype == want.dtype
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("op", ["ExpandDims", "GatherND"])
def test_strings_move_as_numbers_do(op: str) -> None:
    x = np.array([["a", "b", "c"], ["d", "e", "f"]], object)
    second = {"ExpandDims": np.array(1, np.int32), "GatherND": np.array([[0, 1], [1, -1]])}[op]
    node, constants = helper.make_node(op, ["x", "k"], ["y"], domain=MICROSOFT), [numpy_helper.from_array(second, "k")]
    ports = [helper.make_tensor_value_info(n, TensorProto.STRING, shape) for n, shape in (("x", x.shape), ("y", None))]
    graph = helper.make_graph([node], "g", ports[:1], ports[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)], ir_version=8)
    want = theirs(model, x)
    assert want is not None
    assert rammer.compile(model, device="toy").run({"x": x})["y"].tolist() == want.tolist()


@pytest.mark.parametrize("op", ["DynamicTimeWarping", "Unique", "BifurcationDetector"])
def test_lengths_that_data_decide_are_found_in_the_run(op: str, seed: int) -> None:
    for number in range(3):
        case = drawn(f"{MICROSOFT}.{op}", seed, number)
        case = OperatorCase(case.op, case.opset, case.operands, case.attributes, case.outputs)
        want, have = onnxruntime(case), rammer.compile(case.model(), device="toy").run(case.feeds)
        assert want.values is not None
        for name, value in zip(case.results, want.values, strict=True):
            np.testing.assert_array_equal(have[name], value)


def test_a_large_matrix_is_inverted_on_the_host(rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 30, 30)) + 9 * np.eye(30)
    x[1] = 0
    case = OperatorCase(f"{MICROSOFT}.Inverse", 17, (x.astype(np.float32),))
    have = rammer.compile(case.model(), device="toy").run(case.feeds)["y0"]
    np.testing.assert_allclose(have[::2], np.linalg.inv(x[::2]), rtol=1e-4, atol=1e-5)
    assert not np.isfinite(have[1]).any()


@pytest.mark.parametrize("pattern", ["(a*)*b", "(a|a)*b", "(a|aa)+$", "(.*)(.*)(.*)(.*)(.*)c", "(x+x+)+y"])
def test_no_pattern_takes_exponential_time(pattern: str) -> None:
    """Check patterns that take years with backtracking."""
    begin = time.process_time()
    compiled_pattern(pattern).search("a" * 200 + "x" * 200)
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("pattern", ["((a{500}){500}){500}", "(" * 500 + ")" * 500, r"\p{Greek}", r"\1"])
def test_patterns_beyond_the_limits_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        compiled_pattern(pattern)

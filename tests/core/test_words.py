"""String and map operators on the host, over their attributes, against ONNX Runtime."""

from __future__ import annotations

import locale
from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, TypeProto, helper

import rammer
from rammer.errors import BadInput
from rammer_testing.nonempty import some

WORDS = ["", "a", "b", "cc", "\u00e9", "no"]


def model(op: str, given: TypeProto, to: int, **attributes: Any) -> onnx.ModelProto:
    """Return a model of one operator."""
    node = helper.make_node(op, ["x"], ["y"], domain="ai.onnx.ml", **attributes)
    ports = [helper.make_value_info("x", given)], [helper.make_tensor_value_info("y", to, None)]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(helper.make_graph([node], "g", *ports), opset_imports=imports, ir_version=8)


def tensor(kind: int) -> TypeProto:
    return helper.make_tensor_type_proto(kind, ["n"])


def mapping(key: int, value: int) -> TypeProto:
    return helper.make_map_type_proto(key, helper.make_tensor_type_proto(value, []))


def one_hot(random: Random) -> tuple[onnx.ModelProto, Any]:
    found = [random.choice(WORDS) for _ in range(random.randint(1, 5))]
    categories = random.choices(WORDS, k=random.randint(1, 4))
    return model("OneHotEncoder", tensor(TensorProto.STRING), TensorProto.FLOAT, cats_strings=categories), np.array(found, object)


def mapper(random: Random) -> tuple[onnx.ModelProto, Any]:
    words, numbers = random.sample(WORDS, 3), random.sample(range(9), 3)
    attributes: dict[str, Any] = {"cats_strings": words, "cats_int64s": numbers}
    if random.random() < 0.5:
        given = np.array([random.choice(WORDS) for _ in range(4)], object)
        attributes |= {"default_int64": 5} if random.random() < 0.5 else {}
        return model("CategoryMapper", tensor(TensorProto.STRING), TensorProto.INT64, **attributes), given
    attributes |= {"default_string": "none"} if random.random() < 0.5 else {}
    return model("CategoryMapper", tensor(TensorProto.INT64), TensorProto.STRING, **attributes), np.array([3, 1, 8, 0, 40])


def vectorizer(random: Random) -> tuple[onnx.ModelProto, Any]:
    words = random.random() < 0.5
    keys: list[Any] = list(WORDS) if words else list(range(6))
    vocabulary = {"string_vocabulary" if words else "int64_vocabulary": random.sample(keys, 4)}
    kind = mapping(TensorProto.STRING if words else TensorProto.INT64, TensorProto.FLOAT)
    given = {k: random.randint(-9, 9) / 2 for k in random.sample(keys, random.randint(1, 4))}
    return model("DictVectorizer", kind, TensorProto.FLOAT, **vocabulary), given


def cast(random: Random) -> tuple[onnx.ModelProto, Any]:
    to, kind = random.choice([("TO_FLOAT", TensorProto.FLOAT), ("TO_INT64", TensorProto.INT64)])
    sparse = {"map_form": "SPARSE", "max_map": 8} if random.random() < 0.5 else {}
    given = {k: float(random.randint(-9, 9)) for k in random.sample(range(8), random.randint(1, 5))}
    return model("CastMap", mapping(TensorProto.INT64, TensorProto.FLOAT), kind, cast_to=to, **sparse), given


#: Letters with unusual case mappings: several letters, no mapping, title case, outside the first plane, combining.
LETTERS = "aBzÉéßẞİıſΣςσŉǅᾀᾈﬁÅ\u0301\u212a\u1e9e\U00010400\U00010428ა1 "


def normalizer(random: Random) -> tuple[onnx.ModelProto, Any]:
    words = ["".join(random.choices(LETTERS, k=random.randint(0, 3))) for _ in range(random.randint(1, 8))]
    stop = [random.choice([w, w.lower(), w.upper()]) for w in random.sample(words, random.randint(0, len(words)))]
    attributes: dict[str, Any] = {
        "case_change_action": random.choice(["NONE", "LOWER", "UPPER"]),
        "is_case_sensitive": random.randint(0, 1),
        "locale": random.choice(["C.UTF-8", "C.UTF-8", "C", "POSIX"]),
        **({"stopwords": stop} if stop else {}),
    }
    node = helper.make_node("StringNormalizer", ["x"], ["y"], **attributes)
    kind = random.choice([["n"], [1, "n"]])
    ports = [helper.make_tensor_value_info(n, TensorProto.STRING, kind if n == "x" else None) for n in "xy"]
    graph = helper.make_graph([node], "g", ports[:1], ports[1:])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return made, np.array(words, object).reshape(1, -1) if len(kind) == 2 else np.array(words, object)


def test_normalised_words_are_those_of_onnx_runtime(seed: int) -> None:
    random = Random(seed)
    for made, given in some([normalizer(random) for _ in range(40)]):
        (want,) = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"]).run(
            None, {"x": given}
        )
        have = rammer.compile(made, device="toy").run({"x": given})["y"]
        assert have.shape == want.shape and have.tolist() == want.tolist(), f"{made.graph.node[0]} of {given}"


def test_normalising_words_leaves_the_locale_of_the_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: Any) -> str:
        raise AssertionError(given)

    monkeypatch.setattr(locale, "setlocale", refused)
    words = {"x": np.array(["Iıi", "İ", "Été"], object)}
    for name, want in (
        ("tr_TR.UTF-8", ["ııi", "i", "été"]),
        ("en_US.UTF-8", ["iıi", "i", "été"]),
        ("nowhere", ["iıi", "i", "été"]),
    ):
        node = helper.make_node("StringNormalizer", ["x"], ["y"], case_change_action="LOWER", locale=name)
        ports = [helper.make_tensor_value_info(n, TensorProto.STRING, ["n"]) for n in "xy"]
        graph = helper.make_graph([node], "g", ports[:1], ports[1:])
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        assert rammer.compile(made, device="toy").run(words)["y"].tolist() == want


def test_words_of_two_rows_are_not_normalised() -> None:
    made, _ = normalizer(Random(1))
    made.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.STRING, ["m", "n"]))
    with pytest.raises(BadInput):
        rammer.compile(made, device="toy").run({"x": np.array([["a"], ["b"]], object)})


@pytest.mark.slow
@pytest.mark.parametrize("draw", [one_hot, mapper, vectorizer, cast])
def test_results_are_those_of_onnx_runtime(draw: Any, seed: int) -> None:
    random = Random(seed)
    for made, given in some([draw(random) for _ in range(6)]):
        session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
        (want,) = session.run(None, {"x": given})
        have = rammer.compile(made, device="toy").run({"x": given})["y"]
        assert have.shape == want.shape and have.tolist() == want.tolist(), f"{made.graph.node[0]} of {given}"


@pytest.mark.parametrize(("numbers", "given"), [(False, ["a", "?"]), (True, [3.0, 9.0])])
def test_a_category_that_there_is_not_may_be_an_error(numbers: bool, given: list[Any]) -> None:
    categories: dict[str, Any] = {"cats_int64s": [3, 4]} if numbers else {"cats_strings": ["a", "b"]}
    kind = tensor(TensorProto.FLOAT if numbers else TensorProto.STRING)
    exe = rammer.compile(model("OneHotEncoder", kind, TensorProto.FLOAT, zeros=0, **categories), device="toy")
    x = np.array(given, np.float32 if numbers else object)
    assert exe.run({"x": x[:1]})["y"].tolist() == [[1, 0]]
    with pytest.raises(BadInput, match="is not one of the categories"):
        exe.run({"x": x})


def test_what_is_no_map_is_bad_input() -> None:
    made = model("DictVectorizer", mapping(TensorProto.STRING, TensorProto.FLOAT), TensorProto.FLOAT, string_vocabulary=["a"])
    exe = rammer.compile(made, device="toy")
    with pytest.raises(BadInput, match="the model declares a dict"):
        exe.run({"x": np.zeros(2, np.float32)})
    with pytest.raises(BadInput, match="a dict of numbers or words"):
        exe.run({"x": {"a": "word", "b": 2.0}})

"""Legal or nearly legal models that once hung, used all memory or raised a traceback, each with its expected outcome. ``python
hostile_models.py FOLDER`` runs each model in a child process with 2 GiB and 20 s. It prints one line of JSON per model."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

INT64 = (1 << 63) - 1
HUGE = (1 << 31) - 1

#: Name -> (model, exit code, text of its message).
CASES: dict[str, tuple[Callable[[], ModelProto], int, str]] = {}


def node(op: str, inputs: str, outputs: str = "y", **attributes: Any) -> NodeProto:
    """Make an operator with inputs ``x,w``."""
    return helper.make_node(op, inputs.split(",") if inputs else [], outputs.split(","), **attributes)


def graph(nodes: Iterable[NodeProto], inputs: dict[str, list[int]], output: str = "y", **constants: Any) -> ModelProto:
    """Make a model with float inputs, constants by name, and one output whose type is inferred."""
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in inputs.items()]
    result = helper.make_empty_tensor_value_info(output)
    made = helper.make_graph(
        list(nodes), "g", ports, [result], [numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items()]
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=9)


def case(name: str, build: Callable[[], ModelProto], said: str = "", code: int = 2) -> None:
    """Register a case. ``said`` is empty if the model runs without a message."""
    CASES[name] = build, code if said else 0, said


def one(
    name: str, op: str, said: str, shape: list[int], code: int = 2, more: dict[str, Any] | None = None, **attributes: Any
) -> None:
    """Register a case of one operator that reads ``x`` and constants."""
    constants = more or {}
    case(name, lambda: graph([node(op, ",".join(["x", *constants]), **attributes)], {"x": shape}, **constants), said, code)


IMAGE = [1, 1, 4, 4]
KERNEL = {"w": np.ones((1, 1, 2, 2), np.float32)}

# Many axes
for rank in (16, 24):
    one(f"{rank} axes", "Relu", "", [2, 1] * (rank // 2) if rank < 20 else [2] + [1] * (rank - 1))
for rank in (30, 40, 64, 65):
    one(f"{rank} axes", "Relu", f"a tensor has {rank} axes, more than 24", [1] * rank)
one("axes of a reshape", "Reshape", "a tensor has 40 axes", [1], more={"s": np.ones(40, np.int64)})
one("softmax over many axes", "Softmax", "", [2, 2, 2, *[1] * 20], axis=2)

# Patterns and loops
TEXT = {"s": np.array(["a" * 60], object)}
case(
    "a pattern that explodes",
    lambda: graph(
        [node("RegexFullMatch", "s", "m", pattern="(a|a)*b"), node("Cast", "m", "c", to=1), node("Add", "x,c")],
        {"x": [1]},
        **TEXT,
    ),
    "a pattern may take forever",
)

# Sizes
one("a huge LRN", "LRN", "", [1, 4, 2, 2], size=HUGE)
one("a larger LRN", "LRN", "attribute size of LRN is", [1, 4, 2, 2], size=INT64)
one("an LRN of nothing", "LRN", "attribute size of LRN is 0", [1, 4, 2, 2], size=0)
for value in (HUGE, 1 << 40, INT64, -1 - INT64):
    said = "limit" if value == HUGE else "is possible"
    one(f"pads {value}", "Conv", said, IMAGE, more=KERNEL, pads=[value] * 4)
    one(f"pool {value}", "MaxPool", said, IMAGE, kernel_shape=[2, 2], pads=[value] * 4)
    one(
        f"kernel {value}",
        "MaxPool",
        "needs 2147483647 elements" if value == HUGE else said,
        IMAGE,
        kernel_shape=[value, 1],
        pads=[1 << 30, 0] * 2,
    )
    one(f"stride {value}", "Conv", "" if value == HUGE else said, IMAGE, more=KERNEL, strides=[value, value])
    one(f"dilation {value}", "Conv", "Conv", IMAGE, more=KERNEL, dilations=[value, value])
    one(f"transposed {value}", "ConvTranspose", said, IMAGE, more=KERNEL, strides=[value, value])
    for op, count in (("Tile", 1), ("Expand", 1), ("Pad", 2), ("Reshape", 1)):
        one(f"{op} {value}", op, op, [3], more={"r": np.full(count, value)})
    if value > 0:
        one(f"Range {value}", "Range", "Range", [], more={"limit": np.float32(value), "delta": np.float32(1)})
        one(f"input {value}", "Relu", "input", [value])
        one(f"inputs {value}", "ReduceSum", "input", [value, value])
one("one-hot", "OneHot", "out of memory", [200], 4, more={"d": np.int64(HUGE), "v": np.array([0, 1], np.float32)})
one("one-hot, larger", "OneHot", "input 1 of OneHot is", [3], more={"d": np.int64(INT64), "v": np.array([0, 1], np.float32)})
one("split", "Split", "Split", [4], num_outputs=HUGE)
one(
    "resize",
    "Resize",
    "Resize over",
    IMAGE,
    more={"r": np.float32([]), "s": np.float32([]), "z": np.array([1, 1, 1 << 20, 4])},
    mode="linear",
)
one("terabytes", "Relu", "the inputs take", [1 << 20, 1 << 20])
one(
    "hidden size",
    "LSTM",
    "do not match each other",
    [3, 1, 2],
    hidden_size=7,
    more={"w": np.ones((1, 8, 2), np.float32), "r": np.ones((1, 8, 2), np.float32)},
)


# Initializers and ports
def added(change: Callable[[ModelProto], object]) -> ModelProto:
    """Build ``y = x + w`` and apply a change."""
    made = graph([node("Add", "x,w")], {"x": [4]}, w=np.ones(4, np.float32))
    change(made)
    return made


def initializer(name: str, said: str, **fields: Any) -> None:
    """Register a case with changed fields of the initializer ``w``; None clears a field."""

    def change(made: ModelProto) -> None:
        tensor = made.graph.initializer[0]
        for key, value in fields.items():
            tensor.ClearField(key)
            if isinstance(value, list):
                getattr(tensor, key).extend(value)
            elif value is not None:
                setattr(tensor, key, value)

    case(name, lambda: added(change), said)


initializer("another type", "16 bytes of data, where it needs 32", data_type=7)
initializer("no type", "element type 0", data_type=0)
initializer("an unknown type", "element type 99", data_type=99)
initializer("strings in bytes", "strings", data_type=8)
initializer("too small", "16 bytes of data, where it needs 8", dims=[2])
initializer("too large", "limits", dims=[1 << 62])
initializer("negative", "negative extent", dims=[-4])
initializer("odd bytes", "3 bytes", raw_data=b"abc")
initializer("no data", "0 elements", raw_data=None)
initializer("few floats", "3 entries", raw_data=None, float_data=[1, 2, 3])
initializer("integers for floats", "in int32_data, not in float_data", raw_data=None, int32_data=[1, 2, 3, 4])
initializer("data twice", "twice", float_data=[1, 2, 3, 4])
case("declared twice", lambda: added(lambda m: m.graph.initializer.append(m.graph.initializer[0])), "declared 2 times")
case("an input twice", lambda: added(lambda m: m.graph.input.append(m.graph.input[0])), "declared 2 times")
case(
    "another input type",
    lambda: added(lambda m: m.graph.input.append(helper.make_tensor_value_info("w", 7, [4]))),
    "another element type",
)
case(
    "another output type",
    lambda: added(lambda m: m.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 7, [4]))),
    "output 'y' is declared int64",
)
case("a segment", lambda: added(lambda m: setattr(m.graph.initializer[0].segment, "begin", 5)), "segments")
case("itself", lambda: added(lambda m: m.graph.node[0].input.__setitem__(0, "y")), "cycle")
case("no inputs", lambda: added(lambda m: m.graph.node[0].ClearField("input")), "0 inputs, where it needs 2")
case("many inputs", lambda: added(lambda m: m.graph.node[0].input.extend("xxx")), "5 inputs, where it needs 2")
case("a needed input", lambda: added(lambda m: m.graph.node[0].input.__setitem__(0, "")), "not given its input 'A'")
case(
    "a foreign attribute",
    lambda: added(lambda m: m.graph.node[0].attribute.append(helper.make_attribute("axis", 3))),
    "no attribute 'axis'",
)
one("an attribute of another type", "Softmax", "attribute axis of Softmax is FLOAT, where ONNX wants INT", [4], axis=1.5)
one("a missing attribute", "Cast", "Cast lacks the attribute to", [4])
case("a huge opset", lambda: added(lambda m: setattr(m.opset_import[0], "version", 1 << 40)), "imports version")
case("two opsets", lambda: added(lambda m: m.opset_import.append(helper.make_opsetid("", 13))), "imports version 13 and 21")


def external(name: str, said: str, **entries: object) -> None:
    """Register a case with an initializer in an external file; ``w.bin`` has 64 bytes."""

    def change(made: ModelProto) -> None:
        tensor = made.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))

    case(f"external {name}", lambda: added(change), said)


external("whole", "", location="w.bin", offset=16, length=16)
external("above", "outside the model's folder", location="../../../../etc/passwd")
external("absolute", "outside the model's folder", location="/etc/passwd")
external("missing", "is missing", location="nowhere.bin")
external("far", "truncated", location="w.bin", offset=1 << 62)
external("backwards", "must be non-negative", location="w.bin", offset=-5)
external("no number", "cannot be found", location="w.bin", offset="abc")
external("short", "3 bytes of data, where it needs 16", location="w.bin", length=3)
external("shorter", "must be non-negative", location="w.bin", length=-3)
external("without a length", "64 bytes of data, where it needs 16", location="w.bin")
external("with a zero", "cannot be found", location="a\0b")
external("with a long name", "cannot be found", location="a" * 5000)
external("a pipe", "is missing", location="pipe")


def run(folder: Path, device: str, names: Iterable[str]) -> None:
    """Print the name, exit code, message and fault of each case."""
    import os

    import rammer.compiler.compiler
    import rammer.jit.session  # noqa: F401  (imported once, before the children)
    from rammer_testing.sandbox import caged

    for name in names:
        place = folder / "case"
        place.mkdir()
        (place / "w.bin").write_bytes(bytes(64))
        os.mkfifo(place / "pipe")
        (place / "m.onnx").write_bytes(CASES[name][0]().SerializeToString())
        end = caged(["run", place / "m.onnx", "--device", device], place, ["--device", device])
        shutil.rmtree(place)
        print(json.dumps([name, end.code, end.err, end.fault, end.seconds]), flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), "toy", sys.argv[2:] or list(CASES))

"""Arbitrary names in a model: results do not depend on them, and names are never parsed as programs or code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from cases import Capture, Patch, command, message, model, saved
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import rammer
from rammer.compiled.artifact_reader import load_artifact
from rammer.compiled.segments import Compiled
from rammer.errors import BadInput
from rammer.ir.names import LONGEST, is_identifier
from rammer.ir.program import RProgram
from rammer_testing.nonempty import some

#: Kinds of names in the model; ``named`` renames each.
PLACES = (
    "graph",
    "x",
    "w",
    "k",
    "h",
    "s",
    "y",
    "z",
    "matmul",
    "softmax",
    "function",
    "f",
    "inner_in",
    "inner",
    "inner_out",
    "batch",
    "domain",
)
#: Program lines, comment terminators, C keywords and words of our own formats.
HOSTILE = (
    "n\n  operator y tile[evil=1]\n    compute y: f32[evil:1] = x[0]\n    writes y",
    "*/ int evil(); /*",
    "a\\\n#define evil",
    "// evil\r\nevil();",
    "  # evil",
    '"quoted"',
    "'",
    "\x00",
    "\u2028evil",
    "\x85evil",
    "\x1b[31mevil",
    "\u202eevil",
    " ",
    "x y",
    "int",
    "for",
    "lambda",
    "None",
    "inf",
    "nan",
    "main",
    "rm_max_i64",
    "p0",
    "s0",
    "task",
    "scratch",
    "\u00e9",
    "\u53d8\u91cf",
    "x[0]",
    "row v0: y[0:1:1]",
    "z_max",
    "z_sum",
    "z_exp",
    "n_conv",
    "x_2",
    "y_copy",
    "__a0",
    "__g0",
    "t0",
    "x_partial",
    "a" * 300,
    "a" * 299 + "b",
    "9",
    "{p}",
    "%s",
    "@NAME@",
)


def named(names: Mapping[str, str], values: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """Build a product, a local function with a map, and a softmax, under these names."""
    n = {place: names.get(place, place) for place in PLACES}
    floats = TensorProto.FLOAT
    ports = [helper.make_tensor_value_info(n["x"], floats, [n["batch"], 8])]
    outs = [helper.make_tensor_value_info(n[o], floats, [n["batch"], 6]) for o in ("y", "z")]
    constants = [numpy_helper.from_array(values[c], n[c]) for c in ("w", "k")]
    body = [
        helper.make_node("Relu", [n["inner_in"]], [n["inner"]], name=n["matmul"]),
        helper.make_node("Neg", [n["inner"]], [n["inner_out"]]),
    ]
    standard = helper.make_opsetid("", 18)
    function = helper.make_function(n["domain"], n["function"], [n["inner_in"]], [n["inner_out"]], body, [standard])
    nodes = [
        helper.make_node("MatMul", [n["x"], n["w"]], [n["h"]], name=n["matmul"]),
        helper.make_node("Add", [n["h"], n["k"]], [n["s"]], name=n["h"]),
        helper.make_node(n["function"], [n["s"]], [n["y"]], name=n["f"], domain=n["domain"]),
        helper.make_node("Softmax", [n["y"]], [n["z"]], name=n["softmax"], axis=1),
    ]
    graph = helper.make_graph(nodes, n["graph"], ports, outs, constants)
    return helper.make_model(
        graph, opset_imports=[standard, helper.make_opsetid(n["domain"], 1)], functions=[function], ir_version=9
    )


@pytest.fixture
def values(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return weights, the input and the results of the model."""
    shapes = {"w": (8, 6), "k": (6,), "x": (3, 8)}
    made = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    session = onnxruntime.InferenceSession(named({}, made).SerializeToString())
    return made | dict(zip("yz", session.run(None, {"x": made["x"]}), strict=True))


def distinct(names: Mapping[str, str]) -> dict[str, str]:
    """Return names that are valid in ONNX: non-empty where required, and unique within the graph and within the function."""
    result: dict[str, str] = {}
    for place, name in names.items():
        taken, number = set(result.values()), count(2)
        result[place] = name or "t"
        while result[place] in taken:
            result[place] = f"{name}{next(number)}"
    return result


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the OpenCL sources that are built."""
    from rammer_rocm import build

    real: Callable[..., Any] = build.build_program
    texts: list[str] = []

    def noted(context: Any, source: str, options: tuple[str, ...] = ()) -> Any:
        texts.append(source)
        return real(context, source, options)

    monkeypatch.setattr(build, "build_program", noted)
    return texts


def check(names: Mapping[str, str], values: Mapping[str, np.ndarray], path: Path, device: str) -> Iterator[Compiled]:
    """Run cold and warm with the model's names; yield the compiled program, then the cached one."""
    path.write_bytes(named(names, values).SerializeToString())
    for _ in range(2):
        exe = rammer.compile(path, device=device)
        got = exe.run({names.get("x", "x"): values["x"]})
        assert list(got) == [names.get("y", "y"), names.get("z", "z")]
        for have, port in zip(got.values(), "yz", strict=True):
            np.testing.assert_allclose(have, values[port], rtol=1e-4, atol=1e-5)
        (special,) = exe.cache.values()
        yield special.compiled
        exe.close()


def check_program(program: RProgram) -> None:
    """Check that names are identifiers everywhere and that the text parses to the same program."""
    names = [program.name, *program.buffer, *program.storage, *program.operator, *program.counter]
    names += [c.name for o in program.operators for c in o.computes]
    names += [a.name for o in program.operators for c in o.computes for a in (*c.axes, *c.reduce)]
    assert all(is_identifier(n) and len(n) < LONGEST + 30 for n in names), names
    text = str(program)
    assert RProgram.parse(text) == program and text.isprintable() is False and text.replace("\n", "").isprintable()


@pytest.mark.sampled(3, of="device")
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
@pytest.mark.parametrize("place", PLACES)
def test_no_name_is_a_line_of_a_program(
    tmp_path: Path, sources: list[str], values: dict[str, np.ndarray], device: str, place: str
) -> None:
    """Check names with line breaks: one once added an operator with C text as an axis name to the cached program."""
    evil = (
        "r\n    connect h <thread> y\n    writes y\n  operator evil_0 tile[evil();n=3]\n"
        "    compute evil_0: f32[evil();n:3] = x[0, 0]"
    )
    names = {place: evil}
    kept = list(check(names, values, tmp_path / "m.onnx", device))
    assert str(kept[0].programs[0]) == str(kept[1].programs[0])
    for compiled in kept:
        check_program(compiled.programs[0])
    if device == "rocm":
        assert sources and not any("evil()" in text for text in sources)


@pytest.mark.slow
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(st.fixed_dictionaries({p: st.one_of(st.sampled_from(HOSTILE), st.text(min_size=1)) for p in PLACES}))
def test_results_do_not_depend_on_names(tmp_path: Path, values: dict[str, np.ndarray], drawn: dict[str, str]) -> None:
    names = distinct({p: n.encode(errors="replace").decode() for p, n in drawn.items()})
    for device in ("rocm", "ipu_sim"):
        for compiled in check(names, values, tmp_path / "m.onnx", device):
            check_program(compiled.programs[0])


@pytest.mark.slow
@pytest.mark.parametrize("device", ["rocm", "ipu_sim"])
def test_every_hostile_name_somewhere(tmp_path: Path, values: dict[str, np.ndarray], device: str) -> None:
    for shift in range(0, len(HOSTILE), len(PLACES)):
        names = distinct({p: HOSTILE[(i + shift) % len(HOSTILE)] for i, p in enumerate(PLACES)})
        for compiled in check(names, values, tmp_path / "m.onnx", device):
            check_program(compiled.programs[0])


def test_no_name_commands_a_terminal(tmp_path: Path, monkeypatch: Patch, capsys: Capture, values: dict[str, np.ndarray]) -> None:
    """Check that control characters and line breaks of a name are escaped wherever the name is printed."""
    evil = "\x1b[2J\x1b]0;evil\x07\u202e\x9b31m"
    path = tmp_path / "m.onnx"
    path.write_bytes(named(dict.fromkeys(("graph", "y"), evil), values).SerializeToString())
    for words in (
        ("run", path, "--device", "toy", "--shape", "x:3x8"),
        ("inspect", path, "--device", "toy", "--shape", "x:3x8"),
        ("run", path, "--device", "toy"),
        ("run", path, "--device", "toy", "--shape", f"{evil}:3x8"),
    ):
        _, out, err = command(monkeypatch, capsys, *words)
        assert not set("\x1b\x07\u202e\x9b") & set(out + err), (words, out, err)
    broken = named({"matmul": f"{evil}\nevil"}, values)
    broken.graph.node[0].input[1] = broken.graph.node[0].input[0]
    text = message(BadInput, lambda: rammer.compile(broken, device="toy").run({"x": values["x"]}))
    assert "\x1b" not in text and "\nevil" not in text and ("x1b" in text or "u001b" in text)


def test_a_compiled_file_keeps_the_names_of_the_model(tmp_path: Path, values: dict[str, np.ndarray]) -> None:
    from rammer.compiled.artifact import save_artifact

    names = {"x": 'x\n"é', "y": "*/ y"}
    exe = rammer.compile(named(names, values), device="rocm")
    save_artifact(tmp_path / "m.rammer", exe.artifact(exe.compile_only({names["x"]: (3, 8)})))
    assert [v.external for v in load_artifact(tmp_path / "m.rammer").compiled.graph.outputs] == ["*/ y", "z"]
    got = rammer.compile(tmp_path / "m.rammer").run({names["x"]: values["x"]})
    np.testing.assert_allclose(got["*/ y"], values["y"], rtol=1e-4, atol=1e-5)


def fields(message: Any) -> Iterator[tuple[Any, Any, int | None]]:
    """Yield every text in a protobuf: the message, the field and, if the field is repeated, the index."""
    for field, value in message.ListFields():
        values = list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
        for place, one in enumerate(values):
            if field.message_type is not None:
                yield from fields(one)
            elif isinstance(one, str | bytes) and field.name != "raw_data":
                yield message, field, place if one is not value else None


def replaced(proto: onnx.ModelProto, number: int, everywhere: bool, long: str) -> onnx.ModelProto:
    """Return a copy in which one text, or all texts equal to it, is replaced by a long one."""
    result = onnx.ModelProto.FromString(proto.SerializeToString())
    found = [(m, f, p, getattr(m, f.name) if p is None else getattr(m, f.name)[p]) for m, f, p in fields(result)]
    old = found[number][3]
    for index, (holder, field, place, text) in enumerate(found):
        if index == number or (everywhere and text == old):
            new = long if isinstance(text, str) else long.encode()
            if place is None:
                setattr(holder, field.name, new)
            else:
                getattr(holder, field.name)[place] = new
    return result


@pytest.mark.slow
@pytest.mark.parametrize("long", ["n" * 400_000, "n " * 200_000, "n\n" * 200_000], ids=["word", "words", "lines"])
def test_what_is_printed_is_short_whatever_names_are(long: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    proto = model(
        """<ir_version: 9, opset_import: ["" : 17, "com.example" : 1], producer_name: "p">
        named (float[N,4] x) => (float[M,4] y) <float[4] w = {1, 2, 3, 4}> {
            a = com.example.Twice (x)
            b = Conv <auto_pad = "NOTSET"> (a, w)
            y = Add (b, w)
        }
        <domain: "com.example", opset_import: ["" : 17]> Twice (u) => (v) { v = Add (u, u) }"""
    )
    onnx.helper.set_model_props(proto, {"key": "value"})
    proto.graph.doc_string, proto.graph.node[1].name = "text", "conv"
    plain = model("""<ir_version: 9, opset_import: ["" : 17]> named (float[2,4] x) => (float[2,4] y) { y = Tanh(x) }""")
    for one in (proto, plain):
        for number in some(range(len(list(fields(one))))):
            for everywhere in (False, True):
                path = saved(tmp_path / "m.onnx", replaced(one, number, everywhere, long))
                code, out, err = command(monkeypatch, capsys, "run", path, "--device", "toy", "--shape", "x:2x4")
                assert code in (0, 2) and "Traceback" not in err and len(out) + len(err) < 20000, (
                    number,
                    code,
                    out[:999],
                    err[:999],
                )

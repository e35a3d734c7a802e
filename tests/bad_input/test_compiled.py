"""Compiled files that no compiler wrote: refused quickly, with exit code 2, before any part of them is used."""

from __future__ import annotations

import base64
import json
import re
import struct
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from cases import Capture, Patch, arrays, command, message, model, saved
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import NodeProto, TensorProto, helper

import rammer
from rammer.compiled.artifact import is_text, save_artifact, seal_of
from rammer.errors import BadInput, DeviceFailure, DeviceUnavailable, RammerError
from rammer.ir.program import RProgram
from rammer.verify.verifier import verify
from rammer_testing.cache_files import entries
from rammer_testing.programs import random_net

Members = dict[str, bytes]
SHAPES = {"x": (1, 3, 8), "w": (8, 5)}
TEXT = """<ir_version: 9, opset_import: ["" : 21]> little (float[1,3,8] x, float[8,5] w) => (float[1,3,5] y) {
    k = Constant<value = float[8,5] {%s}>()
    v = Add(w, k)
    m = MatMul(x, v)
    y = Softmax(m)
}""" % ", ".join(map(str, range(40)))  # noqa: UP031 - braces are ONNX's


@pytest.fixture(scope="module", params=["rocm", "toy"])
def members(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Members:
    """Return the members of a valid file."""
    path = tmp_path_factory.mktemp("good") / "good.rammer"
    exe = rammer.compile(model(TEXT), device=request.param)
    save_artifact(path, exe.artifact(exe.compile_only(SHAPES)))
    with zipfile.ZipFile(path) as archive:
        return {n: archive.read(n) for n in archive.namelist()}


def written(path: Path, parts: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
        archive.comment = seal_of({n: d for n, d in parts.items() if is_text(n)})
    return path


def refusal(rng: np.random.Generator, path: Path, most: float = 5.0) -> str:
    """Return the message of the error, which must be a BadInput and come within ``most`` seconds."""
    start = time.process_time()
    text = message(BadInput, lambda: rammer.compile(path).run(arrays(rng)))
    assert time.process_time() - start < most
    return text


def test_the_good_file_runs(tmp_path: Path, members: Members, rng: np.random.Generator) -> None:
    given = arrays(rng)
    have = rammer.compile(written(tmp_path / "m.rammer", members)).run(given)["y"]
    products = given["x"] @ (given["w"] + np.arange(40, dtype=np.float32).reshape(8, 5))
    scores = np.exp(products - products.max(-1, keepdims=True))
    np.testing.assert_allclose(have, scores / scores.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6)


#: (pattern in a program's text, which is replaced once; replacement; text of the refusal).
LINES: dict[str, tuple[str, str, str]] = {
    "an axis that is C": (r"\[i0:1, i1:3, i2:5\] = exp", "[i0:1, evil();i1:3, i2:5] = exp", "not axes|not a compute"),
    "an axis with a line break": (r"\[k:8\]", "[k\u000bevil:8]", "not axes|not a compute"),
    "an axis of another alphabet": (r"\[k:8\]", "[ж:8]", "not axes|not a compute"),
    "a tensor that is C": (r"storage x:", "storage x;evil():", "not a line of a program"),
    "a buffer that is C": (r"buffer x:", "buffer x*/evil/*:", "not a line of a program"),
    "an operator that is C": (r"operator (\w+) tile", "operator evil(); tile", "not a line of a program"),
    "an unknown element type": (r"buffer x: f32", "buffer x: f33", "unknown element type f33"),
    "an element type that is C": (r" = exp\(", " = exp(cast(float32 or evil(), 1.0) + ", "not an element type"),
    "an unknown function": (r" = exp\(", " = system(", "unknown scalar operation"),
    "an origin in half quotes": (r"  # .*", '  # "evil', "line "),
    "an origin that could be shorter": (r"  # .*", '  # "evil"', "not a name as it is written"),
    "a family that is C": (
        r"operator (\w+) tile\[(.*?)\].*",
        'operator <1> tile[<2>] family e"vil x=1',
        "not a line of a program",
    ),
    "rows without end": (r"row v0.*", "row v0..v99999999999: y[0:1:1]", "not a line of a program"),
    "more rows than vEUs": (r"row v0(\.\.v1)?", "row v0..v60000", "a row is out of range"),
    "more vEUs than can be proved": (r"on \d+ vEUs", "on 65536 vEUs", "too many to be proved"),
    "vEUs without end": (r"on \d+ vEUs", "on 99999999999 vEUs", "at most 65536 rows"),
    "tasks without end": (r"row v0(.*)\[(\d+)(?:\+\d+)?:\d+:(-?\d+)\]", "row v0<1>[<2>:99999999999:<3>]", "does not exist"),
    "the same task again and again": (
        r"row v0(.*)\[(\d+)(?:\+\d+)?:\d+:(-?\d+)\]",
        "row v0<1>[<2>:99999999999:0]",
        "more tasks than",
    ),
    "an extent without end": (r"storage x: x\+0 \[1, 3, 8\]", "storage x: x+0 [1, 3, 999999999999999999]", "covers elements"),
    "a buffer without end": (r"buffer y: f32 15", "buffer y: f32 999999999999999999", "does not fill its buffer|invalid size"),
    "an integer of 5,000 digits": (r"buffer x: f32 24", "buffer x: f32 " + "9" * 5000, "not a line of a program"),
    "a literal of 5,000 digits": (r"= exp\(", "= exp(" + "9" * 5000 + " + ", "not a scalar expression|line "),
    "parentheses without end": (r"= exp\(", "= exp(" * 5000, "nested|not a scalar expression"),
    "a sum without end": (r"= exp\(", "= exp(1.0 + " + " + ".join(["1.0"] * 20000) + " + ", "nested too deeply|levels"),
    "a sum of many levels": (r"= exp\(", "= exp(1.0 + " + " + ".join(["1.0"] * 300) + " + ", "levels|nested too deeply"),
    "a read past the end": (r"x\[i0, i1, k\]|x\[b0, m, k\]|x\[0, m, k\]", "x[0, m, k + 1]", "covers 1..8"),
    "a read that nothing bounds": (r"x\[0, m, k\]|x\[b0, m, k\]", "x[0, m, k // m]", "is unbounded"),
    "a place that may be no integer": (r"x\[0, m, k\]|x\[b0, m, k\]", "x[0, m, k * 0.5]", "is unbounded"),
    "a place that is no integer": (r"x\[0, m, k\]|x\[b0, m, k\]", "x[0, m, exp(0.5)]", "is not an integer"),
    "a table read past its end": (r"x\[0, m, k\]|x\[b0, m, k\]", "x[0, m, table(int64, [0, 1], k)]", "a table of 2 values"),
    "a tile of other axes": (r"tile\[\w+=", "tile[evil=", "does not match its last compute"),
    "a tile of nothing": (r"tile\[(\w+)=\d+", "tile[<1>=0", "does not match its last compute"),
    "a memory layer of its own": (
        r"connect (\w+) <\w+>",
        "connect <1> <moon>",
        "memory layer moon, which the device does not have",
    ),
    "a time that is none": (r"predicted \S+ s", "predicted nan s", "a finite time"),
}


def filled(text: str, found: re.Match[str]) -> str:
    """Return ``text`` with ``<1>``, ``<2>``, ... replaced by the groups of ``found``."""
    for number, group in enumerate(found.groups(), 1):
        text = text.replace(f"<{number}>", group or "")
    return text


@pytest.mark.parametrize("case", LINES)
def test_programs_that_no_compiler_wrote(tmp_path: Path, members: Members, case: str, rng: np.random.Generator) -> None:
    pattern, change, said = LINES[case]
    text = members["0.program"].decode()
    changed = re.sub(pattern, lambda found: filled(change, found), text, count=1)
    if changed == text:
        pytest.skip("this device's program has no such part")
    path = written(tmp_path / "m.rammer", {**members, "0.program": changed.encode()})
    assert re.search(said, refusal(rng, path)), refusal(rng, path)


def test_families_and_configurations_must_be_the_device_s(tmp_path: Path, members: Members, rng: np.random.Generator) -> None:
    text = members["0.program"].decode()
    if "family panel" not in text:
        pytest.skip("a device without families")
    for change, said in (
        (" family other x=1", "of family other, which"),
        (" family panel mr=70 nv=1", "with mr=70"),
        (" family panel mr=4 nv=-1", "with nv=-1"),
        (" family panel evil=1", "with evil=1"),
    ):
        bad = re.sub(r" family panel.*", change, text, count=1)
        assert said in refusal(rng, written(tmp_path / "m.rammer", {**members, "0.program": bad.encode()}))


def spoiled_zip(case: str, members: Members, path: Path) -> None:
    """Write a zip file that no compiler wrote."""
    big = b"[" + b" " * (100 << 20) + b"]"
    if case in ("deflated", "bzip2", "lzma"):
        written(path, members, {"deflated": zipfile.ZIP_DEFLATED, "bzip2": zipfile.ZIP_BZIP2, "lzma": zipfile.ZIP_LZMA}[case])
    elif case == "bomb":
        written(path, {**members, "head.json": big}, zipfile.ZIP_DEFLATED)
    elif case == "long head":
        written(path, {**members, "head.json": big})
    elif case == "twice":
        written(path, members)
        with pytest.warns(UserWarning), zipfile.ZipFile(path, "a") as archive:
            archive.writestr("head.json", members["head.json"])
    elif case == "another member":
        written(path, {**members, "../../evil": b"x"})
    elif case == "no head":
        written(path, {n: d for n, d in members.items() if n != "head.json"})
    elif case == "longer than the file":
        written(path, members)
        data = bytearray(path.read_bytes())
        at = data.rindex(b"PK\x01\x02")
        struct.pack_into("<II", data, at + 20, 3_000_000_000, 3_000_000_000)
        path.write_bytes(bytes(data))
    else:
        raise AssertionError(case)


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "case, said",
    [
        ("deflated", "is compressed"),
        ("bzip2", "is compressed"),
        ("lzma", "is compressed"),
        ("bomb", "is compressed"),
        ("long head", "'head.json' is longer than"),
        ("twice", "occurs twice"),
        ("another member", "is not used"),
        ("no head", "head.json"),
        ("longer than the file", "longer than the file"),
    ],
)
def test_zips_that_no_compiler_wrote(tmp_path: Path, members: Members, case: str, said: str, rng: np.random.Generator) -> None:
    spoiled_zip(case, members, tmp_path / "m.rammer")
    assert said in refusal(rng, tmp_path / "m.rammer")


#: (change of the head, text of the refusal).
HEADS: dict[str, tuple[Callable[[dict[str, object]], object], str]] = {
    "a list": (lambda h: [], "."),
    "deep": (lambda h: {**h, "options": "DEEP"}, "."),
    "no segments": (lambda h: {**h, "segments": []}, "is not used"),
    "a kind of its own": (lambda h: {**h, "segments": [{"kind": "evil"}]}, "."),
    "another type": (lambda h: {**h, "outputs": [["y", "f32[1,3,6]", "y"]]}, "output y is never computed, or of another type"),
    "another input": (lambda h: {**h, "inputs": [["x", "f32[1,3,9]", "x"], ["w", "f32[8,5]", "w"]]}, "x is read, but"),
    "a name that is none": (lambda h: {**h, "name": "evil\n"}, "not an identifier"),
    "a port that is none": (lambda h: {**h, "outputs": [["y\n", "f32[1,3,5]", "y"]]}, "not an identifier"),
    "one name for two": (lambda h: {**h, "inputs": [["x", "f32[1,3,8]", "a"], ["w", "f32[8,5]", "a"]]}, "have the same name"),
    "a type that is none": (lambda h: {**h, "outputs": [["y", "f32[-1]", "y"]]}, "not a tensor type"),
    "a precision that is none": (lambda h: with_option(h, precision="float99"), "unknown precision 'float99'"),
    "an option of another version": (lambda h: with_option(h, unroll="2"), "records the options policy, .*unroll"),
    "a constant that is none": (lambda h: with_constant(h, 0, "evil()"), "not an identifier"),
    "a constant of objects": (lambda h: with_constant(h, 1, "O"), "invalid type"),
    "a constant of void": (lambda h: with_constant(h, 1, "V999999999"), "invalid type"),
    "a constant of another type": (lambda h: with_constant(h, 1, "int32"), "not float32"),
    "a constant of another shape": (lambda h: with_constant(h, 2, [5, 8]), r"is float32\[5, 8\], not"),
    "a constant without end": (lambda h: with_constant(h, 2, [10**12]), "does not hold each of its constants"),
    "a constant before the start": (lambda h: with_constant(h, 3, -64), "invalid type"),
    "a constant behind the end": (lambda h: with_constant(h, 3, 10**12), "does not hold each of its constants"),
    "a constant of another content": (lambda h: with_constant(h, 4, 1), "is damaged"),
}


def with_option(head: dict[str, object], **options: str) -> object:
    record = head["record"]
    assert isinstance(record, dict)
    return {**head, "record": record | options}


def with_constant(head: dict[str, object], field: int, value: object) -> object:
    changed = json.loads(json.dumps(head))
    changed["segments"][0]["constants"][0][field] = value
    return changed


@pytest.mark.parametrize("case", HEADS)
def test_heads_that_no_compiler_wrote(tmp_path: Path, members: Members, case: str, rng: np.random.Generator) -> None:
    change, said = HEADS[case]
    head = json.dumps(change(json.loads(members["head.json"]))).replace('"DEEP"', "[" * 100_000 + "]" * 100_000)
    assert re.search(said, refusal(rng, written(tmp_path / "m.rammer", {**members, "head.json": head.encode()})))


#: Its determinant has too many rows for a device.
DET = """<ir_version: 9, opset_import: ["" : 21]> det (float[65,65] x) => (float y) { y = Det(x) }"""


@pytest.mark.parametrize(
    "case, said",
    [
        ("operator", "Evil"),
        ("file", "external data"),
        ("version", "version 0"),
        ("input", "is read, but"),
        ("junk", "not an operator"),
        ("type", "not a tensor type"),
    ],
)
def test_host_operators_that_no_compiler_wrote(tmp_path: Path, case: str, said: str, rng: np.random.Generator) -> None:
    exe = rammer.compile(model(DET), device="toy")
    save_artifact(tmp_path / "det.rammer", exe.artifact(exe.compile_only({})))
    with zipfile.ZipFile(tmp_path / "det.rammer") as archive:
        parts = {n: archive.read(n) for n in archive.namelist()}
    node = json.loads(parts["0.node"])
    proto = NodeProto.FromString(base64.b64decode(node["proto"]))
    if case == "operator":
        proto.op_type = "Evil"
    elif case == "file":
        (tmp_path / "w.bin").write_bytes(bytes(16))
        tensor = TensorProto(data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value="w.bin")
        proto = helper.make_node("Constant", [], ["y"], value=tensor)
    node["proto"] = base64.b64encode(b"junk" if case == "junk" else proto.SerializeToString()).decode()
    node |= {"version": {"version": 0}, "input": {"inputs": ["z"]}, "type": {"types": {"y": "f32[-3]"}}}.get(case, {})
    assert said in refusal(rng, written(tmp_path / "m.rammer", {**parts, "0.node": json.dumps(node).encode()}))


def test_the_command_line_says_so(tmp_path: Path, members: Members, monkeypatch: Patch, capsys: Capture) -> None:
    path = written(tmp_path / "m.rammer", members, zipfile.ZIP_LZMA)
    code, out, err = command(monkeypatch, capsys, "run", path)
    assert (
        (code, out) == (2, "") and err.startswith(f"rammer: error: {path} is not a compiled model: member 'head.json' is")
    ) or "is compressed" in err
    assert "Traceback" not in err


def test_a_kept_program_that_does_not_hold_is_made_again(
    tmp_path: Path, own_cache: Path, capsys: Capture, rng: np.random.Generator
) -> None:
    """Check damaged cache files with valid checksums: no other result and no execution of their code."""
    path, given = saved(tmp_path / "m.onnx", model(TEXT)), arrays(rng)
    want = rammer.compile(path, device="rocm").run(given)["y"]
    (kept,) = entries(own_cache, "programs")
    with zipfile.ZipFile(kept) as archive:
        parts = {n: archive.read(n) for n in archive.namelist()}
    text = parts["0.program"].decode()
    for change in (("[k:8]", "[evil();k:8]"), (" = exp(", " = sin("), ("x[", "w["), ("family panel", "family other")):
        bad = written(tmp_path / "bad.rammer", {**parts, "0.program": text.replace(*change).encode()}).read_bytes()
        if change[1] == " = sin(":
            continue  # a valid program: users that may write to the cache are trusted
        kept.write_bytes(bad)
        assert np.array_equal(rammer.compile(path, device="rocm").run(given)["y"], want), change
        assert "; compiling again\n" in capsys.readouterr().err or change[0] not in text
        assert kept.read_bytes() != bad or change[0] not in text
    head = parts["head.json"].replace(b'"precision": "float32"', b'"precision": "float16"')
    kept.write_bytes(written(tmp_path / "bad.rammer", {**parts, "head.json": head}).read_bytes())
    assert np.array_equal(rammer.compile(path, device="rocm").run(given)["y"], want)
    assert "was cached for other inputs or options; compiling again" in capsys.readouterr().err


TOKENS = re.compile(r"\w+|[^\w\s]| +|\n")


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**6), st.integers(1, 8), st.data())
def test_a_mutated_text_is_an_error_or_a_program(seed: int, operators: int, data: st.DataObject) -> None:
    """Check that removed, doubled, exchanged or replaced tokens raise ValueError or give a program equal to its text."""
    from random import Random

    from rammer.schedule.wavefront import Wavefront

    tokens = TOKENS.findall(str(random_net(Random(seed), operators).program(Wavefront(), 3)))
    for _ in range(data.draw(st.integers(1, 4))):
        at, other = (data.draw(st.integers(0, len(tokens) - 1)) for _ in range(2))
        kind = data.draw(st.sampled_from(("drop", "double", "swap", "other", "evil", "number", "bytes")))
        new = {
            "drop": "",
            "double": tokens[at] * 2,
            "swap": tokens[other],
            "other": tokens[other],
            "number": "99999999999",
            "evil": data.draw(st.sampled_from(("evil();", '"', "#", "\\", "*/", "[", ")", "\x85", "é", "-1", "0", "1e999"))),
            "bytes": data.draw(st.text(max_size=3)),
        }[kind]
        if kind == "swap":
            tokens[other] = tokens[at]
        tokens[at] = new
    try:
        program = RProgram.parse("".join(tokens))
        verify(program)
    except (ValueError, RammerError):
        return
    assert RProgram.parse(str(program)) == program


@pytest.mark.parametrize("device", ["rocm", "toy", "ipu_sim"])
def test_mutated_files_are_refused_or_run(tmp_path: Path, device: str, rng: np.random.Generator) -> None:
    """Check that loading and running mutated files gives an expected error or an output of the declared type."""
    exe = rammer.compile(model(TEXT), device=device)
    save_artifact(tmp_path / "good.rammer", exe.artifact(exe.compile_only(SHAPES)))
    with zipfile.ZipFile(tmp_path / "good.rammer") as archive:
        parts = {n: archive.read(n) for n in archive.namelist()}
    for _ in range(40):
        tokens = TOKENS.findall(parts["0.program"].decode())
        for at, other in rng.integers(0, len(tokens), (int(rng.integers(1, 3)), 2)):
            tokens[at] = tokens[other] if rng.random() < 0.7 else str(rng.choice(["", "0", "2", "-1", "evil", "[", "7"]))
        path = written(tmp_path / "m.rammer", {**parts, "0.program": "".join(tokens).encode()})
        try:
            out = rammer.compile(path).run(arrays(rng))["y"]
        except (BadInput, DeviceFailure, DeviceUnavailable):
            continue
        assert out.shape == (1, 3, 5) and out.dtype == np.float32

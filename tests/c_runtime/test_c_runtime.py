"""The C loader: the same bits as the Python runtime, refusals with their reasons, and damaged files, with the sanitizers."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from corpus_inputs import Entry, corpus

import rammer as api
from rammer.compiled.artifact import is_text, save_artifact, seal_of
from rammer.compiled.segments import Cases, Compiled, ProgramSegment
from rammer.errors import BadInput
from rammer_testing.c_runtime import COMPILERS, LOADER, REFUSED, build_example, build_program, run_example, start
from rammer_testing.mutants.change import bytes_changed, sealed_changed, zip_changed
from rammer_testing.nonempty import some
from rammer_testing.small_models import MODELS

from rammer_rocm.icd import SUPPORT_PACKAGE, installed_file
from rammer_rocm.opencl_runtime import import_opencl

pytestmark = pytest.mark.skipif(not all(COMPILERS.values()), reason="needs the C and C++ compilers gcc and g++")

BAD_FILE, UNSUPPORTED, NOT_TRUSTED = (REFUSED + n for n in (1, 2, 3))
#: Mutants of one test. Most have a valid digest, so that the reader meets their content.
MUTANTS = 150
CHANGES = (bytes_changed, zip_changed, sealed_changed, sealed_changed, sealed_changed)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_example("c", tmp_path_factory.mktemp("c"))


@pytest.fixture(scope="module")
def opencl() -> Mapping[str, str]:
    """Return the environment in which a program that is not Python finds the OpenCL runtime of the test environment."""
    import_opencl()  # sets the variables of the runtime itself
    support = installed_file(SUPPORT_PACKAGE, "libimf.so")
    return {"LD_LIBRARY_PATH": str(support.parent)} if support is not None else {}


def write_file(model: Path, output: Path, **options: Any) -> Compiled:
    """Write a compiled file with machine code for the CPU here."""
    exe = api.compile(model, "rocm", **options)
    compiled = exe.with_code(exe.compile_whole({}))
    save_artifact(output, exe.artifact(compiled))
    exe.close()
    return compiled


def run_both(
    path: Path,
    inputs: Mapping[str, np.ndarray],
    example: Path,
    opencl: Mapping[str, str],
    lengths: Mapping[str, int] | None = None,
) -> None:
    """Compare the bits of C and Python."""
    exe = api.compile(path, trust=True)
    want = exe.run(dict(inputs))
    names, outputs = [p.name for p in exe.head.inputs], [p.name for p in exe.head.outputs]
    exe.close()
    have = run_example(example, path, {n: inputs[n] for n in names}, {n: np.asarray(want[n]) for n in outputs}, opencl, lengths)
    assert all(have[n].tobytes() == np.asarray(want[n]).tobytes() for n in some(outputs))


@pytest.mark.parametrize("name", [n for n, m in MODELS.items() if m.shapes == ({},)])
def test_same_bits_as_python(
    name: str, example: Path, opencl: Mapping[str, str], tmp_path: Path, rng: np.random.Generator
) -> None:
    onnx.save(MODELS[name].build(rng), tmp_path / "m.onnx")
    write_file(tmp_path / "m.onnx", tmp_path / "m.rammer")
    run_both(tmp_path / "m.rammer", MODELS[name].inputs(rng, {}), example, opencl)


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("entry", [e for e in corpus().values() if e.sizes == [{}]], ids=lambda e: e.name)
def test_same_bits_for_exported_models(
    entry: Entry, example: Path, opencl: Mapping[str, str], tmp_path: Path, rng: np.random.Generator
) -> None:
    try:
        compiled = write_file(entry.path, tmp_path / "m.rammer")
    except BadInput as problem:
        assert "a compiled file needs fixed shapes" in problem.what, problem
        return
    done = start(example, tmp_path / "m.rammer")
    if done.returncode == UNSUPPORTED:
        (only, *more) = compiled.segments
        ports = {v.name for v in compiled.graph.outputs} | {v.name for v in compiled.graph.inputs}
        reachable = isinstance(only, ProgramSegment) and ports == {
            p.tensor for p in (*only.program.inputs, *only.program.outputs)
        }
        assert more or not reachable, done.stderr
        return
    run_both(tmp_path / "m.rammer", entry.inputs(rng, {}), example, opencl)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shipped")
    onnx.save(MODELS["branches"].build(np.random.default_rng(2)), folder / "m.onnx")
    write_file(folder / "m.onnx", folder / "m.rammer")
    return folder / "m.rammer"


def test_the_cpp_example_runs(shipped: Path, opencl: Mapping[str, str], tmp_path: Path) -> None:
    done = start(build_example("cpp", tmp_path), shipped, env=opencl)
    assert done.returncode == 0 and done.stdout.startswith("output y: f32[1,12,6,6]"), done.stderr


def change_member(path: Path, member: str, change: Callable[[dict[str, Any]], object], output: Path) -> None:
    """Write a compiled file with one changed JSON member and a valid digest."""
    with zipfile.ZipFile(path) as archive:
        members = {i.filename: archive.read(i) for i in archive.infolist()}
    found = json.loads(members[member])
    change(found)
    members[member] = json.dumps(found).encode()
    with zipfile.ZipFile(output, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.comment = seal_of({n: c for n, c in members.items() if is_text(n)})


def calls(record: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = record["record"]["calls"]
    return found


@pytest.mark.parametrize(
    ("member", "change", "code", "reason"),
    [
        ("head.json", lambda h: h.update(format=9), UNSUPPORTED, "has format 9"),
        ("head.json", lambda h: h.update(ranged={}), BAD_FILE, "a range has no lengths"),
        ("head.json", lambda h: h.update(code=""), UNSUPPORTED, "no machine code"),
        ("head.json", lambda h: h["segments"][0].update(kind="host"), UNSUPPORTED, "operators on the host"),
        ("head.json", lambda h: h["segments"].append(h["segments"][0]), BAD_FILE, "1.code0 is missing"),
        ("head.json", lambda h: h["segments"][0].update(cases=["n", [4]]), BAD_FILE, "unknown length"),
        ("0.code0", lambda c: c["record"].pop("calls"), UNSUPPORTED, "an earlier version"),
        ("0.code0", lambda c: calls(c).update(refused="some programs"), UNSUPPORTED, "some programs run in Python only"),
        ("0.code0", lambda c: calls(c)["inputs"][0].__setitem__(3, 1 << 30), BAD_FILE, "exceeds its memory"),
        ("0.code0", lambda c: calls(c)["inputs"][0][5].__setitem__(1, (1 << 31) - 1), BAD_FILE, "too large|exceeds its memory"),
        ("0.code0", lambda c: calls(c)["buffers"][1][1][0].__setitem__(0, 1 << 39), BAD_FILE, "exceeds its memory"),
        ("0.code0", lambda c: calls(c)["launches"][0].__setitem__(0, 7), BAD_FILE, "out of range"),
        ("0.code0", lambda c: c["arrays"][0].__setitem__(4, 1), BAD_FILE, "checksum"),
        ("0.code0", lambda c: c["arrays"][0].__setitem__(2, [1 << 39, 1 << 39]), BAD_FILE, "too large"),
    ],
)
def test_a_file_is_refused_with_the_reason(
    member: str,
    change: Callable[[dict[str, Any]], object],
    code: int,
    reason: str,
    shipped: Path,
    example: Path,
    tmp_path: Path,
) -> None:
    change_member(shipped, member, change, tmp_path / "m.rammer")
    done = start(example, tmp_path / "m.rammer")
    assert done.returncode == code and any(r in done.stderr for r in reason.split("|")), done.stderr


LOOP = """<ir_version: 9, opset_import: ["": 21]> loop (float[4] x) => (float[4] y)
    <int64 n = {3000}, bool go = {1}> { y = Loop (n, go, x) <body = b (int64 i, bool c, float[4] s)
    => (bool k, float[4] t) { k = Identity(c)  h = Sin(s)  t = Add(h, x) }> }"""
ROWS = """<ir_version: 9, opset_import: ["": 21]> rows (float[n, 32] x, float[32, 16] w) => (float[n, 16] y, float[n] s)
    <int64[1] last = {1}> { a = MatMul(x, w)  y = Softmax(a)  s = ReduceMax<keepdims=0>(a, last) }"""
IMAGE = """<ir_version: 9, opset_import: ["": 21]> image (float[1, 3, h, w] x, float[4, 3, 3, 3] k) => (float[1, 4, p, q] y)
    { a = Conv<kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]>(x, k)
      y = MaxPool<kernel_shape=[2, 2], strides=[2, 2]>(a) }"""


def recurrent(length: int | str, rng: np.random.Generator) -> onnx.ModelProto:
    """Return a recurrent layer between two other operators: three programs, of which one is a loop."""
    make = onnx.helper.make_node
    nodes = [
        make("Tanh", ["x"], ["a"]),
        make("LSTM", ["a", "w", "r"], ["", "h", ""], hidden_size=8),
        make("Softmax", ["h"], ["y"]),
    ]
    shape, kind = [length, 1, 4], onnx.TensorProto.FLOAT
    ports = [onnx.helper.make_tensor_value_info(n, kind, s) for n, s in (("x", shape), ("a", shape), ("y", [1, 1, 8]))]
    weights = [("w", (1, 32, 4)), ("r", (1, 32, 8))]
    constants = [onnx.numpy_helper.from_array(rng.standard_normal(s).astype(np.float32), n) for n, s in weights]
    graph = onnx.helper.make_graph(nodes, "recurrent", ports[:1], ports[1:], constants)
    return onnx.helper.make_model(graph, ir_version=9, opset_imports=[onnx.helper.make_opsetid("", 21)])


@pytest.mark.parametrize("executor", ["single", "waves"])
def test_same_bits_for_loops_of_several_programs(
    executor: str, example: Path, opencl: Mapping[str, str], tmp_path: Path, rng: np.random.Generator
) -> None:
    for model, programs in ((onnx.parser.parse_model(LOOP), 1), (recurrent(300, rng), 3)):
        onnx.save(model, tmp_path / "m.onnx")
        compiled = write_file(tmp_path / "m.onnx", tmp_path / "m.rammer", options={"executor": executor})
        assert len(compiled.programs) == programs and any(p.repeat is not None for p in compiled.programs)
        shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
        run_both(tmp_path / "m.rammer", {"x": rng.standard_normal(shape).astype(np.float32)}, example, opencl)


@pytest.mark.parametrize("executor", ["single", "waves"])
@pytest.mark.parametrize("name", ["rows", "image", "recurrent"])
def test_same_bits_at_the_lengths_of_a_range(
    name: str, executor: str, example: Path, opencl: Mapping[str, str], tmp_path: Path, rng: np.random.Generator
) -> None:
    models: dict[str, tuple[onnx.ModelProto, dict[str, tuple[int, ...]], list[dict[str, int]]]] = {
        "rows": (onnx.parser.parse_model(ROWS), {"n": (1, 40)}, [{"n": 1}, {"n": 7}, {"n": 40}]),
        "image": (
            onnx.parser.parse_model(IMAGE),
            {"h": (16, 64, 4), "w": (8, 60)},
            [{"h": 16, "w": 8}, {"h": 64, "w": 60}, {"h": 32, "w": 53}],
        ),
        "recurrent": (recurrent("t", rng), {"t": (1, 300)}, [{"t": 1}, {"t": 299}, {"t": 300}]),
    }
    model, spans, points = models[name]
    onnx.save(model, tmp_path / "m.onnx")
    write_file(tmp_path / "m.onnx", tmp_path / "m.rammer", shapes=spans, options={"executor": executor})
    for point in points:
        dims = {p.name: [d.dim_value or point[d.dim_param] for d in p.type.tensor_type.shape.dim] for p in model.graph.input}
        inputs = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in dims.items()}
        run_both(tmp_path / "m.rammer", inputs, example, opencl, point)
    (dim, (low, high, *_)) = next(iter(spans.items()))
    for wrong in (low - 1, high + 1, *([low + 1] if name == "image" else [])):
        done = start(example, tmp_path / "m.rammer", tmp_path, f"{dim}={wrong}", env=opencl)
        assert done.returncode == 1 and f"length {dim} is {wrong}, the range is {low} to {high}" in done.stderr
    done = start(example, tmp_path / "m.rammer", tmp_path, "other=1", env=opencl)
    assert done.returncode == 1 and "the model has no length other" in done.stderr


def test_short_lengths_use_the_table_for_them(
    example: Path, opencl: Mapping[str, str], tmp_path: Path, rng: np.random.Generator
) -> None:
    """Write a table for lengths up to 10, then make the table for all lengths fail."""
    onnx.save(onnx.parser.parse_model(ROWS), tmp_path / "m.onnx")
    exe = api.compile(tmp_path / "m.onnx", "rocm", shapes={"n": (1, 40)})
    compiled = exe.compile_whole({})
    assert compiled.ranged is not None
    (only,) = compiled.segments
    assert isinstance(only, ProgramSegment)
    both = replace(only, cases=Cases(compiled.ranged.lengths["n"], (10,), (only.program,)))
    save_artifact(tmp_path / "m.rammer", exe.artifact(exe.with_code(replace(compiled, segments=(both,)))))
    exe.close()

    def no_waves(code: dict[str, Any]) -> None:
        calls(code)["launches"][0][3][-1] = ["int32", 0]

    for rows in (10, 11):
        inputs = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", (rows, 32)), ("w", (32, 16)))}
        run_both(tmp_path / "m.rammer", inputs, example, opencl, {"n": rows})
        change_member(tmp_path / "m.rammer", "0.code0", no_waves, tmp_path / "changed.rammer")
        done = start(example, tmp_path / "changed.rammer", tmp_path, f"n={rows}", env=opencl)
        assert (done.returncode, "makes no progress" in done.stderr) == ((0, False) if rows == 10 else (1, True)), done.stderr


def test_machine_code_runs_only_if_trusted(shipped: Path, tmp_path: Path) -> None:
    source, program = tmp_path / "trust.c", tmp_path / "trust"
    source.write_text(
        '#include "rammer.h"\n#include <stdio.h>\nint main(int n, char **w) {\n  rammer_options o = {0};\n'
        "  if (n > 2) { o.trust = 1; o.trust_key = w[2]; }\n  rammer_model *m;\n"
        '  rammer_status s = rammer_open(w[1], &o, &m);\n  fprintf(stderr, "%s", rammer_error());\n  return s;\n}\n'
    )
    build_program([LOADER / "rammer.c", source], program)
    plain, signed = start(program, shipped), start(program, shipped, "KEY.pub")
    assert plain.returncode == NOT_TRUSTED - REFUSED and "only if the caller trusts" in plain.stderr
    assert signed.returncode == NOT_TRUSTED - REFUSED and "signatures are not checked in C" in signed.stderr


@pytest.mark.parametrize("ranged", [False, True])
def test_damaged_files_are_refused(ranged: bool, shipped: Path, example: Path, seed: int, tmp_path: Path) -> None:
    drawn, data, refused = random.Random(seed), shipped.read_bytes(), 0
    if ranged:
        onnx.save(recurrent("t", np.random.default_rng(seed)), tmp_path / "m.onnx")
        write_file(tmp_path / "m.onnx", tmp_path / "r.rammer", shapes={"t": (1, 300)}, options={"executor": "waves"})
        data = (tmp_path / "r.rammer").read_bytes()
    for _ in range(MUTANTS):
        changed = drawn.choice(CHANGES)(drawn, data)
        (tmp_path / "m.rammer").write_bytes(changed)
        done = start(example, tmp_path / "m.rammer")
        assert done.returncode in (0, *range(REFUSED + 1, REFUSED + 8)), (done.returncode, done.stderr[-2000:])
        refused += done.returncode != 0
        if done.returncode == 0:
            with zipfile.ZipFile(io.BytesIO(changed)) as archive:
                texts = {i.filename: archive.read(i) for i in archive.infolist() if is_text(i.filename)}
                assert archive.comment.startswith(seal_of(texts)), "a file with a wrong digest was accepted"
    assert refused > MUTANTS / 4

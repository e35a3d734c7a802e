"""Files that ship: machine code, trust, signatures, targets, weights in the model's file, and files of earlier versions."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from command import Command
from onnx import numpy_helper, parser

import rammer as api
from rammer.compiled.artifact import is_text, save_artifact, seal_of, write_artifact
from rammer.compiled.artifact_reader import load_artifact
from rammer.compiled.segments import ProgramSegment
from rammer.device.manifest import MachineCode
from rammer.errors import BadInput
from rammer_testing.nonempty import some
from rammer_testing.small_models import MODELS

import rammer_rocm.build
from rammer_rocm.opened_unit import RunOnlyUnit

pytest.importorskip("cryptography", reason="needs cryptography: pip install 'rammer-core[test]'")
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEPT = sorted((Path(__file__).parent / "compiled_files").glob("*.rammer"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, rng = tmp_path_factory.mktemp("model") / "m.onnx", np.random.default_rng(5)
    onnx.save(MODELS["branches"].build(rng), path)
    return path


@pytest.fixture
def large(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Write a model whose weights are large enough to be mapped."""
    text = """<ir_version: 9, opset_import: ["": 21]> large (float[4,256] x) => (float[4,256] y)
        { c = MatMul(x, w)  s = Mul(c, k)  y = Relu(s) }"""
    made = parser.parse_model(text)
    for name, shape in (("w", (256, 256)), ("k", (256,))):
        made.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    onnx.save(made, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def write_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a new private and public key."""
    key, private, public = Ed25519PrivateKey.generate(), folder / f"{name}.pem", folder / f"{name}.pub"
    form = serialization.Encoding.PEM
    private.write_bytes(key.private_bytes(form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(form, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture(scope="module")
def shipped(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with machine code for the CPU here."""
    exe, path = api.compile(model, "rocm"), tmp_path_factory.mktemp("shipped") / "m.rammer"
    save_artifact(path, exe.artifact(exe.with_code(exe.compile_whole({}))))
    exe.close()
    return path


@pytest.fixture
def no_builds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the sources that the OpenCL runtime compiles from now on."""
    built, real = list[str](), rammer_rocm.build.build_program

    def noting(context: object, source: str, options: tuple[str, ...] = ()) -> object:
        built.append(source)
        return real(context, source, options)

    monkeypatch.setattr(rammer_rocm.build, "build_program", noting)
    yield built


def run_file(path: Path, **options: object) -> tuple[dict[str, np.ndarray], type]:
    """Run a compiled file on fixed inputs. Return the outputs, and the class of the opened device."""
    exe = api.compile(path, **options)  # type: ignore[arg-type]
    rng = np.random.default_rng(3)
    outputs = exe.run({p.name: rng.standard_normal(p.shape).astype(p.dtype) for p in exe.head.inputs})
    kind = exe.backend.__class__
    exe.close()
    return outputs, kind


def change_code(path: Path, change: Callable[[MachineCode], MachineCode]) -> Path:
    """Write a copy of a file with changed machine code and a valid seal."""
    artifact = load_artifact(path, trusted=True)
    (segment,) = artifact.compiled.segments
    assert isinstance(segment, ProgramSegment) and segment.code
    changed = replace(segment, code=tuple(map(change, segment.code)))
    save_artifact(path.with_name("changed.rammer"), replace(artifact, compiled=replace(artifact.compiled, segments=(changed,))))
    return path.with_name("changed.rammer")


def test_trusted_machine_code_runs_without_a_compiler(shipped: Path, no_builds: list[str]) -> None:
    rebuilt, kind = run_file(shipped)
    assert no_builds and not issubclass(kind, RunOnlyUnit)
    no_builds.clear()
    loaded, kind = run_file(shipped, trust=True)
    assert not no_builds and issubclass(kind, RunOnlyUnit)
    assert all(np.array_equal(loaded[n], rebuilt[n]) for n in some(loaded))


@pytest.mark.parametrize(("name", "options"), [("recurrence", {}), ("images", {}), ("images", {"executor": "waves"})])
def test_machine_code_computes_the_same_bits(
    name: str, options: dict[str, str], tmp_path: Path, rng: np.random.Generator
) -> None:
    chosen, path = MODELS[name], tmp_path / "m.rammer"
    exe, inputs = api.compile(chosen.build(rng).SerializeToString(), "rocm", options=options), chosen.inputs(rng, {})
    want = exe.run(inputs)
    save_artifact(path, exe.artifact(exe.with_code(exe.compile_whole({}))))
    exe.close()
    exe = api.compile(path, trust=True)
    have = exe.run(inputs)
    assert issubclass(exe.backend.__class__, RunOnlyUnit)
    assert all(np.array_equal(have[n], want[n]) for n in some(want))
    exe.close()


@pytest.mark.parametrize("rows", [5, 64])
def test_machine_code_of_a_range_runs_at_every_length(rows: int, tmp_path: Path, rng: np.random.Generator) -> None:
    text = """<ir_version: 9, opset_import: ["": 21]> ranged (float[n,64] x, float[64,32] w) => (float[n,32] y)
        { a = MatMul(x, w)  y = Softmax(a) }"""
    exe = api.compile(parser.parse_model(text).SerializeToString(), "rocm", shapes={"n": (1, 64)})
    inputs = {n: rng.standard_normal(s).astype(np.float32) for n, s in (("x", (rows, 64)), ("w", (64, 32)))}
    want = exe.run(inputs)["y"]
    save_artifact(tmp_path / "m.rammer", exe.artifact(exe.with_code(exe.compile_whole({}))))
    exe.close()
    exe = api.compile(tmp_path / "m.rammer", trust=True)
    assert issubclass(exe.backend.__class__, RunOnlyUnit)
    assert exe.run(inputs)["y"].shape == (rows, 32) and np.allclose(exe.run(inputs)["y"], want, 1e-5, 1e-6)
    exe.close()


def test_machine_code_of_an_untrusted_file_is_ignored(shipped: Path) -> None:
    def broken(code: MachineCode) -> MachineCode:
        return MachineCode(code.target, {"no": "record"}, {"binary": np.zeros(8, np.uint8)})

    path = change_code(shipped, broken)
    assert load_artifact(path).compiled.segments[0].code == ()  # type: ignore[union-attr]
    want, _ = run_file(shipped)
    have, kind = run_file(path)
    assert not issubclass(kind, RunOnlyUnit) and all(np.array_equal(have[n], want[n]) for n in some(want))


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"kernels": [], "packings": [], "users": {}},
        {"kernels": [["f", -1]], "packings": [], "users": {}},
        {"kernels": [["f", 0]], "packings": [], "users": {"nowhere": [0, []]}},
    ],
)
def test_malformed_machine_code_is_compiled_again(shipped: Path, record: object, capfd: pytest.CaptureFixture[str]) -> None:
    path = change_code(shipped, lambda code: MachineCode(code.target, record, code.arrays))  # type: ignore[arg-type]
    want, _ = run_file(shipped, trust=True)
    have, kind = run_file(path, trust=True)
    assert not issubclass(kind, RunOnlyUnit) and all(np.array_equal(have[n], want[n]) for n in some(want))
    assert "is malformed" in (said := capfd.readouterr().err) and "compiled again" in said


def test_code_for_another_target_is_compiled_again(shipped: Path, tmp_path: Path, no_builds: list[str]) -> None:
    with zipfile.ZipFile(shipped) as archive:
        parts = {n: archive.read(n) for n in archive.namelist()}
    head = json.loads(parts["head.json"])
    parts["head.json"] = json.dumps(head | {"code": "another driver"}).encode()
    with zipfile.ZipFile(tmp_path / "m.rammer", "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
        archive.comment = seal_of({n: d for n, d in parts.items() if is_text(n)})
    _, kind = run_file(tmp_path / "m.rammer", trust=True)
    assert no_builds and not issubclass(kind, RunOnlyUnit)


def test_a_signed_file_runs_with_its_key_only(rammer: Command, model: Path, tmp_path: Path) -> None:
    (private, public), (_, other) = write_keys(tmp_path, "mine"), write_keys(tmp_path, "other")
    path = tmp_path / "m.rammer"
    done = rammer("compile", model, "--device", "rocm", "--target", "here", "--sign", private, "-o", path)
    assert done.code == 0 and "machine code for here, signed)" in done.out
    assert rammer("run", path, "--trust-key", public).code == 0
    assert issubclass(run_file(path, trust_key=public)[1], RunOnlyUnit)
    done = rammer("run", path, "--trust-key", other)
    assert done.code == 2 and f"{path} has no valid signature of the key in {other}" in done.err
    # Without the key, the file is one of an unknown author.
    assert not issubclass(run_file(path)[1], RunOnlyUnit)


@pytest.mark.parametrize("place", ["start", "middle", "seal", "signature"])
def test_a_changed_byte_breaks_the_signature(shipped: Path, place: str, tmp_path: Path) -> None:
    private, public = write_keys(tmp_path, "mine")
    path = sign(shipped, private, tmp_path / "signed.rammer")
    api.compile(path, trust_key=public).close()
    data = bytearray(path.read_bytes())
    at = {"start": 10, "middle": len(data) // 2, "seal": len(data) - 150, "signature": len(data) - 1}[place]
    data[at] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(BadInput, match="signature"):
        api.compile(path, trust_key=public)


def sign(path: Path, key: Path, into: Path) -> Path:
    """Write a signed copy of a compiled file."""
    from rammer.cache.whole_files import write_whole
    from rammer.compiled.signature import UNSIGNED, sign_file

    def fill(file: object) -> None:
        write_artifact(file, load_artifact(path, trusted=True), comment=UNSIGNED)  # type: ignore[arg-type]
        sign_file(file, key)  # type: ignore[arg-type]

    write_whole(into, fill)
    return into


def test_an_unsigned_file_is_refused_with_a_key(shipped: Path, tmp_path: Path) -> None:
    _, public = write_keys(tmp_path, "mine")
    with pytest.raises(BadInput, match="has no signature"):
        api.compile(shipped, trust_key=public)
    (tmp_path / "no.pem").write_text("nothing")
    with pytest.raises(BadInput, match="is not a public key"):
        api.compile(shipped, trust_key=tmp_path / "no.pem")


def test_variants_share_constants_and_the_unit_chooses(model: Path, tmp_path: Path) -> None:
    whole, waves, path = api.compile(model, "rocm"), api.compile(model, "rocm", options={"executor": "waves"}), tmp_path / "m"
    made = [exe.artifact(exe.with_code(exe.compile_whole({}))) for exe in (waves, whole)]
    sizes = list[int]()
    for number, artifact in enumerate(made):
        save_artifact(tmp_path / str(number), artifact)
        sizes.append((tmp_path / str(number)).stat().st_size)
    save_artifact(path, *made)
    constants = sum(a.nbytes for s in made[0].compiled.segments for a in s.constants.values())  # type: ignore[union-attr]
    assert path.stat().st_size < sum(sizes) - constants / 2
    chosen = load_artifact(path, choose=lambda variants: 1, trusted=True)
    assert chosen.code_target == made[1].code_target != made[0].code_target
    want, _ = run_file(tmp_path / "1")
    have, kind = run_file(path, trust=True, options={"executor": "single"})
    assert issubclass(kind, RunOnlyUnit) and all(np.array_equal(have[n], want[n]) for n in some(want))
    for exe in (whole, waves):
        exe.close()


def test_weights_stay_in_the_models_file(rammer: Command, large: Path, tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside.rammer", tmp_path / "outside.rammer"
    for path, where in ((inside, "inside"), (outside, "external")):
        assert rammer("compile", large, "--device", "toy", "--weights", where, "-o", path).code == 0
    assert outside.stat().st_size < 10_000 < inside.stat().st_size
    want, have = run_file(inside)[0], run_file(outside)[0]
    assert all(np.array_equal(have[n], want[n]) for n in some(want))
    (tmp_path / "below").mkdir()
    done = rammer("compile", large, "--device", "toy", "--weights", "external", "-o", tmp_path / "below" / "m.rammer")
    assert done.code == 2 and "is not in the folder of" in done.err
    data = bytearray(large.read_bytes())
    data[len(data) // 2] ^= 0x40
    large.write_bytes(bytes(data))
    with pytest.raises(BadInput, match="are not those that were compiled"):
        api.compile(outside)
    large.unlink()
    with pytest.raises(BadInput, match="is not a compiled model"):
        api.compile(outside)


@pytest.mark.parametrize("place", ["../m.onnx", "{folder}/m.onnx", "link.onnx"])
def test_weights_outside_of_the_folder_are_refused(rammer: Command, large: Path, tmp_path: Path, place: str) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "m.onnx").write_bytes(large.read_bytes())
    (folder / "link.onnx").symlink_to(large)
    path = folder / "m.rammer"
    assert rammer("compile", folder / "m.onnx", "--device", "toy", "--weights", "external", "-o", path).code == 0
    with zipfile.ZipFile(path) as archive:
        parts = {n: archive.read(n) for n in archive.namelist()}
    assert b'"m.onnx"' in parts["head.json"]
    parts["head.json"] = parts["head.json"].replace(b'"m.onnx"', json.dumps(place.format(folder=tmp_path)).encode())
    with zipfile.ZipFile(path, "w") as archive:
        for n, data in parts.items():
            archive.writestr(n, data)
        archive.comment = seal_of({n: d for n, d in parts.items() if is_text(n)})
    with pytest.raises(BadInput, match="outside"):
        api.compile(path)


@pytest.mark.parametrize("path", [*some(KEPT)], ids=lambda path: path.stem)
def test_files_of_the_previous_minor_version_run(path: Path) -> None:
    weights, bias = (np.arange(32).reshape(8, 4) % 7 - 3).astype(np.float32) / 4, np.array([1, -1, 0.5, 0], np.float32)
    x = np.arange(16 * 8).reshape(16, 8).astype(np.float32) / 64
    exe = api.compile(path)
    for rows in (16, 5) if path.stem.endswith("range") else (16,):
        want = np.maximum(x[:rows] @ weights + bias, 0)
        assert np.allclose(exe.run({"x": x[:rows]})["y"], want, 1e-5, 1e-5)
    exe.close()

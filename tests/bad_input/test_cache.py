"""Corrupt and unwritable caches, and Ctrl-C during tuning: at most a warning, never a wrong result or a partial file."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from cases import Capture, Patch, arrays, model, saved

import rammer
from rammer.compiled.artifact import save_artifact
from rammer.compiled.artifact_reader import load_artifact
from rammer.device.manifest import OpenOptions
from rammer.ir.untrusted_json import load_json
from rammer.tuning.kernel_store import KernelStore, TunedKernel, decode_kernels
from rammer_testing.cache_files import content, entries, store
from rammer_testing.nonempty import some

from rammer_toy import ToyBackend

# --- the cache ----------------------------------------------------------------------------------------


def check_result(rng: np.random.Generator, path: Path | onnx.ModelProto, tune: str = "quick") -> None:
    given = arrays(rng)
    have = rammer.compile(path, device="toy", tune=tune).run(given)["y"]
    np.testing.assert_allclose(have, np.maximum(given["x"] @ given["w"], 0), rtol=1e-4, atol=1e-5)


def test_unwritable_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
) -> None:
    blocked = saved(tmp_path / "file", b"")
    monkeypatch.setenv("RAMMER_CACHE", str(blocked / "cache"))
    check_result(rng, saved(tmp_path / "m.onnx", model()))
    assert capsys.readouterr().err == (
        f"rammer: warning: cannot write to the cache {blocked}/cache: Not a directory; later processes start slower\n"
    )


def test_corrupt_measurements_are_made_again(
    own_cache: Path, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
) -> None:
    """Check damaged files, and malformed values under a valid checksum, with one warning each."""
    check_result(rng, model())
    paths = entries(own_cache, "tuned")
    assert paths
    for text in ("", "[]", "null", "{}", '[{"tile": [1]}]', '[{"tile": "x", "family": 3}]', "[[]]", '"7"', "\x00"):
        for path in paths:
            store(path, text)
        check_result(rng, model())
        assert capsys.readouterr().err.count("it is invalid") >= 1, text
    for path in paths:
        path.write_bytes(b"junk")
    check_result(rng, model())
    err = capsys.readouterr().err
    assert err.count("it is damaged; it is written again") == err.count("\n") >= 1
    check_result(rng, model())
    assert capsys.readouterr().err == ""


def test_corrupt_compiled_programs_and_heads(tmp_path: Path, own_cache: Path, capsys: Capture, rng: np.random.Generator) -> None:
    path = saved(tmp_path / "m.onnx", model())
    check_result(rng, path)
    (program,) = entries(own_cache, "programs")
    (head,) = entries(own_cache, "heads")
    whole = program.read_bytes()
    assert capsys.readouterr().err == ""
    for junk in (b"", b"junk", whole[:100], whole[:-30]):
        program.write_bytes(junk)
        head.write_bytes(junk)
        check_result(rng, path)
        said, err = capsys.readouterr().err.splitlines()
        assert said == f"rammer: warning: cached file {head} is not used: it is damaged; it is written again"
        assert err.startswith(f"rammer: warning: {program} is not a compiled model: ")
        assert err.endswith("; compiling again")
        assert program.stat().st_size == len(whole)
    check_result(rng, path)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_bit_flip_in_a_compiled_program_is_never_a_wrong_result(
    tmp_path: Path, own_cache: Path, rng: np.random.Generator
) -> None:
    path = saved(tmp_path / "m.onnx", model())
    check_result(rng, path)
    (program,) = entries(own_cache, "programs")
    whole = program.read_bytes()
    for place in rng.integers(0, len(whole), 30):
        data = bytearray(whole)
        data[place] ^= 1 << int(rng.integers(8))
        program.write_bytes(bytes(data))
        check_result(rng, path)


def test_programs_of_other_device_options_are_kept_beside_each_other(tmp_path: Path, own_cache: Path, capsys: Capture) -> None:
    """Check that options that change no program (memory size, executor) do not evict each other's files. The fingerprint does not
    contain these options."""
    path, given = saved(tmp_path / "m.onnx", model()), arrays(np.random.default_rng(0))
    ways = ({}, {"memory": "1000000"}, {"memory": "2000000"})
    for options in (*ways, *ways):
        rammer.compile(path, device="toy", options=options).run(given)
    assert len(entries(own_cache, "programs")) == len(ways)
    assert capsys.readouterr().err == ""


def test_programs_of_some_of_a_units_cores_are_kept_beside_those_of_all(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check alternating compiles for one core and for two cores."""
    path, given, begin = saved(tmp_path / "m.onnx", model()), arrays(np.random.default_rng(0)), ToyBackend.__init__
    for cores in (1, 2, 1, 2):

        def begun(self: ToyBackend, options: OpenOptions, cores: int = cores) -> None:
            begin(self, options)
            self.vdevice = replace(self.vdevice, veus=cores)

        monkeypatch.setattr(ToyBackend, "__init__", begun)
        rammer.compile(path, device="toy").run(given)
    assert len(entries(own_cache, "programs")) == 2


def test_a_kept_program_is_that_of_its_name(tmp_path: Path, own_cache: Path, capsys: Capture) -> None:
    """Check that a program file copied over that of an equal model with other weights is rejected: only their keys differ."""
    head = '<ir_version: 9, opset_import: ["" : 21]> m (float[4] x) => (float[4] y)'
    given, files = {"x": np.ones(4, np.float32)}, dict[float, tuple[Path, Path]]()
    for factor in (2.0, 3.0):
        body = "{ k = Constant<value = float {" + str(factor) + "}>() y = Mul(x, k) }"
        path = saved(tmp_path / f"{factor}.onnx", onnx.parser.parse_model(head + body))
        before = set(entries(own_cache, "programs"))
        assert rammer.compile(path, device="toy").run(given)["y"][0] == factor
        (new,) = set(entries(own_cache, "programs")) - before
        files[factor] = path, new
    files[3.0][1].write_bytes(files[2.0][1].read_bytes())
    assert rammer.compile(files[3.0][0], device="toy").run(given)["y"][0] == 3.0
    assert "was cached for other inputs or options; compiling again" in capsys.readouterr().err


def test_a_head_of_another_kind_is_read_again(tmp_path: Path, own_cache: Path, rng: np.random.Generator) -> None:
    path = saved(tmp_path / "m.onnx", model())
    check_result(rng, path)
    (head,) = entries(own_cache, "heads")
    for text in ("[]", "null", '{"name": "a", "inputs": [3], "outputs": []}', '{"inputs": [], "outputs": 4}'):
        store(head, text)
        check_result(rng, path)


def test_a_kept_program_has_the_ports_of_its_model(
    tmp_path: Path, own_cache: Path, capsys: Capture, rng: np.random.Generator
) -> None:
    """Programs that are complete and sealed under their key, but have a port of another name, type or shape."""
    path = saved(tmp_path / "m.onnx", model())
    check_result(rng, path)
    (program,) = entries(own_cache, "programs")
    kept = load_artifact(program)
    graph = kept.compiled.graph
    x, *others = graph.inputs
    for inputs, outputs in (
        ((replace(x, external="Infinity"), *others), graph.outputs),
        ((x,), graph.outputs),
        (graph.inputs, tuple(replace(v, external="z") for v in graph.outputs)),
    ):
        changed = replace(kept.compiled, graph=replace(graph, inputs=inputs, outputs=outputs))
        save_artifact(program, replace(kept, compiled=changed))
        check_result(rng, path)
        assert "compiling again" in capsys.readouterr().err
    check_result(rng, path)
    assert capsys.readouterr().err == ""


#: Python's JSON reader accepts these values, but our files never contain them.
NO_NUMBERS = ("Infinity", "-Infinity", "NaN", "1e999", "1.5", "true", "-1", '"7"')


def sound(kernels: Sequence[TunedKernel]) -> bool:
    """Return True if every number is a possible measurement."""
    counts = [n for k in kernels for n in (*k.tile, *asdict(k.resources).values())]
    times = [t for k in kernels for t in (k.alone, k.crowded)]
    return all(type(n) is int for n in counts) and all(min(k.tile) > 0 for k in kernels) and all(0 <= t < math.inf for t in times)


def test_entries_of_impossible_numbers_are_misses(own_cache: Path, capsys: Capture, rng: np.random.Generator) -> None:
    """Check every number replaced by an impossible one, under a valid checksum."""
    kernels = KernelStore.default()
    check_result(rng, model())
    assert kernels.cache is not None
    for path in some([p for p in entries(own_cache, "tuned") if content(p).startswith("[")]):
        text = content(path)
        numbers = [m.span() for m in re.finditer(r"-?[0-9][0-9.e+-]*", text)]
        assert kernels.cache.get(path.name, decode_kernels) and len(numbers) > 5
        for begin, end in numbers:
            for number in NO_NUMBERS:
                store(path, text[:begin] + number + text[end:])
                assert sound(kernels.cache.get(path.name, decode_kernels) or ()), number
        store(path, text)
    capsys.readouterr()
    check_result(rng, model())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["Infinity", "-Infinity", "NaN", "[1, 1e999]", '{"a": -1e400}', "[" * 100_000])
def test_json_of_no_number_is_no_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a JSON number|nested"):
        load_json(text)


def test_a_head_under_a_right_checksum_says_what_the_model_says(
    tmp_path: Path, own_cache: Path, rng: np.random.Generator
) -> None:
    path = saved(tmp_path / "m.onnx", model())
    check_result(rng, path)
    (head,) = entries(own_cache, "heads")
    text = content(head)
    extent = json.loads(text)["inputs"][0]["shape"][0]
    for old, new in (
        ('"float32"', '"float31"'),
        ('"float32"', "Infinity"),
        (f"[{extent}", "[NaN"),
        (f"[{extent}", "[-3"),
        (f"[{extent}", "[[]"),
        ('"name": "x"', '"name": 7'),
        ('"inputs"', '"in"'),
    ):
        assert old in text
        store(head, text.replace(old, new))
        check_result(rng, path)


# --- Ctrl-C during tuning -----------------------------------------------------------------------------

WAITS = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
import numpy as np
import rammer_toy
from rammer.cli.main import main
from rammer.tuning import measure_process

measure_process.opening_of = lambda backend: None  # the slow clock is this process's
seen = []
real = rammer_toy.ToyProfiler.task_time

def slow(self, kernel, binding):
    seen.append(kernel.operator.name)
    if len(set(seen)) == 3:  # two operators are in the store by now
        print("tuning", flush=True)
        time.sleep(1000)
    return real(self, kernel, binding)

rammer_toy.ToyProfiler.task_time = slow
sys.argv = ["rammer", "run", sys.argv[1], "--device", "toy", "--tune", "quick"]
main()
"""
# Three independent products: they stay three operators, whichever operators the device connects.
PRODUCTS = """<ir_version: 9, opset_import: ["" : 21]> products (float[4,8] x, float[8,5] a, float[8,7] b, float[8,3] c)
    => (float[4,5] m, float[4,7] n, float[4,3] y) {
    m = MatMul(x, a)
    n = MatMul(x, b)
    y = MatMul(x, c)
}"""


@pytest.mark.slow
def test_interrupted_tuning_leaves_the_store_whole(tmp_path: Path, own_cache: Path) -> None:
    import signal

    path = saved(tmp_path / "m.onnx", model(PRODUCTS))
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", WAITS, path], stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "tuning\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)  # far shorter than its sleep
    assert (process.returncode, out) == (130, "")
    assert err == "\nrammer: interrupted; no file was partially written\n"
    assert not list(own_cache.rglob("*.partial")) and {p.parts[-3] for p in entries(own_cache)} == {"heads", "tuned"}
    assert len(entries(own_cache, "tuned")) == 2
    exe = rammer.compile(path, device="toy", tune="quick")
    exe.specialise({})  # finishes tuning, starting from the two stored kernels
    assert exe.compiler.tuner.store.hits == 2
    assert len(entries(own_cache, "tuned")) == 5  # and the times of the programs with and without measured kernels


def test_an_interrupted_write_leaves_no_partial_file(
    tmp_path: Path, own_cache: Path, monkeypatch: Patch, rng: np.random.Generator
) -> None:
    import rammer.compiled.artifact as artifact

    def interrupted(*args: object) -> bytes:
        raise KeyboardInterrupt

    path = saved(tmp_path / "m.onnx", model())
    monkeypatch.setattr(artifact, "_pack_arrays", interrupted)
    with pytest.raises(KeyboardInterrupt):
        check_result(rng, path)
    assert not list(own_cache.rglob("*.partial")) and not entries(own_cache, "programs")
    monkeypatch.undo()
    monkeypatch.setenv("RAMMER_CACHE", str(own_cache))
    check_result(rng, path)

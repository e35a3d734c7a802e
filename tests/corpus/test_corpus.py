"""Every model of the corpus on every device against ONNX Runtime, at the exported sizes and two further ones."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from corpus_inputs import HERE, Entry, corpus
from onnx import numpy_helper

from rammer.compile_options import CompileOptions
from rammer.device.loader import Registry
from rammer.errors import RammerError
from rammer.jit.onnx_source import open_source
from rammer.runtime.executable import Executable
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some
from rammer_testing.seeds import seed_of

#: Number of models that ``make test`` runs on each device; `make corpus` runs all.
SAMPLE = {"rocm": 3, "ipu_sim": 2}
OPTIONS = {"ipu_sim": {"tiles": "64"}}
#: Models that take too long for that sample: a recurrence of integers compiles for 10 s or more a size.
LONG = {"lstm_dynamic"}
#: Refused models, with the error message that the README lists. One that runs fails the test until it is removed.
REFUSED: dict[str, str] = {
    "swin_tv_dynamo_ort_all": "com.microsoft.nchwc",  # the layout of one CPU, in a form that only ONNX Runtime reads
}
#: Forbidden content of files: folders of the author, and source files.
PATHS = re.compile(rb"/(?:root|home|work|tmp|usr|opt)/|site-packages|\w{3,}\.py\b")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise tests with models of every device. Models outside this run's random sample are marked ``large``."""
    if "entry" not in metafunc.fixturenames:
        return
    run, made = metafunc.config.getoption("--seed"), list[object]()
    for device in ("rocm", "ipu_sim", "cuda"):
        entries = list(corpus().values())
        short = [e.name for e in entries if e.name not in LONG]
        order = np.random.default_rng(seed_of(run, f"corpus on {device}")).permutation(len(short))
        chosen = {short[n] for n in order[: SAMPLE[device]]} if device in SAMPLE else {e.name for e in entries}
        for entry in entries:
            marks = [pytest.mark.cuda] if device == "cuda" else [] if entry.name in chosen else [pytest.mark.large]
            made.append(pytest.param(entry, device, id=f"{entry.name}-{device}", marks=marks))
    metafunc.parametrize(("entry", "device"), made)


def opened(entry: Entry, device: str) -> Executable:
    """Compile the model for a device, without a cache."""
    registry = Registry()
    backend = registry.open(device, options=OPTIONS.get(device, {}))
    return Executable(open_source(entry.path), backend, device, CompileOptions(), registry, store=KernelStore(None), owner=True)


@pytest.mark.slow
def test_a_model_agrees_with_onnxruntime(entry: Entry, device: str, rng: np.random.Generator) -> None:
    if Registry().status(device).state != "ok":
        pytest.skip(f"{device} does not work here")
    try:
        exe = opened(entry, device)
        try:
            for sizes in some(entry.sizes):
                inputs = entry.inputs(rng, sizes)
                want, have = entry.expected(inputs), exe.run(inputs)
                assert not (wrong := [f"{n}: {w}" for n, v in some(want.items()) if (w := entry.differs(have[n], v))]), wrong
        finally:
            exe.close()
    except RammerError as problem:
        assert entry.name in REFUSED and re.search(REFUSED[entry.name], str(problem)), problem
    else:
        assert entry.name not in REFUSED, "it runs now"


def test_files_and_entries_are_the_same_and_small() -> None:
    files = {p.stem: p for p in (HERE / "models").glob("*.onnx")}
    assert set(files) == set(corpus()) and len(files) >= 150
    assert sum(p.stat().st_size for p in some((HERE / "models").iterdir())) <= 10_000_000
    assert not (told := [n for n, p in files.items() if PATHS.search(p.read_bytes())]), told
    for entry in some(corpus().values()):
        dims = {d for _, shape, _ in entry.said["inputs"].values() for d in shape if isinstance(d, str)}
        assert all(set(sizes) == dims for sizes in some(entry.sizes)) and len(entry.sizes) == (3 if dims else 1)


@pytest.mark.large
def test_why_a_dynamically_quantised_lstm_differs(rng: np.random.Generator) -> None:
    """Check that the state is quantised over the whole batch, as ONNX Runtime does on one thread.

    On four threads, ONNX Runtime quantises each thread's rows. Weights become unsigned, since sums of signed ones overflow in
    ONNX Runtime on CPUs without VNNI."""
    entry = corpus()["lstm_dynamic"]
    inputs = entry.inputs(rng, {"batch": 4, "steps": 6})
    model = onnx.load(entry.path)
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.INT8:
            codes = (numpy_helper.to_array(tensor).astype(np.int16) + 128).astype(np.uint8)
            tensor.CopyFrom(numpy_helper.from_array(codes, tensor.name))
    one, four = (session(model, threads).run(None, inputs) for threads in (1, 4))
    exe = opened(entry, "ipu_sim")
    try:
        have = exe.run(inputs)
    finally:
        exe.close()
    for name, want in some(dict(zip(entry.expected(inputs), one, strict=True)).items()):
        np.testing.assert_allclose(have[name], want, rtol=1e-4, atol=1e-5)
    assert max(float(np.abs(a - b).max()) for a, b in zip(one, four, strict=True)) > 1e-4


def session(model: onnx.ModelProto, threads: int) -> ort.InferenceSession:
    """Return a session of ONNX Runtime with ``threads`` threads."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

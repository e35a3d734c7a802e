"""The Python interface of executables: inputs in several forms, limits, copies, futures, messages and descriptions."""

import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, parser

import rammer
from rammer.compile_options import Request
from rammer.compiled.artifact import save_artifact
from rammer.device.bound import Bound
from rammer.errors import BadInput, DeviceFailure, logger, print_warning
from rammer.jit.session import open_executable
from rammer.runtime.executable import Executable
from rammer.runtime.loaded_model import bytes_of
from rammer_testing.judge import relative_error
from rammer_testing.nonempty import some


def two_products() -> ModelProto:
    return parser.parse_model("""<ir_version: 9, opset_import: ["" : 21]>
        pair (float[n,8] a, float[8,8] b) => (float[n,8] y) { c = MatMul(a, b) d = Softmax(c) y = MatMul(d, b) }""")


@pytest.fixture
def executable() -> Iterator[Executable]:
    with rammer.compile(two_products(), "rocm") as exe:
        yield exe


class OnlyDlpack:
    """An array of a library that has DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def html_of(executable: Executable) -> str:
    """Return the table that a notebook shows."""
    return str(getattr(executable, "_repr_html_")())  # noqa: B009 - the name is the notebook's


def feeds(rng: np.random.Generator, rows: int = 4) -> list[Any]:
    return [rng.standard_normal((n, 8)).astype(np.float32) for n in (rows, 8)]


def test_inputs_have_several_forms(executable: Executable, rng: np.random.Generator) -> None:
    a, b = feeds(rng)
    want = executable.run({"a": a, "b": b})["y"]
    for given in ((a, b), ([a, b],), ((a, b),), (OnlyDlpack(a), OnlyDlpack(b)), ({"b": b, "a": a},)):
        np.testing.assert_array_equal(executable.run(*given)["y"], want)
    with executable.bind([a, b]) as bound:
        bound.run()
        np.testing.assert_array_equal(bound.to_host()["y"], want)
    assert bound.closed
    for wrong in ((), (a,), (a, b, a)):
        with pytest.raises(BadInput, match=f"{len(wrong)} inputs were given, the model has 2"):
            executable.run(*wrong)


def test_ports_are_known_before_a_run(executable: Executable, tmp_path: Path) -> None:
    ports = [(p.name, p.dtype, p.shape) for p in (*executable.inputs, *executable.outputs)]
    assert ports == [("a", "float32", ("n", 8)), ("b", "float32", (8, 8)), ("y", "float32", ("n", 8))]
    with open_executable(two_products(), "rocm", Request(lengths={"n": (1, 16)})) as ranged:
        save_artifact(tmp_path / "m.rammer", ranged.artifact(ranged.compile_whole({})))
    with rammer.compile(tmp_path / "m.rammer") as opened:
        assert [(p.name, p.dtype, p.shape) for p in (*opened.inputs, *opened.outputs)] == ports


def test_closed_at_the_end_of_a_context(rng: np.random.Generator) -> None:
    with rammer.compile(two_products(), "rocm") as exe:
        exe.run(feeds(rng))
    with pytest.raises(DeviceFailure, match="closed"):
        exe.run(feeds(rng))


def test_submitted_runs_and_calls_are_futures(executable: Executable, rng: np.random.Generator) -> None:
    a, b = feeds(rng)
    futures = [executable.submit(a * k, b) for k in range(4)]
    for k, future in enumerate(futures):
        np.testing.assert_array_equal(future.result(60)["y"], executable.run(a * k, b)["y"])
    with pytest.raises(BadInput, match="has rank 1"):
        executable.submit(a[0], b).result(60)
    with executable.bind([a.copy(), b]) as bound:
        futures = [bound.submit({"a": a * k}) for k in range(4)]  # each writes, runs and reads as one step
        for k, future in enumerate(futures):
            np.testing.assert_array_equal(future.result(60)["y"], executable.run(a * k, b)["y"])
        with pytest.raises(BadInput, match="has no input 'other'"):
            bound.submit({"other": a}).result(60)


def test_copies_run_side_by_side(rng: np.random.Generator) -> None:
    with rammer.compile(two_products(), "rocm", copies=3) as exe:
        a, b = feeds(rng)
        want = exe.run(a, b)["y"]
        (special,) = exe.cache.values()
        running, release = threading.Semaphore(0), threading.Event()

        def wait_in_run(*_: Any) -> None:
            running.release()
            release.wait(60)

        calls = [threading.Thread(target=special.run, args=({"a": a, "b": b}, wait_in_run)) for _ in range(4)]
        for call in calls:
            call.start()
        assert all(running.acquire(timeout=60) for _ in range(3)), "three runs are not side by side"
        assert not running.acquire(timeout=0.2), "a fourth copy ran"
        assert len(special.further) == 2 and special.nbytes == 3 * bytes_of(special.compiled)
        release.set()
        for call in calls:
            call.join(60)
        results = [f.result(60)["y"] for f in [exe.submit(a, b) for _ in range(12)]]
        assert all(np.array_equal(r, want) for r in some(results)) and len(special.further) == 2


def test_one_copy_is_the_default(executable: Executable, rng: np.random.Generator) -> None:
    [f.result(60) for f in [executable.submit(feeds(rng)) for _ in range(8)]]
    (special,) = executable.cache.values()
    assert not special.further


def test_memory_limits_loaded_programs() -> None:
    def load(exe: Executable, rows: int) -> int:
        return exe.specialise({"a": (rows, 8), "b": (8, 8)}).nbytes

    with rammer.compile(two_products(), "rocm") as exe:
        exe.length_history.on = False  # a program for each size
        small, large = load(exe, 4), load(exe, 64)
    with rammer.compile(two_products(), "rocm", memory=large - 1) as exe:
        exe.length_history.on = False
        assert load(exe, 4) == small
        with pytest.raises(DeviceFailure, match=rf"needs {large} bytes, the limit is {large - 1}, 0 are in use"):
            load(exe, 64)
    with rammer.compile(two_products(), "rocm", memory=large) as exe:
        exe.length_history.on = False
        load(exe, 4)
        load(exe, 64)
        assert len(exe.cache) == 1, "the first program was not freed"


@pytest.mark.parametrize("option", [{"cores": -1}, {"memory": -1}, {"copies": 0}, {"cores": 1.5}, {"copies": True}])
def test_limits_are_checked(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(BadInput, match=f"{name} is .*, not a whole number of at least"):
        rammer.compile(two_products(), "rocm", **option)


def test_cores_limit_a_cpu(rng: np.random.Generator) -> None:
    with rammer.compile(two_products(), "rocm", cores=1) as exe, rammer.compile(two_products(), "rocm") as whole:
        assert exe.backend.vdevice.veus == 1 and exe.device_options == {"cores": "1"}
        a, b = feeds(rng, 64)
        assert relative_error(exe.run(a, b)["y"], whole.run(a, b)["y"]) < 1e-6
        (special,) = exe.cache.values()
        assert all(p.veus == 1 for p in some(special.compiled.programs))
    with rammer.compile(two_products(), "rocm", cores=10**6) as exe:
        assert exe.backend.vdevice.veus == whole.backend.vdevice.veus
    with pytest.raises(BadInput, match="device ipu_sim has no option 'cores'"):
        rammer.compile(two_products(), "ipu_sim", cores=1)


def test_progress_is_reported(rng: np.random.Generator) -> None:
    steps = list[tuple[str, str]]()
    with rammer.compile(two_products(), "rocm", progress=lambda step, detail: steps.append((step, detail))) as exe:
        exe.run(feeds(rng))
    assert steps and all(isinstance(text, str) for step in steps for text in step)


def test_messages_are_records_of_a_logger(
    rng: np.random.Generator, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "rammer"):
        print_warning("100% strange\x07")
        with rammer.compile(two_products(), "rocm") as exe:
            exe.run(feeds(rng))
    assert [(r.name, r.levelname) for r in caplog.records] == [("rammer", "WARNING"), ("rammer", "INFO")]
    assert caplog.records[1].getMessage().startswith("compiled pair for rocm:0 in ")
    assert "rammer: warning: 100% strange\\x07\n" in capsys.readouterr().err


def test_the_application_prints_messages(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("app: %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        logger().warning("once")
    finally:
        logging.getLogger().removeHandler(handler)
    assert capsys.readouterr().err == "app: rammer: once\n"


def test_executables_describe_themselves(executable: Executable, rng: np.random.Generator) -> None:
    ports = "(a: float32[n,8], b: float32[8,8]) -> (y: float32[n,8])"
    assert repr(executable) == f"<Executable pair on rocm:0 in float32: {ports}, 0 programs loaded>"
    executable.run(feeds(rng))
    assert "1 program loaded, last run " in repr(executable) and "\n" not in repr(executable)
    bound = executable.bind(feeds(rng))
    assert isinstance(bound, Bound)
    text = "<BoundCall pair: (a: float32[4,8], b: float32[8,8]) -> (y: float32[4,8])"
    assert repr(bound) == f"{text}>"
    bound.close()
    assert repr(bound) == f"{text}, closed>"
    table = html_of(executable)
    assert table.startswith("<table>") and table.count("<tr>") == 4 and "float32[n,8]" in table
    executable.close()
    assert repr(executable).endswith(", closed>")


def test_html_is_escaped() -> None:
    model = two_products()
    model.graph.name = "<b>"
    with rammer.compile(model, "rocm") as exe:
        assert "<caption>&lt;b&gt; on rocm" in html_of(exe)


def test_many_inputs_are_shortened() -> None:
    inputs = ", ".join(f"float[2] x{i}" for i in range(9))
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["" : 21]> m ({inputs}) => (float[2] y) {{ y = Sum(x0, x8) }}')
    with rammer.compile(model, "rocm") as exe:
        assert "x3: float32[2], and 5 more) ->" in repr(exe)

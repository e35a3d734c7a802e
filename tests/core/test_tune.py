"""Tuning and the kernel store: kernels are measured once, reused, and never trusted when damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import onnx
import pytest

from rammer.cache.cache_keys import key_of
from rammer.compile_options import MEASURED, CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Array, Backend, Binding, OpenOptions
from rammer.errors import DeviceFailure
from rammer.frontend.read.reader import read_model
from rammer.fusion.tile_search import candidates
from rammer.ir.operator import Resources, RKernel, ROperator
from rammer.ir.program import Port, RProgram
from rammer.jit.self_test import tiny_graph
from rammer.tuning.kernel_store import KernelStore, TunedKernel
from rammer.tuning.tuner import Tuner
from rammer_testing.cache_files import entries
from rammer_testing.cache_files import store as cache_store
from rammer_testing.nonempty import some

from rammer_toy import ToyBackend, ToyProfiler

PORTS = ((Port("x", "x"),), (Port("y", "y"),))


class Predicted(ToyProfiler):
    """A profiler that measures the predicted times."""

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        return kernel.alone, kernel.crowded


class Simulated(ToyBackend):
    """A device of sixteen units with many tiles, and a clock that returns predicted times."""

    def __init__(self) -> None:
        super().__init__(OpenOptions())
        self.vdevice = replace(self.vdevice, veus=16, simulated=True)
        self.profiler = Predicted(self)

    def candidates(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        return candidates(operator, binding, self.vdevice, 16)


@pytest.fixture
def backend() -> Backend:
    return Simulated()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "cache"


def tuned(backend: Backend, path: Path, level: str = "quick") -> Compiler:
    store = KernelStore(path)
    compiler = Compiler(backend, CompileOptions("wavefront", level), store)
    compiler.program(tiny_graph(0), *PORTS)
    return compiler


def test_the_second_compile_measures_nothing(backend: Backend, path: Path) -> None:
    assert tuned(backend, path).tuner.measured > 0
    again = tuned(backend, path)
    assert again.tuner.measured == 0
    assert again.store.hits > 0


def test_levels_are_kept_apart_and_off_measures_nothing(backend: Backend, path: Path) -> None:
    quick = tuned(backend, path).tuner.measured
    full = tuned(backend, path, "full").tuner.measured
    assert quick < full
    assert tuned(backend, path, "off").tuner.measured == 0


def test_measured_times_are_labelled_and_reach_the_program(backend: Backend, path: Path) -> None:
    store = KernelStore(path)
    compiler = Compiler(backend, CompileOptions("sequential", "quick"), store)
    segment = compiler.program(tiny_graph(0), *PORTS)
    kernels = [k for ks in segment.kernels.values() for k in ks]
    assert {k.origin for k in kernels} == {"simulated"}
    assert all(0 < k.alone <= k.crowded for k in some(kernels))
    chosen = {o.name: o.tile for o in segment.program.operators}
    for name, found in some(segment.kernels.items()):
        assert chosen[name] in {k.operator.tile for k in found}


def test_equal_operators_are_tuned_once(backend: Backend, path: Path) -> None:
    store = KernelStore(path)
    compiler = Compiler(backend, CompileOptions("wavefront", "quick"), store)
    segment = compiler.program(tiny_graph(0), *PORTS)
    before = compiler.tuner.measured
    operator = segment.program.operators[0]
    binding = Binding.of(segment.program, segment.constants)
    compiler.tuner.kernels(replace(operator, tile=(), family="", config=()).renamed("another"), binding)
    assert compiler.tuner.measured == before


Asked = tuple[Tuner, ROperator, Binding]


def asked(backend: Backend, level: str, extra: Callable[[ROperator, Binding], Sequence[ROperator]]) -> Asked:
    """Return a tuner with third-party candidates, an operator and its binding."""
    segment = Compiler(backend, CompileOptions("wavefront"), KernelStore(None)).program(tiny_graph(0), *PORTS)
    operator = replace(segment.program.operators[0], tile=(), family="", config=())
    return Tuner(backend, KernelStore(None), level, extra), operator, Binding.of(segment.program, segment.constants)


def whole(operator: ROperator, binding: Binding) -> list[ROperator]:
    """Return one task for the whole operator: slow, compared with 16 tiles."""
    return [replace(operator, tile=operator.anchor.shape)]


def test_third_parties_win_by_time_and_not_by_coming_first(backend: Backend) -> None:
    tuner, operator, binding = asked(backend, "off", whole)
    own = tuner.backend.candidates(operator, binding)
    first = tuner.kernels(operator, binding)[0].operator
    assert first.tile == own[0].tile != operator.anchor.shape
    # A device whose first candidates are slow: the third party's is selected.
    slow = whole(operator, binding)
    better = asked(backend, "off", lambda o, b: own[:1])[0]
    other = SimpleNamespace(kernel=backend.kernel, vdevice=backend.vdevice, fingerprint="slow", candidates=lambda o, b: slow)
    better.backend = cast(Backend, other)
    assert better.kernels(operator, binding)[0].operator.tile == own[0].tile


def test_a_third_partys_candidate_that_the_device_refuses_is_passed_over(backend: Backend) -> None:
    tuner, operator, binding = asked(backend, "off", lambda o, b: [replace(n, family="newer") for n in whole(o, b)])
    for problem in (DeviceFailure("no such family"), KeyError("newer")):

        def kernel(option: ROperator, known: Binding, problem: Exception = problem) -> RKernel:
            if option.family:
                raise problem
            return backend.kernel(option, known)

        fake = SimpleNamespace(kernel=kernel, vdevice=backend.vdevice, fingerprint="old", candidates=backend.candidates)
        tuner.backend = cast(Backend, fake)
        if isinstance(problem, DeviceFailure):
            assert tuner.offered(operator, binding)[0].family == ""
        else:
            with pytest.raises(KeyError) as caught:
                tuner.offered(operator, binding)
            assert caught.value.culprit.family == "newer"  # type: ignore[attr-defined]


def test_no_list_hides_a_third_partys_best(backend: Backend) -> None:
    added = [replace(o, config=(("mine", n),)) for n in range(3) for o in whole(*asked(backend, "off", whole)[1:])]
    tuner, operator, binding = asked(backend, "quick", lambda o, b: added)
    options = tuner.offered(operator, binding)[: MEASURED["quick"]]
    own = backend.candidates(operator, binding)
    assert [o in added for o in options] == [True, False, False, False]
    assert [o.tile for o in options[1:]] == [o.tile for o in own[:3]]


def test_a_fallback_does_not_replace_a_named_family_by_prediction(backend: Backend) -> None:
    tuner, operator, binding = asked(backend, "off", lambda o, b: [])
    fallback, named = whole(operator, binding)[0], replace(backend.candidates(operator, binding)[0], family="named")
    assert backend.kernel(fallback, binding).busy_time() < backend.kernel(named, binding).busy_time()
    backend.candidates = lambda o, b: (named, fallback)  # type: ignore[method-assign]
    assert [k.operator.family for k in tuner.kernels(operator, binding)] == ["named"]


def test_what_was_tuned_with_other_plugins_is_not_used(backend: Backend) -> None:
    tuner, operator, binding = asked(backend, "quick", lambda o, b: ())
    tuner.kernels(operator, binding)
    again = Tuner(backend, tuner.store, "quick", extensions="extra=1+abc")
    again.kernels(operator, binding)
    assert again.measured == tuner.measured > 0
    same = Tuner(backend, tuner.store, "quick", extensions="extra=1+abc")
    same.kernels(operator, binding)
    assert same.measured == 0


def test_a_damaged_entry_is_a_miss(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = KernelStore(path)
    kernel = TunedKernel((1, 2), "", (("threads", 4),), Resources(4, 8, 16, 0), 1e-6, 2e-6, "measured")
    store.put(key_of("a"), [kernel])
    assert KernelStore(path).get(key_of("a")) == (kernel,)
    (entry,) = entries(path)
    cache_store(entry, '[{"tile": [1]}]')
    assert KernelStore(path).get(key_of("a")) is None
    assert capsys.readouterr().err.count(f"cached file {entry} is not used: it is invalid") == 1


def test_a_folder_that_cannot_be_written_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = KernelStore(tmp_path / "file")
    assert store.get(key_of("a")) is None
    kernel = TunedKernel((1,), "", (), Resources(), 1e-6, 2e-6, "measured")
    for name in ("a", "b"):
        store.put(key_of(name), [kernel])
        assert store.get(key_of(name)) == (kernel,)
    assert capsys.readouterr().err.count("cannot write to the cache") == 1


class Crowded(Predicted):
    """A profiler that reverses the order of predicted kernel times. The program ``plain`` takes a second, and any other program
    ``together`` seconds."""

    def __init__(self, backend: ToyBackend, together: float, plain: str) -> None:
        super().__init__(backend)
        self.together, self.plain, self.runs = together, plain, 0

    def task_time(self, kernel: RKernel, binding: Binding) -> tuple[float, float]:
        seconds = 1e-12 / kernel.alone
        return seconds, seconds

    def program_time(self, program: RProgram, constants: Mapping[str, Array], repeats: int = 5) -> float:
        self.runs += 1
        return 1.0 if str(program) == self.plain else self.together


def compiled(together: float, path: Path, level: str = "quick", plain: str = "") -> tuple[ProgramSegment, int]:
    """Return the program of a small model, and the number of programs that were run for it. Tuned kernels take ``together``
    seconds side by side."""
    backend = Simulated()
    backend.profiler = profiler = Crowded(backend, together, plain)
    text = '<ir_version: 9, opset_import: ["" : 18]> g (float[64, 48] x) => (float[64, 48] y) { a = Exp(x) y = Softmax(a) }'
    model = read_model(onnx.parser.parse_model(text))
    store = KernelStore(path)
    made = Compiler(backend, CompileOptions("sequential", level), store).compile_model(model, {})
    (segment,) = made.segments
    assert isinstance(segment, ProgramSegment)
    return segment, profiler.runs


@pytest.fixture
def plain(path: Path) -> str:
    """Return the program without measured kernels."""
    segment, runs = compiled(1.0, path, "off")
    assert runs == 0 and not segment.choice
    return str(segment.program)


def test_kernels_that_are_slow_together_are_not_kept(path: Path, plain: str) -> None:
    segment, runs = compiled(1.1, path, plain=plain)
    assert str(segment.program) == plain and runs == 4  # two of them compare regions
    assert segment.choice == "sequential; predicted kernels, by measurement: measured kernels 1100 ms, predicted kernels 1000 ms"
    segment, runs = compiled(1.1, path, plain=plain)
    assert str(segment.program) == plain and runs == 0 and "by measurement before" in segment.choice


def test_kernels_that_are_fast_together_are_kept(path: Path, plain: str) -> None:
    segment, runs = compiled(0.9, path, plain=plain)
    assert str(segment.program) != plain and runs == 4
    assert segment.choice.startswith("sequential; measured kernels, by measurement: ")

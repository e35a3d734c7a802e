"""The command for all tables: listing, measuring, writing and refusals."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tables_command
from click.testing import CliRunner, Result
from measuring import Settings, Subject, Way, measured, opened, subject
from registry import TABLES
from replay import Found, Replay, graphs_of, searched
from result import Result as Table
from result import both
from tables import opencl, scheduling
from tables.stitching import Kernels, launched, traced, xla_kernels
from zoo import ZOO

from rammer.cache import Cache
from rammer.errors import BadInput, DeviceFailure
from rammer.schedule.ios import IOS
from rammer_testing.cache_files import entries
from rammer_testing.nonempty import some

ROOT = Path(__file__).parents[2]
TINY = ("--device", "ipu_sim", "--option", "tiles=8", "--rounds", "1")
QUIET = Settings(("ipu_sim",), (), options={"tiles": "8"}, rounds=1, say=lambda text: None)


def called(*words: str) -> Result:
    return CliRunner().invoke(tables_command.main, words, catch_exceptions=True)


@pytest.fixture(scope="module")
def small() -> Subject:
    return subject("squeezenet_bypass:small", 3)


def test_every_table_is_listed_and_there() -> None:
    text = called("--list").output
    for table in some(TABLES.values()):
        assert re.search(rf"^{table.name} +{re.escape(table.what)}", text, re.MULTILINE)
        if table.script:
            assert (ROOT / "benchmarks" / f"{table.where}.py").is_file()
        else:
            module, _, function = table.where.partition(":")
            assert callable(getattr(__import__(module, fromlist=["x"]), function))
            assert set(table.models.split(",")) <= {*ZOO, "*"}


def test_every_script_has_the_options_that_it_is_given() -> None:
    for table in some(t for t in TABLES.values() if t.spelled):
        text = (ROOT / "benchmarks" / f"{table.where}.py").read_text()
        for word in some(re.findall(r"--[a-z-]+", " ".join(table.spelled.values()))):
            assert f'"{word}"' in text, f"{table.name}: {table.where}.py has no option {word}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", ["policies", "rammer-ablation", "ios-five-bars", "ios-pruning", "ios-batch", "stitching-kernels"]
)
def test_a_table_is_measured_and_written(name: str, tmp_path: Path) -> None:
    done = called(name, *TINY, "--models", "alexnet", "--small", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    text = (tmp_path / f"ipu_sim_{name.replace('-', '_')}.md").read_text()
    assert f"`python -m benchmarks {name} --device ipu_sim --models alexnet:small" in text
    assert "alexnet:small" in text and "## Environment" in text and "numpy" in text


def test_the_ratios_of_two_devices_have_a_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opencl, "REQUEST", {"policy": "sequential"})
    done = called("opencl", *TINY, *TINY[:2], "--models", "nerf_mlp,alexnet", "--small", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    text = (tmp_path / "ipu_sim_opencl.md").read_text()
    ratios = [float(row.split("|")[5]) for row in text.splitlines() if ":small " in row and row.startswith("|")]
    mean = re.search(r"Geometric mean of rocm / cuda: (.*) over 2 models", text)
    assert mean is not None and float(mean[1]) == pytest.approx(math.prod(ratios) ** 0.5, abs=2e-3)


@pytest.mark.slow
def test_a_table_grows_model_by_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that --keep retains rows of other models and replaces those of a remeasured model, in one environment."""
    monkeypatch.setattr(scheduling, "FIVE", scheduling.FIVE[:1])
    words = ("ios-five-bars", *TINY, "--small", "--out", str(tmp_path), "--keep")
    path = tmp_path / "ipu_sim_ios_five_bars.md"
    assert called(*words, "--models", "alexnet").exit_code == 0
    first = path.read_text()
    for _ in range(2):
        assert called(*words, "--models", "nerf_mlp").exit_code == 0
        both = path.read_text()
        rows = [line for line in both.splitlines() if line.startswith("| ")]
        assert [r.split()[1] for r in rows] == ["model", "alexnet:small", "nerf_mlp:small"]
        assert rows[1].split() == next(r for r in first.splitlines() if r.startswith("| alexnet")).split()
        assert both.count("`python -m benchmarks ios-five-bars") == 2
    path.write_text(both.replace("- python:", "- another: one\n- python:"))
    done = called(*words, "--models", "nerf_mlp")
    assert isinstance(done.exception, BadInput) and "cannot be kept" in str(done.exception)


@pytest.mark.slow
def test_programs_are_compiled_ahead_and_what_was_decided_meanwhile_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path))
    monkeypatch.setattr(scheduling, "FIVE", scheduling.FIVE[:2])
    Cache("cuda-pdl").put("0" * 64, b"[]")
    done = called("ios-five-bars", *TINY, "--small", "--models", "alexnet,nerf_mlp", "--ahead", "2")
    assert (
        done.exit_code == 0
        and len(re.findall(r"(alexnet|nerf_mlp):small: (Sequential|Greedy) ahead: .* CPU s", done.output)) == 4
    )
    assert len(entries(tmp_path, "programs")) == 4 and not entries(tmp_path, "cuda-pdl")


def test_no_model_is_begun_when_time_is_over(tmp_path: Path) -> None:
    done = called("policies", *TINY, "--small", "--models", "nerf_mlp", "--budget", "0", "--out", str(tmp_path))
    assert done.exit_code == 0 and "Not begun within 0 s: nerf_mlp:small." in done.output
    assert "nerf_mlp:small |" not in (tmp_path / "ipu_sim_policies.md").read_text()


@pytest.mark.slow
def test_the_command_is_a_program(tmp_path: Path) -> None:
    """Run from the repository's root; a mistake gives one message and exit code 2."""
    for words, said in ((["polices"], "unknown table 'polices'"), (["policies", "--models", "alexnt"], "unknown model 'alexnt'")):
        done = subprocess.run([sys.executable, "-m", "benchmarks", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("loops", "--precision", "float32"), "table loops takes no --precision"),
        (("loops", "--keep"), "table loops takes no --keep"),
        (("ios-batch", *TINY, "--models", "nerf_mlp:small"), "nerf_mlp:small has no form for a batch of 1"),
        (("policies", "more"), "table policies takes no 'more'"),
        (("cross-device", "--ahead", "2"), "table cross-device takes no --ahead"),
        (("policies", "--stages", "found.json"), "table policies takes no --stages"),
        (("ios-device", *TINY, "--models", "nerf_mlp:small"), "ios-device compares devices"),
        (("policies", "--option", "tiles", "--models", "nerf_mlp:small"), "is not KEY=VALUE"),
    ],
)
def test_what_a_table_cannot_do_is_said(words: tuple[str, ...], said: str) -> None:
    done = called(*words)
    assert isinstance(done.exception, BadInput) and said in str(done.exception)


@pytest.mark.slow
def test_a_way_that_fails_is_a_row_of_its_own(small: Subject) -> None:
    good, bad = measured(small.path, small.feeds, [Way("good"), Way("bad", {"precision": "float17"})], QUIET, small.reference)
    assert not good.failure and good.seconds > 0 and good.error < 1e-4 and good.operators >= good.memory_bound > 0
    assert "float17" in bad.failure and bad.seconds == 0.0


@pytest.mark.slow
def test_stages_of_one_program_are_replayed_on_another_batch(rng: np.random.Generator) -> None:
    """Check that equal expressions share stages, no task waits for a later stage, and results are equal."""
    small = subject("crnn:small", 3)
    entry = small.entry
    plan = searched(small.path, small.feeds, QUIET, "one")
    other = entry.of_batch(2)
    model, feeds = other.build(3), other.feeds(int(rng.integers(1 << 20)))
    same, moved = measured(model, feeds, [Way("own"), Way("moved", {"batching": "off"}, policy=plan)], QUIET)
    assert moved.policy == plan.name != same.policy and moved.error < 1e-5
    ((graph, device),) = graphs_of(small, QUIET)
    schedule = plan(graph, device)
    assert schedule.stages == IOS()(graph, device).stages
    shuffled = Replay({n: int(rng.integers(5)) for n in plan.stages}, "shuffled")(graph, device)
    place = {n: i for i, stage in enumerate(shuffled.stages) for n in stage}
    assert all(place[p] <= place[n] for n in some(graph.names) for p in graph.after.get(n, ()))
    opened(small.path, small.feeds, Way("", policy=Replay(dict.fromkeys(plan.stages, 0), "all at once")), QUIET).close()


@pytest.mark.slow
def test_stages_that_one_machine_found_run_on_another(tmp_path: Path) -> None:
    """Check that stages are exchanged by a file: no repeated search, and each machine has a row with all stages."""
    file = tmp_path / "stages.json"
    words = ("ios-device", "--models", "alexnet:small", "--rounds", "1", "--stages", str(file))
    first = called(*words, "--device", "ipu_sim", "--option", "tiles=8", "--out", str(tmp_path / "8"))
    second = called(*words, "--device", "ipu_sim", "--option", "tiles=16", "--out", str(tmp_path / "16"))
    third = called(*words, "--device", "ipu_sim", "--option", "tiles=8", "--out", str(tmp_path / "16"), "--keep")
    assert [r.exit_code for r in (first, second, third)] == [0, 0, 0], (first.output, second.output, third.output)
    assert ["searching" in r.output for r in (first, second, third)] == [True, True, False]
    eight, sixteen = json.loads(file.read_text())["alexnet:small"].items()
    assert " 8 tiles" in eight[0] and " 16 tiles" in sixteen[0] and eight[1].keys() == sixteen[1].keys()
    rows = [line.split("|") for line in (tmp_path / "16" / "ipu_sim_ios_device.md").read_text().splitlines() if line[:2] == "| "]
    assert [cell.strip() for cell in rows[0][4:6]] == [f"stages for {eight[0]}", f"stages for {sixteen[0]}"]
    assert [r[2].strip() for r in rows[1:]] == [sixteen[0], sixteen[0], eight[0], eight[0]]
    assert Found(file).of("alexnet:small")[eight[0]].stages == eight[1] and Found(file).of("alexnet") == {}
    for text in ("[]", '{"alexnet": {"here": 3}}', "{"):
        file.write_text(text)
        with pytest.raises(BadInput, match="holds no stages"):
            Found(file).of("alexnet")


def test_rows_are_there_when_a_later_model_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "FIVE", scheduling.FIVE[:1])
    real = scheduling.measured

    def failing(*values: Any) -> Any:
        if "nerf_mlp" in str(values[0]):
            raise KeyboardInterrupt
        return real(*values)

    monkeypatch.setattr(scheduling, "measured", failing)
    done = called("ios-five-bars", *TINY, "--small", "--models", "alexnet,nerf_mlp", "--out", str(tmp_path))
    text = (tmp_path / "ipu_sim_ios_five_bars.md").read_text()
    assert done.exit_code != 0 and "| alexnet:small" in text and "--models alexnet:small --tune" in text


@pytest.mark.slow
def test_starts_are_timed_cold_and_warm_and_kept(tmp_path: Path) -> None:
    """Check that a warm start reads the cached program and is distinguished from a cold start."""
    words = ("compile-time", "--device", "ipu_sim", "--small", "--out", str(tmp_path), "--keep")
    for key in ("alexnet", "nerf_mlp"):
        called(*words, "--models", key, "--", "--repeats", "1")
    text = (tmp_path / "ipu_sim_compile_time.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if line[:2] == "| "]
    assert text.count("`python benchmarks/starts.py") == 2
    columns = [cell.strip() for cell in rows[0]]
    assert [r[1].strip() for r in rows[1:]] == ["alexnet:small", "nerf_mlp:small"]
    for row in some(rows[1:]):
        cold, warm, reading = (float(row[columns.index(n)]) for n in ("cold s", "warm s", "warm: reading"))
        assert 0 <= reading < warm and cold > 0, row


def test_tables_of_models_with_other_columns_are_not_one() -> None:
    first, second = Table("t", ("a", "b"), [["1", "2"]], ["n"]), Table("t", ("a", "b"), [["3", "4"]], ["n", "m"])
    assert both(first, second).rows == [["1", "2"], ["3", "4"]] and both(first, second).notes == ["n", "m"]
    assert both(Table("t", ("c",), [], ["left out"]), first).headers == ("a", "b")
    with pytest.raises(BadInput, match="other columns"):
        both(first, replace(second, headers=("a", "c")))


HLO = """HloModule jit_f, entry_computation_layout={(f32[4,8]{1,0})->f32[4]{0}}

%fused (p: f32[4,4]) -> f32[4] {
  %p = f32[4,4]{1,0} parameter(0)
  ROOT %r = f32[4]{0} reduce(%p, %c), dimensions={1}, to_apply=%add
}

%loop (t: (f32[4])) -> (f32[4]) {
  %t = (f32[4]{0}) parameter(0)
  %g = f32[4]{0} get-tuple-element(%t), index=0
  %e = f32[4]{0} exponential(%g)
  ROOT %o = (f32[4]{0}) tuple(%e)
}

ENTRY %main.10 (Arg_0.1: f32[4,8]) -> f32[4] {
  %Arg_0.1 = f32[4,8]{1,0} parameter(0)
  %w = f32[8,4]{1,0} constant({...})
  %dot.3 = f32[4,4]{1,0} dot(%Arg_0.1, %w), lhs_contracting_dims={1}
  %call.1 = (f32[4,4]{1,0}, s8[16]{0}) custom-call(%Arg_0.1, %w), custom_call_target="__cublas$gemm"
  %fusion = f32[4]{0} fusion(%dot.3), kind=kInput, calls=%fused
  %while.1 = (f32[4]{0}) while(%tup), condition=%cond, body=%loop
  ROOT %bitcast = f32[4]{0} bitcast(%fusion)
}
"""


def test_kernels_of_a_compiled_module_of_xla_are_counted() -> None:
    assert xla_kernels(HLO) == Kernels(kernels=4, memory_bound=2)
    heavy = HLO.replace("reduce(%p, %c), dimensions={1}, to_apply=%add", "dot(%p, %p)")
    assert xla_kernels(heavy) == Kernels(kernels=4, memory_bound=1)


def test_what_a_gpu_module_of_xla_enters_is_counted_and_what_it_only_waits_for_is_not() -> None:
    """Check that command buffers count as calls, products as library calls, and that branches are entered. A copy is started and
    awaited."""
    text = HLO.replace("  ROOT %bitcast", """  %cmd = (f32[4]{0}) call(%fusion), to_apply=%loop
  %either = f32[4]{0} conditional(%p0, %x, %x), branch_computations={%loop, %fused}
  %begun = (f32[4]{0}, f32[4]{0}, u32[]) copy-start(%fusion)
  %copied = f32[4]{0} copy-done(%begun)
  %aside = ((f32[4]{0}), f32[4]{0}, s32[]) async-start(%copied), calls=%loop
  %back = f32[4]{0} async-done(%aside)
  %order = (f32[4]{0}, u8[9]{0}) custom-call(%copied), custom_call_target="__cub$DeviceRadixSort"
  ROOT %bitcast""")  # fmt: skip
    assert xla_kernels(text) == Kernels(kernels=4 + 1 + 2 + 1 + 1 + 1, memory_bound=2 + 1 + 2 + 1 + 1 + 1)


def test_kernels_on_a_gpu_are_told_apart_by_their_names() -> None:
    light = [
        "triton_poi_fused_convolution_relu_3", "triton_red_fused_native_layer_norm_0", "triton_per_fused_mm_softmax_1",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
        "void cudnn::engines_precompiled::nchwToNhwcKernel<float, float, float, true, false>",
        "void at::native::unrolled_elementwise_kernel<at::native::convert<float>>",
    ]  # fmt: skip
    heavy = [
        "triton_tem_fused_mm_2", "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x32", "nvjet_hsh_64x8_64x16_4x1_v_bz_TNT",
        "void gemv2T_kernel_val<int, int, float>", "void cublasLt::splitKreduce_kernel<32, 16>", "ampere_sgemm_128x64_tn",
        "sm80_xmma_fprop_implicit_gemm_f32f32", "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>",
        "fmha_cutlassF_f32_aligned",
        "void implicit_convolve_sgemm<float, float, 128, 6>", "void cudnn::winograd_nonfused::winogradForwardData4x4",
    ]  # fmt: skip
    assert launched(light) == Kernels(len(light), len(light))
    assert launched(heavy) == Kernels(len(heavy), 0)


def test_a_profiler_that_sees_no_kernel_is_an_error_and_no_count(tmp_path: Path) -> None:
    """Check with a stand-in for torch that calls are counted and that its trace is read."""
    events = [{"cat": "kernel", "name": "triton_poi_fused_0"}, {"cat": "gpu_memcpy", "name": "Memcpy"}, {"ph": "M"}]
    calls = list[int]()

    class Profile(contextlib.nullcontext[object]):
        def __enter__(self) -> Profile:
            return self

        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text(json.dumps({"traceEvents": events}))

    torch = SimpleNamespace(
        cuda=SimpleNamespace(synchronize=lambda: None),
        profiler=SimpleNamespace(ProfilerActivity=SimpleNamespace(CPU=0, CUDA=1), profile=lambda activities: Profile()),
    )
    assert traced(torch, lambda: calls.append(1)) == ["triton_poi_fused_0"]
    assert len(calls) == 3  # two warm-up calls: compiled or trial kernels do not count
    del events[0]
    with pytest.raises(DeviceFailure, match="saw no kernel"):
        traced(torch, lambda: None)


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_kernels_of_xla_are_counted_where_it_is_there(small: Subject) -> None:
    import onnx
    from tables.stitching import xla

    found = xla(onnx.load(str(small.path)), small.feeds)
    assert found.kernels >= found.memory_bound > 0

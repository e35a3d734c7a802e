"""Machine code in compiled files: written for targets without a GPU, and run on one without the compiler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import rammer
from rammer.compiled.artifact import save_artifact
from rammer.compiled.artifact_reader import load_artifact
from rammer.compiled.segments import ProgramSegment
from rammer.device.manifest import MachineCode
from rammer.errors import NoMachineCode
from rammer.ir.program import RProgram
from rammer_testing.c_runtime import COMPILERS, build_example, run_example
from rammer_testing.nonempty import some
from rammer_testing.small_models import MODELS

from rammer_cuda.executor import compile_launches
from rammer_cuda.gpu import TARGETS
from rammer_cuda.run_only import RunOnlyGpu
from rammer_cuda.shipped_launches import shipped_launches


def write_file(path: Path, model: bytes, targets: tuple[str, ...]) -> Path:
    """Compile a model for targets and write one file."""
    made = []
    for target in targets:
        exe = rammer.compile(model, "cuda", target=target, options={"executor": "graph"})
        made.append(exe.artifact(exe.with_code(exe.compile_whole({}))))
        exe.close()
    save_artifact(path, *made)
    return path


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = MODELS["branches"].build(np.random.default_rng(4)).SerializeToString()
    return write_file(tmp_path_factory.mktemp("shipped") / "m.rammer", model, ("sm_80", "sm_90a"))


def code_of(path: Path, variant: int = 0) -> tuple[RProgram, MachineCode, dict[str, Any]]:
    """Return the program, machine code and constants of a file."""
    (segment,) = load_artifact(path, choose=lambda variants: variant, trusted=True).compiled.segments
    assert isinstance(segment, ProgramSegment)
    return segment.program, segment.code[0], dict(segment.constants)


@pytest.mark.parametrize(("variant", "target"), enumerate(("sm_80", "sm_90a")))
def test_a_file_has_the_launches_of_each_target(shipped: Path, variant: int, target: str) -> None:
    program, code, constants = code_of(shipped, variant)
    assert code.target == target
    made, want = shipped_launches(code, program), compile_launches(program, constants, TARGETS[target], None, kept=False)
    assert [(x.operator, x.tasks, x.after) for x in made.plan] == [(x.operator, x.tasks, x.after) for x in want.plan]
    assert made.cubins == want.cubins and made.kernels.keys() == want.kernels.keys()
    packed = 0
    for name, kernel in some(made.kernels.items()):
        wanted = want.kernels[name]
        assert (kernel.entry, kernel.threads, kernel.blocks, kernel.dynamic) == (
            *(wanted.entry, wanted.threads, wanted.blocks, wanted.dynamic),
        )
        for have, argument in zip(kernel.arguments, wanted.arguments, strict=True):
            assert have.tensor == argument.tensor and (have.packing is None) == (argument.packing is None)
            if argument.packing is not None:
                values = np.asarray(argument.packing.make(constants[have.tensor]), argument.packing.dtype)
                assert np.array_equal(have.packing.make(constants[have.tensor]), values.reshape(-1))
                packed += 1
    assert packed


@pytest.mark.parametrize(
    "change",
    [
        {"plan": [["nowhere", [0, 1], []]]},
        {"users": {}},
        {"kernels": [["f", 1, 1]]},
        {"packings": [["key", 1, "float32"]]},
        {"plan": None},
    ],
)
def test_a_malformed_record_is_refused(shipped: Path, change: dict[str, object]) -> None:
    program, code, _ = code_of(shipped)
    with pytest.raises((ValueError, TypeError, LookupError)):
        shipped_launches(replace(code, record={**code.record, **change}), program)


def test_a_launch_never_waits_for_a_later_one(shipped: Path) -> None:
    program, code, _ = code_of(shipped)
    plan = [[name, tasks, [0]] for name, tasks, _ in code.record["plan"]]
    with pytest.raises(ValueError, match="waits for a later launch"):
        shipped_launches(replace(code, record={**code.record, "plan": plan}), program)


def test_a_persistent_program_has_no_machine_code(tmp_path: Path, rng: np.random.Generator) -> None:
    model = MODELS["branches"].build(rng).SerializeToString()
    exe = rammer.compile(model, "cuda", target="sm_90a", options={"executor": "persistent"})
    compiled = exe.compile_whole({})
    with pytest.raises(NoMachineCode, match="cannot be written"):
        exe.with_code(compiled)
    exe.close()


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["branches", "images"])
def test_machine_code_runs_without_the_compiler(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    model, path = MODELS[name], tmp_path / "m.onnx"
    onnx.save(model.build(rng), path)
    inputs = model.inputs(rng, {})
    exe = rammer.compile(path, "cuda", options={"executor": "graph"})
    want = exe.run(inputs)
    save_artifact(tmp_path / "m.rammer", exe.artifact(exe.with_code(exe.compile_whole({}))))
    exe.close()
    exe = rammer.compile(tmp_path / "m.rammer", trust=True)
    assert issubclass(exe.backend.__class__, RunOnlyGpu)
    have = exe.run(inputs)
    assert all(np.array_equal(have[n], want[n]) for n in some(want))
    exe.close()


def test_a_file_has_the_calls_of_every_launch(shipped: Path) -> None:
    program, code, _ = code_of(shipped)
    made, calls = shipped_launches(code, program), code.record["calls"]
    entries = [calls["kernels"][kernel][1] for kernel, *_ in calls["launches"]]
    assert entries == [made.kernels[x.operator].entry for x in made.plan]
    for launch, (_, groups, threads, arguments) in some(list(zip(made.plan, calls["launches"], strict=True))):
        kernel = made.kernels[launch.operator]
        assert (groups, threads) == (len(launch.tasks) * kernel.blocks, kernel.threads)
        assert len(arguments) == len(kernel.arguments) + 2
    assert [port[0] for port in calls["inputs"]] == [p.tensor for p in program.inputs]


@pytest.mark.cuda
@pytest.mark.skipif(not all(COMPILERS.values()), reason="needs the C and C++ compilers gcc and g++")
@pytest.mark.parametrize("name", [n for n, m in MODELS.items() if m.shapes == ({},)])
def test_a_c_program_has_the_same_bits(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    onnx.save(MODELS[name].build(rng), tmp_path / "m.onnx")
    inputs = MODELS[name].inputs(rng, {})
    exe = rammer.compile(tmp_path / "m.onnx", "cuda", options={"executor": "graph"})
    save_artifact(tmp_path / "m.rammer", exe.artifact(exe.with_code(exe.compile_whole({}))))
    exe.close()
    exe = rammer.compile(tmp_path / "m.rammer", trust=True)
    want = {n: np.asarray(v) for n, v in exe.run(inputs).items()}
    names = [p.name for p in exe.head.inputs], [p.name for p in exe.head.outputs]
    exe.close()
    have = run_example(
        build_example("c", tmp_path),
        tmp_path / "m.rammer",
        {n: inputs[n] for n in names[0]},
        {n: want[n] for n in names[1]},
    )
    assert all(have[n].tobytes() == want[n].tobytes() for n in some(names[1]))

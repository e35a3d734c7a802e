"""Golden files: the compiler still produces the frozen output, and the comparison names each planted change."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import golden_file
import golden_kernels
import golden_run
import pytest
from golden_cubin import code_digest
from golden_file import Difference, differences, read, report
from golden_kernels import ARCHITECTURES, FRAME, listed, written
from golden_models import MODELS, RANKED, Described, Job, jobs
from golden_run import Made, compiled, cubins, incomparable, texts
from golden_text import normal, text_digest

from rammer.device.manifest import Binding, OpenOptions
from rammer.ir.operator import ROperator
from rammer.schedule import wavefront
from rammer.schedule.policy import rows_of
from rammer_testing.cases import NetCase
from rammer_testing.nets import KINDS
from rammer_testing.nonempty import some

from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.chain import kernel as chain_text
from rammer_cuda.compile import compile_cubin
from rammer_cuda.generic import kernel as generic_text
from rammer_cuda.kernels.task import TaskKernel
from rammer_rocm.panel import choose as panels

pytest.importorskip("cuda.bindings")

#: Jobs compared in every test run: the smallest model on each device, with each precision on one.
SAMPLE = [j for j in jobs(["nerf_mlp"]) if j.precision == "float32" or j.device == "cuda sm_90a"]
SMALL = Job("rocm cpu", "float32", "nerf_mlp")


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty cache, so that earlier runs have no effect."""
    monkeypatch.setenv("RAMMER_CACHE", str(tmp_path / "cache"))


def changed(made: Sequence[Made]) -> list[Difference]:
    return [difference for m in made for difference in m.compare()]


# --- frozen output ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_kernels_have_the_frozen_texts() -> None:
    made = texts()
    assert len(made.records) > 80
    assert not (found := changed([made])), report(found)


@pytest.mark.slow
def test_small_models_have_the_frozen_choices_and_programs() -> None:
    made = compiled(SAMPLE, 1)
    assert [len(m.records) for m in made] == [len([j for j in SAMPLE if j.device in RANKED]), len(SAMPLE)]
    assert all(r["kernels"] for r in some(made[0].records))
    assert not (found := changed(made)), report(found)


@pytest.mark.large
def test_machine_code_is_the_frozen_one() -> None:
    if why := incomparable():
        pytest.skip(why)
    assert not (found := changed([cubins(1)])), report(found)


@pytest.mark.large
@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_the_frozen_choices_and_programs(model: str) -> None:
    assert not (found := changed(compiled(jobs([model]), 1))), report(found)


def test_every_family_is_listed() -> None:
    """Check that each family is listed at least twice with all precisions, and that whole programs are listed."""
    backend = open_backend(OpenOptions(target="sm_90a"))
    assert isinstance(backend, CudaBackend)
    assert len(set(listed())) == len(listed())
    alone = [NetCase.parse(line) for line in listed() if line.split()[0] in KINDS]
    families = Counter(case.pick.split(":")[0].replace("generic", "") for case in alone)
    assert families.keys() == backend.families.keys() and min(families.values()) > 1
    assert {case.precision for case in alone} == {*backend.vdevice.precisions}
    assert {line.split()[0] for line in listed()} == {*KINDS, "traced", *golden_kernels.WHOLE}


def test_machine_code_exists_for_every_kernel() -> None:
    """Check that only instructions of a later architecture excuse missing code."""
    _, records = read("cubins")
    assert {r["case"] for r in records} == {FRAME, *listed()}
    for record in some(records):
        assert "registers" in record["sm_90a"], record["case"]
        for arch in some(ARCHITECTURES):
            if "registers" not in record[arch]:
                words = {"sm_80": "wgmma|cluster", "sm_90": "wgmma"}[arch]
                assert re.search(words, written(record["case"]).text), f"{record['case']} for {arch}"


# --- the comparison can fail ------------------------------------------------------------------------


def test_one_character_of_a_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a character in the text around generic kernels changes those kernels and no others."""
    honest = generic_text.TaskKernel

    def changed_body(*parts: Any) -> TaskKernel:
        return honest(*(p.replace("first + (int)", "first - (int)") if isinstance(p, str) else p for p in parts))

    monkeypatch.setattr(generic_text, "TaskKernel", changed_body)
    generic = [line for line in listed() if "pick=generic:" in line]
    others = [line for line in listed() if "pick=gemv:" in line]
    records = [written(line).record() for line in (*generic[:3], *others[:3])]
    frozen = [r for r in read("texts")[1] if r["case"] in {*generic[:3], *others[:3]}]
    found = differences("texts", frozen, records)
    assert [(d.field, d.name) for d in found] == [("text", (line,)) for line in sorted(generic[:3])]
    assert generic[0] in report(found) and "3 text of texts" in report(found)


def test_one_constant_of_a_cost_formula_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a cost of rocm's panels changes the predicted time and no chosen kernel."""
    monkeypatch.setattr(panels, "TILE_OVERHEAD", panels.TILE_OVERHEAD * 1.01)
    (found,) = changed(compiled([SMALL], 1))
    assert (found.file, found.field) == ("programs", "microseconds")
    before, after = found.how.split(" -> ")
    assert 0 < float(after) - float(before) < 0.01 * float(before)


def test_another_chosen_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a search that picks the second candidate changes every choice and the program's operators."""
    honest = Described.candidates

    def second_first(self: Described, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        return list(honest(self, operator, binding))[1:]

    monkeypatch.setattr(Described, "candidates", second_first)
    found = changed(compiled([SMALL], 1))
    assert {("choices", "kernel"), ("programs", "operators")} <= {(d.file, d.field) for d in found}
    (first,) = [d for d in found if d.how.startswith("relu_2: ")]
    assert first.name == (*vars(SMALL).values(),) and re.fullmatch(r"relu_2: panel:\S+ -> panel:\S+", first.how)


def test_a_fitted_constant_of_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that only the model's predicted time depends on the constant."""
    monkeypatch.setattr(chain_text, "MATRIX", chain_text.MATRIX * 1.01)
    found = changed(compiled([Job("cuda sm_90a", "float32", "nerf_mlp")], 1))
    assert {(d.file, d.field) for d in found} == {("programs", "microseconds")}
    (case,) = [line for line in listed() if "pick=gemm_chain:129x5:groups=4" in line and "traced" not in line]
    monkeypatch.setattr(chain_text, "LAYER", chain_text.LAYER * 1.01)  # too small a part of the zoo's chain to show there
    frozen = [r for r in read("texts")[1] if r["case"] == case]
    assert [d.field for d in differences("texts", frozen, [written(case).record()])] == ["microseconds"]


def test_a_schedule_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that rows assigned to other vEUs are the only difference."""
    monkeypatch.setattr(wavefront, "rows_of", lambda rows: rows_of(rows[::-1]))
    found = changed(compiled([SMALL], 1))
    assert [(d.file, d.field, d.name) for d in found] == [("programs", "schedule", (*vars(SMALL).values(),))]


def test_machine_code_differs_by_what_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that names and comments make no difference, but a constant, a launch bound and the shared memory size do."""
    plain_text = (
        'extern "C" __global__ void k(float *x) { __shared__ float s[64]; s[threadIdx.x] = x[threadIdx.x] * 2.5f; '
        "__syncthreads(); x[threadIdx.x] = s[63 - threadIdx.x]; }"
    )

    def made(*edits: tuple[str, str]) -> str:
        assert all(old in plain_text for old, _ in (*edits, ("k", "")))
        text = plain_text
        for old, new in edits:
            text = text.replace(old, new)
        return code_digest(compile_cubin(text, "sm_90").code)

    assert made() == made((" k(", " another_name(")) == made(("__syncthreads", "/* all */  __syncthreads"))
    others = [made(("2.5f", "2.25f")), made(("s[64]", "s[128]")), made(("63 -", "62 -")), made(("float *x", "float *x, int n"))]
    assert len({made(), *others}) == 5
    with pytest.raises(ValueError, match="no 64-bit ELF"):
        code_digest(b"something else entirely")


def test_machine_code_of_another_compiler_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"V\d+\.\d+\.\d+", read("cubins")[0]["nvrtc"])
    monkeypatch.setattr(golden_run, "compiler", lambda: "V1.2.3")
    assert "V1.2.3" in incomparable()


def test_texts_are_words() -> None:
    text = "#define A 1 \\\n  + 2\nvoid g_0123456789abcdef0123(int x) { y = x++ + 1.5e-3f; }  // sum\n"
    same = "#define A 1   + 2\nvoid\n g_fedcba98765432100000( int x ){ /* more */ y=x ++ + 1.5e-3f; }"
    assert normal(text) == normal(same)
    for old, new in (("A 1", "A 2"), ("x++ +", "x + ++"), ("1.5e-3f", "1.5e-4f"), ("(int x)", "(int z)"), ("\nvoid", " void")):
        assert old in text
        assert text_digest(text.replace(old, new)) != text_digest(text)
    asm = 'asm("bar.sync 0;" :: "r"(x));'
    assert normal(asm) != normal(asm.replace("sync 0", "sync  0")), "strings stay as they are"
    two = "a_0123456789abcdef(b_00112233445566778899); "
    assert normal(two) == "NAME0 ( NAME1 ) ;"


def test_differences_are_told_in_words() -> None:
    old = [{"model": "m", "kernels": {"a:1:": "o p", "b:2:": "q"}}, {"model": "n", "kernels": {}}]
    new = [{"model": "m", "kernels": {"a:1:": "p", "b:2:": "o", "c:3:": "r"}}, {"model": "k", "kernels": {}}]
    assert report(differences("choices", old, new)).splitlines() == [
        "choices k: all: is new",
        "choices n: all: is no longer made",
        "choices m: kernel: o: a:1: -> b:2:",
        "choices m: kernel: q: b:2: -> None",
        "choices m: kernel: r: None -> c:3:",
        "changed: 2 all of choices, 3 kernel of choices",
    ]
    assert report([]) == "as frozen"


def test_a_part_is_frozen_without_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that blessing one model keeps the frozen records of the others."""
    monkeypatch.setattr(golden_file, "FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match="--bless writes it"):
        read("ranks")
    one, two = ({"model": m, "operator": "o", "text": m} for m in "ab")
    Made("ranks", [one, two], golden_run.everything, {"golden": "ranks"}).bless()
    part = Made("ranks", [{**one, "text": "new"}], lambda r: r["model"] == "a", {"golden": "ranks"})
    assert [str(d) for d in part.compare()] == ["ranks a o: text: a -> new"]
    part.bless()
    assert part.compare() == [] and read("ranks")[1] == [{**one, "text": "new"}, two]

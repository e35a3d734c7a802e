"""Planted faults: each occurs in a kernel that a search tries first, and on the CPU one is detected."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from random import Random
from typing import Any

import planted
import plants
import pytest
from click.testing import CliRunner

from rammer.device.loader import Registry
from rammer.ir.operator import ROperator
from rammer_testing import search
from rammer_testing.cases import NetCase, Sampler
from rammer_testing.nonempty import some
from rammer_testing.search import Hunt
from rammer_testing.single import Trial, UntiledOperator
from rammer_testing.worker_pool import Member

#: CPU seconds allowed for the first cases.
LOOKING = 25.0
#: Cells that the first cases must cover: late operands, one after another, of a warpgroup product that fetches 16 bytes at a
#: time; the cell family with one bare product; unaligned vectors.
FIRST = (
    *(("gemm_wgmma_f16", "float16", f"free {late}") for late in ("all", "each", "1", "2")),
    *((f, "float16", "offset") for f in ("gemm_f16", "rowwise")),
    ("cell", "float32", "bare"),
    ("cell", "float32", "late 1"),
    ("gemv", "float32", "late 1"),
    ("gemm", "float32", "partial"),
)


class Looking(Hunt):
    """A search that records its candidates without running them."""

    def __init__(self, backend: Any, seed: int, precisions: tuple[str, ...], kinds: tuple[str, ...]) -> None:
        only = search.Search.__new__(search.Search)
        only.backend, only.each = backend, 1
        super().__init__(only, Sampler(Random(seed), 300_000, precisions, kinds), Member(0, 1))

    def looked(self) -> Iterator[tuple[ROperator, UntiledOperator]]:
        """Yield the candidates of the first cases, one after another."""
        for case in self.sampler.first():
            self.seen = list[tuple[ROperator, UntiledOperator]]()
            self.case(case, True)
            yield from self.seen

    def candidate(self, one: NetCase, tiled: ROperator, subject: UntiledOperator, trial: Trial) -> None:
        self.seen.append((tiled, subject))
        super().candidate(one, tiled, subject, trial)


@pytest.mark.slow
def test_what_is_planted_is_looked_at_first(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that every text fault applies to a kernel of the first cases, and that these cover the cells in ``FIRST``."""
    pytest.importorskip("cuda.bindings")
    from rammer.device.manifest import OpenOptions

    from rammer_cuda.backend import open_backend
    from rammer_cuda.source import task_kernel

    monkeypatch.setattr(search, "check", lambda *arguments: "")
    monkeypatch.setattr(search, "trial_of", lambda subject, seed: Trial(subject, {}, ()))
    edits, lacking = dict(plants.EDITS["cuda"]), set(FIRST)
    looking = Looking(open_backend(OpenOptions(target="sm_90a")), seed, ("float16", "float32"), ("gemv", "matmul"))
    begin = _cpu()
    for tiled, subject in some(looking.looked()):
        text = task_kernel(tiled, subject.binding).text
        edits = {n: edit for n, edit in edits.items() if edit(text) == text}
        lacking = {c for c in lacking if not looking.coverage.cells[c]}
        if not edits and not lacking:
            break
        assert _cpu() - begin < LOOKING, f"no place for {', '.join(edits)}, not looked at: {lacking}"


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["a row too many"])
def test_a_planted_fault_is_found(fault: str) -> None:
    if Registry().status("rocm").state != "ok":
        pytest.skip("no OpenCL unit")
    result = CliRunner().invoke(planted.main, ["--device", "rocm", "--seconds", "120", "--only", fault])
    assert result.exit_code == 0, result.output
    assert "1 of 1 planted faults found; not: none" in result.output

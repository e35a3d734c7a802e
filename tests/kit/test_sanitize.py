"""Command lines for compute-sanitizer, tested without the tool."""

from __future__ import annotations

import pytest

from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import OpenOptions
from rammer.frontend.read.reader import read_model
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some

pytest.importorskip("cuda.bindings")

from sanitize import SHORT, entry_of, knows_barriers

from rammer_cuda.backend import open_backend


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("Version 2025.3.1.0 (build 36414624) (public-release)", False),
        ("Version 2026.2.1.0", False),
        ("Version 2026.3.0.0", True),
        ("Version 2026.4.0.0 (build 39022338) (public-release)", True),
        ("Version 2027.1.0.0", True),
        ("", False),
    ],
)
def test_old_versions_report_races_across_barriers(version: str, known: bool) -> None:
    assert knows_barriers(version) is known


def test_short_forms_are_cut_as_whole_models_are() -> None:
    backend = open_backend(OpenOptions(target="sm_90a"))
    compiler = Compiler(backend, CompileOptions(), KernelStore(None))
    for key in some(SHORT):
        (segment,) = compiler.compile_model(read_model(entry_of(f"{key}:short").build(1)), {}).segments
        assert isinstance(segment, ProgramSegment)
        assert segment.program.form == "mixed"

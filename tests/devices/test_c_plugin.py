"""The second example plugin, `rammer_c`: generated C on threads. It passes the kit, and uses only public names."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from rammer.device.loader import Registry
from rammer.errors import BadInput, MissingDependency
from rammer_testing.conformance import CHECKS, ConformanceError, registry_of
from rammer_testing.subject import Subject

import rammer_c

#: Largest number of lines that a page can quote.
LONGEST = 260

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler")


def registry() -> Registry:
    return registry_of(*rammer_c.rammer_devices())


@pytest.mark.slow
@pytest.mark.sampled(5)
@needs_compiler
@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check: str) -> None:
    CHECKS[check](Subject("c", registry=registry()))


@needs_compiler
def test_a_walker_that_does_not_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = "while (atomic_load_explicit(&counters[w[0]], memory_order_acquire) < w[1]) sched_yield();"
    assert waits in rammer_c.WALKER
    monkeypatch.setattr(rammer_c, "WALKER", rammer_c.WALKER.replace(waits, ";"))
    monkeypatch.setattr(rammer_c, "compiler_of", rammer_c.Compiler)
    with pytest.raises(ConformanceError):
        CHECKS["waits"](Subject("c", registry=registry()))


def test_errors_of_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingDependency, match="a C compiler"):
        rammer_c.probe()
    monkeypatch.undo()
    if shutil.which("cc"):
        with pytest.raises(BadInput, match="device c has no option 'speed'"):
            registry().open("c", options={"speed": "1"})


def test_it_is_a_strangers_plugin() -> None:
    """Check that it is short and imports only public names of the core."""
    text = Path(rammer_c.__file__).read_text()
    assert len(text.splitlines()) <= LONGEST
    imports = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom) and n.module]
    ours = [(n.module or "", a.name) for n in imports for a in n.names if (n.module or "").startswith("rammer")]
    assert len(ours) > 10
    for module, name in ours:
        assert not any(part.startswith("_") for part in (*module.split("."), name)), (module, name)
        assert module.startswith("rammer."), module

"""The public interface: agreement with its page, committed signatures, and third-party code that uses only public names."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
from importlib import import_module
from pathlib import Path

import pytest

from rammer_testing import interface
from rammer_testing.interface import GROUPS, MEMBERS, names_of, private_uses, signatures
from rammer_testing.nonempty import some

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).parent / "interface.txt"
MODULES = interface.modules()
#: Third-party Python: the output of `rammer plugins new`, the second example, and the pages.
STRANGERS = {
    **{str(p.relative_to(ROOT)): p.read_text() for p in sorted((ROOT / "core/rammer/plugin-template").rglob("*.py"))},
    **{str(p.relative_to(ROOT)): p.read_text() for p in sorted((ROOT / "tests/c_plugin").rglob("*.py"))},
    **{
        f"{p.name} {number}": block
        for p in (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md")
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", p.read_text(), re.DOTALL | re.MULTILINE))
    },
}

#: Number of private modules that each plugin imports.
PRIVATE_MODULES = {"cuda": 9, "rocm": 4, "ipu_sim": 4}


def test_signatures_are_those_that_are_committed() -> None:
    """Check committed signatures, which show interface changes in reviews."""
    if os.environ.get("RAMMER_BLESS"):
        KEPT.write_text(signatures())
    assert KEPT.read_text() == signatures(), "the public interface changed: RAMMER_BLESS=1 writes it again"


def test_the_changelog_knows_the_interface() -> None:
    digest = hashlib.sha256(KEPT.read_bytes()).hexdigest()[:12]
    said = re.findall(r"Public interface `(\w+)`", (ROOT / "CHANGELOG.md").read_text())
    assert said[:1] == [digest], f"write what changed into CHANGELOG.md, and there: Public interface `{digest}`"


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_there_with_a_docstring(module: str) -> None:
    loaded = import_module(module)
    assert names_of(module) and (loaded.__doc__ or "").strip()
    for name in names_of(module):
        value = getattr(loaded, name)
        assert not name.startswith("_") or name == "__version__"
        if inspect.isclass(value) or inspect.isfunction(value):
            assert (inspect.getdoc(value) or "").strip(), f"{module}.{name} says nothing"


def test_the_page_lists_them_all() -> None:
    """Check that every module and class of the generated lists (``test_documents``) is on the page."""
    text = (ROOT / "docs/interface.md").read_text()
    for path in some((*MODULES, *MEMBERS)):
        assert text.count(f"| `{path}` |") == 1, path
    listed = re.findall(r"^\| `(rammer[\w.]*)` \| (.*) \|$", text, re.MULTILINE)
    found = {path: tuple(re.findall(r"`(\w+)`", names)) for path, names in listed}
    assert found == {**{m: names_of(m) for m in MODULES}, **MEMBERS}


@pytest.mark.parametrize("where", STRANGERS)
def test_strangers_use_public_names_alone(where: str) -> None:
    assert not private_uses(STRANGERS[where])


@pytest.mark.parametrize("plugin", PRIVATE_MODULES)
def test_plugins_import_few_private_modules(plugin: str) -> None:
    files = some(sorted((ROOT / f"plugins/{plugin}/rammer_{plugin}").rglob("*.py")))
    names = [use.partition(": ")[2] for file in files for use in private_uses(file.read_text())]
    private = {name.rpartition(".")[0] for name in names} - {*MODULES}
    assert len(private) == PRIVATE_MODULES[plugin], sorted(private)


def test_there_is_code_of_strangers() -> None:
    kinds = ("plugin-template", "c_plugin", "operator.md", "kernel_family.md", "python.md")
    assert all(any(k in where for where in STRANGERS) for k in kinds) and len(GROUPS) > 3


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from rammer.device.loader import GROUP", ["line 1: rammer.device.loader.GROUP"]),
        ("from rammer.compiler.compiler import Compiler", ["line 1: rammer.compiler.compiler.Compiler"]),
        ("import os\nimport rammer.verify.verifier", ["line 2: rammer.verify.verifier"]),
        ("from rammer.verify import verifier", ["line 1: rammer.verify.verifier"]),
        ("from rammer.ir import expr as e\ne.affine(1)\ne.Op", ["line 2: rammer.ir.expr.affine"]),
        ("import rammer.ir.expr as e\ne._rebuild", ["line 2: rammer.ir.expr._rebuild"]),
        ("import rammer.ir.expr\nrammer.ir.expr.affine", ["line 2: rammer.ir.expr.affine"]),
        ("import rammer\nrammer.compile\nrammer.errors.BadInput\nrammer._x", ["line 4: rammer._x"]),
        (
            "def f():\n    from rammer.device.manifest import reused_constants",
            ["line 2: rammer.device.manifest.reused_constants"],
        ),
        ("from rammer import compile, errors\nfrom rammer.device.manifest import Device\nimport rammer_toy", []),
    ],
)
def test_private_names_are_found(text: str, found: list[str]) -> None:
    assert private_uses(text) == found


def test_a_changed_signature_is_another_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Check that an added argument, default, field or member changes the text."""
    text = '__all__ = ["A", "f", "C"]\nfrom dataclasses import dataclass\nC = 1\ndef f(a: int = 1) -> int: ...\n'
    text += "@dataclass\nclass A:\n    x: int = 2\n    def go(self) -> None: ...\n    def _own(self) -> None: ...\n"
    seen = set[str]()
    changes = ("C = 1", "C = 2"), ("a: int = 1", "a: int = 3"), ("x: int = 2", "y: int = 2"), ("def go", "def stop"), ("", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(interface, "MEMBERS", {})
    for number, (old, new) in enumerate(changes):
        name = f"rammer_interface_{number}"
        (tmp_path / f"{name}.py").write_text(text.replace(old, new) if old else text)
        monkeypatch.setattr(interface, "GROUPS", {"g": (name,)})
        said = signatures().replace(name, "")
        assert "_own" not in said
        seen.add(said)
    assert len(seen) == len(changes)


def test_the_command_exits_with_what_it_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text("from rammer.compiler.compiler import Compiler\n")
    assert interface.main([str(tmp_path)]) == 1
    assert "a.py: line 1: rammer.compiler.compiler.Compiler" in capsys.readouterr().out
    assert interface.main([str(ROOT / "tests/c_plugin")]) == 0
    assert interface.main([]) == 0 and capsys.readouterr().out.endswith(signatures())

"""The hash of the kernel generators: it covers every file that a text may depend on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rammer.codegen.writer import generator_hash
from rammer.device.code_hash import code_hash


@pytest.mark.parametrize("name", ["writer.py", "device/products.cuh"])
def test_kernels_are_made_anew_where_what_writes_them_changed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "written_by"
    (package / "device").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    hashes = []
    for text in ("", "one", "two"):
        (package / name).write_text(text)
        code_hash.cache_clear()
        hashes.append(generator_hash("written_by"))
    code_hash.cache_clear()
    sys.modules.pop("written_by", None)
    assert len({*hashes}) == 3

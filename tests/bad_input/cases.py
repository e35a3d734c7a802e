"""Shared helpers of the tests of bad input: a model, its inputs, the text of an error and the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from command import typed
from onnx import parser

from rammer.errors import RammerError

LITTLE = """<ir_version: 9, opset_import: ["" : 21]> little (float[1,N,8] x, float[8,5] w) => (float[1,N,5] y) {
    m = MatMul(x, w)
    y = Relu(m)
}"""


def model(text: str = LITTLE) -> onnx.ModelProto:
    return parser.parse_model(text)


def arrays(rng: np.random.Generator, n: int = 3) -> dict[str, np.ndarray]:
    return {"x": rng.standard_normal((1, n, 8)).astype(np.float32), "w": rng.standard_normal((8, 5)).astype(np.float32)}


def message(kind: type[RammerError], call: Callable[[], object]) -> str:
    """Return the full text of the error that ``call`` raises, which must be exactly of class ``kind``."""
    with pytest.raises(RammerError) as caught:
        call()
    assert type(caught.value) is kind, caught.value
    return str(caught.value)


Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def command(monkeypatch: Patch, capsys: Capture, *words: object) -> tuple[int, str, str]:
    """Return the exit code, output and errors of a command line."""
    done = typed(monkeypatch, capsys, *words)
    return done.code, done.out, done.err


def saved(path: Path, data: bytes | onnx.ModelProto) -> Path:
    """Write ``data`` to ``path`` and return ``path``."""
    path.write_bytes(data if isinstance(data, bytes) else data.SerializeToString())
    return path

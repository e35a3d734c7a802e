"""What identifies a model's file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rammer.runtime.source import SHARE, open_source

SIZE = 2 * SHARE + 12_345


def content(rng: np.random.Generator) -> bytes:
    return rng.integers(0, 256, SIZE, dtype=np.uint8).tobytes()


def test_a_file_and_its_bytes_are_one_model(tmp_path: Path, rng: np.random.Generator) -> None:
    data, path = content(rng), tmp_path / "model.onnx"
    path.write_bytes(data)
    assert open_source(path).digest == open_source(str(path)).digest == open_source(data).digest != ""


@pytest.mark.parametrize("place", [0, SHARE - 1, SHARE, 2 * SHARE, SIZE - 1])
def test_every_byte_counts(tmp_path: Path, place: int, rng: np.random.Generator) -> None:
    data = bytearray(content(rng))
    paths = tmp_path / "a.onnx", tmp_path / "b.onnx"
    paths[0].write_bytes(data)
    data[place] ^= 1
    paths[1].write_bytes(data)
    assert open_source(paths[0]).digest != open_source(paths[1]).digest


def test_order_and_length_count(rng: np.random.Generator) -> None:
    data = content(rng)
    turned = data[SHARE : 2 * SHARE] + data[:SHARE] + data[2 * SHARE :]
    assert len({open_source(d).digest for d in (data, turned, data[:-1], data + b"\0", data[:SHARE])}) == 5


def test_what_cannot_be_read_is_no_model_that_is_known(tmp_path: Path) -> None:
    empty = tmp_path / "empty.onnx"
    empty.touch()
    assert {open_source(s).digest for s in (empty, b"", tmp_path, tmp_path / "missing.onnx")} == {""}
